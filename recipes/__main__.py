"""The front door: `python -m recipes [NAME [options]]`."""

import difflib
import signal
import sys
from importlib import import_module
from pathlib import Path

from common import cli
from common.errors import InputError
from common.launch.process import die_with_parent, end_process, stop_at_once
from common.launch.ranks import Ranks
from common.launch.report import report
from common.stack import check_environment
from tools.command import to_stdout

LAUNCHED = {
    "ranks": "one process per device, started by this command, torchrun, srun or mpirun",
    "spawn": "one process per device, started by the recipe itself, torchrun, srun or mpirun",
    "one": "one process that drives its devices itself",
    "stages": "one process per copy of the model, or one per stage: --schedule decides",
}
"""The values of LAUNCHED in recipes/NAME/__init__.py, and their meanings."""

COMMANDS = {
    "pack DATA OUT": "photos packed into a few large files, for a cluster's file system",
    "predict RUN INPUT": "the classes of images, by the model that folder RUN holds",
    "evaluate RUN": "the exact evaluation of a finished run, on its held-out or other samples",
    "export RUN TO": "the model as .pt2, .onnx or .safetensors for other programs, checked",
    "sweep RECIPE": "a run for each combination of option values, and a table of what they reached",
    "runs [FOLDER]": "all runs: how each ended, what it reached, with which options",
    "doctor": "what on this machine would stop a run, and what to do about it",
    "sample RUN": "write text with the model of a run of fsdp",
    "reproduce RUN": "run the training of folder RUN again: is the result the same?",
}


def recipes() -> dict[str, str]:
    """Name of each recipe to the first line of its train.py, read without importing torch."""
    files = sorted(Path(__file__).parent.glob("*/train.py"))
    first = {
        file.parent.name: file.read_text(errors="replace").partition("\n")[0] for file in files
    }
    return {name: line.strip('"') for name, line in first.items()}


def show(known: dict[str, str]) -> None:
    """Print the recipes and the commands."""
    print("usage: python -m recipes NAME [--nproc N] [options]")
    print("       python -m recipes NAME --help               lists the options\n")
    for recipe, line in known.items():
        how = getattr(import_module(f"recipes.{recipe}"), "LAUNCHED", "")
        launched = LAUNCHED.get(how, "not yet: its __init__.py has no LAUNCHED")
        print(f"  {recipe:<20} {line}\n  {'':<20} launched: {launched}")
    print()
    for command, line in COMMANDS.items():
        print(f"  {command:<20} {line}")


def main() -> int:
    """List the recipes, or run one."""
    die_with_parent()
    stop_at_once()  # before torch is imported, which can take a minute on a cluster
    try:
        Path.cwd()
    except FileNotFoundError:  # oneMKL, which torch loads, would end this process
        fault = InputError("the working folder was removed: change to another one (cd)")
        return report(fault, Ranks())
    known = recipes()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        return to_stdout(lambda: show(known))
    if name in {command.split()[0] for command in COMMANDS}:
        try:
            return int(import_module(f"tools.{name}").main(arguments))
        except SystemExit as end:  # after --help
            return int(end.code or 0)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        fix = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        return cli.refuse(InputError(f"no recipe {name!r}: {fix}"))
    try:
        check_environment()
    except InputError as error:
        return cli.refuse(error)
    if {"-h", "--help"} & set(arguments):
        return to_stdout(lambda: cli.start(name, arguments))
    return cli.start(name, arguments)  # which needs no stdout


if __name__ == "__main__":
    try:
        end_process(main())
    except ImportError as error:
        end_process(cli.refuse_missing(error))
    except KeyboardInterrupt:  # while torch is imported
        end_process(128 + signal.SIGINT)
