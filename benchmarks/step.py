"""What the options of a step are worth, and what they do to the loss: two models on 2 processes."""

import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import run_stamped
from common.comparison import in_turn, median, spread
from common.figure import save_figure
from common.record import read_metrics

SETTLED = 8
"""Steps at a run's beginning that do not count."""
DEFAULT = "the default (fp32)"
VARIANTS: dict[str, list[str]] = {
    DEFAULT: [],
    "`--channels-last`": ["--channels-last"],
    "`--precision bf16`": ["--precision", "bf16"],
    "`--compile`": ["--compile"],
}
MODELS: dict[str, list[str]] = {
    "convnet, 8 px, 48 images a rank": ["--epochs", "15"],
    "ResNet-18, 64 px, 8 images a rank": [
        "--model", "resnet18", "--image-size", "64", "--global-batch-size", "16", "--lr", "0.02",
        "--max-steps", "24",
    ],
}  # fmt: skip


def run_once(case: str, folder: Path) -> dict[str, Any]:
    """Start-up to the first step [s], a median step [s], and every step's loss."""
    model, variant = case.split(": ")
    started = time.time()
    options = ["--nproc", "2", "--log-every", "1", *MODELS[model], *VARIANTS[variant]]
    stamps = run_stamped(folder, options)
    steps_s = [after - before for before, after in pairwise(stamps)]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    losses = [line["loss"] for line in read_metrics(folder / "run") if "loss" in line]
    return {"start_up_s": stamps[0] - started, "step_s": statistics.median(steps_s[SETTLED:]),
            "val_accuracy": summary["val_accuracy"], "losses": losses}  # fmt: skip


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Every variant of every model in turn."""
    cases = [f"{model}: {variant}" for model in MODELS for variant in VARIANTS]
    runs = in_turn(cases, lambda case, n: run_once(case, folder / f"{n} {case}"), rounds)
    rows = []
    for case, found in runs.items():
        model, variant = case.split(": ")
        default = runs[f"{model}: {DEFAULT}"]
        faster = [theirs["step_s"] / ours["step_s"]
                  for ours, theirs in zip(found, default, strict=True)]  # fmt: skip
        losses = found[0]["losses"]
        rows.append([model, variant, f"{1000 * median(found, 'step_s'):.1f}",
                     "1" if variant == DEFAULT else spread(faster),
                     f"{median(found, 'start_up_s'):.1f}",
                     f"{statistics.mean(losses[:8]):.3f} to {statistics.mean(losses[-8:]):.3f}",
                     f"{found[0]['val_accuracy']:.3f}"])  # fmt: skip
    table = {
        "title": "ddp_launch on 2 processes with a thread each; median (least to most) of "
        f"{rounds} rounds in turn. The losses are those of the first and the last 8 steps.",
        "columns": ["model", "options", "a step [ms]", "steps/s over the default", "start-up [s]",
                    "loss", "val_accuracy"],
        "rows": rows,
    }  # fmt: skip
    return {"tables": [table], "runs": runs}


def draw(result: dict[str, Any], path: Path) -> None:
    """The loss of each variant by step."""

    def plot(*panels: Any) -> None:
        for axes, model in zip(panels, MODELS, strict=True):
            for variant in VARIANTS:
                losses = result["runs"][f"{model}: {variant}"][0]["losses"]
                axes.plot(range(1, len(losses) + 1), losses, label=variant.strip("`"), alpha=0.7)
            axes.set(title=model, xlabel="step", ylabel="loss of the step's batch")
            axes.legend(fontsize="small")

    save_figure(path, plot, panels=len(MODELS))
