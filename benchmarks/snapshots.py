"""What a snapshot costs training: ResNet-50 with momentum, 20 steps with one beside 20 without."""

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.input import write_photos
from benchmarks.peers.measure import run_stamped
from common.comparison import spread
from common.figure import save_figure
from common.ranks import Ranks
from common.record import mebibytes, progress_bar

WINDOW = 20
"""Steps: one snapshot in so many."""
PAIRS = 1
"""Of a window with a snapshot at its beginning and those around it without, in one epoch."""
STEPS, BATCH_SIZE = (2 * PAIRS + 4) * WINDOW, 6
OPTIONS = ["--nproc", "2", "--model", "resnet50", "--lr", "0.02", "--data", "imagefolder",
           "--no-verify-images", "--image-size", "160", "--global-batch-size", str(BATCH_SIZE),
           "--keep-snapshots", "1", "--snapshot-every", str(2 * WINDOW),
           "--max-steps", str(STEPS)]  # fmt: skip


def run_once(folder: Path, photos: Path) -> dict[str, Any]:
    """Seconds of each step of one run, and the snapshot's size."""
    stamps = run_stamped(folder, [*OPTIONS, "--data-path", str(photos)])
    (snapshot,) = (folder / "run" / "snapshots").glob("*.pt")
    return {"steps_s": [after - before for before, after in pairwise(stamps)],
            "snapshot_bytes": snapshot.stat().st_size}  # fmt: skip


def windows(steps_s: list[float]) -> list[tuple[float, float]]:
    """Seconds of each window with a snapshot, and the mean of those before and after it without.

    Args:
        steps_s: seconds from the end of step 1 to that of 2, from 2 to 3, ...; a snapshot begins
            after steps 40, 80, ...; the first is left out, whose copy takes fresh memory.
    """
    ends = range(4 * WINDOW, len(steps_s) + 2, WINDOW)
    totals = [sum(steps_s[end - WINDOW - 1 : end - 1]) for end in ends]
    return [
        (totals[place], (totals[place - 1] + totals[place + 1]) / 2)
        for place in range(1, len(totals), 2)
    ]


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Windows of some runs, and how much longer one lasts with a snapshot in it."""
    runs = []
    write_photos(folder / "photos", train=STEPS * BATCH_SIZE)
    with progress_bar(rounds, 0, Ranks(), unit="run") as bar:
        for number in range(rounds):
            runs.append(run_once(folder / str(number), folder / "photos"))
            bar.update()
    pairs = [pair for run in runs for pair in windows(run["steps_s"])]
    shares = [100 * (with_one / without - 1) for with_one, without in pairs]
    copies = [run["steps_s"][4 * WINDOW - 1] - statistics.median(run["steps_s"]) for run in runs]
    step_s = statistics.median(second for run in runs for second in run["steps_s"])
    row = [mebibytes(runs[0]["snapshot_bytes"]), f"{step_s:.2f}",
           spread(shares, digits=1), f"{1000 * statistics.median(copies):.0f}"]  # fmt: skip
    table = {
        "title": f"ResNet-50 with momentum at 160 px on 2 processes, a snapshot every {WINDOW} "
        f"steps; median (least to most) of {len(pairs)} times {WINDOW} steps with "
        f"one, each beside the {WINDOW} before and after it.",
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
