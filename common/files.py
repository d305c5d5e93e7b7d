"""Files that are written completely or not at all, folders of results, the hash of weights."""

import errno
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import InputError
from common.writing import RESUME, fix, publish, writing


def weights_sha256(state_dict: dict[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and little-endian bytes, in the state_dict's order."""
    digest = hashlib.sha256()
    for name, value in state_dict.items():
        tensor = value.detach().cpu().contiguous()
        digest.update(name.encode() + str(tensor.dtype).encode() + str(tensor.shape).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Save a run's state_dict completely or not at all.

    Raises:
        TrainingError: it cannot be written.
    """
    with writing(path, then=RESUME):
        publish(path.parent, _temporary(path), partial(torch.save, weights), lambda _: path.name)


def write_json(path: Path, content: Any) -> None:
    """Write JSON completely or not at all.

    Raises:
        TrainingError: it cannot be written.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    # JSON's own escape for bytes of a file name that are no UTF-8
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file completely or not at all.

    Raises:
        TrainingError: it cannot be written.
    """
    with writing(path):
        publish(path.parent, _temporary(path), lambda f: f.write(content), lambda _: path.name)


def _temporary(path: Path) -> str:
    return path.with_suffix(".tmp").name


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
        wrote = of.get("weights_sha256") if isinstance(of, dict) else None
        if not isinstance(wrote, str):
            raise InputError(
                f"{folder / 'summary.json'} is damaged (no weights_sha256 of {name}): restore it, "
                "or move it away, and the same command writes it again"
            )
        if found != wrote:
            raise InputError(
                f"{folder / name} is not what the run wrote, whose weights_sha256 is in "
                "summary.json: move it away, and the same command writes it again"
            )
    return ""


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
    """All files below a folder, and links to no file or to a folder, without hidden folders.

    Links to folders are not followed, because they can lead in circles. A closed sub-folder is
    refused; Path.rglob would leave it out. Pipes, sockets and devices are left out: who opens a
    pipe waits for its writer.
    """

    def refuse(error: OSError) -> None:
        refuse_closed(option, Path(error.filename))
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (path for name in folders if (path := Path(parent, name)).is_symlink())
        for path in (Path(parent, name) for name in names):
            if path.is_file() or not path.exists():
                yield path
