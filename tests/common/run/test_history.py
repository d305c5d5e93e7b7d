"""The time of a run over all its starts."""

import os
import signal
import time
from pathlib import Path

import pytest

from common.run.history import History, last_sign
from tests.helpers.commands import INJECTED, Recipe, wait_for


def test_what_came_after_the_snapshot_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    first = History(0.0)
    now = 1100.0
    kept = first.until_now({"start": 20.0, "compute": 70.0, "save": 10.0})
    # It trains until 1130, is killed, and starts again at 1200.
    now = 1200.0
    second = History(1130.0)
    second.go_on(kept)
    now = 1300.0
    found = second.summary({"start": 30.0, "data": 10.0, "compute": 50.0, "communication": 10.0})
    assert found["all_starts_s"] == {
        "compute": 120.0,
        "between": 70.0,
        "start": 50.0,
        "again": 30.0,
        "save": 10.0,
        "data": 10.0,
        "communication": 10.0,
    }
    assert sum(found["all_starts_s"].values()) == now - 1000
    assert found["goodput"] == round((120 + 10 + 10) / 300, 4)


def test_one_start_has_only_its_goodput(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", iter([0.0, 10.0]).__next__)
    spent_s = {"start": 5.0, "data": 1.0, "compute": 2.0, "communication": 0.0}
    assert History(0.0).summary(spent_s) == {"goodput": 0.3}


def test_a_clock_that_was_set_back_makes_no_share_above_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time", iter([1000.0, 10.0]).__next__)
    spent_s = {"start": 5.0, "data": 1.0, "compute": 2.0, "communication": 0.0}
    assert History(0.0).summary(spent_s) == {"goodput": 0.375}


def test_the_last_sign_is_that_of_the_metrics(tmp_path: Path) -> None:
    """A start that was refused has written a log, and lost no steps."""
    assert last_sign(tmp_path) == 0
    for name, changed in (("metrics.jsonl", 5), ("rank_0.log", 7)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (changed, changed))
    assert last_sign(tmp_path) == 5


def test_a_refused_start_is_no_lost_step_and_a_branch_has_no_history(recipe: Recipe) -> None:
    options = ["--nproc", "1", "--log-every", "1"]
    recipe("ddp_launch", *options, "--max-steps", "5", folder="run").assert_ok()
    begun_s = time.monotonic()
    refused = recipe("ddp_launch", *options, "--max-steps", "9", "--lr", "1", folder="run")
    refused_s = time.monotonic() - begun_s
    assert refused.status == 2
    on = recipe("ddp_launch", *options, "--max-steps", "9", folder="run").assert_ok()
    assert on.summary["all_starts_s"]["between"] >= refused_s
    assert on.summary["goodput"] < 1
    (snapshot,) = on.folder.glob("snapshots/step_00000005.*.pt")
    more = ["--max-steps", "9", "--resume", str(snapshot)]
    branch = recipe("ddp_launch", *options, *more, folder="branch").assert_ok()
    assert "all_starts_s" not in branch.summary


def test_a_killed_run_that_goes_on_accounts_for_all_its_time(recipe: Recipe) -> None:
    options = ["--nproc", "1", "--snapshot-every", "10", "--log-every", "1"]
    folder = recipe.tmp_path / "run"
    (recipe.tmp_path / "17").touch()  # a gate: the steps from 15 on are in no snapshot
    env = {**INJECTED, "GATES": str(recipe.tmp_path)}
    process = recipe.start(*recipe.command("ddp_launch", *options, "--epochs", "1000000"), env=env)

    def steps() -> int:
        file = folder / "metrics.jsonl"
        return file.read_text().count('"lr"') if file.exists() else 0

    wait_for(lambda: steps() > 16 and list(folder.glob("snapshots/step_00000014.*.pt")))
    process.kill()
    assert recipe.finish(process, folder).status == -signal.SIGKILL
    last_line = (folder / "metrics.jsonl").stat().st_mtime
    time.sleep(1.5)
    last = str(steps() + 20)
    result = recipe("ddp_launch", *options, "--epochs", "1000000", "--max-steps", last)
    summary = result.assert_ok().summary
    spent_s = summary["all_starts_s"]
    assert 1.5 <= spent_s["between"] <= time.time() - last_line
    assert spent_s["again"] > 0
    steps_s = sum(spent_s[kind] for kind in ("data", "compute", "communication"))
    assert sum(spent_s.values()) == pytest.approx(steps_s / summary["goodput"], rel=0.02)
    (own,) = summary["time_s"]["start"]
    assert spent_s["start"] > own, "both starts"
