"""When and how often the launcher starts the ranks again, and on how many processes."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from common import restart
from common.errors import StopRequested
from common.group.stop import StopAgreement
from common.launch import start
from common.launch.ranks import Ranks
from common.launch.start import LaunchOptions
from common.training.evaluation import evaluate
from recipes.fsdp.parallel import InStep
from tests.helpers.commands import Recipe
from tests.helpers.machine import library
from tests.helpers.pool import Pool, in_group

_pids = count(10**6)


@pytest.fixture(autouse=True)
def own_record(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test is a launcher of its own, in the same process as its rank 0."""
    monkeypatch.setenv("RECIPES_REACHED", "")
    restart._file.cache_clear()
    yield
    restart._file.cache_clear()
    start.forwarded.clear()


class Starts:
    """Stands in for the ranks: each start does some steps, leaves a snapshot, and ends."""

    def __init__(
        self, folder: Path, plan: Sequence[tuple[int, int, int]], patch: pytest.MonkeyPatch
    ) -> None:
        """`plan` has for each start the steps it does, the step of its snapshot, its status."""
        self.folder, self.plan, self.patch = folder, list(plan), patch
        self.processes: list[int] = []
        self.said: list[str] = []

    def __call__(self, nproc: int) -> int:
        self.processes.append(nproc)
        steps, snapshot, status = self.plan.pop(0)
        pid = next(_pids)
        self.patch.setattr(os, "getpid", lambda: pid)
        (self.folder / "snapshots").mkdir(exist_ok=True)
        newest = max((int(p.name[5:13]) for p in self.folder.glob("snapshots/*")), default=0)
        restart.record(self.folder)
        self.said += [restart.record(self.folder, newest + n + 1, newest) for n in range(steps)]
        if snapshot:
            (self.folder / "snapshots" / f"step_{snapshot:08d}.pt").touch()
        self.patch.undo()
        return status


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., tuple[int, Starts]]:
    def run(restarts: int, *plan: tuple[int, int, int], shrink: bool = False) -> tuple[int, Starts]:
        with pytest.MonkeyPatch.context() as patch:
            starts = Starts(tmp_path, plan, patch)
            options = LaunchOptions(restarts=restarts, shrink=shrink)
            return restart.with_restarts(starts, 4, options), starts

    return run


Play = Callable[..., tuple[int, Starts]]


def test_a_first_start_that_resumed_and_made_no_step_lost_none(play: Play, tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "step_00000056.pt").touch()
    _, starts = play(3, (0, 0, 1), (2, 0, 0))
    (said,) = filter(None, starts.said)
    assert said.endswith("steps done again: 0, now at step 57")


def test_a_failure_is_followed_by_a_start_from_the_newest_snapshot(
    play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    status, starts = play(3, (7, 4, 1), (5, 8, 1), (6, 0, 0))
    assert (status, starts.processes) == (0, [4, 4, 4])
    costs = [said.split(" s, ")[1] for said in starts.said if said]
    assert costs == ["steps done again: 3, now at step 5", "steps done again: 1, now at step 9"]
    assert capsys.readouterr().err.splitlines() == [
        "restart 1 of 3: newest snapshot step_00000004.pt, on 4 processes",
        "restart 2 of 3: newest snapshot step_00000008.pt, on 4 processes",
    ]


@pytest.mark.parametrize("status", [2, 75, 130])
def test_bad_input_and_a_request_to_stop_are_no_failures(play: Play, status: int) -> None:
    assert play(3, (7, 4, status))[1].processes == [4]
    start.forwarded.add(15)  # a rank fails after a stop signal came
    assert play(3, (7, 4, 1))[0] == 75


def test_no_third_restart_from_one_snapshot(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    status, starts = play(9, (7, 4, 1), (3, 0, 1), (3, 0, 1))
    assert (status, len(starts.processes)) == (1, 3)
    assert capsys.readouterr().err.splitlines()[-1] == (
        "not restarted: two restarts have failed (newest snapshot step_00000004.pt, on 4 processes)"
    )
    status, starts = play(2, (7, 8, 1), (3, 12, 1), (3, 16, 1))
    assert (status, len(starts.processes)) == (1, 3)
    assert "not restarted: --restarts 2 is used up" in capsys.readouterr().err


def test_fewer_processes_after_a_restart_without_a_step_and_all_at_the_next(play: Play) -> None:
    nothing = (0, 0, 1)
    plan = [(7, 4, 1), nothing, (5, 8, 1), nothing, nothing, (5, 12, 1), (9, 0, 0)]
    status, starts = play(9, *plan, shrink=True)
    assert (status, starts.processes) == (0, [4, 4, 2, 4, 2, 1, 4])


@pytest.mark.parametrize(("shrink", "processes"), [(True, [4, 3, 3]), (False, [4, 4, 4])])
def test_a_gpu_that_is_lost_is_a_failure_and_the_others_go_on(
    play: Play, monkeypatch: pytest.MonkeyPatch, processes: list[int], *, shrink: bool
) -> None:
    """The ranks that see too few devices end with status 2."""
    monkeypatch.setattr(restart, "usable_gpus", lambda: 4)
    monkeypatch.setattr(restart, "usable_gpus_now", lambda: 3)
    status, starts = play(3, (7, 4, 1), (2, 6, 2), (9, 0, 0), shrink=shrink)
    assert (status, starts.processes) == (0, processes)


DRIVER = """
#include <unistd.h>
static int gpus;
int cuInit(unsigned flags) { if (!gpus) gpus = access("lost", F_OK) ? 4 : 3; return 0; }
int cuDeviceGetCount(int *count) { *count = gpus; return 0; }
"""
"""As NVIDIA's driver, it looks for GPUs once per process; the file `lost` takes one away."""

LOSE_A_GPU = """
from pathlib import Path
from common.launch.start import usable_gpus
from common.restart import usable_gpus_now
print(usable_gpus())
Path("lost").touch()
print(usable_gpus(), usable_gpus_now())
"""


def test_gpus_that_are_left_are_counted_by_a_new_process(recipe: Recipe) -> None:
    driver = library(recipe.tmp_path / "driver", "libcuda.so.1", DRIVER)
    env = {"LD_LIBRARY_PATH": str(driver), "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    process = recipe.start(sys.executable, "-c", LOSE_A_GPU, env=env)
    assert recipe.finish(process, recipe.tmp_path).assert_ok().stdout.split() == ["4", "4", "3"]


def test_without_restarts_nothing_is_recorded(tmp_path: Path) -> None:
    assert restart.record(tmp_path, 1) == ""
    assert restart.reached() == restart.Reached()


# A request to stop, during an evaluation


Wrap = Callable[[list[torch.Tensor]], Any]


def in_step(batches: list[Any]) -> InStep:
    """Of fsdp, whose ranks without more batches take part in what the others gather."""
    return InStep(batches, 10, torch.nn.Linear(1, 1))


def stopped_in(ranks: Ranks, own: int, asked_at: int, wrap: Wrap = list) -> tuple[int, str]:
    """How many of its `own` batches this rank evaluated; rank 1 is asked to stop at one of them."""
    done = 0
    stop = StopAgreement(interval_s=0)

    def score(_model: torch.nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal done
        done += 1
        if ranks.rank == 1 and done == asked_at:
            stop.came.append(15)
        return {"loss": batch}

    own += ranks.rank == 0
    try:
        batches = wrap([torch.ones(2)] * own)
        evaluate(torch.nn.Identity(), batches, 2 * (2 * own + 1), score=score)
    except StopRequested:
        return done, "left"
    except ValueError:  # of the sum over ranks, which this test does not know
        return done, "finished"
    finally:
        stop.release()
    return done, "finished"


def test_all_ranks_leave_an_evaluation_after_the_same_batch(pool: Pool) -> None:
    """Rank 0 has one batch more than the others."""
    assert pool.run(in_group, 3, stopped_in, 9, 4) == [(4, "left")] * 3
    assert pool.run(in_group, 3, stopped_in, 9, 4, in_step) == [(4, "left")] * 3
    # After the last batch that all have, the evaluation is nearly done: it is finished.
    assert {how for _, how in pool.run(in_group, 3, stopped_in, 9, 9)} == {"finished"}
    assert {how for _, how in pool.run(in_group, 3, stopped_in, 9, 99)} == {"finished"}
