"""status.json: whether a run goes on, or how it ended. A start that is refused leaves nothing.

A rank says what it knows while it ends. If this project started the ranks, the process that did so
knows more: a rank that was killed can say nothing, and rank 0 may only have seen another one fail.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from common.errors import InputError, TrainingError
from common.owner import lock, refuse_lost
from common.reading import read_json, tail
from common.writing import write_json

NAME = "status.json"
RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"
"""A run that was killed is still "running" there, but nobody owns its folder (`owner_of`)."""


class _Start:
    """This rank's start of a run."""

    def __init__(self, folder: Path, made: Sequence[Path], *, writes: bool) -> None:
        self.folder, self.made, self.writes, self.begun = folder, made, writes, False


_start: list[_Start] = []


def claimed(folder: Path, made: Sequence[Path], *, writes: bool) -> None:
    """This rank has the folder of its run.

    Args:
        folder: of the run.
        made: files and folders that this start made, each before the folder it is in.
        writes: whether this rank writes status.json.
    """
    _start[:] = [_Start(folder, made, writes=writes)]


def begun() -> None:
    """This start begins the run, or goes on with it: from here on it may change its files."""
    _start[-1].begun = True
    say(RUNNING)


def refuse_unfinished() -> None:
    """Raise TrainingError if this rank's start began the run, and did not end it."""
    if any(start.begun for start in _start):
        raise TrainingError(
            "ended before loop.finish: no model.pt was written; call it after the epochs, and no "
            "return before it"
        )


def say(status: str, **more: str) -> None:
    """Write the run's status, on the rank that writes it. All but RUNNING end this start."""
    for start in _start:
        if start.writes:
            write_json(start.folder / NAME, {"status": status, **more})
    if status != RUNNING:
        _start.clear()


def stopped_early() -> None:
    """This rank is told to stop before its first step, perhaps before its start begins the run."""
    with suppress(OSError, InputError, TrainingError):  # as below
        for start in list(_start):
            if start.begun or not (start.folder / NAME).exists():
                say(STOPPED)


def failed(error: Exception, line: str) -> None:
    """Record that this rank ends with an error, which is shown as `line`.

    A start that was refused before it changed anything leaves status.json as the run before it did.
    """
    for start in _start:
        with suppress(OSError, InputError, TrainingError):  # a full disk, a folder that is lost
            if isinstance(error, InputError) and not start.begun:
                if start.writes:
                    refuse_lost(start.folder)  # its .lock may be another run's by now
                _remove(start.made)
            elif start.writes and (start.begun or _is_open(start.folder)):
                _write_failed(start.folder, first_error(start.folder / "logs") or line)
    _start.clear()  # a stop signal that comes now changes nothing


def _remove(made: Sequence[Path]) -> None:
    for path in made:
        with suppress(OSError):  # another rank still has a file there, or has removed it
            path.rmdir() if path.is_dir() else path.unlink()


def _is_open(folder: Path) -> bool:
    """Whether the run has neither finished nor been stopped, as far as its folder says."""
    with suppress(InputError):
        return read_json(folder / NAME).get("status") not in (FINISHED, STOPPED)
    return True


def _write_failed(folder: Path, line: str) -> None:
    write_json(folder / NAME, {"status": FAILED, "error": line})


def correct(folder: Path, inode: int, line: str) -> None:
    """Write why the ranks failed, from the process that started them, once they have ended.

    Args:
        folder: of their run.
        inode: of the folder's .lock: by now the folder may be another run's, or emptied.
        line: the error that is shown.
    """
    with suppress(OSError, InputError, TrainingError):  # removed, another run's, or the disk full
        theirs = (folder / ".lock").stat().st_ino == inode and (folder / NAME).exists()
        if theirs and _is_open(folder):
            with lock(folder, patience_s=0):
                _write_failed(folder, line)


def first_error(logs: Path) -> str:
    """The earliest error that a rank has kept in its log since its last start; "" if there is none.

    The other ranks only saw it fail.
    """
    errors: list[tuple[str, str]] = []
    for log in logs.glob("rank_*.log"):
        since = tail(log).split(" INFO output_dir: ")[-1]
        errors += re.findall(r"(?m)^(\S+ \S+) ERROR (error: .*)", since)
    return min(errors)[1] if errors else ""
