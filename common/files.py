"""Files that are written completely or not at all, folders with one owner, the hash of weights."""

import errno
import fcntl
import hashlib
import json
import logging
import os
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from common.errors import InputError, TrainingError

_FIXES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room within your quota",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
}
log = logging.getLogger("recipes")


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
    temporary = path.with_suffix(".tmp")
    torch.save(weights, temporary)
    temporary.rename(path)


def save_checked(folder: Path, name: str, suffix: str, content: dict[str, Any]) -> Path:
    """Save `content` as NAME.<first 16 hex digits of its SHA-256>.SUFFIX.

    It is written to a temporary file and flushed to the disk. The checksum is part of the name, so
    one rename publishes both.

    Raises:
        TrainingError: the file cannot be written; the files in the folder are unchanged.
    """
    temporary = folder / f"{name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"{name}.{checksum(temporary)}.{suffix}"
        temporary.rename(path)
        directory = os.open(folder, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in a RuntimeError
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        fix = _FIXES.get(getattr(error, "errno", errno.ENOSPC), "make the folder writable")
        raise TrainingError(
            f"cannot write a snapshot into {folder} ({str(error).splitlines()[0]}): {fix}, "
            "then run the same command to resume from the last snapshot"
        ) from error
    return path


def checksum(path: Path) -> str:
    """The first 16 hex digits of a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def load_data_only(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Load tensors, numbers and text that `save_checked` wrote, onto the CPU.

    Args:
        path: of the file.
        mmap: read each tensor when it is used.

    Raises:
        InputError: the file holds anything else, which could run code.
    """
    try:
        content: dict[str, Any] = torch.load(path, "cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch.load raises whatever the unpickler raises
        raise InputError(
            f"snapshot {path} holds more than tensors and numbers, and is not loaded: "
            "it could run code"
        ) from error
    return content


def write_json(path: Path, content: Any) -> None:
    """Write JSON to a temporary file, then rename it."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())  # else a crash of the host can leave an empty file
    temporary.rename(path)


def read_json(path: Path, *required: str) -> dict[str, Any]:
    """The JSON object in a file that `write_json` wrote, with the names `required`.

    Raises:
        InputError: the file is damaged; it names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not set(required) <= content.keys():
            raise ValueError(f"it is no JSON object{''.join(f' with {n}' for n in required)}")
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
    file, here = (folder / ".lock").open("a+"), f"host {socket.gethostname()}"
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
            raise InputError(f"{parent} cannot be written: {error}; give --output-dir") from error
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
        raise InputError(f"--output-dir {folder} cannot be written: {error}") from error
    return folder
