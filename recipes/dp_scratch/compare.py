"""Seconds an epoch on one and two devices, and the batch-size lesson as a table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import cli
from common.figure import save_figure
from common.group.devices import choose_devices
from recipes.dp_scratch.lesson import LESSON_EPOCHS, plot_lesson
from recipes.dp_scratch.train import NAME, Config
from tools.comparison import in_turn, median, run_recipe

HEADINGS = {"test accuracy": "val_accuracy"}
"""See tools.bench.on_page."""


def measure(arguments: Sequence[str], folder: Path, rounds: int) -> dict[str, Any]:
    """Train on one device and on all that were asked for."""
    _, config = cli.parse(NAME, Config, arguments)
    found = choose_devices(config.parallel.devices, config.run.device, on_cpu=2)
    devices = list(map(str, found))
    sets = {"one": devices[:1], "all": devices}

    def run(name: str, n: int) -> dict[str, Any]:
        lesson = "--lesson" if n == 0 else "--no-lesson"
        given = [*arguments, "--devices", *sets[name], lesson]
        return run_recipe(NAME, given, folder / f"{name}{n}")

    runs = in_turn(list(sets), run, rounds)
    one = median(runs["one"], "samples_per_s")
    rows = [
        [
            " ".join(sets[name]),
            f"{median(found, 'epoch_s'):.2f}",
            f"{median(found, 'samples_per_s') / one:.2f}",
            f"{found[-1]['val_accuracy']:.4f}",
        ]
        for name, found in runs.items()
    ]
    lesson = json.loads((folder / "one0" / "lesson.json").read_text())
    sizes = list(next(iter(lesson.values())))
    table = {
        "title": f"Seconds of training an epoch, median of {rounds} runs in turn. Two `cpu` "
        "entries share the same cores and take turns: they teach, and gain nothing.",
        "columns": ["devices", "s/epoch", "speed-up", "test accuracy"],
        "rows": rows,
    }
    lesson_table = {
        "title": f"The batch-size lesson: accuracy after {LESSON_EPOCHS} epochs on one device.",
        "columns": ["learning rate", *(f"batch {size}" for size in sizes)],
        "rows": [
            [rule, *(f"{curve[-1]:.3f}" for curve in curves.values())]
            for rule, curves in lesson.items()
        ],
    }
    return {"tables": [table, lesson_table], "runs": runs, "lesson": lesson}


def draw(result: dict[str, Any], path: Path) -> None:
    """The lesson."""
    save_figure(path, lambda *panels: plot_lesson(result["lesson"], *panels), panels=2)
