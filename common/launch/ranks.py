"""Who am I? The rank, the world and its address, from any launcher's environment variables."""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import InputError

# Slurm's step ids of batch and interactive shells, which are not tasks.
_NO_TASK_STEPS = {"4294967290", "4294967291", "batch", "interactive", "extern"}

# Launchers set one of these beside RANK and WORLD_SIZE; a shell that exports the two does not.
_OF_A_LAUNCHER = {
    "TORCHELASTIC_RUN_ID",
    "GROUP_RANK",
    "RECIPES_ERRORS",
    "OMPI_COMM_WORLD_RANK",
    "MPI_LOCALRANKID",
}

_MPI = {
    "openmpi": (
        *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")),
        "OMPI_MCA_ess_base_jobid",
    ),
    "pmi": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS", "PMI_ID"),
}
"""Launcher to its variables: rank, local rank, world size, local world size, job."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among all processes of the run."""

    rank: int = 0
    """Number among all processes, 0 to world_size - 1."""
    local_rank: int = 0
    """Number on this host, 0 to local_world_size - 1. Chooses the device."""
    world_size: int = 1
    """Processes of the run on all hosts."""
    local_world_size: int = 1
    """Processes of the run on this host."""
    launcher: str = "none"
    """Who started this process: none, recipes, spawn, torchrun, slurm, openmpi or pmi."""
    master_addr: str = "127.0.0.1"
    """Host name or address of rank 0."""
    master_port: int = 0
    """TCP port of rank 0's store; 0 for a run of one process, which needs none."""
    agent_store: bool = False
    """The launcher serves the store (torchrun): no rank may start another."""
    session: str = "0"
    """Prefix of the keys in a store, the same on all ranks of one start only: what an earlier
    start or another run left in the store is ignored."""
    listen_fd: int | None = None
    """Rank 0's listening socket, if the launcher has bound it."""

    def __post_init__(self) -> None:
        for name, value, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= value < size:
                raise InputError(
                    f"{self.launcher} gave {name} {value} in a world of {size}: "
                    f"it must lie in 0..{size - 1}. Check the launcher's environment variables."
                )

    @property
    def share(self) -> tuple[int, int]:
        """The number of this rank's share of each batch, and of shares."""
        return self.rank, self.world_size

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and talks to the person."""
        return self.rank == 0

    @property
    def several_hosts(self) -> bool:
        """Whether some ranks of the run are on other hosts."""
        return self.local_world_size < self.world_size


def resolve(env: Mapping[str, str] | None = None) -> Ranks:
    """Read this process's ranks from the environment variables that its launcher set.

    The innermost launcher wins: torchrun or mpirun inside a Slurm job. MASTER_ADDR and MASTER_PORT
    from the user always win. RANK and WORLD_SIZE that no launcher set must agree with Slurm's.

    Without a launcher, this process is a world of one.

    Raises:
        InputError: variables that are missing, not numbers, or contradict each other.

    Sources: PyTorch "torchrun (Elastic Launch)", Environment Variables; Slurm's srun manual,
    OUTPUT ENVIRONMENT VARIABLES; Open MPI FAQ, "environment variables that Open MPI sets".
    """
    env = os.environ if env is None else env
    task = _is_slurm_task(env)
    if task and not _OF_A_LAUNCHER & set(env):
        ranks = _from_slurm(env)
        _refuse_leftovers(env, ranks)
        return ranks
    if "RANK" in env or "WORLD_SIZE" in env:
        return _from_torchrun(env)
    for launcher, (rank, local_rank, *_) in _MPI.items():
        if rank in env and local_rank in env:
            return _from_mpi(env, launcher)
    if task:
        return _from_slurm(env)
    if "SLURM_PROCID" not in env and env.get("PMI_SIZE") != "1":  # else a shell in a Slurm step
        for name in {"PMI_RANK", "PMIX_RANK"} & set(env):
            raise InputError(
                f"{name}={env[name]} says that this is one of several processes, but not which one "
                "on its host: set RANK, LOCAL_RANK and WORLD_SIZE, or use Open MPI or MPICH"
            )
    return Ranks()


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    """Whether Slurm started this process as a task: it has a step id and no terminal.

    Slurm's variables alone do not tell: every process that is started from a shell in a step
    inherits them. With --pty, srun gives a terminal to the first task only.
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


def _refuse_leftovers(env: Mapping[str, str], ranks: Ranks) -> None:
    """Raise InputError if RANK or WORLD_SIZE, exported before srun, is not what Slurm says."""
    expected = {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.world_size)}
    given = {name: env[name] for name in expected if name in env}
    if not given.items() <= expected.items():
        raise InputError(
            f"{' '.join(f'{name}={value}' for name, value in given.items())} in the environment, "
            f"but Slurm started this as task {ranks.rank} of {ranks.world_size}: unset "
            f"{' '.join(given)} before sbatch or srun, or start the ranks with torchrun"
        )


def _refuse_a_part(env: Mapping[str, str]) -> None:
    """Raise InputError if RANK or WORLD_SIZE is set, and neither the other one nor a launcher."""
    both = ("RANK", "WORLD_SIZE")
    found, missing = ([name for name in both if (name in env) is there] for there in (True, False))
    if missing and not _OF_A_LAUNCHER & set(env):
        raise InputError(
            f"{found[0]}={env[found[0]]} is set in the environment, {missing[0]} is not, and no "
            f"launcher started this process: unset {found[0]}, or start the ranks with torchrun"
        )


def _number(env: Mapping[str, str], name: str, launcher: str) -> int:
    try:
        return int(env[name])
    except KeyError:
        raise InputError(f"{launcher} did not set {name}: this process has no rank") from None
    except ValueError:
        raise InputError(f"{name} must be a whole number, got {env[name]!r}") from None


def _from_torchrun(env: Mapping[str, str]) -> Ranks:
    launcher = "recipes" if "RECIPES_ERRORS" in env else "torchrun"
    _refuse_a_part(env)
    world_size = _number(env, "WORLD_SIZE", launcher)
    rank = _number(env, "RANK", launcher)
    if "LOCAL_RANK" not in env and world_size > 1:
        raise InputError(
            "RANK and WORLD_SIZE are set, but LOCAL_RANK is not, which chooses the device: "
            "set it to this process's number on its host; or unset RANK WORLD_SIZE, if they are "
            "left from another run"
        )
    # Without LOCAL_WORLD_SIZE, assume that all ranks are on this host.
    local_size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in env else "WORLD_SIZE"
    agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listen_fd = env.get("RECIPES_LISTEN_FD") if rank == 0 else None
    return Ranks(
        rank,
        _number(env, "LOCAL_RANK", launcher) if "LOCAL_RANK" in env else 0,
        world_size,
        _number(env, local_size, launcher),
        launcher,
        env.get("MASTER_ADDR", "127.0.0.1"),
        _port(env, launcher, world_size),
        agent_store,
        # As in torch's env://. A store that the ranks serve is new after a restart, and agents on
        # several hosts count different numbers of restarts.
        session=env.get("TORCHELASTIC_RESTART_COUNT", "0") if agent_store else "0",
        listen_fd=int(listen_fd) if listen_fd else None,
    )


def _from_mpi(env: Mapping[str, str], launcher: str) -> Ranks:
    *names, job_id = _MPI[launcher]
    rank, local_rank, world_size, local_world_size = (_number(env, n, launcher) for n in names)
    if local_world_size < world_size and "MASTER_ADDR" not in env:
        raise InputError(
            "mpirun on several hosts does not pass on rank 0's address: "
            "add -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500"
        )
    job = env.get(job_id) or env.get("PMIX_NAMESPACE")
    return Ranks(
        rank,
        local_rank,
        world_size,
        local_world_size,
        launcher,
        env.get("MASTER_ADDR", "127.0.0.1"),
        _port(env, launcher, world_size, zlib.crc32(job.encode()) if job else None),
    )


def _from_slurm(env: Mapping[str, str]) -> Ranks:
    # A step can be smaller than its job: the STEP variables come first.
    per_node = expand_tasks_per_node(
        env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
    )
    sizes = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    given = next((name for name in sizes if name in env), None)
    world_size = _number(env, given, "slurm") if given else sum(per_node)
    if world_size == 0:
        raise InputError(
            "Slurm set neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS: start the tasks with srun"
        )
    rank = _number(env, "SLURM_PROCID", "slurm")
    node_rank = _number(env, "SLURM_NODEID", "slurm")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    master_addr = env.get("MASTER_ADDR")
    if master_addr is None and not nodes:
        raise InputError("Slurm set no SLURM_STEP_NODELIST: give MASTER_ADDR yourself")
    if master_addr is None and rank == 0 and node_rank != 0:
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
        master_addr or first_host(nodes),
        # Jobs that run at the same time have ids close together. These sums are different for a few
        # thousand neighbours; hashes of the ids could collide.
        _port(env, "slurm", world_size, job + 2003 * step + 503 * restart),
        session=f"{job}.{step}.{restart}",
    )


def _port(env: Mapping[str, str], launcher: str, world_size: int, number: int | None = None) -> int:
    """The user's port, else the port that Slurm reserved for the step, else one from `number`."""
    if env.get("MASTER_PORT"):
        port = _number(env, "MASTER_PORT", launcher)
        if not 0 < port < 2**16:
            raise InputError(f"MASTER_PORT must lie in 1..65535, got {port}")
        return port
    if reserved := re.match(r"\d+", env.get("SLURM_STEP_RESV_PORTS", "")):
        return int(reserved[0])
    if number is not None:  # below torchrun's 29500 and the kernel's ephemeral ports
        return 15000 + number % 14000
    if world_size == 1:
        return 0
    raise InputError(f"{launcher} did not set MASTER_PORT: set it to a free port of rank 0's host")


def expand_tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's `2(x3),1` to `[2, 2, 2, 1]`, tasks by node."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list, where rank 0 runs: `gpu[07-12,20],x` gives `gpu07`."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]  # at commas outside brackets
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
