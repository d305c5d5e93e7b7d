"""Runs that watch themselves: who did not come to a collective, and who is slower than the others.

The same with whole runs that hang: tests/faults/test_matrix.py.
"""

import ctypes
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common import ROOT
from common.launch.ranks import Ranks
from common.launch.report import show_cause, show_whereabouts
from common.training.virtual_ranks import use_virtual_ranks
from common.watch import record, verdict
from common.watch.stragglers import ComputeTime, Slow, find_slow
from tests.conftest import Recipe, wait_for
from tests.pool import Pool, in_group
from tests.test_verdict import LATE, WAITED, said


def waits(number: int, kind: str = "all_reduce", group: str = "0") -> dict[str, Any]:
    """A collective that has not ended."""
    call = {"kind": kind, "sizes": [[3]], "place": f"train.py:{len(kind)} (train)"}
    return {"group": group, "number": number, **call}


def at(place: str, *collectives: dict[str, Any]) -> dict[str, Any]:
    return {"step": 6, "place": place, "stack": f"  stack of {place}\n", "collectives": collectives}


def write(logs: Path, *ranks: dict[str, Any] | None) -> None:
    """The ranks' records."""
    for rank, found in enumerate(ranks):
        about = {"host": f"host{rank}", "device": "cpu", "world_size": len(ranks)}
        verdict.path(logs, rank).write_text("{ca" if found is None else json.dumps(about | found))


C_STACK = """Timeout (0:00:04)!
Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Thread 0x00007e (most recent call first):
  File "/mine/read.py", line 12 in read
  File "/mine/train.py", line 40 in train
"""


@pytest.mark.parametrize(
    ("ranks", "who", "says"),
    [
        (
            [at("a", waits(7)), at("data.py:9 (load)"), at("a", waits(7))],
            "rank 1 on host1",
            r"did not come to all_reduce 7, which rank 0 on host0 calls at train.py:10 \(train\): "
            r"it is at data.py:9 \(load\)",
        ),
        (
            [at("a", waits(8), waits(7)), {}],
            "rank 1 on host1",
            "to all_reduce 7, .*left no st",
        ),
        ([at("a", waits(7)), None], "rank 1 on an unknown host", "did not come to all_reduce 7"),
        ([at("a", waits(7)), {}, {}], "rank 1 on host1", r"\(nor did rank 2\)"),
        (
            [at("a", waits(7)), at("b", waits(7, "broadcast")), at("a", waits(7))],
            "rank 1 on host1",
            "calls broadcast 7 at .*, while rank 0 on host0 calls all_reduce 7 at .* be the same",
        ),
        ([at("a", waits(7)), at("a", waits(7))], "", "all ranks came to all_reduce 7, .*network"),
        (  # rank 1 was stopped after its record
            [at("a", waits(8)), at("b", waits(7, "broadcast"))],
            "rank 1 on host1",
            "not come to all_reduce 8, which rank 0 .*: it was last seen in broadcast 7 at train",
        ),
        (
            [at("a", waits(8, group="3")), at("a", waits(9, group="4"))],
            "",
            "each rank waits for another one, as in all_reduce 9, which rank 1 .* network",
        ),
        ([at("a", waits(3, "send")), at("a", waits(5, "recv"))], "", "each rank waits for another"),
        (
            [at("a", waits(8, group="3")), at("data.py:9 (load)"), at("a", waits(9, group="4"))],
            "rank 1 on host1",
            "did not come to all_reduce 9, which rank 2 .*it is at data.py:9",
        ),
        ([at("a"), at("b")], None, ""),
        ([], None, ""),
    ],
)
def test_the_rank_that_did_not_come_is_named(
    tmp_path: Path, ranks: list[dict[str, Any] | None], who: str | None, says: str
) -> None:
    write(tmp_path, *ranks)
    found = verdict.verdict(tmp_path)
    if who is None:
        assert found is None
    else:
        assert found
        assert found.who == who
        assert re.search(says, found.says), found.says


def test_a_stack_that_only_c_could_write_counts(tmp_path: Path) -> None:
    write(tmp_path, at("a", waits(7)), at("an old place"))
    verdict.path(tmp_path, 1).with_suffix(".stack").write_text(C_STACK)
    found = verdict.verdict(tmp_path)
    assert found
    assert "it is in C code that keeps the GIL, called at /mine/read.py:12 (read)" in found.says
    assert "line 40 in train" in found.stack
    assert "an old place" not in found.stack


@pytest.mark.parametrize("nccl", [False, True])
@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("waiting", "error: rank 1 on host1 did not come to all_reduce 7, .*: it is at data.py:9"),
        ("stopped by a signal", r"error: rank 1 on host1 stopped answering \(stopped by a signal"),
    ],
)
def test_the_launcher_shows_the_verdict_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str, shown: str, *, nccl: bool
) -> None:
    """For gloo a rank has found it; with NCCL, whose watchdog aborts the rank, the launcher does.

    NCCL's message is a stand-in.
    """
    write(tmp_path, at("a", waits(7)), at("data.py:9 (load)"))
    errors = tmp_path / "errors"
    late = {**said(0, LATE), "verdict": verdict.verdict(tmp_path)}
    left = [{"watched": str(tmp_path)}, *([] if nccl else [late])]
    errors.write_text("\n".join(map(json.dumps, left)))
    failed = [(0, -signal.SIGABRT if nccl else 1)]
    assert show_cause(failed, {1: state}, errors, WAITED.format(rank=0) if nccl else "") == 1
    first, *stack = capsys.readouterr().err.strip().splitlines()
    assert re.match(shown, first), first
    assert stack[0] == "rank 1 on host1 is here (Python stack):"
    assert "stack of data.py:9" in stack[1]


def test_the_launcher_says_where_its_ranks_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = tmp_path / "errors"
    errors.write_text("")
    show_whereabouts(errors, [0, 1])
    assert "have not begun to train" in capsys.readouterr().err
    errors.write_text(json.dumps({"watched": str(tmp_path)}))
    write(tmp_path, at("a", waits(7)), at("data.py:9 (load)"))
    show_whereabouts(errors, [0, 1])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "rank 0 on host0, step 6: it is at a"
    assert lines[1] == "rank 1 on host1, step 6: it is at data.py:9 (load)"
    assert lines[2].startswith("rank 1 on host1 did not come to all_reduce 7")
    verdict.path(tmp_path, 0).unlink()  # a rank that has ended removes its record
    show_whereabouts(errors, [1])
    assert capsys.readouterr().err.startswith("rank 1 on host1, step 6: it is at data.py:9 (load)")


def test_ranks_of_other_hosts_were_not_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "errors").write_text(json.dumps({"watched": str(tmp_path)}))
    write(tmp_path, at("a", waits(7)), at("a", waits(7)), {}, {})
    show_whereabouts(tmp_path / "errors", [0, 1])
    assert "did not come" not in capsys.readouterr().err, "ranks 2 and 3 may be training"
    write(tmp_path, at("a", waits(7)), at("a", waits(7)), at("b"), at("a", waits(7)))
    show_whereabouts(tmp_path / "errors", [0, 1])
    assert "rank 2 on host2 did not come to all_reduce 7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("others", "shown"),
    [
        ([at("data.py:9 (load)"), at("a", waits(7))], "rank 2 on host2 did not come to all_reduce"),
        ([at("a", waits(7)), at("a", waits(7))], "all ranks came to all_reduce 7, .* cut"),
    ],
)
def test_nccls_watchdog_may_have_waited_for_another_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], others: list[dict[str, Any]], shown: str
) -> None:
    (tmp_path / "errors").write_text(json.dumps({"watched": str(tmp_path)}))
    write(tmp_path, at("a", waits(7)), at("a", waits(7)), *others)
    failed, text = [], ""
    for rank in (0, 1):
        failed.append((rank, -signal.SIGABRT))
        text += WAITED.format(rank=rank)
    assert show_cause(failed, {}, tmp_path / "errors", text) == 1
    first = capsys.readouterr().err.strip().splitlines()[0]
    assert re.match(f"error: {shown}", first), first


def test_a_stack_that_is_still_being_written_says_nothing(tmp_path: Path) -> None:
    write(tmp_path, at("a", waits(7)), at("b"))
    stack = verdict.path(tmp_path, 1).with_suffix(".stack")
    stack.write_text(C_STACK[: C_STACK.rindex("/mine/read.py")])
    found = verdict.verdict(tmp_path)
    assert found
    assert found.says.endswith("it is at b")


def hang(ranks: Ranks, logs: Path, *, keep_gil: bool) -> str:
    """Rank 1 comes late to an all-reduce; what rank 0 finds out meanwhile."""
    record.Watch(logs, ranks.rank, {"world_size": 2}, 1.0, lambda: 3)
    place = "keeps the GIL" if keep_gil else "it is at tests/test_watch.py"
    found = ""
    released = os.open(logs / "released", os.O_RDWR)
    if ranks.rank == 1:
        if keep_gil:
            ctypes.PyDLL(None).read(released, ctypes.create_string_buffer(1), 1)
        else:
            os.read(released, 1)
        dist.all_reduce(torch.ones(3))
    else:
        work = dist.all_reduce(torch.ones(3), async_op=True)

        def named() -> bool:
            nonlocal found
            late = verdict.verdict(logs)
            found = f"{late.who} {late.says}\n{late.stack}" if late else ""
            return place in found

        try:
            wait_for(named, 30)
        finally:
            os.write(released, b"!")
        work.wait()
    os.close(released)
    record.stop()
    assert not list(logs.glob(f"rank_{ranks.rank}.*")), "nothing is left after a clean end"
    return found


@pytest.mark.parametrize("keep_gil", [False, True])
def test_a_rank_that_hangs_leaves_its_stack(pool: Pool, tmp_path: Path, *, keep_gil: bool) -> None:
    os.mkfifo(tmp_path / "released")
    said, _ = pool.run(in_group, 2, _hang, tmp_path, keep_gil)
    first, _, *stack = said.splitlines()
    assert re.search(r"rank 1 on \S+ did not come to all_reduce \d+, which rank 0", first), first
    assert re.search(r"calls at tests/test_watch.py:\d+ \(hang\)", first), first
    assert any("in hang" in line for line in stack), stack


def test_a_collective_is_called_by_the_recipe_that_needs_it() -> None:
    places = [
        (torch.distributed.__file__, 3, "all_gather"),
        (f"{ROOT}/common/group/collectives.py", 48, "gather_numbers"),
        (f"{ROOT}/recipes/ddp_launch/train.py", 146, "train"),
    ]
    frames = [dict(zip(("filename", "line", "name"), place, strict=True)) for place in places]
    assert record._caller(frames) == "recipes/ddp_launch/train.py:146 (train)"
    assert record._caller(frames[:2]) == "common/group/collectives.py:48 (gather_numbers)"
    assert record._caller(frames[:1]) == "the backward pass"


def _hang(ranks: Ranks, logs: Path, keep_gil: bool) -> str:
    return hang(ranks, logs, keep_gil=keep_gil)


def ask(ranks: Ranks, logs: Path) -> dict[str, Any]:
    """SIGQUIT to a rank that makes steps."""
    steps = count()
    record.Watch(logs, ranks.rank, {"world_size": 1}, 60.0, lambda: next(steps))
    os.kill(os.getpid(), signal.SIGQUIT)

    wait_for(lambda: "stack" in verdict.read(logs, 0), 30)
    found = verdict.read(logs, 0)
    record.stop()
    return found


def test_sigquit_asks_a_rank_where_it_is(pool: Pool, tmp_path: Path) -> None:
    (found,) = pool.run(in_group, 1, ask, tmp_path)
    assert "in ask" in found["stack"]
    assert found["step"] > 0


@pytest.mark.parametrize("launched", [False, True])
def test_a_run_of_one_process_is_asked_where_it_is(recipe: Recipe, *, launched: bool) -> None:
    """With --restarts a launcher waits for it; else it is the command's own process."""
    options = ["--nproc", "1", "--max-steps", "150", *(["--restarts", "1"] if launched else [])]
    process = recipe.start(*recipe.command("ddp_launch", *options, folder="run"))
    folder = recipe.tmp_path / "run"
    wait_for((folder / "metrics.jsonl").exists)
    process.send_signal(signal.SIGQUIT)
    result = recipe.finish(process, folder).assert_ok()
    assert re.search(r"(?m)step \d+: it is at \S+:\d+ \(", result.stdout + result.stderr)


def steps_found(
    step_s: Callable[[int, int], float], ranks: int, steps: int
) -> Iterator[tuple[int, Slow]]:
    """Steps after which slow ranks are found, logging each tenth; `step_s` of a rank and a step."""
    clocks = [ComputeTime(torch.device("cpu")) for _ in range(ranks)]
    for step in range(1, steps + 1):
        for rank, clock in enumerate(clocks):
            clock._steps_s.append(step_s(rank, step))
        if step % 10 == 0:
            halves = torch.stack([clock.halves() for clock in clocks])
            if found := clocks[0].compare(step, halves, 0.2):
                yield step, found


def noise(dice: random.Random) -> Callable[[int, int], float]:
    """Steps of 0.1 s, with a standard deviation of 10 %; in bursts, up to 10 take twice as long."""
    until: dict[int, int] = {}

    def step_s(rank: int, step: int) -> float:
        if dice.random() < 1 / 500:
            until[rank] = max(until.get(rank, 0), step + dice.randrange(10))
        return dice.lognormvariate(0, 0.1) * (0.2 if step <= until.get(rank, 0) else 0.1)

    return step_s


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_noise_makes_no_rank_slow(ranks: int) -> None:
    found = list(steps_found(noise(random.Random(ranks)), ranks, 10_000))
    assert found == []


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_that_is_slower_by_a_fifth_is_found_within_100_steps(ranks: int) -> None:
    """Steps have a standard deviation of 5 %. With 10 % and the bursts above, 98 % are found."""
    dice = random.Random(ranks)

    def found_after(begin: int, slow: int) -> tuple[int, Slow]:
        def step_s(rank: int, step: int) -> float:
            own_s = 0.1 * dice.lognormvariate(0, 0.05)
            return own_s * (1.2 if rank == slow and step >= begin else 1)

        return next(steps_found(step_s, ranks, begin + 100))

    for _ in range(40):
        begin, slow = dice.randrange(1, 200), dice.randrange(ranks)
        step, found = found_after(begin, slow)
        assert begin <= step <= begin + 100
        assert found.ranks == [slow]
        assert 0.1 < found.excess < 0.3
        assert 0.04 < found.faster < 0.2


def test_all_ranks_of_a_slow_host_are_named_once(tmp_path: Path) -> None:
    halves = [[0.1, 0.1]] * 4 + [[0.15, 0.15], [0.14, 0.16], [0.13, 0.13], [0.1, 0.3]]
    found = find_slow(halves, 0.2)
    assert found
    assert found.ranks == [4, 5, 6]
    write(tmp_path, *[at("a")] * 8)
    clock = ComputeTime(torch.device("cpu"))
    unlike = torch.tensor([[0.0, 0.0], [0.1, 0.2]])
    assert clock.compare(50, unlike, 0.2) is None, "not measured yet"
    assert clock.compare(51, unlike + 0.1, 0.2), "one window after none"
    news = clock.news(found, tmp_path)
    assert news.startswith("rank 4 on host4 (cpu) computes 50% longer per step than")
    assert "(slow, too: rank 5 on host5 (cpu), rank 6 on host6 (cpu))" in news
    assert clock.news(found, tmp_path) == "", "said once"
    assert clock.news(found._replace(ranks=[2]), tmp_path)
    assert clock.news(found._replace(ranks=[5, 2]), tmp_path) == "", "both were named before"


def trained(ranks: Ranks, slow: int) -> list[list[float]]:
    """All ranks' halves after training with BatchNorm, in which rank `slow` sleeps in each step."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    return steps_of(model, ranks, slow, micro_batches=2)


def steps_of(
    model: DistributedDataParallel, ranks: Ranks, slow: int, micro_batches: int = 1
) -> list[list[float]]:
    """All ranks' halves after 51 steps in which rank `slow` sleeps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = ComputeTime(torch.device("cpu"))
    clock.follow(model, optimizer)
    for _ in range(51):
        clock.start()
        time.sleep(0.03 if ranks.rank == slow else 0.0)
        for part in torch.randn(micro_batches, 8, 4):
            model(part).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.end_step()
    halves: list[list[float]] = [[]] * ranks.world_size
    dist.all_gather_object(halves, clock.halves().tolist())
    return halves


@pytest.mark.parametrize("slow", [0, 1])
def test_waiting_for_a_slow_rank_is_not_computing(pool: Pool, slow: int) -> None:
    """The other rank waits as long, in the exchange of gradients and of BatchNorm's buffers."""
    for halves in pool.run(in_group, 2, trained, slow):
        assert min(halves[slow]) >= 0.03
        found = find_slow(halves, 0.04)
        assert found
        assert found.ranks == [slow]


def trained_in_shards(ranks: Ranks, slow: int) -> list[list[float]]:
    """The same with virtual ranks, and a gradient per bucket."""
    layers = [nn.Linear(4, 4) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1e-5)
    use_virtual_ranks(model, 4, 32, 60.0)
    return steps_of(model, ranks, slow)


def test_waiting_for_a_partner_in_the_backward_pass_is_not_computing(pool: Pool) -> None:
    for halves in pool.run(in_group, 4, trained_in_shards, 2):
        assert min(halves[2]) >= 0.03
        assert max(max(halves[rank]) for rank in (0, 1, 3)) < 0.03
