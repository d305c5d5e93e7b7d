"""Files that are written completely or not at all, folders with one owner, the hash of weights."""

import errno
import fcntl
import hashlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from common import log
from common.errors import InputError

_FILES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room within your quota",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EACCES: "get the right to write there",
    errno.EPERM: "get the right to write there",
    errno.EROFS: "mount the file system read-write",
    errno.ENAMETOOLONG: "choose a shorter path",
}
"""Number of a failure to write a file to the advice."""


def fix(error: BaseException | None) -> str:
    """What to do about a file or folder that cannot be written."""
    return _FILES.get(getattr(error, "errno", None) or 0, "make the folder writable")


def weights_sha256(state_dict: dict[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and little-endian bytes, in the state_dict's order."""
    digest = hashlib.sha256()
    for name, value in state_dict.items():
        tensor = value.detach().cpu().contiguous()
        digest.update(name.encode() + str(tensor.dtype).encode() + str(tensor.shape).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Save a state_dict to a temporary file, then rename it."""
    path.parent.mkdir(exist_ok=True)
    with _replaced(path) as file:
        torch.save(weights, file)


def write_json(path: Path, content: Any) -> None:
    """Write JSON to a temporary file, then rename it."""
    with _replaced(path) as file:
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        # JSON's own escape for bytes of a file name that are no UTF-8
        file.write(text.encode("utf-8", "backslashreplace"))


@contextmanager
def _replaced(path: Path) -> Iterator[IO[bytes]]:
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())  # else a crash of the host can leave an empty file
    temporary.rename(path)


def read_json(path: Path, *numbers: str) -> dict[str, Any]:
    """The JSON object in a file that `write_json` wrote, with whole `numbers` by these names.

    Raises:
        InputError: the file is damaged; it names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not all(
            isinstance(content.get(n), int) for n in numbers
        ):
            raise ValueError(f"it is no JSON object{''.join(f' with {name}' for name in numbers)}")
        return content
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} is damaged ({error}): restore it, or choose another --output-dir"
        ) from None


def mebibytes(number: float) -> str:
    """A number of bytes for a table."""
    return f"{number / 2**20:,.0f} MiB"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def lost_file(folder: Path, summary: dict[str, Any], records: Iterable[str]) -> str:
    """Name of the first file of a finished run that is gone or damaged; empty if all are whole.

    Args:
        folder: of the run.
        summary: of the run.
        records: names of the run's JSON files.

    Raises:
        InputError: model.pt or best.pt is not the one that the run wrote.
    """
    name = ""
    try:
        for name in records:
            json.loads((folder / name).read_text(encoding="utf-8"))
        name = "metrics.jsonl"
        last = read_metrics(folder)[-1]
        if last["step"] != summary["steps"] or "train_loss" not in last:
            return name
    except (OSError, ValueError, LookupError, TypeError):
        return name
    for name, of in (("model.pt", summary), ("best.pt", summary.get("best"))):
        if not of:
            continue
        if not (folder / name).exists():
            return name
        try:
            found = weights_sha256(torch.load(folder / name, "cpu", weights_only=True))
        except Exception:  # torch.load raises whatever the unpickler raises
            found = ""
        if found != of.get("weights_sha256"):
            raise InputError(
                f"{folder / name} is not what the run wrote, whose weights_sha256 is in "
                "summary.json: move it away, and the same command writes it again"
            )
    return ""


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
            raise InputError(
                f"{folder} belongs to a run that is still going ({owner}): wait for its end, or "
                "choose another --output-dir"
            )
        if not waits:
            log.info(f"{folder} belongs to {owner}: waiting up to {patience_s:.0f} s for its end")
        waits = True
        time.sleep(0.5)
    file.truncate(0)
    file.write(f"{here}, process {os.getpid()}")
    file.flush()
    return file


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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(not_writable(folder, error)) from error
    return folder


def not_writable(folder: Path, error: OSError) -> str:
    """The message for an --output-dir, or the default one, that cannot be written."""
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


def refuse_closed(option: str, *paths: Path) -> None:
    """Refuse files and folders that this user may not read. A missing one is not refused.

    Raises:
        InputError: with the owner of the place that is closed: a path, or a folder above it.
    """
    for path in paths:
        real = path.resolve()
        for place in (*reversed(real.parents), real):
            needed = (os.X_OK if place.is_dir() else 0) | (os.R_OK if place == real else 0)
            if place.exists() and not os.access(place, needed):
                owner = place.stat()
                raise InputError(
                    f"{option} {path} cannot be read: {place} belongs to user {owner.st_uid}, "
                    f"group {owner.st_gid}, and you are user {os.getuid()}: allow reading, or in "
                    f"a container give --group-add {owner.st_gid}"
                )


def files_below(option: str, folder: Path) -> Iterator[Path]:
    """All files below a folder, without hidden folders.

    A closed sub-folder is refused; Path.rglob would leave it out.
    """

    def refuse(error: OSError) -> None:
        refuse_closed(option, Path(error.filename))
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names)
