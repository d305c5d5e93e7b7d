"""The image, built from the shipped Dockerfile and run by a real engine."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from tests.conftest import (
    OLD_DRIVER,
    OTHER_NCCL,
    ROOT,
    Result,
    library,
    make_run,
    need,
    wait_for,
)
from tests.image.conftest import IMAGE
from tests.image.engine import CALLER as UID
from tests.image.engine import Engine

pytestmark = [pytest.mark.image, pytest.mark.timeout(1800)]  # the first one waits for the build

OPTIONS = ("--epochs", "3", "--snapshot-every", "10", "--log-every", "1")
HARDENED = (
    "--user",
    f"{UID}:{UID}",
    "--cap-drop",
    "ALL",
    "--security-opt",
    "no-new-privileges",
    "--read-only",
    "--tmpfs",
    "/tmp",
)

# Other NCCLs and drivers, as far as they are asked: what a user's environment may bring.

# Python reads this before anything else: steps that leave time for `docker stop`.
_SLOW = """\
import time
from common.run.loop import Loop
after_step = Loop.after_step
def changed(self, loss):
    after_step(self, loss)
    time.sleep(0.05)
Loop.after_step = changed
"""


@pytest.fixture
def runs() -> Iterator[Path]:
    """A folder for runs that belongs to the caller of the container, and that it can reach."""
    folder = Path(tempfile.mkdtemp(prefix="runs-"))
    os.chown(folder, UID, UID)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """In the environment that runs the tests, on this machine."""
    return make_run(2, OPTIONS, tmp_path_factory.mktemp("reference"))


def run(
    engine: Engine,
    *recipe: str,
    docker: tuple[str, ...] = (),
    folder: Path | None = None,
) -> Result:
    """`docker run IMAGE RECIPE...`, with a folder as runs/ where one is given."""
    mounted = ("--volume", f"{folder}:/workspace/runs") if folder else ()
    done = engine.run("run", "--rm", *mounted, *docker, IMAGE, *recipe, check=False)
    return Result(done.returncode, done.stdout, done.stderr, (folder or Path()) / "run")


def test_no_argument_lists_the_recipes(engine: Engine, image: str) -> None:
    said = engine.run("run", "--rm", image).stdout
    for path in (ROOT / "recipes").glob("*/train.py"):
        assert f"  {path.parent.name} " in said


def test_the_weights_of_make_run(engine: Engine, image: str, reference: Result, runs: Path) -> None:
    """As one user among others, with no rights, no network and nothing writable but runs/."""
    done = run(
        engine,
        "ddp_launch",
        "--nproc",
        "2",
        *OPTIONS,
        "--output-dir",
        "runs/run",
        docker=(*HARDENED, "--shm-size=1g", "--network", "none"),
        folder=runs,
    )
    assert done.assert_ok().sha == reference.sha
    assert done.losses == reference.losses
    assert {path.stat().st_uid for path in done.folder.rglob("*")} == {UID}


def test_doctor_finds_no_error_but_what_is_missing(engine: Engine, image: str, runs: Path) -> None:
    """Docker's own 64 MB of /dev/shm, and no network: true warnings."""
    done = run(
        engine, "doctor", "--nproc", "2", docker=(*HARDENED, "--network", "none"), folder=runs
    ).assert_ok()
    lines = done.stdout.splitlines()
    assert not [line for line in lines if line.startswith("  error")], done.stdout
    assert "  warning  shared memory: /dev/shm has 64 MiB free" in lines
    assert any(line.startswith("  ok       software: stack cu132: ") for line in lines)
    assert any(line.startswith("  ok       all-reduce: ") for line in lines)


def test_make_image_run_says_what_it_ran(engine: Engine, image: str, runs: Path) -> None:
    need("setpriv")
    open_to_all = all(path.stat().st_mode & 0o001 for path in (ROOT, *ROOT.parents))
    caller = UID if open_to_all else os.geteuid()
    done = engine.call(
        "setpriv",
        f"--reuid={caller}",
        f"--regid={caller}",
        "--clear-groups",
        "make",
        "image-run",
        "RECIPE=checkpoint_rnn",
        f"IMAGE={image}",
        f"RUNS={runs}",
        "PYTHON=python3",
        "ARGS=--max-steps 2 --output-dir runs/run",
    )
    assert "checkpoint_rnn: " in done.stdout
    assert {path.stat().st_uid for path in (runs / "run").rglob("*")} == {caller}
    manifest = json.loads((runs / "run" / "manifest.json").read_text())
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert manifest["git_commit"] == head.stdout.strip()
    lock = (ROOT / "docker" / "stacks" / "cu132.txt").read_bytes()
    assert manifest["lock_sha256"] == sha256(lock).hexdigest()
    assert manifest["stack"] == "cu132"
    assert manifest["git_dirty"] is bool(
        subprocess.run(["git", "-C", ROOT, "diff", "HEAD", "--quiet"]).returncode
    )
    digest = engine.run("image", "inspect", "--format", "{{.Id}}", image).stdout.strip()
    assert manifest["image_digest"] == digest
    pinned = json.loads((ROOT / "docker" / "stacks.json").read_text())["cu132"]
    assert manifest["nccl"] == pinned["nccl"]
    assert pinned["cudnn"].startswith(manifest["cudnn"])


def test_two_hosts_of_compose(engine: Engine, image: str, reference: Result, runs: Path) -> None:
    env = {
        "IMAGE": image,
        "RUNS": str(runs),
        "OWNER": f"{UID}:{UID}",
        "OPTIONS": " ".join([*OPTIONS, "--output-dir", "runs/run"]),
    }
    compose = ("compose", "--file", "docker/compose.yaml", "--profile", "cpu")
    try:
        said = engine.run(*compose, "up", env=env).stdout
    finally:
        engine.run(*compose, "down", env=env)
    assert Result(0, said, "", runs / "run").sha == reference.sha, said
    manifest = json.loads((runs / "run" / "manifest.json").read_text())
    assert manifest["hosts"] == ["host0", "host1"]
    for profile in ("cpu", "gpu"):
        engine.run("compose", "--file", "docker/compose.yaml", "--profile", profile, "config")


def test_docker_stop_saves_and_docker_start_goes_on(
    engine: Engine, image: str, reference: Result, runs: Path, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(_SLOW)
    container = engine.run(
        "run",
        "--detach",
        "--volume",
        f"{runs}:/workspace/runs",
        "--volume",
        f"{slow}:/slow:ro",
        "--user",
        f"{UID}:{UID}",
        "--env",
        "PYTHONPATH=/opt/recipes:/slow",
        image,
        "ddp_launch",
        "--nproc",
        "2",
        *OPTIONS,
        "--output-dir",
        "runs/run",
    ).stdout.strip()
    try:
        metrics = runs / "run" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 13)
        start_s = time.monotonic()
        engine.run("stop", "--time", "30", container)
        assert time.monotonic() - start_s < 10
        assert engine.run("wait", container).stdout.strip() == "75"
        assert not (runs / "run" / "summary.json").exists()
        engine.run("start", "--attach", container)
    finally:
        engine.run("rm", "--force", container)
    done = Result(0, "", "", runs / "run")
    assert done.sha == reference.sha
    assert done.losses == reference.losses
    assert done.summary["resumed_from"] % 10  # saved when it was told to, not at the interval


def test_small_shared_memory(engine: Engine, image: str, runs: Path) -> None:
    """Docker's default is 64 MB: refused with the flag to add, or fewer loading processes."""
    images = (
        "ddp_launch",
        "--nproc",
        "2",
        "--data",
        "fake",
        "--image-size",
        "64",
        "--global-batch-size",
        "512",
        "--max-steps",
        "1",
    )
    user = ("--user", f"{UID}:{UID}")
    refused = run(
        engine,
        *images,
        "--num-workers",
        "1",
        "--output-dir",
        "runs/refused",
        folder=runs,
        docker=user,
    )
    assert refused.status == 2
    (line,) = refused.errors
    assert re.match(
        r"error: --num-workers 1: /dev/shm has 64 MiB free, and batches of \d+ MiB "
        r"leave room for 0 loading processes on each of 2 ranks",
        line,
    )
    assert "--shm-size=" in line
    assert not list(runs.rglob("metrics.jsonl"))
    fewer = run(
        engine,
        *images,
        "--num-workers",
        "auto",
        "--output-dir",
        "runs/fewer",
        folder=runs,
        docker=user,
    )
    assert "leave room for 0 loading processes" in fewer.assert_ok().stdout
    enough = run(
        engine,
        *images,
        "--num-workers",
        "1",
        "--output-dir",
        "runs/enough",
        folder=runs,
        docker=(*user, "--shm-size=1g"),
    )
    shas = {
        json.loads((runs / name / "summary.json").read_text())["weights_sha256"]
        for name in ("fewer", "enough")
    }
    assert enough.assert_ok().status == fewer.status
    assert len(shas) == 1
    # What is said to fit does fit, to the last process.
    small = (
        "ddp_launch",
        "--nproc",
        "2",
        "--data",
        "fake",
        "--image-size",
        "40",
        "--global-batch-size",
        "512",
        "--max-steps",
        "4",
        "--output-dir",
        "runs/small",
        "--num-workers",
    )
    (line,) = run(engine, *small, "50", folder=runs, docker=user).errors
    (most,) = re.findall(r"leave room for (\d+) loading", line)
    assert int(most) >= 2
    run(engine, *small, most, folder=runs, docker=user).assert_ok()


@pytest.mark.parametrize("variable", ["LD_LIBRARY_PATH", "LD_PRELOAD"])
def test_another_nccl_is_refused(engine: Engine, image: str, tmp_path: Path, variable: str) -> None:
    fake = library(tmp_path / "fake", "libnccl.so.2", OTHER_NCCL)
    value = "/fake/libnccl.so.2" if variable == "LD_PRELOAD" else "/elsewhere:/fake"
    done = run(
        engine,
        "ddp_launch",
        docker=("--volume", f"{fake}:/fake:ro", "--env", f"{variable}={value}"),
    )
    assert done.status == 2
    assert done.errors == [
        f"error: {variable} brings nccl 2.18.3 where cu132 pins 2.30.7 (/fake/libnccl.so.2): "
        f"unset {variable}"
    ]


def test_a_stray_cuda_library_is_refused(engine: Engine, image: str) -> None:
    """One that torch takes from elsewhere than from its wheel, be it the same: by the build's check
    and at the start."""
    script = """\
stray=/tmp/libnvJitLink.so.13
cp /opt/venv/lib/python3.*/site-packages/nvidia/cu13/lib/libnvJitLink.so.13 $stray
export LD_PRELOAD=$stray
python /opt/recipes/docker/verify.py installed cu132; echo status $?
python -m recipes ddp_launch --nproc 1; echo status $?
"""
    done = engine.run("run", "--rm", "--entrypoint", "sh", image, "-c", script)
    assert re.findall(r"status (\d)", done.stdout) == ["1", "2"]
    for line in re.findall("(?m)^error: .*$", done.stderr):
        assert "/tmp/libnvJitLink.so.13 is not from the locked wheels" in line


def test_another_stack_is_refused(engine: Engine, image: str) -> None:
    done = run(engine, "ddp_launch", "--nproc", "1", docker=("--env", "RECIPES_STACK=cu130"))
    assert done.status == 2
    (line,) = done.errors
    assert "nccl 2.30.7 where cu130 pins 2.28.9" in line
    assert "torch 2.15.0 where cu130 pins 2.11.0" in line


def test_an_old_driver_is_refused(engine: Engine, image: str, tmp_path: Path) -> None:
    fake = library(tmp_path / "fake", "libcuda.so.1", OLD_DRIVER)
    docker = ("--volume", f"{fake}:/fake:ro", "--env", "LD_LIBRARY_PATH=/fake")
    done = run(engine, "ddp_launch", "--nproc", "2", docker=docker)
    assert done.status == 2
    (line,) = done.errors
    assert "driver supports CUDA 12.4 at most" in line
    assert "needs driver 580 or newer" in line
    assert "take stack cu128 (STACK=cu128)" in line
    run(engine, "ddp_launch", "--max-steps", "1", "--device", "cpu", docker=docker).assert_ok()


def test_gpus_without_nvidias_runtime_end_as_the_readme_says(engine: Engine, image: str) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has NVIDIA's runtime")
    done = run(engine, "ddp_launch", docker=("--gpus", "all"))
    said = 'could not select device driver "" with capabilities: [[gpu]]'
    assert done.status == 125
    assert said in done.stderr
    assert said in (ROOT / "docker" / "README.md").read_text()


def test_development_has_the_tests_and_a_compiler(engine: Engine, image: str) -> None:
    tag = f"{IMAGE}-development"
    build = " ".join(engine.build_arguments("development"))
    engine.call("make", "image", "TARGET=development", f"IMAGE={tag}", f"BUILD={build}")
    script = """\
python -m pytest -q -p no:cacheprovider tests/test_stack.py tests/test_optim.py
python -c '
import torch
x = torch.randn(64, 64)
f = lambda x: (x.sin() + x.cos()).relu().sum(1)
torch.testing.assert_close(torch.compile(f)(x), f(x))
print("compiled")'
"""
    said = engine.run("run", "--rm", "--user", f"{UID}:{UID}", tag, "bash", "-ec", script).stdout
    assert " passed" in said
    assert said.endswith("compiled\n")


def test_a_changed_lock_ends_the_build(engine: Engine, image: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "docker", copy / "docker")
    for name in ("common", "recipes", "tools"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    lock = copy / "docker" / "stacks" / "cu132.txt"
    lock.write_text(
        lock.read_text().replace("nvidia-nccl-cu13==2.30.7", "nvidia-nccl-cu13==2.30.4")
    )
    done = engine.run(
        "build",
        "--file",
        copy / "docker" / "Dockerfile",
        "--target",
        "runtime",
        "--tag",
        "torch-recipes:changed",
        *engine.build_arguments(),
        copy,
        check=False,
    )
    assert done.returncode != 0
    assert "error: nccl 2.30.4 where cu132 pins 2.30.7" in done.stderr


def test_what_the_image_holds(engine: Engine, image: str) -> None:
    inspected = json.loads(engine.run("image", "inspect", image).stdout)[0]
    config = inspected["Config"]
    assert config["User"] == "1000:1000"
    assert config["Entrypoint"] == ["python", "-m", "recipes"]
    lock = (ROOT / "docker" / "stacks" / "cu132.txt").read_bytes()
    assert config["Labels"]["torch-recipes.lock-sha256"] == sha256(lock).hexdigest()
    assert config["Labels"]["torch-recipes.stack"] == "cu132"
    assert re.match(r"[0-9a-f]{40}", config["Labels"]["org.opencontainers.image.revision"])
    # Only what is named is there: no tests, no caches, no test data, nothing of the build's.
    script = """\
ls -A /tmp; cd /opt/recipes; ls -A
find / -xdev \\( -path /proc -o -path /sys \\) -prune -o -type f \\
    \\( -path '*/.cache/*' -o -path '/root/*' -o -path '/tmp/*' -o -path '/opt/*.whl' \\) -print
echo wheels; cd /opt/venv/lib
find . -name __pycache__ -prune -o -type f -print0 | du -cb --files0-from=- | tail -n 1
"""
    said = engine.run("run", "--rm", "--user", "0:0", "--entrypoint", "sh", image, "-c", script)
    found, wheels = said.stdout.split("wheels\n")
    base = {"/root/.bashrc", "/root/.profile"}
    assert set(found.split()) - base == {"common", "docker", "recipes", "tools"}
    assert not re.search(
        r"(?i)token|secret|password", engine.run("history", "--no-trunc", image).stdout
    )
    share = inspected["Size"] / int(wheels.split()[0])
    print(f"image {inspected['Size'] / 1e9:.2f} GB, {share:.3f} times its wheels")
    assert share < 1.15
