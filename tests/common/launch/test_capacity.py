"""More ranks than this machine can hold: refused before one starts, with the number that fits."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from common import cli
from common.errors import InputError
from common.launch import capacity
from common.launch.capacity import LAUNCHER_TASKS, RANK_BYTES, RANK_TASKS, refuse_more_than_fit
from tests.helpers.commands import Recipe

KIB_PER_RANK = RANK_BYTES // 2**10


def tasks(ranks: int) -> int:
    """Processes and threads that `ranks` need at least."""
    return LAUNCHER_TASKS + ranks * RANK_TASKS


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A machine with the memory of 9 ranks, whose files a test adds to; the user is not root."""

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")

    memory = f"MemFree: 1 kB\nMemAvailable: {7 * KIB_PER_RANK} kB\nSwapFree: {2 * KIB_PER_RANK} kB"
    write("proc/meminfo", memory)
    write("proc/sys/kernel/pid_max", "32768")
    write("proc/self/cgroup", "7:cpu,memory:/job/step\n4:pids:/job\n0::/job/step")
    monkeypatch.setattr(capacity, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(capacity, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(capacity, "rank_bytes", lambda: RANK_BYTES)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: no_limit)
    return write


@pytest.mark.parametrize(
    ("name", "limit", "fit", "says"),
    [
        ("proc/none", "", 9, "MiB of memory are free, and each process needs at least"),
        ("cgroup/job/step/memory.max", "max", 9, "memory are free"),
        ("cgroup/pids/job/pids.max", f"{tasks(5)}", 5, "allows 42 processes and threads"),
        ("cgroup/job/pids.max", f"{tasks(4) + 1}", 4, "each process needs at least 8"),
        ("proc/sys/kernel/threads-max", f"{tasks(6)}", 6, "kernel.threads-max allows 50"),
    ],
)
def test_the_least_limit_decides_how_many_fit(
    machine: Callable[[str, str], None], name: str, limit: str, fit: int, says: str
) -> None:
    machine(name, limit)
    refuse_more_than_fit(fit)
    with pytest.raises(InputError, match=rf"^{fit + 1} processes do not fit .*{says}") as refused:
        refuse_more_than_fit(fit + 1)
    assert str(refused.value).endswith(f"start {fit} or fewer")


@pytest.mark.parametrize(
    "name", ["job/memory.max", "memory.max", "memory/job/step/memory.limit_in_bytes"]
)
def test_ranks_that_cannot_begin_within_a_containers_memory_are_refused(
    machine: Callable[[str, str], None], name: str
) -> None:
    machine("proc/meminfo", f"MemAvailable: {9 * KIB_PER_RANK} kB")  # and no swap
    machine(f"cgroup/{name}", str(2 * RANK_BYTES))
    refuse_more_than_fit(2)
    machine(f"cgroup/{name}", str(2 * RANK_BYTES - 1))
    with pytest.raises(
        InputError,
        match=r"^this container or job may use 447 MiB, and each of 2 ranks needs about 0\.8 GB "
        "before its first batch: give it more, or start fewer ranks$",
    ):
        refuse_more_than_fit(2)
    refuse_more_than_fit(1)
    machine(f"cgroup/{name}", str(RANK_BYTES - 1))
    with pytest.raises(InputError, match=r"223 MiB, and one rank needs .* give it more$"):
        refuse_more_than_fit(1)
    machine("proc/meminfo", f"MemAvailable: {KIB_PER_RANK} kB\nSwapFree: 1 kB")
    refuse_more_than_fit(1)


@pytest.mark.parametrize(
    ("name", "env", "limit"),
    [
        ("proc/none", {}, None),
        ("cgroup/job/memory.max", {}, RANK_BYTES),
        ("cgroup/memory/job/step/memory.limit_in_bytes", {}, RANK_BYTES),
        ("proc/none", {"SLURM_MEM_PER_NODE": "0"}, None),
        ("proc/none", {"SLURM_MEM_PER_NODE": "300"}, 300 * 2**20),
        ("proc/none", {"SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "4"}, 400 * 2**20),
        ("proc/none", {"SLURM_MEM_PER_NODE": "100000"}, None),
    ],
)
def test_memory_that_a_container_or_job_may_use(
    machine: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    env: dict[str, str],
    limit: int | None,
) -> None:
    machine("proc/meminfo", f"MemTotal: {10 * KIB_PER_RANK} kB\nMemAvailable: 1 kB")
    machine(name, str(RANK_BYTES))
    for variable, value in env.items():
        monkeypatch.setenv(variable, value)
    assert capacity.memory_limit() == limit


def test_slurms_variables_refuse_nothing(
    machine: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be of another job, as in a shell of `srun --pty`."""
    machine("proc/none", "")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "10")
    refuse_more_than_fit(9)


@pytest.mark.usefixtures("machine")
def test_ulimit_u_counts_for_all_users_but_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (tasks(2), tasks(2)))
    with pytest.raises(InputError, match=r"ulimit -u allows 18 .*: start 2 or fewer"):
        refuse_more_than_fit(3)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    refuse_more_than_fit(3)


def test_one_rank_is_not_refused_for_what_others_use(machine: Callable[[str, str], None]) -> None:
    machine("proc/meminfo", "MemAvailable: 1 kB")
    refuse_more_than_fit(1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ddp_launch", ["--nproc", "100000"]),
        ("ddp_spawn", ["--nproc", "100000"]),
        ("model_parallel_toy", ["--data-parallel", "100000"]),
        ("model_parallel_toy", ["--schedule", "gpipe", "--data-parallel", "50000"]),
    ],
)
def test_no_rank_starts_where_not_all_fit(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    options: list[str],
) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)  # of this process's objects
    monkeypatch.setattr(cli, "with_restarts", lambda *_: pytest.fail("ranks were started"))
    assert cli.start(name, options) == 2
    assert "error: 100000 processes do not fit on this host: " in capsys.readouterr().err


def test_check_says_how_many_fit(recipe: Recipe) -> None:
    result = recipe.module("ddp_launch", "--nproc", "100000", "--check")
    assert (result.status, len(result.errors)) == (2, 1)
    assert result.errors[0].startswith("error: 100000 processes do not fit on this host: ")
