"""The front door: `python -m recipes [NAME [options]]`."""

import ast
import difflib
import sys
from importlib import import_module
from pathlib import Path

from common import cli
from common.errors import InputError
from common.launch.process import die_with_parent, end_process, stop_at_once
from common.launch.stack import check_environment


def recipes() -> dict[str, tuple[str, str]]:
    """Name to (first line of the docstring, how it is launched), read without importing torch."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*/train.py")):
        module = ast.parse(path.read_text())
        launched = next(
            ast.literal_eval(node.value)
            for node in module.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAUNCHED"
        )
        first = (ast.get_docstring(module) or "").splitlines()[0]
        found[path.parent.name] = (first, launched)
    return found


def main() -> int:
    """List the recipes, or run one."""
    die_with_parent()
    stop_at_once()  # before torch is imported, which can take a minute on a cluster
    known = recipes()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("usage: python -m recipes NAME [--nproc N] [options]")
        print("       python -m recipes NAME --help               lists the options\n")
        for recipe, (line, launched) in known.items():
            print(f"  {recipe:<20} {line}\n  {'':<20} launched: {cli.LAUNCHED[launched]}")
        print(f"\n  {'doctor':<20} what on this machine would stop a run, and what to do about it")
        print(
            f"  {'reproduce RUN':<20} run the training of folder RUN again: is the result the same?"
        )
        return 0
    if name in ("reproduce", "doctor"):
        return int(import_module(f"tools.{name}").main(arguments))
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        return cli.refuse(InputError(f"no recipe {name!r}: {hint}"))
    try:
        check_environment()
    except InputError as error:
        return cli.refuse(error)
    if known[name][1] == "ranks":
        return cli.start(name, arguments)
    return int(import_module(f"recipes.{name}.train").main(arguments))


if __name__ == "__main__":
    end_process(main())
