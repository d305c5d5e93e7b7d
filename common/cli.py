"""From a command line to a running recipe. Imports no torch, so that a launcher starts at once."""

import argparse
import contextlib
import gc
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, make_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from common.errors import STATUS_FINISHED, InputError
from common.launch.process import python_path, report, run_rank
from common.launch.ranks import Ranks, resolve
from common.launch.stack import check_versions
from common.launch.start import launch

C = TypeVar("C")

# What is imported at the start is no garbage, and looking for it among a million objects takes a
# fifth of the start. `common.run.loop` goes back to Python's own threshold when training begins.
gc.set_threshold(100_000, 10, 10)

# Before torch is imported: it warns of every connection from a host without a reverse name.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

LAUNCHED = {
    "ranks": "one process per device, started by this command, torchrun, srun or mpirun",
    "spawn": "one process per device, started by the recipe itself, torchrun, srun or mpirun",
    "one": "one process that drives its devices itself",
    "stages": "one process, or one process per stage: --schedule decides",
}
"""What a recipe's constant LAUNCHED may say, and what that means."""

_HINTS = {
    "'mpi'": "PyTorch's wheels are built without MPI; mpirun as a launcher works with gloo",
}


@dataclass(frozen=True)
class LaunchOptions:
    """How many processes to start. Under torchrun, srun or mpirun leave these options out."""

    nproc: int | None = None
    """Processes on this machine. None: the number of visible GPUs, or 2 where there is none."""
    nnodes: int = 1
    """Hosts; the command is started on each."""
    node_rank: int = 0
    """Number of this host, from 0 to nnodes - 1."""
    master_addr: str | None = None
    """Address of host 0 that the others can reach. None: MASTER_ADDR, or this machine."""
    master_port: int | None = None
    """Port of host 0. None: MASTER_PORT, or a free one where there is one host."""
    compare: bool = False
    """Measure the recipe beside its alternatives instead of training: a table, a figure and
    comparison.json in --output-dir. For recipes that have a compare.py."""
    compare_rounds: int = 3
    """How often --compare measures each alternative, in turn; the median counts."""
    check: bool = False
    """Check the options and end, with status 0, or with 2 and a line that says what is wrong. Under
    torchrun or srun the number of processes is not checked."""

    def __post_init__(self) -> None:
        """Refuse what cannot be started."""
        if self.nproc is not None and self.nproc < 1:
            raise ValueError(f"--nproc must be at least 1, got {self.nproc}")
        if self.compare_rounds < 1:
            raise ValueError(f"--compare-rounds must be at least 1, got {self.compare_rounds}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"--node-rank {self.node_rank} must lie in 0..{self.nnodes - 1}")
        if self.nnodes > 1 and not self.address:
            raise ValueError("several hosts need --master-addr, host 0's address")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--master-port must lie in 1..65535, got {self.port}")

    @property
    def address(self) -> str:
        """Host 0's address as given, or an empty string."""
        return self.master_addr or os.environ.get("MASTER_ADDR") or ""

    @property
    def port(self) -> int:
        """Host 0's port as given, or 0."""
        text = os.environ.get("MASTER_PORT") or "0"
        if self.master_port is None and not text.isdecimal():
            raise ValueError(f"MASTER_PORT must be a whole number, got {text!r}")
        return int(text) if self.master_port is None else self.master_port

    @property
    def processes(self) -> int:
        """Processes to start on this machine."""
        return self.nproc or _visible_gpus() or 2


def start(name: str, arguments: Sequence[str], processes: int | None = None) -> int:
    """Run a recipe whose ranks are processes started from outside, by us where nobody did.

    Args:
        name: of the recipe.
        arguments: of its command line.
        processes: ranks in all that its options ask for; None: --nproc, or one a GPU.

    Returns:
        The exit status.
    """
    try:
        ranks, arguments = _resolve(arguments)
        if ranks.launcher == "none" and not {"-h", "--help"} & set(arguments):
            options, rest = _split(arguments)
            if os.environ.get("SLURM_JOB_NUM_NODES", "1") != "1" and options.nnodes == 1:
                print(
                    "warning: in a Slurm job of several nodes, but not started by srun: the "
                    "ranks are on this host only",
                    file=sys.stderr,
                )
            nproc = processes // options.nnodes if processes else options.processes
            if options.nnodes * nproc > 1 and not (options.compare or options.check):
                command, address = ["-m", "recipes", name, *rest], options.address or "127.0.0.1"
                return launch(
                    command, nproc, options.nnodes, options.node_rank, address, options.port
                )
    except InputError as error:
        return report(error, Ranks())
    return int(import_module(f"recipes.{name}.train").main(arguments))


def run(
    name: str,
    config_class: type[C],
    train: Callable[[C, Ranks], None],
    arguments: Sequence[str],
    spawn: Callable[[C, int], int] | None = None,
    processes: Callable[[C], int] | None = None,
) -> int:
    """Parse the options and run `train` in this process, or `spawn` where it is no rank yet.

    Args:
        name: of the recipe, for the usage line.
        config_class: dataclass of option groups.
        train: the recipe.
        arguments: of the command line.
        spawn: starts the ranks from (config, nproc) and returns their exit status.
        processes: ranks in all that a config asks for, where --nproc is not free to choose.

    Returns:
        The exit status.
    """
    ranks = Ranks()
    try:
        ranks, arguments = _resolve(arguments)
        options, config = parse(name, config_class, arguments)
        check_versions()
        if options.compare and ranks.world_size > 1:
            raise InputError("--compare starts what it measures itself: run it as one process")
        if options.compare:
            _compare(name, arguments)
        wanted = processes(config) if processes else None
        alone = ranks.launcher == "none"
        if wanted is not None and (alone or not options.check):
            _refuse_other_than(wanted, name, options, ranks)
        if spawn is not None and alone and options.nnodes > 1:
            raise InputError(f"{name} starts processes on this machine only: use ddp_launch")
        if options.check:
            return STATUS_FINISHED
        if not alone:
            if options.nproc not in (None, ranks.local_world_size):
                raise InputError(
                    f"--nproc {options.nproc}, but this process is already one of "
                    f"{ranks.local_world_size} that {ranks.launcher} started here: leave it out"
                )
        elif spawn is not None:
            return spawn(config, options.processes)
        elif (wanted or options.nnodes * options.processes) > 1:
            return start(name, arguments, wanted)
    except InputError as error:
        return refuse(error, ranks)

    def body() -> None:
        from common.group.rendezvous import refuse_together  # imports torch

        try:
            train(config, ranks)
        except InputError as error:
            raise refuse_together(error, ranks) from None

    return run_rank(body, ranks)


def refuse(error: InputError, ranks: Ranks | None = None) -> int:
    """Show bad input that was found before training, once for all ranks; its exit status."""
    try:
        ranks = ranks or resolve()
        if ranks.world_size > 1:
            from common.group.rendezvous import refuse_together  # imports torch

            error = refuse_together(error, ranks)
    except (InputError, ImportError):  # this rank does not know its peers, or torch is broken
        error.agreed = False
    return report(error, ranks or Ranks())


def _refuse_other_than(wanted: int, name: str, options: LaunchOptions, ranks: Ranks) -> None:
    """Raise InputError where more or fewer processes are there than the recipe's options mean."""
    what = "one process" if wanted == 1 else f"{wanted} processes"
    if ranks.launcher != "none" and ranks.world_size != wanted:
        raise InputError(
            f"{name} with these options is {what}, but {ranks.launcher} started {ranks.world_size}"
        )
    if ranks.launcher == "none" and options.nproc not in (None, wanted // options.nnodes):
        raise InputError(
            f"--nproc {options.nproc}, but {name} with these options is {what}, whatever the "
            "number of devices: leave it out"
        )
    if wanted % options.nnodes:
        raise InputError(f"{what} cannot be shared out over {options.nnodes} hosts alike")


def _compare(name: str, arguments: Sequence[str]) -> NoReturn:
    """Become the program that measures: `common` starts it, and imports nothing of it."""
    path = python_path(os.environ.get("PYTHONPATH"))
    command = [sys.executable, "-P", "-m", "tools.bench", name, *arguments]
    os.execve(command[0], command, {**os.environ, "PYTHONPATH": path})  # noqa: S606


def attempt(body: Callable[[], int | None]) -> int:
    """Run `body`; the exit status. A signal ends it at once: there is no state to save."""
    try:
        return body() or STATUS_FINISHED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # the outermost frame: every failure becomes a status
        return report(error, Ranks())


def parse(name: str, config_class: type[C], arguments: Sequence[str]) -> tuple[LaunchOptions, C]:
    """The options as dataclasses; `--help` prints and exits.

    Raises:
        InputError: unknown options, wrong values or combinations.
    """
    import tyro

    groups = [(f.name, f.type, f) for f in fields(config_class)]  # type: ignore[arg-type]
    launch_group = ("launch", LaunchOptions, LaunchOptions())
    both: Any = make_dataclass("Options", [launch_group, *groups], frozen=True)
    both.__doc__ = sys.modules[config_class.__module__].__doc__
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = tyro.cli(
                both,
                prog=f"python -m recipes {name}",
                args=list(arguments),
                config=(tyro.conf.OmitArgPrefixes,),
            )
        return options.launch, config_class(**{n: getattr(options, n) for n, _, _ in groups})
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise InputError(_one_line(said.getvalue())) from None
    except ValueError as error:
        raise InputError(str(error)) from None


def _one_line(box: str) -> str:
    """tyro frames its errors in a box: its first paragraph and what it suggests, as one line."""
    box = re.sub(r"\x1b\[[\d;]*m", "", box)  # colours, on a terminal
    framed = box.lstrip().startswith("╭")  # else, on an ASCII terminal, the title is a paragraph
    lines = [line.strip("│ ") for line in box.splitlines() if not re.match("[╭╰]", line)]
    paragraphs = re.split(r"(?m)^[─-]+$", "\n".join(lines))
    text = " ".join(paragraphs[0 if framed or len(paragraphs) == 1 else 1].split())
    text = re.sub(r"^Error parsing ([a-z]\w*: )?", "", text).rstrip(" .")
    if similar := re.search(r"Perhaps you meant\W+(--[\w-]+)", box):
        text += f" (perhaps you meant {similar[1]})"
    hint = next((hint for part, hint in _HINTS.items() if part in text), None)
    return f"{text}{f'. {hint}' if hint else ''}. --help lists the options"


class Parser(argparse.ArgumentParser):
    """For commands of few options: bad usage is an InputError.

    Args:
        name: of the command.
        about: what it does, for --help, kept as it is written.
    """

    def __init__(self, name: str, about: str | None) -> None:
        super().__init__(
            prog=f"python -m recipes {name}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise.

        Raises:
            InputError: with argparse's message.
        """
        raise InputError(f"{message}. --help lists the options")


def _resolve(arguments: Sequence[str]) -> tuple[Ranks, list[str]]:
    """Ranks, and the arguments without the `--local-rank` that torch.distributed.launch adds."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--local-rank", "--local_rank", type=int)
    try:
        known, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise InputError(str(error)) from None
    return resolve(local_rank_argument=known.local_rank), rest


def _split(arguments: Sequence[str]) -> tuple[LaunchOptions, list[str]]:
    """The launch options, and the rest for the ranks, who check it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option, kind in (
        ("nproc", int),
        ("nnodes", int),
        ("node-rank", int),
        ("master-addr", str),
        ("master-port", int),
        ("compare-rounds", int),
    ):
        names = (f"--{option}", f"--{option.replace('-', '_')}")
        parser.add_argument(*dict.fromkeys(names), type=kind, default=argparse.SUPPRESS)
    for flag in ("--compare", "--check"):
        parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS)
    try:
        known, rest = parser.parse_known_args(list(arguments))
        return LaunchOptions(**vars(known)), rest
    except (argparse.ArgumentError, ValueError) as error:
        raise InputError(str(error)) from None


def _visible_gpus() -> int:
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return 0  # without asking torch, whose import takes a second
    import torch

    return torch.cuda.device_count()
