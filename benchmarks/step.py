"""The options that may make a step faster: their speed and their loss, for two models."""

import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import run_stamped
from benchmarks.turns import Case, Way, run_both
from common.data.datasets import DataOptions
from common.figure import save_figure
from common.reading import read_metrics
from common.terminal import progress_bar
from common.training.models import ModelOptions
from tools.comparison import ratios, spread

DEFAULT = "the default (fp32)"
WAYS = {
    DEFAULT: Way(),
    "`--channels-last`": Way(model={"channels_last": True}),
    "`--precision bf16`": Way(precision="bf16"),
    "`--compile`": Way(model={"compile": True}),
}
CONVNET, RESNET = "convnet, 8 px, 48 images a rank", "ResNet-18, 64 px, 8 images a rank"
CASES = {
    CONVNET: Case(ModelOptions(), DataOptions(), 48, turns=6, steps=10, ways=WAYS),
    RESNET: Case(
        ModelOptions(model="resnet18"), DataOptions(image_size=64), 8, turns=3, steps=4, ways=WAYS
    ),
}
WHOLE: dict[str, list[str]] = {
    CONVNET: ["--epochs", "15"],
    RESNET: [
        "--model",
        "resnet18",
        "--image-size",
        "64",
        "--global-batch-size",
        "16",
        "--lr",
        "0.02",
        "--max-steps",
        "24",
    ],
}
"""Options of a whole run, for its start-up and its losses."""


def run_whole(model: str, name: str, folder: Path) -> dict[str, Any]:
    """Seconds until the first step has ended, the loss of every step, and the final accuracy."""
    started = time.time()
    given = [] if name == DEFAULT else name.strip("`").split()
    stamps = run_stamped(folder, ["--nproc", "2", "--log-every", "1", *WHOLE[model], *given])
    summary = json.loads((folder / "run" / "summary.json").read_text())
    losses = [line["loss"] for line in read_metrics(folder / "run") if "loss" in line]
    return {
        "start_up_s": stamps[0] - started,
        "val_accuracy": summary["val_accuracy"],
        "losses": losses,
    }


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Steps with every option, and one whole run with each."""
    runs: dict[str, Any] = {}
    whole: dict[str, Any] = {model: {} for model in CASES}
    with progress_bar(len(CASES) * (1 + len(WAYS)), unit="run") as bar:
        for model in CASES:
            for number, name in enumerate(WAYS):
                whole[model][name] = run_whole(model, name, folder / f"{model} {number}")
                bar.update()
            runs[model] = run_both("step", model, rounds, folder / "found.json", "127.0.0.1")
            bar.update()
    return {"tables": [table(runs, whole, rounds)], "runs": runs, "whole": whole}


def table(runs: dict[str, Any], whole: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Speeds relative to the default in the same round, and the whole runs."""
    rows = []
    for model, run in runs.items():
        samples = 2 * CASES[model].samples_a_rank
        for name, speeds in run.items():
            faster = ratios(speeds, run[DEFAULT])
            seen, losses = whole[model][name], whole[model][name]["losses"]
            rows.append(
                [
                    model,
                    name,
                    f"{1000 * samples / statistics.median(speeds):.1f}",
                    "1" if name == DEFAULT else spread(faster),
                    f"{seen['start_up_s']:.1f}",
                    f"{statistics.mean(losses[:8]):.3f} to {statistics.mean(losses[-8:]):.3f}",
                    f"{seen['val_accuracy']:.3f}",
                ]
            )
    return {
        "title": "Two processes with a thread each take steps with every option in turn; median "
        f"(least to most) of {rounds} rounds. Start-up, losses (of the first and the last 8 steps) "
        "and accuracy are of one run of ddp_launch each.",
        "columns": [
            "model",
            "options",
            "a step [ms]",
            "steps/s over the default",
            "start-up [s]",
            "loss",
            "val_accuracy",
        ],
        "rows": rows,
    }


def on_page(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each option; the figure shows the losses."""
    rows, rounds = [], 0
    for name in WAYS:
        cells = []
        for model, run in result["runs"].items():
            usual, rounds = run[DEFAULT], len(run[DEFAULT])
            step_ms = 1000 * 2 * CASES[model].samples_a_rank / statistics.median(usual)
            faster = ratios(run[name], usual)
            cells.append(f"1 ({step_ms:.1f} ms per step)" if name == DEFAULT else spread(faster))
        start_up = [f"{result['whole'][model][name]['start_up_s']:.1f}" for model in CASES]
        rows.append([name, *cells, ", ".join(start_up)])
    short = [model.split(",")[0] for model in CASES]
    return [
        {
            "title": f"Two processes with one thread each ({CONVNET}; {RESNET}): steps/s over the "
            f"default's, median (least to most) of {rounds} rounds. Start-up of one run.",
            "columns": ["options", *short, "start-up [s]"],
            "rows": rows,
        }
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """The loss of each option by step."""

    def plot(*panels: Any) -> None:
        for axes, (model, runs) in zip(panels, result["whole"].items(), strict=True):
            for name, run in runs.items():
                steps = range(1, len(run["losses"]) + 1)
                axes.plot(steps, run["losses"], label=name.strip("`"), alpha=0.7)
            axes.set(title=model, xlabel="step", ylabel="loss of the step's batch")
            axes.legend(fontsize="small")

    save_figure(path, plot, panels=len(CASES))
