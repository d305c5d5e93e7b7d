"""Start ranks on this machine, wait for them, and end them all once one of them fails.

torchrun is supported too (`torchrun -m recipes.ddp_launch.train`). But it turns every exit status
into 1 and dies of SIGUSR1, so a scheduler cannot tell "stopped, run me again" (75) from "failed".
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import STATUS_STOPPED, STOP_SIGNALS, InputError
from common.launch.port import listen
from common.launch.process import command_line, python_path
from common.launch.report import show_cause

GRACE_S = 10.0
"""How long the other ranks may take to end by themselves after the first failure."""

_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "waiting for a disk or a network file system",
    "R": "computing",
}
"""States of a process in /proc/PID/stat (proc(5)); all other states are "waiting"."""


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
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return "gone"
        return _STATES.get(stat.rsplit(")", 1)[1].split()[0], "waiting")


def make_error_file() -> Path:
    """A file in memory into which the ranks write their errors, one per line; gone at the end."""
    not_executable = 8  # MFD_NOEXEC_SEAL: hardened kernels require it, old kernels refuse it
    try:
        number = os.memfd_create("errors", os.MFD_CLOEXEC | not_executable)
    except OSError:
        number = os.memfd_create("errors")
    file = Path(f"/proc/{os.getpid()}/fd/{number}")
    os.environ["RECIPES_ERRORS"] = str(file)
    os.environ["RECIPES_PARENT"] = str(os.getpid())
    os.environ["RECIPES_COMMAND"] = command_line()
    return file


def launch(
    arguments: Sequence[str],
    nproc: int,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str = "127.0.0.1",
    master_port: int = 0,
) -> int:
    """Start `nproc` ranks of `python ARGUMENTS` on this host; wait; return the exit status.

    Args:
        arguments: of the Python interpreter.
        nproc: ranks per host.
        nnodes: hosts.
        node_rank: number of this host; host 0 serves the store.
        master_addr: host 0's address.
        master_port: host 0's port; 0: any free port, on one host only.

    Raises:
        InputError: a port in use, or none given for several hosts.
    """
    if nnodes > 1 and not master_port:
        raise InputError("several hosts need --master-port, the same free port on each command")
    store = None
    if node_rank == 0:
        store = listen(master_addr, master_port, several_hosts=nnodes > 1)
        master_port = store.getsockname()[1]
    errors = make_error_file()
    env = {
        **os.environ,
        "WORLD_SIZE": str(nnodes * nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "PYTHONPATH": python_path(os.environ.get("PYTHONPATH")),
    }
    children = []
    for local_rank in range(nproc):
        rank = node_rank * nproc + local_rank
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
    return supervise(children, errors)


def supervise(children: Sequence[Child], errors: Path) -> int:
    """Wait for ranks, pass stop signals on to them, and end them all once one fails.

    Args:
        children: the ranks of this host.
        errors: from `make_error_file`.

    Returns:
        0 if all finished, 75 if all saved and stopped, 2 for bad input, 130 for Ctrl-C, else 1.
    """
    pending = {child.rank: child for child in children}
    failed: list[tuple[int, int]] = []
    silent: dict[int, str] = {}  # ranks that were killed below, and what each was doing
    forwarded: set[int] = set()
    deadline = float("inf")

    def forward(number: int, _frame: object) -> None:
        forwarded.add(number)
        for child in pending.values():
            child.kill(number)

    for number in STOP_SIGNALS:
        signal.signal(number, forward)
    try:
        while pending:
            for child in list(pending.values()):
                status = child.status()
                if status is None:
                    continue
                del pending[child.rank]
                if -status in forwarded:  # the rank did not handle signals yet: nothing to save
                    status = STATUS_STOPPED
                if status != 0 and child.rank not in silent:
                    failed.append((child.rank, status))
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline:
                for child in pending.values():
                    silent.setdefault(child.rank, child.doing())
                    child.kill(signal.SIGKILL)
            time.sleep(0.02)
        return show_cause(failed, silent, errors)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        for child in pending.values():
            child.kill(signal.SIGKILL)
