"""Ranks that wait for one another say so, can be stopped, and find what contradicts at once."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from common.launch.port import listen
from tests.conftest import Recipe, wait_for

WAIT_S = 20
"""Generous for two process starts on a busy machine; --timeout-s is 600."""


def start_rank(
    recipe: Recipe, port: int, rank: int, world_size: int = 2
) -> "subprocess.Popen[str]":
    """One rank by hand, which waits for the others."""
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return recipe.start(*recipe.command("ddp_launch", "--epochs", "1"), env=env)


def free_port() -> int:
    with listen("127.0.0.1", 0) as probe:
        port: int = probe.getsockname()[1]
    return port


@pytest.mark.parametrize(
    ("rank", "says"),
    [
        (0, "waiting for 1 of 2 ranks at"),
        pytest.param(1, "waiting for rank 0 at", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_waits_says_so_and_can_be_stopped(recipe: Recipe, rank: int, says: str) -> None:
    process = start_rank(recipe, free_port(), rank)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith(says), line
    assert "up to 600 s" in line
    started_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert recipe.finish(process, Path()).status == 75
    assert time.monotonic() - started_s < 10


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_rank_that_waits_in_a_collective_can_be_stopped(
    recipe: Recipe, number: signal.Signals
) -> None:
    """Before training there is nothing to save, so it need not wait for the other rank."""
    port = free_port()
    first, second = (start_rank(recipe, port, rank) for rank in (0, 1))
    log = recipe.tmp_path / "run" / "logs" / "rank_1.log"
    wait_for(log.exists, every_s=0.001)
    second.send_signal(signal.SIGSTOP)
    time.sleep(1)  # for rank 0 to come to the next collective, or to its first step
    first.send_signal(number)
    assert recipe.finish(first, Path(), timeout_s=WAIT_S).status == 75
    second.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([(0, 3), (1, 3), (1, 3)], "two processes are rank 1"),
        ([(0, 2), (1, 3)], "give the same --nproc and --nnodes on every host"),
    ],
)
def test_what_contradicts_is_found_at_the_rendezvous(
    recipe: Recipe, others: list[tuple[int, int]], says: str
) -> None:
    port = free_port()
    ranks = [start_rank(recipe, port, rank, world_size) for rank, world_size in others]
    results = [recipe.finish(process, Path(), timeout_s=WAIT_S) for process in ranks]
    assert [result.status for result in results] == [2] * len(ranks), results
    errors = [line for result in results for line in result.errors]
    assert len(errors) == 1, errors
    assert says in errors[0]
