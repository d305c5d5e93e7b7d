"""Start ranks on this machine, wait for them, and end them all once one of them fails.

torchrun is supported too (`torchrun -m recipes.ddp_launch.train`). But it turns every exit status
into 1 and dies of SIGUSR1, so a scheduler cannot tell "stopped, run me again" (75) from "failed".
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path

from common.errors import STATUS_FINISHED, STATUS_STOPPED, STOP_SIGNALS, InputError
from common.launch.port import listen
from common.launch.process import command_line, python_path
from common.launch.report import (
    answered,
    read_entries,
    say,
    say_stopped,
    show_cause,
    show_whereabouts,
    still_works,
)
from common.option_rules import refuse_below
from common.watch import verdict

GRACE_S = 10.0
"""How long the other ranks may take to end by themselves after the first failure."""

ANSWER_S = 2.5
"""How long ranks may take to write down where they are, after SIGQUIT. A hanging one may not."""

_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "waiting for a disk or a network file system",
    "R": "computing",
}
"""States of a process in /proc/PID/stat (proc(5)); all other states are "waiting"."""


@dataclass(frozen=True)
class LaunchOptions:
    """How many processes to start. Under torchrun, srun or mpirun leave these options out."""

    nproc: int | None = None
    """Processes on this host [processes]. None: one per visible GPU, or 2 on CPUs."""
    nnodes: int = 1
    """Hosts [hosts]. Start the command on each host."""
    node_rank: int = 0
    """Number of this host, from 0 to nnodes - 1."""
    master_addr: str | None = None
    """Address of host 0 that the other hosts can reach. None: MASTER_ADDR, or this host."""
    master_port: int | None = None
    """Port of host 0. None: MASTER_PORT, or on one host any free port."""
    restarts: int = 0
    """Restarts after a rank failed or was killed, each from the newest snapshot [restarts].
    On one host; not after bad input or a stop signal. For several hosts: docs/watching.md."""
    shrink: bool = False
    """Start half as many processes after a restart that failed before its first step, because a
    device may be gone; the restart after that tries all of them again.
    Needs --restarts, and --virtual-ranks, with which fewer processes give the same bits."""
    check: bool = False
    """Do all but train: options, data, model, folder, snapshot. Status 0 and what the run would do,
    or status 2 and what is wrong; nothing is kept. Under torchrun, srun or mpirun, and for several
    hosts: the options only."""

    def __post_init__(self) -> None:
        refuse_below(self, nproc=1, restarts=0)
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"--node-rank {self.node_rank} must lie in 0..{self.nnodes - 1}")
        if self.nnodes > 1 and not self.address:
            raise ValueError("several hosts need --master-addr, host 0's address")
        if self.restarts and self.nnodes > 1:
            raise ValueError(
                "--restarts is for one host: on several hosts start the ranks with torchrun "
                "--max-restarts, or let Slurm requeue the job (slurm/README.md)"
            )
        if self.shrink and not self.restarts:
            raise ValueError("--shrink needs --restarts, the number of restarts")
        if not 0 <= self.port < 2**16:
            given = "MASTER_PORT" if self.master_port is None else "--master-port"
            raise ValueError(f"{given} must lie in 1..65535, got {self.port}")

    @property
    def address(self) -> str:
        """Host 0's address as given, or an empty string."""
        return self.master_addr or os.environ.get("MASTER_ADDR") or ""

    @property
    def port(self) -> int:
        """Host 0's port as given, or 0."""
        text = os.environ.get("MASTER_PORT") or "0"
        if self.master_port is None and not text.isdecimal():
            raise ValueError(f"MASTER_PORT must be a whole number, got {text!r}")
        return int(text) if self.master_port is None else self.master_port

    def processes(self, device: str) -> int:
        """Processes to start on this host for --device auto, cpu or cuda."""
        return self.nproc or (0 if device == "cpu" else usable_gpus()) or 2


def usable_gpus() -> int:
    """GPUs that this process can use, by the driver, without torch and without memory on any."""
    count = ctypes.c_int()
    if os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        with contextlib.suppress(OSError):  # no driver
            driver = ctypes.CDLL("libcuda.so.1")
            if driver.cuInit(0) == 0:
                driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


@dataclass(frozen=True)
class Child:
    """A rank that this process started."""

    rank: int
    pid: int
    status: Callable[[], int | None]
    """Exit status, negative for a signal; None while the rank runs."""

    def kill(self, number: int) -> None:
        """Send a signal, unless the rank has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def doing(self) -> str:
        """What a rank that does not end is doing, as the kernel sees it."""
        stat = Path(f"/proc/{self.pid}/stat").read_text()  # there until `status` has reaped it
        return _STATES.get(stat.rsplit(")", 1)[1].split()[0], "waiting")


def memory_file(name: str) -> Path:
    """A file in memory that the ranks can open; gone when this process ends."""
    not_executable = 8  # MFD_NOEXEC_SEAL: hardened kernels require it, old kernels refuse it
    try:
        number = os.memfd_create(name, os.MFD_CLOEXEC | not_executable)
    except OSError:
        number = os.memfd_create(name)
    return Path(f"/proc/{os.getpid()}/fd/{number}")


@cache
def _open_report_channels() -> tuple[Path, int]:
    """A file in memory for the ranks' errors, one per line; a pipe for what their libraries say."""
    errors, (messages, written) = memory_file("errors"), os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.environ["RECIPES_ERRORS"] = str(errors)
    os.environ["RECIPES_MESSAGES"] = str(errors.with_name(str(written)))
    os.environ["RECIPES_PARENT"] = str(os.getpid())
    os.environ["RECIPES_COMMAND"] = command_line()
    return errors, messages


def prepare_launch() -> None:
    """Before ranks are started: make the places for what they leave, or empty them again."""
    os.truncate(_open_report_channels()[0], 0)
    os.environ.setdefault("PYTHONHASHSEED", "0")  # a set has one order on all ranks
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # inherited by the ranks, until they can answer


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Ranks that start in this block get Ctrl-C only in `run_rank`, where it shows no traceback."""
    resource_tracker.ensure_running()  # which would unblock the signal, if the block began it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    held: list[int] = []  # of signals that other threads of this process got: numpy may have some
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if held:
            signal.raise_signal(signal.SIGINT)


def launch(arguments: Sequence[str], nproc: int, options: LaunchOptions) -> int:
    """Start `nproc` ranks of `python ARGUMENTS` on this host; wait; return the exit status.

    Raises:
        InputError: a port in use, or none given for several hosts.
    """
    several, address, port = options.nnodes > 1, options.address or "127.0.0.1", options.port
    if several and not port:
        raise InputError("several hosts need --master-port, the same free port on each command")
    store = None
    if options.node_rank == 0:  # host 0 serves the store
        store = listen(address, port, several_hosts=several)
        port = store.getsockname()[1]
    prepare_launch()
    env = {
        **os.environ,
        "WORLD_SIZE": str(options.nnodes * nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "PYTHONPATH": python_path(os.environ.get("PYTHONPATH")),
    }
    children = []
    for local_rank in range(nproc):
        rank = options.node_rank * nproc + local_rank
        own, pass_fds = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}, []
        if rank == 0 and store:
            own["RECIPES_LISTEN_FD"] = str(store.fileno())
            pass_fds = [store.fileno()]
        process = subprocess.Popen(
            [sys.executable, "-P", *arguments],  # -P: ignore a common.py in the user's folder
            env={**env, **own},
            pass_fds=pass_fds,
        )
        children.append(Child(rank, process.pid, process.poll))
    if store:
        store.close()  # rank 0 has it now
    return supervise(children)


forwarded: set[int] = set()
"""Stop signals that came to this process since its first ranks ran."""


def supervise(children: Sequence[Child]) -> int:
    """Wait for this host's ranks, which began after `prepare_launch`; pass stop signals on to them.

    Once one fails, end them all.

    Returns:
        0 if all finished, 75 if all saved and stopped, 2 for bad input, 130 for Ctrl-C, else 1.
    """
    errors, messages = _open_report_channels()
    pending = {child.rank: child for child in children}
    failed: list[tuple[int, int]] = []
    early: list[int] = []  # ranks that ended in the middle of their work, as if it were done
    silent: dict[int, str] = {}  # ranks that were killed below, and what each was doing
    said = ""  # by the ranks' libraries, most recently
    deadline, asked_s = float("inf"), 0.0
    gone_s = float("inf")  # when no killed rank can still be dying, except in a call of the kernel

    def ask(_number: int, _frame: object) -> None:
        nonlocal asked_s
        asked_s = asked_s or time.monotonic()
        for child in pending.values():
            child.kill(signal.SIGQUIT)

    def forward(number: int, _frame: object) -> None:
        forwarded.add(number)
        for child in pending.values():
            child.kill(number)

    for number in STOP_SIGNALS:
        signal.signal(number, forward)
    for came in tuple(forwarded):  # between a failure and this restart
        forward(came, None)
    signal.signal(signal.SIGQUIT, ask)
    try:
        while pending:
            for child in list(pending.values()):
                status = child.status()
                if status is None:
                    continue
                del pending[child.rank]
                if status in (STATUS_FINISHED, STATUS_STOPPED) and still_works(child.pid, errors):
                    early.append(child.rank)
                if -status in forwarded:  # the rank did not handle signals yet: nothing to save
                    if child.rank == 0:
                        say_stopped(-status)
                    status = STATUS_STOPPED
                if (status != 0 or child.rank in early) and child.rank not in silent:
                    failed.append((child.rank, status))
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            if deadline == float("inf") and any("line" in entry for entry in read_entries(errors)):
                deadline = time.monotonic() + GRACE_S  # a rank may hang after it has reported
            if time.monotonic() > deadline:
                for child in pending.values():
                    silent.setdefault(child.rank, child.doing())
                    child.kill(signal.SIGKILL)
                gone_s = min(gone_s, time.monotonic() + GRACE_S)
            if time.monotonic() > gone_s:
                break  # a rank that waits for a disk cannot even be killed
            late = time.monotonic() > asked_s + ANSWER_S
            if asked_s and pending and (late or answered(errors, [*pending], asked_s)):
                asked_s = 0.0
                show_whereabouts(errors, sorted(pending))
            said = (said + _pass_on(messages))[-(2**20) :]
            time.sleep(0.02)
        if asked_s:
            say(verdict.ENDED)
        return show_cause(failed, silent, errors, said, early)
    except KeyboardInterrupt:  # the ranks got the signal too, and may have something to say
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and any(c.status() is None for c in pending.values()):
            time.sleep(0.02)
        return 128 + signal.SIGINT
    finally:
        for child in pending.values():
            child.kill(signal.SIGKILL)


def _pass_on(messages: int) -> str:
    """Show what the ranks' libraries have said since the last call, and return it."""
    with contextlib.suppress(OSError):  # nothing to read, or nobody reads
        text = os.read(messages, 2**16).decode(errors="replace")
        sys.stderr.write(text)
        sys.stderr.flush()
        return text
    return ""
