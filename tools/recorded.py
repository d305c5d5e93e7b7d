"""What a run's folder says, read back: checked once, with messages that name the file and the key.

People edit these files, and copies of them get lost. A wrong entry must neither change a result in
silence nor be blamed on an image.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from common.errors import InputError
from common.identity import decisive
from common.reading import refuse_closed

G = TypeVar("G")
Content = dict[str, Any]
"""Of a JSON file."""


class Entry(NamedTuple):
    """What a value must be."""

    words: str
    holds: Callable[[Any, Content], Any]
    """Of the value and the file's whole content."""
    optional: bool = False


_LARGEST = 2**63 - 1
"""Of torch's whole numbers; JSON knows no limit."""


def _whole(value: Any, least: int = 0, most: int = _LARGEST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _number(
    value: Any, least: float = -sys.float_info.max, most: float = sys.float_info.max
) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and least <= value <= most  # neither infinite nor NaN


def _list(value: Any, holds: Callable[[Any], bool], *lengths: int) -> bool:
    fits = isinstance(value, list) and (not lengths or len(value) in lengths)
    return fits and all(map(holds, value))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _per_channel(value: Any, content: Content, holds: Callable[[Any], bool]) -> bool:
    # A wrong number of channels has a message of its own.
    lengths = [content["channels"]] if content.get("channels") in (1, 3) else []
    return _list(value, holds, *lengths)


_HASH = Entry("64 hexadecimal digits", lambda v, _: _text(v) and re.fullmatch(r"[0-9a-f]{64}", v))
_TEXT = Entry("a text", lambda v, _: _text(v))
_NUMBER = Entry("a number", lambda v, _: _number(v), optional=True)
_SIZE = Entry("a whole number from 1 on", lambda v, _: _whole(v, 1))
_MOST_PX = 10_000
"""Side of an image. More would end for want of memory, and the image would be blamed."""
_SIDE = Entry("a whole number from 1 to 10,000", lambda v, _: _whole(v, 1, _MOST_PX))

CONFIG = {
    "recipe": _TEXT,
    "image_size": Entry(
        f"{_SIDE.words} or null", lambda v, all_: v is None or _SIDE.holds(v, all_), optional=True
    ),
}
"""The other options are checked by `options_of`."""
PREPROCESSING = {
    "channels": Entry("1 or 3", lambda v, _: _whole(v) and v in (1, 3)),
    "resize": Entry(
        "one or two whole numbers from 1 to 10,000",
        lambda v, _: _list(v, lambda n: _whole(n, 1, _MOST_PX), 1, 2),
    ),
    "crop": _SIDE,
    # Of pixels from 0 to 1. The ranges are wide, but what the model sees stays finite.
    "mean": Entry(
        "one number from -1,000 to 1,000 per channel",
        lambda v, all_: _per_channel(v, all_, lambda n: _number(n, -1000, 1000)),
    ),
    "std": Entry(
        "one number from 0.000001 to 1,000 per channel",
        lambda v, all_: _per_channel(v, all_, lambda n: _number(n, 1e-6, 1000)),
    ),
    "classes": Entry(
        "a list of names, each once", lambda v, _: v and _list(v, _text) and len({*v}) == len(v)
    ),
}
SUMMARY = {
    "recipe": _TEXT,
    "weights_sha256": _HASH,
    "preprocessing_sha256": _HASH._replace(optional=True),  # of recipes on images
    "best": Entry(
        "an object with weights_sha256",
        lambda v, _: isinstance(v, dict) and _HASH.holds(v.get("weights_sha256"), v),
        optional=True,
    ),
}
"""`read_summary` checks the metrics, too."""
_SEED = Entry("a whole number from 0 on", lambda v, _: _whole(v))
DATA_OF_MANIFEST = {
    "data_fingerprint": _TEXT,
    "seed": _SEED,
    "classes": Entry("a list of names", lambda v, _: _list(v, _text), optional=True),
}
MANIFEST = {
    "command": _TEXT,
    "seed": _SEED,
    "world_size": _SIZE,
    "determinism": Entry(
        "an object whose cpu_threads is a whole number from 1 on",
        lambda v, _: isinstance(v, dict) and _whole(v.get("cpu_threads"), 1),
    ),
    "gpus": Entry("a list of names", lambda v, _: _list(v, _text)),
    "fingerprint": Entry(
        "an object of texts",
        lambda v, _: isinstance(v, dict) and all(map(_text, v.values())),
        optional=True,
    ),
    "git_commit": Entry(  # git gets it as an argument
        "hexadecimal digits or null",
        lambda v, _: v is None or (_text(v) and re.fullmatch("[0-9a-f]*", v)),
        optional=True,
    ),
    "before": Entry(
        "a list of objects", lambda v, _: _list(v, lambda one: isinstance(one, dict)), optional=True
    ),
}
METRICS = {"step": Entry("a whole number from 0 on", lambda v, _: _whole(v)), "loss": _NUMBER}


_KINDS: dict[Any, Entry] = {
    bool: Entry("true or false", lambda v, _: isinstance(v, bool)),
    int: Entry("a whole number", lambda v, _: _whole(v, -_LARGEST)),
    float: Entry("a number", lambda v, _: _number(v)),
    str: _TEXT,
    Path: Entry("a path", lambda v, _: _text(v)),
    NoneType: Entry("null", lambda v, _: v is None),
    tuple[str, ...]: Entry("a list of texts", lambda v, _: _list(v, _text)),
}
"""Type of an option to what stands for it in config.json."""


def _one_of(hint: Any) -> Entry:
    """One of a Literal's names."""
    names = get_args(hint)
    return Entry(", ".join(map(str, names)), lambda v, _: isinstance(v, str) and v in names)


def read_record(path: Path, entries: dict[str, Entry]) -> Content:
    """The JSON object in a file of a run's folder, with all `entries` as they must be.

    Raises:
        InputError: names the file, and the key if that is missing or wrong.
    """
    refuse_closed("the file", path)
    try:
        return checked(json.loads(path.read_text(encoding="utf-8")), entries, path)
    except FileNotFoundError:
        raise InputError(f"{path} is missing: restore it, or train again") from None
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({error}): restore it, or train again") from None


def read_summary(folder: Path) -> Content:
    """The summary.json of a finished run; each metric, also an own one, is a number.

    Raises:
        InputError: as `read_record`.
    """
    path = folder / "summary.json"
    summary = read_record(path, SUMMARY)
    return checked(summary, {k: _NUMBER for k in summary if k.startswith("val_")}, path)


def checked(content: Any, entries: dict[str, Entry], path: Path | str) -> Content:
    """The `content` of a file, or of a line of it.

    Raises:
        InputError: it is no object, or one of its `entries` is not as it must be.
    """
    if not isinstance(content, dict):
        raise InputError(f"{path} is damaged (it holds no object): restore it, or train again")
    for key, entry in entries.items():
        if key not in content and entry.optional:
            continue
        if key not in content or not entry.holds(content[key], content):
            raise _wrong(path, key, entry.words, content)
    return content


def _wrong(path: Path | str, key: str, words: str, content: Content) -> InputError:
    found = f"but is {_shown(content[key])}" if key in content else "but is missing"
    return InputError(f'{path}: "{key}" must be {words}, {found}: restore the file, or train again')


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def options_of(folder: Path, config: Content, group: type[G], **other: Any) -> G:
    """An option group with the values that a run had, and `other` values.

    An option that decides no number may be missing, and one that the recipe does not have: the
    default stands for it. A run of before an option was there had its `earlier` value.

    Args:
        folder: of the run.
        config: content of its config.json, with the recipe's name.
        group: a dataclass.
        other: values that stand for the recorded ones.

    Raises:
        InputError: an option is missing or has a wrong value.
    """
    path, hints, values = folder / "config.json", get_type_hints(group), {}
    needed = _decisive_options(config["recipe"])
    for option in fields(group):  # type: ignore[arg-type]
        name, hint = option.name, hints[option.name]
        if name in other or (name not in config and name not in needed):
            continue
        if name not in config and "earlier" in option.metadata:
            values[name] = option.metadata["earlier"]
            continue
        kind = _kind(hint)
        if name not in config or not kind.holds(config[name], config):
            raise _wrong(path, name, kind.words, config)
        values[name] = _as_option(config[name], hint)
    try:
        return group(**values, **other)
    except ValueError as error:
        raise InputError(f"{path}: {error}: restore the file, or train again") from None


def _decisive_options(recipe: str) -> set[str]:
    """Names of the options that decide a recipe's numbers; none if the recipe is not here."""
    from recipes.__main__ import recipes

    if recipe not in recipes():
        return set()
    return set(decisive({}, import_module(f"recipes.{recipe}.train").Config))


def _parts(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    single = isinstance(hint, type) or get_origin(hint) in (Literal, tuple)
    return (hint,) if single else get_args(hint)


def _kind(hint: Any) -> Entry:
    """What a value in a JSON file must be to stand for an option of this type."""
    kinds = [
        _one_of(part) if get_origin(part) is Literal else _KINDS[part] for part in _parts(hint)
    ]
    words = " or ".join(kind.words for kind in kinds)
    return Entry(words, lambda v, content: any(kind.holds(v, content) for kind in kinds))


def _as_option(value: Any, hint: Any) -> Any:
    """A value from a JSON file, which has neither paths nor tuples."""
    if isinstance(value, list):
        return tuple(value)
    literal = any(value in get_args(part) for part in _parts(hint) if get_origin(part) is Literal)
    return Path(value) if Path in _parts(hint) and _text(value) and not literal else value
