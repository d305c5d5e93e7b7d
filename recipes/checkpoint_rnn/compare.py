"""Memory and time against the number of segments, each in a fresh process, and what auto takes."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import cli
from common.figure import save_figure
from common.run.plan import batch_size_of
from common.terminal import mebibytes
from recipes.checkpoint_rnn.train import NAME, Config
from tools.comparison import in_turn, median, run_recipe

DEFAULTS = """--length 8192 --hidden-size 256 --input-size 64 --global-batch-size 32
    --train-samples 96 --val-samples 32 --epochs 1"""
HEADINGS = {"s/step": ""}
"""See tools.bench.on_page."""


def measure(arguments: Sequence[str], folder: Path, rounds: int) -> dict[str, Any]:
    """Three steps each; then `--segments auto` within a tenth of the plain run's memory."""
    given = [*DEFAULTS.split(), *arguments]  # the last of two counts
    _, config = cli.parse(NAME, Config, given)
    length, batch_size = config.sequence.length, batch_size_of(config.optimizer)
    root = math.isqrt(length)
    wanted = {1, 4, *(root * 2**power // 4 for power in range(5)), length // 8}
    numbers = sorted(number for number in wanted if 1 <= number <= length)

    def run(segments: str, n: int, more: Sequence[str] = ()) -> dict[str, Any]:
        into = folder / f"{segments}_{n}"
        summary = run_recipe(NAME, [*given, "--segments", segments, *more], into)
        return {
            "segments": summary["segments"],
            "bytes": summary["training_memory_bytes"],
            "step_s": batch_size / summary["samples_per_s"],
        }

    runs = in_turn([str(k) for k in numbers], run, rounds)
    plain_bytes, plain_s = median(runs["1"], "bytes"), median(runs["1"], "step_s")
    least = min(median(found, "bytes") for found in runs.values())
    # A short sequence saves less, and what it takes is mostly noise.
    budget = int(max(plain_bytes / 10, 1.5 * least + 64 * 2**20))
    auto = run("auto", 0, ["--memory-budget", str(budget)])
    chosen = str(auto["segments"])
    if chosen not in runs:
        runs |= in_turn([chosen], lambda name, n: run(name, n + 1), rounds)
    fitting = [k for k in runs if max(r["bytes"] for r in runs[k]) <= budget]
    best_s = min(median(runs[k], "step_s") for k in fitting)
    rows = [
        [
            k + (" (plain)" if k == "1" else " (root of the length)" if k == str(root) else ""),
            mebibytes(median(runs[k], "bytes")),
            f"1/{plain_bytes / median(runs[k], 'bytes'):.1f}",
            f"{median(runs[k], 'step_s'):.2f}",
            f"{median(runs[k], 'step_s') / plain_s:.2f}",
        ]
        for k in sorted(runs, key=int)
    ]
    table = {
        "title": f"Length {length}, hidden {config.network.hidden_size}, input "
        f"{config.sequence.input_size}, batch {batch_size}: peak memory above what the process "
        f"held before training; median of {rounds} fresh processes in turn.",
        "columns": ["segments", "peak memory", "of plain", "s/step", "time ratio"],
        "rows": rows,
    }
    auto_table = {
        "title": "`--segments auto` within a budget; time ratio to the fastest number of segments "
        "above that keeps to it.",
        "columns": ["budget", "chosen", "peak memory", "time ratio to the best"],
        "rows": [
            [
                mebibytes(budget),
                f"{chosen} segments",
                mebibytes(auto["bytes"]),
                f"{median(runs[chosen], 'step_s') / best_s:.2f}",
            ]
        ],
    }
    return {
        "tables": [table, auto_table],
        "runs": {k: runs[k] for k in sorted(runs, key=int)},
        "auto": {**auto, "budget": budget},
        "root": root,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Memory and time by the number of segments."""

    def plot(left: Any, right: Any) -> None:
        numbers = [int(k) for k in result["runs"]]
        for axes, key, scale in ((left, "bytes", 2**20), (right, "step_s", 1)):
            for k, runs in result["runs"].items():
                axes.plot([int(k)] * len(runs), [run[key] / scale for run in runs], "k.")
            middle = [median(runs, key) / scale for runs in result["runs"].values()]
            axes.plot(numbers, middle, "o-", label="measured, median")
            axes.axvline(result["root"], color="grey", linestyle="--", label="root of the length")
            axes.axvline(result["auto"]["segments"], color="tab:green", linestyle=":", label="auto")
            axes.set(xscale="log", xlabel="segments")
            axes.legend()
        plain = median(result["runs"]["1"], "bytes") / 2**20
        left.plot(numbers, [plain / k for k in numbers], ":", color="grey")
        left.set(
            yscale="log", ylabel="peak memory [MiB]", title="memory (dotted: plain / segments)"
        )
        right.set(ylim=(0, None), ylabel="time of a step [s]", title="time")

    save_figure(path, plot, panels=2)
