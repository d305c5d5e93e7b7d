"""What `make bench` computes, and that it runs."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import network, snapshots
from benchmarks import step as options
from benchmarks.peers import compare as peers
from benchmarks.peers.measure import from_stamps, read_stamps, snapshot_step
from benchmarks.peers.task import (
    GLOBAL_BATCH_SIZE,
    STEPS_PER_EPOCH,
    Task,
    make_data,
    make_model,
    make_optimizer,
)
from common.errors import STATUS_FAILED, TrainingError
from common.launch.ranks import Ranks
from common.run.plan import make_plan
from common.training.optimizer import OptimizerOptions
from tests.helpers.commands import ROOT, Recipe
from tests.helpers.pool import Pool, in_group
from tools import bench
from tools.command import attempt


def stamps(steps_per_epoch: int, snapshot_after: int, boundary_s: float) -> list[float]:
    """Twenty steps of 0.1 s, the first after 102.5; 0.4 s more for the snapshot."""
    times = [102.5]
    for step in range(1, 20):
        interval = boundary_s if step % steps_per_epoch == 0 else 0.1
        times.append(times[-1] + interval + 0.4 * (step == snapshot_after))
    return times


@pytest.mark.parametrize("boundary_s", [0.1, 7.0, 100.0])
def test_what_happens_between_epochs_and_the_snapshot_are_no_steps(boundary_s: float) -> None:
    found = from_stamps(stamps(5, 8, boundary_s), 100.0, 5, 8)
    expected = {"start_up_s": 2.5, "steps_per_s": 10, "snapshot_s": 0.4, "boundary_s": boundary_s}
    assert found == pytest.approx(expected)


def test_one_epoch_has_no_boundary() -> None:
    assert from_stamps(stamps(20, 8, 7.0), 100.0, 20, 8)["boundary_s"] == 0


def test_the_snapshot_is_one_and_within_an_epoch() -> None:
    for steps in range(2 * STEPS_PER_EPOCH, 200):
        step = snapshot_step(steps, STEPS_PER_EPOCH)
        assert steps < 2 * step < 2 * steps  # --snapshot-every STEP saves after this step only
        assert step % STEPS_PER_EPOCH == STEPS_PER_EPOCH // 2


def test_a_run_of_other_steps_or_processes_is_refused(tmp_path: Path) -> None:
    for rank, peak_bytes in ((0, 10), (1, 30)):
        content = {"stamps": [1.0 + rank, 2.0], "peak_bytes": peak_bytes}
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(content))
    assert read_stamps(tmp_path, 2, 2) == ([1.0, 2.0], 30)
    for processes, steps in ((1, 2), (3, 2), (2, 3)):
        with pytest.raises(
            TrainingError, match=f"{steps} steps of {processes} processes were expected"
        ):
            read_stamps(tmp_path, processes, steps)


def test_the_peers_data_and_schedule_are_the_recipes(tmp_path: Path) -> None:
    train, val = make_data()
    assert (len(train) // GLOBAL_BATCH_SIZE, len(val)) == (STEPS_PER_EPOCH, 360)
    assert not set(train.indices) & set(val.indices)
    task, ours = Task(1, 30, 21, tmp_path), make_plan(OptimizerOptions(epochs=3), len(train), 1)
    model = make_model()
    optimizer, schedule = make_optimizer(model, task)
    for step in range(3 * STEPS_PER_EPOCH):
        rate = ours.lr(step)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        optimizer.step()
        schedule.step()


def test_a_contestant_that_fails_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "command_of", lambda *_: [sys.executable, "-c", "exit('broken')"])
    task = Task(2, 30, 21, tmp_path)
    assert attempt(lambda: print(peers.run_once("bare", task))) == STATUS_FAILED
    assert "bare on 2 processes ended with status 1: broken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "fabric"], "fabric needs no_such_library: make bench WHAT=peers installs it"),
        (["--steps", "20"], "--steps 28"),
        (["--redraw", "--output", "nowhere"], "nothing was measured yet"),
        (["--only", "keras"], "invalid choice: 'keras'"),
    ],
)
def test_bad_usage_is_one_line(
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(peers.NEEDS, "fabric", "no_such_library")
    assert bench.main(["peers", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line


@pytest.mark.parametrize("path", [*ROOT.glob("benchmarks/peers/results/peers.json")])
def test_the_page_shows_what_was_measured(path: Path) -> None:
    page, (begin, end) = (path.parents[1] / "README.md").read_text(), bench.marks("results")
    written = page.partition(begin)[2].partition(end)[0].strip()
    result = json.loads(path.read_text())
    assert written == bench.markdown(bench.on_page("peers", result), "peers")
    assert result["tables"] == peers.tables(result["runs"])


def test_a_page_shows_of_a_training_what_carries_its_message() -> None:
    epochs = [f"epoch {n}/3: val_accuracy 0.{n}" for n in (1, 2, 3)]
    table = ["", "  recipe  a", "  val_accuracy  0.3", "  val_total  9", "  weights_sha256  f00"]
    best = "  best  file best.pt, weights_sha256 ba2"
    run = {
        "started_by": "make run RECIPE=a",
        "printed": ["a: world_size 1", "output_dir: b", *epochs, *table, best],
        "manifest": {"gpu": "a GPU"},
    }
    shown = bench.shown(run).split("```")[1].strip().splitlines()
    rows = ["  val_accuracy  0.3", "  weights_sha256  f00"]
    assert shown == ["$ make run RECIPE=a", "...", *rows]
    no_training = {**run, "printed": ["ranks", "", "  0  here"]}
    shown = bench.shown(no_training).split("```")[1].strip().splitlines()
    assert shown == ["$ make run RECIPE=a", "ranks", "", "  0  here"]


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*/results/make_run.json")))
def test_what_a_page_shows_of_a_default_run_ends_in_its_hash(path: Path) -> None:
    run = json.loads(path.read_text())
    shown = bench.shown(run).split("```")[1].strip().splitlines()
    if run["summary"]:
        assert shown[-1].split() == ["weights_sha256", run["summary"]["weights_sha256"]]
        assert any(line.startswith("  val_") for line in shown)


def test_a_page_may_rename_columns_and_leave_them_out() -> None:
    table = {"title": "t", "columns": ["", "long name", "more"], "rows": [["a", 1, 2]]}
    shown = bench.renamed(table, {"long name": "n", "more": ""})
    assert shown == {"title": "t", "columns": ["", "n"], "rows": [["a", 1]]}


@pytest.mark.slow
def test_the_command_measures(recipe: Recipe, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.bench", "peers", "--rounds", "1", "--steps", "30"]
    chosen = ["--processes", "2", "--only", "bare", "ddp_launch"]
    folder = tmp_path / "out"
    process = recipe.start(*command, *chosen, "--output", folder)
    recipe.finish(process, tmp_path).assert_ok()
    result = json.loads((folder / "peers.json").read_text())
    (table,) = result["tables"]
    assert [row[0] for row in table["rows"]] == ["bare", "ddp_launch"]
    for runs in result["runs"]["2"].values():
        assert len(runs) == 1
        assert runs[0]["val_accuracy"] > 0.2  # it trained
    assert (folder / "peers.png").stat().st_size > 5000


def test_the_alpha_beta_model() -> None:
    """With two ranks all gradients cross each link once; without a limit only alpha is left."""
    assert network.step_s(0.1, 0.001, 1e6, None) == pytest.approx(0.102)
    assert network.step_s(0.1, 0.001, 1e6, 8e6) == pytest.approx(1.102)


def test_speeds_are_compared_within_a_round() -> None:
    run = {way: [100.0, 400.0, 200.0] for way in network.WAYS}
    run[network.DEFAULT] = [50.0, 400.0, 50.0]
    rows = network.measured({"model": {"link": run}}, 3)["rows"]
    shown = {row[2]: row[3:] for row in rows}
    assert shown[network.ALONE] == ["200", "2.00 (1.00 to 4.00)", "1"]
    assert shown[network.DEFAULT] == ["50", "1", "0.50 (0.25 to 1.00)"]


def gradients_of_one_number(ranks: Ranks) -> bool:
    """Whether each rank keeps its own gradients, though they are several buckets."""
    model = nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 400))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.1)
    ddp.register_comm_hook(None, network.one_number)
    inputs = torch.randn(4, 400, generator=torch.Generator().manual_seed(ranks.rank))
    own = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()))
    for _ in range(2):  # DDP rebuilds the buckets after the first step
        ddp.zero_grad()
        ddp(inputs).square().sum().backward()
    return all(
        p.grad is not None and torch.equal(p.grad, g)
        for p, g in zip(model.parameters(), own, strict=True)
    )


def test_one_number_averages_no_gradients(pool: Pool) -> None:
    assert pool.run(in_group, 2, gradients_of_one_number) == [True, True]


def test_windows_with_a_snapshot_and_without() -> None:
    steps_s = [1.0] * ((2 * 3 + 4) * snapshots.WINDOW - 1)
    for snapshot in range(40, len(steps_s), 40):
        steps_s[snapshot - 1] += 4  # from the end of this step to that of the next
    assert snapshots.windows(steps_s) == [(24, 20)] * 3


@pytest.mark.parametrize("part", [*bench.PARTS, *bench.ON_DEMAND])
def test_the_page_of_a_part_shows_what_was_measured(part: str) -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    begin, end = bench.marks(part)
    result = json.loads((ROOT / "benchmarks" / "results" / f"{part}.json").read_text())
    shown = page.partition(begin)[2].partition(end)[0].strip()
    assert shown == bench.markdown(bench.on_page(part, result), part)
    if part == "step":
        assert result["tables"] == [options.table(result["runs"], result["whole"], 5)]
    if part == "network":
        speeds, ends, *_ = result["tables"]
        assert speeds == network.measured(result["runs"], 5)
        assert ends == network.at_the_end(result["losses"])


def test_what_needs_root_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert bench.main([]) == 2
    assert "network needs root" in capsys.readouterr().err


def test_parts_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["nothing"]) == 2
    said = capsys.readouterr().err
    assert "no benchmark 'nothing': choose from step, input, snapshots, network" in said
    assert bench.main(["ddp_spawn"]) == 2
    assert "ddp_spawn has no comparison" in capsys.readouterr().err
