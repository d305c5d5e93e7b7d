"""Where the time goes: delays that are made on purpose come back as time of the right kind."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from common.data.datasets import ArraySamples
from common.launch.ranks import Ranks
from common.run import loop
from common.run.loop import Loop
from common.training.models import ConvNet
from common.watch import clock
from common.watch.advice import advice, advice_for_gpu, steps_s
from common.watch.clock import KINDS, Clock, in_words, shares
from recipes.ddp_launch import train as ddp_launch
from tests.helpers.pool import Pool, call_main
from tests.helpers.training import run_training

STEPS = 12


def test_time_is_of_one_kind_until_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, steps = 0.0, []

    def after(seconds: float, call: Callable[..., Any], *args: str) -> None:
        nonlocal now_s
        now_s += seconds
        call(*args)

    monkeypatch.setattr(clock, "perf_counter", lambda: now_s)
    ours = Clock(torch.device("cpu"))
    ours.on_step = lambda spent_s: steps.append(dict(spent_s))
    after(3, ours.end_load)
    after(4, ours.end_step)  # the first one: all of it is the start
    for step in range(2):
        after(1, ours.begin_step)
        after(2, ours.end_load)
        after(3, ours.turn_to, "communication")
        after(4, ours.end_wait)
        after(5, ours.end_wait)  # changes nothing
        with ours.communicating():
            now_s += 1
        after(6 + step, ours.end_step)
    after(1, ours.turn_to, "save")
    after(7, ours.turn_to, "evaluate")
    after(8, ours.turn_to, "other")
    now_s += 1
    expected = [7.0, 2 * 2, 2 * 3 + 2 * 11 + 1, 2 * 4 + 2 * 1, 7, 8, 1 + 1 + 1 + 1]
    assert ours.seconds().tolist() == expected
    assert ours.seconds().sum() == now_s
    assert [sorted(s for s in one.values() if s) for one in steps] == [[2, 5, 14], [2, 5, 15]]


def test_a_model_on_two_gpus_is_timed_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: at which time each GPU reaches the end of a step. CUDA compares no two GPUs."""
    gpus = [torch.device("cuda", number) for number in range(2)]
    now_s, waited, steps = dict.fromkeys(gpus, 0), set[int](), []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, gpu: torch.device) -> None:
            self.gpu, self.at_s = gpu, now_s[gpu]

        def query(self) -> bool:
            return gpus.index(self.gpu) in {0, *waited}

        def synchronize(self) -> None:
            waited.add(gpus.index(self.gpu))

        def elapsed_time(self, end: "Event") -> float:
            assert self.gpu == end.gpu
            return (end.at_s - self.at_s) * 1000

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: gpu)
    ours = Clock(*gpus)
    ours.on_step = lambda spent_s: steps.append(spent_s["compute"])
    for ends_s in ((1, 3), (4, 5), (9, 6)):
        ours.begin_step()
        now_s.update(zip(gpus, ends_s, strict=True))
        ours.end_step()
    assert not steps, "the second GPU has not come so far, and nothing waits for it"
    spent_s = dict(zip(KINDS, ours.seconds().tolist(), strict=True))
    assert {kind: s for kind, s in spent_s.items() if s} == {"start": 3, "compute": 6}
    assert steps == [2, 4]


@contextmanager
def slow(what: str, seconds: float) -> Iterator[None]:
    """A part of each step takes longer."""
    kind, name = {
        "data": (ArraySamples, "__getitems__"),
        "compute": (ConvNet, "forward"),
        "save": (os, "fsync"),
        "evaluate": (ddp_launch, "evaluate"),
    }[what]
    before = getattr(kind, name)

    def slower(*args: Any, **more: Any) -> Any:
        if threading.current_thread() is threading.main_thread():  # another one writes snapshots
            time.sleep(seconds)
        return before(*args, **more)

    with patch.object(kind, name, slower):
        yield


def train_slowly(
    ranks: Ranks, folder: Path, what: str, sleep_s: float, workers: int
) -> tuple[list[float], float]:
    """Train on this rank, which is slow if it is rank 0.

    Returns:
        Seconds of each kind from the end of the first step on, and how long that was.
    """
    found: list[tuple[Any, float]] = []
    after_step, finish = Loop.after_step, Loop.finish

    def note(loop: Loop) -> None:
        found.append((loop.clock.seconds(), loop.clock._marks[-1][1][0]))

    def first(loop: Loop, losses: torch.Tensor) -> None:
        after_step(loop, losses)
        if loop.state.step == 1:
            note(loop)

    def last(loop: Loop, *args: Any, **more: Any) -> None:
        note(loop)
        finish(loop, *args, **more)

    options = {
        "run": {"snapshot_every": 1, "log_every": 5},
        "data": {"num_workers": workers},
        "optimizer": {"max_steps": STEPS},
    }
    with (
        patch.object(Loop, "after_step", first),
        patch.object(Loop, "finish", last),
        slow(what, 0.0 if ranks.rank else sleep_s),
    ):
        run_training(ranks, folder, options)
    (before, since_s), (after, until_s) = found
    return (after - before).tolist(), until_s - since_s


DELAYS = {"evaluate": 1, "save": STEPS}
"""How often a part is late; else in each step but the first."""

CASES = [
    ("data", 2, 0),
    ("compute", 2, 0),
    ("evaluate", 1, 0),
    pytest.param("data", 2, 1, marks=pytest.mark.slow),
    pytest.param("save", 1, 0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("what", "world_size", "workers"), CASES)
def test_a_delay_comes_back_in_its_kind(
    pool: Pool, tmp_path: Path, what: str, world_size: int, workers: int
) -> None:
    """All of it on the slow rank 0, and in no other kind: together they are the time that passed.

    The other rank has waited as long. On a busy machine it may be late itself, and a rank that has
    a loading process may compute meanwhile, so that a longer delay is tried.
    """
    for sleep_s in (0.1, 0.4, 1.6, 6.4):
        found = pool.run(train_slowly, world_size, tmp_path / str(sleep_s), what, sleep_s, workers)
        for spent_s, wall_s in found:
            assert sum(spent_s) == pytest.approx(wall_s, rel=0.01)
        first, *others = (dict(zip(KINDS, spent_s, strict=True)) for spent_s, _ in found)
        delay_s = sleep_s * DELAYS.get(what, STEPS - 1)
        assert workers or first[what] >= 0.99 * delay_s, "no sleep is shorter than asked"
        late_s = [first[what], *(other["communication"] for other in others)]
        if min(late_s) >= 0.8 * delay_s:
            return
    pytest.fail(f"{what} {delay_s} s: {found}")


def spent(*ranks: list[float]) -> torch.Tensor:
    return torch.tensor(ranks, dtype=torch.float64)


def test_only_what_stands_out_is_said() -> None:
    even = [10.0, 5, 60, 10, 2, 8, 5]
    assert advice(spent(even, even)) == []
    data = [0.0, 45, 55, 0, 0, 0, 0]
    (line,) = advice(spent([0.0, 5, 55, 40, 0, 0, 0], data))
    assert line.startswith(
        "for 45% of its steps' time rank 1 waited for data: about --num-workers 1 w"
    )
    (line,) = advice(spent(data), workers=4, cores=6)
    assert "about --num-workers 8 would do (CPU cores per rank: 6)" in line, "4 / 0.55"
    assert "smaller images" in line, "8 processes on 6 cores bring less"
    assert steps_s(spent(data)).max() == pytest.approx(100)
    slower_rank = ([0.0, 0, 100, 0, 0, 0, 0], [0.0, 0, 50, 50, 0, 0, 0])
    assert advice(spent(*slower_rank)) == [], "the line on slow ranks is for that"
    (line,) = advice(spent([0.0, 0, 60, 40, 0, 0, 0], [0.0, 0, 50, 50, 0, 0, 0]))
    assert line.startswith("communication took at least 40% of the steps' time on every rank and")
    (line,) = advice(spent([0.0, 0, 80, 0, 20, 0, 0]))
    assert line.startswith("saving took 20% of the time")
    assert advice(spent([0.0, 4, 5, 0, 9, 0, 0])) == [], "9 s of steps say nothing yet"


def train_for_long(ranks: Ranks, folder: Path) -> str:
    """What a run says that seems to have hours to go."""
    with ExitStack() as patches:
        for name, value in {
            "LONG_S": 0.0,
            "ENOUGH_S": 0.0,
            "advice": lambda *_: ["as ever"],
        }.items():
            patches.enter_context(patch.object(loop, name, value))
        options = ["--nproc", "1", "--max-steps", "8", "--log-every", "2"]
        status, said, errors = call_main(
            ranks, "ddp_launch", [*options, "--output-dir", str(folder)]
        )
        assert status == 0, errors
    return said


def test_a_long_run_is_told_in_the_middle_and_at_its_end(pool: Pool, tmp_path: Path) -> None:
    (said,) = pool.run(train_for_long, 1, tmp_path)
    first, last = (match.start() for match in re.finditer("as ever", said))
    assert first < said.index("epoch 1/") < last


def test_a_gpu_of_which_much_is_left_is_named() -> None:
    free, compiled = advice_for_gpu(compiles=False, memory_share=0.1), {"compiles": True}
    assert [line.split()[0] for line in free] == ["--compile", "training"]
    assert advice_for_gpu(**compiled, memory_share=0.9) == []
    assert len(advice_for_gpu(compiles=None, memory_share=0.1)) == 1, "the recipe cannot compile"


def test_a_table_shows_means_or_the_least_and_most() -> None:
    ranks = ([10, 0, 80, 10, 0, 0, 0], [10, 0, 60, 30, 0, 0, 0])
    both = dict(zip(KINDS, zip(*ranks, strict=True), strict=True))
    assert in_words(both) == "compute 60% to 80%, communication 10% to 30%, start 10%"


def test_who_loads_by_other_means_waits_for_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = iter(range(6))
    monkeypatch.setattr(clock, "perf_counter", lambda: next(times_s))
    ours = Clock(torch.device("cpu"))
    for call in (ours.end_step, ours.begin_step, ours.end_step):
        call()
    assert dict(zip(KINDS, ours.seconds().tolist(), strict=True)) == {
        **dict.fromkeys(KINDS, 0),
        "start": 1,
        "compute": 1,
        "other": 2,
    }


def test_steps_without_ddp_have_no_communication() -> None:
    spent_s = spent(*[[1.0, 1, 80, 0, 0, 0, 0]] * 2)
    assert "communication" not in shares(spent_s)
    assert advice(spent_s) == []
