"""Snapshot files: written atomically, named by their checksum, never trusted unchecked.

A snapshot is one file, `step_00000120.<first 16 hex digits of its SHA-256>.pt`: the checksum is
part of the name, so one rename publishes both.
"""

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.errors import InputError, TrainingError
from common.group.collectives import agreed, broadcast

FORMAT = 3
log = logging.getLogger("recipes")


class UnsoundError(InputError):
    """A snapshot that is not what was written."""


def write(folder: Path, step: int, content: dict[str, Any]) -> Path:
    """Write `content` to a temporary file, flush it to the disk, then rename it.

    Raises:
        TrainingError: the file cannot be written; what was there before is untouched.
    """
    temporary = folder / f"step_{step:08d}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"step_{step:08d}.{_digest(temporary)}.pt"
        temporary.rename(path)
        directory = os.open(folder, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in a RuntimeError
        temporary.unlink(missing_ok=True)
        raise TrainingError(
            f"cannot write a snapshot into {folder} ({str(error).splitlines()[0]}): make room, "
            "then run the same command to go on from the last one"
        ) from error
    return path


def list_snapshots(folder: Path) -> list[Path]:
    """Snapshot files by step, the newest first, unchecked."""
    return sorted(folder.glob("step_????????.????????????????.pt"), reverse=True)


def newest_name(folder: Path) -> str:
    """Of the newest snapshot, for a message."""
    return next((path.name for path in list_snapshots(folder)), "none was written yet")


def read(path: Path) -> dict[str, Any]:
    """Load one snapshot onto the CPU after comparing its checksum.

    Raises:
        InputError: missing, torn, altered, of no snapshot format or of a newer one.
    """
    if not path.is_file():
        raise InputError(f"snapshot {path} is not a file")
    expected = re.search(r"\.([0-9a-f]{16})\.pt$", path.name)
    if not expected:
        raise InputError(f"{path} is not named like a snapshot (step_NNNNNNNN.CHECKSUM.pt)")
    if _digest(path) != expected[1]:
        raise UnsoundError(f"snapshot {path} is torn or altered: its checksum is not {expected[1]}")
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever the unpickler meets
        raise InputError(
            f"snapshot {path} holds something else than tensors and numbers, and is not loaded: "
            "it could run code"
        ) from error
    if content.get("format") != FORMAT:
        raise InputError(
            f"snapshot {path} has format {content.get('format')}, this code reads {FORMAT}: "
            "go on with the version of the code that wrote it"
        )
    return content


def find(resume: str | Path, folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The snapshot to go on from, read by rank 0 and given to every rank; None to begin anew.

    Args:
        resume: "auto" for the newest sound one in `folder`, "never", or a file.
        folder: of the run's snapshots.
        identity: the options that must be those of the snapshot.

    Raises:
        InputError: a named file that is unsound, a folder with unsound ones only, other options,
            or "never" with a folder that holds snapshots, which would be written over.
    """
    found = None
    rank_0 = broadcast(dict(identity))
    with agreed():
        if detail := differences(rank_0, identity):
            raise InputError(f"this rank trains on other data than rank 0: {detail}")
    with agreed():
        if dist.get_rank() == 0:
            found = _find(resume, folder)
            if found is not None:
                refuse_mismatch(found["identity"], identity, f"the snapshot in {folder}")
                log.info(f"resuming after step {found['step']}")
    return broadcast(found)


def _find(resume: str | Path, folder: Path) -> dict[str, Any] | None:
    candidates = list_snapshots(folder)
    if isinstance(resume, Path) and candidates:
        # The same command again, after a stop: the folder's own snapshots are further on.
        if resume.resolve().parent == folder.resolve() and resume.name != candidates[0].name:
            raise InputError(
                f"--resume {resume} is not the newest in its folder: to branch off from it, "
                "choose another --output-dir"
            )
        log.info(f"--resume {resume} left aside: {folder} holds snapshots of its own")
    elif isinstance(resume, Path):
        return read(resume)
    if resume == "never":
        if candidates:
            raise InputError(
                f"--resume never, but {folder} holds snapshots: choose another --output-dir"
            )
        return None
    for left in folder.glob("*.tmp"):
        left.unlink()
    for path in candidates:
        try:
            found = read(path)
        except UnsoundError as error:
            log.warning(f"{error}; set aside, trying the one before")
            path.rename(path.with_suffix(".unsound"))  # else it would count as one to keep
            continue
        return found
    if unsound := list(folder.glob("*.unsound")):
        raise InputError(
            f"none of the {len(unsound)} snapshots in {folder} is sound: "
            "choose another --output-dir to begin anew"
        )
    return None


def refuse_mismatch(theirs: Mapping[str, Any], ours: Mapping[str, Any], what: str) -> None:
    """Raise InputError naming every option in which `theirs` and `ours` differ."""
    if detail := differences(theirs, ours):
        raise InputError(f"{what} is of another run ({detail}): choose another --output-dir")


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Every name whose values differ, with both; empty where none does."""
    names = sorted(theirs.keys() | ours.keys())
    different = [name for name in names if theirs.get(name) != ours.get(name)]
    return "; ".join(f"{n} {theirs.get(n)!r} there, {ours.get(n)!r} here" for n in different)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
