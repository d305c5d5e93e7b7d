"""Snapshot files: written atomically, named by their checksum, always checked before use.

A snapshot is one file, `step_00000120.<first 16 hex digits of its SHA-256>.pt`: the checksum is
part of the name, so one rename publishes both.
"""

import hashlib
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.errors import InputError, TrainingError
from common.files import fix
from common.group.collectives import agreed, broadcast
from common.run.options import Options, refuse_another_run, refuse_unlike_rank_0

FORMAT = 3

log = logging.getLogger("recipes")


class UnsoundError(InputError):
    """A snapshot whose bytes are not the ones that were written."""


def write(folder: Path, step: int, content: dict[str, Any]) -> Path:
    """Write `content` to a temporary file, flush it to the disk, then rename it.

    Raises:
        TrainingError: the file cannot be written; the files in the folder are unchanged.
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
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else error.__context__ or error
        raise TrainingError(
            f"cannot write a snapshot into {folder} ({str(cause).splitlines()[0]}): {fix(cause)}, "
            "then run the same command to resume from the last snapshot"
        ) from error
    return path


def list_snapshots(folder: Path) -> list[Path]:
    """Snapshot files, the newest first, unchecked."""
    return sorted(folder.glob("step_????????.????????????????.pt"), reverse=True)


def newest_name(folder: Path) -> str:
    """Name of the newest snapshot, for a message."""
    return next((path.name for path in list_snapshots(folder)), "none was written yet")


def read(path: Path) -> dict[str, Any]:
    """Load one snapshot onto the CPU after comparing its checksum.

    Raises:
        InputError: the file is missing, torn, altered, no snapshot or of another format.
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
    except Exception as error:  # torch.load raises whatever the unpickler raises
        raise InputError(
            f"snapshot {path} holds more than tensors and numbers, and is not loaded: "
            "it could run code"
        ) from error
    format_ = content.get("format") if isinstance(content, dict) else None
    if format_ != FORMAT:
        raise InputError(
            f"snapshot {path} has format {format_}, this code reads {FORMAT}: "
            "use the version of the code that wrote it"
        )
    kinds = {"identity": dict, "step": int, "metrics_bytes": int}
    if wrong := [name for name, kind in kinds.items() if not isinstance(content.get(name), kind)]:
        raise InputError(unlike(path, f"no {', '.join(wrong)}"))
    return {**content, "file": str(path)}


def unlike(path: Path | str, what: str) -> str:
    """The message for a snapshot that is intact but does not hold what a run writes."""
    return (
        f"snapshot {path} does not hold this run's state ({what}): move it away to resume from the "
        "snapshot before it"
    )


def find(resume: str | Path, folder: Path, identity: Options) -> dict[str, Any] | None:
    """The snapshot to resume from, the same on every rank; None to begin at the start.

    Args:
        resume: "auto" for the newest intact snapshot in `folder`, "never", or a file.
        folder: of the run's snapshots.
        identity: what must be the same in the snapshot.

    Raises:
        InputError: the named file, or every snapshot in the folder, is damaged; the snapshot is of
            another run; or "never" with a folder that holds snapshots.
    """
    refuse_unlike_rank_0(identity, "this rank trains on other data than rank 0")
    found = None
    with agreed():
        if dist.get_rank() == 0 and (found := _find(resume, folder)):
            refuse_another_run(found["identity"], identity, f"snapshot {found['file']}")
            log.info(f"resuming after step {found['step']}")
    return broadcast(found)


def _find(resume: str | Path, folder: Path) -> dict[str, Any] | None:
    candidates = list_snapshots(folder)
    if resume == "never":
        if candidates:
            raise InputError(
                f"--resume never, but {folder} holds snapshots: choose another --output-dir"
            )
        return None
    if isinstance(resume, Path):
        if not candidates:
            return {**read(resume), "metrics_bytes": 0, "metrics_sha256": ""}  # not this folder's
        # The same command again, after a stop: the folder's own snapshots are of later steps.
        if resume.resolve().parent == folder.resolve() and resume.name != candidates[0].name:
            raise InputError(
                f"--resume {resume} is not the newest snapshot in its folder: to branch off from "
                "it, choose another --output-dir"
            )
        log.info(f"--resume {resume} is ignored: {folder} already holds snapshots")
    for left in folder.glob("step_????????.*.tmp"):
        left.unlink(missing_ok=True)
    unsound: list[Path] = []
    why = ""
    for path in candidates:
        try:
            found = read(path)
            _refuse_other_metrics(found, path, folder.parent / "metrics.jsonl")
        except UnsoundError as error:
            unsound, why = [*unsound, path], why or str(error)
            log.warning(f"{error}; trying the snapshot before")
        else:
            for other in unsound:  # so that they do not count as snapshots to keep
                other.rename(other.with_suffix(".unsound"))
            return found
    if unsound or (unsound := list(folder.glob("*.unsound"))):
        raise InputError(
            f"none of the {len(unsound)} snapshots in {folder} can be used ({why or 'damaged'}): "
            "to begin at the start, choose another --output-dir"
        )
    return None


def _refuse_other_metrics(found: dict[str, Any], path: Path, metrics: Path) -> None:
    """Raise UnsoundError unless metrics.jsonl begins as it was when the snapshot was written."""
    counted = metrics.read_bytes()[: found["metrics_bytes"]] if metrics.is_file() else b""
    expected = found.get("metrics_sha256")  # snapshots of older code have none
    if len(counted) < found["metrics_bytes"] or (
        expected and hashlib.sha256(counted).hexdigest() != expected
    ):
        raise UnsoundError(f"{metrics} was cut or altered after {path.name} was written")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
