"""Runs that watch themselves: who did not come to a collective, and who is slower than the others.

The same with whole runs that hang: tests/faults/test_matrix.py.
"""

import ctypes
import json
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from common import ROOT
from common.launch.ranks import Ranks
from common.launch.report import show_cause, show_whereabouts
from common.training.virtual_ranks import Tree, use_virtual_ranks
from common.watch import record, stragglers, verdict
from common.watch.clock import Clock
from common.watch.stragglers import ComputeTime, Slow, find_slow
from tests.helpers.commands import Recipe, wait_for
from tests.helpers.failures import LATE, WAITED, said
from tests.helpers.pool import PATIENCE_S, Pool, in_group


def waits(number: int, kind: str = "all_reduce", group: str = "0", *ranks: int) -> dict[str, Any]:
    """A collective of these ranks, or of all, that has not ended."""
    call = {"kind": kind, "sizes": [[3]], "place": f"train.py:{len(kind)} (train)"}
    return {"group": group, "ranks": [*ranks], "number": number, **call}


def pair(number: int, *ranks: int) -> dict[str, Any]:
    """A sum with a partner, as with --virtual-ranks."""
    return waits(number, "all_reduce", str(ranks), *ranks)


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
STACK_AFTER_SIGQUIT = "Stack (most recent call first):\n" + C_STACK.rpartition("first):\n")[2]


@pytest.mark.parametrize(
    ("ranks", "who", "says"),
    [
        (
            [at("a", waits(7)), at("data.py:9 (load)"), at("a", waits(7))],
            "rank 1 on host1",
            r"did not come to all_reduce 7, which rank 0 on host0 calls at train.py:10 \(train\): "
            r"it is at data.py:9 \(load\)",
        ),
        ([at("a", waits(8), waits(7)), {}], "rank 1 on host1", "to all_reduce 7, .*left no st"),
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
        (  # rank 1 waits for rank 3, which waits for rank 2
            [at("a", pair(5, 0, 2)), at("a", pair(9, 1, 3)), at("b.py:1"), at("a", pair(4, 2, 3))],
            "rank 2 on host2",
            "did not come to all_reduce 5, which rank 0 on host0 calls .*: it is at b.py:1",
        ),
        (  # ranks 0 and 1 wait for each other; ranks 2 and 3 go on
            [at("a", pair(5, 0, 1)), at("a", pair(5, 0, 1)), at("b"), at("c")],
            "",
            "ranks 0, 1 came to all_reduce 5, .*network",
        ),
        (
            [at("a", pair(5, 0, 1)), at("a", pair(6, 0, 1)), *[at("a", pair(9, 2, 3))] * 2],
            "rank 0 on host0",
            "did not come to all_reduce 6, which rank 1 on host1 .*: it was last seen in all_red",
        ),
        (  # gloo counts its own calls: its 120th is not behind NCCL's 9000th
            [
                at("a", waits(120) | {"backend": "gloo"}, waits(9000) | {"backend": "nccl"}),
                at("b", waits(8999) | {"backend": "nccl"}),
            ],
            "rank 1 on host1",
            "not come to all_reduce 9000, which rank 0 .*: it was last seen in all_reduce 8999",
        ),
        (
            [at("a", waits(120) | {"backend": "gloo"}), at("b", waits(9000) | {"backend": "nccl"})],
            "",
            "each rank waits for another one",
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


@pytest.mark.parametrize("old", [[], [waits(5)], [waits(5, group="3")]])
@pytest.mark.parametrize("c_stack", [C_STACK, STACK_AFTER_SIGQUIT])
def test_a_stack_that_only_c_could_write_counts(
    tmp_path: Path, old: list[dict[str, Any]], c_stack: str
) -> None:
    write(tmp_path, at("a", waits(7)), at("an old place", *old))
    verdict.path(tmp_path, 1).with_suffix(".stack").write_text(c_stack)
    found = verdict.verdict(tmp_path)
    assert found
    assert found.who == "rank 1 on host1"
    assert "it is in C code that keeps the GIL, called at /mine/read.py:12 (read)" in found.says
    assert "line 40 in train" in found.stack
    assert "an old place" not in found.stack


def test_another_thread_reads_the_main_threads_stack() -> None:
    found: list[traceback.FrameSummary] = []
    names: dict[str, Callable[..., Any]] = {}
    exec(compile("def größe(call):\n  call()", "/own/größe/😀.py", "exec"), names)

    def joins() -> bool:
        found[:] = record.main_stack()  # on a busy machine, the main thread may still be in start()
        return any(frame.line == "thread.join()" for frame in found)

    def look() -> None:
        thread = threading.Thread(target=lambda: wait_for(joins))
        thread.start()
        thread.join()

    names["größe"](look)
    places = [(frame.filename, frame.lineno, frame.name) for frame in found]
    here, inner = places.index(("/own/größe/😀.py", 2, "größe")), traceback.extract_stack()[-1]
    assert places[here - 1][::2] == (inner.filename, inner.name)
    assert places[here + 1][::2] == (inner.filename, "look")
    assert found[here + 1].line == "thread.join()"


def test_c_writes_no_stack_while_torch_lists_the_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first list takes seconds on a busy machine, in Python that runs."""
    sizes: list[int] = []

    def slow() -> list[dict[str, Any]]:
        for _ in range(2):
            sizes.append(verdict.path(tmp_path, 0).with_suffix(".stack").stat().st_size)
            time.sleep(1.5)
        return []

    monkeypatch.setattr(record, "_collectives", slow)
    record.Watch(tmp_path, 0, {"world_size": 1}, 0.4, lambda: 3)
    wait_for(lambda: "collectives" in verdict.read(tmp_path, 0))
    record.stop()
    assert sizes[0] == sizes[1]


def test_the_place_of_a_rank_that_writes_no_more_is_old(tmp_path: Path) -> None:
    write(tmp_path, {**at("a", waits(7)), "period_s": 2}, {**at("data.py:9"), "period_s": 2})
    for silent_s, says in ((4, ": it is at data.py:9"), (6, "silent for 6 s: .* network is cut")):
        written_s = verdict.path(tmp_path, 0).stat().st_mtime - silent_s
        os.utime(verdict.path(tmp_path, 1), (written_s, written_s))
        found = verdict.verdict(tmp_path)
        assert found
        assert re.search(says, found.says), found.says


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
    place = "keeps the GIL" if keep_gil else "it is at tests/common/watch/test_watch.py"
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
            wait_for(named)
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
    assert re.search(r"calls at tests/common/watch/test_watch.py:\d+ \(hang\)", first), first
    assert any("in hang" in line for line in stack), stack


def test_every_backend_of_the_group_is_asked_for_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    call = {
        "process_group": ["of no rank", ""],
        "is_p2p": False,
        "profiling_name": "all_reduce",
        "input_sizes": [[3]],
        "retired": False,
        "state": "started",
    }

    def dump(backend: str = "gloo") -> bytes:
        asked.append(backend)
        if backend == "nccl2":
            raise ValueError("no such recorder")
        number = {"gloo": 120, "nccl": 9000}[backend]
        return pickle.dumps({"entries": [{**call, "collective_seq_id": number}]})

    config = "torch.distributed.get_backend_config"
    monkeypatch.setattr(config, lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace", dump)
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace", lambda: dump("nccl"), raising=False)
    found = [(call["backend"], call["number"]) for call in record._collectives()]
    assert found == [("gloo", 120), ("nccl", 9000)]
    assert asked == ["gloo", "nccl", "nccl2"]


def test_an_error_of_torchs_recorder_ends_no_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> list[dict[str, Any]]:
        raise RuntimeError("of the recorder")

    monkeypatch.setattr(record, "_collectives", broken)
    devices: list[str] = []
    monkeypatch.setattr("torch.cuda.set_device", devices.append)
    record.Watch(tmp_path, 0, {"world_size": 1, "device": "cuda:3"}, 0.2, lambda: 3)
    wait_for(lambda: devices)
    thread = record._current[-1]._thread
    thread.join(0.5)
    assert thread.is_alive()
    monkeypatch.setattr(record, "_collectives", list)
    wait_for(lambda: "collectives" in verdict.read(tmp_path, 0))
    record.stop()
    assert devices == ["cuda:3"]


def test_a_look_that_waits_for_a_disk_holds_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, answers = threading.Event(), threading.Event()

    def write(*_: Any) -> None:
        waits.set()
        answers.wait()

    monkeypatch.setattr(record, "_DISK_S", 0.1)
    monkeypatch.setattr(record, "_collectives", list)
    watch = record.Watch(tmp_path, 0, {}, 0.2, lambda: 3)
    monkeypatch.setattr(record, "write_json", write)
    assert waits.wait(PATIENCE_S)
    record.stop()
    assert watch._thread.is_alive()
    answers.set()
    watch._thread.join()
    watch.end(keep=False)


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


def hang_in_pairs(ranks: Ranks, logs: Path) -> str:
    """Rank 3 comes late to a sum over virtual ranks; what it finds out about itself meanwhile."""
    record.Watch(logs, ranks.rank, {"world_size": 4}, 1.0, lambda: 3)
    tree, found = Tree(4, timedelta(seconds=PATIENCE_S)), ""

    def settled() -> bool:
        """Rank 0 has met rank 1 and waits for rank 2, which waits for this rank, as rank 1 does."""
        waiting = [verdict.read(logs, rank).get("collectives") or [{}] for rank in range(3)]
        return [calls[0].get("ranks") for calls in waiting] == [[0, 2], [1, 3], [2, 3]]

    if ranks.rank == 3:
        wait_for(settled)
        while not (late := verdict.verdict(logs)) or "C code" in late.says:
            time.sleep(0.02)  # a busy machine kept another rank's thread from looking
        found = f"{late.who} {late.says}"
    for _ in tree.average([torch.ones(3)]):
        pass
    record.stop()
    return found


def test_with_virtual_ranks_a_call_of_the_late_ranks_own_pairs_is_named(
    pool: Pool, tmp_path: Path
) -> None:
    *_, said = pool.run(in_group, 4, hang_in_pairs, tmp_path)
    assert re.search(r"^rank 3 on \S+ did not come to all_reduce \d+, which rank [12] on", said)


def ask(ranks: Ranks, logs: Path) -> dict[str, Any]:
    """SIGQUIT to a rank that makes steps."""
    steps = count()
    record.Watch(logs, ranks.rank, {"world_size": 1}, 60.0, lambda: next(steps))
    os.kill(os.getpid(), signal.SIGQUIT)

    wait_for(lambda: "stack" in verdict.read(logs, 0))
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
    options = ["--nproc", "1", "--epochs", "1000000", *(["--restarts", "1"] if launched else [])]
    process = recipe.start(*recipe.command("ddp_launch", *options, folder="run"))
    folder = recipe.tmp_path / "run"
    wait_for((folder / "metrics.jsonl").exists)
    process.send_signal(signal.SIGQUIT)
    output = process.stderr if launched else process.stdout
    assert output
    impatient = threading.Timer(PATIENCE_S, process.kill)  # else a run that says nothing goes on
    impatient.start()
    for line in output:
        if re.search(r"step \d+: it is at \S+:\d+ \(", line):
            break
        if line.startswith("rank 0 "):  # busy: it has not answered in time
            process.send_signal(signal.SIGQUIT)
    else:
        raise AssertionError("the run has ended")
    impatient.cancel()
    process.send_signal(signal.SIGTERM)
    assert recipe.finish(process, folder).status == 75


ASKING_RANKS = """
import json, os, signal, sys, time
from pathlib import Path
from common.launch import start
from common.launch.report import leave
from common.watch import verdict
if "RANK" in os.environ:
    logs = Path(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGQUIT, signal.SIGTERM})
    leave({"watched": str(logs)})
    heard = None
    while not heard:  # the launcher may not listen yet
        os.kill(os.getppid(), signal.SIGQUIT)
        heard = signal.sigtimedwait({signal.SIGQUIT}, 0.1)
    if sys.argv[2] == "answers":
        record = {"host": "host0", "step": 3, "place": "a", "asked_s": time.monotonic()}
        verdict.path(logs, 0).write_text(json.dumps(record))
        signal.sigwait({signal.SIGTERM})
    os._exit(0)
start.ANSWER_S = 1e6
sys.exit(start.launch([__file__, *sys.argv[1:]], 1, start.LaunchOptions()))
"""


def test_the_launcher_answers_as_soon_as_its_ranks_have(recipe: Recipe) -> None:
    script = recipe.tmp_path / "ranks.py"
    script.write_text(ASKING_RANKS)
    process = recipe.start(sys.executable, script, recipe.tmp_path, "answers")
    assert process.stderr
    assert any(line == "rank 0 on host0, step 3: it is at a\n" for line in process.stderr)
    process.send_signal(signal.SIGTERM)
    recipe.finish(process, recipe.tmp_path)


def test_a_run_that_ends_before_it_answers_says_so(recipe: Recipe) -> None:
    script = recipe.tmp_path / "ranks.py"
    script.write_text(ASKING_RANKS)
    process = recipe.start(sys.executable, script, recipe.tmp_path, "ends")
    result = recipe.finish(process, recipe.tmp_path).assert_ok()
    assert result.stderr.splitlines() == [verdict.ENDED]


Steps = Callable[[int, float], float]
"""How long a rank computes in a step, from its number and the time since the start [s]."""


def named(
    monkeypatch: pytest.MonkeyPatch, logs: Path, compute_s: Steps, ranks: int, steps: int
) -> Iterator[tuple[int, Slow, str]]:
    """Steps after which a line names slow ranks, what was found, and the line.

    All ranks wait for the slowest one in each step. Each tenth step is logged.
    """
    write(logs, *[at("a")] * ranks)
    clocks, now_s = [ComputeTime(Clock(torch.device("cpu"))) for _ in range(ranks)], 0.0
    monkeypatch.setattr(stragglers, "monotonic", lambda: now_s)
    for step in range(1, steps + 1):
        own_s = [compute_s(rank, now_s) for rank in range(ranks)]
        now_s += max(own_s)
        for clock, s in zip(clocks, own_s, strict=True):
            clock._steps_s.append((s, max(own_s) - s))
        if step % 10 == 0:
            halves = torch.stack([clock.halves() for clock in clocks])
            found = clocks[0].compare(step, halves, max(own_s))
            if found and (line := clocks[0].news(found, logs)):
                yield step, found, line


def shared_cores(dice: random.Random, usual_s: float) -> Steps:
    """Other programs take half of a rank's core for up to 12 s, and pause it now and then."""
    until_s: dict[int, float] = {}
    busy: dict[int, bool] = {}

    def compute_s(rank: int, now_s: float) -> float:
        if now_s >= until_s.get(rank, 0.0):
            busy[rank] = dice.random() < 0.4
            until_s[rank] = now_s + min(dice.expovariate(1 / 3), 12.0)
        pause_s = dice.expovariate(1 / 0.02) if dice.random() < 0.05 else 0.0
        return usual_s * dice.lognormvariate(0, 0.2) * (2 if busy[rank] else 1) + pause_s

    return compute_s


@pytest.mark.parametrize("usual_s", [0.012, 0.1])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_on_shared_cores_are_not_named_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int, usual_s: float
) -> None:
    noise = shared_cores(random.Random(ranks), usual_s)
    assert list(named(monkeypatch, tmp_path, noise, ranks, 10_000)) == []


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_that_is_slower_by_a_fifth_is_named_within_400_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int
) -> None:
    """Steps of 0.2 s have a standard deviation of 5 %; the rank is slow from some step on."""
    dice = random.Random(ranks)
    for _ in range(10):
        begin_s, slow = dice.uniform(0, 20), dice.randrange(ranks)

        def compute_s(rank: int, now_s: float, slow: int = slow, begin_s: float = begin_s) -> float:
            factor = 1.2 if rank == slow and now_s >= begin_s else 1.0
            return 0.2 * dice.lognormvariate(0, 0.05) * factor

        step, found, line = next(named(monkeypatch, tmp_path, compute_s, ranks, 600))
        assert step <= begin_s / 0.2 + 400
        assert found.ranks == [slow]
        assert line.startswith(f"rank {slow} on host{slow} (cpu) computes ")
        assert 0.1 < found.excess < 0.3
        assert 0.04 < found.faster < 0.25


def test_a_rank_for_which_the_others_do_not_wait_is_not_slow() -> None:
    halves = [[0.1, 0.1], [0.15, 0.15]]
    assert find_slow(halves, [[0.06, 0.06], [0.01, 0.01]], 0.16)
    assert find_slow(halves, [[0.06, 0.02], [0.01, 0.01]], 0.16) is None, "only in the first half"
    assert find_slow(halves, [[0.01, 0.01], [0.01, 0.01]], 0.16) is None


def test_all_ranks_of_a_slow_host_are_named_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    halves = [[0.1, 0.1]] * 4 + [[0.15, 0.15], [0.14, 0.16], [0.13, 0.13], [0.1, 0.3]]
    waiting = [[0.2 - s for s in half] for half in halves]
    both = torch.tensor([h + w for h, w in zip(halves, waiting, strict=True)])
    write(tmp_path, *[at("a")] * 8)
    clock, now_s = ComputeTime(Clock(torch.device("cpu"))), 0.0
    monkeypatch.setattr(stragglers, "monotonic", lambda: now_s)
    assert clock.compare(50, torch.zeros(8, stragglers.PARTS), 0.2) is None, "not measured yet"
    lines = []
    for window in range(1, 9):
        now_s += 12.0
        found = clock.compare(1 + 50 * window, both, 0.2)
        assert found
        assert found.ranks == [4, 5, 6]
        lines.append(clock.news(found, tmp_path))
    assert [bool(line) for line in lines] == [False] * 5 + [True] + [False] * 2, "for 60 s"
    assert lines[5].startswith("rank 4 on host4 (cpu) computes 50% longer per step than")
    assert "(slow, too: rank 5 on host5 (cpu), rank 6 on host6 (cpu))" in lines[5]


def test_a_rank_with_one_shard_more_is_not_slow() -> None:
    """Eight shards on three processes: what counts is the time of a shard."""
    medians = []
    for shards in (2, 3, 3):
        clock = Clock(torch.device("cpu"))
        compute, layer = ComputeTime(clock), nn.Linear(1, 1)
        layer.broadcast_buffers = False  # type: ignore[assignment]
        tree = SimpleNamespace(mine=range(shards), world_size=3, shards=8)
        layer.module = SimpleNamespace(tree=tree)  # type: ignore[assignment]
        compute.follow(layer)  # type: ignore[arg-type]
        for _ in range(stragglers.WINDOW):
            compute._add(
                {"data": 0.0, "compute": 0.1 * shards, "communication": 0.4 - 0.1 * shards}
            )
        medians.append(compute.halves().tolist())
    halves, waits = [m[:2] for m in medians], [m[2:] for m in medians]
    assert halves[0] == pytest.approx(halves[1])
    assert find_slow(halves, waits, 0.4) is None


def test_beside_a_very_slow_rank_small_differences_of_the_others_mean_nothing() -> None:
    """On one core, the partner of a rank that sleeps for 1 s was called slow, too: by 0.4 ms."""
    computes_s = [0.0028, 0.0028, 1.0, 0.0032]
    halves, waits = [[s, s] for s in computes_s], [[1.0 - s, 1.0 - s] for s in computes_s]
    found = find_slow(halves, waits, 1.0)
    assert found
    assert found.much_slower == [2]
    assert found.ranks == [2, 3], "it may be slow for long: its windows are counted"
    halves[3], waits[3] = [0.2, 0.2], [0.8, 0.8]
    both = find_slow(halves, waits, 1.0)
    assert both
    assert both.much_slower == [2, 3]


def trained(ranks: Ranks, slow: int, before: str, sleep_s: float) -> list[list[float]]:
    """All ranks' medians after training with BatchNorm; rank `slow` sleeps in each step."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    return steps_of(model, ranks, slow, before, sleep_s, micro_batches=2)


def steps_of(
    model: DistributedDataParallel,
    ranks: Ranks,
    slow: int,
    before: str,
    sleep_s: float,
    micro_batches: int = 1,
) -> list[list[float]]:
    """All ranks' medians after 51 steps in which rank `slow` sleeps `before` a part of the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = Clock(torch.device("cpu"))
    compute = ComputeTime(clock)
    compute.follow(model)
    for _ in range(51):
        clock.begin_step()
        for part in ("forward", "optimizer"):
            if part == "optimizer":
                optimizer.zero_grad()
                for part_of_batch in torch.randn(micro_batches, 8, 4):
                    model(part_of_batch).square().sum().backward()
            time.sleep(sleep_s if part == before and ranks.rank == slow else 0.0)
        optimizer.step()
        clock.end_step()
    medians: list[list[float]] = [[]] * ranks.world_size
    dist.all_gather_object(medians, compute.halves().tolist())
    return medians


def assert_slow(
    pool: Pool, world_size: int, train: Callable[..., Any], slow: int, before: str
) -> None:
    """Rank `slow` computes for as long as it sleeps; the others wait for as long, nearly.

    On a busy machine the others may compute longer than a short sleep. If waiting were taken for
    computing, they would do so however long the sleep is.
    """
    for sleep_s in (0.03, 0.1, 0.3, 1.0):
        found = []
        for medians in pool.run(in_group, world_size, train, slow, before, sleep_s):
            halves, waiting = [m[:2] for m in medians], [m[2:] for m in medians]
            assert min(halves[slow]) >= sleep_s
            found.append(find_slow(halves, waiting, sleep_s))
        if all(one and one.much_slower == [slow] for one in found):
            return
    pytest.fail(f"with a sleep of {sleep_s} s: {found}")


@pytest.mark.parametrize("before", ["forward", "optimizer"])
@pytest.mark.parametrize("slow", [0, 1])
def test_waiting_for_a_slow_rank_is_not_computing(pool: Pool, slow: int, before: str) -> None:
    """The other rank waits as long, in the exchange of gradients and of BatchNorm's buffers."""
    assert_slow(pool, 2, trained, slow, before)


def trained_in_shards(ranks: Ranks, slow: int, before: str, sleep_s: float) -> list[list[float]]:
    """The same with virtual ranks, and a gradient per bucket."""
    layers = [nn.Linear(4, 4) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1e-5)
    use_virtual_ranks(model, 4, PATIENCE_S)
    return steps_of(model, ranks, slow, before, sleep_s)


@pytest.mark.parametrize("before", ["forward", "optimizer"])
def test_waiting_for_a_partner_is_not_computing(pool: Pool, before: str) -> None:
    assert_slow(pool, 4, trained_in_shards, 2, before)
