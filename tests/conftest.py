"""Fixtures: a pool of ranks, and the recipes through their real command lines."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from common.launch.port import listen
from tests.pool import PATIENCE_S, Pool

ROOT = Path(__file__).resolve().parents[1]

# By default an example that takes 0.2 s fails its test, and so does one that is slowly drawn.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")

OTHER_NCCL = "int ncclGetVersion(int *version) { *version = 21803; return 0; }"
DRIVER = """
int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}
int cuInit(unsigned flags) {{ return {status}; }}
int cuGetErrorString(int status, const char **text) {{ *text = "{words}"; return 0; }}
int cuDeviceGetCount(int *count) {{ *count = 1; return 0; }}
"""
"""A stand-in of NVIDIA's driver with one GPU; `status` and `words` are of its start."""
OLD_DRIVER = DRIVER.format(version=12040, status=0, words="no error")

# With the variables of a launcher around the tests, every recipe would think that it is a rank.
_FOREIGN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "OMPI_", "PMI", "RECIPES_"),
    *("ARGS", "MAKE", "MFLAGS"),  # a test's own `make` would take those of `make test`
)


def clean_env() -> dict[str, str]:
    """The environment of a user's shell, with warnings as errors."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    return {**env, "PYTHONPATH": str(ROOT)}


def need(*programs: str) -> None:
    """Skip the test if a program is missing; in CI, where it can be installed, fail."""
    missing = [p for p in programs if not shutil.which(p)]
    if missing and os.environ.get("CI"):
        pytest.fail(f"CI must install {', '.join(missing)}")
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


def need_root() -> None:
    """Skip the test if the user may not make namespaces and mounts; in CI, fail."""
    if os.geteuid() != 0:
        if os.environ.get("CI"):
            pytest.fail("CI must run as root")
        pytest.skip("needs root")


@dataclass
class Result:
    """One finished command."""

    status: int
    stdout: str
    stderr: str
    folder: Path
    elapsed_s: float = 0.0

    @property
    def errors(self) -> list[str]:
        """Lines that begin with `error:`."""
        return [line for line in self.stderr.splitlines() if line.startswith("error:")]

    @property
    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return content

    @property
    def sha(self) -> str:
        return str(self.summary["weights_sha256"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(s) for s in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> dict[int, float]:
        """Step to logged loss."""
        return {line["step"]: line["loss"] for line in self.metrics if "loss" in line}

    def assert_ok(self) -> "Result":
        assert self.status == 0, f"status {self.status}\n{self.stdout}\n{self.stderr}"
        return self

    def assert_bits_of_the_record(self) -> None:
        """A default run has the bits of its recipe's results/make_run.json.

        Bits are promised for one stack and one kind of processor. Elsewhere nothing is compared.
        """
        name = self.summary["recipe"]
        record = json.loads((ROOT / "recipes" / name / "results" / "make_run.json").read_text())
        mine = json.loads((self.folder / "manifest.json").read_text())
        same = ("cpu", "determinism", "python", "torch", "world_size")
        if all(mine[key] == record["manifest"][key] for key in same):
            assert self.sha == record["summary"]["weights_sha256"]


def of_session(leader: int) -> Iterator[str]:
    """The processes left in a command's session, and where in the kernel each one waits."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent, _group, session = (
                (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            )
            if int(session) == leader:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                waits_in = (folder / "wchan").read_text()
                yield f"{folder.name} (parent {parent}) {state} {waits_in} {command}"


def end(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """Kill all processes of a command's session, even if the command has ended; its output.

    After a failure pytest-timeout no longer watches, so nothing here may wait for ever.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate(timeout=60)


@dataclass
class Recipe:
    """Starts commands, and kills by their ids those still running at the end of the test."""

    tmp_path: Path
    running: list["subprocess.Popen[str]"] = field(default_factory=list)

    def start(
        self, *command: str | Path, env: dict[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start a command in a new session, outside the repository's folder."""
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=self.tmp_path,
            env={**clean_env(), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def module(self, *words: str | Path, env: dict[str, str] | None = None) -> Result:
        """Run `python -m recipes WORDS` to its end."""
        command = [sys.executable, "-m", "recipes", *words]
        return self.finish(self.start(*command, env=env), self.tmp_path)

    def finish(
        self, process: "subprocess.Popen[str]", folder: Path, timeout_s: float = PATIENCE_S
    ) -> Result:
        """Wait for a command."""
        start_s = time.monotonic()
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            left = "\n".join(of_session(process.pid))
            stdout, stderr = end(process)
            pytest.fail(f"not ended after {timeout_s} s:\n{left}\n{stdout}\n{stderr}")
        self.running.remove(process)
        return Result(process.returncode, stdout, stderr, folder, time.monotonic() - start_s)

    def command(self, name: str, *options: str | Path, folder: str = "run") -> list[str]:
        """The front door's command line for a recipe, with its run folder."""
        return [
            sys.executable,
            "-m",
            "recipes",
            name,
            *map(str, options),
            "--output-dir",
            str(self.tmp_path / folder),
        ]

    def __call__(
        self,
        name: str,
        *options: str | Path,
        folder: str = "run",
        env: dict[str, str] | None = None,
    ) -> Result:
        """Run a recipe through the front door to its end."""
        process = self.start(*self.command(name, *options, folder=folder), env=env)
        return self.finish(process, self.tmp_path / folder)

    def stop(self) -> None:
        for process in self.running:
            end(process)
        self.running.clear()


def make_run(nproc: int, options: tuple[str, ...], tmp_path: Path) -> Result:
    """`make run` of ddp_launch: the reference for runs with as many ranks elsewhere."""
    need("make")
    runner = Recipe(tmp_path)
    arguments = " ".join([*options, "--output-dir", str(tmp_path / "run")])
    process = runner.start(
        "make",
        "-C",
        ROOT,
        "run",
        f"PYTHON={sys.executable}",
        "RECIPE=ddp_launch",
        f"NPROC={nproc}",
        f"ARGS={arguments}",
    )
    try:
        return runner.finish(process, tmp_path / "run").assert_ok()
    finally:
        runner.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With TESTS_SEED=N, run the tests in an order drawn from N: no test may need another one."""
    if seed := os.environ.get("TESTS_SEED"):
        print(f"the order of the tests: TESTS_SEED={seed}")
        random.Random(seed).shuffle(items)


@pytest.fixture(scope="session", autouse=True)
def own_signals() -> None:
    """The commands hear Ctrl-C and a lost terminal under nohup and in a background, too."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # a handler is not inherited, ignoring is


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder for the tests: runs neither read nor write the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def recipe(tmp_path: Path) -> Iterator[Recipe]:
    """Runs recipes as a user does."""
    runner = Recipe(tmp_path)
    yield runner
    runner.stop()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks for the whole session."""
    ranks = Pool(4)
    yield ranks
    ranks.close()


def library(folder: Path, name: str, code: str) -> Path:
    """Compile `code` to the shared library `name` in a folder; returns the folder."""
    need("gcc")
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-xc", "-", f"-Wl,-soname,{name}", "-o", folder / name],
        input=code,
        text=True,
        check=True,
    )
    return folder


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A real file system of `size` at `folder`, to be filled."""
    need_root()
    need("mount")
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def free_port() -> int:
    """A port of this machine that nobody listens on: other tests may run at the same time."""
    with listen("127.0.0.1", 0) as probe:
        port: int = probe.getsockname()[1]
    return port


def wait_for(
    condition: Callable[[], Any], timeout_s: float = PATIENCE_S, every_s: float = 0.02
) -> Any:
    """Poll until `condition()` is true and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(every_s)
    return found
