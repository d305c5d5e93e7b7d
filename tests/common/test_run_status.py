"""status.json tells how a run ended; a start that is refused changes nothing."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common import owner, run_status
from common.errors import InputError, TrainingError
from common.launch.report import show_cause
from tests.helpers.commands import Recipe, wait_for
from tests.helpers.pool import Pool
from tests.helpers.run_folders import contents, train

REFUSED = {
    "data": ("--data", "imagefolder", "--data-path", "/no/such/folder"),
    "snapshot": ("--resume", "/no/such/file.pt"),
}


def status(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "status.json").read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("before", ["nothing", "an empty folder", "a stopped run"])
@pytest.mark.parametrize("wrong", ["data", "snapshot"])
def test_a_refused_start_changes_nothing(
    pool: Pool, tmp_path: Path, wrong: str, before: str
) -> None:
    folder = tmp_path / "a" / "run"
    if before != "nothing":
        folder.mkdir(parents=True)
    if before == "a stopped run":
        for name, text in {
            ".lock": "",
            "config.json": '{"recipe": "ddp_launch"}',
            "status.json": '{"status": "stopped"}',
        }.items():
            (folder / name).write_text(text)
    held = contents(tmp_path)
    code, said = train(pool, folder, *REFUSED[wrong])
    assert code == 2, said
    after = contents(tmp_path)
    if before == "a stopped run":  # whose logs get the error
        assert not {name for name in after.keys() - held.keys() if "/logs/" not in name}
        assert {k: v for k, v in after.items() if k in held and "/.lock" not in k}.items() <= (
            held.items()
        )
    else:
        assert after == held
        assert folder.exists() == (before == "an empty folder")
        assert folder.parent.exists() == (before == "an empty folder")


def test_a_refused_start_of_two_ranks_leaves_nothing(recipe: Recipe) -> None:
    before = {*recipe.tmp_path.rglob("*")}
    result = recipe("ddp_launch", "--nproc", "2", *REFUSED["snapshot"], folder="a/run")
    assert (result.status, len(result.errors)) == (2, 1), result.stderr
    assert {*recipe.tmp_path.rglob("*")} == before


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Path]:
    """This process's start of a run, as rank 0."""
    run_status.claimed(tmp_path, [], writes=True)
    yield tmp_path
    run_status._start.clear()


def test_rank_0_tells_the_error_that_it_only_saw(start: Path) -> None:
    run_status.begun()
    (start / "logs").mkdir()
    earlier = "2026-01-02 03:05:00,000 ERROR error: an earlier start\n2026-01-02 03:05:59,000 "
    for rank, second, error in ((0, 2, "rank 1 is gone"), (1, 1, "a bug")):
        (start / "logs" / f"rank_{rank}.log").write_text(
            f"{earlier}INFO output_dir: {start}\n"
            f"2026-01-02 03:06:0{second},000 ERROR error: rank {rank}: {error}\nTraceback\n"
        )
    run_status.failed(RuntimeError(), "error: rank 0: rank 1 is gone")
    assert status(start) == {"status": "failed", "error": "error: rank 1: a bug"}


def test_a_refused_start_leaves_another_runs_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_held", [])
    with owner.lock(tmp_path) as locked:
        owner.own(tmp_path, locked)
        run_status.claimed(tmp_path, [tmp_path / ".lock"], writes=True)
        (tmp_path / ".lock").rename(tmp_path / "earlier")
        (tmp_path / ".lock").touch()  # another run's
        run_status.failed(InputError("no data"), "error: no data")
        assert (tmp_path / ".lock").exists()
    run_status._start.clear()
    os.close(owner._held[0].fd)


@pytest.mark.parametrize("held", ["finished", "stopped"])
def test_a_start_that_fails_before_it_begins_leaves_how_the_run_ended(
    start: Path, held: str
) -> None:
    (start / "status.json").write_text(json.dumps({"status": held}))
    run_status.failed(TrainingError("no data"), "error: no data")
    assert status(start) == {"status": held}


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("held", ["", "finished", "failed"])
def test_a_stop_before_the_first_step(start: Path, held: str, begun: bool) -> None:
    if held:
        (start / "status.json").write_text(json.dumps({"status": held}))
    if begun:
        run_status.begun()
    run_status.stopped_early()
    assert status(start)["status"] == (held if held and not begun else "stopped")


def test_a_start_of_a_new_run_that_fails_before_it_begins_says_so(start: Path) -> None:
    run_status.failed(TrainingError("no data"), "error: no data")
    assert status(start) == {"status": "failed", "error": "error: no data"}


def test_bad_input_that_is_found_late_is_told(start: Path) -> None:
    run_status.begun()
    run_status.failed(InputError("no such metric"), "error: no such metric")
    assert status(start)["error"] == "error: no such metric"


def test_nothing_is_written_after_the_end(start: Path) -> None:
    run_status.begun()
    run_status.say(run_status.FINISHED)
    run_status.failed(RuntimeError(), "error: while the process ended")
    assert status(start) == {"status": "finished"}


def killed(folder: Path, inode: int) -> int:
    """What the launcher does after rank 0 of a run in `folder` was killed."""
    errors = folder.parent / "errors"
    errors.write_text(json.dumps({"run": str(folder), "inode": inode}))
    return show_cause([(0, -signal.SIGKILL)], {}, errors)


@pytest.mark.parametrize(
    "now", ["as it was", "with another lock", "without its lock", "emptied", "owned", "finished"]
)
def test_the_launcher_tells_what_a_killed_rank_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], now: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with owner.lock(folder) as locked:
        inode = os.fstat(locked.fileno()).st_ino
    if now != "emptied":
        held = {"status": "finished" if now == "finished" else "running"}
        (folder / "status.json").write_text(json.dumps(held))
    if now == "without its lock":
        (folder / ".lock").unlink()
    before, other = contents(folder), os.fork() if now == "owned" else -1
    if other == 0:
        with owner.lock(folder):
            (tmp_path / "locked").touch()
            signal.pause()
    if other > 0:
        wait_for((tmp_path / "locked").exists)
        before = contents(folder)
    try:
        assert killed(folder, inode + (now == "with another lock")) == 1
    finally:
        if other > 0:
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)
    said = capsys.readouterr().err.strip().splitlines()[0]
    assert "was killed by SIGKILL" in said
    if now == "as it was":
        assert status(folder) == {"status": "failed", "error": said}
    else:
        assert contents(folder) == before
