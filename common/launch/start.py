"""Start ranks on this machine, wait for them, end them together, and say which failed first.

torchrun does most of this and is supported (`torchrun -m recipes.ddp_launch.train`). It turns every
status into 1 and dies of SIGUSR1, so a scheduler cannot tell "stopped, run me again" (75) from
"failed". The launcher imports no torch: the ranks start at once.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import (
    STATUS_BAD_INPUT,
    STATUS_FAILED,
    STATUS_FINISHED,
    STATUS_STOPPED,
    STOP_SIGNALS,
    InputError,
)
from common.launch.port import listen
from common.launch.process import command_line, python_path, say

GRACE_S = 10.0
"""How long the other ranks may take to end by themselves after the first failure."""


@dataclass(frozen=True)
class Child:
    """A rank that this process started."""

    rank: int
    pid: int
    status: Callable[[], int | None]
    """Exit status, negative for a signal; None while it runs."""


def make_error_file() -> Path:
    """Where the ranks started from here leave their errors for `supervise`, a line each.

    It is in memory and has no name but this process's own for it: nothing is left of it.
    """
    not_executable = 8  # MFD_NOEXEC_SEAL, which hardened kernels insist on and old ones refuse
    try:
        number = os.memfd_create("errors", os.MFD_CLOEXEC | not_executable)
    except OSError:
        number = os.memfd_create("errors")
    file = Path(f"/proc/{os.getpid()}/fd/{number}")
    os.environ["RECIPES_ERRORS"] = str(file)
    os.environ["RECIPES_PARENT"] = str(os.getpid())
    os.environ["RECIPES_COMMAND"] = command_line()  # a rank's own is not what the user typed
    return file


def launch(
    arguments: Sequence[str],
    nproc: int,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str = "127.0.0.1",
    master_port: int = 0,
) -> int:
    """Start `nproc` ranks of `python ARGUMENTS` and wait for them.

    Args:
        arguments: of the Python interpreter.
        nproc: ranks on this host, the same number on every host.
        nnodes: hosts.
        node_rank: this host among them; host 0 serves the store.
        master_addr: host 0's address.
        master_port: host 0's port; 0 for any free one, on one host only.

    Returns:
        The exit status of contract: 0, 1, 2 or 75.

    Raises:
        InputError: a port in use, or none given for several hosts.
    """
    if nnodes > 1 and not master_port:
        raise InputError("several hosts need --master-port, the same free port on each command")
    store = None
    if node_rank == 0:
        store = listen(master_addr, master_port, several_hosts=nnodes > 1)
    port = store.getsockname()[1] if store else master_port
    errors = make_error_file()
    children: list[Child] = []
    for local_rank in range(nproc):
        rank = node_rank * nproc + local_rank
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(nnodes * nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(port),
            "PYTHONPATH": python_path(os.environ.get("PYTHONPATH")),
        }
        pass_fds = []
        if rank == 0 and store:
            env["RECIPES_LISTEN_FD"] = str(store.fileno())
            pass_fds = [store.fileno()]
        process = subprocess.Popen(
            [sys.executable, "-P", *arguments],  # -P: a common.py of the user's folder is not ours
            env=env,
            pass_fds=pass_fds,
        )
        children.append(Child(rank, process.pid, process.poll))
    if store:
        store.close()  # rank 0 holds it now
    return supervise(children, errors)


def supervise(children: Sequence[Child], errors: Path) -> int:
    """Wait for ranks, pass stop signals on to them, end them all once one fails.

    Args:
        children: the ranks of this host.
        errors: file in which they leave their errors (`run_rank`).

    Returns:
        0 if all finished, 75 if they were asked to stop and saved, 2 for bad input, else 1.
    """
    pending = {child.rank: child for child in children}
    failed: list[tuple[Child, int]] = []
    silent: dict[int, str] = {}  # ranks that were killed here, and what they were doing
    forwarded: set[int] = set()
    deadline = float("inf")

    def forward(number: int, _frame: object) -> None:
        forwarded.add(number)
        for child in pending.values():
            _kill(child, number)

    for number in STOP_SIGNALS:
        signal.signal(number, forward)
    try:
        while pending:
            for child in list(pending.values()):
                status = child.status()
                if status is None:
                    continue
                del pending[child.rank]
                if -status in forwarded:  # before it could listen: nothing was trained yet
                    status = STATUS_STOPPED
                if status != 0:
                    failed.append((child, status))
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            if pending and time.monotonic() > deadline:
                for child in pending.values():
                    silent[child.rank] = _doing(child)
                    _kill(child, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.02)
        return _verdict([(c, s) for c, s in failed if c.rank not in silent], silent, errors)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        for child in pending.values():
            _kill(child, signal.SIGKILL)


def _kill(child: Child, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, number)


def _verdict(failed: list[tuple[Child, int]], silent: dict[int, str], errors: Path) -> int:
    """Show the failure that the others follow from; the exit status.

    Args:
        failed: ranks that ended otherwise than well, in that order.
        silent: ranks that had to be killed after the others had ended, and what they were doing.
        errors: where ranks left what they had to say.
    """
    if not failed:
        return STATUS_FINISHED
    if all(status == STATUS_STOPPED for _, status in failed):
        return STATUS_STOPPED
    left = []
    for text in errors.read_text().splitlines():
        with contextlib.suppress(ValueError):  # a rank was killed while it wrote
            left.append(json.loads(text))
    left.sort(key=lambda entry: entry["time"])
    first = next((entry for entry in left if not entry["follows"]), None)
    host, spoke = socket.gethostname(), {entry["rank"] for entry in left}
    # A killed rank leaves no word, and its peers then fail because it is gone: it is the cause.
    # But NCCL aborts the peers of a rank that failed by itself and said so.
    killed = [(child, -status) for child, status in failed if status < 0]
    killed = [(c, number) for c, number in killed if not (first and number == signal.SIGABRT)]
    mute = [(c, s) for c, s in failed if s not in (0, STATUS_STOPPED) and c.rank not in spoke]
    if killed:
        child, number = killed[0]
        why = {
            signal.SIGKILL: ": out of memory? (dmesg says) Then try a smaller --global-batch-size",
            signal.SIGABRT: ": what it said is above; did all ranks call the same collectives, "
            "and use every parameter? TORCH_DISTRIBUTED_DEBUG=DETAIL names them",
        }.get(signal.Signals(number), "")
        # Its progress bar may stand on the line.
        say(
            f"\nerror: rank {child.rank} on {host} was killed by {signal.Signals(number).name}{why}"
        )
    elif first:
        say(f"{first['line']}\n{first['traceback']}".rstrip())
        return int(first["status"])
    elif mute:
        child, status = mute[0]
        say(
            f"error: rank {child.rank} on {host} exited with status {status}; what it said is above"
        )
        return STATUS_BAD_INPUT if status == STATUS_BAD_INPUT else STATUS_FAILED
    elif silent and (not left or (left[0]["timed_out"] and set(silent.values()) != {"waiting"})):
        rank, state = max(silent.items(), key=lambda item: item[1] != "waiting")
        say(
            f"error: rank {rank} on {host} stopped answering ({state}); the others waited "
            "--timeout-s for it"
        )
    else:  # the cause is on another host, or a rank that waits for what does not come
        waited = f" (rank {', '.join(map(str, silent))} here went on waiting)" if silent else ""
        say(f"{left[0]['line']}{waited}\n{left[0]['traceback']}".rstrip())
    return STATUS_FAILED


def _doing(child: Child) -> str:
    """What a process that does not end is doing, as far as the kernel tells."""
    try:
        state = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "gone"
    return {
        "T": "stopped by a signal",
        "t": "stopped by a debugger",
        "D": "waiting for a disk or a network file system",
        "R": "computing",
    }.get(state, "waiting")
