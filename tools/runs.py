"""List runs: what each was, how it ended, what it reached. Two runs: what differs between them.

    make runs                                                all below runs/, the newest last
    python -m recipes runs /scratch/runs --sort val_accuracy --only adamw
    make runs RUN="runs/ddp_launch/A runs/ddp_launch/B"      two runs: only what differs

A run is finished, running, stopped (asked to), failed (its error: line is below it) or killed (no
word of its end). --only shows the runs in whose line or command a word occurs; --json prints
everything as JSON, for a program. --figure draws their losses and validation metrics by epoch.
"""

import json
import math
import os
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from common import run_status
from common.errors import InputError
from common.masking import printable
from common.owner import owner_of
from common.parse import given_path
from common.reading import no_pipe, read_json, tail
from tools.command import Parser, attempt

COLUMNS = ("run", "begun", "status", "steps", "best", "samples/s", "weights", "options")
_ENDED = (run_status.FINISHED, run_status.STOPPED, run_status.FAILED)


def find_runs(folder: Path) -> Iterator[Path]:
    """The folders of runs at and below `folder`, without looking into them."""
    for place, folders, files in os.walk(folder):
        if ".lock" in files or "config.json" in files:
            folders.clear()
            yield Path(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def look(run: Path) -> dict[str, Any]:
    """What is known of a run; an entry is missing if its file is, or cannot be read."""
    found: dict[str, Any] = {"folder": str(run)}
    damaged = []

    def content(name: str) -> dict[str, Any]:
        try:
            return read_json(run / name)
        except InputError as error:
            if not isinstance(error.__context__, FileNotFoundError):
                damaged.append(name)
        return {}

    summary, manifest = content("summary.json"), content("manifest.json")
    found |= {"config": content("config.json"), "manifest": manifest, "summary": summary}
    start = manifest.get("start")
    found["begun"] = str(start.get("time", "")) if isinstance(start, dict) else ""
    found["command"] = str(manifest.get("command", ""))
    found["steps"] = summary["steps"] if "steps" in summary else _last_step(run)
    try:
        owner = owner_of(run)
    except OSError:
        owner = None
    end = content(run_status.NAME)
    if owner:
        found |= {"status": run_status.RUNNING, "owner": owner}
    elif "weights_sha256" in summary:
        found["status"] = run_status.FINISHED
    elif end.get("status") in _ENDED:
        found |= {k: end[k] for k in ("status", "error") if k in end}
    else:
        found["status"] = "killed"
    if damaged:
        found["damaged"] = damaged
    return found


def _last_step(run: Path) -> Any:
    for line in reversed(tail(run / "metrics.jsonl").splitlines()):
        if found := re.match(r'\{"step": (\d+)', line):
            return int(found[1])
    return None


def _best(summary: dict[str, Any]) -> str:
    best = summary.get("best")
    entries = best if isinstance(best, dict) else summary
    metrics = (f"{k} {v:.4g}" for k, v in entries.items() if k[:4] == "val_" and _is_number(v))
    return next(metrics, "")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _options(command: str) -> str:
    """The recipe's options as they were typed, without the folder."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    first = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
    return re.sub(r" ?--output-dir[ =]\S+", "", shlex.join(words[first:])).strip()


def row(run: dict[str, Any]) -> list[str]:
    """A run's cells, as in COLUMNS."""
    summary = run["summary"]
    speed, weights = summary.get("samples_per_s"), str(summary.get("weights_sha256", ""))
    status = f"{run['status']}, damaged" if "damaged" in run else run["status"]
    return [
        run["folder"],
        run["begun"][:16].replace("T", " "),
        status,
        "" if run["steps"] is None else str(run["steps"]),
        _best(summary),
        f"{speed:,.0f}" if _is_number(speed) else "",
        weights[:8],
        _options(run["command"]),
    ]


def show(runs: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    below = [""]
    for run in runs:
        damaged = "".join(f"\n    {name} cannot be read" for name in run.get("damaged", ()))
        below.append(damaged + (f"\n    {printable(run['error'])}" if "error" in run else ""))
    show_rows([[*COLUMNS], *map(row, runs)], below)


def show_rows(rows: Sequence[Sequence[str]], below: Sequence[str] = ()) -> None:
    """Print a table with aligned columns, and what belongs below each row."""
    rows = [[printable(cell) for cell in cells] for cells in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells, more in zip_longest(rows, below, fillvalue=""):
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        print(line.rstrip() + more)


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[list[str]]:
    """Name and both values of each entry of config, manifest and summary that differs."""
    found = []
    for part in ("config", "manifest", "summary"):
        flat = [dict(_flat(run[part])) for run in (one, other)]
        for name in sorted({*flat[0], *flat[1]} - {"start.time"}):
            values = [str(entries.get(name, "")) for entries in flat]
            if values[0] != values[1]:
                found.append([f"{part}: {name}", *(textwrap.shorten(v, 70) for v in values)])
    return found


def _flat(entries: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def order(runs: Sequence[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """The runs in the order of an entry of summary.json or of their start; those without it first.

    Raises:
        InputError: no run has this entry.
    """
    if by == "begun":
        return sorted(runs, key=lambda run: str(run["begun"]))

    def number(run: dict[str, Any]) -> float:
        value = run["summary"].get(by)
        return value if _is_number(value) else -math.inf

    if runs and max(map(number, runs)) == -math.inf:
        raise InputError(f"--sort {by}: no run's summary.json has a number of this name")
    return sorted(runs, key=number)


def by_epoch(run: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Epochs, counted from 1, and values of each metric that a run logged after its epochs."""
    found: dict[str, list[tuple[int, float]]] = {}
    try:
        text = no_pipe(Path(run["folder"]) / "metrics.jsonl").read_text(errors="replace")
    except OSError:
        return found
    for words in text.splitlines():
        line = None
        with suppress(ValueError):  # cut off by a kill
            line = json.loads(words)
        if isinstance(line, dict) and "train_loss" in line:
            for name, value in line.items():
                if name == "train_loss" or name.startswith("val_"):
                    found.setdefault(name, []).append((line["epoch"] + 1, value))
    return found


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for the losses, and one for each validation metric that a run has.

    Raises:
        InputError: no run has finished an epoch, or the file cannot be a figure.
    """
    from common.figure import save_figure

    if path.suffix != ".png" or not path.parent.is_dir():
        raise InputError(f"--figure {path}: give a name that ends in .png, in a folder that exists")
    curves = {run["folder"]: found for run in runs if (found := by_epoch(run))}
    if not curves:
        raise InputError("--figure: none of these runs has finished an epoch")
    losses = ("train_loss", "val_loss")
    metrics = list(dict.fromkeys(m for found in curves.values() for m in found if m not in losses))

    def plot(*panels: Any) -> None:
        panel_of = dict(zip(["val_loss", *metrics], panels, strict=True))
        panel_of["train_loss"] = panels[0]
        for number, (folder, found) in enumerate(curves.items()):
            for name, points in found.items():
                line = "--" if name == "train_loss" else "-"
                epochs, values = zip(*points, strict=True)
                panel_of[name].plot(epochs, values, line, c=f"C{number}", label=f"{name}, {folder}")
        for name, axes in panel_of.items():
            axes.set(xlabel="epoch", ylabel=name.removeprefix("val_").removeprefix("train_"))
            axes.legend(fontsize="x-small")

    path.unlink(missing_ok=True)  # an old figure would look like a new one
    save_figure(path, plot, panels=1 + len(metrics))


def main(arguments: Sequence[str]) -> int:
    """Run from a command line; 0, also if there are no runs."""

    def body() -> int:
        parser = Parser("runs", __doc__)
        parser.add_argument("folders", nargs="*", type=given_path, metavar="FOLDER")
        parser.add_argument("--sort", default="begun", metavar="METRIC", help="default: begun")
        parser.add_argument("--only", default="", metavar="WORD")
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--figure", type=given_path, metavar="FILE.png")
        given = parser.parse_args(arguments)
        folders = given.folders or [Path("runs")]
        if missing := [str(folder) for folder in folders if not folder.is_dir()]:
            raise InputError(f"{', '.join(missing)} is no folder: give one in which runs are")
        runs = [look(run) for folder in folders for run in find_runs(folder)]
        runs = [run for run in runs if given.only in " ".join([*row(run), run["command"]])]
        if given.figure:
            draw(order(runs, given.sort), given.figure)
            if given.figure.exists():  # else a warning says why not
                print(given.figure)
        elif given.json:
            print(json.dumps(order(runs, given.sort)))
        elif len(folders) == 2 and [run["folder"] for run in runs] == [*map(str, folders)]:
            show_rows([["", *(run["folder"] for run in runs)], *differences(*runs)])
        elif runs:
            show(order(runs, given.sort))
        else:
            print(f"no runs in {', '.join(map(str, folders))}")
        return 0

    return attempt(body)
