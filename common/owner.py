"""A run's folder has one owner: the lock, and whether the folder is still this run's.

Somebody can remove or move the folder while the run waits or is stopped, and another run can make
it again. A run that went on writing would mix its files with those of the other run.
"""

import errno
import fcntl
import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from common import log
from common.errors import InputError, TrainingError


class _Held(NamedTuple):
    folder: Path
    fd: int
    """Of the open folder. No other folder gets its inode number as long as it is open."""
    status: os.stat_result
    marks: dict[str, os.stat_result]
    """Files by which the run knows its folder, besides the folder itself."""


_held: list[_Held] = []
"""The folder of this process's run, if it has one."""


def lock(folder: Path, patience_s: float = 120.0) -> IO[str]:
    """Own `folder` until this process ends or closes the file that is returned.

    The kernel gives the lock back when the process ends, however it ends. A network file system may
    give back the lock of a dead host late: the lock of another host is waited for.

    Args:
        folder: exists.
        patience_s: how long to wait for another host [s].

    Raises:
        InputError: another process owns the folder.
    """
    file, here = (folder / ".lock").open("a+", errors="replace"), f"host {socket.gethostname()}"
    deadline, waits = time.monotonic() + patience_s, False
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not held by forks, unlike flock
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                log.warning(
                    f"{folder} cannot be locked ({error.strerror}): start one run at a time"
                )
                break
        file.seek(0)
        owner = file.read() or "another process"
        if owner.startswith(f"{here},") or time.monotonic() > deadline:
            file.close()
            raise _still_going(folder, owner)
        if not waits:
            log.info(f"{folder} belongs to {owner}: waiting up to {patience_s:.0f} s for its end")
        waits = True
        time.sleep(0.5)
    if not _is(folder / ".lock", os.fstat(file.fileno())):  # replaced since it was opened
        file.close()
        return lock(folder, patience_s)
    file.truncate(0)
    file.write(f"{here}, process {os.getpid()}")
    file.flush()
    return file


def refuse_owned(folder: Path) -> None:
    """Raise InputError if another process owns `folder`; OSError if `.lock` is no such file."""
    with suppress(FileNotFoundError), (folder / ".lock").open("r+", errors="replace") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _still_going(folder, file.read() or "another process") from None


def owner_of(folder: Path) -> str | None:
    """Who owns `folder` now, without taking the lock even for a moment; None: nobody.

    Raises:
        OSError: `.lock` cannot be read.
    """
    if (folder / ".lock").is_fifo():  # opening it would wait for its writer
        raise OSError(f"{folder / '.lock'} is a pipe")
    layout = "hhqqi"  # struct flock of 64-bit Linux
    asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with suppress(FileNotFoundError), (folder / ".lock").open(errors="replace") as file:
        kind, *_ = struct.unpack(layout, fcntl.fcntl(file, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else file.read() or "another process"
    return None


def _still_going(folder: Path, owner: str) -> InputError:
    return InputError(
        f"{folder} belongs to a run that is still going ({owner}): wait for its end, or "
        "choose another --output-dir"
    )


def own(folder: Path, locked: IO[str] | None = None) -> Path:
    """From now on, let `refuse_lost` compare this run's folder with what it is now.

    Args:
        folder: of the run.
        locked: on rank 0, the file that `lock` gave.

    Returns:
        Another path of the same folder. It never leads into a folder that took the place of this
        one: for libraries that open files by their names.
    """
    _held.clear()  # an earlier folder stays open: a library's thread may still write there
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    _held.append(_Held(folder, fd, os.fstat(fd), {}))
    if locked:
        mark(".lock", os.fstat(locked.fileno()))
    elif (folder / ".lock").exists():  # else rank 0's host has another file system
        mark(".lock", (folder / ".lock").stat())
    return Path(f"/proc/self/fd/{fd}")


def mark(name: str, status: os.stat_result) -> None:
    """The folder counts as lost, too, once its file `name` is another one than now."""
    _held[-1].marks[name] = status


def refuse_lost(path: Path) -> None:
    """Refuse to write in the folder of this process's run if the folder is no longer the run's.

    To write a file, open its directory, call this, and write relative to the open directory: then
    not even a folder that is replaced between two instructions gets the file.

    Raises:
        TrainingError: the folder, or a file by which the run knows it, was removed or replaced.
    """
    for folder, fd, status, marks in _held:
        if not path.is_relative_to(folder):
            continue
        replaced = [name for name, before in marks.items() if not _is(folder / name, before)]
        if not _is(folder, status):  # now, after its files: it may be moved in between
            now = Path(f"/proc/self/fd/{fd}").readlink()
            if _is(now, status):
                raise TrainingError(
                    f"{folder} was moved to {now} while this run wrote into it: to resume from the "
                    f"last snapshot, run the same command with --output-dir {now}"
                )
            there = os.path.lexists(folder)
            raise TrainingError(
                f"{folder} was removed while this run wrote into it"
                f"{', and another one is in its place' if there else ''}; what the run had written "
                "is lost: to train again from the start, run the same command"
                f"{' with another --output-dir' if there else ''}"
            )
        if replaced:
            raise TrainingError(
                f"{folder / replaced[0]} was removed or replaced while this run wrote into the "
                "folder, which another run may use now: to resume from the last snapshot that is "
                "left, run the same command again, and leave the folder alone until it ends"
            )


def _is(path: Path, status: os.stat_result) -> bool:
    """Whether a path leads to the file or folder that had this status."""
    try:
        return os.path.samestat(path.stat(), status)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            raise
        return False
