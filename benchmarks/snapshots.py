"""How much a snapshot delays training: ResNet-50, 20 steps with a snapshot beside 20 without."""

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.input import write_files
from benchmarks.peers.measure import run_stamped
from common.figure import save_figure
from common.terminal import mebibytes
from tools.comparison import spread

WINDOW = 20
"""A window has a snapshot at its start, or none [steps]."""
BATCH_SIZE = 6
OPTIONS = [
    "--nproc",
    "2",
    "--model",
    "resnet50",
    "--lr",
    "0.02",
    "--data",
    "imagefolder",
    "--no-verify-images",
    "--image-size",
    "160",
    "--global-batch-size",
    str(BATCH_SIZE),
    "--keep-snapshots",
    "1",
    "--snapshot-every",
    str(2 * WINDOW),
]


def windows(steps_s: list[float]) -> list[tuple[float, float]]:
    """Seconds of each window with a snapshot, and the mean of the windows before and after it.

    Args:
        steps_s: seconds from the end of step 1 to the end of step 2, and so on. A snapshot begins
            after steps 40, 80, ... The first one is left out: its copy allocates memory.
    """
    ends = range(4 * WINDOW, len(steps_s) + 2, WINDOW)
    totals = [sum(steps_s[end - WINDOW - 1 : end - 1]) for end in ends]
    return [
        (totals[place], (totals[place - 1] + totals[place + 1]) / 2)
        for place in range(1, len(totals), 2)
    ]


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """One run with `rounds` windows with a snapshot, and how much longer each of them takes."""
    steps = (2 * rounds + 4) * WINDOW
    write_files(folder / "photos", train=steps * BATCH_SIZE)
    stamps = run_stamped(
        folder / "stamped",
        [*OPTIONS, "--max-steps", str(steps), "--data-path", str(folder / "photos")],
    )
    (snapshot,) = (folder / "stamped" / "run" / "snapshots").glob("*.pt")
    steps_s = [after - before for before, after in pairwise(stamps)]
    shares = [100 * (with_one / without - 1) for with_one, without in windows(steps_s)]
    step_s = statistics.median(steps_s)
    copies_s = [steps_s[end - 1] - step_s for end in range(4 * WINDOW, steps, 2 * WINDOW)]
    row = [
        mebibytes(snapshot.stat().st_size),
        f"{step_s:.2f}",
        spread(shares, digits=1),
        f"{1000 * statistics.median(copies_s):.0f}",
    ]
    table = {
        "title": f"ResNet-50 with momentum at 160 px on 2 processes, a snapshot in {WINDOW} steps; "
        f"median (least to most) of {rounds} times {WINDOW} steps with one in one run, each beside "
        f"the {WINDOW} before and after it, which have none.",
        "columns": [
            "a snapshot",
            "a step [s]",
            "more time with one [%]",
            "the step after it is longer by [ms]",
        ],
        "rows": [row],
    }
    return {"tables": [table], "shares": shares, "runs": [{"steps_s": steps_s}]}


def on_page(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The table with a shorter title."""
    (table,) = result["tables"]
    title = (
        f"ResNet-50 at 160 px on 2 processes: {WINDOW} steps with one snapshot, beside the "
        f"{WINDOW} before and after; median (least to most) of {len(result['shares'])}."
    )
    return [{**table, "title": title}]


def draw(result: dict[str, Any], path: Path) -> None:
    """Seconds of each step, and the snapshots."""

    def plot(axes: Any) -> None:
        steps_s = result["runs"][0]["steps_s"]
        axes.plot(range(2, len(steps_s) + 2), steps_s, ".-")
        for step in range(2 * WINDOW, len(steps_s), 2 * WINDOW):
            axes.axvline(
                step + 0.5,
                color="tab:red",
                linestyle="--",
                label="a snapshot begins" if step == 2 * WINDOW else None,
            )
        axes.set(xlabel="step", ylabel="seconds", ylim=(0, None))
        axes.legend()

    save_figure(path, plot)
