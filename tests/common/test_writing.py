"""A file is whole, or the one before it stays; what cannot be written is named, with the fix."""

import errno
import os
import re
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat
from pathlib import Path

import pytest
import torch

from common.errors import TrainingError
from common.run.curves import Curves
from common.weights import save_weights
from common.writing import write_bytes, write_json, writing
from recipes.fsdp.parallel import whole_model
from tests.helpers.commands import Recipe
from tests.helpers.machine import need, need_root, small_disk
from tests.helpers.pool import Pool, in_group
from tests.helpers.run_folders import contents, train

WRITERS: dict[str, Callable[[Path, int], object]] = {
    "model.pt": lambda path, size: save_weights({"w": torch.zeros(size // 4)}, path),
    "summary.json": lambda path, size: write_json(path, ["x" * size]),
    "changes.diff": lambda path, size: write_bytes(path, b"x" * size),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_named_and_leaves_the_file_before(tmp_path: Path, name: str) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        WRITERS[name](disk / name, 40_000)
        before = contents(disk)
        says = rf"cannot write {disk / name} \(No space left on device\): make room, then run the "
        with pytest.raises(TrainingError, match=says):
            WRITERS[name](disk / name, 800_000)
        assert contents(disk) == before
        assert [path.name for path in disk.iterdir()] == [name], "no temporary file is left"
        WRITERS[name](disk / name, 40_000)


@pytest.mark.parametrize("says", ["can't start new thread", "unable to start watchdog thread"])
def test_a_thread_that_cannot_start_is_no_fault_of_the_file(tmp_path: Path, says: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{says}$"), writing(tmp_path / "logs"):
        raise RuntimeError(says)


def test_a_full_disk_while_a_sharded_model_is_gathered_is_named(pool: Pool, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        (said,) = pool.run(in_group, 1, _gather, disk)
        assert f"cannot write {disk}/whole.tmp (No space left on device): make room" in said
        assert not list(disk.iterdir())


def _gather(_ranks: object, folder: Path) -> str:
    with pytest.raises(TrainingError) as failed:
        whole_model(torch.nn.Linear(1000, 1000), folder)
    return str(failed.value)


def test_a_file_that_nobody_may_change_is_named(tmp_path: Path) -> None:
    need_root()
    need("chattr")
    file = tmp_path / "best.pt"
    file.touch()
    if subprocess.run(["chattr", "+i", file], capture_output=True).returncode:
        pytest.skip("needs a file system with chattr")
    try:
        with pytest.raises(TrainingError, match=r"best.pt \(Operation not permitted\): .*lsattr"):
            save_weights({}, file)
    finally:
        subprocess.run(["chattr", "-i", file], check=True)
    assert contents(tmp_path) == {"best.pt": b""}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_file_that_does_not_reach_the_disk_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(_file: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TrainingError, match=os.strerror(number)):
        write_json(tmp_path / "config.json", {})
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_when_a_run_begins_is_named(recipe: Recipe) -> None:
    with small_disk(recipe.tmp_path / "disk", "16k"):
        result = recipe("ddp_launch", "--nproc", "1", folder="disk")
        assert (result.status, len(result.errors)) == (1, 1), result.stderr
        says = r"cannot write \S+/disk/\w+\.json \(No space left on device\): make room, then run"
        assert re.search(says, result.errors[0])
        assert "Traceback" not in result.stderr
        assert not list(result.folder.glob("*.tmp"))


def test_curves_on_a_full_disk_fail_where_they_are_written(tmp_path: Path) -> None:
    """Not in a thread of a library, whose traceback would reach the terminal."""
    threads = threading.active_count()
    with small_disk(tmp_path / "disk", "64k") as disk:
        curves, point = Curves(disk, 0), {"loss": 1.0}
        with pytest.raises(OSError, match="No space left"):
            deque(map(curves.add, range(10_000), repeat(point)), maxlen=0)
        with suppress(OSError):
            curves.close()
        assert threading.active_count() == threads


def test_best_pt_that_cannot_be_written_is_named(pool: Pool, stopped: Path, tmp_path: Path) -> None:
    """The run resumes when it can."""
    folder = shutil.copytree(stopped, tmp_path / "run")
    before = (folder / "best.pt").read_bytes()
    (folder / "best.tmp").mkdir()
    status, said = train(pool, folder)
    assert (status, said.count("error:")) == (1, 1), said
    assert f"cannot write {folder}/best.pt (Is a directory): " in said
    assert "then run the same command to resume from the last snapshot" in said
    assert "Traceback" not in said
    assert (folder / "best.pt").read_bytes() == before
    (folder / "best.tmp").rmdir()
    status, said = train(pool, folder)
    assert status == 0, said
