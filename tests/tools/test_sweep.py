"""A sweep trains each combination once, whatever ends it meanwhile."""

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from common.errors import InputError
from tests.helpers.commands import ROOT, Recipe, wait_for
from tests.helpers.machine import need
from tools import sweep


def words(recipe: Recipe, *more: str) -> list[str]:
    return [sys.executable, "-m", "recipes", "sweep", "ddp_launch", *more, "--output-dir", "out"]


def test_each_combination_is_a_run_and_the_same_command_trains_none_again(recipe: Recipe) -> None:
    need("make")
    make = ("make", "-C", ROOT, "sweep", f"PYTHON={sys.executable}", "RECIPE=ddp_launch", "NPROC=1")
    out = recipe.tmp_path / "out"
    given = ("OVER=--lr 0.001 0.1 --seed 1", f"ARGS=--max-steps 3 --output-dir {out}")
    result = recipe.finish(recipe.start(*make, *given), out).assert_ok()
    folders = [out / f"lr={lr},seed=1" for lr in ("0.1", "0.001")]
    assert sorted(path for path in out.iterdir() if path.is_dir()) == sorted(folders)
    found = {folder.name: json.loads((folder / "summary.json").read_text()) for folder in folders}
    assert len({each["weights_sha256"] for each in found.values()}) == 2
    table = [line.split()[0] for line in result.stdout.splitlines() if line.startswith(str(out))]
    reached = [found[Path(line).name]["val_accuracy"] for line in table[:-1]]
    assert reached == sorted(reached)
    assert (out / "sweep.png").exists()
    again = recipe.finish(recipe.start(*make, *given), out).assert_ok()
    assert again.stdout.count("already finished") == 2


def test_a_stopped_sweep_goes_on(recipe: Recipe) -> None:
    given = words(recipe, "--over", "--lr 0.1 0.001", "--nproc", "1", "--epochs", "100000")
    process = recipe.start(*given)
    first = recipe.tmp_path / "out/lr=0.1"
    wait_for(lambda: list(first.glob("snapshots/*.pt")))
    process.send_signal(signal.SIGTERM)
    result = recipe.finish(process, first)
    assert result.status == 75
    assert "stopped: 0 of 2 runs have finished; the same command goes on" in result.stderr
    assert json.loads((first / "status.json").read_text())["status"] == "stopped"
    second = recipe.tmp_path / "out/lr=0.001"
    assert not second.exists()
    (snapshot,) = sorted(first.glob("snapshots/*.pt"))[-1:]
    steps = int(re.findall(r"\d+", snapshot.name)[0])
    recipe.finish(recipe.start(*given, "--max-steps", str(steps + 1)), first).assert_ok()
    resumed = [json.loads((run / "summary.json").read_text()) for run in (first, second)]
    assert [each["resumed_from"] for each in resumed] == [steps, None]


@pytest.mark.slow
def test_a_run_that_fails_does_not_hold_up_the_others(recipe: Recipe) -> None:
    given = words(recipe, "--over", "--lr 1e30 0.1", "--nproc", "1", "--epochs", "1")
    result = recipe.finish(recipe.start(*given, "--at-once", "2"), recipe.tmp_path / "out")
    assert result.status == 1
    assert re.search("out/lr=1e30 ended with status 1: .*the loss is not finite", result.stderr)
    assert (recipe.tmp_path / "out/lr=0.1/summary.json").exists()


def test_a_wrong_value_is_refused_before_the_first_run(recipe: Recipe) -> None:
    given = words(recipe, "--over", "--lr 0.1 --epochs 1 -3")
    result = recipe.finish(recipe.start(*given), recipe.tmp_path / "out")
    assert result.status == 2
    assert not (recipe.tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("over", "says"),
    {
        "0.1 --lr": "begins with '0.1'",
        "--lr": "gives --lr no values",
        "--lr 0.1 --lr 0.2": "names --lr twice",
        "": "--over is empty",
        "--lr 0.1 0.1": "--over gives two runs lr=0.1",
        "--lr '0.1": "No closing quotation",
    }.items(),
)
def test_what_is_no_list_of_values_is_refused(over: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        sweep.combinations(over, tmp_path)


def test_runs_side_by_side_have_shares_of_the_gpus_or_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 5})
    assert sweep.shares(2) == [(None, {0, 2}), (None, {1, 5})]
    with pytest.raises(InputError, match="there are 4 CPU cores, so give 1 to 4"):
        sweep.shares(5)
    monkeypatch.setattr(sweep, "usable_gpus", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [gpus for gpus, _ in sweep.shares(2)] == ["0,2", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3")
    assert [gpus for gpus, _ in sweep.shares(3)] == ["7", "5", "3"]
    with pytest.raises(InputError, match="there are 3 GPUs"):
        sweep.shares(4)


@pytest.mark.slow
def test_two_runs_at_a_time_are_all_trained(recipe: Recipe) -> None:
    given = words(recipe, "--over", "--seed 0 1 2", "--nproc", "1", "--max-steps", "2")
    result = recipe.finish(recipe.start(*given, "--at-once", "2"), recipe.tmp_path).assert_ok()
    assert [f"run {n} of 3" in result.stderr for n in (1, 2, 3)] == [True] * 3
    folders = [recipe.tmp_path / f"out/seed={n}" for n in (0, 1, 2)]
    found = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert len({each["weights_sha256"] for each in found}) == 3
