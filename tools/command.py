"""What the commands beside the recipes share: their options, where they print, how they end."""

import argparse
import contextlib
import io
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from common import closed_streams, log
from common.errors import STATUS_FAILED, STATUS_FINISHED, InputError, TrainingError
from common.launch.ranks import Ranks
from common.launch.report import report, say


def attempt(body: Callable[[], int | None]) -> int:
    """Run a command that has no state to save; return the exit status."""
    try:
        open_stdout()
        return to_stdout(body)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # the outermost frame: every failure becomes a status
        return report(error, Ranks())


def open_stdout() -> None:
    """Let stdout and stderr print every name: as it is where they can, else with escapes.

    Python takes ASCII in the C locale if its UTF-8 mode is off (PYTHONUTF8=0). Terminals of today
    show UTF-8 there, too. A file name that is no UTF-8 gets the escapes of JSON.

    Raises:
        InputError: stdout is closed.
    """
    if "stdout" in closed_streams:
        raise InputError("stdout is closed, and the result goes there: redirect it to a file")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            ascii_only = stream.encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968")
            stream.reconfigure(encoding="utf-8" if ascii_only else None, errors="backslashreplace")


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warns = record.levelno >= logging.WARNING
        say(f"{'warning: ' * warns}{record.getMessage()}")


def log_to_stderr() -> None:
    """Show what the log says, in a command whose stdout is for its results."""
    log.handlers[:], log.propagate = [_Said()], False
    log.setLevel(logging.INFO)


class Unwritten(TrainingError):
    """stdout takes no more."""


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Print to stdout. A reader that is gone ends this quietly, as in `sample ... | head`.

    Raises:
        Unwritten: stdout is full.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        if not isinstance(error, BrokenPipeError):
            raise Unwritten(
                f"cannot write to stdout ({error.strerror}): make room, or write it elsewhere"
            ) from error


def to_stdout(body: Callable[[], int | None]) -> int:
    """Run what only prints, and show that stdout is full; return the exit status."""
    status = STATUS_FINISHED
    try:
        with printing():
            status = body() or STATUS_FINISHED
            sys.stdout.flush()
    except Unwritten as error:
        say(f"error: {error}")
        return STATUS_FAILED
    return status


class Parser(argparse.ArgumentParser):
    """For commands with few options. `about` is their --help, printed as it is."""

    def __init__(self, name: str, about: str | None) -> None:
        super().__init__(
            prog=f"python -m recipes {name}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise InputError instead of ending the process."""
        raise InputError(f"{message}. --help lists the options")

    def print_help(self, file: Any = None) -> None:
        """Print it; argparse says nothing if stdout is full."""
        if status := to_stdout(lambda: print(self.format_help(), end="", file=file)):
            self.exit(status)
