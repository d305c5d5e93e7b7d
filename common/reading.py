"""Files and folders that are read: records, and what a user may not read."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from common.errors import InputError


def read_json(path: Path, *numbers: str) -> dict[str, Any]:
    """The JSON object in a file that `write_json` wrote, with whole `numbers` by these names.

    Raises:
        InputError: the file is damaged; it names the file.
    """
    try:
        content = json.loads(no_pipe(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not all(
            isinstance(content.get(n), int) for n in numbers
        ):
            raise ValueError(f"it is no JSON object{''.join(f' with {name}' for name in numbers)}")
        return content
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is damaged ({error}): restore it, or choose another --output-dir"
        ) from None


def no_pipe(path: Path) -> Path:
    """The path as it is. OSError: it is a pipe, and whoever opens one waits for its writer."""
    if path.is_fifo():
        raise OSError("it is a pipe")
    return path


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def bytes_in(*paths: Path) -> int:
    """Size of files, and of all files in folders, without following links; 0 for missing ones."""
    size = 0
    for path in paths:
        for file in path.rglob("*") if path.is_dir() else [path]:
            with suppress(OSError):  # removed meanwhile
                if not file.is_dir():
                    size += file.lstat().st_size
    return size


def tail(file: Path, size: int = 2**16) -> str:
    """The last bytes of a text file, enough for a log's last lines; "" if it cannot be read."""
    with suppress(OSError), no_pipe(file).open("rb") as bytes_:
        bytes_.seek(max(0, file.stat().st_size - size))
        return bytes_.read().decode(errors="replace")
    return ""


def refuse_closed(option: str, *paths: Path) -> None:
    """Refuse files and folders that this user may not read. A missing one is not refused.

    Raises:
        InputError: with the owner of the place that is closed: a path, or a folder above it.
    """
    for path in paths:
        try:
            real = path.resolve()
        except RuntimeError:  # Python 3.13 takes it as it is
            raise InputError(f"{option} {path} is a link that leads to itself: remove it") from None
        for place in (*reversed(real.parents), real):
            needed = (os.X_OK if place.is_dir() else 0) | (os.R_OK if place == real else 0)
            if place.exists() and not os.access(place, needed):
                owner = place.stat()
                raise InputError(
                    f"{option} {path} cannot be read: {place} belongs to user {owner.st_uid}, "
                    f"group {owner.st_gid}, and you are user {os.getuid()}: allow reading, or in "
                    f"a container give --group-add {owner.st_gid}"
                )


def files_below(option: str, folder: Path | str) -> Iterator["os.DirEntry[str]"]:
    """All files below a folder, sorted, and links to no file or to a folder; no hidden folders.

    Links to folders are not followed, because they can lead in circles. A closed sub-folder is
    refused; Path.rglob would leave it out. Pipes, sockets and devices are left out: who opens a
    pipe waits for its writer. A file that is no link costs no question to the file system: its
    kind comes with the folder's list.
    """
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=attrgetter("name"))
    except OSError as error:
        refuse_closed(option, Path(error.filename))
        raise
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if not entry.name.startswith("."):
                yield from files_below(option, entry.path)
        elif entry.is_file(follow_symlinks=False) or (entry.is_symlink() and _is_no_pipe(entry)):
            yield entry


def _is_no_pipe(link: "os.DirEntry[str]") -> bool:
    """Whether a link leads to a file, to a folder, or to nothing; and not to a pipe or a device."""
    target = Path(link.path)  # its methods also know links that lead in circles
    return target.is_file() or target.is_dir() or not target.exists()
