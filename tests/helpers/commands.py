"""The recipes through their real command lines."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from common.kernels import PORTABLE
from tests.helpers.machine import need
from tests.helpers.pool import PATIENCE_S
from tools.fresh import OF_A_LAUNCHER

ROOT = Path(__file__).resolve().parents[2]

FILES = subprocess.run(
    ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
    capture_output=True,
    text=True,
).stdout.split() or [
    str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if "__pycache__" not in path.parts
]
"""Of the repository, by their paths in it; in an image there is no git."""

INJECTED = {"PYTHONPATH": f"{ROOT / 'tests' / 'faults' / 'inject'}:{ROOT}"}
"""Environment in which tests/faults/inject/sitecustomize.py changes a run as its variables say."""

# With the variables of a launcher around the tests, every recipe would think that it is a rank.
_FOREIGN = (
    *OF_A_LAUNCHER,
    *PORTABLE,  # tests/conftest.py sets them for the test's own process
    *("ARGS", "MAKE", "MFLAGS"),  # a test's own `make` would take those of `make test`
)


def clean_env(own: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a user's shell, with a test's `own` variables.

    The packages that the tests find by PYTHONPATH are found by their commands, too.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    env |= {"PYTHONPATH": str(ROOT), **(own or {})}
    paths = env["PYTHONPATH"], os.environ.get("PYTHONPATH")
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


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

    def assert_bits_of_the_record(self, sha: str | None = None) -> None:
        """A default run has the bits of its recipe's results/make_run.json, or those given.

        Bits are promised for one stack: on CPUs, for all with AVX2. Elsewhere nothing is compared.
        """
        name = self.summary["recipe"]
        record = json.loads((ROOT / "recipes" / name / "results" / "make_run.json").read_text())
        mine = json.loads((self.folder / "manifest.json").read_text())
        same = ("gpus", "determinism", "python", "torch", "world_size")
        if all(mine[key] == record["manifest"][key] for key in same):
            assert mine["fingerprint"] == record["manifest"]["fingerprint"]
            assert self.sha == (sha or record["summary"]["weights_sha256"])


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
            env=clean_env(env),
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
        timeout_s: float = PATIENCE_S,
    ) -> Result:
        """Run a recipe through the front door to its end."""
        process = self.start(*self.command(name, *options, folder=folder), env=env)
        return self.finish(process, self.tmp_path / folder, timeout_s)

    def stop(self) -> None:
        for process in self.running:
            end(process)
        self.running.clear()


def copy_of_repository(folder: Path) -> Path:
    """A commit of the repository's files as they are now, in which a user may work."""
    need("git", "make")
    listed = ["git", "-C", str(ROOT), *"ls-files --cached --others --exclude-standard -z".split()]
    names = subprocess.run(listed, capture_output=True, check=True).stdout
    copy = ["xargs", "-0", "cp", "--parents", "-t", str(folder)]
    subprocess.run(copy, cwd=ROOT, input=names, check=True)
    me = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    for command in (["init", "-q"], ["add", "-A"], [*me, "commit", "-q", "-m", "as it is"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


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


def wait_for(
    condition: Callable[[], Any], timeout_s: float = PATIENCE_S, every_s: float = 0.02
) -> Any:
    """Poll until `condition()` is true and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(every_s)
    return found


def children(parent: int) -> list[int]:
    """Process ids right below a process."""
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(pid) for pid in text.split()]


def ranks_of(parent: int) -> dict[int, int]:
    """Rank to process id of the ranks below a process, for launchers that set RANK."""
    found: dict[int, int] = {}
    for pid in children(parent):
        env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(entry[5:]): pid for entry in env if entry.startswith(b"RANK=")}
    return found
