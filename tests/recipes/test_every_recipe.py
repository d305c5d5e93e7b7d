"""Laws of the recipes of one process and of pipelines; each one's command line at the end."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from common.group import rendezvous
from common.launch.ranks import Ranks
from tests.helpers.commands import ROOT, Recipe
from tests.helpers.machine import free_port
from tests.helpers.pool import LONG_PATIENCE_S, Pool, call_main
from tests.helpers.run_folders import assert_record, summary
from tests.helpers.training import assert_refused

# All: interrupted and resumed, bad input, and the real command lines

SMALL = {
    "dp_resnet50": "--model resnet18 --global-batch-size 480 --epochs 2 --cpu-threads 1",
    "dp_scratch": "--devices cpu cpu cpu --no-lesson --global-batch-size 240 --epochs 2",
    "model_parallel_toy": "--epochs 2",
    "checkpoint_rnn": "--length 20 --train-samples 320 --val-samples 64 --epochs 2 --layers 2 "
    "--dropout 0.5 --segments 3",
    "fsdp": "--nproc 1 --context 512 --global-batch-size 64 --layers 1 --width 16 --epochs 1",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in ("dp_resnet50", "fsdp") else n for n in SMALL],
)
def test_interrupted_and_resumed_is_uninterrupted(pool: Pool, tmp_path: Path, name: str) -> None:
    def run(folder: str, *more: str) -> dict[str, Any]:
        arguments = [*SMALL[name].split(), *more, "--output-dir", str(tmp_path / folder)]
        ((status, _, said),) = pool.run(call_main, 1, name, arguments)
        assert status == 0, said
        return summary(tmp_path / folder)

    whole = run("whole")
    first = run("cut", "--max-steps", "3")
    cut = run("cut")
    assert (first["steps"], cut["resumed_from"]) == (3, 3)
    assert cut["weights_sha256"] == whole["weights_sha256"] != first["weights_sha256"]
    for key in ("val_loss", "val_correct"):  # fsdp counts no hits
        assert cut.get(key) == whole.get(key)
    weights = torch.load(tmp_path / "cut" / "model.pt", weights_only=True)
    assert weights
    assert not any(key.startswith("module.") for key in weights)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("model_parallel_toy", "--stages 3", "more than the 2 layers"),
        ("model_parallel_toy", "--schedule gpipe --stages 99", "2 layers of --model toy"),
        (
            "model_parallel_toy",
            "--schedule micro --micro-batches 5 --global-batch-size 96",
            "--micro-batches 5 does not divide a rank's batch of 96: give .* 95 or 100",
        ),
        ("model_parallel_toy", "--schedule split --micro-batches 2", "split has no micro-batches"),
        ("model_parallel_toy", "--schedule 1f1b --stages 4 --micro-batches 2", "at least as many"),
        ("model_parallel_toy", "--devices cuda:7 cpu", "cuda:7 is not there"),
        ("model_parallel_toy", "--devices cpu", "1 --devices for 2 --stages"),
        ("model_parallel_toy", "--devices cpu cpu --data-parallel 2", "leave it out with"),
        ("model_parallel_toy", "--nproc 2", "needs one process, whatever the number of devices"),
        ("model_parallel_toy", "--data-parallel 2 --nproc 4", "needs 2 processes"),
        ("model_parallel_toy", "--schedule gpipe --nproc 3", "needs 2 processes"),
        ("dp_scratch", "--devices cpu cpu --global-batch-size 1", "less than 2 devices"),
        ("dp_scratch", "--devices cuda:9", "cuda:9 is not there"),
        ("dp_scratch", "--image-size 8", "grey images of 28 px"),
        ("dp_resnet50", "--device-ids 0", "--device-ids cuda:0 is not there: .* sees no GPU"),
        ("dp_resnet50", "--nproc 2", "needs one process"),
        ("checkpoint_rnn", "--segments 401", "more than the 400 time steps"),
        ("checkpoint_rnn", "--segments 0", "--segments must be at least 1"),
        ("checkpoint_rnn", "--segments auto", "--memory-budget BYTES belong together"),
        pytest.param(
            *("checkpoint_rnn", "--length 8 --segments auto --memory-budget 9"),
            "any number of segments: give about",
            marks=pytest.mark.slow,
        ),
        ("checkpoint_rnn", "--segments some", "segments"),
        ("tune_loader", "--global-batch-size 5000", "more than the 1437 samples"),
        ("tune_loader", "--rounds 0", "--rounds must be at least 1"),
    ],
)
def test_options_that_cannot_work(
    pool: Pool, tmp_path: Path, name: str, options: str, says: str
) -> None:
    assert_refused(pool, says, *options.split(), "--output-dir", tmp_path / "run", name=name)


def as_two_tasks(ranks: Ranks, name: str) -> tuple[int, str, str]:
    """main() as a launcher of two processes would start it."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in (
            ("RANK", "0"),
            ("LOCAL_RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", str(free_port())),
        ):
            patch.setenv(variable, value)
        patch.setattr(rendezvous, "_REFUSAL_TIMEOUT_S", 1.0)  # the other task never comes
        return call_main(ranks, name, [])


def test_one_process_is_not_started_twice(pool: Pool) -> None:
    ((status, _, said),) = pool.run(as_two_tasks, 1, "checkpoint_rnn")
    assert status == 2
    assert "needs one process, but" in said
    assert "started 2" in said


def test_the_same_command_after_a_crash_before_the_first_snapshot(
    pool: Pool, tmp_path: Path
) -> None:
    arguments = [*SMALL["dp_scratch"].split(), "--max-steps", "2", "--output-dir", str(tmp_path)]
    assert pool.run(call_main, 1, "dp_scratch", arguments)[0][0] == 0
    first = summary(tmp_path)
    for left in (tmp_path / "summary.json", *(tmp_path / "snapshots").iterdir()):
        left.unlink()
    ((status, _, said),) = pool.run(call_main, 1, "dp_scratch", arguments)
    assert status == 0, said
    assert summary(tmp_path)["weights_sha256"] == first["weights_sha256"]


@pytest.mark.slow
def test_a_compiled_model_trains_alike_and_goes_on_to_the_bit(recipe: Recipe) -> None:
    """Its weights have the names of the model that was compiled."""
    options = "ddp_launch --nproc 2 --precision fp64 --log-every 1 --epochs 1".split()
    usual = recipe(*options, folder="usual").assert_ok()
    compiled = recipe.tmp_path / "compiled"
    env = {"TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    whole = recipe(*options, "--compile", folder="whole", env=env).assert_ok()
    assert whole.losses == pytest.approx(usual.losses, rel=1e-9)
    assert whole.summary["bits_hold_on"].startswith("this kind of CPU")
    assert "the same bits on this kind of CPU" in whole.stdout
    assert list(compiled.rglob("*.so")), "the compiler made it"
    names = [list(torch.load(r.folder / "model.pt", weights_only=True)) for r in (usual, whole)]
    assert names[0] == names[1]
    recipe(*options, "--compile", "--max-steps", "7", folder="cut", env=env).assert_ok()
    assert recipe(*options, "--compile", folder="cut", env=env).assert_ok().sha == whole.sha
    shards = "ddp_launch --virtual-ranks 2 --compile --dropout 0.3 --epochs 1".split()
    on = [recipe(*shards, "--nproc", n, folder=n, env=env).assert_ok().sha for n in ("1", "2")]
    assert on[0] == on[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("dp_scratch", "--epochs 1", marks=pytest.mark.by_hand),
        pytest.param("checkpoint_rnn", "--length 64 --hidden-size 8", marks=pytest.mark.by_hand),
        ("tune_loader", "--max-workers 1 --samples 64"),
    ],
)
def test_comparisons(recipe: Recipe, name: str, options: str) -> None:
    """Far too short for its figures to mean anything: that it measures, draws and tells."""
    folder = recipe.tmp_path / "results"
    command = [sys.executable, "-m", "tools.bench", name, *options.split()]
    process = recipe.start(*command, "--rounds", "1", "--output", folder)
    recipe.finish(process, recipe.tmp_path).assert_ok()
    found = json.loads((folder / "comparison.json").read_text())
    assert len(found["tables"][0]["rows"]) > 1
    assert found["about"]["torch"] == torch.__version__
    assert (folder / "comparison.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reaches"),
    [
        pytest.param("dp_resnet50", 0.93, marks=pytest.mark.by_hand),
        ("dp_scratch", 0.97),
        ("model_parallel_toy", 0.95),
        ("checkpoint_rnn", 0.6),
        ("tune_loader", None),
    ],
)
def test_make_run_with_its_defaults(recipe: Recipe, name: str, reaches: float | None) -> None:
    folder = recipe.tmp_path / "run"
    process = recipe.start(
        "make",
        "-s",
        "-C",
        ROOT,
        "run",
        f"RECIPE={name}",
        f"PYTHON={sys.executable}",
        f"ARGS=--output-dir {folder}",
    )
    result = recipe.finish(process, folder, LONG_PATIENCE_S).assert_ok()
    if reaches is None:
        assert "recommended: --num-workers" in result.stdout
        return
    assert "warning:" not in result.stdout + result.stderr
    result.assert_bits_of_the_record()
    assert f"{name}: world_size 1 (launcher: none), device cpu" in result.stdout
    assert result.summary["val_accuracy"] >= reaches
    assert_record(folder)
    if name == "checkpoint_rnn":
        assert result.summary["val_loss"] < 0.02, "predicting the mean gives 1/6"
    if name == "dp_resnet50":
        assert "replicates nothing" in result.stdout
        assert "32 of 32 predictions the same" in result.stdout
    if name == "dp_scratch":
        assert (folder / "diversity.json").is_file()
        assert "one sample copied: batch 1 0." in result.stdout
        lesson = json.loads((folder / "lesson.json").read_text())
        assert all(c["32"][-1] > c["512"][-1] + 0.1 for c in lesson.values())
        assert (folder / "lesson.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        ("dp_resnet50", "11aad6e6e7e01df63d7b74bc1945fd456918b65c883a73e100293e69941cc200"),
        ("fsdp", "446d1a0032e60c39547f15f1e8d6a70962f960714002aa6e14674878d7b11928"),
    ],
)
def test_two_steps_of_the_long_defaults_have_their_bits(
    recipe: Recipe, name: str, sha256: str
) -> None:
    recipe(name, "--max-steps", "2").assert_ok().assert_bits_of_the_record(sha256)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reaches"),
    [
        ("--seed 2", 0.6),
        pytest.param(
            *("--seed 0 --model resnet18 --lr 0.05 --weight-decay 5e-4", 0.93),
            marks=pytest.mark.by_hand,
        ),
    ],
)
def test_six_epochs_are_enough_to_learn(recipe: Recipe, options: str, reaches: float) -> None:
    """Where the initial weights were not torchvision's, these reached 0.50 and 0.81."""
    options = f"--epochs 6 {options}"
    result = recipe("ddp_launch", *options.split(), timeout_s=LONG_PATIENCE_S).assert_ok()
    assert result.summary["val_accuracy"] >= reaches


def test_a_recipe_without_divided_tensors_starts_without_them() -> None:
    """They import sympy: 30 % of the CPU time that importing a recipe took."""
    code = "import sys, recipes.ddp_launch.train; print('torch.distributed.tensor' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert found.stdout.strip() == b"False"
