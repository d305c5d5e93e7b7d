"""`make bench`: measure, and renew results/ (JSON file, figure) and README.md of what is measured.

    make bench [WHAT="step peers"] [ARGS="--rounds N"]   measure
    make bench RECIPE=ddp_launch ARGS="--output DIR"     measure into DIR; change nothing else
    make bench ARGS=--redraw                             draw again from the JSON files
    make bench RECIPE=NAME ARGS=--default-run            renew what its README.md shows of make run

WHAT names parts of benchmarks/ (default: step, input, snapshots and network); RECIPE is one that
has a compare.py. Options that are not listed below go to the recipe, or to peers (--steps,
--processes, --only).
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import compress
from pathlib import Path
from typing import Any

from common import ROOT, cli
from common.errors import InputError
from common.launch.process import end_process, stop_at_once
from common.manifest import describe_machine
from common.parse import given_path
from common.writing import write_json
from tools.command import Parser, attempt
from tools.fresh import run_fresh

PARTS = ("step", "input", "snapshots", "network")
ON_DEMAND = ("learning", "portable", "scale")
"""Measured when named: they take long."""

SHOWN = (
    "val_accuracy",
    "val_bits_per_character",
    "bigram_bits_per_character",
    "samples_per_s",
    "weights_sha256",
)
"""Rows of a default run's table that the recipe's page shows."""


@dataclass(frozen=True)
class Subject:
    """What can be measured."""

    home: Path
    """Folder of README.md and results/."""
    module: str
    """Has `measure`, which returns tables and what the figure needs, and `draw(result, path)`.
    What it may have for README.md: see `on_page`."""
    file: str
    """Name of the JSON file and the figure, without suffix."""
    part: str
    """Part of README.md that shows the tables."""
    is_recipe: bool = False
    rounds: int = 5

    @property
    def takes_options(self) -> bool:
        """Whether it is `measure(options, folder, rounds)`, and not `measure(folder, rounds)`."""
        return self.is_recipe or self.file == "peers"


SUBJECTS = {
    **{
        name: Subject(ROOT / "benchmarks", f"benchmarks.{name}", name, name)
        for name in (*PARTS, *ON_DEMAND)
    },
    "peers": Subject(ROOT / "benchmarks" / "peers", "benchmarks.peers.compare", "peers", "results"),
    "host": Subject(ROOT / "benchmarks" / "peers", "benchmarks.peers.host", "host", "host"),
    **{
        path.parent.name: Subject(
            path.parent,
            f"recipes.{path.parent.name}.compare",
            "comparison",
            "results",
            is_recipe=True,
            rounds=3,
        )
        for path in sorted((ROOT / "recipes").glob("*/train.py"))
    },
}


def check(names: Sequence[str], given: argparse.Namespace, options: Sequence[str]) -> None:
    """Refuse what cannot be measured before anything is measured.

    Raises:
        InputError: wrong names or options, or a part that needs root.
    """
    if unknown := [name for name in names if name not in SUBJECTS]:
        raise InputError(f"no benchmark {unknown[0]!r}: choose from {', '.join(SUBJECTS)}")
    if given.rounds is not None and given.rounds < 1:
        raise InputError("--rounds must be at least 1")
    if options and not all(SUBJECTS[name].takes_options for name in names):
        raise InputError(f"unknown options: {shlex.join(options)}. --help lists the options")
    if given.default_run and not all(SUBJECTS[name].is_recipe for name in names):
        raise InputError("--default-run is for a recipe: name one")
    if given.redraw or given.default_run:
        return
    compared = sorted(path.parent.name for path in ROOT.glob("recipes/*/compare.py"))
    for name in names:
        if SUBJECTS[name].is_recipe:
            if name not in compared:
                raise InputError(f"{name} has no comparison: choose from {', '.join(compared)}")
            cli.parse(name, import_module(f"recipes.{name}.train").Config, options)
    if "network" in names and os.geteuid():
        raise InputError(
            f"network needs root, to simulate hosts: run as root, or name {', '.join(PARTS[:-1])}"
        )


def measure(name: str, rounds: int, options: list[str]) -> dict[str, Any]:
    """The content of the JSON file."""
    subject = SUBJECTS[name]
    module = import_module(subject.module)
    machine = describe_machine()  # before: the code that is measured may be edited meanwhile
    command = ["python", "-m", "tools.bench", name, *options]
    if rounds != subject.rounds:
        command += ["--rounds", str(rounds)]
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        first = [options] if subject.takes_options else []
        found = module.measure(*first, Path(scratch), rounds)
    elapsed_s = round(time.monotonic() - start_s, 1)
    about = {"command": shlex.join(command), "elapsed_s": elapsed_s, **machine}
    if "cpu" in options or not subject.is_recipe:
        about["gpu"] = None  # not used, even if the machine has one
    return {"about": about, **found}


def default_run(name: str) -> dict[str, Any]:
    """Run a recipe with its defaults: the content of make_run.json."""
    with tempfile.TemporaryDirectory() as folder:
        printed = run_fresh("recipes", [name, "--output-dir", folder])
        content: dict[str, Any] = {"started_by": f"make run RECIPE={name}"}
        for part in ("summary", "manifest"):
            path = Path(folder) / f"{part}.json"
            content[part] = json.loads(path.read_text()) if path.exists() else None
        if content["manifest"]:
            content["manifest"].pop("start", None)  # where and when, which no other machine has
        lines = printed.replace(folder, f"runs/{name}/UTC-TIME").splitlines()
    return {**content, "printed": [line.rstrip() for line in lines]}


def machine_in_words(about: dict[str, Any]) -> str:
    """The GPU, or the CPU cores."""
    return str(about["gpu"] or f"{about['cpu_cores']} cores of an {about['cpu']}, no GPU")


def shown(run: dict[str, Any]) -> str:
    """The lines of a default run that carry its message, in Markdown; the record has all.

    Of a training: the rows `SHOWN` of the table.
    """
    lines = run["printed"]
    if any(line.startswith("epoch ") for line in lines):
        rows = [line for line in lines if line.startswith(tuple(f"  {name} " for name in SHOWN))]
        lines = ["...", *rows]
    text = "\n".join([f"$ {run['started_by']}", *lines]).rstrip()
    about = machine_in_words(run["manifest"])
    return f"```\n{text}\n```\n\n({about}; all lines: [make_run.json](results/make_run.json).)"


def on_page(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """A result with the tables that README.md shows; the record has all.

    A module may have `on_page(result)`, which returns shorter tables, or HEADINGS: columns that the
    page names otherwise or, if empty, leaves out.
    """
    module = import_module(SUBJECTS[name].module)
    tables = module.on_page(result) if hasattr(module, "on_page") else result["tables"]
    headings = getattr(module, "HEADINGS", {})
    return {**result, "tables": [renamed(table, headings) for table in tables]}


def renamed(table: dict[str, Any], headings: Mapping[str, str]) -> dict[str, Any]:
    """A table whose columns have the names of a page; an empty one leaves its column out."""
    names = [headings.get(name, name) for name in table["columns"]]
    kept = [bool(name) or not old for name, old in zip(names, table["columns"], strict=True)]
    rows = [list(compress(row, kept)) for row in table["rows"]]
    return {**table, "columns": list(compress(names, kept)), "rows": rows}


def markdown(result: dict[str, Any], file: str = "comparison") -> str:
    """The tables, where they were measured, and the figure; `file` as in Subject.

    The JSON file has the versions and the command."""
    parts = []
    for table in result["tables"]:
        rows = [table["columns"], *table["rows"]]
        heading, *lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
        lines = [heading, "|" + "---|" * len(table["columns"]), *lines]
        parts.append(f"{table['title']}\n\n" + "\n".join(lines))
    about = result["about"]
    parts.append(
        f"({machine_in_words(about)}; [{file}.json](results/{file}.json).)\n\n"
        f"![the figure](results/{file}.png)"
    )
    return "\n\n".join(parts)


def plain(result: dict[str, Any]) -> str:
    """The tables for a terminal."""
    parts = []
    for table in result["tables"]:
        rows = [[str(cell) for cell in row] for row in (table["columns"], *table["rows"])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        parts.append("\n".join([table["title"], *(f"  {line}" for line in lines)]))
    return "\n\n" + "\n\n".join(parts) + "\n"


def marks(part: str) -> tuple[str, str]:
    """The lines around a part of a README.md that this program writes."""
    return f"<!-- {part}: written by make bench -->", f"<!-- end of {part} -->"


def put_between(page: Path, begin: str, end: str, content: str) -> None:
    """Replace what stands between two lines of a page, if it has these lines."""
    before, _, rest = page.read_text().partition(begin)
    _old, found, after = rest.partition(end)
    if found:
        page.write_text(f"{before}{begin}\n{content}\n{end}{after}")


def renew(name: str, given: argparse.Namespace, options: list[str]) -> None:
    """Measure one subject if asked to, and show the result."""
    subject = SUBJECTS[name]
    results, page = subject.home / "results", subject.home / "README.md"
    folder = given.output or results
    file, run = folder / f"{subject.file}.json", results / "make_run.json"
    if not given.redraw:
        folder.mkdir(parents=True, exist_ok=True)
        if not given.default_run:
            write_json(file, measure(name, given.rounds or subject.rounds, options))
        if subject.is_recipe and folder == results:
            write_json(run, default_run(name))
    elif not file.exists() and not run.exists():
        raise InputError(f"nothing was measured yet: {file} is missing")
    if file.exists():
        result = json.loads(file.read_text())
        import_module(subject.module).draw(result, file.with_suffix(".png"))
        print(plain(result) + f"\n  {file}, {file.stem}.png")
        if folder == results:
            shorter = on_page(name, result)
            put_between(page, *marks(subject.part), markdown(shorter, subject.file))
    if folder == results and run.exists():
        put_between(page, *marks("default run"), shown(json.loads(run.read_text())))


def bench(arguments: Sequence[str]) -> None:
    """Measure or redraw, as a command line says.

    Raises:
        InputError: something on the command line is wrong.
    """
    parser = Parser("", __doc__)
    parser.prog = "python -m tools.bench"
    parser.add_argument("what", nargs="*", metavar="WHAT", help=", ".join(SUBJECTS))
    parser.add_argument(
        "--rounds",
        type=int,
        help="rounds in which each variant is measured once (default 5, for recipes 3)",
    )
    parser.add_argument("--output", type=given_path, help="folder of the results")
    parser.add_argument("--redraw", action="store_true", help="measure nothing; draw again")
    parser.add_argument("--default-run", action="store_true", help="run the recipe's defaults only")
    given, options = parser.parse_known_args(list(arguments))
    names, recorded = given.what, [n for n, s in SUBJECTS.items() if (s.home / "results").is_dir()]
    if names and names[0] not in (*PARTS, *ON_DEMAND):  # a recipe may have words among its options
        names, options = names[:1], [*names[1:], *options]
    names = names or (recorded if given.redraw else PARTS)
    check(names, given, options)
    for name in names:
        renew(name, given, options)


def main(arguments: Sequence[str]) -> int:
    """Run from a command line; returns the exit status."""
    stop_at_once()
    return attempt(lambda: bench(arguments))


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
