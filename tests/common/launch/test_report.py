"""Which of several failures is shown, and where rank 0's store listens."""

import json
import logging
import mmap
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from common import log
from common.errors import InputError
from common.launch import start
from common.launch.port import bind
from common.launch.ranks import Ranks
from common.launch.report import report, show_cause
from tests.helpers.commands import Recipe, wait_for
from tests.helpers.failures import LATE, WAITED, said
from tests.helpers.pool import Pool, call_main

GONE = RuntimeError("Read error [127.0.0.1]:60649: Connection reset by peer")


@pytest.mark.parametrize(
    ("failed", "silent", "left", "shown"),
    [
        ([(0, 1), (1, 1)], {}, [said(0, GONE, 1.0), said(1, "a bug", 2.0)], "rank 1: a bug"),
        ([(0, 1), (1, -9)], {}, [said(0, GONE)], "was killed by SIGKILL: perhaps out of memory"),
        ([(1, 1), (0, -6)], {}, [said(1, "a bug")], "rank 1: a bug"),
        ([(0, 1), (1, 7)], {}, [said(0, GONE)], "exited with status 7"),
        ([(0, 1)], {1: "stopped by a signal"}, [said(0, LATE)], "rank 1 on .* stopped answering"),
        ([(0, 1)], {1: "computing"}, [said(0, GONE)], r"rank 0: .*reset by peer \(rank 1 here"),
        ([(0, 1)], {1: "waiting"}, [said(0, LATE)], r"rank 0: Timed out .*\(rank 1 here went on"),
    ],
)
def test_the_failure_that_the_others_follow_from_is_shown(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    failed: list[tuple[int, int]],
    silent: dict[int, str],
    left: list[dict[str, Any]],
    shown: str,
) -> None:
    errors = tmp_path / "errors"
    lines = [*map(json.dumps, left), '{"rank": 3, "li']  # the last one was killed while it wrote
    errors.write_text("\n".join(lines))
    assert show_cause(failed, silent, errors) == 1
    first = capsys.readouterr().err.strip().splitlines()[0]
    assert first.startswith("error: ")
    assert re.search(shown, first), first


HEARD = """\
[rank{rank}]:[E1016 03:31:39.100000000 ProcessGroupNCCL.cpp:1515] [PG ID 0 PG GUID 0(default_pg) \
Rank {rank}] Received a dump signal due to a collective timeout from rank 0 and we will try our \
best to dump the debug info.
"""


@pytest.mark.parametrize(
    ("failed", "silent", "left", "waited", "shown"),
    [
        ([(0, -6)], {1: "computing"}, [], [0], r"rank 1 on \S+ stopped answering \(computing\)"),
        ([(0, -6), (2, -6)], {1: "waiting"}, [], [2, 0], "rank 1 on .* stopped answering"),
        ([(0, -6), (1, -6)], {}, [], [0], "rank 1 on .* stopped answering"),
        ([(0, -6)], {1: "computing"}, [], [], "rank 0 on .* was killed by SIGABRT"),
        ([(0, -6), (1, -9)], {}, [], [0], "rank 1 on .* was killed by SIGKILL"),
        ([(0, -6), (1, 1)], {}, [said(1, "a bug")], [0], "rank 1: a bug"),
        ([(0, -6), (1, 7)], {}, [], [0], "rank 1 on .* exited with status 7"),
        ([(0, -6), (1, -6)], {}, [], [0, 1], "rank 0 on .* Watchdog caught .*: a rank did not ans"),
    ],
)
def test_the_rank_that_nccls_watchdog_waited_for_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    failed: list[tuple[int, int]],
    silent: dict[int, str],
    left: list[dict[str, Any]],
    waited: list[int],
    shown: str,
) -> None:
    errors = tmp_path / "errors"
    errors.write_text("\n".join(map(json.dumps, left)))
    text = "".join(WAITED.format(rank=rank) for rank in waited) + HEARD.format(rank=1)
    assert show_cause(failed, silent, errors, text) == 1
    first = capsys.readouterr().err.strip().splitlines()[0]
    assert re.search(f"^error: {shown}", first), first


SAYS = {
    "libtorch_cuda.so": ("Watchdog caught collective operation timeout: ", "PG GUID "),
    "libtorch_cuda.so, from torch 2.15 on": (
        "timeout - collective operation timed out",
        "nccl hit async error",
    ),
    "libnccl.so.2": ("remote process exited or there was a network error",),
}
"""What this project looks for in the messages of libraries."""


@pytest.mark.parametrize("library", SAYS)
def test_the_libraries_still_say_what_is_looked_for(library: str) -> None:
    name, _, since = library.partition(", ")
    places = [Path(torch.__file__).parent, *(Path(folder) / "nvidia" for folder in sys.path)]
    found = next((path for place in places for path in place.rglob(name)), None)
    if not found:
        pytest.skip(f"this torch has no {name}")
    if since and torch.__version__ < "2.15":
        pytest.skip("torch 2.15 brought nccl2")
    with found.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        missing = [text for text in SAYS[library] if content.find(text.encode()) < 0]
    assert not missing


PREFIXES = ("[rank1]:[E1016 03:31:38.9 x.cpp:1] ", "[PG GUID 0(default_pg) Rank 1] ", "[Rank 1] ")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Watchdog caught collective operation timeout: WorkNCCL(", r"Watchdog caught .*: a rank"),
        ("ProcessGroupNCCL2: timeout - collective operation timed out", "Watchdog caught"),
        (
            "error - nccl hit async error: remote process exited or there was",
            "NCCL: rem.* gone",
        ),
        ("error - nccl hit async error: unhandled system error", "NCCL: rem.* gone"),
        ("NCCL error: remote process exited or there was a network error", "NCCL: rem.* gone"),
    ],
)
def test_a_rank_that_nccl_aborts_because_of_another_host_is_not_blamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prefix: str, text: str, shown: str
) -> None:
    errors = tmp_path / "errors"
    errors.touch()
    assert show_cause([(1, -6)], {}, errors, f"{prefix}{text}\n") == 1
    first = capsys.readouterr().err.strip().splitlines()[0]
    assert re.search(f"^error: rank 1 on .*{shown}", first), first
    assert "SIGABRT" not in first


def test_a_rank_that_nccl_aborts_because_of_its_own_gpu_is_blamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = tmp_path / "errors"
    errors.touch()
    text = "error - nccl hit async error: unhandled cuda error"
    assert show_cause([(1, -6)], {}, errors, f"{PREFIXES[0]}{text}\n") == 1
    assert "rank 1 on" in (said := capsys.readouterr().err)
    assert "was killed by SIGABRT" in said


def test_an_error_is_shown_before_the_runs_folder_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk that does not answer would keep it for ever."""
    did: list[str] = []
    monkeypatch.delenv("RECIPES_ERRORS", raising=False)
    monkeypatch.setattr(sys.modules[report.__module__], "say", lambda _: did.append("say"))
    monkeypatch.setattr(sys.modules[report.__module__], "_keep", lambda _: did.append("keep"))
    monkeypatch.setattr("common.run_status.failed", lambda *_: did.append("status"))
    assert report(ZeroDivisionError("a bug"), Ranks()) == 1
    assert did == ["say", "keep", "status"]


def test_the_launcher_ends_though_a_rank_cannot_be_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has reported its error, and then waits for a disk that does not answer."""
    monkeypatch.setattr(start, "GRACE_S", 0.1)
    monkeypatch.setattr(start.Child, "doing", lambda _: "waiting for a disk")
    monkeypatch.setattr(start.Child, "kill", lambda *_: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for name in ("ERRORS", "MESSAGES", "PARENT", "COMMAND"):
        monkeypatch.setenv(f"RECIPES_{name}", "")  # and back, after the test
    start._open_report_channels.cache_clear()
    start.prepare_launch()
    errors, _ = start._open_report_channels()
    errors.write_text(json.dumps(said(1, "no snapshot")) + "\n")
    ranks = [start.Child(rank, 0, lambda: None) for rank in (0, 1)]
    assert start.supervise(ranks) == 1
    start._open_report_channels.cache_clear()
    assert "error: rank 1: no snapshot" in capsys.readouterr().err


# Stand-ins: no NCCL. Rank 1 hangs, rank 0 says and does what torch's watchdog does.
HANGING_RANKS = """
import os, sys, time
from common.launch import start
if "RANK" in os.environ:
    from common.launch.process import show_messages_to_parent
    show_messages_to_parent()
    print("Python's own line", file=sys.stderr)
    if os.environ["RANK"] == "0":
        while not os.path.exists("hangs"):
            time.sleep(0.01)
        os.write(2, os.environ["WAITED"].encode())
        os.abort()
    open("hangs", "w").close()
    while True:
        pass
start.GRACE_S = 1.0
sys.exit(start.launch([__file__], 2, start.LaunchOptions()))
"""


def test_a_rank_that_hangs_on_nccl_is_named_by_the_launcher(recipe: Recipe) -> None:
    script = recipe.tmp_path / "ranks.py"
    script.write_text(HANGING_RANKS)
    waited = WAITED.format(rank=0)
    process = recipe.start(sys.executable, script, env={"WAITED": waited})
    done = recipe.finish(process, recipe.tmp_path)
    assert done.status == 1
    assert waited in done.stderr, "what the library said is shown"
    assert done.stderr.count("Python's own line\n") == 2
    (error,) = done.errors
    assert re.search(r"rank 1 on \S+ stopped answering \(computing\)", error)


RANKS_THAT_EXIT = """
import os, sys
from common.launch import start
from common.launch.process import run_rank
from common.launch.ranks import Ranks
if rank := os.environ.get("RANK"):
    def body():
        if f"{rank}=" in os.environ["STATUSES"]:
            os._exit(int(os.environ["STATUSES"].split(f"{rank}=")[1].split()[0]))
        raise RuntimeError("Connection closed by peer [127.0.0.1]:29500")
    sys.exit(run_rank(body, Ranks(int(rank), int(rank), 2, 2)))
sys.exit(start.launch([__file__], 2, start.LaunchOptions()))
"""


def test_a_rank_keeps_what_ended_it_in_the_runs_folder(pool: Pool, tmp_path: Path) -> None:
    options = "--nproc 1 --lr 1e30 --epochs 1 --output-dir".split()
    ((status, _, said),) = pool.run(call_main, 1, "ddp_launch", [*options, str(tmp_path / "run")])
    assert status == 1
    kept = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert re.findall("error: .*", kept) == re.findall("error: .*", said) != []


def test_a_rank_keeps_the_traceback_of_a_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = logging.FileHandler(tmp_path / "rank_0.log")
    monkeypatch.setattr(log, "handlers", [file])
    with pytest.raises(ZeroDivisionError) as bug:
        raise ZeroDivisionError("a bug")
    assert report(bug.value, Ranks()) == 1
    file.close()
    kept = (tmp_path / "rank_0.log").read_text()
    assert kept.startswith("error: rank 0 on ")
    assert "in test_a_rank_keeps_the_traceback_of_a_bug" in kept


@pytest.mark.parametrize(
    ("statuses", "says"),
    [
        ("1=0", r"rank 1 on \S+ ended too early \(status 0\)"),
        ("1=75", r"rank 1 on \S+ ended too early \(status 75\)"),
        ("0=0 1=0", r"rank [01] on \S+ ended too early \(status 0\)"),
        ("0=75 1=75", r"rank [01] on \S+ ended too early \(status 75\)"),
    ],
)
def test_a_rank_that_exits_in_the_middle_of_its_work_has_failed(
    recipe: Recipe, statuses: str, says: str
) -> None:
    """And not the rank that lost its connection to it."""
    script = recipe.tmp_path / "ranks.py"
    script.write_text(RANKS_THAT_EXIT)
    process = recipe.start(sys.executable, script, env={"STATUSES": statuses})
    done = recipe.finish(process, recipe.tmp_path)
    assert done.status == 1
    (error,) = done.errors
    assert re.search(rf"{says}: .*look for exit\(\)", error)
    assert "Traceback" not in done.stderr


def test_code_that_calls_exit_in_a_run_of_one_process_is_no_success(recipe: Recipe) -> None:
    script = (
        "import sys; from common.launch.process import run_rank; from common.launch.ranks import "
        "Ranks; sys.exit(run_rank(lambda: sys.exit(0), Ranks()))"
    )
    done = recipe.finish(recipe.start(sys.executable, "-c", script), recipe.tmp_path)
    assert (done.status, len(done.errors)) == (1, 1)
    assert "ended too early (status 0): its work was not done: look for exit()" in done.errors[0]
    assert "Traceback" not in done.stderr


def test_a_store_listens_where_it_is_looked_for() -> None:
    def where(address: str, *, several_hosts: bool) -> str:
        with bind(address, 0, several_hosts=several_hosts) as store:
            return str(store.getsockname()[0])

    assert where("127.0.0.1", several_hosts=False) == "127.0.0.1"
    assert where("127.0.0.1", several_hosts=True) == "127.0.0.1"
    assert where("localhost", several_hosts=False) in ("127.0.0.1", "::1")
    everywhere = ("::", "0.0.0.0")
    assert where("localhost", several_hosts=True) in everywhere, "a name, of which each host may"
    assert where("192.0.2.1", several_hosts=True) in everywhere, "translated on the way"
    with pytest.raises(
        InputError, match=r"192\.0\.2\.1' is no address of this host .* \(unset MAST"
    ):
        where("192.0.2.1", several_hosts=False)
    with pytest.raises(socket.gaierror):
        where("no-such-host.invalid", several_hosts=False)


RANK_WITH_A_STUCK_CHILD = """
import multiprocessing, signal, sys, threading
from common.launch.process import run_rank
from common.launch.ranks import Ranks

def stuck():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    threading.Event().wait()

def body():
    child = multiprocessing.get_context("fork").Process(target=stuck)
    child.start()
    print(child.pid, flush=True)
    threading.Event().wait()

run_rank(body, Ranks())
"""


def test_what_a_rank_forked_ends_with_it(recipe: Recipe) -> None:
    process = recipe.start(sys.executable, "-c", RANK_WITH_A_STUCK_CHILD)
    assert process.stdout
    child = Path("/proc") / process.stdout.readline().strip() / "stat"
    process.kill()  # it can do nothing about its child any more
    process.wait()

    def gone() -> bool:
        try:
            return child.read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            return True

    wait_for(gone)


STEPS_THAT_ALLOCATE = """
import resource
import torch
from common.launch.process import run_rank
from common.launch.ranks import Ranks

def body():
    for step in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.zeros(2**24).add_(1)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

run_rank(body, Ranks())
"""


def test_a_step_finds_the_memory_of_the_step_before(recipe: Recipe) -> None:
    process = recipe.start(sys.executable, "-c", STEPS_THAT_ALLOCATE)
    result = recipe.finish(process, recipe.tmp_path).assert_ok()
    assert int(result.stdout) < 100, "pages were cleared anew"
