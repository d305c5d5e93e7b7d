"""`make gpu-check` itself: it ends in time whatever hangs, keeps what it knows, leaves nothing."""

import json
import os
import signal
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests import gpu_check
from tests.gpu_check.__main__ import PARTS
from tests.gpu_check.several import covered, kernels
from tests.helpers.commands import Recipe
from tests.helpers.pool import PATIENCE_S

FAKE = """
import os, sys, threading, time
from tests.gpu_check import __main__ as program
from tests.gpu_check.check import Part

SLEEPER = '''
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print("begun", os.getpid(), child.pid, flush=True)
time.sleep(600)
'''

def fine(check):
    return {"holds": True, "says": check.call(sys.executable, "-c", "print('hello')")}

def command_hangs(check):
    return {"holds": True, "says": check.call(sys.executable, "-c", SLEEPER)}

def function_hangs(check):
    threading.Event().wait()

def raises(check):
    check.call(sys.executable, "-c", "import sys; sys.exit('my last words')")

program.about = lambda log: {"gpus": []}
program.PARTS.clear()
for name, checks in {
    "hanging": [fine, command_hangs, function_hangs, raises],
    "short": [fine],
}.items():
    program.PARTS[name] = Part({one.__name__: one for one in checks}, at_once=4)
sys.exit(program.main())
"""
"""gpu_check's command line with other parts."""


def parts(folder: Path, *options: str) -> list[str]:
    return [sys.executable, "-c", FAKE, "--device", "cpu", "--output", str(folder), *options]


def sleepers(log: Path) -> list[int]:
    """The processes of `command_hangs`."""
    return [int(word) for word in log.read_text().split()[1:]]


def alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_check_that_hangs_is_ended_and_named_and_the_others_are_kept(
    recipe: Recipe, tmp_path: Path
) -> None:
    process = recipe.start(*parts(tmp_path, "--limit-s", "5"), env={"TMPDIR": str(tmp_path)})
    done = recipe.finish(process, tmp_path)
    assert done.status == 1, done.stderr
    found = json.loads((tmp_path / "hanging.json").read_text())["checks"]
    assert {name: one["holds"] for name, one in found.items()} == {
        "fine": True,
        "raises": False,
        "command_hangs": False,
        "function_hangs": False,
    }
    assert "my last words" in found["raises"]["error"]
    for name in ("command_hangs", "function_hangs"):
        assert "hangs" in found[name]["error"]
        assert f"FAILS  {name}" in done.stdout
    # The next part has run, and the logs of both are in one archive.
    assert json.loads((tmp_path / "short.json").read_text())["checks"]["fine"]["holds"]
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        archive.extractall(tmp_path / "logs", filter="data")
    assert (tmp_path / "logs/short/logs/fine.1").read_text() == "hello\n"
    began = sleepers(tmp_path / "logs/hanging/logs/command_hangs.1")
    assert len(began) == 2
    assert not any(map(alive, began))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stop_leaves_the_results_so_far_and_no_process(
    recipe: Recipe, tmp_path: Path, number: signal.Signals
) -> None:
    process = recipe.start(*parts(tmp_path, "--only", "hanging"), env={"TMPDIR": str(tmp_path)})
    result = tmp_path / "hanging.json"

    def begun() -> list[int]:
        """The sleepers, once the two checks that end have been written."""
        logs = list(tmp_path.rglob("command_hangs.1"))
        found = json.loads(result.read_text())["checks"] if result.exists() else {}
        return sleepers(logs[0]) if logs and {"fine", "raises"} <= found.keys() else []

    until = time.monotonic() + PATIENCE_S
    while len(begun()) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    child, grandchild = begun()
    os.kill(process.pid, number)
    assert recipe.finish(process, tmp_path).status in (128 + number, -number)
    if number == signal.SIGKILL:  # the kernel ends its children only, and ranks end with theirs
        os.kill(grandchild, signal.SIGKILL)
    else:
        assert (tmp_path / "logs.tar.gz").exists()
    while alive(child) or alive(grandchild):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert json.loads(result.read_text())["checks"]["fine"]["holds"]


def test_the_overlap_of_kernels_is_what_a_profile_shows() -> None:
    events = [
        {"cat": "kernel", "name": name, "ts": start, "dur": length}
        for name, start, length in [
            ("gemm", 0, 10),
            ("gemm", 5, 10),
            ("ncclDevKernel_AllReduce", 12, 8),
            ("relu", 19, 1),
        ]
    ]
    times = kernels([*events, {"name": "no kernel"}])
    assert times == {"nccl": [(12, 20)], "other": [(0, 10), (10, 15), (19, 20)]}
    assert covered((12, 20), times["other"]) == 4


def test_the_parts_are_named_on_the_first_screen() -> None:
    assert all(f"    {name} " in str(gpu_check.__doc__) for name in PARTS)
