"""Every row of the rank resolver's table, from environments as the launchers set them."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InputError
from common.group.devices import choose_backend, choose_device
from common.launch.ranks import Ranks, expand_tasks_per_node, first_host, resolve

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
}
# What a task of `srun -N2 --ntasks-per-node=2` has, seen on Slurm 22.05.
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS_PER_NODE": "2",
}
# The shell of an sbatch script: SLURM_PROCID is there, but no step.
BATCH_SHELL = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1623261185",
}


def numbers(ranks: Ranks) -> tuple[int, int, int, int]:
    return ranks.rank, ranks.local_rank, ranks.world_size, ranks.local_world_size


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {k: v for k, v in env.items() if k not in names}


def test_nothing_at_all_is_a_world_of_one() -> None:
    assert resolve({}) == Ranks(0, 0, 1, 1, "none")


def test_torchrun_and_torch_distributed_launch_with_use_env() -> None:
    ranks = resolve(TORCHRUN)
    assert numbers(ranks) == (5, 1, 8, 4)
    assert (ranks.master_addr, ranks.master_port, ranks.agent_store) == ("n1", 29500, True)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a task's, wherever these tests are started."""
    monkeypatch.setattr("common.launch.ranks._has_terminal", lambda: False)


def test_a_shell_in_a_step_is_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by its terminal: its variables reach jobs that are submitted there, too."""
    one = {
        **SLURM,
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NODELIST": "gpu07",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    }
    for env in (one, {**one, "SLURM_PTY_PORT": "43211"}):
        assert resolve(env).launcher == "slurm"
    monkeypatch.setattr("common.launch.ranks._has_terminal", lambda: True)
    for env in (one, {**one, "SLURM_PTY_PORT": "43211"}, SLURM):
        assert resolve(env) == Ranks()
    assert numbers(resolve({**SLURM, "SLURM_PTY_PORT": "43211"})) == (3, 1, 4, 2)  # srun --pty -n4


@pytest.mark.parametrize(
    ("left", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK=0 WORLD_SIZE=1 in the environment"),
        ({"WORLD_SIZE": "1"}, "unset WORLD_SIZE before"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "task 3 of 4"),
        ({**without(TORCHRUN, "TORCHELASTIC_RUN_ID")}, "RANK=5 WORLD_SIZE=8"),
    ],
)
def test_ranks_that_a_shell_left_contradict_slurm(left: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        resolve({**SLURM, **left})


def test_ranks_exported_from_slurms_own_are_fine() -> None:
    by_hand = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "4711",
    }
    assert numbers(resolve({**SLURM, **by_hand})) == (3, 1, 4, 2)
    assert resolve({**SLURM, **by_hand}).master_port == 4711
    mpi = {**OPENMPI, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "4711"}
    assert resolve({**SLURM, **mpi}).world_size == 2  # mpirun in an allocation


def test_rank_0_must_be_where_the_others_look_for_it() -> None:
    elsewhere = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    with pytest.raises(InputError, match="gpu07, the first host of SLURM_STEP_NODELIST"):
        resolve(elsewhere)
    assert resolve({**elsewhere, "MASTER_ADDR": "gpu08"}).rank == 0


def test_srun_one_task_a_gpu() -> None:
    ranks = resolve(SLURM)
    assert numbers(ranks) == (3, 1, 4, 2)
    assert (ranks.master_addr, ranks.launcher) == ("gpu07", "slurm")


def test_srun_of_a_step_smaller_than_the_allocation_trusts_the_step() -> None:
    step = {
        **SLURM,
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_STEP_NODELIST": "gpu08",
    }
    ranks = resolve(step)
    assert numbers(ranks) == (0, 0, 1, 1)
    assert ranks.master_addr == "gpu08"


def test_torchrun_inside_an_allocation_is_torchrun() -> None:
    assert resolve({**BATCH_SHELL, **TORCHRUN}).launcher == "torchrun"
    assert resolve({**SLURM, **TORCHRUN}).launcher == "torchrun"


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"])
def test_a_shell_of_the_job_is_no_task(step: str | None) -> None:
    env = BATCH_SHELL if step is None else {**BATCH_SHELL, "SLURM_STEP_ID": step}
    assert resolve(env) == Ranks()


def test_jobs_array_tasks_steps_and_restarts_have_ports_of_their_own() -> None:
    """Not only probably: no two of what can run side by side on one node."""
    ports = [
        resolve(
            {
                **SLURM,
                "SLURM_JOB_ID": str(job),
                "SLURM_STEP_ID": str(step),
                "SLURM_RESTART_COUNT": str(restart),
            }
        ).master_port
        for job in range(14_900, 15_400)
        for step in range(3)
        for restart in range(3)
    ]
    assert len(set(ports)) == len(ports)
    assert all(15000 <= port < 30000 for port in ports)


def test_restarts_are_counted_only_where_the_agents_store_outlives_them() -> None:
    again = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert resolve(again).session != resolve(TORCHRUN).session
    own = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert resolve({**again, **own}).session == resolve({**TORCHRUN, **own}).session


def test_a_session_is_of_one_start_of_one_step() -> None:
    again = {**SLURM, "SLURM_RESTART_COUNT": "1"}
    other = {**SLURM, "SLURM_STEP_ID": "1"}
    assert len({resolve(env).session for env in (SLURM, again, other)}) == 3
    assert resolve({**SLURM, "SLURM_PROCID": "2"}).session == resolve(SLURM).session


def test_the_steps_reserved_port_and_the_users_win() -> None:
    reserved = {**SLURM, "SLURM_STEP_RESV_PORTS": "12007-12008"}
    assert resolve(reserved).master_port == 12007
    given = {**reserved, "MASTER_ADDR": "head", "MASTER_PORT": "4711"}
    assert (resolve(given).master_addr, resolve(given).master_port) == ("head", 4711)


def test_slurm_ntasks_missing() -> None:
    bare = without(SLURM, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")
    assert numbers(resolve(bare)) == (3, 1, 4, 2)
    with pytest.raises(InputError, match="SLURM_NTASKS"):
        resolve(without(bare, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))


def test_uneven_nodes() -> None:
    env = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}
    assert numbers(resolve(env)) == (3, 0, 4, 1)


def test_mpirun_on_one_host_and_on_several() -> None:
    ranks = resolve(OPENMPI)
    assert numbers(ranks) == (1, 1, 2, 2)
    assert ranks.master_addr == "127.0.0.1"
    assert ranks.master_port == resolve({**OPENMPI, "OMPI_COMM_WORLD_RANK": "0"}).master_port
    several = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(InputError, match="MASTER_ADDR"):
        resolve(several)
    assert resolve({**several, "MASTER_ADDR": "n1"}).master_addr == "n1"
    assert resolve({**SLURM, **OPENMPI}).launcher == "openmpi"  # mpirun inside an allocation


def test_pmi() -> None:
    hydra = {
        "PMI_RANK": "1",
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "2",
        "MASTER_PORT": "29400",
    }
    assert numbers(resolve(hydra)) == (1, 1, 2, 2)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({**TORCHRUN, "RANK": "8"}, "0..7"),
        ({**TORCHRUN, "RANK": "-1"}, "0..7"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "0..3"),
        ({**TORCHRUN, "RANK": "five"}, "whole number"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT"),
        (without(SLURM, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "NODELIST"),
        (without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID"),
    ],
)
def test_contradictions_are_clear_errors(env: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        resolve(env)


@pytest.mark.parametrize(("name", "missing"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_a_variable_left_in_the_shell_is_named(name: str, missing: str) -> None:
    """And no torchrun, which is not there; unless it is."""
    left = {name: "1", "MASTER_ADDR": "n1"}
    says = rf"{name}=1 is set in the environment, {missing} is not, .*: unset {name}, or start"
    with pytest.raises(InputError, match=says):
        resolve(left)
    with pytest.raises(InputError, match=f"torchrun did not set {missing}"):
        resolve({**left, "TORCHELASTIC_RUN_ID": "x"})
    with pytest.raises(InputError, match="or unset RANK WORLD_SIZE"):
        resolve({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.fixture
def see_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let torch see so many GPUs."""

    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        if count:
            monkeypatch.setattr(torch.cuda, "init", lambda: None)

    return see


def test_a_device_is_chosen_by_local_rank_on_every_node(see_gpus: Callable[[int], None]) -> None:
    see_gpus(4)
    for rank in range(8):
        env = {**TORCHRUN, "RANK": str(rank), "LOCAL_RANK": str(rank % 4)}
        assert choose_device("auto", resolve(env)).index == rank % 4


def test_a_task_that_sees_one_gpu_takes_device_0(see_gpus: Callable[[int], None]) -> None:
    see_gpus(1)
    assert choose_device("cuda", resolve(SLURM)).index == 0


def test_devices_that_are_not_there(see_gpus: Callable[[int], None]) -> None:
    see_gpus(0)
    with pytest.raises(InputError, match="sees no GPU"):
        choose_device("cuda", Ranks())
    assert choose_device("auto", Ranks()).type == "cpu"
    see_gpus(2)
    with pytest.raises(InputError, match="4 processes on this host but 2 GPUs"):
        choose_device("cuda", Ranks(3, 3, 4, 4))
    cpu = choose_device("cpu", Ranks())
    with pytest.raises(InputError, match="nccl needs GPUs"):
        choose_backend("nccl", cpu)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("gpu[07-12,20],login", "gpu07"),
        ("b-2,a-1", "b-2"),
        ("rack[3-4]node[001-016]", "rack3node001"),
        ("node[9,1-3].cluster", "node9.cluster"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_tasks_per_node_expands_what_slurm_compresses(counts: list[int]) -> None:
    parts, rest = [], counts
    while rest:
        run = next((i for i, c in enumerate(rest) if c != rest[0]), len(rest))
        parts.append(f"{rest[0]}(x{run})" if run > 1 else str(rest[0]))
        rest = rest[run:]
    assert expand_tasks_per_node(",".join(parts)) == counts
