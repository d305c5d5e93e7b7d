"""The best epoch's weights, clipped gradients and AdamW, and what a run says while it trains."""

import json
import math
import re
import shlex
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from common.errors import TrainingError
from common.launch.ranks import Ranks
from common.run import best, loop
from common.run.options import RunOptions
from common.snapshots import state
from common.snapshots.snapshot_files import list_snapshots, read
from common.throughput import gpu_use
from common.training.evaluation import Evaluation
from common.weights import save_weights, weights_sha256
from recipes.model_parallel_toy import train as parallel
from recipes.model_parallel_toy.split import ParallelOptions
from tests.helpers.commands import Recipe, Result
from tests.helpers.pool import Pool, call_main
from tests.helpers.training import run_training, training

EPOCHS = ("--nproc", "1", "--epochs", "3")
CLIPPED_ADAMW = ("--optimizer", "adamw", "--lr", "0.001", "--clip-grad-norm", "0.5")


def train(pool: Pool, folder: Path, *options: str) -> Result:
    """ddp_launch in one warm process."""
    arguments = [*EPOCHS, *options, "--output-dir", str(folder)]
    ((status, said, errors),) = pool.run(call_main, 1, "ddp_launch", arguments)
    return Result(status, said, errors, folder)


def values(run: Result, metric: str) -> list[float]:
    """A metric of every epoch."""
    return [line[metric] for line in run.metrics if metric in line]


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run that was never interrupted, whose second epoch is the most accurate."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run = train(pool, folder, "--epoch-weights").assert_ok()
    accuracies = values(run, "val_accuracy")
    assert accuracies[1] > max(accuracies[0], accuracies[2])
    return run


def test_the_best_epoch_is_kept_beside_the_last(whole: Result) -> None:
    accuracy = values(whole, "val_accuracy")[1]
    found = {k: v for k, v in whole.summary["best"].items() if k != "weights_sha256"}
    assert found == {"file": "best.pt", "epochs": 2, "val_accuracy": accuracy}
    best, second, last = (
        torch.load(whole.folder / name, weights_only=True)
        for name in ("best.pt", "weights/epoch_0001.pt", "model.pt")
    )
    assert weights_sha256(best) == weights_sha256(second) == whole.summary["best"]["weights_sha256"]
    assert not all(torch.equal(best[name], last[name]) for name in last)


@pytest.mark.parametrize("steps", [20, 28, 31])
def test_a_run_that_was_cut_ends_with_the_same_best(
    pool: Pool, tmp_path: Path, whole: Result, steps: int
) -> None:
    """Before, at and after the end of the best epoch; best.pt is then of a future that was lost."""
    train(pool, tmp_path, "--max-steps", str(steps)).assert_ok()
    (tmp_path / "best.pt").write_bytes(b"of an epoch that is trained again")
    run = train(pool, tmp_path).assert_ok()
    assert run.summary["resumed_from"] == steps
    assert run.summary["best"] == whole.summary["best"]
    assert (tmp_path / "best.pt").read_bytes() == (whole.folder / "best.pt").read_bytes()


def train_with_a_slow_disk(
    ranks: Ranks, options: list[str], fails: int = 0
) -> tuple[int, int, str]:
    """Exit status, how often best.pt was written, and errors, where one write may be enough.

    The loss seems not to be finite at step `fails`.
    """

    def refuse(_losses: Tensor, step: int, *_: Any) -> None:
        if step == fails:
            raise TrainingError("not finite")

    written = []

    def save(weights: dict[str, Tensor], path: Path) -> None:
        written.append(path.name)
        assert threading.current_thread() is not threading.main_thread(), "training waits for it"
        save_weights(weights, path)

    with ExitStack() as patches:
        for of, name, value in (
            (best, "save_weights", save),
            (best, "WRITING", 1e-9),
            (state, "refuse_non_finite", refuse),
        ):
            patches.enter_context(mock.patch.object(of, name, value))
        status, _, said = call_main(ranks, "ddp_launch", options)
    return status, written.count("best.pt"), said


def test_best_pt_is_written_seldom_where_that_takes_long(
    pool: Pool, tmp_path: Path, whole: Result
) -> None:
    """At first and at the end, also at that of a run that is stopped and goes on, or fails."""
    options = ["--nproc", "1", "--epochs", "3", "--best-by", "val_loss"]
    options += ["--output-dir", str(tmp_path)]
    for epochs in (2, 3):
        cut = [*options, "--max-steps", str(14 * epochs)]
        ((status, times, said),) = pool.run(train_with_a_slow_disk, 1, cut)
        assert (status, times) == (0, 2), said
        name = f"weights/epoch_{epochs - 1:04d}.pt"
        kept, expected = (
            torch.load(folder / file, weights_only=True)
            for folder, file in ((tmp_path, "best.pt"), (whole.folder, name))
        )
        assert weights_sha256(kept) == weights_sha256(expected), f"of epoch {epochs}"
    failing = [*options[:-1], str(tmp_path / "fails")]
    ((status, times, said),) = pool.run(train_with_a_slow_disk, 1, failing, 42)
    assert (status, times) == (1, 2), said
    kept = torch.load(tmp_path / "fails" / "best.pt", weights_only=True)
    second = torch.load(whole.folder / "weights" / "epoch_0001.pt", weights_only=True)
    assert weights_sha256(kept) == weights_sha256(second)


def test_the_metric_that_is_not_finite_is_named() -> None:
    """Not the loss beside it."""
    found = Evaluation({"loss": 1.0, "error_px": float("nan"), "f1": float("inf")}, total=3)
    assert found.not_finite == ["error_px", "f1"]


def train_with_a_metric(ranks: Ranks, name: str, folder: Path) -> tuple[int, str, str]:
    """ddp_launch, whose evaluation has one more metric of that name."""
    recipe = import_module("recipes.ddp_launch.train")
    own = recipe.evaluate

    def evaluate(*given: Any) -> Evaluation:
        found: Evaluation = own(*given)
        return replace(found, means={name: found.means["loss"], **found.means})

    with mock.patch.object(recipe, "evaluate", evaluate):
        options = ["--nproc", "1", "--max-steps", "1", "--output-dir", str(folder)]
        return call_main(ranks, "ddp_launch", options)


def test_names_of_metrics_stay_in_their_line(pool: Pool, tmp_path: Path) -> None:
    ((status, told, said),) = pool.run(train_with_a_metric, 1, "a\nerror: \x1b[2J", tmp_path)
    assert status == 0, said
    assert told.count(r"val_a\nerror: \x1b[2J ") == 2, "of the epoch and of the summary"
    assert "\x1b" not in told
    assert not [line for line in told.splitlines() if line.startswith("error:")]


def test_the_metric_is_chosen_by_name(pool: Pool, tmp_path: Path, whole: Result) -> None:
    run = train(pool, tmp_path / "run", "--best-by", "val_acc")
    assert run.status == 1
    assert "val_acc is no metric of this run: give train_loss, val_loss" in run.errors[0]
    run = train(pool, tmp_path / "run", "--best-by", "val_loss").assert_ok()
    losses = values(whole, "val_loss")
    best = {k: v for k, v in run.summary["best"].items() if k != "weights_sha256"}
    assert best == {"file": "best.pt", "epochs": 3, "val_loss": min(losses)}
    assert losses.index(min(losses)) == 2, "the lowest"
    run = train(pool, tmp_path / "none", "--max-steps", "1", "--best-by", "none").assert_ok()
    assert "best" not in run.summary
    assert not (tmp_path / "none" / "best.pt").exists()


def test_top_5_of_more_than_five_classes(pool: Pool, tmp_path: Path, whole: Result) -> None:
    for accuracy, top5 in zip(
        values(whole, "val_accuracy"), values(whole, "val_top5"), strict=True
    ):
        assert accuracy < top5 <= 1
    arguments = ["--epochs", "1", "--output-dir", str(tmp_path)]
    assert pool.run(call_main, 1, "model_parallel_toy", arguments)[0][0] == 0
    summary = Result(0, "", "", tmp_path).summary
    assert "val_top5" not in summary, "the toy has five classes"
    assert "val_accuracy" in summary


def test_a_finished_run_is_trained_further_in_a_new_folder(
    pool: Pool, tmp_path: Path, whole: Result
) -> None:
    model = f"--weights {whole.folder / 'model.pt'} and another --output-dir"
    assert model in train(pool, whole.folder, "--epoch-weights").stdout
    assert model in train(pool, whole.folder, "--epochs", "4").errors[0]
    further = train(pool, tmp_path, "--weights", str(whole.folder / "model.pt")).assert_ok()
    assert "left out: none" in further.stdout
    of_first_epoch = [values(run, "train_loss")[0] for run in (further, whole)]
    assert of_first_epoch[0] < of_first_epoch[1], "it goes on from what was learned"
    assert further.summary["resumed_from"] is None


def test_clipped_adamw_is_in_the_snapshots(pool: Pool, tmp_path: Path) -> None:
    whole = train(pool, tmp_path / "whole", *CLIPPED_ADAMW).assert_ok()
    train(pool, tmp_path / "cut", *CLIPPED_ADAMW, "--max-steps", "17").assert_ok()
    state = read(list_snapshots(tmp_path / "cut" / "snapshots")[0])["parts"]["optimizer"]["state"]
    assert all(entry["step"] == 17 and entry["exp_avg_sq"].any() for entry in state.values())
    assert train(pool, tmp_path / "cut", *CLIPPED_ADAMW).assert_ok().sha == whole.sha
    unclipped = train(pool, tmp_path / "unclipped", *CLIPPED_ADAMW[:4]).assert_ok()
    assert unclipped.sha != whole.sha
    high = train(pool, tmp_path / "high", "--optimizer", "adamw", "--max-steps", "1")
    assert "--lr 0.1 is high for adamw" in high.stdout


@pytest.mark.slow
def test_clipped_gradients_are_the_same_on_one_and_three_ranks(pool: Pool, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "run": {"precision": "fp64", "log_every": 1},
        "optimizer": {"epochs": 1, "clip_grad_norm": 0.5},
    }
    one, three = (training(pool, n, tmp_path / str(n), **options).losses for n in (1, 3))
    assert one == pytest.approx(three, rel=1e-9)
    options["optimizer"]["clip_grad_norm"] = None
    unclipped = training(pool, 1, tmp_path / "unclipped", **options).losses
    assert unclipped != pytest.approx(one, rel=1e-3)


@pytest.mark.slow
def test_gradients_are_clipped_without_the_loss_scalers_factor(pool: Pool, tmp_path: Path) -> None:
    """With the factor in it, every norm would be far above the limit."""
    losses = {}
    for precision in ("fp32", "fp16"):
        run: dict[str, Any] = {"precision": precision, "log_every": 1}
        optimizer: dict[str, Any] = {"epochs": 1, "clip_grad_norm": 1.0}
        folder = tmp_path / precision
        losses[precision] = training(pool, 1, folder, run=run, optimizer=optimizer).losses
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=1e-2)
    assert losses["fp32"][14] < 0.99 * losses["fp32"][1], "it learns"


def train_stages(
    ranks: Ranks, folder: Path, schedule: Literal["split", "gpipe"], clip_grad_norm: float
) -> None:
    """model_parallel_toy in fp64, as one rank."""
    default = parallel.Config()
    optimizer = replace(default.optimizer, epochs=1, clip_grad_norm=clip_grad_norm)
    config = parallel.Config(
        run=RunOptions(output_dir=folder, precision="fp64", log_every=1),
        optimizer=optimizer,
        parallel=ParallelOptions(schedule=schedule, timeline=False),
    )
    parallel.train(config, ranks)


def test_the_norm_is_of_the_whole_model_also_where_each_rank_holds_a_stage(
    pool: Pool, tmp_path: Path
) -> None:
    losses = {}
    for schedule, world_size in {"split": 1, "gpipe": 2}.items():
        for clip_grad_norm in (0.05, 1e9):
            folder = tmp_path / f"{schedule}{clip_grad_norm}"
            pool.run(train_stages, world_size, folder, schedule, clip_grad_norm)
            losses[schedule, clip_grad_norm] = Result(0, "", "", folder).losses
    assert losses["gpipe", 0.05] == pytest.approx(losses["split", 0.05], rel=1e-9)
    assert losses["gpipe", 0.05] != pytest.approx(losses["gpipe", 1e9], rel=1e-2)


NEAREST = "batch size 95 (default 96, the nearest multiple of 5), steps per epoch: "


@pytest.mark.slow
def test_the_default_batch_is_shared_by_five_processes(recipe: Recipe) -> None:
    result = recipe("ddp_launch", "--nproc", "5", "--max-steps", "1").assert_ok()
    assert NEAREST in result.stdout
    config = json.loads((result.folder / "config.json").read_text())
    assert config["global_batch_size"] == 95


def test_the_default_batch_is_cut_into_five_parts(pool: Pool, tmp_path: Path) -> None:
    options = ["--schedule", "micro", "--micro-batches", "5", "--max-steps", "1"]
    arguments = [*options, "--output-dir", str(tmp_path)]
    ((status, said, errors),) = pool.run(call_main, 1, "model_parallel_toy", arguments)
    assert status == 0, errors
    assert NEAREST in said
    assert json.loads((tmp_path / "config.json").read_text())["global_batch_size"] == 95


def test_what_a_run_says_at_once(recipe: Recipe) -> None:
    """With both streams in one pipe, as in `2>&1 | tee log`."""
    options = ("--nproc", "1", "--max-steps", "1", "--freeze-layers", "--scale-lr", "256")
    command = recipe.command("ddp_launch", *options)
    script = f"{shlex.join(command)} 2>&1 | cat"
    result = recipe.finish(recipe.start("bash", "-c", script), recipe.tmp_path / "run")
    lines = result.stdout.splitlines()
    for line in (
        f"output_dir: {result.folder}",
        "each epoch leaves out 93 of 1,437 samples: they fill no batch",
        "warning: --freeze-layers without --weights: all layers but the last stay random",
    ):
        assert lines.count(line) == 1, result.stdout
    assert lines.index(f"output_dir: {result.folder}") < 3, "in the first lines"
    assert "warning: --scale-lr without --warmup-epochs: training begins with" in result.stdout
    assert len([line for line in lines if line.startswith("epoch 1/30: train_loss")]) == 1
    assert not [line for line in lines if "step/s]" in line and "train_loss" in line]
    assert "samples_per_s" not in result.summary, "one step starts the clock and ends"


def test_a_run_shorter_than_log_every_has_curves(pool: Pool, tmp_path: Path) -> None:
    run = train(pool, tmp_path, "--max-steps", "6").assert_ok()
    assert list(run.losses) == [1, 2, 3, 4, 5, 6]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in events.Scalars("train_loss")] == [
        pytest.approx(run.summary["train_loss"])
    ]
    assert "samples_per_s" not in run.metrics[0]
    assert "samples_per_s" in run.metrics[1]


def train_with_a_driver(ranks: Ranks, folder: Path) -> None:
    """ddp_launch as one rank, with a driver that tells each rank something else."""
    told = torch.tensor([40.0 + 20 * ranks.rank, math.nan, 1e9])
    with mock.patch.object(loop, "gpu_use", return_value=told):
        options = {"run": {"log_every": 2}, "optimizer": {"max_steps": 4}}
        run_training(ranks, folder, options)


def test_the_use_of_gpus_is_in_the_metrics_where_the_driver_tells(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, gpus = torch.device("cpu"), [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(torch.cuda, "utilization", lambda gpu: 30 + 40 * gpu.index)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: 250_000)  # mW
    monkeypatch.setattr(
        torch.cuda, "device_memory_used", mock.Mock(side_effect=ModuleNotFoundError)
    )
    assert gpu_use(gpus).tolist() == pytest.approx([50, 250, math.nan], nan_ok=True)
    assert gpu_use([cpu]).isnan().all()

    pool.run(train_with_a_driver, 2, tmp_path)
    run = Result(0, "", "", tmp_path)
    assert values(run, "gpu_utilization_percent") == [50, 50]
    assert values(run, "gpu_memory_used_bytes") == [1e9, 1e9]
    assert "gpu_power_w" not in (tmp_path / "metrics.jsonl").read_text()


def test_bars_on_a_terminal_leave_every_line_whole(recipe: Recipe) -> None:
    command = shlex.join(recipe.command("ddp_launch", "--nproc", "1", "--epochs", "2"))
    script = ["bash", "-c", f"stty cols 100; {command}"]
    process = recipe.start(sys.executable, "-c", f"import pty; pty.spawn({script!r})")
    said = recipe.finish(process, recipe.tmp_path / "run").stdout
    assert re.search(r"epoch 2/2: +\d+%.* loss \d\.\d+, mean \d\.\d+\]", said), said
    assert re.search(r"evaluation: +\d+%", said)
    for line in said.splitlines():
        shown = line.split("\r")[-1]
        assert not ("train_loss" in shown and "step/s" in shown), line
