"""How an option says, where it is defined, that a run may resume with another value of it."""

from dataclasses import field
from typing import TypeVar

T = TypeVar("T")


def free(default: T) -> T:
    """Default of an option that may differ when a run resumes.

    It changes only where, how fast or how long the run goes; or another check stands for it: the
    resolved batch size for --global-batch-size, the data's fingerprint for --data-path.
    """
    value: T = field(default=default, metadata={"free": True})
    return value
