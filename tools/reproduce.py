"""Run a recorded run again, and say whether it came out the same.

    make reproduce RUN=runs/ddp_launch/RUN           its command again, into a new folder
    python -m recipes reproduce RUN --nproc 1        on another number of processes
    python -m recipes reproduce RUN --against RUN2   two finished runs; nothing is trained

Nothing is checked out or installed: what differs here from the machine, the code and the libraries
of the recorded run is said first. Then one of three verdicts:

    identical                     the same weights_sha256 and the same logged losses, to the bit
    equal within a tolerance      the same options, and losses that differ by no more than it
    different from step N on      with the likely cause; status 1

A figure of both loss curves and reproduce.json lie in --output-dir.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.cli import Parser, attempt
from common.errors import STATUS_FAILED, STATUS_FINISHED, InputError
from common.figure import save_figure
from common.files import write_json
from common.launch.fresh import fresh_environment
from common.launch.process import end_with_parent
from common.run.folder import read_metrics, result_folder
from common.run.manifest import describe_machine
from common.run.options import FREE

# What is not the same run's affair, and what decides a number although a resume may change it.
_OPTIONS_APART = FREE - {"global_batch_size"}
_MANIFEST_APART = {"command", "seed"}  # the seed is an option
_OURS = (
    "--output-dir",
    "--resume",
    "--nproc",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--seed",
    "--cpu-threads",
)


@dataclass(frozen=True)
class Recorded:
    """A finished run's folder."""

    folder: Path
    manifest: dict[str, Any]
    options: dict[str, Any]
    summary: dict[str, Any]
    losses: dict[int, float]
    """Step to the logged loss, the mean over ranks."""


def read(folder: Path) -> Recorded:
    """Read a run's folder.

    Raises:
        InputError: it is none, or the run has not finished.
    """
    try:
        manifest, config, summary = (
            json.loads((folder / f"{name}.json").read_text())
            for name in ("manifest", "config", "summary")
        )
        lines = read_metrics(folder)
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        unfinished = ": the run has not finished" if missing == "summary.json" else ""
        raise InputError(f"{folder} holds no {missing}{unfinished}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is no run's folder that can be read: {error}") from None
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return Recorded(folder, manifest, config, summary, losses)


def command_again(run: Recorded, launched: str, nproc: int | None, folder: Path) -> list[str]:
    """The arguments of `python -m recipes` that do what the run's manifest says.

    Its command, with the ranks all on this host; seed and CPU threads as the manifest has them.

    Raises:
        InputError: a command that does not name its recipe (submitit's).
    """
    name, manifest = run.summary["recipe"], run.manifest
    words = shlex.split(manifest["command"])
    begins = [
        place + 1
        for place, word in enumerate(words)
        if word == name or re.search(rf"(^|/)recipes[./]{name}[./]train(\.py)?$", word)
    ]
    if not begins:
        raise InputError(
            f"{run.folder} cannot be run again by {manifest['command']}: start it as "
            "it was started, and give --against"
        )
    rest, words = [], words[begins[0] :]
    while words:
        option, _, value = words.pop(0).partition("=")
        if option.replace("_", "-") not in _OURS:
            rest.append(f"{option}={value}" if value else option)
        elif not value and words:
            words.pop(0)
    threads = manifest["determinism"]["cpu_threads"]
    ranks = (
        ["--nproc", str(nproc or manifest["world_size"])] if launched in ("ranks", "spawn") else []
    )
    return [
        name,
        *ranks,
        *rest,
        "--seed",
        str(manifest["seed"]),
        "--cpu-threads",
        str(threads),
        "--output-dir",
        str(folder),
        "--resume",
        "never",
    ]


def differences(one: dict[str, Any], two: dict[str, Any], apart: set[str]) -> dict[str, list[Any]]:
    """Name to the two values, for what differs; a dict inside counts entry by entry."""
    flat = [
        {
            f"{name}.{key}" if key else name: entry
            for name, value in content.items()
            if name not in apart
            for key, entry in (value.items() if isinstance(value, dict) else [("", value)])
        }
        for content in (one, two)
    ]
    return {
        name: [flat[0].get(name), flat[1].get(name)]
        for name in dict.fromkeys([*flat[0], *flat[1]])
        if flat[0].get(name) != flat[1].get(name)
    }


def compare(one: Recorded, two: Recorded, tolerance: float) -> dict[str, Any]:
    """The verdict on two finished runs, and what it rests on.

    Args:
        one: the recorded run.
        two: the other.
        tolerance: largest relative difference of a logged loss that still counts as equal.

    Raises:
        InputError: runs of two recipes, or with no logged step in common.
    """
    if one.summary["recipe"] != two.summary["recipe"]:
        raise InputError(f"a run of {one.summary['recipe']} and one of {two.summary['recipe']}")
    steps = sorted(one.losses.keys() & two.losses.keys())
    if not steps:
        raise InputError(f"{one.folder} and {two.folder} have logged no step in common")
    options = differences(one.options, two.options, _OPTIONS_APART)
    others = differences(one.manifest, two.manifest, _MANIFEST_APART)
    others.pop("determinism.cpu_threads", None)  # an option
    differ = [step for step in steps if one.losses[step] != two.losses[step]]
    apart = {step: _relative(one.losses[step], two.losses[step]) for step in steps}
    worst = max(steps, key=lambda step: apart[step])
    same_weights = one.summary["weights_sha256"] == two.summary["weights_sha256"]
    first = differ[0] if differ else None
    if same_weights and not differ:
        verdict = "identical"
    elif not options and apart[worst] <= tolerance:
        verdict = (
            f"equal within {tolerance:g}: the losses differ by {apart[worst]:.1e} of their "
            f"value at most (step {worst}), the weights in their last bits"
        )
    elif first is None:
        verdict = f"different after step {steps[-1]}, the last that was logged"
    else:
        verdict = f"different from step {first} on (by {apart[worst]:.1e} at most, step {worst})"
    return {
        "verdict": verdict,
        "runs": [str(one.folder), str(two.folder)],
        "weights_sha256": [one.summary["weights_sha256"], two.summary["weights_sha256"]],
        "steps_compared": len(steps),
        "first_different_step": first,
        "largest_relative_difference": apart[worst],
        "tolerance": tolerance,
        "options": options,
        "environment": others,
    }


def _relative(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def causes(result: dict[str, Any]) -> str:
    """What in the records differs, the likeliest to matter first."""
    both = {**result["options"], **result["environment"]}
    first = ["data_fingerprint", *result["options"], "world_size", "torch", "gpus", "cpu", "cuda"]
    order = [name for name in dict.fromkeys([*first, *both]) if name in both]
    if not order:
        return (
            "nothing that is recorded differs: an operation that is not deterministic "
            "(--no-deterministic?), or a cause outside the manifest"
        )
    shown = [f"{name} ({_word(both[name][0])}, now {_word(both[name][1])})" for name in order[:4]]
    why = f"likely cause: {', then '.join(shown)}"
    if order[0] == "world_size":
        why += (
            "; with the number of processes, sums, BatchNorm and dropout change, except with "
            "--virtual-ranks"
        )
    return why


def _word(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}..." if re.fullmatch(r"(sha256:)?[0-9a-f]{32,}", text) else text


def draw(one: Recorded, two: Recorded, path: Path) -> None:
    """Both loss curves, and how far they are apart."""
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
    """Run again unless there is another run to compare with; print the verdict."""
    from recipes.__main__ import recipes

    one = read(given.run)
    if one.summary["recipe"] not in recipes():
        raise InputError(f"no recipe {one.summary['recipe']!r} here")
    folder = result_folder(given.output_dir, "reproduce", "reproduce")
    if given.against:
        two = read(given.against)
    else:
        now = describe_machine()
        recorded = {name: one.manifest.get(name) for name in now}
        recorded["gpu"] = next(iter(one.manifest["gpus"]), None)
        for name, (then, here) in differences(recorded, now, set()).items():
            print(f"  {name}: {_word(then)} when it was recorded, {_word(here)} now")
        launched = recipes()[one.summary["recipe"]][1]
        arguments = command_again(one, launched, given.nproc, folder / "run")
        print(f"$ {shlex.join(['python', '-m', 'recipes', *arguments])}", flush=True)
        done = subprocess.run(
            [sys.executable, "-P", "-m", "recipes", *arguments],
            env=fresh_environment(),
            preexec_fn=end_with_parent,
        )
        if done.returncode:
            return done.returncode  # it has said why
        two = read(folder / "run")
    result = compare(one, two, given.tolerance)
    result["cause"] = "" if result["verdict"] == "identical" else causes(result)
    write_json(folder / "reproduce.json", result)
    draw(one, two, folder / "reproduce.png")
    print(f"\n{result['verdict']} ({result['steps_compared']} logged steps compared)")
    if result["cause"]:
        print(result["cause"])
    print(f"{folder}/reproduce.json, reproduce.png")
    return STATUS_FAILED if result["verdict"].startswith("different") else STATUS_FINISHED


def main(arguments: Sequence[str]) -> int:
    """Run from a command line; returns the exit status."""
    parser = Parser("reproduce", __doc__)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="RUN2",
        help="a finished run to compare with, instead of training",
    )
    parser.add_argument("--nproc", type=int, help="processes; default: as many as were recorded")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        help="largest relative difference of a logged loss that counts as equal, "
        "where the options are the same; default %(default)s",
    )
    parser.add_argument("--output-dir", type=Path, help="default: runs/reproduce/UTC-TIME")
    return attempt(lambda: reproduce(parser.parse_args(list(arguments))))
