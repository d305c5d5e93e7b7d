"""Seconds an epoch over 1, 2, 4 and 8 processes on this machine."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common.comparison import in_turn, median, run_recipe
from common.figure import save_figure
from common.record import mebibytes

PROCESSES = ("1", "2", "4", "8")


def measure(arguments: Sequence[str], folder: Path, rounds: int) -> dict[str, Any]:
    """Train with each number of processes; the same global batch for all."""
    options = ["--epochs", "5", *arguments]  # the last of two counts
    gpus = torch.cuda.device_count() if "cpu" not in arguments else 0
    processes = [n for n in PROCESSES if not gpus or int(n) <= gpus]

    def run(nproc: str, n: int) -> dict[str, Any]:
        return run_recipe("ddp_launch", [*options, "--nproc", nproc], folder / f"{nproc}_{n}")

    runs = in_turn(processes, run, rounds)
    speed = {name: median(found, "samples_per_s") for name, found in runs.items()}
    rows = []
    for name, found in runs.items():
        last = found[-1]
        rows.append([name, f"{median(found, 'epoch_s'):.2f}", f"{speed[name]:,.0f}",
                     f"{speed[name] / speed['1']:.2f}", f"{last['val_accuracy']:.4f}",
                     mebibytes(max(last["peak_memory_bytes"]))])  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    title = ("Seconds of training an epoch, without start-up and evaluation; median of "
             f"{rounds} runs in turn. More processes than {cores} cores share them.")  # fmt: skip
    columns = ["processes", "s/epoch", "samples/s", "speed-up", "val_accuracy",
               "peak memory a process"]  # fmt: skip
    return {"tables": [{"title": title, "columns": columns, "rows": rows}], "runs": runs}


def draw(result: dict[str, Any], path: Path) -> None:
    """Speed-up over one process, beside the ideal."""

    def plot(axes: Any) -> None:
        one = median(result["runs"]["1"], "samples_per_s")
        counts = [int(name) for name in result["runs"]]
        axes.plot(counts, counts, "--", color="grey", label="ideal")
        for name, runs in result["runs"].items():
            axes.plot([int(name)] * len(runs), [r["samples_per_s"] / one for r in runs], "k.")
        middle = [median(runs, "samples_per_s") / one for runs in result["runs"].values()]
        axes.plot(counts, middle, "o-", label="measured, median")
        axes.set(xlabel="processes", ylabel="speed-up over one", xticks=counts)
        axes.set(ylim=(0, 1.5 * max(2, *middle)))
        axes.legend()

    save_figure(path, plot)
