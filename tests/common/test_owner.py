"""A run writes only into its own folder, also after the folder was removed, moved or replaced."""

import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from common import owner, restart
from common.errors import InputError, TrainingError
from common.figure import save_figure
from common.owner import lock, mark, own, refuse_lost
from common.run.claim import claim
from common.snapshots.snapshot_files import keep_newest, list_snapshots, write
from common.watch.record import Watch
from common.weights import save_weights
from common.writing import publish, write_bytes, write_json
from tests.helpers.commands import Recipe, of_session, wait_for
from tests.helpers.pool import Pool, call_main
from tests.helpers.run_folders import LONG, LOST, contents, made_anew, moved


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run's folder, owned by this process."""
    path = tmp_path / "run"
    path.mkdir()
    with lock(path) as locked, (path / "metrics.jsonl").open("w") as metrics:
        own(path, locked)
        mark("metrics.jsonl", os.fstat(metrics.fileno()))
        yield path
    owner._held.clear()


WRITERS: dict[str, Callable[[Path], object]] = {
    "a record": lambda run: write_json(run / "config.json", {}),
    "changes.diff": lambda run: write_bytes(run / "changes.diff", b""),
    "best.pt": lambda run: save_weights({}, run / "best.pt"),
    "weights of an epoch": lambda run: save_weights({}, run / "weights" / "epoch_0000.pt"),
    "a snapshot": lambda run: write(run / "snapshots", 7, {}),
    "a shard": lambda run: write(run / "snapshots", 7, {}, rank=1),
    "the removal of old snapshots": lambda run: keep_newest(run / "snapshots", 0),
    "a figure": lambda run: save_figure(run / "lesson.png", lambda axes: None),
}


@pytest.mark.parametrize("what", WRITERS)
def test_what_writes_into_a_folder_that_was_made_anew(folder: Path, what: str) -> None:
    made_anew(folder)
    write(folder.parent / "of another run", 1, {})
    (folder.parent / "of another run").rename(folder / "snapshots")
    before = contents(folder)
    with pytest.raises(TrainingError, match="another one is in its place"):
        WRITERS[what](folder)
    assert contents(folder) == before
    assert len(before) == 2
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("how", LOST)
def test_a_lost_folder_is_named_and_not_made_again(folder: Path, how: str) -> None:
    lose, says = LOST[how]
    write_json(folder / "config.json", {})
    write_json(folder.parent / "not in the run's folder.json", {})
    lose(folder)
    before = contents(folder.parent)
    for write_it in WRITERS.values():
        with pytest.raises(TrainingError, match=says):
            write_it(folder)
    assert contents(folder.parent) == before
    write_json(folder.parent / "not in the run's folder.json", {})


def test_a_folder_that_is_replaced_while_a_file_is_written_does_not_get_it(folder: Path) -> None:
    """Not even if it is replaced after the last look: the file is renamed in the open folder."""

    def replaced(file: IO[bytes]) -> str:
        moved(folder)
        folder.mkdir()
        (folder / "model.tmp").write_bytes(b"of another run")
        return "model.pt"

    def write_it() -> None:
        publish(folder, "model.tmp", lambda file: file.write(b"ours"), replaced)

    elsewhere = folder.with_name("elsewhere")
    with pytest.raises(TrainingError, match="was moved to"):
        write_it()
    assert contents(folder) == {"model.tmp": b"of another run"}
    assert contents(elsewhere).keys() == {".lock", "metrics.jsonl"}
    shutil.rmtree(folder)
    elsewhere.rename(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.writing.refuse_lost", lambda _: None)
        write_it()
    assert contents(folder) == {"model.tmp": b"of another run"}
    assert contents(elsewhere).keys() == {".lock", "metrics.jsonl", "model.pt"}


def test_the_record_of_another_runs_rank_is_not_removed(folder: Path) -> None:
    (folder / "logs").mkdir()
    watch = Watch(folder / "logs", 0, {}, 60.0, lambda: 0)
    made_anew(folder)
    (folder / "logs").mkdir()
    (folder / "logs" / "rank_0.json").write_text("of another run")
    watch.end(keep=False)
    assert (folder / "logs" / "rank_0.json").read_text() == "of another run"


def test_a_rank_on_another_file_system_writes_into_a_folder_without_a_lock(tmp_path: Path) -> None:
    here = own(tmp_path)
    refuse_lost(tmp_path / "logs")
    (here / "name").touch()
    assert (tmp_path / "name").exists()
    owner._held.clear()


def test_a_lock_that_is_replaced_while_a_run_waits_for_it_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took: list[int] = []

    def late(file: IO[str], how: int, take: Any = fcntl.lockf) -> None:
        if not took:
            (tmp_path / ".lock").rename(tmp_path / "old")
        took.append(how)
        take(file, how)

    monkeypatch.setattr(fcntl, "lockf", late)
    with lock(tmp_path) as file:
        assert os.path.samestat(os.fstat(file.fileno()), (tmp_path / ".lock").stat())
    assert len(took) == 2


def test_a_restart_does_not_begin_in_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "run"
    monkeypatch.setattr(restart, "reached", lambda: restart.Reached(str(gone), 7))
    with pytest.raises(InputError, match="removed or moved, and a restart does not make it again"):
        claim(gone, "ddp_launch")
    assert not gone.exists()


def test_a_stopped_run_whose_folder_another_run_took_touches_nothing_and_resumes_elsewhere(
    recipe: Recipe, pool: Pool
) -> None:
    run, elsewhere = recipe.tmp_path / "run", recipe.tmp_path / "elsewhere"
    first = recipe.start(*recipe.command("ddp_launch", "--nproc", "2", *LONG))
    wait_for(lambda: list_snapshots(run / "snapshots"))
    os.killpg(first.pid, signal.SIGSTOP)
    run.rename(elsewhere)
    options = ["--nproc", "1", "--max-steps", "3", "--output-dir", str(run)]
    ((status, _, said),) = pool.run(call_main, 1, "ddp_launch", options)
    assert status == 0, said
    before = contents(run)
    os.killpg(first.pid, signal.SIGCONT)
    result = recipe.finish(first, run)
    assert (result.status, len(result.errors)) == (1, 1), result.stderr
    assert f"{run} was moved to {elsewhere} while this run wrote into it" in result.errors[0]
    assert "Traceback" not in result.stderr
    assert contents(run) == before
    newest = int(list_snapshots(elsewhere / "snapshots")[0].name[5:13])
    options = [*LONG, "--max-steps", str(newest + 1), "--nproc", "1"]
    options += ["--output-dir", str(elsewhere)]  # as the message says
    ((status, _, said),) = pool.run(call_main, 1, "ddp_launch", options)
    assert status == 0, said
    assert json.loads((elsewhere / "summary.json").read_text())["resumed_from"] == newest


@pytest.mark.slow
def test_every_rank_of_a_sharded_run_notices_that_the_folder_is_another(recipe: Recipe) -> None:
    run = recipe.tmp_path / "run"
    options = ("--nproc", "2", "--epochs", "20000", "--snapshot-every", "1")
    process = recipe.start(*recipe.command("fsdp", *options))
    wait_for(lambda: list_snapshots(run / "snapshots"))
    os.killpg(process.pid, signal.SIGSTOP)
    # A write that has begun goes on for a moment.
    wait_for(lambda: all(") T " in line for line in of_session(process.pid)))
    made_anew(run)
    before = contents(run)
    os.killpg(process.pid, signal.SIGCONT)
    result = recipe.finish(process, run)
    assert (result.status, len(result.errors)) == (1, 1), result.stderr
    assert "another one is in its place" in result.errors[0]
    assert contents(run) == before
