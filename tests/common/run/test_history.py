"""`goodput`: the share of all the time since a run first began that made steps which count."""

import signal
import time

import pytest

from common.watch.clock import STEP
from tests.helpers.commands import INJECTED, Recipe, wait_for


def test_a_refused_start_and_a_branch_are_in_goodput(recipe: Recipe) -> None:
    options = ["--nproc", "1", "--log-every", "1"]
    once = recipe("ddp_launch", *options, "--max-steps", "5", folder="run").assert_ok().summary
    spent_s = {kind: own_s for kind, (own_s,) in once["time_s"].items()}
    share = sum(spent_s[kind] for kind in STEP) / sum(spent_s.values())
    assert once["goodput"] == pytest.approx(share, rel=0.1), "of one start, with its beginning"
    refused = recipe("ddp_launch", *options, "--max-steps", "9", "--lr", "1", folder="run")
    assert refused.status == 2
    on = recipe("ddp_launch", *options, "--max-steps", "9", folder="run").assert_ok()
    assert 0 < on.summary["goodput"] < 1
    (snapshot,) = on.folder.glob("snapshots/step_00000005.*.pt")
    more = ["--max-steps", "9", "--resume", str(snapshot)]
    branch = recipe("ddp_launch", *options, *more, folder="branch").assert_ok()
    assert 0 < branch.summary["goodput"] < 1


def test_a_killed_run_that_goes_on_accounts_for_all_its_time(recipe: Recipe) -> None:
    options = ["--nproc", "1", "--snapshot-every", "10", "--log-every", "1"]
    folder = recipe.tmp_path / "run"
    (recipe.tmp_path / "17").touch()  # a gate: the steps from 15 on are in no snapshot
    env = {**INJECTED, "GATES": str(recipe.tmp_path)}
    begun = time.time()
    process = recipe.start(*recipe.command("ddp_launch", *options, "--epochs", "1000000"), env=env)

    def steps() -> int:
        file = folder / "metrics.jsonl"
        return file.read_text().count('"lr"') if file.exists() else 0

    wait_for(lambda: steps() > 16 and list(folder.glob("snapshots/step_00000014.*.pt")))
    process.kill()
    assert recipe.finish(process, folder).status == -signal.SIGKILL
    time.sleep(1.5)
    last = str(steps() + 20)
    result = recipe("ddp_launch", *options, "--epochs", "1000000", "--max-steps", last)
    summary = result.assert_ok().summary
    of_last_start_s = sum(summary["time_s"][kind][0] for kind in STEP)
    whole_s = time.time() - begun
    assert of_last_start_s / whole_s < summary["goodput"] < 1 - 1.5 / whole_s
