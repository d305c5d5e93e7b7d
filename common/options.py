"""What options have in common: which may change when a run resumes, least values, ~ in paths."""

from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def free(default: T) -> T:
    """Default of an option that may differ when a run resumes.

    It changes only where, how fast or how long the run goes; or another check stands for it: the
    resolved batch size for --global-batch-size, the data's fingerprint for --data-path.
    """
    value: T = field(default=default, metadata={"free": True})
    return value


def refuse_below(options: object, **least: float) -> None:
    """Raise ValueError for an option that is below the least value given here. None is allowed."""
    for name, minimum in least.items():
        value = getattr(options, name)
        if value is not None and not value >= minimum:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {minimum}, got {value}")


def given_path(text: str | Path) -> Path:
    """A path of the command line. A shell leaves the ~ in --option=~/folder as it is.

    Raises:
        ValueError: ~NAME, where nobody has this name.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{text}: there is no home folder of this name") from None


def with_homes(options: Any) -> Any:
    """A dataclass of options with `given_path` of each path."""
    paths = {f.name: getattr(options, f.name) for f in fields(options)}
    return replace(options, **{k: given_path(v) for k, v in paths.items() if isinstance(v, Path)})
