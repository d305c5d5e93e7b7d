"""`reproduce`: its verdict on a run made again, and on runs that were changed."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import InputError
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


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "seed": (lambda manifest: manifest.update(seed=7), "seed (0, now 7)"),
    "threads": (
        lambda manifest: manifest["determinism"].update(cpu_threads=2),
        "cpu_threads (1, now 2)",
    ),
    "learning rate": (
        lambda manifest: manifest.update(command=f"{manifest['command']} --lr 0.2"),
        "lr (0.1, now 0.2)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_what_was_changed_is_named(recipe: Recipe, recorded: Path, what: str) -> None:
    change, cause = CHANGES[what]
    done = again(recipe, changed(recorded, recipe.tmp_path / "changed", change))
    assert done.status == 2, "make's, for 1"
    assert "\ndifferent from step " in done.stdout
    assert f"\nlikely cause: {cause}\n" in done.stdout


@pytest.mark.slow
def test_another_number_of_ranks_is_equal_within(recipe: Recipe, recorded: Path) -> None:
    done = again(recipe, recorded, "--nproc", "2")
    assert done.status == 0
    assert "\nequal within 0.001: the losses differ by " in done.stdout
    assert "\nlikely cause: world_size (1, now 2); with the number of processes" in done.stdout


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
    options = {"lr": 0.1, "output_dir": folder, "num_workers": 0, **more.get("options", {})}
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
    common = [
        "--lr",
        "0.1",
        "--name",
        "x",
        "--seed",
        "0",
        "--cpu-threads",
        "1",
        "--output-dir",
        "new",
        "--resume",
        "never",
    ]
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
