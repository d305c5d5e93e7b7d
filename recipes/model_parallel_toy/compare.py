"""Whole model on one device, split, in micro-batches, and pipelined, on this machine."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common import ROOT, cli
from common.data.datasets import load_data
from common.errors import TrainingError
from common.figure import save_figure
from common.group.devices import choose_device
from common.group.process_group import process_group
from common.launch.ranks import Ranks
from common.run.plan import batch_size_of
from recipes.model_parallel_toy.pipeline import plot_timeline
from recipes.model_parallel_toy.split import ParallelOptions, build, cut, generated_points
from recipes.model_parallel_toy.train import NAME, Config
from tools.comparison import in_turn, median, run_recipe

DEFAULTS = """--model resnet50 --data fake --image-size 128 --global-batch-size 32
    --max-steps 6"""
SWEEP = (1, 2, 4, 8, 16)
"""Micro-batches per batch. A pipeline needs at least one per stage."""


def measure(arguments: Sequence[str], folder: Path, rounds: int) -> dict[str, Any]:
    """Six steps each, each process on one thread (--cpu-threads 1)."""
    given = [*(() if "toy" in arguments else DEFAULTS.split()), *arguments]  # the last one counts
    given = ["--schedule", "micro", *given]
    _, config = cli.parse(NAME, Config, given)
    stages, micro_batches = config.parallel.stages, config.parallel.micro_batch_count
    variants = {
        "whole model, one device": ["--schedule", "split", "--stages", "1"],
        "split": ["--schedule", "split"],
        "micro": ["--schedule", "micro"],
        "gpipe": ["--schedule", "gpipe", "--timeline"],
        "1f1b": ["--schedule", "1f1b", "--timeline"],
    }
    for name, more in variants.items():
        in_one = name in ("split", "whole model, one device")
        more += ["--micro-batches", "1" if in_one else str(micro_batches)]

    def run(name: str, n: int) -> dict[str, Any]:
        return run_recipe(NAME, [*given, *variants[name]], folder / f"{name}{n}")

    runs = in_turn(list(variants), run, rounds)
    batch_size = batch_size_of(config.optimizer)
    whole = median(runs["whole model, one device"], "samples_per_s")
    rows = []
    for name, found in runs.items():
        speed = median(found, "samples_per_s")
        rows.append(
            [name, found[-1]["world_size"], f"{batch_size / speed:.2f}", f"{speed / whole:.2f}"]
        )
    if choose_device(config.run.device, Ranks()).type == "cpu":
        alone = without_communication_s(given, stages, micro_batches)
        rows.append(
            [
                "the stages at the same time, with no communication",
                stages,
                f"{alone:.2f}",
                f"{batch_size / alone / whole:.2f}",
            ]
        )
    ceiling = micro_batches * stages / (micro_batches + stages - 1)
    rows.append(
        [
            "ceiling with equal stages, m*s/(m+s-1)",
            stages,
            f"{batch_size / whole / ceiling:.2f}",
            f"{ceiling:.2f}",
        ]
    )
    swept = sweep(given, config.parallel, batch_size, folder, rounds)
    size = f" at {config.data.image_size} px" if config.data.image_size else ""
    table = {
        "title": f"`{config.model.model}`{size}, batch {batch_size}, "
        f"{stages} stages, {micro_batches} micro-batches, {config.run.cpu_threads} CPU thread a "
        f"process; median of {rounds} runs in turn. split and micro run in one process, where CPU "
        "devices take turns.",
        "columns": ["schedule", "processes", "s/step", "speed ratio to the whole model"],
        "rows": rows,
    }
    timelines = {
        name: json.loads((folder / f"{name}{rounds - 1}" / "timeline.json").read_text())
        for name in ("gpipe", "1f1b")
    }
    return {"tables": [table], "runs": runs, "sweep": swept, "timelines": timelines}


def sweep(
    given: Sequence[str], parallel: ParallelOptions, batch_size: int, folder: Path, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds per step in each round, by schedule and number of micro-batches."""
    settings = {
        f"{schedule} {count}": ["--schedule", schedule, "--micro-batches", str(count)]
        for schedule in ("micro", "gpipe", "1f1b")
        for count in SWEEP
        if batch_size % (count * parallel.data_parallel) == 0
        if schedule == "micro" or count >= parallel.stages
    }

    def step_s(name: str, n: int) -> float:
        options = [*given, *settings[name], "--max-steps", "4"]  # there are many settings
        run = run_recipe(NAME, options, folder / f"{name.replace(' ', '-')}-{n}")
        return batch_size / float(run["samples_per_s"])

    found: dict[str, dict[str, list[float]]] = {}
    for name, seconds in in_turn(list(settings), step_s, rounds).items():
        schedule, count = name.split()
        found.setdefault(schedule, {})[count] = seconds
    return found


def without_communication_s(given: Sequence[str], stages: int, micro_batches: int) -> float:
    """Seconds a step of the slowest stage, all stages at once in processes that never talk."""
    command = [sys.executable, "-P", "-m", "recipes.model_parallel_toy.compare"]
    processes = [
        subprocess.Popen(
            [*command, str(stage), str(stages), str(micro_batches), *given],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for stage in range(stages)
    ]
    seconds = [float(process.communicate()[0] or "nan") for process in processes]
    if any(process.returncode for process in processes):
        raise TrainingError("a stage by itself failed; its message is above")
    return max(seconds)


def main() -> None:
    """Print a stage's seconds per step: STAGE STAGES MICRO_BATCHES [options of the recipe]."""
    stage, stages, micro_batches = map(int, sys.argv[1:4])
    _, config = cli.parse(NAME, Config, sys.argv[4:])
    torch.set_num_threads(config.run.cpu_threads)
    with process_group(Ranks(), torch.device("cpu"), "gloo", 60):
        toy = config.model.model == "toy"
        data = generated_points(0) if toy else load_data(config.data, 0, Ranks())
    sample = data.val[(0, 0)][0][None].float()
    parts = cut(build(config.model, data), stages, sample)
    inputs = torch.cat([sample] * (batch_size_of(config.optimizer) // micro_batches))
    with torch.no_grad():
        for part in parts[:stage]:
            inputs = part(inputs)
    inputs.requires_grad_(stage > 0)
    times = []
    for _ in range(8):
        start_s = time.perf_counter()
        for _piece in range(micro_batches):
            outputs = parts[stage](inputs)
            outputs.backward(torch.ones_like(outputs))
        times.append(time.perf_counter() - start_s)
    print(sorted(times)[len(times) // 2])


def draw(result: dict[str, Any], path: Path) -> None:
    """Time by the number of micro-batches, and the pipelines' timelines."""

    def plot(swept: Any, *panels: Any) -> None:
        for name, by_count in result["sweep"].items():
            counts = [int(count) for count in by_count]
            swept.plot(counts, [statistics.median(s) for s in by_count.values()], "o-", label=name)
        swept.set_xscale("log", base=2)
        swept.set(xlabel="micro-batches per batch", ylabel="s/step", ylim=(0, None))
        swept.legend()
        for axes, (name, work) in zip(panels, result["timelines"].items(), strict=True):
            plot_timeline(work, axes)
            axes.set_title(f"{name}: forward (blue) and backward (orange), by micro-batch")

    save_figure(path, plot, panels=3)


if __name__ == "__main__":
    main()
