"""`make bench RECIPE=NAME`: a recipe's comparison, measured here, into its results/ and README.

    python -m tools.bench NAME [options]       measure, and renew results/, figure and README
    python -m tools.bench NAME --default-run   renew what the README says that a run printed
    python -m tools.bench NAME --redraw        renew figure and README from the JSON that is there
    python -m recipes NAME --compare [options]   measure into --output-dir, and change nothing here;
                                                 it starts this program with the same options

A recipe's compare.py has `measure(arguments, folder, rounds)`, which returns tables and what the
figure needs, and `draw(result, path)`.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from common import ROOT, cli
from common.errors import STATUS_FINISHED, InputError
from common.files import write_json
from common.launch.fresh import run_fresh
from common.launch.process import end_process, stop_at_once
from common.run.folder import result_folder
from common.run.manifest import describe_machine

BEGIN, END = "<!-- results: written by make bench -->", "<!-- end of results -->"
BEGIN_RUN, END_RUN = "<!-- default run: written by make bench -->", "<!-- end of default run -->"


def comparison(name: str) -> Any:
    """The recipe's compare module.

    Raises:
        InputError: it has none.
    """
    having = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/compare.py"))
    if name not in having:
        raise InputError(f"{name or 'no RECIPE'} has no comparison: {', '.join(having)} have")
    return import_module(f"recipes.{name}.compare")


def measure(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure and describe: the content of comparison.json."""
    module = comparison(name)
    config_class = import_module(f"recipes.{name}.train").Config
    launch, _ = cli.parse(name, config_class, arguments)  # before anything is measured
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--compare-rounds", "--compare_rounds")
    _, options = parser.parse_known_args(list(arguments))
    machine = describe_machine()  # of the code that is measured
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = module.measure(options, Path(folder), launch.compare_rounds)
    command = ["python", "-m", "recipes", name, "--compare", *arguments]
    elapsed_s = round(time.monotonic() - start_s, 1)
    about = {"command": shlex.join(command), "elapsed_s": elapsed_s, **machine}
    if "cpu" in arguments:
        about["gpu"] = None  # there may be one, but this is not its table
    return {"recipe": name, "about": about, **found}


def default_run(name: str) -> dict[str, Any]:
    """Run the recipe with its defaults: the content of make_run.json."""
    with tempfile.TemporaryDirectory() as folder:
        printed = run_fresh("recipes", [name, "--output-dir", folder])
        content: dict[str, Any] = {"started_by": f"make run RECIPE={name}"}
        for part in ("summary", "manifest"):
            path = Path(folder) / f"{part}.json"
            content[part] = json.loads(path.read_text()) if path.exists() else None
        lines = printed.replace(folder, f"runs/{name}/UTC-TIME").splitlines()
    return {**content, "printed": [line.rstrip() for line in lines]}


def machine(about: dict[str, Any]) -> str:
    """Where it was measured, in words."""
    return str(about["gpu"] or f"{about['cpu_cores']} cores of an {about['cpu']}, no GPU")


def shown(run: dict[str, Any]) -> str:
    """What a run printed, the epochs but the first and the last left out."""
    lines = list(run["printed"])
    epochs = [place for place, line in enumerate(lines) if line.startswith("epoch ")]
    if len(epochs) > 2:
        lines[epochs[1] : epochs[-1]] = ["..."]
    text = "\n".join([f"$ {run['started_by']}", *lines]).rstrip()
    return (
        f"```\n{text}\n```\n\n({machine(run['manifest'])}; [make_run.json](results/make_run.json).)"
    )


def markdown(result: dict[str, Any], kind: str = "comparison") -> str:
    """The tables of a comparison, and where they were measured; `kind` names its files."""
    parts = []
    for table in result["tables"]:
        rows = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
        lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
        parts.append(f"{table['title']}\n\n" + "\n".join(lines))
    about = result["about"]
    parts.append(
        f"({machine(about)}; torch {about['torch']}, Python {about['python']}; "
        f"`{about['command']}`; [{kind}.json](results/{kind}.json).)\n\n"
        f"![the figure](results/{kind}.png)"
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


def run(name: str, arguments: Sequence[str]) -> None:
    """`python -m recipes NAME --compare`: into --output-dir."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--output-dir", "--output_dir", type=Path)
    given, rest = parser.parse_known_args(list(arguments))
    folder = result_folder(given.output_dir, name, "comparison")
    result = measure(name, rest)
    write_json(folder / "comparison.json", result)
    comparison(name).draw(result, folder / "comparison.png")
    print(plain(result) + f"\n  {folder}/comparison.json, comparison.png")


def renew(name: str, arguments: Sequence[str]) -> None:
    """`make bench`: into the recipe's results/ and README."""
    wanted = arguments[0] if arguments and arguments[0] in ("--redraw", "--default-run") else None
    if wanted != "--default-run":
        comparison(name)  # refuses an unknown name
    results = ROOT / "recipes" / name / "results"
    results.mkdir(exist_ok=True)
    compared, ran = results / "comparison.json", results / "make_run.json"
    if wanted is None:
        write_json(compared, measure(name, arguments))
    if wanted != "--redraw":
        write_json(ran, default_run(name))
    readme = results.parent / "README.md"
    text = readme.read_text()
    if compared.exists():
        result = json.loads(compared.read_text())
        comparison(name).draw(result, results / "comparison.png")
        text = put_between(text, BEGIN, END, markdown(result))
        print(plain(result))
    if ran.exists():
        text = put_between(text, BEGIN_RUN, END_RUN, shown(json.loads(ran.read_text())))
    readme.write_text(text)
    print(f"  renewed {readme} and {results}")


def put_between(text: str, begin: str, end: str, content: str) -> str:
    """The text with what stands between two markers replaced."""
    before, _, rest = text.partition(begin)
    _old, found, after = rest.partition(end)
    return f"{before}{begin}\n{content}\n{end}{after}" if found else text


def main() -> int:
    """Run from a command line; returns the exit status."""
    stop_at_once()
    name, *arguments = sys.argv[1:] or [""]
    if name in ("-h", "--help"):
        print(__doc__)
        return STATUS_FINISHED
    do = run if "--compare" in arguments else renew
    return cli.attempt(lambda: do(name, arguments))


if __name__ == "__main__":
    end_process(main())
