"""What a snapshot costs training: ResNet-50 with momentum, 20 steps with one beside 20 without."""

import json
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import instrumented
from common.comparison import spread
from common.errors import TrainingError
from common.figure import save_figure
from common.ranks import Ranks
from common.record import mebibytes, progress_bar

WINDOW = 20
"""Steps: one snapshot in so many."""
PAIRS = 2
"""Of windows, in one epoch: with a snapshot at their beginning, and without."""
OPTIONS = ["--nproc", "2", "--model", "resnet50", "--lr", "0.02", "--data", "fake",
           "--image-size", "160", "--global-batch-size", "6", "--keep-snapshots", "1",
           "--snapshot-every", str(2 * WINDOW),
           "--max-steps", str((2 * PAIRS + 4) * WINDOW)]  # fmt: skip


def run_once(folder: Path) -> dict[str, Any]:
    """Seconds of each step of one run, and the snapshot's size.

    Raises:
        TrainingError: the run failed.
    """
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "recipes", "ddp_launch", *OPTIONS, "--output-dir", folder / "run"],
        env=instrumented(folder), capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise TrainingError(done.stderr[-800:])
    stamps = json.loads((folder / "rank_0.json").read_text())["stamps"]
    (snapshot,) = (folder / "run" / "snapshots").glob("*.pt")
    return {"steps_s": [after - before for before, after in pairwise(stamps)],
            "snapshot_bytes": snapshot.stat().st_size}  # fmt: skip


def windows(steps_s: list[float]) -> list[tuple[float, float]]:
    """Seconds of each pair of windows, with a snapshot and without.

    Args:
        steps_s: seconds from the end of step 1 to that of 2, from 2 to 3, ...; a snapshot begins
            after steps 40, 80, ...; the first is left out, whose copy takes fresh memory.
    """
    found = []
    for pair in range(PAIRS):
        begin = (2 * pair + 4) * WINDOW - 1
        middle, end = begin + WINDOW, begin + 2 * WINDOW
        found.append((sum(steps_s[begin:middle]), sum(steps_s[middle:end])))
    return found


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Windows of some runs, and how much longer one lasts with a snapshot in it."""
    runs = []
    with progress_bar(rounds, 0, Ranks(), unit="run") as bar:
        for number in range(rounds):
            runs.append(run_once(folder / str(number)))
            bar.update()
    pairs = [pair for run in runs for pair in windows(run["steps_s"])]
    shares = [100 * (with_one / without - 1) for with_one, without in pairs]
    copies = [run["steps_s"][4 * WINDOW - 1] - statistics.median(run["steps_s"]) for run in runs]
    step_s = statistics.median(second for run in runs for second in run["steps_s"])
    row = [mebibytes(runs[0]["snapshot_bytes"]), f"{step_s:.2f}",
           spread(shares, digits=1), f"{1000 * statistics.median(copies):.0f}"]  # fmt: skip
    table = {
        "title": f"ResNet-50 with momentum at 160 px on 2 processes, a snapshot every {WINDOW} "
        f"steps; median (least to most) of {len(pairs)} pairs of {WINDOW} steps with and without.",
        "columns": [
            "a snapshot",
            "a step [s]",
            "more time with one [%]",
            "the step after it is longer by [ms]",
        ],
        "rows": [row],
    }
    return {"tables": [table], "shares": shares, "runs": runs}


def draw(result: dict[str, Any], path: Path) -> None:
    """Seconds of each step of the first run, snapshots marked."""

    def plot(axes: Any) -> None:
        steps_s = result["runs"][0]["steps_s"]
        axes.plot(range(2, len(steps_s) + 2), steps_s, ".-", label="one run")
        for pair in range(PAIRS + 1):
            axes.axvline((2 * pair + 2) * WINDOW + 0.5, color="tab:red", linestyle="--",
                         label=None if pair else "a snapshot begins")  # fmt: skip
        axes.set(xlabel="step", ylabel="seconds", ylim=(0, None))
        axes.legend()

    save_figure(path, plot)
