"""Who am I? The rank, the world and its address from whatever launcher started this process."""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import InputError

# Slurm gives its batch and interactive shells these step ids: neither is a task.
_NO_TASK_STEPS = {"4294967290", "4294967291", "batch", "interactive", "extern"}

# What a launcher gives its ranks beside RANK and WORLD_SIZE, and a shell that exports these two
# does not have.
_OF_A_LAUNCHER = (
    "TORCHELASTIC_RUN_ID",
    "GROUP_RANK",
    "RECIPES_ERRORS",
    "OMPI_COMM_WORLD_RANK",
    "MPI_LOCALRANKID",
)


@dataclass(frozen=True)
class Ranks:
    """This process's place among all processes of the run."""

    rank: int = 0
    """This process among all, 0 to world_size - 1."""
    local_rank: int = 0
    """This process among those of its host, 0 to local_world_size - 1. Chooses the device."""
    world_size: int = 1
    """Processes of the run over all hosts."""
    local_world_size: int = 1
    """Processes of the run on this host."""
    launcher: str = "none"
    """Who started this process: none, recipes, spawn, torchrun, slurm, openmpi or pmi."""
    master_addr: str = "127.0.0.1"
    """Host name or address of rank 0."""
    master_port: int = 0
    """TCP port of rank 0's store; 0 where the run is one process and needs none."""
    agent_store: bool = False
    """The launcher itself serves the store (torchrun): no rank may start another."""
    session: str = "0"
    """What the ranks of one start have in common, and those of no other run or restart: keys in a
    store begin with it, so that neither what was left there nor a stranger is taken for a peer."""
    listen_fd: int | None = None
    """A listening socket that the launcher bound for rank 0, so that no port is lost in between."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            InputError: a rank outside its world.
        """
        for name, value, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= value < size:
                raise InputError(
                    f"{self.launcher} gave {name} {value} in a world of {size}: "
                    f"it must lie in 0..{size - 1}. Check the launcher's environment variables."
                )
        if self.local_world_size > self.world_size:
            raise InputError(
                f"{self.launcher} gave {self.local_world_size} processes on this host in a world "
                f"of {self.world_size}"
            )

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and talks to the person."""
        return self.rank == 0

    @property
    def several_hosts(self) -> bool:
        """Whether some ranks of the run are on other hosts."""
        return self.local_world_size < self.world_size


def resolve(env: Mapping[str, str] | None = None, local_rank_argument: int | None = None) -> Ranks:
    """Read this process's ranks from the environment that its launcher set.

    The nearest launcher wins: torchrun inside a Slurm allocation is torchrun, mpirun inside one is
    mpirun. SLURM_JOB_ID alone means nothing (a shell in an allocation has it too): a Slurm task is
    one that has a step id and no terminal. MASTER_ADDR and MASTER_PORT given by the user always
    win; RANK and WORLD_SIZE that no launcher set must say what Slurm says.

    Args:
        env: environment variables, `os.environ` by default.
        local_rank_argument: the `--local-rank` that torch.distributed.launch passes.

    Returns:
        The ranks; a world of one process where there is no launcher.

    Raises:
        InputError: variables that are missing, no numbers, or contradict each other.

    Sources: PyTorch "torchrun (Elastic Launch)", Environment Variables; Slurm's srun manual,
    OUTPUT ENVIRONMENT VARIABLES; Open MPI FAQ, "environment variables that Open MPI sets".
    """
    env = os.environ if env is None else env
    task = _is_slurm_task(env)
    if task and not any(name in env for name in _OF_A_LAUNCHER):
        _refuse_leftovers(env)
    elif "RANK" in env or "WORLD_SIZE" in env:
        return _from_torchrun(env, local_rank_argument)
    if "OMPI_COMM_WORLD_RANK" in env:
        return _from_mpi(env, "openmpi", "OMPI_COMM_WORLD_{}", "OMPI_MCA_ess_base_jobid")
    if "PMI_RANK" in env and "MPI_LOCALRANKID" in env:
        return _from_mpi(env, "pmi", "PMI_{}", "PMI_ID")
    return _from_slurm(env) if task else Ranks()


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    """Whether Slurm started this process as a task, and no person did in a shell of a step.

    Slurm's variables alone do not tell: all that a shell of a step starts inherits them, even a
    job submitted there or a terminal that outlives the step. But srun gives a terminal to the first
    task under --pty and to no other.
    """
    if "SLURM_PROCID" not in env or env.get("SLURM_STEP_ID", "batch") in _NO_TASK_STEPS:
        return False
    first_of_several = "SLURM_PTY_PORT" in env and env.get("SLURM_STEP_NUM_TASKS") != "1"
    return first_of_several or not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _refuse_leftovers(env: Mapping[str, str]) -> None:
    """Refuse RANK and WORLD_SIZE that were exported before srun, for every task alike.

    Raises:
        InputError: one of them is not what Slurm says of this task.
    """
    slurm = _from_slurm(env)
    expected = {"RANK": str(slurm.rank), "WORLD_SIZE": str(slurm.world_size)}
    given = {name: env[name] for name in expected if name in env}
    if any(value != expected[name] for name, value in given.items()):
        raise InputError(
            f"{' '.join(f'{name}={value}' for name, value in given.items())} in the environment, "
            f"but Slurm started this as task {slurm.rank} of {slurm.world_size}: unset "
            f"{' '.join(given)} before sbatch or srun, or start the ranks with torchrun"
        )


def _number(env: Mapping[str, str], name: str, launcher: str) -> int:
    try:
        return int(env[name])
    except KeyError:
        raise InputError(f"{launcher} set no {name}, without which ranks are unknown") from None
    except ValueError:
        raise InputError(f"{name} must be a whole number, got {env[name]!r}") from None


def _from_torchrun(env: Mapping[str, str], local_rank_argument: int | None) -> Ranks:
    launcher = "recipes" if "RECIPES_ERRORS" in env else "torchrun"
    world_size = _number(env, "WORLD_SIZE", launcher)
    rank = _number(env, "RANK", launcher)
    if "LOCAL_RANK" in env:
        local_rank = _number(env, "LOCAL_RANK", launcher)
        if local_rank_argument not in (None, local_rank):
            raise InputError(f"--local-rank {local_rank_argument} contradicts {local_rank=}")
    elif local_rank_argument is not None:
        local_rank = local_rank_argument
    elif world_size == 1:
        local_rank = 0
    else:
        raise InputError(
            "RANK and WORLD_SIZE are set but LOCAL_RANK is not, which chooses the device: "
            "set it to this process's number on its host"
        )
    # Without LOCAL_WORLD_SIZE nobody knows how many processes share this host; all of them is the
    # reading that assumes least where the address is checked, and it is what one host has.
    local_world_size = world_size
    if "LOCAL_WORLD_SIZE" in env:
        local_world_size = _number(env, "LOCAL_WORLD_SIZE", launcher)
    fd = env.get("RECIPES_LISTEN_FD")
    agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Ranks(
        rank,
        local_rank,
        world_size,
        local_world_size,
        launcher,
        env.get("MASTER_ADDR", "127.0.0.1"),
        _port(env, launcher, world_size),
        agent_store,
        # As torch's env:// does. A store of the ranks' own is new with every restart, and agents
        # that were told of a failure elsewhere count fewer restarts than those that saw it.
        env.get("TORCHELASTIC_RESTART_COUNT", "0") if agent_store else "0",
        int(fd) if fd is not None and rank == 0 else None,
    )


def _from_mpi(env: Mapping[str, str], launcher: str, prefix: str, job_id: str) -> Ranks:
    local_rank, local_size = (
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
        if launcher == "openmpi"
        else ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    )
    world_size = _number(env, prefix.format("SIZE"), launcher)
    local_world_size = _number(env, local_size, launcher)
    if local_world_size < world_size and "MASTER_ADDR" not in env:
        raise InputError(
            "mpirun over several hosts does not tell rank 0's address: "
            "add -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500"
        )
    job = env.get(job_id) or env.get("PMIX_NAMESPACE")
    return Ranks(
        _number(env, prefix.format("RANK"), launcher),
        _number(env, local_rank, launcher),
        world_size,
        local_world_size,
        launcher,
        env.get("MASTER_ADDR", "127.0.0.1"),
        _port(env, launcher, world_size, zlib.crc32(job.encode()) if job else None),
    )


def _from_slurm(env: Mapping[str, str]) -> Ranks:
    # A step can be smaller than its job, and then the job's own variables still hold the job's
    # sizes: only the STEP's are this run's.
    per_node = expand_tasks_per_node(
        env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
    )
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"):
        if name in env:
            world_size = _number(env, name, "slurm")
            break
    else:
        world_size = sum(per_node)
    if world_size == 0:
        raise InputError(
            "Slurm set neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS: start the tasks with srun"
        )
    node_rank = _number(env, "SLURM_NODEID", "slurm")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    rank = _number(env, "SLURM_PROCID", "slurm")
    if "MASTER_ADDR" not in env and not nodes:
        raise InputError("Slurm set no SLURM_STEP_NODELIST: give MASTER_ADDR yourself")
    if "MASTER_ADDR" not in env and rank == 0 and node_rank != 0:
        here = os.uname().nodename
        raise InputError(
            f"rank 0 is on {here}, but the other ranks look for it on {first_host(nodes)}, the "
            "first host of SLURM_STEP_NODELIST: leave out --distribution=arbitrary, or export "
            f"MASTER_ADDR={here} before the job"
        )
    job, step, restart = (
        _number(env, name, "slurm") if name in env else 0
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    )
    return Ranks(
        rank,
        _number(env, "SLURM_LOCALID", "slurm"),
        world_size,
        per_node[node_rank] if node_rank < len(per_node) else world_size,
        "slurm",
        env.get("MASTER_ADDR") or first_host(nodes),
        # Jobs that run at one time have ids close together, array tasks too: none of a few
        # thousand neighbours shares a port, where a hash would let some two of them meet.
        _port(env, "slurm", world_size, job + 2003 * step + 503 * restart),
        session=f"{job}.{step}.{restart}",
    )


def _port(env: Mapping[str, str], launcher: str, world_size: int, number: int | None = None) -> int:
    """The user's port, else the one Slurm reserved for the step, else one from the job's number.

    A derived port lies in 15000..28999, below torchrun's 29500 and the range the kernel hands out
    by itself. Rank 0 checks it by binding.
    """
    if env.get("MASTER_PORT"):
        port = _number(env, "MASTER_PORT", launcher)
        if not 0 < port < 2**16:
            raise InputError(f"MASTER_PORT must lie in 1..65535, got {port}")
        return port
    if reserved := re.match(r"\d+", env.get("SLURM_STEP_RESV_PORTS", "")):
        return int(reserved[0])
    if number is not None:
        return 15000 + number % 14000
    if world_size == 1:
        return 0
    raise InputError(f"{launcher} set no MASTER_PORT: set it to a free port of rank 0's host")


def expand_tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's `2(x3),1` to `[2, 2, 2, 1]`, tasks by node."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list, where rank 0 runs: `gpu[07-12,20],x` gives `gpu07`.

    In the list's own order, which is Slurm's order of node ids.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if not first:
        raise InputError(f"Slurm's node list {nodes!r} names no host")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])
