"""The README's picture: the loss on 1, 2 and 4 processes, and after a kill, is one curve.

python -m tools.picture     train four times (a minute); renew docs/same_bits.json and .png
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT
from common.errors import TrainingError
from common.figure import save_figure
from common.manifest import describe_machine
from common.reading import read_metrics
from common.writing import write_json
from tools.command import attempt
from tools.comparison import run_recipe
from tools.fresh import fresh_environment

OPTIONS = [
    "--virtual-ranks",
    "4",
    "--model",
    "resnet18",
    "--lr",
    "0.02",
    "--epochs",
    "3",
    "--log-every",
    "1",
    "--snapshot-every",
    "10",
]
KILL_AFTER = 15
"""Optimizer steps [steps]."""
RESULT = ROOT / "docs" / "same_bits.json"


def kill_a_run(folder: Path) -> int:
    """Start the training on 4 processes and kill all of them; returns the last logged step."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "recipes",
        "ddp_launch",
        *OPTIONS,
        "--nproc",
        "4",
        "--output-dir",
        str(folder),
    ]
    process = subprocess.Popen(
        command, env=fresh_environment(), stdout=subprocess.DEVNULL, start_new_session=True
    )
    log = folder / "metrics.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < KILL_AFTER:
        if process.poll() is not None:
            raise TrainingError("the run ended before it was killed")
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return int(json.loads(log.read_text().splitlines()[-1])["step"])


def measure(folder: Path) -> dict[str, Any]:
    """Losses and weights of each run.

    Raises:
        TrainingError: the weights of the runs differ.
    """
    runs: dict[str, Any] = {}
    killed_after = kill_a_run(folder / "killed")
    for name, nproc, run in (
        ("1 process", 1, folder / "1"),
        ("2 processes", 2, folder / "2"),
        ("4 processes", 4, folder / "4"),
        ("4 processes, killed; resumed on 2", 2, folder / "killed"),
    ):
        summary = run_recipe("ddp_launch", [*OPTIONS, "--nproc", str(nproc)], run)
        losses = [line["loss"] for line in read_metrics(run) if "loss" in line]
        runs[name] = {"weights_sha256": summary["weights_sha256"], "losses": losses}
    if len({run["weights_sha256"] for run in runs.values()}) > 1:
        raise TrainingError(f"the weights of the runs differ: {runs}")
    return {"killed_after": killed_after, "runs": runs}


def draw(result: dict[str, Any], path: Path) -> None:
    """The curves, each thinner than the one below it."""

    def plot(axes: Any) -> None:
        for width, (name, run) in zip((9, 6, 3.5, 1.2), result["runs"].items(), strict=True):
            losses = run["losses"]
            axes.plot(range(1, len(losses) + 1), losses, linewidth=width, label=name)
        axes.axvline(result["killed_after"], color="black", linestyle=":", linewidth=1)
        axes.annotate(
            "killed",
            (result["killed_after"], axes.get_ylim()[1]),
            (4, -12),
            textcoords="offset points",
        )
        digest = next(iter(result["runs"].values()))["weights_sha256"]
        axes.set(
            xlabel="step",
            ylabel="loss",
            title=f"ddp_launch --virtual-ranks 4: four runs, one result\n{digest}",
        )
        axes.title.set_fontsize(9)
        axes.legend()

    save_figure(path, plot)


def main() -> None:
    """Train and draw."""
    about = {"command": "python -m tools.picture", "options": OPTIONS, **describe_machine()}
    with tempfile.TemporaryDirectory() as scratch:
        write_json(RESULT, {"about": about, **measure(Path(scratch))})
    draw(json.loads(RESULT.read_text()), RESULT.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(attempt(main))
