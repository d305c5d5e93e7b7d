"""`reproduce`: its verdict on a run made again, and on runs that were changed."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import InputError
from common.trace import STEP, first_difference, read_traces
from tests.helpers.commands import ROOT, Recipe, Result
from tests.helpers.machine import need
from tools import reproduce

OPTIONS = ("--nproc", "1", "--epochs", "3", "--log-every", "5")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run."""
    runner = Recipe(tmp_path_factory.mktemp("recorded"))
    yield runner("ddp_launch", *OPTIONS).assert_ok().folder
    runner.stop()


def again(recipe: Recipe, run: Path, *options: str) -> Result:
    """`make reproduce`."""
    need("make")
    folder = recipe.tmp_path / "again"
    process = recipe.start(
        "make",
        "--no-print-directory",
        "-C",
        ROOT,
        "reproduce",
        f"PYTHON={sys.executable}",
        f"RUN={run}",
        f"ARGS={' '.join(options)} --output-dir {folder}",
    )
    result = recipe.finish(process, folder)
    assert not result.errors, result.stderr
    return result


def changed(recorded: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a run whose manifest says something else."""
    shutil.copytree(recorded, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_a_run_made_again_is_identical(recipe: Recipe, recorded: Path) -> None:
    done = again(recipe, recorded)
    assert done.status == 0
    assert "\nidentical (8 logged steps compared)\n" in done.stdout
    found = json.loads((done.folder / "reproduce.json").read_text())
    assert len(set(found["weights_sha256"])) == 1
    assert (done.folder / "reproduce.png").stat().st_size > 10_000


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "threads": (  # in fp64, which MKL multiplies: they cut its sums
        lambda manifest: (
            manifest["determinism"].update(cpu_threads=2),
            manifest.update(command=f"{manifest['command']} --precision fp64"),
        ),
        r"precision \(fp32, now fp64\), then cpu_threads \(1, now 2\), "
        r"then fingerprint.matrix product fp64 \(\w{8}, now \w{8}\)",
    ),
    "seed": (lambda manifest: manifest.update(seed=7), r"seed \(0, now 7\)"),
    "learning rate": (
        lambda manifest: manifest.update(command=f"{manifest['command']} --lr 0.2"),
        r"lr \(0\.1, now 0\.2\)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_what_was_changed_is_named(recipe: Recipe, recorded: Path, what: str) -> None:
    change, cause = CHANGES[what]
    done = again(recipe, changed(recorded, recipe.tmp_path / "changed", change))
    assert done.status == 2, "make's, for 1"
    assert "\ndifferent from step " in done.stdout
    assert re.search(rf"\nlikely cause: {cause}\n", done.stdout)


@pytest.mark.slow
def test_another_number_of_ranks_is_equal_within(recipe: Recipe, recorded: Path) -> None:
    done = again(recipe, recorded, "--nproc", "2")
    assert done.status == 0
    assert "\nequal within 0.001: the losses differ by " in done.stdout
    assert "\nlikely cause: world_size (1, now 2); with the number of processes" in done.stdout


def test_a_step_is_traced_and_the_first_operation_that_differs_is_named(
    recipe: Recipe, recorded: Path
) -> None:
    """The same kernels: nothing differs, and the trace changes no bit. Other kernels: which one?"""
    traced = again(recipe, recorded, "--trace-step", "5")
    assert traced.status == 0
    trace = traced.folder / "run" / "trace"
    assert f"{trace}: hashes of step 5; on another machine, give it with" in traced.stdout
    lines = (recorded / "metrics.jsonl").read_text().splitlines()
    assert (
        (traced.folder / "run" / "metrics.jsonl")
        .read_text()
        .startswith(re.sub(r', "(samples_per_s|time_).*', "", lines[0]))
    )
    theirs = trace.rename(recipe.tmp_path / "theirs")
    shutil.rmtree(traced.folder)
    same = again(recipe, recorded, "--trace-step", "5", "--against-trace", str(theirs))
    assert "\nidentical: every operation of step 5, on every rank\n" in same.stdout
    shutil.rmtree(traced.folder)
    other = changed(
        recorded,
        recipe.tmp_path / "other",
        lambda manifest: manifest.update(command=f"{manifest['command']} --lr 0.2"),
    )
    found = again(recipe, other, "--trace-step", "5", "--against-trace", str(theirs))
    assert found.status == 2, "make's, for 1"
    assert re.search(
        r"rank 0: the first difference of step 5 is in what operation \d+ of \d+, "
        r"aten.convolution.default in DistributedDataParallel.module.features.0, reads: weights",
        found.stdout,
    ), found.stdout


@pytest.mark.slow
def test_other_kernels_are_named_by_a_trace(recipe: Recipe, recorded: Path) -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("needs a CPU with AVX-512")
    best = changed(
        recorded,
        recipe.tmp_path / "best",
        lambda manifest: manifest.update(command=f"{manifest['command']} --no-portable"),
    )
    first = again(recipe, recorded, "--trace-step", "1").folder
    theirs = (first / "run" / "trace").rename(recipe.tmp_path / "first")
    shutil.rmtree(first)
    found = again(recipe, best, "--trace-step", "1", "--against-trace", str(theirs))
    assert re.search(r"step 1 is operation \d+ of \d+, aten.\S+ in \S+\n", found.stdout)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--trace-step 0", "--trace-step must be from 1 to 42, the run's last step, got 0"),
        ("--trace-step 43", "--trace-step must be from 1 to 42, the run's last step, got 43"),
        ("--against-trace {run}", "--against-trace needs --trace-step"),
        ("--trace-step 1 --against-trace {run}", "is no trace: it holds no rank_0.jsonl"),
        ("--trace-step 1 --against {run}", "--trace-step trains again, and --against does not"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_before_training(
    capsys: pytest.CaptureFixture[str], recorded: Path, options: str, says: str
) -> None:
    assert reproduce.main([str(recorded), *options.format(run=recorded).split()]) == 2
    assert says in capsys.readouterr().err


def test_two_traces_of_sharded_ranks_are_alike(recipe: Recipe) -> None:
    options = ("--nproc", "2", "--layers", "1", "--max-steps", "2")
    env = {STEP: "2"}
    runs = [recipe("fsdp", *options, folder=name, env=env).assert_ok().folder for name in "ab"]
    one, two = (dict(read_traces(run / "trace")) for run in runs)
    assert one.keys() == two.keys() == {0, 1}
    assert len(one[0]) > 50
    assert [first_difference(one[rank], two[rank]) for rank in one] == ["", ""]


def test_the_end_of_a_shorter_trace_is_a_difference() -> None:
    calls = [{"operation": "aten.mm.default", "module": "a.b", "reads": ["0"], "gives": ["1"]}] * 3
    assert first_difference(calls, calls) == ""
    assert first_difference(calls, calls[:2]) == "operation 3: one of the traces ends before it"
    other = [*calls[:2], {**calls[2], "gives": ["2"]}]
    assert first_difference(calls, other) == "operation 3 of 3, aten.mm.default in a.b"
    other[1] = {**calls[1], "operation": "aten.bmm.default"}
    words = "operation 2 of 3, aten.mm.default in a.b; there it is aten.bmm.default"
    assert first_difference(calls, other) == words


def run_of(
    folder: str, losses: dict[int, float], sha: str = "a", **more: Any
) -> reproduce.Recorded:
    """A run as it is read from its folder."""
    manifest = {
        "command": f"python -m recipes x {folder}",
        "seed": 0,
        "world_size": 1,
        "cpu": "A",
        "determinism": {"cpu_threads": 1},
        **more.get("manifest", {}),
    }
    usual = {"lr": 0.1, "output_dir": folder, "num_workers": 0, "portable": True}
    options = {**usual, **more.get("options", {})}
    summary = {"recipe": more.get("recipe", "ddp_launch"), "weights_sha256": sha}
    return reproduce.Recorded(Path(folder), manifest, options, summary, losses)


def test_verdicts() -> None:
    one = run_of("one", {5: 2.0, 10: 1.0})
    same = run_of("two", {5: 2.0, 10: 1.0}, options={"num_workers": 4}, manifest={"cpu": "B"})
    assert reproduce.compare(one, same, 0)["verdict"] == "identical"
    other_weights = run_of("two", {5: 2.0, 10: 1.0}, sha="b")
    assert reproduce.compare(one, other_weights, 0)["verdict"].startswith("equal within 0:")
    near = run_of("two", {5: 2.0, 10: 1.0001}, sha="b", manifest={"cpu": "B"})
    result = reproduce.compare(one, near, 1e-3)
    assert result["verdict"].startswith("equal within 0.001")
    assert reproduce.causes(result) == "likely cause: cpu (A, now B)"
    assert reproduce.compare(one, near, 1e-5)["verdict"].startswith("different from step 10 on")
    # Other options are another run, however near it comes.
    optioned = run_of("two", {5: 2.0, 10: 1.0001}, sha="b", options={"lr": 0.2})
    assert reproduce.compare(one, optioned, 1e-3)["verdict"].startswith("different from step 10 on")
    longer = run_of("two", {5: 2.0, 10: 1.0, 30: 0.5}, sha="b")
    longer.summary["steps"] = 30
    assert reproduce.compare(one, longer, 1e-3)["verdict"].startswith("different after step 10")
    unexplained = reproduce.compare(one, run_of("two", {5: 2.0, 10: 9.0}, sha="b"), 1e-3)
    assert "nothing that is recorded differs" in reproduce.causes(unexplained)
    with pytest.raises(InputError, match="no step in common"):
        reproduce.compare(one, run_of("two", {7: 1.0}), 0)


@pytest.mark.parametrize(
    "typed",
    [
        "python -m recipes x --nproc 4 --lr 0.1 --output-dir 'a b' --name x",
        "python -m recipes x --restarts 2 --shrink --lr 0.1 --name x",
        "python -P -m recipes.x.train --lr 0.1 --output_dir=c --name x --nnodes 2 --node-rank=1",
        "python recipes/x/train.py --seed 3 --lr 0.1 --resume auto --name x",
    ],
)
def test_the_command_again(typed: str) -> None:
    run = run_of("one", {}, recipe="x", manifest={"command": typed, "world_size": 4})
    common = "--lr 0.1 --name x --seed 0 --cpu-threads 1 --output-dir new --resume never".split()
    folder = Path("new")
    assert reproduce.command_again(run, "ranks", None, folder) == ["x", "--nproc", "4", *common]
    assert reproduce.command_again(run, "ranks", 2, folder) == ["x", "--nproc", "2", *common]
    assert reproduce.command_again(run, "one", None, folder) == ["x", *common]
    submitit = run_of("one", {}, manifest={"command": "python -m submitit.core._submit folder"})
    with pytest.raises(InputError, match="with --against"):
        reproduce.command_again(submitit, "ranks", None, folder)


def test_a_folder_that_is_no_finished_run_is_refused(recipe: Recipe, recorded: Path) -> None:
    unfinished = recipe.tmp_path / "unfinished"
    shutil.copytree(recorded, unfinished)
    (unfinished / "summary.json").unlink()
    with pytest.raises(InputError, match=r"no summary\.json: the run has not finished"):
        reproduce.read(unfinished)
    with pytest.raises(InputError, match=r"no manifest\.json"):
        reproduce.read(recipe.tmp_path)
