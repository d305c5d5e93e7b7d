"""More ranks than this machine can hold: refused before one starts, with the number that fits."""

from collections.abc import Callable
from pathlib import Path

import pytest

from common import cli
from common.errors import InputError
from common.launch import capacity
from common.launch.capacity import RANK_BYTES, refuse_more_than_fit
from tests.helpers.commands import Recipe

KIB_PER_RANK = RANK_BYTES // 2**10


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A machine with the memory of 9 ranks, whose files a test adds to."""

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")

    memory = f"MemFree: 1 kB\nMemAvailable: {7 * KIB_PER_RANK} kB\nSwapFree: {2 * KIB_PER_RANK} kB"
    write("proc/meminfo", memory)
    write("proc/self/cgroup", "7:cpu,memory:/job/step\n0::/job/step")
    monkeypatch.setattr(capacity, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(capacity, "_CGROUPS", tmp_path / "cgroup")
    return write


def test_free_memory_decides_how_many_fit(machine: Callable[[str, str], None]) -> None:
    machine("cgroup/job/step/memory.max", "max")
    refuse_more_than_fit(9)
    with pytest.raises(InputError, match=r"^10 processes do not fit .*: start 9 or fewer$"):
        refuse_more_than_fit(10)


@pytest.mark.parametrize(
    "name", ["job/memory.max", "memory.max", "memory/job/step/memory.limit_in_bytes"]
)
def test_a_containers_memory_decides_too(machine: Callable[[str, str], None], name: str) -> None:
    machine(f"cgroup/{name}", str(2 * RANK_BYTES))
    refuse_more_than_fit(4)  # two of them in the swap
    with pytest.raises(InputError, match=r"896 MiB of memory are free, .*: start 4 or fewer"):
        refuse_more_than_fit(5)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("proc/none", None),
        ("cgroup/job/memory.max", RANK_BYTES),
        ("cgroup/memory/job/step/memory.limit_in_bytes", RANK_BYTES),
    ],
)
def test_memory_that_a_container_or_job_may_use(
    machine: Callable[[str, str], None], name: str, limit: int | None
) -> None:
    machine("proc/meminfo", f"MemTotal: {10 * KIB_PER_RANK} kB\nMemAvailable: 1 kB")
    machine(name, str(RANK_BYTES))
    assert capacity.memory_limit() == limit


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
    assert "error: 100000 processes do not fit here: " in capsys.readouterr().err


def test_check_says_how_many_fit(recipe: Recipe) -> None:
    result = recipe.module("ddp_launch", "--nproc", "100000", "--check")
    assert (result.status, len(result.errors)) == (2, 1)
    assert result.errors[0].startswith("error: 100000 processes do not fit here: ")
