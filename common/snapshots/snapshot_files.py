"""Snapshot files: written atomically, named by their checksum, always checked before use.

A snapshot is one file, `step_00000120.<first 16 hex digits of its SHA-256>.pt`: the checksum is
part of the name, so one rename publishes both. If the state is divided between ranks, this file is
written last, and names the file of each rank, `step_00000120.rank_00003.<checksum>.shard`.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from common import log
from common.errors import InputError
from common.group.collectives import agreed, broadcast, gather
from common.identity import Options, refuse_another_run, refuse_unlike_rank_0
from common.owner import refuse_lost
from common.reading import refuse_closed
from common.writing import RESUME, publish, writing

FORMAT = 6

_OF_ITS_FOLDER = {"metrics_bytes": 0, "metrics_sha256": "", "history": {}}
"""What a snapshot says of the run's other files. In another --output-dir there are none of them."""


class UnsoundError(InputError):
    """A snapshot whose bytes are not the ones that were written."""


def write(folder: Path, step: int, content: dict[str, Any], rank: int | None = None) -> Path:
    """Write a snapshot, or the shard of a rank, and flush it to the disk.

    Raises:
        TrainingError: the file cannot be written; the files in the folder are unchanged.
    """
    name, suffix = f"step_{step:08d}", "pt"
    if rank is not None:
        name, suffix = f"{name}.rank_{rank:05d}", "shard"
    with writing(folder, f"a snapshot into {folder}", RESUME):
        return publish(
            folder,
            f"{name}.{os.getpid()}.tmp",
            partial(torch.save, content),
            lambda file: f"{name}.{_checksum(file)}.{suffix}",
        )


def _checksum(file: IO[bytes]) -> str:
    """The first 16 hex digits of a file's SHA-256."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()[:16]  # type: ignore[arg-type]


def load_data_only(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """What `write` wrote, on the CPU. With `mmap`, a tensor is read when it is used.

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


def checksum(path: Path) -> str:
    """The checksum that a file's name should have."""
    with path.open("rb") as file:
        return _checksum(file)


def list_snapshots(folder: Path) -> list[Path]:
    """Snapshot files, the newest first, unchecked."""
    return sorted(folder.glob("step_????????.????????????????.pt"), reverse=True)


def shards_of(snapshot: Path) -> list[Path]:
    """The files of the ranks among which a snapshot's state is divided; none if it is not."""
    return sorted(snapshot.parent.glob(f"{snapshot.name[:13]}.*.shard"))


def keep_newest(folder: Path, count: int) -> None:
    """Remove the other snapshots, each before its shards; warn if one cannot be removed."""
    refuse_lost(folder)
    for old in list_snapshots(folder)[count:]:
        try:
            old.unlink(missing_ok=True)
            for shard in shards_of(old):
                shard.unlink(missing_ok=True)
        except OSError as error:
            log.warning(f"cannot remove the old snapshot {error.filename} ({error.strerror})")


def newest_name(folder: Path) -> str:
    """Name of the newest snapshot, for a message."""
    return next((path.name for path in list_snapshots(folder)), "none was written yet")


def read(path: Path) -> dict[str, Any]:
    """Load one snapshot onto the CPU after comparing its checksum; shards are not read.

    Raises:
        InputError: the file is missing, torn, altered, no snapshot or of another format.
    """
    if not path.is_file():
        raise InputError(f"snapshot {path} is not a file")
    expected = re.search(r"\.([0-9a-f]{16})\.pt$", path.name)
    if not expected:
        raise InputError(f"{path} is not named like a snapshot (step_NNNNNNNN.CHECKSUM.pt)")
    if checksum(path) != expected[1]:
        raise UnsoundError(f"snapshot {path} is torn or altered: its checksum is not {expected[1]}")
    content = load_data_only(path)
    format_ = content.get("format") if isinstance(content, dict) else None
    if format_ != FORMAT:
        raise InputError(
            f"snapshot {path} has format {format_}, this code reads {FORMAT}: "
            "use the version of the code that wrote it"
        )
    kinds = {"identity": dict, "step": int, "metrics_bytes": int, "metrics_sha256": str}
    if wrong := [name for name, kind in kinds.items() if not isinstance(content.get(name), kind)]:
        raise InputError(unlike(path, f"no {', '.join(wrong)}"))
    shards = [str(path.parent / name) for name in content.get("shards", ())]
    return {**content, "file": str(path), "shards": shards}


def unlike(path: Path | str, what: str) -> str:
    """The message for a snapshot that is intact but does not hold what a run writes."""
    return (
        f"snapshot {path} does not hold this run's state ({what}): if the model's code has changed "
        "since, change it back or choose another --output-dir; else move the file away to resume "
        "from the snapshot before it"
    )


def find(
    resume: str | Path, folder: Path, identity: Options, *, only_look: bool = False
) -> dict[str, Any] | None:
    """The snapshot to resume from, the same on every rank; None to begin at the start.

    Unsound snapshots are renamed, and what an interrupted writer left is removed.

    Args:
        resume: "auto" for the newest intact snapshot in `folder`, "never", or a file.
        folder: of the run's snapshots.
        identity: what must be the same in the snapshot.
        only_look: change nothing in `folder`.

    Raises:
        InputError: the named file, or every snapshot in the folder, is damaged; the snapshot is of
            another run; or "never" with a folder that holds snapshots.
    """
    refuse_unlike_rank_0(identity, "this rank trains on other data than rank 0")
    unsound: dict[Path, str] = {}
    while True:
        found = None
        with agreed():
            if dist.get_rank() == 0 and (found := _find(resume, folder, unsound)):
                refuse_another_run(found["identity"], identity, f"snapshot {found['file']}")
        found = broadcast(found)
        if not found or not (fault := _first_fault(found["shards"])):
            break
        path = Path(found["file"])
        with agreed():
            if path.parent != folder:  # given by --resume
                raise UnsoundError(f"{fault}: {path} cannot be used")
            if dist.get_rank() == 0:
                log.warning(f"{fault}; trying the snapshot before")
                unsound[path] = fault
    with agreed():
        if dist.get_rank() == 0 and not only_look:
            _tidy(folder, unsound)
    return found


def _first_fault(shards: list[str]) -> str:
    """What is wrong with a snapshot's shards, on every rank; each rank checks its share."""
    fault = ""
    for shard in map(Path, shards[dist.get_rank() :: dist.get_world_size()]):
        if not shard.is_file():
            fault = f"shard {shard} is missing"
        elif checksum(shard) != shard.suffixes[-2][1:]:
            fault = f"shard {shard} is torn or altered: its checksum is another"
    return next(filter(None, gather(fault)), "") if shards else ""


def _tidy(folder: Path, unsound: Iterable[Path]) -> None:
    """Rename unsound snapshots, and remove what an interrupted writer left."""
    refuse_lost(folder)
    for path in unsound:  # so that they do not count as snapshots to keep
        path.rename(path.with_suffix(".unsound"))
    complete = {path.name[:13] for path in (*list_snapshots(folder), *folder.glob("*.unsound"))}
    for left in (*folder.glob("step_????????.*.tmp"), *folder.glob("step_????????.*.shard")):
        if left.suffix == ".tmp" or left.name[:13] not in complete:
            left.unlink(missing_ok=True)


def _find(resume: str | Path, folder: Path, unsound: dict[Path, str]) -> dict[str, Any] | None:
    """The newest snapshot that can be read; each that cannot is added to `unsound`, with why."""
    refuse_closed("--output-dir", folder)  # else it would seem to hold none
    candidates = list_snapshots(folder)
    if resume == "never":
        if candidates:
            raise InputError(
                f"--resume never, but {folder} holds snapshots: choose another --output-dir"
            )
        return None
    if isinstance(resume, Path):
        refuse_closed("--resume", resume)
        if not candidates:
            return {**read(resume), **_OF_ITS_FOLDER}  # not this folder's
        # The same command again, after a stop: the folder's own snapshots are of later steps.
        if resume.resolve().parent == folder.resolve() and resume.name != candidates[0].name:
            raise InputError(
                f"--resume {resume} is not the newest snapshot in its folder: to branch off from "
                "it, choose another --output-dir"
            )
        log.info(f"--resume {resume} is ignored: {folder} already holds snapshots")
    for path in candidates:
        if path in unsound:
            continue
        try:
            found = read(path)
            _refuse_other_metrics(found, path, folder.parent / "metrics.jsonl")
        except UnsoundError as error:
            unsound[path] = str(error)
            log.warning(f"{error}; trying the snapshot before")
        else:
            return found
    if count := len(unsound) or len(list(folder.glob("*.unsound"))):
        raise InputError(
            f"none of the {count} snapshots in {folder} can be used "
            f"({next(iter(unsound.values()), 'damaged')}): to begin at the start, choose another "
            "--output-dir; to resume from a snapshot that is whole, add --resume SNAPSHOT to it"
        )
    return None


def _refuse_other_metrics(found: dict[str, Any], path: Path, metrics: Path) -> None:
    """Raise UnsoundError unless metrics.jsonl begins as it was when the snapshot was written."""
    counted = metrics.read_bytes()[: found["metrics_bytes"]] if metrics.is_file() else b""
    if hashlib.sha256(counted).hexdigest() != found["metrics_sha256"]:
        raise UnsoundError(f"{metrics} was cut or altered after {path.name} was written")
