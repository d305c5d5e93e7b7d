"""How an option says, where it is defined, that it changes no number of a run."""

from dataclasses import field
from typing import TypeVar

T = TypeVar("T")


def free(default: T) -> T:
    """Default of a dataclass field that changes where, how fast or how long a run goes only.

    A run can be resumed with another value of such an option.
    """
    value: T = field(default=default, metadata={"free": True})
    return value
