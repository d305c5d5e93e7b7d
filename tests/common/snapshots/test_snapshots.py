"""Snapshots are whole or not used, and never lost."""

import copy
import errno
import os
import re
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common import log
from common.errors import InputError, PeerError, TrainingError
from common.launch.ranks import Ranks
from common.snapshots import snapshot_files
from common.snapshots import state as snapshot
from common.snapshots.state import TrainingState, refuse_non_finite
from tests.helpers.commands import wait_for
from tests.helpers.machine import small_disk
from tests.helpers.pool import PATIENCE_S, Pool, in_group
from tests.helpers.run_folders import Harmless

IDENTITY = {"recipe": "test", "lr": 0.1}


def content(step: int, **changes: Any) -> dict[str, Any]:
    own = {"format": snapshot_files.FORMAT, "identity": IDENTITY, "step": step}
    return {**own, "metrics_bytes": 0, "metrics_sha256": sha256(b"").hexdigest(), **changes}


def found(folder: Path, resume: str | Path = "auto", **identity: Any) -> Any:
    """What `find` gives to a run of one rank."""
    expected = {**IDENTITY, **identity}
    return in_group(Ranks(), lambda ranks: snapshot_files.find(resume, folder, expected))


def test_the_newest_is_found(tmp_path: Path) -> None:
    assert found(tmp_path) is None
    for step in (5, 40, 7):
        snapshot_files.write(tmp_path, step, content(step))
    assert found(tmp_path)["step"] == 40
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("fault", ["torn", "altered", "empty"])
def test_an_unsound_one_is_named_and_the_one_before_is_taken(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    snapshot_files.write(tmp_path, 1, content(1))
    newest = snapshot_files.write(tmp_path, 2, content(2))
    data = bytearray(newest.read_bytes())
    if fault == "altered":
        data[len(data) // 2] ^= 1
    newest.write_bytes({"torn": bytes(data[:-100]), "altered": bytes(data), "empty": b""}[fault])
    assert found(tmp_path)["step"] == 1
    assert newest.name in caplog.text
    assert newest.with_suffix(".unsound").exists(), "the evidence stays, and counts no more"
    assert [path.name[5:13] for path in snapshot_files.list_snapshots(tmp_path)] == ["00000001"]


def test_only_unsound_ones_never_means_from_scratch(tmp_path: Path) -> None:
    snapshot_files.write(tmp_path, 1, content(1)).write_bytes(b"")
    for _ in range(2):
        with pytest.raises(InputError, match="none of the 1 snapshots"):
            found(tmp_path)


def test_a_leftover_of_a_killed_write_is_no_snapshot(tmp_path: Path) -> None:
    snapshot_files.write(tmp_path, 1, content(1))
    (tmp_path / "step_00000002.123.tmp").write_bytes(b"half")
    assert found(tmp_path)["step"] == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_another_run_is_refused_by_name(tmp_path: Path) -> None:
    snapshot_files.write(tmp_path, 1, content(1))
    with pytest.raises(InputError, match=r"lr 0\.1 there, 0\.2 here"):
        found(tmp_path, lr=0.2)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = snapshot_files.write(tmp_path / "elsewhere", 1, content(1, format=99))
    with pytest.raises(InputError, match="format 99"):
        found(tmp_path, resume=path)


def test_a_named_file_starts_a_folder_that_then_goes_on_by_itself(tmp_path: Path) -> None:
    start = snapshot_files.write(tmp_path / "first", 3, content(3))
    own = tmp_path / "second"
    assert found(own, resume=start)["step"] == 3
    older, newest = (snapshot_files.write(own, step, content(step)) for step in (5, 9))
    assert found(own, resume=start)["step"] == 9, "the same command again goes on, not back"
    assert found(own, resume=newest)["step"] == 9
    with pytest.raises(InputError, match="to branch off"):
        found(own, resume=older)


def test_every_rank_must_train_on_the_same_data(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rank 1: this rank trains on other data"):
        pool.run(in_group, 2, find_by_rank, tmp_path)


def find_by_rank(ranks: Ranks, folder: Path) -> None:
    snapshot_files.find("auto", folder, {"data_fingerprint": f"of host {ranks.rank}"})


def test_never_does_not_write_over(tmp_path: Path) -> None:
    assert found(tmp_path, resume="never") is None
    snapshot_files.write(tmp_path, 1, content(1))
    with pytest.raises(InputError, match="holds snapshots"):
        found(tmp_path, resume="never")


def test_files_that_are_no_snapshots(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a file"):
        found(tmp_path, resume=tmp_path / "none")
    torch.save({}, tmp_path / "model.pt")
    with pytest.raises(InputError, match="not named like a snapshot"):
        found(tmp_path, resume=tmp_path / "model.pt")


def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        good = snapshot_files.write(disk, 1, content(1))
        with pytest.raises(TrainingError, match="cannot write a snapshot"):
            snapshot_files.write(disk, 2, content(2, model=torch.zeros(200_000)))
        assert list(disk.iterdir()) == [good]
        assert found(disk)["step"] == 1


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room within your quota"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EACCES, "get the right to write there"),
        (errno.EROFS, "mount the file system read-write"),
        (errno.EIO, "make the folder writable"),
    ],
)
def test_advice_is_by_the_number_of_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def fail(_file: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TrainingError, match=os.strerror(number)) as said:
        snapshot_files.write(tmp_path, 1, content(1))
    assert re.search(rf": [^:]*{advice}[^:]*, then run", str(said.value))


def test_a_crafted_snapshot_runs_no_code(tmp_path: Path) -> None:
    trace = tmp_path / "code ran"
    path = snapshot_files.write(tmp_path / "snapshots", 1, content(1, extra=Harmless(trace)))
    torch.load(path, weights_only=False)
    assert trace.exists(), "the crafted file does what it says where it is let"
    trace.unlink()
    with pytest.raises(InputError, match="could run code"):
        found(tmp_path, path)
    assert not trace.exists()


def test_training_goes_on_while_a_snapshot_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds what was there when it was asked for, and only one is written at a time."""
    go_on, began, write = threading.Event(), [], snapshot_files.write

    def slow_write(folder: Path, step: int, content: dict[str, Any]) -> Path:
        began.append(step)
        assert go_on.wait(PATIENCE_S)
        return write(folder, step, content)

    monkeypatch.setattr(snapshot, "write", slow_write)

    def train(_ranks: Ranks) -> None:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state = TrainingState({"model": model, "optimizer": optimizer}, torch.zeros(4))
        expected = {}
        for state.step in (1, 2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            state.loss_sum += 1
            expected[state.step] = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
            if state.step == 2:
                wait_for(lambda: began == [1])
                assert not snapshot_files.list_snapshots(tmp_path), "not yet written"
                go_on.set()
            state.save(tmp_path, {}, keep=5)
        with torch.no_grad():
            model.weight.zero_()
        state.next_epoch()
        state.wait()
        for path in snapshot_files.list_snapshots(tmp_path):
            found = snapshot_files.read(path)
            weights, momenta = expected[found["step"]]
            assert found["ranks"][0]["loss_sum"].tolist() == [found["step"]] * 4
            parts = found["parts"]
            assert torch.equal(parts["model"]["weight"], weights["weight"])
            theirs, ours = (o["state"][0]["momentum_buffer"] for o in (parts["optimizer"], momenta))
            assert torch.equal(theirs, ours)
        assert began == [1, 2]

    in_group(Ranks(), train)


def test_a_write_that_fails_is_told_to_every_rank(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(in_group, 2, _save_broken_weights, tmp_path):
        assert "weight is not finite after step 7" in said
    assert not list(tmp_path.iterdir())


def _save_broken_weights(_ranks: Ranks, folder: Path) -> str:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float("nan"))
    state = TrainingState({"model": model}, torch.zeros(()), step=7)
    state.save(folder, {}, keep=1)
    with pytest.raises((TrainingError, PeerError)) as failed:
        state.wait()
    return str(failed.value)


@pytest.mark.parametrize(
    ("what", "step", "advice"),
    [
        ("loss", 1, "before the first update: look for inputs and targets that are not finite"),
        ("loss", 2, "try a lower --lr"),
        (
            "val_loss, val_error",
            1,
            "try a lower --lr or --warmup-epochs, or look for validation samples that are not",
        ),
        ("val_error", 1, "look at the score function"),
    ],
)
def test_what_is_not_finite_is_blamed_on_what_can_have_caused_it(
    tmp_path: Path, what: str, step: int, advice: str
) -> None:
    with pytest.raises(TrainingError, match=f"the {what} is not finite .* step {step}: {advice}"):
        refuse_non_finite(torch.tensor([[float("nan")]]), step, tmp_path, what)


def test_an_old_snapshot_that_cannot_be_removed_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    files = [snapshot_files.write(tmp_path, step, content(step)) for step in (1, 2, 3)]

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    snapshot_files.keep_newest(tmp_path, 1)
    assert len(caplog.messages) == 2
    assert str(files[0]) in caplog.text
    assert "Operation not permitted" in caplog.text
