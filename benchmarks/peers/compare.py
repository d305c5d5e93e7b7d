"""ddp_launch beside PyTorch alone, Accelerate, Fabric and Lightning's Trainer."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.measure import from_stamps, instrumented, read_stamps, snapshot_step
from benchmarks.peers.task import GLOBAL_BATCH_SIZE, LINEAR, STEPS_PER_EPOCH, Task
from common.errors import InputError, TrainingError
from common.figure import save_figure
from common.launch.process import end_with_parent
from common.terminal import mebibytes, progress_bar
from tools.command import Parser
from tools.comparison import median, spread

BEST = "ddp_launch --no-portable"
CONTESTANTS = ("bare", "ddp_launch", BEST, "accelerate", "fabric", "trainer")
NEEDS = {"accelerate": "accelerate", "fabric": "lightning", "trainer": "lightning"}
MODULES = {"bare": "bare"} | {name: f"with_{name}" for name in NEEDS}
# One thread per rank, the default of ddp_launch and torchrun; no GPU, even if there is one.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def command_of(name: str, task: Task) -> list[str]:
    """The command that a user of this library would type."""
    steps, save = str(task.steps), str(task.snapshot_after)
    if name not in MODULES:
        return [
            sys.executable,
            "-m",
            "recipes",
            "ddp_launch",
            "--nproc",
            str(task.processes),
            "--epochs",
            str(task.epochs),
            "--max-steps",
            steps,
            "--snapshot-every",
            save,
            "--output-dir",
            str(task.folder),
            *(["--no-portable"] if name == BEST else []),
            *(["--global-batch-size", str(GLOBAL_BATCH_SIZE)] if LINEAR else []),
        ]
    torchrun = (
        ["torch.distributed.run", "--standalone", "--nproc-per-node", str(task.processes), "-m"]
        if task.processes > 1 and NEEDS.get(name) != "lightning"
        else []
    )
    return [
        sys.executable,
        "-m",
        *torchrun,
        f"benchmarks.peers.{MODULES[name]}",
        "--processes",
        str(task.processes),
        "--steps",
        steps,
        "--snapshot-after",
        save,
        "--folder",
        str(task.folder),
    ]


def run_once(name: str, task: Task) -> dict[str, Any]:
    """Run a contestant to its end, with inject/sitecustomize.py in each of its processes.

    Raises:
        TrainingError: it failed, or took another number of steps or processes.
    """
    environment = instrumented(task.folder, **ENVIRONMENT)
    who = f"{name} on {task.processes} processes"
    aborted = 0
    while True:
        started = time.time()
        done = subprocess.run(
            command_of(name, task),
            env=environment,
            cwd=task.folder,
            capture_output=True,
            text=True,
            preexec_fn=end_with_parent,
        )
        total_s = time.time() - started  # all its processes have closed their output
        if "terminate called without an active exception" not in done.stderr or aborted == 3:
            break
        aborted += 1  # Accelerate 1.15 with torch 2.15 sometimes aborts after its work is done
    if done.returncode:
        raise TrainingError(f"{who} ended with status {done.returncode}: {done.stderr[-800:]}")
    try:
        stamps, peak_bytes = read_stamps(task.folder, task.processes, task.steps)
    except TrainingError as error:
        raise TrainingError(f"{who}: {error}") from error
    summary = json.loads((task.folder / "summary.json").read_text())
    return {
        **from_stamps(stamps, started, STEPS_PER_EPOCH, task.snapshot_after),
        "peak_bytes": peak_bytes,
        "total_s": total_s,
        "aborted": aborted,
        "val_accuracy": summary["val_accuracy"],
    }


def measure(options: Sequence[str], folder: Path, rounds: int) -> dict[str, Any]:
    """Run every contestant on every number of processes once per round, in random order.

    Raises:
        InputError: a library is missing, or there are too few steps.
    """
    parser = Parser("", None)
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    given = parser.parse_args(options)
    if given.steps < 2 * STEPS_PER_EPOCH or min(given.processes) < 1:
        raise InputError(
            f"at least 1 process and two epochs are needed: --steps {2 * STEPS_PER_EPOCH}"
        )
    names = [name for name in CONTESTANTS if name in given.only]
    for name in names:
        if name in NEEDS and not find_spec(NEEDS[name]):
            raise InputError(
                f"{name} needs {NEEDS[name]}: make bench WHAT=peers installs it, or "
                "python -m pip install --require-hashes -r docker/stacks/cu132.txt"
                " -r docker/stacks/peers.txt; or leave it out with --only"
            )
    runs: dict[str, dict[str, list[Any]]] = {
        str(n): {name: [] for name in names} for n in given.processes
    }
    cases = [(name, n) for n in given.processes for name in names]
    save = snapshot_step(given.steps, STEPS_PER_EPOCH)
    with progress_bar(rounds * len(cases), unit="run") as bar:
        for number in range(rounds):
            for place in np.random.default_rng(number).permutation(len(cases)):
                name, n = cases[place]
                bar.set_postfix_str(f"{name}, {n}", refresh=False)
                run_folder = folder / f"{name} {n} {number}"
                run_folder.mkdir()
                runs[str(n)][name].append(run_once(name, Task(n, given.steps, save, run_folder)))
                bar.update()
    libraries = sorted({NEEDS[name] for name in names if name in NEEDS})
    return {
        "tables": tables(runs),
        "runs": runs,
        "steps": given.steps,
        "libraries": {name: version(name) for name in libraries},
    }


def relative(runs: dict[str, list[Any]], name: str) -> list[float]:
    """Steps/s relative to the first contestant (bare) in the same round."""
    pairs = zip(runs[name], next(iter(runs.values())), strict=True)
    return [run["steps_per_s"] / other["steps_per_s"] for run, other in pairs]


def in_words(processes: str) -> str:
    """`1 process` or `N processes`."""
    return f"{processes} process{'es' if processes != '1' else ''}"


def tables(runs: dict[str, dict[str, list[Any]]]) -> list[dict[str, Any]]:
    """A table for each number of processes."""
    found = []
    for n, by_name in runs.items():
        first, rounds = next(iter(by_name)), len(next(iter(by_name.values())))
        rows = []
        for name, own in by_name.items():
            ratios = relative(by_name, name)
            rows.append(
                [
                    name,
                    f"{median(own, 'start_up_s'):.2f}",
                    f"{median(own, 'steps_per_s'):.1f}",
                    "1" if name == first else spread(ratios),
                    f"{1000 * median(own, 'snapshot_s'):.1f}",
                    f"{1000 * median(own, 'boundary_s'):.1f}",
                    mebibytes(median(own, "peak_bytes")),
                    f"{median(own, 'total_s'):.1f}",
                    f"{median(own, 'val_accuracy'):.3f}",
                ]
            )
        columns = [
            "",
            "start-up [s]",
            "steps/s",
            f"over {first}'s (least to most)",
            "a snapshot [ms]",
            "between epochs [ms]",
            "peak memory of a rank",
            "whole command [s]",
            "val_accuracy",
        ]
        aborts = {name: sum(run["aborted"] for run in own) for name, own in by_name.items()}
        again = [
            f" {name} aborted at its end {count} times and was run again."
            for name, count in aborts.items()
            if count
        ]
        title = f"{in_words(n)}: medians of {rounds} round{'s' if rounds > 1 else ''}."
        title += "".join(again)
        found.append({"title": title, "columns": columns, "rows": rows})
    return found


def on_page(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The tables with fewer columns, one of them for speed; their titles tell the accuracies."""
    shorter = []
    for table in tables(result["runs"]):
        rows, accuracies = [], []
        for name, start_up, speed, ratio, _, _, peak, total, accuracy in table["rows"]:
            relative_speed = f"1 ({speed} steps/s)" if ratio == "1" else ratio
            memory = peak.removesuffix(" MiB")
            rows.append([name, start_up, relative_speed, memory, total])
            accuracies.append(accuracy)
        title = f"{table['title']} val_accuracy {min(accuracies)} to {max(accuracies)}."
        columns = [
            "",
            "start-up [s]",
            f"steps/s {table['columns'][3]}",
            "peak memory [MiB]",
            "whole command [s]",
        ]
        shorter.append({"title": title, "columns": columns, "rows": rows})
    return shorter


def draw(result: dict[str, Any], path: Path) -> None:
    """Steps/s relative to bare, and start-up: a point per run, a bar for the median."""

    def plot(speed: Any, start_up: Any) -> None:
        for shade, (n, by_name) in enumerate(result["runs"].items()):
            names, colour, shift = list(by_name), f"C{shade}", 0.3 * shade - 0.15
            for place, (name, own) in enumerate(by_name.items()):
                numbers = relative(by_name, name), [run["start_up_s"] for run in own]
                for axes, values in zip((speed, start_up), numbers, strict=True):
                    label = None if place else in_words(n)
                    axes.plot(
                        values, [place + shift] * len(values), f"{colour}o", alpha=0.5, label=label
                    )
                    axes.plot(
                        statistics.median(values),
                        place + shift,
                        f"{colour}|",
                        markersize=18,
                        markeredgewidth=2.5,
                    )
        first = names[0]
        for axes, label in (
            (speed, f"steps/s over {first}'s of the same round"),
            (start_up, "start-up to the end of the first step [s]"),
        ):
            axes.set_yticks(range(len(names)), names)
            axes.invert_yaxis()
            axes.set_xlim(left=0)
            axes.set_xlabel(label)
        speed.legend(loc="lower left")

    save_figure(path, plot, panels=2)
