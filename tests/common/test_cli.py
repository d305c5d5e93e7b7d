"""What a command line says before its recipe runs."""

import re
import sys
from pathlib import Path

import pytest

import recipes
from common import cli
from common.launch import ranks
from recipes.ddp_launch import train as ddp_launch
from tests.helpers.commands import Recipe

SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n1",
}


@pytest.mark.parametrize(
    ("gpus", "tasks", "device", "says"),
    [
        ("4", 1, "auto", "Slurm gave 4 GPUs of this node to this job step, and one process uses"),
        ("4", 2, "cuda", "2 processes use one each: give srun --ntasks-per-node=4"),
        ("4", 4, "cuda", ""),
        ("4", 1, "cpu", ""),
        ("1", 1, "auto", ""),
        (None, 2, "auto", ""),
    ],
)
def test_gpus_that_no_task_of_slurm_uses_are_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpus: str | None,
    tasks: int,
    device: str,
    says: str,
) -> None:
    monkeypatch.setattr(ranks, "_has_terminal", lambda: False)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(tasks))
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", str(tasks))
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    if gpus:
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", gpus)
    assert ddp_launch.main(["--check", "--device", device]) == 0
    said = capsys.readouterr().err
    assert (says in said) if says else (said == "")


def test_two_processes_where_slurm_started_one_are_asked_of_srun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "_has_terminal", lambda: False)
    step = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    for name, value in {**SLURM, **step}.items():
        monkeypatch.setenv(name, value)
    assert ddp_launch.main(["--nproc", "2", "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "one of 1 that slurm started here" in line
    assert "for more give srun --ntasks-per-node=2" in line


BROKEN = {
    "no __init__.py": ("", "x = 1", "recipes/mine/__init__.py is missing, or has no LAUNCHED"),
    "no main": ('LAUNCHED = "one"', "x = 1", "recipes/mine/train.py has no main(arguments)"),
    "an option twice": (
        'LAUNCHED = "one"',
        """
from dataclasses import dataclass, field
from common import cli
@dataclass(frozen=True)
class Own:
    nproc: int = 3
@dataclass(frozen=True)
class Config:
    own: Own = field(default_factory=Own)
def main(arguments):
    return cli.run("mine", Config, lambda config, ranks: None, arguments)
""",
        "--nproc is an option of two groups of Config",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_recipe_that_lacks_something_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: str,
) -> None:
    init, train, says = BROKEN[how]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text(train)
    if init:
        (tmp_path / "mine" / "__init__.py").write_text(init)
    monkeypatch.setattr(recipes, "__path__", [*recipes.__path__, str(tmp_path)])
    for name in ("recipes.mine", "recipes.mine.train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        assert cli.start("mine", []) == 2
    finally:
        for name in ("recipes.mine", "recipes.mine.train"):
            sys.modules.pop(name, None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {says}")


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("TORCH_LOGS", "nonsense", "torch cannot be imported .*correct or unset .*TORCH_LOGS"),
        ("TORCH_FR_BUFFER_SIZE", "abc", "TORCH_FR_BUFFER_SIZE=abc is no whole number: unset it"),
    ],
)
def test_a_variable_that_torch_does_not_take_is_named(
    recipe: Recipe, variable: str, value: str, says: str
) -> None:
    result = recipe("ddp_launch", "--nproc", "2", env={variable: value})
    assert (result.status, len(result.errors)) == (2, 1), result.stderr
    assert re.search(says, result.errors[0])
    assert "Traceback" not in result.stderr
