"""The list of runs: how each ended is told right, whatever lies in the folders."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.owner import owner_of
from tests.helpers.commands import ROOT, Recipe, clean_env
from tools.runs import by_epoch, differences, find_runs, look, main, order

SHA = "a" * 64


def made_up(folder: Path, **summary: Any) -> Path:
    """A run's folder; finished if it has a summary."""
    (folder / "logs").mkdir(parents=True)
    (folder / ".lock").touch()
    command = f"python -m recipes ddp_launch --lr 0.1 --output-dir {folder} --epochs 3"
    (folder / "config.json").write_text(json.dumps({"recipe": "ddp_launch", "lr": 0.1}))
    start = {"time": "2026-01-02T03:04:05+00:00"}
    (folder / "manifest.json").write_text(json.dumps({"command": command, "start": start}))
    (folder / "metrics.jsonl").write_text('{"step": 10, "loss": 2.0}\n{"step": 20, "loss": 1.0}\n')
    if summary:
        content = {"weights_sha256": SHA, "steps": 30, **summary}
        (folder / "summary.json").write_text(json.dumps(content))
    return folder


def finished(folder: Path) -> None:
    made_up(folder, val_accuracy=0.5)
    (folder / "status.json").write_text('{"status": "running"}')  # killed shortly before the end


def failed(folder: Path) -> None:
    made_up(folder)
    content = {"status": "failed", "error": "error: rank 1: a bug", "folder": "elsewhere"}
    (folder / "status.json").write_text(json.dumps(content))


def stopped(folder: Path) -> None:
    made_up(folder)
    (folder / "status.json").write_text('{"status": "stopped"}')


def killed(folder: Path) -> None:
    made_up(folder)
    (folder / "status.json").write_text('{"status": "running"}')


@pytest.mark.parametrize("make", [finished, failed, stopped, killed])
def test_how_a_run_ended(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "run")
    (found,) = map(look, find_runs(tmp_path))
    assert found["status"] == make.__name__
    assert found.get("error") == ("error: rank 1: a bug" if make is failed else None)
    assert found["steps"] == (30 if make is finished else 20)


def test_a_running_run_is_seen_and_may_go_on(tmp_path: Path) -> None:
    run = made_up(tmp_path / "run")
    (run / ".lock").write_text("host a, process 7")
    assert owner_of(run) is None
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, fcntl.LOCK_EX); "
            "print('held', flush=True); sys.stdin.read()",
            run / ".lock",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout
        assert holder.stdin
        holder.stdout.readline()
        assert look(run) | {"status": "running", "owner": "host a, process 7"} == look(run)
        holder.stdin.close()
    with (run / ".lock").open("r+") as file:  # looking has left no lock
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_whatever_lies_in_five_hundred_folders_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(500):
        run = made_up(tmp_path / f"day{number % 7}" / str(number), val_accuracy=number / 500)
        fault = number % 10
        if fault == 1:
            (run / "summary.json").write_text('{"weights_sha256": "a')
        elif fault == 2:
            (run / "manifest.json").write_text('["no object"]')
        elif fault == 3:
            (run / "logs").rmdir()
            (run / "summary.json").write_bytes(os.urandom(100))
        elif fault == 4:
            (run / ".lock").unlink()
            (run / ".lock").mkdir()
        elif fault == 5:
            (run / "manifest.json").write_text('{"command": "an open \' quote", "start": 3}')
        elif fault == 7:
            (run / "summary.json").write_text('{"val_loss": "text", "best": {"val_loss": null}}')
        elif fault == 8:
            (run / "summary.json").unlink()
            (run / "status.json").write_text('{"status": ["failed"], "error": 3}')
        elif fault == 9:
            (run / "status.json").write_text('{"status": "fai')
        elif fault == 6:
            (run / "config.json").unlink()
            (run / "config.json").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "summary.json").write_text("{}")
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert sum(line.startswith(str(tmp_path)) for line in lines) == 500
    assert "foreign" not in said.out
    assert sum("summary.json cannot be read" in line for line in lines) == 100
    assert sum("status.json cannot be read" in line for line in lines) == 50


def test_pipes_among_the_files_of_runs_are_not_opened(recipe: Recipe) -> None:
    """Whoever opens a pipe waits for its writer."""
    names = (".lock", "config.json", "metrics.jsonl", "status.json", "summary.json")
    for name in names:
        run = made_up(recipe.tmp_path / f"pipe {name}")
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    figure = recipe.module("runs", recipe.tmp_path, "--figure", recipe.tmp_path / "loss.png")
    assert "none of these runs has finished an epoch" in figure.stderr
    done = recipe.module("runs", recipe.tmp_path).assert_ok()
    assert all(f"pipe {name}" in done.stdout for name in names)
    for name in ("config.json", "status.json", "summary.json"):
        assert f"{name} cannot be read" in done.stdout


def test_runs_are_sorted_and_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, accuracy in (("a", 0.9), ("b", 0.7), ("c", 0.8)):
        made_up(tmp_path / name, val_accuracy=accuracy)
    killed(tmp_path / "d")
    runs = [look(run) for run in find_runs(tmp_path)]
    names = [Path(run["folder"]).name for run in order(runs, "val_accuracy")]
    assert names == ["d", "b", "c", "a"]
    assert main([str(tmp_path), "--only", "killed", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert Path(only["folder"]).name == "d"
    assert main([str(tmp_path), "--sort", "val_acc"]) == 2
    assert "no run's summary.json has a number" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2


def test_two_runs_show_only_what_differs(tmp_path: Path) -> None:
    one, other = (look(made_up(tmp_path / f"run{loss}", val_loss=loss)) for loss in (1, 2))
    other["config"]["lr"] = 0.2
    rate, command, loss = differences(one, other)
    assert rate == ["config: lr", "0.1", "0.2"]
    assert command[0] == "manifest: command"
    assert loss == ["summary: val_loss", "1", "2"]


def test_real_runs_through_the_command_line(recipe: Recipe, tmp_path: Path) -> None:
    for name, lr in (("good", "0.1"), ("bad", "1e30")):
        recipe("ddp_launch", "--nproc", "1", "--epochs", "1", "--lr", lr, folder=f"runs/{name}")
    done = subprocess.run(
        [sys.executable, "-m", "recipes", "runs"],
        cwd=tmp_path,
        env={**clean_env(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    heading, *lines = done.stdout.splitlines()
    assert heading.split()[:3] == ["run", "begun", "status"]
    good = next(line for line in lines if line.startswith("runs/good"))
    assert " finished " in good
    sha = json.loads((tmp_path / "runs" / "good" / "summary.json").read_text())["weights_sha256"]
    assert sha[:8] in good
    bad = next(n for n, line in enumerate(lines) if line.startswith("runs/bad"))
    assert " failed " in lines[bad]
    assert lines[bad + 1].startswith("    error: ")
    assert "the loss is not finite" in lines[bad + 1]


def test_a_figure_of_the_metrics_by_epoch(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"step": 10, "epoch": 0, "loss": 2.0},
        *(
            {
                "step": 10 * e,
                "epoch": e - 1,
                "train_loss": 1 / e,
                "val_loss": 2 / e,
                "val_top5": 0.5,
            }
            for e in (1, 2)
        ),
    ]
    for name in "ab":
        run = made_up(tmp_path / "runs" / name)
        text = "\n".join(map(json.dumps, lines)) + '\n{"step": 21, "ep'  # killed as it wrote
        (run / "metrics.jsonl").write_text(text)
    none = made_up(tmp_path / "none" / "c")
    curves = by_epoch(look(run))
    assert curves == {
        "train_loss": [(1, 1.0), (2, 0.5)],
        "val_loss": [(1, 2.0), (2, 1.0)],
        "val_top5": [(1, 0.5), (2, 0.5)],
    }
    assert by_epoch(look(none)) == {}
    figure = tmp_path / "curves.png"
    asked = ("runs", tmp_path / "runs", none.parent, "--figure", figure)
    in_a_notebook = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    assert recipe.module(*asked, env=in_a_notebook).assert_ok().stdout == f"{figure}\n"
    assert figure.read_bytes().startswith(b"\x89PNG")
    (none / "metrics.jsonl").write_bytes(b"\xff\xfe")
    assert main([str(none.parent), "--figure", str(figure)]) == 2
    assert "none of these runs has finished an epoch" in capsys.readouterr().err
    assert main([str(tmp_path / "runs"), "--figure", str(tmp_path / "curves")]) == 2
    assert "a name that ends in .png" in capsys.readouterr().err
