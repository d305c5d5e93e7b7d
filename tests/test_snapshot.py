"""Snapshots are whole or not used, and never lost."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from common import snapshot
from common.errors import InputError, TrainingError
from common.ranks import Ranks
from tests.conftest import need, need_root
from tests.pool import in_group

IDENTITY = {"recipe": "test", "lr": 0.1}


def content(step: int, **changes: Any) -> dict[str, Any]:
    return {"format": snapshot.FORMAT, "identity": IDENTITY, "step": step, **changes}


def found(folder: Path, resume: str | Path = "auto", **identity: Any) -> Any:
    """What `find` gives to a run of one rank."""
    expected = {**IDENTITY, **identity}
    return in_group(Ranks(), lambda ranks: snapshot.find(resume, folder, expected))


def test_the_newest_is_found(tmp_path: Path) -> None:
    assert found(tmp_path) is None
    for step in (5, 40, 7):
        snapshot.write(tmp_path, step, content(step))
    assert found(tmp_path)["step"] == 40
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("fault", ["torn", "altered", "empty"])
def test_an_unsound_one_is_named_and_the_one_before_is_taken(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot.log, "propagate", True)
    snapshot.write(tmp_path, 1, content(1))
    newest = snapshot.write(tmp_path, 2, content(2))
    data = bytearray(newest.read_bytes())
    if fault == "altered":
        data[len(data) // 2] ^= 1
    newest.write_bytes({"torn": bytes(data[:-100]), "altered": bytes(data), "empty": b""}[fault])
    assert found(tmp_path)["step"] == 1
    assert newest.name in caplog.text
    assert newest.exists(), "the evidence stays"
    with pytest.raises(InputError, match="torn or altered"):
        found(tmp_path, resume=newest)


def test_only_unsound_ones_never_means_from_scratch(tmp_path: Path) -> None:
    snapshot.write(tmp_path, 1, content(1)).write_bytes(b"")
    with pytest.raises(InputError, match="none of the 1 snapshots"):
        found(tmp_path)


def test_a_leftover_of_a_killed_write_is_no_snapshot(tmp_path: Path) -> None:
    snapshot.write(tmp_path, 1, content(1))
    (tmp_path / "step_00000002.123.tmp").write_bytes(b"half")
    assert found(tmp_path)["step"] == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_another_run_is_refused_by_name(tmp_path: Path) -> None:
    snapshot.write(tmp_path, 1, content(1))
    with pytest.raises(InputError, match=r"lr 0\.1 there, 0\.2 here"):
        found(tmp_path, lr=0.2)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = snapshot.write(tmp_path, 1, content(1, format=99))
    with pytest.raises(InputError, match="format 99"):
        found(tmp_path, resume=path)


def test_never_does_not_write_over(tmp_path: Path) -> None:
    assert found(tmp_path, resume="never") is None
    snapshot.write(tmp_path, 1, content(1))
    with pytest.raises(InputError, match="holds snapshots"):
        found(tmp_path, resume="never")


def test_files_that_are_no_snapshots(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no file"):
        found(tmp_path, resume=tmp_path / "none")
    torch.save({}, tmp_path / "model.pt")
    with pytest.raises(InputError, match="not named like a snapshot"):
        found(tmp_path, resume=tmp_path / "model.pt")


def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path) -> None:
    need_root()
    need("mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
    try:
        good = snapshot.write(disk, 1, content(1))
        with pytest.raises(TrainingError, match="cannot write a snapshot"):
            snapshot.write(disk, 2, content(2, model=torch.zeros(200_000)))
        assert list(disk.iterdir()) == [good]
        assert found(disk)["step"] == 1
    finally:
        subprocess.run(["umount", disk], check=True)
