"""The image, built from the shipped Dockerfile and run by a real engine."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.commands import ROOT, Result, make_run, wait_for
from tests.helpers.engine import CALLER as UID
from tests.helpers.engine import DOCKERFILE, IMAGE, Engine
from tests.helpers.images import flowers
from tests.helpers.machine import OLD_DRIVER, OTHER_NCCL, library, need

pytestmark = [pytest.mark.image, pytest.mark.timeout(1800)]  # the first one waits for the build

OPTIONS = ("--epochs", "3", "--snapshot-every", "10", "--log-every", "1")
HARDENED = (
    "--user",
    f"{UID}:{UID}",
    *"--cap-drop ALL --security-opt no-new-privileges --read-only --tmpfs /tmp".split(),
)

# Appended to common/run/loop.py: steps that leave time for `docker stop`.
_SLOW = """
import time
_after_step = Loop.after_step
def _changed(self, loss):
    _after_step(self, loss)
    time.sleep(0.5)
Loop.after_step = _changed
print("changed code", flush=True)
"""

GROUP = 54321
"""A group that is not the caller's first one."""


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
    engine: Engine, *recipe: str, docker: tuple[str, ...] = (), folder: Path | None = None
) -> Result:
    """`docker run IMAGE RECIPE...`, with a folder as runs/ where one is given."""
    mounted = ("--volume", f"{folder}:/workspace/runs") if folder else ()
    done = engine.run("run", "--rm", *mounted, *docker, IMAGE, *recipe, check=False)
    return Result(done.returncode, done.stdout, done.stderr, (folder or Path()) / "run")


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _head() -> str:
    return _git("rev-parse", "HEAD")


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


def test_predict_says_in_the_image_what_it_says_here(
    engine: Engine, image: str, runs: Path
) -> None:
    photos = flowers(runs / "photos", per_class=5)
    data = ("--data", "imagefolder", "--data-path", str(photos), "--image-size", "32")
    make_run(1, (*data, "--model", "resnet18", "--epochs", "1", "--global-batch-size", "4"), runs)
    command = (sys.executable, "-m", "recipes", "predict", runs / "run", photos, "--json")
    here = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    there = run(
        engine,
        *("predict", "runs/run", "runs/photos", "--json"),
        docker=("--user", f"{UID}:{UID}"),
        folder=runs,
    ).assert_ok()
    for ours, theirs in zip(here.splitlines(), there.stdout.splitlines(), strict=True):
        one, two = json.loads(ours), json.loads(theirs)
        assert one["class"] == two["class"]
        assert one["probability"] == pytest.approx(two["probability"], abs=1e-6)


def test_shards_are_written_and_text_is_sampled_in_the_image(
    engine: Engine, image: str, runs: Path
) -> None:
    """Of the language reference inside the image's Python."""
    options = ("--layers", "1", "--width", "16", "--context", "64", "--max-steps", "3")
    docker = ("--user", f"{UID}:{UID}", "--shm-size=1g")
    train = ("fsdp", "--nproc", "2", *options, "--output-dir", "runs/run")
    done = run(engine, *train, docker=docker, folder=runs).assert_ok()
    assert len(list((done.folder / "snapshots").glob("*.shard"))) == 2
    sample = ("sample", "runs/run", "--prompt", "The with statement", "--length", "9")
    said = run(engine, *sample, docker=docker, folder=runs).assert_ok().stdout
    assert said.startswith("The with statement")


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
    """As a user who may write runs/ by a supplementary group only."""
    need("setpriv")
    os.chown(runs, 0, GROUP)
    runs.chmod(0o770)
    open_to_all = all(path.stat().st_mode & 0o001 for path in (ROOT, *ROOT.parents))
    caller = UID if open_to_all else os.geteuid()
    done = engine.call(
        "setpriv",
        f"--reuid={caller}",
        f"--regid={caller}",
        f"--groups={GROUP}",
        "make",
        "image-run",
        "RECIPE=checkpoint_rnn",
        f"IMAGE={image}",
        f"RUNS={runs}",
        "ARGS=--max-steps 2 --output-dir runs/run",
    )
    assert "checkpoint_rnn: " in done.stdout
    assert {path.stat().st_uid for path in (runs / "run").rglob("*")} == {caller}
    manifest = json.loads((runs / "run" / "manifest.json").read_text())
    assert manifest["git_commit"] == _head()
    lock = (ROOT / "docker" / "stacks" / "cu132.txt").read_bytes()
    assert manifest["lock_sha256"] == sha256(lock).hexdigest()
    assert manifest["stack"] == "cu132"
    changed = _git("status", "--porcelain", "common", "docker", "recipes", "tools")
    assert manifest["git_dirty"] is bool(changed)
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
        command = ("compose", "--file", "docker/compose.yaml", "--profile", profile, "config")
        services = json.loads(engine.run(*command, "--format", "json").stdout)["services"]
        assert {service["stop_grace_period"] for service in services.values()} == {"1m0s"}


def test_docker_stop_saves_and_docker_start_goes_on(
    engine: Engine, image: str, reference: Result, runs: Path, tmp_path: Path
) -> None:
    """Mounted code: it is run, and the manifest does not take it for the commit's."""
    slow = tmp_path / "loop.py"
    slow.write_text((ROOT / "common" / "run" / "loop.py").read_text() + _SLOW)
    container = engine.run(
        "run",
        "--detach",
        "--volume",
        f"{runs}:/workspace/runs",
        "--volume",
        f"{slow}:/opt/recipes/common/run/loop.py:ro",
        "--user",
        f"{UID}:{UID}",
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
        wait_for(lambda: metrics.exists())
        assert "changed code" in engine.run("logs", container).stdout
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 13)
        engine.run("stop", "--time", "30", container)
        assert engine.run("wait", container).stdout.strip() == "75"
        stopped = re.search(r"stopped after step (\d+)", engine.run("logs", container).stdout)
        assert not (runs / "run" / "summary.json").exists()
        engine.run("start", "--attach", container)
    finally:
        engine.run("rm", "--force", container)
    done = Result(0, "", "", runs / "run")
    assert done.sha == reference.sha
    assert done.losses == reference.losses
    assert stopped
    assert done.summary["resumed_from"] == int(stopped[1]), "saved when it was told to"
    manifest = json.loads((runs / "run" / "manifest.json").read_text())
    assert manifest["git_commit"] == _head()
    assert manifest["git_dirty"] is True


def test_code_that_is_changed_in_the_image_is_run(engine: Engine, image: str) -> None:
    script = """\
for file in /opt/venv/lib/python3.*/site-packages/tqdm/__init__.py /opt/recipes/common/errors.py; do
    echo 'CHANGED = 1' >>$file
done
python -c 'import tqdm, common.errors; print(tqdm.CHANGED + common.errors.CHANGED)'
"""
    done = engine.run("run", "--rm", "--user", "0:0", "--entrypoint", "sh", image, "-ec", script)
    assert done.stdout == "2\n"


def test_small_shared_memory(engine: Engine, image: str, runs: Path) -> None:
    """Docker's default is 64 MB: refused with the flag to add; what is said to fit does fit."""
    train = (
        "ddp_launch --nproc 2 --data fake --image-size 40 --global-batch-size 512 "
        "--max-steps 4 --output-dir runs/run --num-workers"
    ).split()
    user = ("--user", f"{UID}:{UID}")
    refused = run(engine, *train, "50", folder=runs, docker=user)
    assert refused.status == 2
    (line,) = refused.errors
    assert re.match(
        r"error: --num-workers 50: /dev/shm has 64 MiB free, and batches of \d+ MiB", line
    )
    assert "--shm-size=" in line
    assert not list(runs.rglob("metrics.jsonl"))
    (most,) = re.findall(r"leave room for (\d+) loading", line)
    assert int(most) >= 2
    run(engine, *train, most, folder=runs, docker=user).assert_ok()


def test_limits_of_memory_and_processes_are_named(engine: Engine, image: str, runs: Path) -> None:
    two = "ddp_launch --nproc 2 --max-steps 1 --output-dir runs/limits".split()
    user = ("--user", f"{UID}:{UID}")
    memory = ("--memory=400m", "--memory-swap=400m")
    refused = run(engine, *two, folder=runs, docker=(*user, *memory))
    assert refused.status == 2
    (line,) = refused.errors
    assert line.startswith("error: 2 processes do not fit here: 400 MiB of memory are free, and")
    few = run(engine, *two, folder=runs, docker=(*user, "--pids-limit=20"))
    assert few.status != 0
    assert "give it a larger --pids-limit" in few.errors[0], few.stderr


def test_another_nccl_is_refused(engine: Engine, image: str, tmp_path: Path) -> None:
    fake = library(tmp_path / "fake", "libnccl.so.2", OTHER_NCCL)
    docker = ("--volume", f"{fake}:/fake:ro", "--env", "LD_PRELOAD=/fake/libnccl.so.2")
    done = run(engine, "ddp_launch", "--nproc", "1", docker=docker)
    assert done.status == 2
    (line,) = done.errors
    assert "undefined symbol: nccl" in line
    assert "remove what LD_PRELOAD and LD_LIBRARY_PATH bring" in line


def test_plugins_of_nccl_and_a_profiler_may_be_preloaded(
    engine: Engine, image: str, tmp_path: Path
) -> None:
    """Stand-ins: the names are those of AWS's plugin and of CUPTI, the code is empty."""
    names = ("libnccl-net-ofi.so", "libcupti.so.12")
    for name in names:
        library(tmp_path / "plugins", name, "")
    preload = ":".join(f"/plugins/{name}" for name in names)
    docker = ("--volume", f"{tmp_path}/plugins:/plugins:ro", "--env", f"LD_PRELOAD={preload}")
    done = run(engine, "ddp_launch", "--nproc", "1", "--check", docker=docker).assert_ok()
    assert "cannot be preloaded" not in done.stderr


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
    done = run(engine, "ddp_launch", "--nproc", "2", "--device", "cuda", docker=docker)
    assert done.status == 2
    (line,) = done.errors
    assert "NVIDIA driver on your system is too old (found version 12040)" in line
    assert "choose a stack for an older driver" in line
    on_cpus = ("ddp_launch", "--nproc", "1", "--device", "cpu", "--check")
    run(engine, *on_cpus, docker=docker).assert_ok()


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
    runtime, development = (
        json.loads(engine.run("image", "inspect", name).stdout)[0] for name in (image, tag)
    )
    for part in ("Labels", "Entrypoint", "WorkingDir", "User"):
        assert development["Config"][part] == runtime["Config"][part]
    plain_build(engine, "environment", "--tag", f"{IMAGE}-environment")
    (environment,) = json.loads(engine.run("image", "inspect", f"{IMAGE}-environment").stdout)
    shared = environment["RootFS"]["Layers"]
    for inspected in (runtime, development):
        assert inspected["RootFS"]["Layers"][: len(shared)] == shared
    script = """\
cd /opt/recipes
python -m pytest -q -p no:cacheprovider \\
    tests/common/test_stack.py
make --dry-run check >/tmp/check
! grep -e venv -e pip /tmp/check
tail -n 1 /tmp/check | sh
python -c '
from tests.gpu_check import RESULTS
from common.writing import write_json
RESULTS.mkdir()
write_json(RESULTS / "laws.json", {})
import torch
x = torch.randn(64, 64)
f = lambda x: (x.sin() + x.cos()).relu().sum(1)
torch.testing.assert_close(torch.compile(f)(x), f(x))
print("compiled")'
"""
    docker = ("--user", f"{UID}:{UID}", "--tmpfs", "/tmp:exec", "--entrypoint", "bash")
    said = engine.run("run", "--rm", *docker, tag, "-ec", script).stdout
    assert " passed" in said
    assert said.endswith("compiled\n")


def plain_build(engine: Engine, target: str, *options: str, check: bool = True) -> str:
    """What `docker build` says that is started without make."""
    dockerfile = ("--file", "docker/Dockerfile", "--target", target, "--progress=plain")
    words = (*dockerfile, *engine.build_arguments(), *options, ".")
    return engine.run("build", *words, check=check).stderr


def test_a_plain_build_installs_nothing_again(engine: Engine, image: str) -> None:
    said = plain_build(engine, "environment")
    (step,) = re.findall(r"(?m)^#(\d+) .*/opt/venv/bin/python -m pip install", said)
    assert f"\n#{step} CACHED\n" in said


def test_a_stack_that_does_not_exist_ends_the_build(engine: Engine, image: str) -> None:
    said = plain_build(engine, "runtime", "--build-arg", "STACK=cu999", check=False)
    assert "error: no stack 'cu999': there are cu132, cu130, cu128" in said
    assert "Traceback" not in said


def test_what_is_closed_to_the_user_is_named(engine: Engine, image: str, runs: Path) -> None:
    """--user drops the groups that a login has: --group-add gives them back."""
    closed = runs / "group"
    for number in range(10):
        folder = closed / "photos" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number * 20, 0, 0)).save(folder / f"{number}.png")
    os.chown(closed, 0, GROUP)
    closed.chmod(0o750)
    photos = ("--data", "imagefolder", "--data-path", "/data/photos", "--image-size", "8")
    command = ("ddp_launch", "--nproc", "1", "--max-steps", "1")
    docker = ("--user", f"{UID}:{UID}", "--volume", f"{closed}:/data:ro")
    done = run(engine, *command, *photos, docker=docker)
    assert done.status == 2
    assert done.errors == [
        f"error: --data-path /data/photos cannot be read: /data belongs to user 0, group {GROUP}, "
        f"and you are user {UID}: allow reading, or in a container give --group-add {GROUP}"
    ]
    added = (*docker, "--group-add", str(GROUP))
    run(engine, *command, *photos, "--global-batch-size", "2", "--check", docker=added).assert_ok()


def test_nowhere_to_write(engine: Engine, image: str, tmp_path: Path) -> None:
    done = run(engine, "ddp_launch", docker=("--read-only",))
    assert done.status == 2
    assert "give --tmpfs /tmp" in done.stderr
    assert "Traceback" not in done.stderr
    closed = ("--user", f"{UID}:{UID}", "--volume", f"{tmp_path}:/workspace/runs")
    done = run(engine, "ddp_launch", "--nproc", "1", docker=closed)
    assert done.status == 2
    assert done.errors == [
        "error: --output-dir runs/ddp_launch cannot be written (Permission denied): in this "
        f"container you are user {UID}: mount a folder that this user may write (--volume "
        "DIR:/workspace/runs), be the folder's owner (--user UID:GID), or choose another "
        "--output-dir"
    ]


def test_the_derived_image_of_the_page(engine: Engine, image: str, tmp_path: Path) -> None:
    """The Dockerfile as it stands there, with a recipe whose page is not there yet."""
    page = (ROOT / "docker" / "README.md").read_text().split("## Derive an image")[1]
    (dockerfile,) = re.findall(r"```dockerfile\n(.*?)```", page, re.DOTALL)[:1]
    recipe = tmp_path / "my_recipe"
    recipe.mkdir()
    for name in ("__init__.py", "train.py"):
        code = (ROOT / "recipes" / "ddp_launch" / name).read_text()
        (recipe / name).write_text(code.replace('NAME = "ddp_launch"', 'NAME = "my_recipe"'))
    tag = f"{IMAGE}-derived"
    base = f"--build-context=torch-recipes:cu132=docker-image://{IMAGE}"
    engine.run("build", base, "--tag", tag, "--file", "-", tmp_path, input=dockerfile)
    script = """\
id --user
python -c 'import ctypes, einops; ctypes.CDLL("libibverbs.so.1"); ctypes.CDLL("libmlx5.so.1")'
python -m recipes my_recipe --nproc 1 --max-steps 1 --output-dir /workspace/runs/run >/dev/null
cat runs/run/manifest.json
"""
    said = engine.run("run", "--rm", "--entrypoint", "sh", tag, "-ec", script).stdout
    user, _, manifest = said.partition("\n")
    assert user == "1000"
    assert json.loads(manifest)["git_commit"] == _head()
    assert json.loads(manifest)["git_dirty"] is True


def test_the_bill_of_materials_is_the_lock(engine: Engine, image: str, tmp_path: Path) -> None:
    arguments = f"ARGS=--output-file {tmp_path}/sbom.json"
    engine.call("make", "sbom", f"PYTHON={sys.executable}", arguments)
    components = json.loads((tmp_path / "sbom.json").read_text())["components"]
    lock = (ROOT / "docker" / "stacks" / "cu132.txt").read_text()
    pinned = re.findall(r"(?m)^([a-z0-9._-]+)==([^ ;]+)", lock)
    assert sorted((part["name"], part["version"]) for part in components) == sorted(pinned)


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
        *"--target runtime --tag torch-recipes:changed".split(),
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
    labels = {name.rpartition("image.")[2]: value for name, value in config["Labels"].items()}
    assert labels["revision"].removesuffix("-dirty") == _head()
    assert (
        labels["version"]
        == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    )
    (base,) = re.findall(r"(?m)^FROM (python:\S+) AS base", DOCKERFILE.read_text())
    assert base == f"{labels['base.name']}@{labels['base.digest']}"
    # Only what is named is there: no tests, no caches, no test data, nothing of the build's.
    script = """\
ls -A /tmp; cd /opt/recipes; ls -A
find / -xdev \\( -path /proc -o -path /sys \\) -prune -o -type f \\
    \\( -path '*/.cache/*' -o -path '/root/*' -o -path '/tmp/*' -o -path '/opt/*.whl' \\) -print
find / -xdev -perm /6000 -type f
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
