"""Files of tensors and numbers that bear their checksum in their names, and run no code."""

import hashlib
import os
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from common.errors import InputError
from common.writing import RESUME, publish, writing


def save_checked(folder: Path, name: str, suffix: str, content: dict[str, Any]) -> Path:
    """Save `content` as NAME.<first 16 hex digits of its SHA-256>.SUFFIX.

    It is written to a temporary file and flushed to the disk. The checksum is part of the name, so
    one rename publishes both.

    Raises:
        TrainingError: the file cannot be written; the files in the folder are unchanged.
    """

    def final(file: IO[bytes]) -> str:
        file.seek(0)
        return f"{name}.{_checksum(file)}.{suffix}"

    with writing(folder, f"a snapshot into {folder}", RESUME):
        return publish(folder, f"{name}.{os.getpid()}.tmp", partial(torch.save, content), final)


def checksum(path: Path) -> str:
    """The first 16 hex digits of a file's SHA-256."""
    with path.open("rb") as file:
        return _checksum(file)


def _checksum(file: IO[bytes]) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()[:16]  # type: ignore[arg-type]


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
