"""What portable CPU kernels cost: training runs and two operations, with them and without."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from common.figure import save_figure
from common.run.options import RunOptions
from common.seeds import set_determinism
from tools.comparison import in_turn, ratios, run_recipe, spread
from tools.fresh import run_fresh

RECIPES = {
    "ddp_launch": "",
    "model_parallel_toy": "",
    "dp_scratch": "--no-lesson",
    "checkpoint_rnn": "--max-steps 60",
    "dp_resnet50": "--max-steps 30",
    "fsdp": "--max-steps 60",
}
"""A recipe to the options that shorten its default run."""
OPERATIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "matrix product of 512x512": (torch.matmul, (512, 512), (512, 512)),
    "3x3 convolution, 32 images of 64x32x32": (
        partial(conv2d, padding=1),
        (32, 64, 32, 32),
        (64, 64, 3, 3),
    ),
}
"""An operation, and the shapes of what it gets."""
WAYS = ("--portable", "--no-portable")
_TIMED_S = 1.0


def per_second(function: Callable[[], Tensor]) -> float:
    """Calls per second, once warm."""
    function()
    count, start_s = 0, time.perf_counter()
    while (passed_s := time.perf_counter() - start_s) < _TIMED_S:
        function()
        count += 1
    return count / passed_s


def measure_operations(way: str) -> dict[str, float]:
    """Calls per second of each operation; in a fresh process, as kernels are chosen once."""
    set_determinism(**RunOptions(portable=way == "--portable").determinism)
    torch.manual_seed(0)
    return {
        name: per_second(partial(function, *map(torch.rand, shapes)))
        for name, (function, *shapes) in OPERATIONS.items()
    }


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Each recipe and each operation, both ways in turn."""
    cases = [*RECIPES, "operations"]

    def one(name: str, number: int) -> dict[str, float]:
        case, way = name.split(maxsplit=1)
        if case == "operations":
            found: dict[str, float] = json.loads(run_fresh("benchmarks.portable", [way]))
            return found
        words = [*RECIPES[case].split(), way]
        summary = run_recipe(case, words, folder / f"{case}{way} {number}")
        return {case: summary["samples_per_s"]}

    runs = in_turn([f"{case} {way}" for case in cases for way in WAYS], one, rounds)
    speeds: dict[str, Any] = {}
    for name, found in runs.items():
        for each in found:
            for what, speed in each.items():
                speeds.setdefault(what, {}).setdefault(name.split()[-1], []).append(speed)
    return {"tables": [table(speeds, rounds)], "speeds": speeds}


def table(speeds: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Speeds, and their ratio in the same round."""
    rows = []
    for what, ways in speeds.items():
        ours, best = (ways[way] for way in WAYS)
        options = f" `{RECIPES[what]}`" if RECIPES.get(what) else ""
        unit = "samples/s" if what in RECIPES else "calls/s"
        medians = [f"{statistics.median(each):,.0f} {unit}" for each in (ours, best)]
        rows.append([what + options, *medians, spread(ratios(ours, best))])
    return {
        "title": f"Default runs and single operations with portable kernels and with the CPU's "
        f"best, in turn: medians of {rounds} rounds; ratio of the same round (least to most).",
        "columns": ["", "`--portable`", "`--no-portable`", "speed with `--portable`"],
        "rows": rows,
    }


def on_page(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The recipes' ratios; the figure shows the operations too."""
    (whole,) = result["tables"]
    rounds = len(next(iter(result["speeds"].values()))[WAYS[0]])
    return [
        {
            "title": f"Runs both ways in turn: median (least to most) of {rounds} rounds.",
            "columns": ["", "samples/s with `--portable` over `--no-portable`"],
            "rows": [[row[0], row[-1]] for row in whole["rows"] if row[0].split()[0] in RECIPES],
        }
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """The ratio of each case."""

    def plot(axes: Any) -> None:
        names, faster = [], []
        for what, ways in result["speeds"].items():
            ours, best = (statistics.median(ways[way]) for way in WAYS)
            names.append(what.split(",")[0])
            faster.append(ours / best)
        axes.barh(names, faster)
        axes.axvline(1, color="grey")
        axes.invert_yaxis()
        axes.set(xlabel="speed with --portable, relative to --no-portable")

    save_figure(path, plot)


if __name__ == "__main__":
    print(json.dumps(measure_operations(sys.argv[1])))
