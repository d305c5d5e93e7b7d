"""The recipes as a user starts them: every launcher, every way to be interrupted, one result."""

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.kernels import PORTABLE
from common.launch.capacity import RANK_BYTES, usable_cores
from common.weights import weights_sha256
from tests.helpers.commands import INJECTED, ROOT, Recipe, Result, children, wait_for
from tests.helpers.images import flowers, photo
from tests.helpers.machine import free_port, need, need_root
from tools.make_variables import used

PLANTED = "hf_planted0123456789"
OPTIONS = ("--epochs", "6", "--log-every", "5", "--snapshot-every", "4")
STEPS = 6 * 14


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Result]:
    """One uninterrupted run of ddp_launch that every other way to get there must equal."""
    runner = Recipe(tmp_path_factory.mktemp("reference"))
    yield runner("ddp_launch", *OPTIONS).assert_ok()
    runner.stop()


def assert_same(result: Result, reference: Result) -> None:
    result.assert_ok()
    assert result.sha == reference.sha
    assert result.losses == reference.losses
    assert result.summary["best"] == reference.summary["best"]
    best = [(run.folder / "best.pt").read_bytes() for run in (result, reference)]
    assert best[0] == best[1]


def test_make_run_trains_with_its_defaults(recipe: Recipe) -> None:
    need("make")
    folder = recipe.tmp_path / f"a folder {PLANTED}"
    process = recipe.start(
        "make",
        "--no-print-directory",
        "-C",
        ROOT,
        "run",
        f"PYTHON={sys.executable}",
        "RECIPE=ddp_launch",
        f"ARGS=--output-dir '{folder}'",
        env={"HF_TOKEN": PLANTED, "NCCL_DEBUG_TOKEN": PLANTED},
    )
    result = recipe.finish(process, folder).assert_ok()
    result.assert_bits_of_the_record()
    summary = result.summary
    assert summary["val_accuracy"] >= 0.97
    assert summary["val_accuracy"] == summary["val_correct"] / summary["val_total"]
    promised = "recipe epochs steps train_loss samples_per_s elapsed_s resumed_from".split()
    assert {*promised} <= summary.keys()
    assert (summary["world_size"], len(summary["peak_memory_bytes"])) == (2, 2)
    start_s = summary["start_s"]
    assert [*start_s] == ["imports", "ranks", "data and model", "first step"]
    assert all(s > 0 for s in start_s.values())
    assert sum(start_s.values()) - start_s["imports"] < summary["elapsed_s"] + start_s["ranks"]
    assert result.stdout.splitlines()[0].startswith("ddp_launch: world_size 2")
    assert "device cpu (no GPU visible)" in result.stdout.splitlines()[0]
    assert re.search(r"val_accuracy +0\.9[789]", result.stdout), "the table at the end"
    assert "step/s" in result.stderr, "the progress bar"
    assert_record(folder, summary)


def assert_record(folder: Path, summary: dict[str, Any]) -> None:
    """The files of the contract."""
    assert PLANTED not in (folder / "manifest.json").read_text()
    config = json.loads((folder / "config.json").read_text())
    assert (config["lr"], config["data"], config["seed"]) == (0.1, "digits", 0)
    assert config["num_workers"] == 0, "data in memory"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["torch"] == torch.__version__
    assert manifest["world_size"] == 2
    assert re.fullmatch("[0-9a-f]{64}", manifest["data_fingerprint"])
    assert manifest["determinism"]["cpu_threads"] == 1
    known = {"OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES", *PORTABLE}
    assert set(manifest["environment"]) <= known | {"NCCL_DEBUG_TOKEN", "PYTHONHASHSEED"}
    assert manifest["environment"]["PYTHONHASHSEED"] == "0", "sets have one order on all ranks"
    weights = torch.load(folder / "model.pt", weights_only=True)
    assert weights_sha256(weights) == summary["weights_sha256"]
    assert not any(name.startswith("module.") for name in weights)
    assert len(list((folder / "snapshots").iterdir())) == 1, "the run has ended"
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    scalars = {"loss", "accuracy", "learning_rate", "samples_per_s", "train_loss", "time_data"}
    assert scalars <= set(events.Tags()["scalars"])
    accuracy = [event.value for event in events.Scalars("accuracy")]
    assert accuracy[-1] == pytest.approx(summary["val_accuracy"])
    lines = [json.loads(s) for s in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all({"step", "epoch"} <= line.keys() for line in lines)
    assert all({"loss", "lr"} <= line.keys() or "val_loss" in line for line in lines)
    assert sum("val_accuracy" in line for line in lines) == summary["epochs"]


@pytest.mark.parametrize(
    ("name", "extra"), [("ddp_launch", ("--num-workers", "2")), ("ddp_spawn", ())]
)
def test_the_same_options_give_the_same_weights(
    recipe: Recipe, reference: Result, name: str, extra: tuple[str, ...]
) -> None:
    result = recipe(name, "--nproc", "2", *OPTIONS, *extra)
    assert_same(result, reference)
    command = json.loads((result.folder / "manifest.json").read_text())["command"]
    assert command.startswith(f"python -m recipes {name} --nproc 2 --epochs 6"), "as it was typed"


@pytest.mark.parametrize(
    "launcher",
    [
        "torch.distributed.run -m recipes.ddp_launch.train",
        pytest.param(
            "torch.distributed.launch recipes/ddp_launch/train.py", marks=pytest.mark.slow
        ),
    ],
)
def test_under_torchs_launchers(recipe: Recipe, reference: Result, launcher: str) -> None:
    module, *rest = launcher.split()
    rest = [str(ROOT / part) if part.endswith(".py") else part for part in rest]
    folder = recipe.tmp_path / "run"
    process = recipe.start(
        sys.executable,
        "-m",
        module,
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
        *rest,
        *OPTIONS,
        "--output-dir",
        folder,
    )
    result = recipe.finish(process, folder)
    assert_same(result, reference)
    assert "launcher: torchrun" in result.stdout
    assert result.stdout.count("world_size 2") == 1, "only rank 0 talks"


@pytest.mark.slow
def test_slurms_torchrun_says_75_even_if_no_rank_listens_yet(recipe: Recipe) -> None:
    """torchrun itself says 1, as after a failure, and the job would not be requeued."""
    sbatch = (ROOT / "slurm" / "torchrun.sbatch").read_text()
    (code,) = re.findall(r"(?s)^torchrun='(.*?)'$", sbatch, re.MULTILINE)
    (signals,) = re.findall(r"--signals-to-handle=\S+", sbatch)
    rank = recipe.tmp_path / "rank.py"
    rank.write_text("import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(1e6)")
    port = str(free_port())
    process = recipe.start(sys.executable, "-c", code, "--master-port", port, signals, rank)
    wait_for((recipe.tmp_path / "began").exists)
    process.send_signal(signal.SIGUSR2)
    result = recipe.finish(process, recipe.tmp_path)
    assert result.status == 75
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_under_mpirun(recipe: Recipe, reference: Result) -> None:
    need("mpirun")
    process = recipe.start(
        *"mpirun --allow-run-as-root --oversubscribe -n 2".split(),
        *recipe.command("ddp_launch", *OPTIONS),
    )
    result = recipe.finish(process, recipe.tmp_path / "run")
    assert_same(result, reference)
    assert "launcher: openmpi" in result.stdout


BEFORE_THEY_MEET = {
    "on rank 1": (
        "torch.distributed.run --no-python --nproc-per-node 2 --master-port {port}",
        "",
        "--device cuda",
        r"rank 1 on \S+: --device cuda, but this process sees no",
    ),
    "all options, torchrun": (
        "torch.distributed.run --no-python --nproc-per-node 2 --master-port {port}",
        "--epocs 3",
        "",
        r"Unrecognized options: --epocs, 3 \(perhaps",
    ),
    "its options": ("mpirun", "", "--epocs 3", r"rank 1 on \S+: Unrecognized options: --epocs, 3"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BEFORE_THEY_MEET)
def test_what_ranks_find_before_they_meet_is_shown_once(recipe: Recipe, what: str) -> None:
    launcher, options, of_rank_1, says = BEFORE_THEY_MEET[what]
    command = [sys.executable, "-m", *launcher.format(port=free_port()).split()]
    if launcher == "mpirun":
        need("mpirun")
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    script = (
        '[ "${RANK:-$OMPI_COMM_WORLD_RANK}" = 0 ] || set -- "$@" $OF_RANK_1; '
        'exec "$0" -m recipes ddp_launch "$@"'
    )
    env = {"OF_RANK_1": of_rank_1, "CUDA_VISIBLE_DEVICES": ""}
    process = recipe.start(
        *command, "bash", "-c", script, sys.executable, *options.split(), env=env
    )
    result = recipe.finish(process, recipe.tmp_path)
    assert result.status != 0
    assert len(result.errors) == 1, result.stderr
    assert re.match(f"error: {says}", result.errors[0])
    assert "InputError" not in result.stderr, "torchrun shows no traceback of it"


def test_an_option_is_refused_in_plain_letters_on_a_terminal(recipe: Recipe) -> None:
    command = [sys.executable, "-m", "recipes", "ddp_launch", "--nproc", "1", "--epocs", "3"]
    process = recipe.start(sys.executable, "-c", f"import pty; pty.spawn({command!r})")
    said = recipe.finish(process, recipe.tmp_path).stdout
    assert said.startswith("error: Unrecognized options: --epocs, 3 (perhaps you meant --epochs)")


@pytest.mark.parametrize(
    ("name", "closed"), [("ddp_launch", "<&- >&- 2>&-"), ("dp_scratch --no-lesson", ">&- 2>&-")]
)
def test_a_run_needs_no_standard_streams(recipe: Recipe, name: str, closed: str) -> None:
    """As a daemon has none: no file or socket of the run may take their numbers."""
    command = recipe.command(*name.split(), "--max-steps", "2")
    process = recipe.start("sh", "-c", f'exec "$@" {closed}', "sh", *command)
    result = recipe.finish(process, recipe.tmp_path / "run").assert_ok()
    assert result.summary["steps"] == 2


@pytest.mark.slow
def test_from_a_notebook(recipe: Recipe) -> None:
    """There __main__ is no file: no function of a cell can be spawned, but `main` can be called."""
    options = ["--nproc", "2", "--max-steps", "2", "--output-dir", str(recipe.tmp_path / "run")]
    cell = f"from recipes.ddp_spawn.train import main; raise SystemExit(main({options}))"
    process = recipe.start(sys.executable, "-c", cell, env={"PYTHONPATH": str(ROOT)})
    result = recipe.finish(process, recipe.tmp_path / "run").assert_ok()
    assert result.summary["world_size"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_launch", "ddp_spawn"])
def test_started_as_a_file(recipe: Recipe, name: str) -> None:
    file, folder = ROOT / "recipes" / name / "train.py", recipe.tmp_path / "run"
    options = ("--nproc", "2", "--max-steps", "2", "--output-dir", folder)
    process = recipe.start(sys.executable, file, *options, env={"PYTHONPATH": ""})
    assert recipe.finish(process, folder).assert_ok().summary["world_size"] == 2


def snapshot_steps(folder: Path) -> list[int]:
    return sorted(int(p.name[5:13]) for p in folder.glob("snapshots/step_*.pt"))


def gates(folder: Path, *at: int | str) -> dict[str, str]:
    """The environment of a run that waits at each gate, until the test deletes its file."""
    folder.mkdir()
    for gate in at:
        (folder / str(gate)).touch()
    return {**INJECTED, "GATES": str(folder)}


def wait_for_step(folder: Path, step: int) -> None:
    wait_for(lambda: (snapshot_steps(folder) or [0])[-1] >= step)


def test_ctrl_c_while_spawned_ranks_import_torch_shows_no_traceback(recipe: Recipe) -> None:
    process = recipe.start(*recipe.command("ddp_spawn", "--nproc", "2"))

    def importing() -> bool:
        for child in (Path(f"/proc/{pid}") for pid in children(process.pid)):
            with suppress(OSError):  # a child that asks git something has just ended
                spawned = b"spawn_main" in (child / "cmdline").read_bytes()
                if spawned and "libtorch_cpu" in (child / "maps").read_text():
                    return True
        return False

    wait_for(importing, every_s=0.001)  # of the second that it takes, this is the beginning
    os.killpg(process.pid, signal.SIGINT)
    result = recipe.finish(process, recipe.tmp_path / "run")
    assert (result.status, "Traceback" in result.stderr) == (130, False), result.stderr


def rank_below(launcher: int, rank: int) -> int:
    """Process id of a rank that trains; a spawned rank is found by its log, which it holds open."""
    for pid in children(launcher):
        with suppress(OSError):
            links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
            if any(link.endswith(f"/logs/rank_{rank}.log") for link in links):
                return pid
    raise AssertionError(f"no rank {rank}")


def test_asked_to_stop(recipe: Recipe, reference: Result) -> None:
    """The whole session, as a scheduler or a terminal does it: loading processes are spared."""
    command = recipe.command("ddp_launch", *OPTIONS, "--num-workers", "1")
    folder, gate = recipe.tmp_path / "run", recipe.tmp_path / "gates" / "10"
    process = recipe.start(*command, env=gates(gate.parent, 10))
    wait_for_step(folder, 8)
    os.killpg(process.pid, signal.SIGTERM)
    gate.unlink()
    stopped = recipe.finish(process, folder)
    assert (stopped.status, stopped.errors) == (75, []), stopped.stderr
    assert f"run the same command with --output-dir {folder}" in stopped.stdout
    assert "Traceback" not in stopped.stderr
    at = snapshot_steps(folder)[-1]
    assert f"stopped after step {at}:" in stopped.stdout
    assert 8 <= at < STEPS
    result = recipe.finish(recipe.start(*command), folder)
    assert_same(result, reference)
    assert result.summary["resumed_from"] == at


@pytest.mark.slow
def test_killed_ranks_are_restarted_in_the_same_folder(recipe: Recipe, reference: Result) -> None:
    """Without --output-dir, the folder's name is chosen once."""
    command = [sys.executable, "-m", "recipes", "ddp_launch", *OPTIONS, "--resume", "never"]
    gated = recipe.tmp_path / "gates"
    process = recipe.start(*command, "--restarts", "2", env=gates(gated, 10, 42))
    runs = recipe.tmp_path / "runs" / "ddp_launch"
    folder = wait_for(lambda: list(runs.glob("*/snapshots")))[0].parent
    for victim, step in ((1, 8), (0, 40)):
        wait_for_step(folder, step)
        os.kill(rank_below(process.pid, victim), signal.SIGKILL)
        (gated / str(step + 2)).unlink()
    result = recipe.finish(process, folder)
    assert_same(result, reference)
    assert list(runs.iterdir()) == [folder]
    assert len(result.errors) == 2, "one for each failure"
    assert re.findall(r"(?m)^restart (\d) of 2: newest snapshot step_0000", result.stderr) == [
        "1",
        "2",
    ]
    lost = re.findall(r"(?m)^restarted: lost \d+\.\d s, steps done again: (\d+)", result.stdout)
    assert len(lost) == 2
    assert all(int(steps) <= 5 for steps in lost), "a snapshot is written every 4 steps"


@pytest.mark.slow
def test_restarted_on_as_many_processes_as_there_are_devices(recipe: Recipe) -> None:
    """From 2 processes to 1, and to 2: the same bits as on 1 without a failure."""
    options = (*OPTIONS, "--virtual-ranks", "2", "--log-every", "1")
    whole = recipe("ddp_launch", *options, "--nproc", "1", folder="whole").assert_ok()
    devices, folder = recipe.tmp_path / "devices", recipe.tmp_path / "run"
    devices.write_text("2")
    command = recipe.command("ddp_launch", *options, "--nproc", "2", "--restarts", "9", "--shrink")
    gated = recipe.tmp_path / "gates"
    env = {**gates(gated, 6, 26), "DEVICES": str(devices)}
    process = recipe.start(*command, env=env)
    for left, victim, step in ((1, 1, 4), (2, 0, 24)):
        wait_for_step(folder, step)
        devices.write_text(str(left))
        os.kill(rank_below(process.pid, victim), signal.SIGKILL)
        (gated / str(step + 2)).unlink()
    result = recipe.finish(process, folder).assert_ok()
    assert (result.sha, result.losses) == (whole.sha, whole.losses)
    processes = re.findall(r"(?m)^restart \d of 9: .* on (\d) processes", result.stderr)
    assert processes == list("212")


@pytest.mark.slow
def test_a_request_to_stop_ends_an_evaluation(recipe: Recipe, reference: Result) -> None:
    seen, folder = recipe.tmp_path / "seen", recipe.tmp_path / "run"
    command = recipe.command("ddp_launch", *OPTIONS)
    gate = recipe.tmp_path / "gates" / "seen"
    env = {**gates(gate.parent, "seen"), "EVALUATION_S": "0.3", "SEEN": str(seen)}
    process = recipe.start(*command, env=env)
    wait_for(seen.exists)
    process.send_signal(signal.SIGTERM)
    gate.unlink()
    stopped = recipe.finish(process, folder)
    assert (stopped.status, stopped.errors) == (75, []), stopped.stderr
    assert "stopped after step 14: to resume, run the same command" in stopped.stdout
    assert snapshot_steps(folder)[-1] == 14
    assert len(seen.read_text()) < 12, "batches were left out"
    assert all("val_loss" not in line for line in stopped.metrics)
    result = recipe.finish(recipe.start(*command), folder)
    assert_same(result, reference)
    ends = [[x["val_loss"] for x in r.metrics if "val_loss" in x] for r in (result, reference)]
    assert ends[0] == ends[1], "every epoch once"


@pytest.mark.slow
def test_a_request_to_stop_ends_the_check_of_images(recipe: Recipe) -> None:
    seen, photos = recipe.tmp_path / "seen", flowers(recipe.tmp_path / "photos", 20)
    gate = recipe.tmp_path / "gates" / "seen"
    env = {
        **gates(gate.parent, "seen"),
        "IMAGE_S": "0.5",
        "SEEN": str(seen),
        "XDG_CACHE_HOME": str(recipe.tmp_path),
    }
    options = ("--data", "imagefolder", "--data-path", photos, "--model", "resnet18")
    process = recipe.start(*recipe.command("ddp_launch", *options), env=env)
    wait_for(seen.exists)
    process.send_signal(signal.SIGTERM)
    gate.unlink()
    stopped = recipe.finish(process, recipe.tmp_path / "run")
    assert (stopped.status, stopped.errors) == (75, []), stopped.stderr
    assert len(seen.read_text()) < len(list(photos.rglob("*.*"))), "some were not checked"
    status = json.loads((stopped.folder / "status.json").read_text())
    assert status == {"status": "stopped"}, "though it made no step"
    assert stopped.stderr.count("stopped by SIGTERM while it did not train") == 1


@contextmanager
def memory_limited(mib: int) -> Iterator[Path]:
    """The file that takes processes into a control group of that much memory, without swap."""
    need_root()
    root = Path("/sys/fs/cgroup")
    version_1 = (root / "memory").is_dir()
    group = root / ("memory" if version_1 else "") / f"recipes-{os.getpid()}"
    if not version_1:
        (root / "cgroup.subtree_control").write_text("+memory")
    group.mkdir()
    try:
        name = "memory.limit_in_bytes" if version_1 else "memory.max"
        (group / name).write_text(str(mib * 2**20))
        if not version_1 and (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
        yield group / "cgroup.procs"
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def run_within(recipe: Recipe, mib: int, nproc: int) -> Result:
    """ddp_launch in a control group of that much memory."""
    with memory_limited(mib) as procs:
        enter = ("sh", "-c", f'echo $$ >{procs}; exec "$@"', "sh")
        command = recipe.command("ddp_launch", "--nproc", str(nproc))
        return recipe.finish(recipe.start(*enter, *command), recipe.tmp_path / "run")


@pytest.mark.slow
def test_a_rank_that_is_killed_at_a_memory_limit(recipe: Recipe) -> None:
    mib = 2 * (RANK_BYTES >> 20)  # the least that is not refused
    result = run_within(recipe, mib, nproc=2)
    assert result.status == 1
    (error,) = result.errors
    assert re.search(
        r"rank \d on \S+ was killed by SIGKILL: perhaps out of memory: this container or job may "
        rf"use {mib} MiB: give it more, or start fewer ranks",
        error,
    )


@pytest.mark.slow
def test_nobody_else_may_write_into_a_run(recipe: Recipe) -> None:
    """Even where the user's umask lets everybody: weights and snapshots are loaded again."""
    command = shlex.join(recipe.command("ddp_spawn", "--nproc", "1", "--epochs", "1"))
    result = recipe.finish(recipe.start("sh", "-c", f"umask 0; {command}"), recipe.tmp_path / "run")
    made = [result.assert_ok().folder, *result.folder.rglob("*")]
    assert len(made) > 10
    assert not [path for path in made if path.stat().st_mode & stat.S_IWOTH]


def test_a_working_folder_that_was_removed_is_named(recipe: Recipe) -> None:
    gone = recipe.tmp_path / "gone"
    gone.mkdir()
    line = shlex.join([sys.executable, "-m", "recipes", "predict", "/run", "/one.png"])
    process = recipe.start("sh", "-c", f"cd {gone} && rmdir {gone} && exec {line}")
    result = recipe.finish(process, recipe.tmp_path)
    says = "error: the working folder was removed: change to another one (cd)\n"
    assert (result.status, result.stderr) == (2, says)


def test_front_door_lists_the_recipes(recipe: Recipe) -> None:
    result = recipe.module()
    assert result.status == 0
    for name in ("ddp_launch", "ddp_spawn"):
        assert re.search(rf"^  {name} +DistributedDataParallel", result.stdout, re.MULTILINE)


def test_help_lists_grouped_options_with_defaults_and_units(recipe: Recipe) -> None:
    result = recipe.module("ddp_launch", "--help")
    assert result.status == 0
    text = " ".join(re.sub("[│─╭╮╰╯]", " ", result.stdout).split())
    for part in (
        "launch options",
        "run options",
        "data options",
        "model options",
        "optimizer options",
        "parallel options",
        "--global-batch-size",
        "(default: 0.1)",
        "--sync-bn, --no-sync-bn",
        "{auto,gloo,nccl}",
        "[steps]",
        "--nproc",
    ):
        assert part in text, part


def test_help_of_a_recipe_that_imports_triton_says_nothing_else(recipe: Recipe) -> None:
    result = recipe.module("model_parallel_toy", "--help")
    assert (result.status, result.stderr) == (0, "")


def test_make_run_without_a_recipe_is_no_success(recipe: Recipe) -> None:
    need("make")
    command = ("make", "-C", ROOT, "run", f"PYTHON={sys.executable}", "NPROC=4")
    result = recipe.finish(recipe.start(*command), recipe.tmp_path)
    assert result.status == 2
    assert result.errors == ["error: no recipe given: make run RECIPE=NAME"]
    assert "ddp_spawn" in result.stdout


REFUSED_BY_MAKE = {
    "run RECIPE=ddp_launch ARG=--help": "make knows no variable ARG: did you mean ARGS?",
    "run RECIPE=ddp_launch nproc=1": "make knows no variable nproc: did you mean NPROC?",
    "run EPOCHS=1": 'make knows no variable EPOCHS: give options as ARGS="--epochs ..."',
    "run RECIPE=ddp_launch INPUT=photos": "make run does not use INPUT: it uses ARGS, MASTER_ADDR",
    "predict": "no run given: make predict RUN=runs/",
    "predict RUN=runs/a": "no images given: make predict RUN=runs/a INPUT=photos",
    "evaluate ARGS=--json": "no run given: make evaluate RUN=runs/",
    "reproduce": "no run given: make reproduce RUN=runs/",
    "export TO=a.pt2": "no run given: make export RUN=runs/",
    "export RUN=runs/a": "no file given: make export RUN=runs/a TO=model.pt2",
    "test SUITE=fast": "no suite fast: SUITE is slow, slurm, image, by_hand, faults or soak",
}


@pytest.mark.parametrize("words", REFUSED_BY_MAKE)
def test_make_refuses_what_cannot_be_meant_before_it_starts_anything(
    recipe: Recipe, words: str
) -> None:
    need("make")
    began = recipe.tmp_path / "began"
    program = recipe.tmp_path / "python"
    program.write_text(f"#!/bin/sh\ntouch {began}\n")
    program.chmod(0o755)
    process = recipe.start("make", "-C", ROOT, *words.split(), f"PYTHON={program}")
    result = recipe.finish(process, recipe.tmp_path)
    assert (result.status, len(result.errors)) == (2, 1)
    assert result.errors[0].startswith(f"error: {REFUSED_BY_MAKE[words]}")
    assert not began.exists()


def test_make_takes_no_offence_at_the_environment(recipe: Recipe) -> None:
    need("make")
    env = {"EPOCHS": "1", "INPUT": "x"}
    process = recipe.start("make", "-C", ROOT, "-n", "run", "RECIPE=ddp_launch", env=env)
    assert "-m recipes ddp_launch" in recipe.finish(process, recipe.tmp_path).assert_ok().stdout


def test_the_list_of_makes_variables_names_the_targets_that_use_them() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {target: names for target, names in used(makefile).items() if "need" not in target}
    for line in re.findall(r"(?m)^#: (.*)", makefile):
        if not (listed := re.search(r"\(([a-z, -]+)[;)]", line)):
            continue
        for name in re.findall(r"\b([A-Z_]+)=", line):
            users = {target for target, names in targets.items() if name in names}
            assert users == set(listed[1].split(", ")), name
    assert "NPROC" in targets["run"], "through LAUNCH"
    everywhere = {"ARGS", "PYTHON", "STACK"}
    assert all(everywhere & names for target, names in targets.items() if "test" in target)


def test_tensorboard_gets_its_args(recipe: Recipe) -> None:
    need("make")
    command = ("make", "-C", ROOT, "-n", "tensorboard", "ARGS=--port 7007")
    result = recipe.finish(recipe.start(*command), recipe.tmp_path).assert_ok()
    assert "-m tensorboard.main --logdir runs --port 7007\n" in result.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("make", "-C", ROOT, "test", "PYTHON=python"),
        ("make", "-C", ROOT, "run", "RECIPE=ddp_launch", "PYTHON=python"),
        ("python", "-m", "recipes", "ddp_launch", "--nproc", "2"),
        ("python", "-m", "recipes", "predict", "a", "b"),
    ],
)
def test_an_interpreter_without_the_packages_is_one_line(
    recipe: Recipe, words: tuple[str | Path, ...]
) -> None:
    need("make")
    bare = recipe.tmp_path / "python"  # no packages, but the project
    bare.write_text(f'#!/bin/sh\nexec {sys._base_executable} -S "$@"\n')  # type: ignore[attr-defined]
    bare.chmod(0o755)
    env = {"PATH": f"{recipe.tmp_path}:{os.environ['PATH']}"}
    result = recipe.finish(recipe.start(*words, env=env), recipe.tmp_path)
    assert (result.status, len(result.errors)) == (2, 1), result.stderr
    assert re.match(r"error: \S+ has no packages? .*\b(tyro|torch)\b", result.errors[0])
    assert "Traceback" not in result.stderr


def only_the_makefile(folder: Path) -> Path:
    """A copy of the Makefile, and a lock file without packages."""
    need("make")
    stacks = folder / "docker" / "stacks"
    stacks.mkdir(parents=True)
    (stacks / "cu132.txt").write_text("# nothing\n")
    shutil.copy(ROOT / "Makefile", folder)
    return folder


def test_make_names_the_package_of_the_module_venv(recipe: Recipe) -> None:
    copy, without = only_the_makefile(recipe.tmp_path / "copy"), recipe.tmp_path / "without"
    without.mkdir()
    (without / "ensurepip.py").write_text("raise ModuleNotFoundError")
    process = recipe.start("make", "-C", copy, "venv", env={"PYTHONPATH": str(without)})
    result = recipe.finish(process, copy)
    assert result.status == 2
    assert len(result.errors) == 1
    assert "apt install python3-venv" in result.errors[0]
    assert not list(copy.glob(".venv*"))


def test_make_changes_no_environment_outside_its_folder(recipe: Recipe) -> None:
    copy, other = only_the_makefile(recipe.tmp_path / "copy"), recipe.tmp_path / "other"
    other.mkdir()
    (copy / ".venv").symlink_to(other)
    for target in ("venv", "venv-dev"):
        result = recipe.finish(recipe.start("make", "-C", copy, target), copy)
        assert (result.status, len(result.errors)) == (2, 1)
        assert f".venv is a link to {other}, which has not the packages" in result.errors[0]
    assert not list(other.iterdir())


def test_make_installs_nothing_on_macos_and_names_the_container(recipe: Recipe) -> None:
    copy, programs = only_the_makefile(recipe.tmp_path / "copy"), recipe.tmp_path / "programs"
    programs.mkdir()
    (programs / "uname").write_text("#!/bin/sh\necho Darwin\n")
    (programs / "uname").chmod(0o755)
    env = {"PATH": f"{programs}:{os.environ['PATH']}"}
    result = recipe.finish(recipe.start("make", "-C", copy, "venv", env=env), copy)
    assert (result.status, len(result.errors)) == (2, 1)
    assert "this is macOS" in result.errors[0]
    assert "container (docker/README.md)" in result.errors[0]
    assert not list(copy.glob(".venv*"))


@pytest.mark.slow
def test_a_run_keeps_its_environment_while_make_venv_renews_it(recipe: Recipe) -> None:
    """With lock files that install nothing."""
    need("make")
    copy, swapped = recipe.tmp_path / "copy", recipe.tmp_path / "swapped"
    lock = copy / "docker" / "stacks" / "cu132.txt"
    lock.parent.mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", copy)
    (copy / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "make_variables.py", copy / "tools")
    (copy / "recipes").mkdir()
    (copy / "recipes" / "__init__.py").touch()
    (copy / "recipes" / "__main__.py").write_text(
        "import sys, time, pathlib; print(pathlib.Path(sys.prefix).name, flush=True)\n"
        f"while not pathlib.Path({str(swapped)!r}).exists(): time.sleep(0.05)\n"
        "import of_this_environment\n"
    )

    def start(*words: str) -> "subprocess.Popen[str]":
        # PYTHON may be that of `make test PYTHON=...`
        return recipe.start("env", "--unset=PYTHON", "make", "-C", copy, *words)

    def make(*words: str) -> Result:
        return recipe.finish(start(*words), copy)

    lock.write_text("# first\n")
    make("venv").assert_ok()
    packages = next((copy / ".venv").glob("lib/python*/site-packages"))
    (packages / "of_this_environment.py").touch()
    run = start("run", "RECIPE=x")
    printed = run.stdout
    assert printed
    wait_for(lambda: printed.readline().startswith(".venv"))
    lock.write_text("# second\n")
    renewed = make("venv").assert_ok()
    swapped.touch()
    recipe.finish(run, copy).assert_ok()
    assert "is left for the runs that use it" in renewed.stdout
    assert (copy / ".venv" / "lock.txt").read_text() == "# second\n"
    lock.write_text("no-such-package==1 --hash=sha256:00\n")
    assert make("venv").status == 2
    assert (copy / ".venv" / "lock.txt").read_text() == "# second\n", "as it was"


def test_make_help_is_the_default_goal_and_diff_ddp_shows_a_diff(recipe: Recipe) -> None:
    need("make", "awk", "diff")
    listing = recipe.finish(recipe.start("make", "-C", ROOT), recipe.tmp_path).assert_ok().stdout
    for target in ("run", "test", "check", "lock", "diff-ddp", "help"):
        assert f"make {target} " in listing
    diff = recipe.finish(recipe.start("make", "-C", ROOT, "diff-ddp"), recipe.tmp_path).stdout
    changed = [line for line in diff.splitlines() if re.match(r"[+-](?![+-]{2})", line)]
    assert len(changed) > 10


@pytest.mark.slow
def test_images_are_verified_once_and_loaded_on_the_cores_that_are_left(recipe: Recipe) -> None:
    root = flowers(recipe.tmp_path / "photos")
    options = "--data imagefolder --image-size 16 --global-batch-size 4 --nproc 2".split()
    options += ["--data-path", str(root), "--max-steps"]
    first = recipe("ddp_launch", *options, "1").assert_ok().stdout
    assert "20 images: verified, all can be decoded" in first
    each = max(1, usable_cores() // 2)
    workers = min(8, each - 1)
    assert f"--num-workers {workers} (CPU cores per rank: {each})" in first
    assert json.loads((recipe.tmp_path / "run" / "config.json").read_text())["num_workers"] == (
        workers
    )
    assert ("training uses 2 of" in first) == (usable_cores() > 2)
    again = recipe("ddp_launch", *options, "2").assert_ok().stdout
    assert "20 images: verified before, unchanged since" in again
    # A larger photo, cut to the size of the one that it replaces, whose times it is given.
    replaced, larger = root / "tulip" / "tulip 3.jpg", recipe.tmp_path / "larger.jpg"
    before = replaced.stat()
    photo(larger, 1, size=(200, 200))
    larger.write_bytes(larger.read_bytes()[: before.st_size])
    os.utime(larger, ns=(before.st_atime_ns, before.st_mtime_ns))
    larger.rename(replaced)
    assert (replaced.stat().st_size, replaced.stat().st_mtime_ns) == (
        before.st_size,
        before.st_mtime_ns,
    )
    refused = recipe("ddp_launch", *options, "3")
    assert refused.status == 2
    assert "tulip 3.jpg cannot be decoded as an image" in refused.errors[0]


@pytest.mark.slow
def test_a_default_run_takes_fewer_loading_processes_where_shared_memory_is_small(
    recipe: Recipe,
) -> None:
    """And one process says how many of the cores it computes on."""
    need_root()
    need("unshare")
    if usable_cores() < 2:
        pytest.skip("needs two CPU cores")
    root = flowers(recipe.tmp_path / "photos")
    command = recipe.command(
        *"ddp_launch --nproc 1 --data imagefolder --data-path".split(),
        root,
        *"--image-size 128 --global-batch-size 16 --max-steps 1".split(),
    )
    script = 'mount --make-rprivate / && mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    process = recipe.start("unshare", "--mount", "sh", "-c", script, "sh", *command)
    result = recipe.finish(process, recipe.tmp_path / "run").assert_ok()
    assert "/dev/shm has 1 MiB free" in result.stdout
    assert "leave room for 0 loading processes" in result.stdout
    assert "--num-workers 0 (CPU cores per rank: " in result.stdout
    assert f"training uses 1 of {usable_cores()} CPU cores" in result.stdout
