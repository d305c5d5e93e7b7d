"""What options have in common: which may change when a run resumes, and least values."""

from dataclasses import field
from typing import TypeVar

T = TypeVar("T")


def may_change(default: T) -> T:
    """Default of an option that may differ when a run resumes.

    It changes only where, how fast or how long the run goes; or another check stands for it: the
    resolved batch size for --global-batch-size, the data's fingerprint for --data-path.
    """
    value: T = field(default=default, metadata={"may_change": True})
    return value


def same_as(default: T, **others: T) -> T:
    """Default of an option; with `packed="imagefolder"`, the value packed counts as imagefolder.

    So a run with one of the two values may resume with the other.
    """
    value: T = field(default=default, metadata={"same_as": others})
    return value


def refuse_below(options: object, **least: float) -> None:
    """Raise ValueError for an option that is below the least value given here. None is allowed."""
    for name, minimum in least.items():
        value = getattr(options, name)
        if value is not None and not value >= minimum:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {minimum}, got {value}")
