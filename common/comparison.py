"""Comparing alternatives fairly: each in a fresh process, in turn, the median of several rounds."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from common.errors import InputError, TrainingError
from common.launch import ROOT, end_with_parent
from common.ranks import Ranks
from common.record import flatten, progress_bar

T = TypeVar("T")

# What runs here is started by nobody but us, even where srun or torchrun started us.
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "SLURM_",
                  "OMPI_", "PMI", "RECIPES_")  # fmt: skip


def run_fresh(
    module: str, arguments: Sequence[str | Path], env: Mapping[str, str] | None = None
) -> str:
    """Run `python -m MODULE ARGUMENTS` to its end and return what it printed.

    Args:
        module: to run.
        arguments: of its command line.
        env: variables to set besides this process's own.

    Raises:
        InputError: it ended with status 2; its own error line.
        TrainingError: it failed otherwise.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, *map(str, arguments)], env=fresh_environment(env),
        capture_output=True, text=True, preexec_fn=end_with_parent,
    )  # fmt: skip
    if done.returncode == 0:
        return done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    message = lines[-1].removeprefix("error: ") if lines else done.stderr[-500:]
    kind = InputError if done.returncode == 2 else TrainingError
    raise kind(f"{' '.join(map(str, arguments))}: {message}")


def fresh_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without a launcher's variables, and with the project's path."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(_OF_A_LAUNCHER)}
    given = {**own, **(more or {})}
    path = os.pathsep.join(filter(None, [ROOT, given.get("PYTHONPATH")]))
    return {**given, "PYTHONPATH": path}


def run_recipe(
    name: str,
    arguments: Sequence[str | Path],
    folder: Path,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a recipe into `folder` by the front door; its summary, and `epoch_s` of training."""
    run_fresh("recipes", [name, *arguments, "--output-dir", folder], env)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    batch_size = json.loads((folder / "config.json").read_text())["global_batch_size"]
    samples = summary["steps"] * batch_size / summary["epochs"]
    return {**summary, "epoch_s": samples / summary["samples_per_s"]}


def as_arguments(config: Any, leave_out: set[str]) -> list[str]:
    """A config as the command line that gives it, for another recipe with the same groups."""
    arguments = []
    for name, value in flatten(config).items():
        option = name.replace("_", "-")
        if name in leave_out or value is None:
            continue
        if isinstance(value, list | tuple):
            arguments += [f"--{option}", *map(str, value)]
        elif isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        else:
            arguments += [f"--{option}", str(value)]
    return arguments


def visible_devices(gpus: Sequence[str]) -> str:
    """CUDA_VISIBLE_DEVICES for GPUs that this process numbers so."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = own.split(",") if own else []
    return ",".join(names[int(gpu)] if own else gpu for gpu in gpus)


def in_turn(
    variants: Sequence[str], measure: Callable[[str, int], T], rounds: int
) -> dict[str, list[T]]:
    """Measure every variant once a round, so that what drifts on the machine meets all alike.

    Args:
        variants: their names.
        measure: measures one of them, given its name and the number of the round.
        rounds: how often each is measured.
    """
    found: dict[str, list[T]] = {name: [] for name in variants}
    with progress_bar(rounds * len(variants), 0, Ranks(), unit="run") as bar:
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


def median(runs: Sequence[Mapping[str, Any]], key: str) -> float:
    """Median of a number over the rounds of one variant."""
    return float(statistics.median(run[key] for run in runs))
