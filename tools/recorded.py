"""What a run's folder says, read back: its options by the parser that reads the command line.

People edit these files, and copies of them get lost. A damaged file ends in one line that names it.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from common.errors import InputError
from common.identity import decisive
from common.parse import parse_alone
from common.reading import no_pipe, refuse_closed

G = TypeVar("G")
Content = dict[str, Any]
"""Of a JSON file."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file if the block finds that it is missing or damaged.

    Raises:
        InputError: in one line.
    """
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path} is missing: restore it, or train again") from None
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        why = why.removesuffix(". --help lists the options")  # of a command line
        raise InputError(f"{path} is damaged ({why}): restore it, or train again") from None


def read_record(path: Path, **kinds: type) -> Content:
    """The JSON object in a file of a run's folder, with entries of these names and `kinds`.

    Raises:
        InputError: names the file.
    """
    refuse_closed("the file", path)
    with reading(path):
        content = json.loads(no_pipe(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError("it holds no object")
        for name, kind in kinds.items():
            if not isinstance(content[name], kind):
                raise TypeError(f"{name} is {content[name]!r:.80}")
    if content.get("backend") == "cpu:gloo,cuda:nccl":  # commit dac25f6 on GPUs: tests/data/h200
        content["backend"] = "nccl"
    return content


def read_summary(folder: Path, **kinds: type) -> Content:
    """The summary.json of a finished run; each metric, also an own one, is a number.

    Raises:
        InputError: as `read_record`.
    """
    path = folder / "summary.json"
    summary = read_record(path, recipe=str, weights_sha256=str, **kinds)
    with reading(path):
        summary.get("best", summary)["weights_sha256"]
        if wrong := [k for k, v in summary.items() if k[:4] == "val_" and not math.isfinite(v)]:
            raise ValueError(f"{wrong[0]} is not finite")
    return summary


def options_of(folder: Path, config: Content, group: type[G], **other: Any) -> G:
    """An option group with the values that a run had, and `other` values.

    Options that decide no number may be missing, and those that the recipe does not have.

    Args:
        folder: of the run.
        config: content of its config.json, with the recipe's name.
        group: a dataclass.
        other: values that stand for the recorded ones.

    Raises:
        InputError: an option is missing or has a wrong value.
    """
    from recipes.__main__ import recipes

    recipe, path = config["recipe"], folder / "config.json"
    known = recipe in recipes()
    needed = decisive({}, import_module(f"recipes.{recipe}.train").Config) if known else {}
    names = [option.name for option in fields(group)]  # type: ignore[arg-type]
    with reading(path):
        values = {n: {**config, **other}[n] for n in names if n in {**config, **other, **needed}}
        return parse_alone(recipe, group, values)
