"""The words of a command line as dataclasses of options. Imports no torch."""

import contextlib
import errno
import io
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from common.errors import InputError
from common.hints import hint, meant
from common.launch.start import LaunchOptions
from common.masking import printable

C = TypeVar("C")


def parse(name: str, config_class: type[C], arguments: Sequence[str]) -> tuple[LaunchOptions, C]:
    """The options as dataclasses; `--help` prints and exits.

    Raises:
        InputError: unknown options, wrong values or combinations.
    """
    kinds = get_type_hints(config_class)
    groups = [(f.name, kinds[f.name], f) for f in fields(config_class)]  # type: ignore[arg-type]
    launch_group = ("launch", LaunchOptions, LaunchOptions())
    both = make_dataclass("Options", [launch_group, *groups], frozen=True, kw_only=True)
    both.__doc__ = " "
    found = [option for kind in (LaunchOptions, *kinds.values()) for option in fields(kind)]
    names = [option.name for option in found]
    if taken := [name for name in names if names.count(name) > 1]:
        raise InputError(
            f"--{taken[0].replace('_', '-')} is an option of two groups of "
            f"{config_class.__qualname__}: give one another name"
        )
    names += [f"no-{option.name}" for option in found if option.type in (bool, "bool")]
    with input_errors([f"--{name.replace('_', '-')}" for name in names]):
        if {"-h", "--help"} & set(arguments):  # tyro would join the lines of each paragraph
            print(sys.modules[config_class.__module__].__doc__)
        options = parse_group(name, both, arguments)
        _refuse_unusable_numbers(options)
        given = {n: with_homes(getattr(options, n)) for n, _, _ in groups}
        config = config_class(**given)
        with contextlib.suppress(TypeError):  # your own recipe has an option without a default
            _refuse_unused(_flat(config), _flat(config_class()))
        return options.launch, config


def _flat(config: Any) -> dict[str, Any]:
    """All options of a config of option groups, by name."""
    return {name: value for group in asdict(config).values() for name, value in group.items()}


def _refuse_unusable_numbers(options: Any) -> None:
    """Raise ValueError for a number that is infinite, not a number, or too large for torch."""
    for name, value in _flat(options).items():
        option = name.replace("_", "-")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"--{option} must be a finite number, got {value}")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"--{option} must be below 2^63, got {value}")


def parse_alone(name: str, group: type[C], values: dict[str, Any]) -> C:
    """One group of a recipe's options, from `values` as config.json holds them.

    Raises:
        InputError: unknown options, wrong values or combinations.
    """
    defaults, words = {option.name: option.default for option in fields(group)}, []  # type: ignore[arg-type]
    for key, value in values.items():
        option = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list):
            words += [f"--{option}", *map(str, value)]
        elif value is not None or defaults[key] is not None:
            words.append(f"--{option}={value}")
    with input_errors():
        alone = make_dataclass("Alone", [("group", group)], frozen=True)
        alone.__doc__ = " "
        found = parse_group(name, alone, words)
        _refuse_unusable_numbers(found)
        options: C = found.group
        return options


def parse_group(name: str, options: type, arguments: Sequence[str], **more: Any) -> Any:
    """Parse the command line; options have no prefix from their group."""
    import tyro

    config = (tyro.conf.OmitArgPrefixes,)
    prog = f"python -m recipes {name}"
    return tyro.cli(options, prog=prog, args=list(arguments), config=config, **more)


@contextlib.contextmanager
def input_errors(known: Sequence[str] = ()) -> Iterator[None]:
    """Raise InputError for what tyro or a dataclass refuses; `known` are the options to suggest."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise InputError(_one_line(said.getvalue(), known)) from None
    except BrokenPipeError:  # --help into a program that reads a part of it
        raise SystemExit(0) from None
    except ValueError as error:
        raise InputError(str(error)) from None


def _one_line(box: str, known: Sequence[str]) -> str:
    """The first paragraph of tyro's error box as one line, with the option that is the nearest."""
    box = re.sub(r"\x1b\[[\d;]*m", "", box)  # colours, on a terminal
    framed = box.lstrip().startswith("╭")  # else, on an ASCII terminal, the title is a paragraph
    lines = [line.strip("│ ") for line in box.splitlines() if not re.match("[╭╰]", line)]
    paragraphs = re.split(r"(?m)^[─-]+$", "\n".join(lines))
    text = " ".join(paragraphs[0 if framed or len(paragraphs) == 1 else 1].split())
    text = re.sub(r"^Error parsing (\w+: )?|\. Got errors: .*", "", text).rstrip(" .")
    unknown = re.search(r"Unrecognized options: --([\w-]+)(, (false|no|0)\b)?", text, re.I)
    if unknown:
        near = meant(f"--{unknown[1]}", known)
        if unknown[2] and f"--no-{near[2:]}" in known:  # as --sync-bn False elsewhere
            near = f"--no-{near[2:]}"
        if near:
            text += f" (perhaps you meant {near})"
    return ". ".join(filter(None, [text, hint(text), "--help lists the options"]))


def given_path(text: str | Path) -> Path:
    """A path of the command line. A shell leaves the ~ in --option=~/folder as it is.

    Raises:
        ValueError: ~NAME, where nobody has this name; no file can have this name, or it is a link
            that leads to itself.
    """
    try:
        path = Path(text).expanduser()
        path.stat()
    except RuntimeError:
        raise ValueError(f"{text}: there is no home folder of this name") from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            shown = printable(text)
            shown = shown if len(shown) < 100 else f"{shown[:80]}..."
            raise ValueError(f"{shown}: {error.strerror}: give another path") from None
    return path


def with_homes(options: Any) -> Any:
    """A dataclass of options with `given_path` of each path."""
    paths = {f.name: getattr(options, f.name) for f in fields(options)}
    return replace(options, **{k: given_path(v) for k, v in paths.items() if isinstance(v, Path)})


def _refuse_unused(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise InputError for an option that was given and has no effect.

    Args:
        values: of all options, by their names in Python.
        defaults: the recipe's; an option with its default value counts as not given.
    """
    for name, why in _unused(values).items():
        if name in values and values[name] != defaults[name]:
            raise InputError(f"--{name.replace('_', '-')} has no effect: {why}")


def _unused(values: Mapping[str, Any]) -> dict[str, str]:
    """Name of each option without effect, and why that is so or what to give."""
    data, model, found = values.get("data"), values.get("model"), {}
    if data in ("digits", "fake"):
        other = "give --data imagefolder for a folder of photos"
        found["data_path"] = f"--data {data} reads no folder: {other}, or leave it out"
    if data in ("digits", "fake", "packed") and not values.get("weights"):
        found["download"] = f"--data {data} needs no download: leave it out"
    photos = data == "imagefolder" and values["data_path"].name != "flower_photos"
    if photos and not values.get("weights"):
        found["download"] = (
            "it gets the flower photos, if --data-path ends in flower_photos, or the file of "
            "--weights: leave it out"
        )
    if data != "imagefolder":
        found["verify_images"] = "only --data imagefolder has image files: leave it out"
    if data != "packed":
        found["data_local"] = "only --data packed is copied: leave it out"
    if model == "convnet" or (model == "auto" and data not in ("imagefolder", "packed")):
        for name in ("stem", "zero_init_residual"):
            found[name] = "only ResNets have it: give --model resnet18, or leave it out"
    if values.get("weights"):
        found["zero_init_residual"] = "--weights holds these weights: leave it out"
    if model == "toy":
        found["norm"] = "the toy has no normalisation: give --model resnet50, or leave it out"
    if values.get("lr_schedule") == "constant":
        found["lrf"] = "--lr-schedule constant keeps the rate: leave it out, or choose a cosine"
    if values.get("device") == "cpu":
        found["tf32"] = found["pin_memory"] = "it is for GPUs, and --device is cpu: leave it out"
    return found
