"""A run's folder: one run at a time, nothing of others touched, nothing missing in silence."""

import json
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any
from unittest.mock import patch

import pytest
import torch

from common.errors import InputError, TrainingError
from common.launch.ranks import Ranks
from common.owner import lock
from common.run.claim import refuse_in_data
from common.run.folder import Run
from common.run.loop import Loop
from common.run.options import RunOptions
from common.snapshots.snapshot_files import list_snapshots, write
from recipes.ddp_launch.train import Config
from tests.helpers.commands import ROOT, Recipe, wait_for
from tests.helpers.images import flowers
from tests.helpers.pool import Pool, call_main, in_group
from tests.helpers.run_folders import SHORT, contents, train

FOR_EVER = ("--epochs", "100000")
"""Until the test stops the run."""


def sha(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["weights_sha256"])


def ended(folder: Path) -> str:
    return str(json.loads((folder / "status.json").read_text())["status"])


def steps(folder: Path) -> list[int]:
    """Steps whose loss was logged, in the file's order."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "loss" in line]


def marks(ranks: Ranks, folder: Path) -> int:
    """How many devices the clock of a run on two devices reads."""
    config = replace(Config(), run=RunOptions(output_dir=folder))
    run = Run("ddp_launch", config, ranks, torch.device("cpu", 1), torch.device("cpu", 0))
    _, times_s, _ = run.clock._marks[-1]
    return len(times_s)


def test_the_clock_of_a_run_reads_all_of_its_devices(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(in_group, 1, marks, tmp_path / "run") == [2]


@pytest.mark.parametrize(
    "lost", ["nothing", "snapshots", "snapshots, fewer steps", "--resume never"]
)
def test_a_finished_run_is_never_trained_again(
    pool: Pool, finished: Path, tmp_path: Path, lost: str
) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    if "snapshots" in lost:
        shutil.rmtree(folder / "snapshots")
    before = contents(folder)
    options = {"snapshots, fewer steps": ["--max-steps", "5"], "--resume never": lost.split()}
    status, said = train(pool, folder, *options.get(lost, []))
    after = contents(folder)
    logs = {name for name in after if name.startswith("logs/")}
    assert {k: v for k, v in after.items() if k not in logs} == {
        k: v for k, v in before.items() if k not in logs
    }
    if lost == "--resume never":
        assert status == 2, said
    else:
        assert status == 0, said
        assert "already finished" in said


@pytest.mark.parametrize("name", ["model.pt", "best.pt"])
def test_a_finished_run_without_its_model_writes_it_again(
    pool: Pool, finished: Path, tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / name).unlink()
    status, said = train(pool, folder)
    assert status == 0, said
    assert sha(folder) == sha(finished)
    assert ended(folder) == "finished"
    assert (folder / name).read_bytes() == (finished / name).read_bytes()
    shutil.rmtree(folder / "snapshots")
    (folder / name).unlink()
    status, said = train(pool, folder)
    assert status == 2
    assert name in said


@pytest.mark.parametrize(
    "name", ["model.pt", "metrics.jsonl", "summary.json", "snapshots/mine.tmp", "tensorboard/x"]
)
def test_files_of_others_are_left_alone(pool: Pool, tmp_path: Path, name: str) -> None:
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text("of somebody else")
    status, said = train(pool, tmp_path / "run")
    assert status == 2, said
    assert name.split("/")[0] in said
    assert contents(tmp_path / "run") == {name: b"of somebody else"}


def test_only_own_temporary_files_are_removed(pool: Pool, finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "summary.json").unlink()
    (folder / "snapshots" / "mine.tmp").write_text("of somebody else")
    (folder / "snapshots" / "step_00000007.123.tmp").write_text("half a snapshot of ours")
    assert train(pool, folder)[0] == 0
    assert [path.name for path in folder.glob("snapshots/*.tmp")] == ["mine.tmp"]


def test_an_empty_folder_name_is_refused(recipe: Recipe) -> None:
    result = recipe.module("ddp_launch", *SHORT, "--output-dir", "")
    assert (result.status, len(result.errors)) == (2, 1)
    assert "--output-dir" in result.errors[0]
    assert not list(recipe.tmp_path.iterdir())


@pytest.mark.parametrize("how", ["cut in a line", "deleted", "garbage"])
def test_metrics_that_are_cut_are_written_again(
    pool: Pool, finished: Path, stopped: Path, tmp_path: Path, how: str
) -> None:
    """An older snapshot that does not count on the lost lines is taken, or the run is refused."""
    folder = shutil.copytree(stopped, tmp_path / "run")
    file = folder / "metrics.jsonl"
    if how == "cut in a line":
        whole = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join(whole[:16]) + whole[16][:9])  # 14 steps, an epoch, a step
    elif how == "deleted":
        file.unlink()
    else:
        file.write_bytes(random.Random(0).randbytes(file.stat().st_size))
    status, said = train(pool, folder)
    if how == "cut in a line":
        assert status == 0, said
        assert "metrics.jsonl" in said
        assert sha(folder) == sha(finished)
        assert steps(folder) == list(range(1, 29))
    else:
        assert status == 2, said
        assert "metrics.jsonl" in said


def put(where: dict[Any, Any], *path: Any) -> None:
    """Set the entry at the place before the last word of `path`; None removes it."""
    *outer, last, value = path
    for name in outer:
        where = where[name]
    if value is None:
        del where[last]
    else:
        where[last] = value


ALTERED: dict[str, tuple[Any, ...]] = {
    "no step": ("step", None),
    "no part": ("parts", "optimizer", None),
    "another part": ("parts", "scheduler", {}),
    "another lr": ("identity", "lr", 7.0),
    "no random state": ("ranks", 0, "rng", {}),
    "more ranks": ("world_size", 2),
    "a negative position": ("batch", -1),
    "the loss as float32": ("ranks", 0, "loss_sum", torch.zeros(96)),
    "no weight": ("parts", "model", "fc.bias", None),
    "one more weight": ("parts", "model", "more", torch.zeros(1)),
    "another shape": ("parts", "model", "fc.bias", torch.zeros(1)),
    "another dtype": ("parts", "model", "fc.bias", torch.zeros(10, dtype=torch.float64)),
    "no momentum": ("parts", "optimizer", "state", 0, None),
    "momentum of another shape": (
        "parts",
        "optimizer",
        "state",
        0,
        "momentum_buffer",
        torch.zeros(1),
    ),
}


@pytest.mark.parametrize("how", ALTERED)
def test_a_snapshot_with_other_content_is_named(
    pool: Pool, stopped: Path, tmp_path: Path, how: str
) -> None:
    """Its checksum is right: somebody else, or other code, wrote it."""
    folder = shutil.copytree(stopped, tmp_path / "run")
    newest, older, *_ = list_snapshots(folder / "snapshots")
    content = torch.load(newest, weights_only=True)
    newest.unlink()
    put(content, *ALTERED[how])
    altered = write(newest.parent, 20, content)
    before = contents(folder)
    status, said = train(pool, folder)
    assert (status, said.count("error:")) == (2, 1), said
    assert str(altered) in said
    assert "Traceback" not in said
    assert {k: v for k, v in contents(folder).items() if k[:5] != "logs/"} == {
        k: v for k, v in before.items() if k[:5] != "logs/"
    }
    if how == "no weight":  # the rest is the same for all
        altered.unlink()  # as the message says
        assert train(pool, folder)[0] == 0
        resumed_from = json.loads((folder / "summary.json").read_text())["resumed_from"]
        assert resumed_from == int(older.name[5:13])


@pytest.mark.slow
def test_ctrl_c_says_from_where_the_run_can_resume(recipe: Recipe) -> None:
    process = recipe.start(*recipe.command("ddp_launch", *FOR_EVER))
    wait_for(lambda: list(recipe.tmp_path.glob("run/snapshots/*.pt")))
    os.killpg(process.pid, signal.SIGINT)
    result = recipe.finish(process, recipe.tmp_path / "run")
    assert result.status == 130
    said = [line for line in result.stderr.splitlines() if line.startswith("interrupted at step")]
    assert len(said) == 1, result.stderr
    named = re.search(rf"newest snapshot: (\S+\.pt); .*--output-dir {result.folder}", said[0])
    assert named, said
    assert (result.folder / "snapshots" / named[1]).exists()
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_training_goes_on_when_nobody_reads(recipe: Recipe) -> None:
    """As in `python -m recipes ... 2>&1 | head -1`."""
    command = shlex.join(recipe.command("ddp_launch", *SHORT))
    script = f"{command} 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"
    result = recipe.finish(recipe.start("bash", "-c", script), recipe.tmp_path / "run")
    assert result.status == 0, result.stdout
    assert result.stdout.count("\n") == 1
    assert steps(result.folder) == list(range(1, 29))


def test_training_goes_on_without_its_curves(recipe: Recipe) -> None:
    process = recipe.start(*recipe.command("ddp_launch", *SHORT, *FOR_EVER))
    folder = recipe.tmp_path / "run"
    wait_for(lambda: list(folder.glob("snapshots/*.pt")))
    shutil.rmtree(folder / "tensorboard")
    wait_for(lambda: "no more curves" in (folder / "logs" / "rank_0.log").read_text())
    process.send_signal(signal.SIGTERM)
    result = recipe.finish(process, folder)
    assert (result.status, result.errors) == (75, [])


def test_a_limit_is_not_called_a_full_disk(recipe: Recipe) -> None:
    command = shlex.join(recipe.command("ddp_launch", *SHORT))
    script = f"ulimit -f 200; exec {command}"  # [1,024 bytes]
    result = recipe.finish(recipe.start("bash", "-c", script), recipe.tmp_path / "run")
    assert (result.status, len(result.errors)) == (1, 1), result.stderr
    assert "cannot write a snapshot" in result.errors[0]
    assert "File too large): raise the limit of a file's size (ulimit -f)" in result.errors[0]
    assert "make room" not in result.errors[0]


@pytest.mark.slow
def test_names_that_are_no_utf_8(recipe: Recipe) -> None:
    """Of the folder, a class and its images, in a locale that knows only ASCII."""
    root = flowers(recipe.tmp_path / "data", per_class=6)
    for path in (*(root / "daisy").iterdir(), root / "daisy"):
        path.rename(path.with_name(os.fsdecode(b"\xff\xc3\xa4 ") + path.name))
    folder = os.fsdecode(b"run \xff\xc3\xa4")
    options = ["--data", "imagefolder", "--data-path", str(root), "--image-size", "8"]
    options += ["--nproc", "1", "--global-batch-size", "2", "--epochs", "1", "--num-workers", "0"]
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    first = recipe("ddp_launch", *options, folder=folder, env=plain).assert_ok()
    assert re.search(r"output_dir +\S+/run \\udcff", first.stdout), first.stdout
    manifest = json.loads((first.folder / "manifest.json").read_text())
    again = recipe("ddp_launch", *options, folder=folder, env={"LC_ALL": "C.UTF-8"}).assert_ok()
    assert "already finished" in again.stdout, "the data's fingerprint is the same"
    assert re.fullmatch(r"[0-9a-f]{64}, contents [0-9a-f]{64}", manifest["data_fingerprint"])


def test_few_open_files_are_refused_at_once(recipe: Recipe) -> None:
    command = shlex.join(recipe.command("ddp_launch", *SHORT))
    result = recipe.finish(recipe.start("bash", "-c", f"ulimit -n 12; exec {command}"), Path())
    assert (result.status, len(result.errors)) == (2, 1), result.stderr
    assert result.stderr.count("\n") == 1
    assert "ulimit -n 1024" in result.errors[0]


def test_metrics_that_cannot_be_written_are_named() -> None:
    run = Run.__new__(Run)
    run.ranks = Ranks()
    run.folder, run._metrics_bytes = Path("/dev"), 0
    says = r"cannot write /dev/metrics.jsonl \(No space left on device\): make room, then"
    with (
        Path("/dev/full").open("ab", buffering=0) as run._metrics,
        pytest.raises(TrainingError, match=says),
    ):
        run.metrics(1, 0, loss=1.0)


def test_a_port_that_is_taken_is_refused(recipe: Recipe) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, options, env in (
            ("ddp_launch", ["--master-port", port], {}),
            ("ddp_launch", [], {"MASTER_PORT": port}),
            ("ddp_spawn", ["--master-port", port], {}),
        ):
            result = recipe(name, "--nproc", "2", *options, env=env)  # at once, not after 600 s
            assert (result.status, len(result.errors)) == (2, 1), result.stderr
            assert f"port {port} on" in result.errors[0]


def test_an_interpreter_without_torch_is_named(recipe: Recipe) -> None:
    package = recipe.tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ModuleNotFoundError('no torch', name='torch')")
    path = f"{recipe.tmp_path}{os.pathsep}{ROOT}"
    result = recipe("ddp_launch", "--nproc", "1", env={"PYTHONPATH": path})
    assert (result.status, len(result.errors)) == (2, 1), result.stderr
    assert "has no package torch: run make venv" in result.errors[0]


@pytest.mark.slow
def test_two_commands_at_random_distances_in_one_folder(recipe: Recipe) -> None:
    """Of each pair one trains and one is refused, or finds the run finished; one hash."""
    draw, hashes = random.Random(0), set()
    for number in range(int(os.environ.get("ROUNDS", "4"))):
        name = f"run{number}"
        command = recipe.command("ddp_launch", *SHORT, folder=name)
        first = recipe.start(*command)
        time.sleep(draw.uniform(0, 4))
        second = recipe.start(*command)
        results = [recipe.finish(process, recipe.tmp_path / name) for process in (first, second)]
        statuses = sorted(result.status for result in results)
        assert statuses in ([0, 2], [0, 0]), [result.stderr for result in results]
        if statuses == [0, 0]:
            assert "already finished" in results[0].stdout + results[1].stdout
        assert steps(recipe.tmp_path / name) == list(range(1, 29))
        hashes.add(results[0].sha)
    assert len(hashes) == 1


@pytest.mark.parametrize("how", ["truncated", "longer"])
def test_metrics_that_another_program_changes_end_the_run_and_its_snapshot_goes_on(
    recipe: Recipe, pool: Pool, how: str
) -> None:
    """A snapshot of a later step would not fit the file: no run could resume from it."""
    folder = recipe.tmp_path / "run"
    process = recipe.start(*recipe.command("ddp_launch", *SHORT, *FOR_EVER))
    wait_for(lambda: list_snapshots(folder / "snapshots"))
    if how == "truncated":
        os.truncate(folder / "metrics.jsonl", 0)
    else:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("{}\n")
    result = recipe.finish(process, folder)
    assert (result.status, len(result.errors)) == (1, 1), result.stderr
    says = r"metrics.jsonl was changed while this run wrote it .*--resume (\S+\.pt) in another"
    found = re.search(says, result.errors[0])
    assert found, result.errors
    step = int(Path(found[1]).name[5:13])
    other = recipe.tmp_path / "other"
    options = ("--resume", found[1], *FOR_EVER, "--max-steps", str(step + 1))
    status, said = train(pool, other, *options)
    assert status == 0, said
    assert json.loads((other / "summary.json").read_text())["resumed_from"] == step


KINDS: dict[str, Callable[[Path], object]] = {
    "config.json": Path.mkdir,
    "model.pt": Path.mkdir,
    ".lock": Path.mkdir,
    "summary.json": os.mkfifo,
    "snapshots": Path.touch,
    "logs": Path.touch,
    "best.pt": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("name", KINDS)
def test_an_entry_of_another_kind_is_named(pool: Pool, tmp_path: Path, name: str) -> None:
    """A link to a disk that is not mounted, too, before anything is written."""
    KINDS[name](tmp_path / name)
    for options in ((), ("--check",)):
        status, said = train(pool, tmp_path, *options)
        assert status == 2, said
        assert re.search(rf"{tmp_path}/{name} is no (file|folder): move it away", said), said
        assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_run_is_not_written_among_its_photos(pool: Pool, tmp_path: Path) -> None:
    """Its folder would become a class, and every later run would find no images in it."""
    root = flowers(tmp_path / "photos")
    before = contents(root)
    refuse_in_data(root / ".runs" / "run", root)
    refuse_in_data(tmp_path / "runs", root)
    for name in ("train", "val"):
        (tmp_path / "split" / name).mkdir(parents=True)
    refuse_in_data(tmp_path / "split" / "runs", tmp_path / "split")
    with pytest.raises(InputError, match="whose sub-folders are classes"):
        refuse_in_data(tmp_path / "split" / "train" / "run", tmp_path / "split")
    for folder in (root, root / "run"):
        status, said = train(pool, folder, "--data", "imagefolder", "--data-path", str(root))
        assert status == 2, said
        assert f"--output-dir {folder} is in --data-path {root}" in said
        assert contents(root) == before
        assert not (root / "run").exists()


POSITIONS = {
    "batch 9999": ({"batch": 9999}, "step 28 is not after 9999 batches of epoch 1"),
    "another step": ({"step": 3}, "step 3 is not after"),
    "a batch of the next epoch": ({"batch": 28, "epoch": 0}, "not after 28 batches of epoch 0"),
}


@pytest.mark.parametrize("what", [*POSITIONS, "other data", "another split", "fewer steps"])
def test_a_snapshot_of_no_step_of_this_run_is_refused(
    pool: Pool, finished: Path, tmp_path: Path, what: str
) -> None:
    (newest, *_), options = list_snapshots(finished / "snapshots"), []
    content = torch.load(newest, weights_only=True)
    changes, says = POSITIONS.get(what, ({}, ""))
    content |= changes
    if what == "other data":
        content["identity"]["samples"], says = [1436, 360], r"samples \[1436, 360\] there"
    if what == "another split":
        content["identity"]["indices_sha256"], says = "0" * 64, "indices_sha256 '0000"
    if what == "fewer steps":
        options, says = ["--max-steps", "5"], "is of step 28, after this run's last step 5"
    forged = write(tmp_path / "snapshots", content["step"], content)
    status, said = train(pool, tmp_path / "run", "--resume", str(forged), *options)
    assert (status, said.count("error:")) == (2, 1), said
    assert re.search(says, said), said
    assert "Traceback" not in said


def test_a_copy_by_hard_links_changes_nothing_in_the_original(
    pool: Pool, stopped: Path, tmp_path: Path
) -> None:
    first = shutil.copytree(stopped, tmp_path / "first")
    subprocess.run(["cp", "-al", first, tmp_path / "second"], check=True)
    before = contents(first)
    assert train(pool, tmp_path / "second")[0] == 0
    after = contents(first)
    assert {n: c for n, c in after.items() if n != ".lock"} == {
        n: c for n, c in before.items() if n != ".lock"
    }


def test_a_run_that_goes_on_beyond_its_end_has_not_finished(
    pool: Pool, stopped: Path, tmp_path: Path
) -> None:
    """Else the old summary would describe the new run's config and metrics."""
    folder = shutil.copytree(stopped, tmp_path / "run")
    ((status, _, said),) = pool.run(begin_and_fail, 1, folder)
    assert (status, "stop here" in said) == (1, True), said
    assert not (folder / "summary.json").exists()
    assert train(pool, folder)[0] == 0
    assert json.loads((folder / "summary.json").read_text())["steps"] == 28


def begin_and_fail(ranks: Ranks, folder: Path) -> tuple[int, str, str]:
    """Train further in the folder of a run of 20 steps, and end at the first one."""

    def stop(*_: Any) -> None:
        raise TrainingError("stop here")

    with patch.object(Loop, "after_step", stop):
        return call_main(ranks, "ddp_launch", [*SHORT, "--output-dir", str(folder)])


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
def test_a_link_is_not_written_through(pool: Pool, tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("of somebody else")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).symlink_to(precious)
    status, said = train(pool, tmp_path / "run")
    assert (status, precious.read_text()) == (2, "of somebody else"), said
    assert f"{name} is a link to {precious}" in said


def test_two_runs_share_no_folder_nor_one_behind_linked_snapshots(
    recipe: Recipe, tmp_path: Path
) -> None:
    (tmp_path / "big").mkdir()
    for name in "pq":
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").touch()
        (tmp_path / name / "snapshots").symlink_to(tmp_path / "big")
    first = recipe.start(*recipe.command("ddp_launch", *SHORT, *FOR_EVER, folder="p"))
    wait_for(lambda: list_snapshots(tmp_path / "big") or first.poll() is not None)
    for name, says in (
        ("q", "q/snapshots belongs to a run that is still going"),
        ("p", f"process {first.pid}"),
    ):
        other = recipe("ddp_launch", *SHORT, *FOR_EVER, "--seed", "1", folder=name)
        assert (other.status, len(other.errors)) == (2, 1), other.stderr
        assert says in other.errors[0]
    assert ended(tmp_path / "p") == "running"
    first.send_signal(signal.SIGTERM)
    assert recipe.finish(first, tmp_path / "p").status == 75
    assert ended(tmp_path / "p") == "stopped"
    assert steps(tmp_path / "p") == list(range(1, 1 + len(steps(tmp_path / "p"))))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b""),
        ("config.json", b"[" * 100_000),
        ("summary.json", b"\0\xff{"),
        ("manifest.json", b"[1]"),
    ],
)
def test_a_damaged_record_is_named(
    pool: Pool, finished: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    if name == "manifest.json":  # what a run goes on from does not depend on it
        (folder / "summary.json").unlink()
    (folder / name).write_bytes(content)
    status, said = train(pool, folder)
    assert str(folder / name) in said
    assert "Traceback" not in said
    assert status == (0 if name == "manifest.json" else 2)
    if name == "manifest.json":
        assert sha(folder) == sha(finished)
        assert json.loads((folder / name).read_text())["seed"] == 0


def hold(folder: Path, name: str) -> None:
    """Own a folder as a process of another host would, until the process is killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: name)
        file = lock(folder)
    (folder / "held").touch()
    time.sleep(600)
    file.close()


@pytest.mark.slow
def test_the_lock_of_another_host_is_waited_for(tmp_path: Path) -> None:
    """A network file system gives back the lock of a dead host late."""
    process = multiprocessing.get_context("spawn").Process(
        target=hold, args=(tmp_path, "other"), daemon=True
    )
    process.start()
    wait_for((tmp_path / "held").exists)
    with pytest.raises(InputError, match="still going \\(host other, process"):
        lock(tmp_path, patience_s=1.0)
    Timer(1.0, process.kill).start()
    with lock(tmp_path, patience_s=60.0) as file:
        file.seek(0)
        assert file.read() == f"host {socket.gethostname()}, process {os.getpid()}"
    process.join()
