"""Files of tensors and numbers that bear their checksum in their names, and run no code."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from common.errors import InputError, TrainingError
from common.files import fix


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
        cause = error if isinstance(error, OSError) else error.__context__ or error
        raise TrainingError(
            f"cannot write a snapshot into {folder} ({str(cause).splitlines()[0]}): {fix(cause)}, "
            "then run the same command to resume from the last snapshot"
        ) from error
    return path


def checksum(path: Path) -> str:
    """The first 16 hex digits of a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def load_data_only(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """What `save_checked` wrote, on the CPU. With `mmap`, a tensor is read when it is used.

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
