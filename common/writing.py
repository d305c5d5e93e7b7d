"""Every file is written completely or not at all; if it cannot be written, an error says why.

In the folder of a run, nothing is written once the folder is no longer the run's.
"""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from common.errors import TrainingError, lacks_thread
from common.owner import refuse_lost

_FILES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room within your quota",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EACCES: "get the right to write there",
    errno.EPERM: "get the right to write there (lsattr shows files that nobody may change)",
    errno.EROFS: "mount the file system read-write",
    errno.ENAMETOOLONG: "choose a shorter path",
}
"""Number of a failure to write a file to the advice."""

RESUME = "run the same command to resume from the last snapshot"
"""What to do after the advice, in a run."""


def fix(error: BaseException | None) -> str:
    """What to do about a file or folder that cannot be written."""
    return _FILES.get(getattr(error, "errno", None) or 0, "make the folder writable")


@contextmanager
def writing(path: Path, what: str = "", then: str = "run the same command again") -> Iterator[None]:
    """Say what cannot be written, why, and what to do, if this block fails to write to `path`.

    Raises:
        TrainingError: it cannot be written, or `path` is in the lost folder of a run.
    """
    try:
        refuse_lost(path)
        yield
    except TrainingError:
        raise
    except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in a RuntimeError
        with suppress(OSError):
            refuse_lost(path)  # perhaps the reason
        if lacks_thread(error):
            raise
        cause = error if isinstance(error, OSError) else error.__context__ or error
        why = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
        raise TrainingError(
            f"cannot write {what or path} ({why}): {fix(cause)}, then {then}"
        ) from error


def publish(
    folder: Path,
    temporary: str,
    write: Callable[[IO[bytes]], Any],
    name: Callable[[IO[bytes]], str],
) -> Path:
    """Write a temporary file, flush it to the disk, and rename it; or leave nothing.

    Args:
        folder: made if it is missing; the folder above it must exist.
        temporary: name of the temporary file.
        write: writes into the open file.
        name: gives the final name; it may read the file.

    Raises:
        TrainingError: the folder is in the folder of a run, and no longer the run's.
    """
    refuse_lost(folder)
    folder.mkdir(exist_ok=True)
    directory = os.open(folder, os.O_RDONLY)
    try:
        refuse_lost(folder)  # the folder that is open now is the run's, and stays so
        opener = partial(os.open, mode=0o666, dir_fd=directory)
        with open(temporary, "w+b", opener=opener) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the host can leave an empty file
            final = name(file)
        refuse_lost(folder)
        os.rename(temporary, final, src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
    finally:
        os.close(directory)
    return folder / final


def write_file(
    path: Path, write: Callable[[IO[bytes]], Any], then: str = "run the same command again"
) -> None:
    """Let `write` write into a new file, which takes the place of `path` once it is complete.

    Raises:
        TrainingError: it cannot be written. `then` says what to do after the advice.
    """
    with writing(path, then=then):
        publish(path.parent, path.with_suffix(".tmp").name, write, lambda _: path.name)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file completely or not at all; raises as `write_file`."""
    write_file(path, lambda file: file.write(content))


def part_from_copies(path: Path) -> None:
    """Let a file that is written in place have no other hard link, such as `cp -al` makes."""
    if path.exists() and path.stat().st_nlink > 1:
        write_bytes(path, path.read_bytes())


def write_json(path: Path, content: Any) -> None:
    """Write JSON completely or not at all; raises as `write_file`."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    # JSON's own escape for bytes of a file name that are no UTF-8
    write_bytes(path, text.encode("utf-8", "backslashreplace"))
