"""The ways a run ends, and the exit status of each (README.md, "How a run ends")."""

import re
import signal

STOP_SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP]
"""Each asks a run to save its state and end with STATUS_STOPPED."""
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup: a lost terminal stops nothing
    STOP_SIGNALS.remove(signal.SIGHUP)

STATUS_FINISHED = 0
STATUS_FAILED = 1
STATUS_BAD_INPUT = 2
STATUS_STOPPED = 75  # EX_TEMPFAIL: run the same command again to continue


class InputError(ValueError):
    """The user's input cannot work; says what was needed, what was found and how to fix it.

    Every rank raises it, before training starts. What a single rank finds goes to all ranks: by
    `refuse_together` before the ranks have met, by `agreed` after that (both in `common.group`).
    """

    agreed: bool | None = None
    """True: every rank has raised it, and rank 0 alone shows it. False: the other ranks could not
    be told, so each rank shows its own. None: the ranks have not talked about it yet."""


class TrainingError(RuntimeError):
    """Training cannot continue; says what happened and what to do about it."""


class SampleError(TrainingError):
    """The user's data set or collate function failed; its traceback is shown, too."""


class PeerError(TrainingError):
    """Another rank failed, and has shown its own message."""


class Checked(Exception):
    """`--check` has found nothing that would stop the run."""


class StopRequested(Exception):
    """A signal asked the run to stop, and its state is saved."""


def multiples_near(number: int, divisor: int, most: int | None = None) -> str:
    """The multiples of `divisor` around `number`, from 1 to `most`, for a message."""
    below = number - number % divisor
    sizes = (below, below + divisor)
    return " or ".join(str(size) for size in sizes if 0 < size <= (most or size))


NO_THREAD = (
    r"can't start new thread|unable to start watchdog thread|pthread_create failed"
    r"|^(\w+Error:? )?Resource temporarily unav"
)
"""What Python and C++ say where a limit of processes and threads is reached."""


def lacks_thread(error: Exception) -> bool:
    """Whether a thread could not start, which is no fault of a file or of another rank."""
    return bool(re.search(NO_THREAD, str(error), re.I))
