"""Seconds an epoch over 1, 2, 4 and 8 processes on this machine, and what the same bits cost."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common.figure import save_figure
from common.terminal import mebibytes
from tools.comparison import in_turn, median, run_recipe, spread

PROCESSES = ("1", "2", "4", "8")
MODELS = {
    "convnet (GroupNorm)": ["--epochs", "20"],
    "ResNet-18 (BatchNorm)": ["--model", "resnet18", "--lr", "0.02", "--epochs", "2"],
}
WAYS = {
    "the default": [],
    "--no-deterministic": ["--no-deterministic"],
    "--virtual-ranks 2": ["--virtual-ranks", "2"],
    "--virtual-ranks 4": ["--virtual-ranks", "4"],
}
HEADINGS = {"samples/s": "", "peak memory a process": ""}
"""See tools.bench.on_page."""


def measure(arguments: Sequence[str], folder: Path, rounds: int) -> dict[str, Any]:
    """Train with each number of processes, the same global batch for all; then in each way on two.

    `arguments` come last, and win over what is set here.
    """
    gpus = torch.cuda.device_count() if "cpu" not in arguments else 0
    processes = [n for n in PROCESSES if not gpus or int(n) <= gpus]

    def scale(nproc: str, n: int) -> dict[str, Any]:
        options = ["--epochs", "5", *arguments, "--nproc", nproc]
        return run_recipe("ddp_launch", options, folder / f"{nproc}_{n}")

    runs = in_turn(processes, scale, rounds)
    speed = {name: median(found, "samples_per_s") for name, found in runs.items()}
    rows = []
    for name, found in runs.items():
        last = found[-1]
        rows.append(
            [
                name,
                f"{median(found, 'epoch_s'):.2f}",
                f"{speed[name]:,.0f}",
                f"{speed[name] / speed['1']:.2f}",
                f"{last['val_accuracy']:.4f}",
                mebibytes(max(last["peak_memory_bytes"])),
            ]
        )
    cores = len(os.sched_getaffinity(0))
    title = (
        "Seconds of training an epoch, without start-up and evaluation; median of "
        f"{rounds} runs in turn. More processes than {cores} cores share them."
    )
    columns = [
        "processes",
        "s/epoch",
        "samples/s",
        "speed-up",
        "val_accuracy",
        "peak memory a process",
    ]
    tables = [{"title": title, "columns": columns, "rows": rows}]
    if len(processes) == 1:
        return {"tables": tables, "runs": runs}

    def same_bits(case: str, n: int) -> dict[str, Any]:
        model, way = case.split(": ")
        options = [*MODELS[model], *WAYS[way], *arguments, "--nproc", "2"]
        return run_recipe("ddp_launch", options, folder / f"{model} {way} {n}")

    cases = in_turn([f"{model}: {way}" for model in MODELS for way in WAYS], same_bits, rounds)
    title = (
        "What the same bits cost: time a step on 2 processes over that of the default in the "
        f"same round, median (least to most) of {rounds} rounds."
    )
    rows = [[way, *(ratio_in_words(cases, model, way) for model in MODELS)] for way in WAYS]
    tables.append({"title": title, "columns": ["", *MODELS], "rows": rows})
    return {"tables": tables, "runs": runs, "same_bits": cases}


def ratios(cases: dict[str, Any], model: str, way: str) -> list[float]:
    """Time a step over that of the default, round by round in ascending order."""
    plain = cases[f"{model}: {next(iter(WAYS))}"]
    pairs = zip(plain, cases[f"{model}: {way}"], strict=True)
    return sorted(one["samples_per_s"] / other["samples_per_s"] for one, other in pairs)


def ratio_in_words(cases: dict[str, Any], model: str, way: str) -> str:
    """Median, least and most."""
    return "1" if way == next(iter(WAYS)) else spread(ratios(cases, model, way))


def draw(result: dict[str, Any], path: Path) -> None:
    """Speed-up over one process, beside the ideal; and the price of the same bits."""

    def plot(axes: Any, price: Any = None) -> None:
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
        if price:
            for number, model in enumerate(MODELS):
                for place, way in enumerate(WAYS):
                    found = ratios(result["same_bits"], model, way)
                    label = model if place == 0 else None
                    price.plot(
                        [place + 0.15 * number] * len(found), found, f"C{number}o", label=label
                    )
            price.set_xticks(range(len(WAYS)), WAYS)
            price.set(ylabel="time a step over the default's")
            price.set_ylim(bottom=0)
            price.legend(loc="lower right")

    save_figure(path, plot, panels=2 if "same_bits" in result else 1)
