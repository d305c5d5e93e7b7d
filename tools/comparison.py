"""Compare alternatives fairly: each in a fresh process, taking turns; the median of the rounds."""

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from common.terminal import progress_bar
from tools.fresh import run_fresh

T = TypeVar("T")


def run_recipe(
    name: str, arguments: Sequence[str | Path], folder: Path, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a recipe into `folder`; its summary, and `epoch_s`, the seconds of training per epoch."""
    run_fresh("recipes", [name, *arguments, "--output-dir", folder], env)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    batch_size = json.loads((folder / "config.json").read_text())["global_batch_size"]
    samples = summary["steps"] * batch_size / summary["epochs"]
    return {**summary, "epoch_s": samples / summary["samples_per_s"]}


def visible_devices(gpus: Sequence[str]) -> str:
    """CUDA_VISIBLE_DEVICES that selects GPUs by the numbers that this process uses for them."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = own.split(",") if own else []
    return ",".join(names[int(gpu)] if own else gpu for gpu in gpus)


def in_turn(
    variants: Sequence[str], measure: Callable[[str, int], T], rounds: int
) -> dict[str, list[T]]:
    """Measure every variant once per round, so that a machine whose speed drifts favours none.

    `measure` gets the name of a variant and the number of the round.
    """
    found: dict[str, list[T]] = {name: [] for name in variants}
    with progress_bar(rounds * len(variants), unit="run") as bar:
        for number in range(rounds):
            for name in variants:
                bar.set_postfix_str(name, refresh=False)
                found[name].append(measure(name, number))
                bar.update()
    return found


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median (least to most), for a table."""
    numbers = (statistics.median(values), min(values), max(values))
    middle, least, most = (f"{number:.{digits}f}" for number in numbers)
    return f"{middle} ({least} to {most})"


def ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Of the two numbers of each round."""
    return [one / other for one, other in zip(ones, others, strict=True)]


def median(runs: Sequence[Mapping[str, Any]], key: str) -> float:
    """Median of `key` over the rounds of one variant."""
    return float(statistics.median(run[key] for run in runs))
