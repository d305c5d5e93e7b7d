"""The folder that results are written into: a new one, or --output-dir."""

import errno
import os
import tempfile
import time
from pathlib import Path

from common.errors import InputError
from common.writing import fix


def new_folder(parent: Path) -> Path:
    """Make a folder named by the time; a second run in the same second gets another name."""
    stamp = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        try:
            (parent / f"{stamp}{suffix}").mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(not_writable(parent, error)) from error
        return parent / f"{stamp}{suffix}"
    raise InputError(f"{parent} holds 99 runs of {stamp}: give --output-dir")


def result_folder(given: Path | None, recipe: str, kind: str) -> Path:
    """The folder of a measurement, made if it does not exist.

    Args:
        given: by the user. None: a new folder in runs/, under `recipe`.
        recipe: its name.
        kind: of result: the JSON file's name without its suffix.

    Raises:
        InputError: the folder already holds such a result, or cannot be written.
    """
    folder = given or new_folder(Path("runs") / recipe)
    if (folder / f"{kind}.json").exists():
        raise InputError(f"{folder} already holds {kind}.json: choose another --output-dir")
    make_folder(folder)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(not_writable(folder, error)) from error
    return folder


def make_folder(folder: Path) -> None:
    """Make an --output-dir if it does not exist.

    Raises:
        InputError: it cannot be made, or is the root of the file system.
    """
    refuse_root(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(not_writable(folder, error)) from error


def refuse_closed_to_writing(folder: Path) -> None:
    """Raise PermissionError if this user may not write into a folder."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def refuse_root(folder: Path) -> None:
    """Raise InputError if an --output-dir is the root of the file system."""
    if os.path.realpath(folder) == "/":
        raise InputError(
            f"--output-dir {folder} is the root of the file system: choose a folder of its own"
        )


def not_writable(folder: Path, error: OSError) -> str:
    """The message for an --output-dir, or the default one, that cannot be written."""
    missing = error.errno in (errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
    for place in (folder, *folder.parents) if missing else ():
        if os.path.lexists(place) and not place.is_dir():
            what = "a file, not a folder"
            if not place.exists():
                what = f"a link to {place.readlink()}, which does not exist"
            return (
                f"--output-dir {folder} cannot be made ({place} is {what}): choose another "
                "--output-dir"
            )
    advice = fix(error)
    if error.errno in (errno.EACCES, errno.EPERM) and "RECIPES_STACK" in os.environ:
        advice = (
            f"in this container you are user {os.getuid()}: mount a folder that this user may "
            "write (--volume DIR:/workspace/runs), be the folder's owner (--user UID:GID)"
        )
    return (
        f"--output-dir {folder} cannot be written ({error.strerror}): {advice}, or choose another "
        "--output-dir"
    )
