"""`--restarts`: start all ranks again, from the newest snapshot, after one has failed.

Rank 0 leaves its last step in a file in memory. The launcher reads there whether a start came
further; the next rank 0 reads there in which folder to go on, and what the restart has cost.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from common.errors import STATUS_BAD_INPUT, STATUS_FAILED, STATUS_STOPPED
from common.launch.process import python_path
from common.launch.report import say
from common.launch.start import LaunchOptions, forwarded, memory_file, usable_gpus


class Reached(NamedTuple):
    """The run's folder, its last step, when that was done [s, monotonic], and by which process."""

    folder: str = ""
    step: int = 0
    time_s: float = 0.0
    pid: int = 0


@cache
def _file() -> int | None:
    path = os.environ.get("RECIPES_REACHED")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC) if path else None


def reached() -> Reached:
    """What rank 0 recorded last, perhaps before a restart; empty without `--restarts`."""
    line = os.pread(file, 2**13, 0).split(b"\n")[0] if (file := _file()) else b""
    return Reached(*json.loads(line)) if line else Reached()


def record(folder: Path, step: int = 0, resumed_from: int = 0) -> str:
    """Record rank 0's step, or at the start its folder; after a restart's first step, its cost."""
    if not (file := _file()) or ((before := reached()).folder and not step):
        return ""
    now = Reached(str(folder), step, time.monotonic(), os.getpid())
    os.pwrite(file, json.dumps(now).encode() + b"\n", 0)
    if before.pid in (0, now.pid):
        return ""
    lost_s = now.time_s - before.time_s
    lost = max(0, before.step - resumed_from)  # 0 if the first start, which resumed, made no step
    return f"restarted: lost {lost_s:.1f} s, steps done again: {lost}, now at step {step}"


def usable_gpus_now() -> int:
    """Usable GPUs, counted by a new process: in this one the driver still counts a lost GPU."""
    code = "from common.launch.start import usable_gpus; print(usable_gpus())"
    env = {**os.environ, "PYTHONPATH": python_path(None)}
    counted = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    return int(counted.stdout or 0)


def with_restarts(start: Callable[[int], int], nproc: int, options: LaunchOptions) -> int:
    """Start `nproc` ranks with `start`, and again after a failure; return the last exit status.

    It gives up after two failed restarts from the same snapshot, on as many processes each: a third
    would most likely fail like them.
    """
    if not options.restarts:
        return start(nproc)
    os.environ["RECIPES_REACHED"] = str(memory_file("reached"))
    tried, processes, gpus = Counter[str](), nproc, usable_gpus()
    for number in range(options.restarts + 1):
        before = reached()
        status = start(processes)
        after = reached()
        failed = status in (STATUS_FAILED, STATUS_BAD_INPUT)
        left = usable_gpus_now() if failed and after.step and gpus else gpus
        if left < gpus and status == STATUS_BAD_INPUT:  # what was right when the run began
            status = STATUS_FAILED
        if status != STATUS_FAILED:
            return status
        if forwarded:  # asked to stop, too: the newest snapshot is the state that is saved
            return STATUS_STOPPED
        shrinks = options.shrink and number and (after == before or not after.step)
        processes = max(1, processes // 2) if shrinks else nproc
        if options.shrink and left < gpus:
            processes = min(processes, max(1, left))
        found = Path(after.folder, "snapshots").glob("step_*.pt") if after.folder else ()
        snapshots = (path.name for path in found)
        source = f"newest snapshot {max(snapshots, default='none')}, on {processes} processes"
        tried[source] += 1
        if number == options.restarts:
            say(f"not restarted: --restarts {number} is used up")
        elif tried[source] > 2:
            say(f"not restarted: two restarts have failed ({source})")
            break
        else:
            say(f"restart {number + 1} of {options.restarts}: {source}")
    return status
