"""Run a recorded run again, and say whether the result is the same.

    make reproduce RUN=runs/ddp_launch/RUN           run its command again, into a new folder
    python -m recipes reproduce RUN --nproc 1        on another number of processes
    python -m recipes reproduce RUN --against RUN2   compare two finished runs; no training
    python -m recipes reproduce RUN --trace-step 5   hash all that step 5 computes, into run/trace;
                                                     copy it to another machine, and name it there
                                                     with --against-trace: which operation differs?

It does not check out or install anything. First it says how this machine, the code and the
libraries differ from the recorded ones, then it gives one of three verdicts:

    identical                     the same weights_sha256 and the same logged losses, to the bit
    equal within a tolerance      the same options, and losses that differ by no more than that
    different from step N on      with the likely cause; status 1

reproduce.json and a figure of both loss curves are in --output-dir.
"""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from common.errors import STATUS_FAILED, STATUS_FINISHED, InputError
from common.figure import save_figure
from common.fingerprint import fingerprint, unlike
from common.git import git
from common.identity import decisive, differences
from common.launch.process import end_with_parent
from common.launch.start import LaunchOptions
from common.manifest import describe_machine
from common.output_folder import result_folder
from common.parse import given_path
from common.reading import read_metrics, refuse_closed
from common.run.options import RunOptions
from common.seeds import set_determinism
from common.trace import STEP, first_difference, read_traces
from common.writing import write_json
from tools.command import Parser, attempt
from tools.fresh import fresh_environment
from tools.recorded import options_of, read_record, read_summary, reading


@dataclass(frozen=True)
class Recorded:
    """What the folder of a finished run holds."""

    folder: Path
    manifest: dict[str, Any]
    options: dict[str, Any]
    summary: dict[str, Any]
    losses: dict[int, float]
    """Step to the logged loss, the mean over ranks."""


def read(folder: Path) -> Recorded:
    """Read a run's folder.

    Raises:
        InputError: it is not a run's folder, may not be read, or the run has not finished.
    """
    for name in ("manifest.json", "config.json", "metrics.jsonl", "summary.json"):
        refuse_closed("the file", folder / name)
        if not (folder / name).is_file():
            unfinished = ": the run has not finished" if name == "summary.json" else ""
            raise InputError(f"{folder} holds no {name}{unfinished}")
    kinds = {"command": str, "seed": int, "world_size": int, "gpus": list}
    kinds |= {"determinism": dict, "fingerprint": dict}
    manifest = read_record(folder / "manifest.json", **kinds)
    config = read_record(folder / "config.json", recipe=str)
    summary = read_summary(folder, steps=int)
    with reading(folder / "metrics.jsonl"):
        lines = read_metrics(folder)
        losses = {int(line["step"]): float(line["loss"]) for line in lines if "loss" in line}
    return Recorded(folder, manifest, config, summary, losses)


def command_again(
    run: Recorded, launched: str, nproc: int | None, folder: Path, **other: int
) -> list[str]:
    """The arguments of `python -m recipes` that repeat the run.

    They are those of its command, but with all ranks on this host, and with the seed and the CPU
    threads of the manifest.

    Raises:
        InputError: the command does not name its recipe (submitit's does not).
    """
    name, manifest = run.summary["recipe"], run.manifest
    with reading(run.folder / "manifest.json"):
        words = shlex.split(manifest["command"])
    is_recipe = re.compile(rf"{name}|(.*/)?recipes[./]{name}[./]train(\.py)?").fullmatch
    begin = next((place for place, word in enumerate(words, 1) if is_recipe(word)), None)
    if begin is None:
        raise InputError(
            f"{run.folder} cannot be repeated from its command, {manifest['command']}: start it "
            "again as before, then give the new run's folder with --against"
        )
    replaced = {
        "seed": str(manifest["seed"]),
        "cpu_threads": str(manifest["determinism"].get("cpu_threads")),
        "output_dir": str(folder),
        "resume": "never",
        **{name: str(value) for name, value in other.items()},
    }
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in [*(option.name for option in fields(LaunchOptions)), *replaced]:
        parser.add_argument(*{f"--{option}", f"--{option.replace('_', '-')}"}, nargs="?")
    _, kept = parser.parse_known_args(words[begin:])
    ranks = ["--nproc", str(nproc or manifest["world_size"])]
    arguments = [name, *(ranks if launched in ("ranks", "spawn") else []), *kept]
    for option, value in replaced.items():
        arguments += [f"--{option.replace('_', '-')}", value]
    return arguments


def deciding(run: Recorded) -> dict[str, Any]:
    """The options that decide the run's numbers, by name, and how many steps it made."""
    config = import_module(f"recipes.{run.summary['recipe']}.train").Config
    return decisive(run.options, config) | {
        "global_batch_size": run.options.get("global_batch_size"),
        "steps": run.summary.get("steps"),
    }


def environment(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest without what options set, each dict in it entry by entry."""
    flat: dict[str, Any] = {}
    for name, value in manifest.items():
        inner = value if isinstance(value, dict) else {"": value}
        flat |= {f"{name}.{key}" if key else name: entry for key, entry in inner.items()}
    apart = ("command", "seed", "determinism.cpu_threads", "start.")
    return {name: value for name, value in flat.items() if not name.startswith(apart)}


def compare(one: Recorded, two: Recorded, tolerance: float) -> dict[str, Any]:
    """The verdict on two finished runs, with all that differs between them.

    Args:
        one: the recorded run.
        two: the run to compare with it.
        tolerance: largest relative difference of a logged loss that still counts as equal.

    Raises:
        InputError: the runs are of two recipes, or have no logged step in common.
    """
    if one.summary["recipe"] != two.summary["recipe"]:
        raise InputError(
            f"cannot compare a run of {one.summary['recipe']} with one of {two.summary['recipe']}"
        )
    steps = sorted(one.losses.keys() & two.losses.keys())
    if not steps:
        raise InputError(f"{one.folder} and {two.folder} have logged no step in common")
    options = differences(deciding(one), deciding(two))
    apart = {step: _relative(one.losses[step], two.losses[step]) for step in steps}
    worst = max(steps, key=lambda step: apart[step])
    first = next((step for step in steps if apart[step]), None)
    hashes = [run.summary["weights_sha256"] for run in (one, two)]
    if hashes[0] == hashes[1] and first is None:
        verdict = "identical"
    elif not options and apart[worst] <= tolerance:
        verdict = (
            f"equal within {tolerance:g}: the losses differ by {apart[worst]:.1e} of their "
            f"value at most (step {worst}), the weights in their last bits"
        )
    elif first is None:
        verdict = f"different after step {steps[-1]}, the last logged step"
    else:
        verdict = f"different from step {first} on (by {apart[worst]:.1e} at most, step {worst})"
    return {
        "verdict": verdict,
        "runs": [str(one.folder), str(two.folder)],
        "weights_sha256": hashes,
        "steps_compared": len(steps),
        "steps_not_compared": sorted(one.losses.keys() ^ two.losses.keys()),
        "first_different_step": first,
        "largest_relative_difference": apart[worst],
        "tolerance": tolerance,
        "options": options,
        "environment": differences(environment(one.manifest), environment(two.manifest)),
    }


def _relative(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def causes(result: dict[str, Any]) -> str:
    """What differs between the records, the likeliest cause first."""
    both = {**result["options"], **result["environment"]}
    files = [name for name in result["environment"] if name.startswith("changed_files.")]
    first = ["data_fingerprint", *result["options"], "world_size", *files, "git_commit"]
    first += [name for name in result["environment"] if name.startswith("fingerprint.")]
    first += ["torch", "gpus", "cpu", "cuda"]
    order = [name for name in dict.fromkeys([*first, *both]) if name in both]
    if not order:
        return (
            "nothing that is recorded differs: the cause is an operation that is not "
            "deterministic (--no-deterministic?), or something outside the manifest"
        )
    shown = [f"{name} ({_word(both[name][0])}, now {_word(both[name][1])})" for name in order[:4]]
    if "git_commit" in both:
        commits = [str(commit) for commit in both["git_commit"]]
        known = all(re.fullmatch("[0-9a-f]+", commit) for commit in commits)  # git's arguments
        names = git("diff", "--name-only", *commits).split() if known else []
        shown += [f"between the commits {', '.join(names[:8])}"] if names else []
    why = f"likely cause: {', then '.join(shown)}"
    if order[0] == "world_size":
        why += (
            "; with the number of processes, sums, BatchNorm and dropout change, unless "
            "--virtual-ranks is used"
        )
    return why


def _word(value: Any) -> str:
    return re.sub(r"\b[0-9a-f]{32,}\b", lambda sha: f"{sha[0][:12]}...", str(value))


def _fingerprint(options: RunOptions, device: torch.device) -> dict[str, str]:
    set_determinism(**options.determinism)
    return fingerprint(device)


def forecast(run: Recorded) -> str:
    """Whether this machine computes what the record's did: known before it trains again."""
    then, options = run.manifest["fingerprint"], options_of(run.folder, run.options, RunOptions)
    on_gpu = options.device == "cuda" and torch.cuda.device_count() > 0
    device = torch.device("cuda" if on_gpu else "cpu")
    # In a process that ends, else CUDA would keep memory on the GPU while the run trains there; and
    # a new one, because a fork cannot use CUDA once this process has.
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        now = child.submit(_fingerprint, options, device).result()
    if names := unlike(then, now):
        return (
            f"  warning: this machine computes other bits than the record's ({', '.join(names)}): "
            "the weights will not be identical"
        )
    return f"  all {len(now)} operations of the fingerprint have the record's bits on this machine"


def train_again(given: argparse.Namespace, one: Recorded, folder: Path) -> int:
    """Run the recorded command into `folder`/run, and say what differs beforehand; its status."""
    now = describe_machine()
    recorded = {name: one.manifest.get(name) for name in now}
    recorded["gpu"] = next(iter(one.manifest["gpus"]), None)
    for name, (then, here) in differences(environment(recorded), environment(now)).items():
        print(f"  {name}: {_word(then)} in the record, {_word(here)} now")
    if said := forecast(one):
        print(said)
    launched = import_module(f"recipes.{one.summary['recipe']}").LAUNCHED
    step = given.trace_step
    other = {"max_steps": step} if step else {}
    arguments = command_again(one, launched, given.nproc, folder / "run", **other)
    print(f"$ {shlex.join(['python', '-m', 'recipes', *arguments])}", flush=True)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "recipes", *arguments],
        env=fresh_environment({STEP: str(step)} if step else {}),
        preexec_fn=end_with_parent,
    )
    return done.returncode


def refuse_trace(given: argparse.Namespace, one: Recorded) -> None:
    """Raise InputError if the options of a trace do not fit each other, or the run."""
    step, steps, against = given.trace_step, one.summary.get("steps", 1), given.against_trace
    if step is not None and given.against:
        raise InputError("--trace-step trains again, and --against does not: give one of them")
    if step is not None and not 1 <= step <= steps:
        raise InputError(f"--trace-step must be from 1 to {steps}, the run's last step, got {step}")
    if against and step is None:
        raise InputError("--against-trace needs --trace-step, the step that the trace is of")
    if against and not list(read_traces(against)):
        raise InputError(f"{against} is no trace: it holds no rank_0.jsonl")


def compare_traces(step: int, mine: Path, against: Path | None) -> int:
    """Say which operation of a step differs first, if there is a trace to compare with."""
    if against is None:
        print(f"\n{mine}: hashes of step {step}; on another machine, give it with --against-trace")
        return STATUS_FINISHED
    theirs = dict(read_traces(against))
    found = dict(read_traces(mine))
    if theirs.keys() != found.keys():
        raise InputError(
            f"{against} is of {len(theirs)} ranks, {mine} of {len(found)}: give --nproc"
        )
    different = {
        rank: said for rank in found if (said := first_difference(found[rank], theirs[rank]))
    }
    for rank, said in different.items():
        print(f"rank {rank}: the first difference of step {step} is {said}")
    if different:
        return STATUS_FAILED
    print(f"\nidentical: every operation of step {step}, on every rank")
    return STATUS_FINISHED


def draw(one: Recorded, two: Recorded, path: Path) -> None:
    """Draw both loss curves and their relative difference."""
    steps = sorted(one.losses.keys() & two.losses.keys())

    def plot(curves: Any, apart: Any) -> None:
        for run, style, name in ((one, "-", "recorded"), (two, "--", "again")):
            curves.plot(list(run.losses), list(run.losses.values()), style, label=name)
        curves.set(xlabel="step", ylabel="loss")
        curves.legend()
        apart.plot(steps, [_relative(one.losses[s], two.losses[s]) for s in steps], ".-")
        apart.set(xlabel="step", ylabel="relative difference of the loss")
        apart.set_yscale("symlog", linthresh=1e-12)
        apart.set_ylim(bottom=0)

    save_figure(path, plot, panels=2)


def reproduce(given: argparse.Namespace) -> int:
    """Run again, or take the run given by --against; print the verdict."""
    from recipes.__main__ import recipes

    one = read(given.run)
    refuse_trace(given, one)
    if one.summary["recipe"] not in recipes():
        raise InputError(
            f"no recipe {one.summary['recipe']!r} here (recipe in {one.folder}/summary.json): "
            "restore the recipe or the file"
        )
    folder = result_folder(given.output_dir, "reproduce", "reproduce")
    if given.against:
        two = read(given.against)
    else:
        if status := train_again(given, one, folder):
            return status  # the run itself has said why
        if given.trace_step:
            return compare_traces(given.trace_step, folder / "run" / "trace", given.against_trace)
        two = read(folder / "run")
    result = compare(one, two, given.tolerance)
    result["cause"] = "" if result["verdict"] == "identical" else causes(result)
    write_json(folder / "reproduce.json", result)
    draw(one, two, folder / "reproduce.png")
    print(f"\n{result['verdict']} ({result['steps_compared']} logged steps compared)")
    if alone := result["steps_not_compared"]:
        print(f"warning: {len(alone)} steps, {alone[0]} the first, are logged in one run only")
    if result["cause"]:
        print(result["cause"])
    print(f"{folder}/reproduce.json, reproduce.png")
    return STATUS_FAILED if result["verdict"].startswith("different") else STATUS_FINISHED


def main(arguments: Sequence[str]) -> int:
    """Run from a command line; returns the exit status."""
    parser = Parser("reproduce", __doc__)
    parser.add_argument("run", type=given_path, help="folder of a finished run")
    parser.add_argument(
        "--against",
        type=given_path,
        metavar="RUN2",
        help="a finished run to compare with, instead of training",
    )
    parser.add_argument(
        "--trace-step", type=int, metavar="N", help="train up to step N, and hash all it computes"
    )
    parser.add_argument(
        "--against-trace",
        type=given_path,
        metavar="TRACE",
        help="a run/trace of another machine: name the first operation of the step that differs",
    )
    parser.add_argument("--nproc", type=int, help="processes; default: as many as recorded")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        help="largest relative difference of a logged loss that counts as equal if the options "
        "are the same; default %(default)s",
    )
    parser.add_argument("--output-dir", type=given_path, help="default: runs/reproduce/UTC-TIME")
    return attempt(lambda: reproduce(parser.parse_args(list(arguments))))
