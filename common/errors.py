"""The ways a run ends, and the exit status of each (README.md, "How a run ends")."""

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What asks a run to save its state and end with STATUS_STOPPED."""

STATUS_FINISHED = 0
STATUS_FAILED = 1
STATUS_BAD_INPUT = 2
STATUS_STOPPED = 75  # EX_TEMPFAIL: run the same command again to go on


class InputError(ValueError):
    """The user's input cannot work; says what was needed, what was found and the fix.

    Raised before training starts and by every rank alike: what one rank alone finds is shared by
    `refuse_together` until the group is there, and then by `agreed` (both in `common.group`).
    """

    agreed: bool | None = None
    """True: every rank has raised it, and rank 0 alone shows it. False: the peers could not be
    told, each rank shows its own. None: nobody has asked them yet."""


class TrainingError(RuntimeError):
    """Training cannot go on; says what happened and what to do about it."""


class PeerError(TrainingError):
    """Another rank failed, and its own message has been shown there."""


class StopRequested(Exception):
    """A signal asked the run to stop, and its state is saved."""


def multiples_near(number: int, divisor: int) -> str:
    """The multiples of `divisor` around `number`, for a message."""
    below = number - number % divisor
    return " or ".join(str(size) for size in (below, below + divisor) if size)
