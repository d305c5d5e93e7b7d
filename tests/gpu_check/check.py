"""A check and its commands: whatever hangs is ended in time, and a stop leaves no process."""

import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.launch.process import end_with_parent
from common.reading import read_metrics
from tests.gpu_check import ROOT
from tools.fresh import fresh_environment

Found = dict[str, Any]
"""What a check measured, with a bool `holds`."""


@dataclass
class Check:
    """What a check may use: the device, a folder, and commands that end with it."""

    name: str
    device: str
    gpus: int
    folder: Path
    """Of the part: its checks may share runs."""
    until: float
    """By time.monotonic() [s]."""
    commands: int = 0

    @property
    def cuda(self) -> bool:
        """Whether this is no mere trial on a CPU."""
        return self.device == "cuda"

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> "Command":
        """Start a command in a session of its own; what it prints goes to a log."""
        self.commands += 1
        return Command(list(command), self.log, env)

    @property
    def log(self) -> Path:
        """What its last command printed."""
        return self.folder / "logs" / f"{self.name}.{self.commands}"

    def call(self, *command: str, env: Mapping[str, str] | None = None, status: int = 0) -> str:
        """What a command printed; RuntimeError if it ends with another status, or too late."""
        return self.start(*command, env=env).ended(self.until, status)

    def recipes(self, *words: str, env: Mapping[str, str] | None = None, status: int = 0) -> str:
        """`python -m recipes WORDS`."""
        return self.call(sys.executable, "-m", "recipes", *words, env=env, status=status)

    def run(self, name: str, *options: str, recipe: str = "ddp_launch") -> Found:
        """Run a recipe on the device into the folder `name`; its summary and logged losses."""
        folder = self.folder / name
        self.recipes(recipe, "--device", self.device, *options, "--output-dir", str(folder))
        return read_run(folder)

    def wait_for(self, what: Callable[[], Any], why: str) -> Any:
        """Wait until `what` gives something true, and return it."""
        while not (found := what()):
            if time.monotonic() > self.until:
                raise RuntimeError(f"waited in vain for {why}")
            time.sleep(0.02)
        return found


class Command:
    """A running command, with all processes that it starts."""

    started = threading.Lock()
    none_more = False
    """Set at the end: no check may start another one."""

    def __init__(self, command: list[str], log: Path, env: Mapping[str, str] | None) -> None:
        self.command, self.log = command, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with self.started, log.with_suffix(f"{log.suffix}.err").open("w") as stderr:
            if self.none_more:
                raise RuntimeError("ended with its part")
            with log.open("w") as stdout:
                stderr.write(f"{' '.join(command)}\n")
                stderr.flush()
                self.process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=fresh_environment(env),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                    preexec_fn=end_with_parent,  # even a killed gpu_check leaves nothing behind
                )

    def ended(self, until: float, status: int = 0) -> str:
        """What it printed; RuntimeError if it ends with another status than `status`, or late."""
        try:
            found = self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"hangs, and was ended: {self.said()}") from None
        finally:
            self.kill()
        if found != status:
            raise RuntimeError(f"ended with {found}, not {status}: {self.said()}")
        return self.log.read_text(errors="replace")

    def errors(self) -> str:
        """What it wrote to stderr."""
        log = self.log.with_suffix(f"{self.log.suffix}.err")
        return log.read_text(errors="replace").partition("\n")[2]

    def said(self) -> str:
        """The command and its last words."""
        words = self.errors().strip() or self.log.read_text(errors="replace").strip()
        return f"{' '.join(self.command)}: {words[-1500:]}"

    def kill(self) -> None:
        """End it and its children; a session of its own, such as that of a test, ends with it."""
        kill([*descendants(self.process.pid), self.process.pid])
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)


def kill(processes: Sequence[int]) -> None:
    """SIGKILL."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def descendants(process: int) -> list[int]:
    """The living children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(folder.name))
    found = [process]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def adopt_orphans() -> None:
    """Become the parent of each descendant whose parent ends, so that `end_all` finds it."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def kill_all(*, for_good: bool = False) -> None:
    """Kill whatever the checks have started; `for_good`: none of them may start more."""
    with Command.started:
        Command.none_more |= for_good
    until = time.monotonic() + 5
    while (left := descendants(os.getpid())) and time.monotonic() < until:
        kill(left)
        time.sleep(0.02)


@dataclass(frozen=True)
class Part:
    """Checks of one part, in their order."""

    checks: dict[str, Callable[[Check], Found]]
    at_once: int = 1
    """Checks at the same time; 1 where times are measured."""
    check_s: float = 90
    """Limit of one check on a GPU: one that hangs does not take the part's whole time [s]."""

    def run(
        self,
        check: Callable[[str, float], Check],
        limit_s: float,
        share: float,
        tell: Callable[[str, Found], None],
    ) -> None:
        """Run all checks, and `tell` the result of each as soon as it is there.

        Args:
            check: what the check of this name may use, until this time.
            limit_s: when the part ends, whatever hangs [s].
            share: `check_s` is multiplied by it.
        """
        until = time.monotonic() + 0.95 * limit_s  # then commands end, and are named
        todo: queue.SimpleQueue[str] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[str, Found]] = queue.SimpleQueue()
        for name in self.checks:
            todo.put(name)

        def work() -> None:
            with suppress(queue.Empty):
                while True:
                    name = todo.get_nowait()
                    done.put((name, one(name)))

        def one(name: str) -> Found:
            began = time.monotonic()
            if began > until:
                return {"holds": False, "error": "not begun: the part had no time left"}
            try:
                found = self.checks[name](check(name, min(until, began + self.check_s * share)))
            except Exception as error:  # the other checks must still run
                found = {"holds": False, "error": f"{type(error).__name__}: {error}"}
            return {**found, "elapsed_s": round(time.monotonic() - began, 1)}

        for _ in range(self.at_once):
            threading.Thread(target=work, daemon=True).start()
        left = list(self.checks)
        while left:
            try:
                name, found = done.get(timeout=max(0.0, until + 0.02 * limit_s - time.monotonic()))
            except queue.Empty:  # it hangs outside of a command
                for name in left:
                    tell(name, {"holds": False, "error": "hangs: the part's time is over"})
                return
            left.remove(name)
            tell(name, found)


def read_run(folder: Path) -> Found:
    """What a finished run says of itself, and its logged losses."""
    summary: Found = json.loads((folder / "summary.json").read_text())
    losses = [line["loss"] for line in read_metrics(folder) if "loss" in line]
    return {**summary, "losses": losses}


def largest_difference(a: Found, b: Found) -> float:
    """Largest relative difference of the logged losses of two runs."""
    pairs = zip(a["losses"], b["losses"], strict=True)
    return max(float(abs(x - y) / abs(x)) for x, y in pairs)


class Once:
    """A run that several checks need: the first one makes it, the others wait."""

    def __init__(self, name: str, *options: str) -> None:
        self.name, self.options = name, options
        self.lock, self.made = threading.Lock(), dict[Path, Found]()

    def __call__(self, check: Check) -> Found:
        """The run; `log` is the file with what it printed."""
        folder = check.folder / self.name
        if not self.lock.acquire(timeout=max(0.0, check.until - time.monotonic())):
            raise RuntimeError(f"the run {self.name} of another check hangs")
        try:
            if folder not in self.made:
                found = check.run(self.name, *self.options)
                self.made[folder] = {**found, "log": str(check.log)}
            return self.made[folder]
        finally:
            self.lock.release()
