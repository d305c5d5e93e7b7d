"""Train each combination of option values, one after another, and compare what they reached.

    make sweep RECIPE=ddp_launch OVER="--lr 0.1 0.03 0.01 --seed 0 1" ARGS="--epochs 5"
    python -m recipes sweep ddp_launch --over "--lr 0.1 0.03 --seed 0 1" --epochs 5

--over gives values to some options; other options go to every run as they are. All combinations are
checked before the first one trains. Each run gets a folder below --output-dir, such as
lr=0.1,seed=0. The same command again goes on: a finished run is not trained again, a stopped one is
resumed. A run that fails does not hold up the others; the status is then 1.

At the end there is a table, sorted by the metric of the best epoch, and a figure of all curves
(sweep.png). --at-once 2 trains two runs side by side, each on its share of the GPUs, or of the CPU
cores. What they say is then in their folders; the reason of a failure is shown at the end.
"""

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

from common import cli
from common.errors import (
    STATUS_BAD_INPUT,
    STATUS_FAILED,
    STATUS_FINISHED,
    STATUS_STOPPED,
    STOP_SIGNALS,
    InputError,
)
from common.launch.process import end_with_parent
from common.launch.report import say
from common.launch.start import usable_gpus
from common.masking import printable
from common.output_folder import make_folder
from common.parse import given_path
from common.run.best import sign
from recipes.__main__ import recipes
from tools import runs
from tools.command import Parser, attempt
from tools.fresh import fresh_environment

INTERRUPTED = 128 + signal.SIGINT
STOPPED = (STATUS_STOPPED, INTERRUPTED)
"""Statuses of runs that were asked to end, after which a sweep begins no other."""


class Combination(NamedTuple):
    """One run of a sweep."""

    options: list[str]
    folder: Path


def combinations(over: str, below: Path) -> list[Combination]:
    """All combinations of the values in `over`; the last option's value changes fastest.

    Raises:
        InputError: no values, or one value twice.
    """
    try:
        words = shlex.split(over)
    except ValueError as error:
        raise InputError(f"--over {over!r}: {error}") from error
    values: dict[str, list[str]] = {}
    for word in words:
        if re.match("--[a-z]", word) and "=" not in word:
            if word in values:
                raise InputError(f"--over names {word} twice: give all its values at once")
            values[word] = []
        elif not values:
            raise InputError(f'--over begins with {word!r}: write --over "--OPTION VALUE VALUE"')
        else:
            values[[*values][-1]].append(word)
    if not values:
        raise InputError('--over is empty: write --over "--OPTION VALUE VALUE"')
    if lacking := [option for option, given in values.items() if not given]:
        raise InputError(f"--over gives {lacking[0]} no values: name them behind it")
    found = []
    for chosen in itertools.product(*values.values()):
        pairs = list(zip(values, chosen, strict=True))
        name = ",".join(f"{o.lstrip('-')}={re.sub('[^A-Za-z0-9.+-]', '_', v)}" for o, v in pairs)
        found.append(Combination([word for pair in pairs for word in pair], below / name))
    names = [each.folder.name for each in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"--over gives two runs {twice[0]}: give each value once")
    return found


Share = tuple[str | None, set[int]]
"""CUDA_VISIBLE_DEVICES (None: as it is), and CPU cores."""


def shares(at_once: int) -> list[Share]:
    """The share of each of the runs at a time.

    Raises:
        InputError: there are fewer GPUs, or fewer cores, than runs.
    """
    cores, count = sorted(os.sched_getaffinity(0)), usable_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    gpus = visible.split(",")[:count]
    most = len(gpus) or len(cores)
    if not 1 <= at_once <= most:
        what = "GPUs" if gpus else "CPU cores"
        raise InputError(f"--at-once {at_once}: there are {most} {what}, so give 1 to {most}")
    return [
        (",".join(gpus[n::at_once]) if gpus else None, set(cores[n::at_once]) or set(cores))
        for n in range(at_once)
    ]


class Sweep:
    """Trains combinations, some at a time; passes stop signals on to them."""

    def __init__(self, recipe: str, common: Sequence[str], at_once: int) -> None:
        self.recipe, self.common = recipe, list(common)
        self.free, self.alone = shares(at_once), at_once == 1
        self.running: dict[subprocess.Popen[bytes], tuple[int, Share, IO[bytes] | None]] = {}
        self.status: dict[int, int] = {}
        self.said: dict[int, str] = {}
        self.asked = False

    def run(self, all_of_them: Sequence[Combination]) -> None:
        """Train them; `status` has the exit status of each that ended, `said` its error."""
        for stop in (*STOP_SIGNALS, signal.SIGINT):
            signal.signal(stop, self._stop)
        for number, each in enumerate(all_of_them):
            while not self.free and not self.asked:
                self._wait()
            if self.asked:
                break
            say(f"run {number + 1} of {len(all_of_them)}: {shlex.join(each.options)}")
            self._start(number, each)
        while self.running:
            self._wait()

    def _start(self, number: int, each: Combination) -> None:
        gpus, cores = share = self.free.pop()

        def prepare() -> None:
            end_with_parent()
            os.sched_setaffinity(0, cores)

        more = {} if gpus is None or self.alone else {"CUDA_VISIBLE_DEVICES": gpus}
        words = [self.recipe, *self.common, *each.options, "--output-dir", str(each.folder)]
        errors = None if self.alone else tempfile.TemporaryFile()  # noqa: SIM115  # closed in _wait
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "recipes", *words],
            env=fresh_environment(more),
            preexec_fn=prepare,
            stdout=None if self.alone else subprocess.DEVNULL,
            stderr=errors,
        )
        self.running[process] = number, share, errors
        if self.asked:  # meanwhile
            _signal(process, signal.SIGTERM)

    def _wait(self) -> None:
        """Until one of the runs has ended."""
        pid, status = os.wait()
        for process in [process for process in self.running if process.pid == pid]:
            number, share, errors = self.running.pop(process)
            if errors:
                errors.seek(0)
                lines = errors.read().decode(errors="replace").splitlines()
                said = (line for line in lines if line.startswith("error: "))
                self.said[number] = printable(next(said, "").removeprefix("error: "))
                errors.close()
            ended = process.returncode = os.waitstatus_to_exitcode(status)
            self.status[number] = ended
            self.free.append(share)
            if ended in STOPPED:
                self.asked = True

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGINT:  # a terminal gives it to all; a second one ends this, too
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return
        for process in self.running:
            _signal(process, number)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):  # Popen's own would take its status from `_wait`
        os.kill(process.pid, number)


def sweep(arguments: Sequence[str]) -> int:
    """Run from a command line; returns the exit status."""
    parser = Parser("sweep", __doc__)
    parser.add_argument("recipe", help="the recipe that each run trains")
    parser.add_argument("--over", required=True, help='options and values: "--lr 0.1 0.03"')
    parser.add_argument(
        "--output-dir", type=given_path, help="folder of the runs; default: runs/RECIPE/sweep"
    )
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side; default: 1")
    given, common = parser.parse_known_args(list(arguments))
    if given.recipe not in recipes():
        raise InputError(f"no recipe {given.recipe!r}: there are {', '.join(recipes())}")
    below = given.output_dir or Path("runs") / given.recipe / "sweep"
    found = combinations(given.over, below)
    config = import_module(f"recipes.{given.recipe}.train").Config
    for each in found:
        cli.parse(given.recipe, config, [*common, *each.options])
    job = Sweep(given.recipe, common, given.at_once)
    make_folder(below)
    job.run(found)
    finished = [n for n, status in job.status.items() if status == STATUS_FINISHED]
    for number in sorted(job.status.keys() - set(finished)):
        if job.status[number] not in STOPPED:
            why = f": {job.said[number]}" if job.said.get(number) else ""
            say(f"{found[number].folder} ended with status {job.status[number]}{why}")
    if finished:
        show(below)
    if len(finished) == len(found):
        return STATUS_FINISHED
    if job.asked:
        say(
            f"stopped: {len(finished)} of {len(found)} runs have finished; the same command goes on"
        )
        return INTERRUPTED if INTERRUPTED in job.status.values() else STATUS_STOPPED
    bad_input = {*job.status.values()} == {STATUS_BAD_INPUT}
    return STATUS_BAD_INPUT if bad_input else STATUS_FAILED


def show(below: Path) -> None:
    """The table and the figure of the runs in a folder."""
    looked = [runs.look(run) for run in runs.find_runs(below)]
    summaries = [run["summary"].get("best") or run["summary"] for run in looked]
    metrics = [name for each in summaries for name in each if name.startswith("val_")]
    by = metrics[0] if metrics else ""
    best = {id(run): each.get(by) for run, each in zip(looked, summaries, strict=True)}
    # The best one comes last, where one looks first.
    looked.sort(key=lambda run: (best[id(run)] is not None, sign(by) * (best[id(run)] or 0)))
    runs.show(looked)
    runs.draw(looked, below / "sweep.png")
    print(below / "sweep.png")


def main(arguments: Sequence[str]) -> int:
    """Run from a command line; returns the exit status."""
    return attempt(lambda: sweep(arguments))
