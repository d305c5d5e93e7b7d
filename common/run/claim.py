"""Which folder a run writes into, and whether it may."""

import errno
import os
from pathlib import Path
from typing import IO

from common import restart
from common.errors import InputError
from common.output_folder import (
    make_folder,
    new_folder,
    not_writable,
    refuse_closed_to_writing,
    refuse_root,
)
from common.owner import lock, refuse_owned
from common.reading import read_json

_FOLDERS = {"snapshots", "weights", "tensorboard", "logs", "trace", "profile"}
_FILES = {
    *("config.json", "manifest.json", "metrics.jsonl", "summary.json", "class_indices.json"),
    *("preprocessing.json", "held_out.json", "changes.diff", "model.pt", "best.pt", "status.json"),
}
"""What a run writes into its folder, besides .lock."""


_locks_of_snapshots: list[IO[str]] = []
"""Of folders to which `snapshots` in a run's folder leads; held until this process ends."""


def claim(given: Path | None, recipe: str) -> tuple[Path, IO[str], list[Path]]:
    """Make and lock the folder of a run, on rank 0.

    Args:
        given: by the user. None: a new folder in runs/, under `recipe`.
        recipe: its name.

    Returns:
        The folder; its `.lock`, which stays open; if no run had the folder, the files and folders
        that were made now, the innermost first.

    Raises:
        InputError: the folder cannot be written, belongs to a run that is still going, or holds
            files that look like a run's and are not; or it is a restart, and the folder is gone.
    """
    restarted = restart.reached().folder
    if restarted and not Path(restarted, ".lock").exists():
        raise InputError(
            f"{restarted} was removed or moved, and a restart does not make it again: to resume, "
            "run the same command with --output-dir of its new place"
        )
    place = given or Path(restarted or Path("runs") / recipe)
    before = {path for path in (place, *place.parents) if os.path.lexists(path)}
    folder = place if given or restarted else new_folder(place)
    made = [path for path in (folder, *folder.parents) if path not in before]
    try:
        _refuse_long(folder)
        make_folder(folder)
        _refuse_foreign(folder)
        new = not any((folder / name).exists() for name in (".lock", "config.json"))
        made = [folder / ".lock", *made] if new else []
        locked = lock(folder)
        if (folder / "snapshots").is_symlink() and (folder / "snapshots").is_dir():
            # another run's may lead to the same folder
            _locks_of_snapshots.append(lock(folder / "snapshots"))
    except OSError as error:
        raise InputError(not_writable(folder, error)) from error
    restart.record(folder)
    return folder, locked, made


def refuse_unwritable(folder: Path) -> None:
    """For a check: raise InputError if a run could not make, own or write `folder`."""
    place = folder.absolute()
    refuse_root(folder)
    try:
        _refuse_long(folder)
        while not _there(place):
            place = place.parent
        if not place.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        refuse_closed_to_writing(place)
        if place == folder.absolute():
            _refuse_foreign(folder)
            refuse_owned(folder)
    except OSError as error:
        raise InputError(not_writable(folder, error)) from error


def _refuse_long(folder: Path) -> None:
    if len(os.fsencode(folder.absolute())) > 3800:  # of 4,096 with the names of the files
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))


def _there(path: Path) -> bool:
    """Whether a path exists, even as a link to nothing. OSError: it cannot exist."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def refuse_in_data(
    folder: Path, data_path: Path, option: str = "--output-dir", data: str = "--data-path"
) -> None:
    """Raise InputError if a folder to write into would be, or be in, a class of an image folder.

    `option` and `data` name the two for the message.
    """
    place, images = folder.resolve(), data_path.resolve()
    if not place.is_relative_to(images):
        return
    parts = place.relative_to(images).parts
    if any(part.startswith(".") for part in parts):  # hidden folders are no data
        return
    in_classes = parts[:1] in (("train",), ("val",))
    if in_classes or not ((images / "train").is_dir() and (images / "val").is_dir()):
        raise InputError(
            f"{option} {folder} is in {data} {data_path}, whose sub-folders are classes: choose an "
            f"{option} elsewhere"
        )


def _refuse_foreign(folder: Path) -> None:
    held, config = {path.name for path in folder.iterdir()}, folder / "config.json"
    for name in sorted(held & (_FILES | _FOLDERS | {".lock"})):
        path, kind = folder / name, "folder" if name in _FOLDERS else "file"
        if name in (".lock", "metrics.jsonl") and path.is_symlink():  # written in place
            raise InputError(
                f"{path} is a link to {path.readlink()}, which the run would write: move it away, "
                "or choose another --output-dir"
            )
        if not (path.is_dir() if name in _FOLDERS else path.is_file()):
            raise InputError(f"{path} is no {kind}: move it away, or choose another --output-dir")
    ours = ".lock" in held or (config.is_file() and "recipe" in read_json(config))
    if not ours and (foreign := sorted(held & (_FILES | _FOLDERS))):
        raise InputError(
            f"{folder} holds {', '.join(foreign)}, but neither config.json nor .lock of a run: "
            "choose another --output-dir"
        )
