"""Starting ranks on this machine and ending them together, with the status of the first failure.

torchrun does most of this and is supported (`torchrun -m recipes.ddp_launch.train`). It turns every
status into 1 and dies of SIGUSR1, so that a scheduler cannot tell "stopped, run me again" (75)
from "failed"; hence these hundred lines. They import no torch: the ranks start at once.
"""

import atexit
import contextlib
import ctypes
import errno
import json
import multiprocessing
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from common import hints
from common.errors import (
    STATUS_BAD_INPUT,
    STATUS_FAILED,
    STATUS_FINISHED,
    STATUS_STOPPED,
    STOP_SIGNALS,
    InputError,
    PeerError,
    StopRequested,
    TrainingError,
)
from common.ranks import Ranks

ROOT = str(Path(__file__).resolve().parents[1])
_LIBC = ctypes.CDLL(None)  # looked up now: in a forked child the loader's lock may be held
GRACE_S = 10.0
"""How long the other ranks may take to end by themselves after the first failure."""


@dataclass(frozen=True)
class Child:
    """A rank that this process started."""

    rank: int
    pid: int
    status: Callable[[], int | None]
    """Exit status, negative for a signal; None while it runs."""


def bind(address: str, port: int, *, several_hosts: bool) -> socket.socket:
    """Listen where the ranks will look for rank 0's store, and nowhere else.

    The store asks nobody who he is, so it stays off the interfaces that it does not need: it
    listens on rank 0's address. On all of them it listens where that is none of this host's (it
    is translated on the way), and where several hosts are given a name, of which each may make
    another address (Debian makes loopback of a host's own).

    Args:
        address: rank 0's, as the ranks are given it.
        port: 0 for any free one.
        several_hosts: ranks are on other hosts too, as far as is known.

    Raises:
        OSError: the port is in use, or the address does not resolve.
    """
    family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if not several_hosts or address == found[0]:
        try:
            return socket.create_server((str(found[0]), port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)


def listen(address: str, port: int, *, several_hosts: bool = False) -> socket.socket:
    """`bind` now and keep the socket, so that none can take the port before rank 0 listens.

    Raises:
        InputError: the port is in use, or the address does not resolve.
    """
    try:
        return bind(address, port, several_hosts=several_hosts)
    except socket.gaierror as error:
        raise InputError(unresolved(address, error)) from error
    except OSError as error:
        raise InputError(
            f"port {port} on {socket.gethostname()} cannot be taken ({error.strerror}): give "
            "another --master-port, or none to have a free one chosen"
        ) from error


def unresolved(address: str, error: OSError) -> str:
    """What is said of a MASTER_ADDR that no name server knows."""
    return (
        f"MASTER_ADDR {address!r} does not resolve on host {socket.gethostname()} ({error}): "
        "give rank 0's host by an address that every host knows"
    )


def command_line() -> str:
    """The command that started the run, for a shell, with the interpreter's bare name."""
    return os.environ.get("RECIPES_COMMAND") or shlex.join(["python", *sys.orig_argv[1:]])


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
            "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")])),
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
        _say(f"\nerror: rank {child.rank} on {host} was killed by "
             f"{signal.Signals(number).name}{why}")  # fmt: skip
    elif first:
        _say(f"{first['line']}\n{first['traceback']}".rstrip())
        return int(first["status"])
    elif mute:
        child, status = mute[0]
        _say(f"error: rank {child.rank} on {host} exited with status {status}; what it said is "
             "above")  # fmt: skip
        return STATUS_BAD_INPUT if status == STATUS_BAD_INPUT else STATUS_FAILED
    elif silent and (not left or (left[0]["timed_out"] and set(silent.values()) != {"waiting"})):
        rank, state = max(silent.items(), key=lambda item: item[1] != "waiting")
        _say(f"error: rank {rank} on {host} stopped answering ({state}); the others waited "
             "--timeout-s for it")  # fmt: skip
    else:  # the cause is on another host, or a rank that waits for what does not come
        waited = f" (rank {', '.join(map(str, silent))} here went on waiting)" if silent else ""
        _say(f"{left[0]['line']}{waited}\n{left[0]['traceback']}".rstrip())
    return STATUS_FAILED


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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


def stop_at_once() -> None:
    """Until the training listens (common.stop) there is nothing to save: a stop signal ends this.

    Peers may wait for this rank, and be killed for that: RECIPES_STOP_MARK names a file that tells
    whoever set it that they were not at fault.
    """

    def leave(_number: int, _frame: object) -> None:
        if mark := os.environ.get("RECIPES_STOP_MARK"):
            with contextlib.suppress(OSError):
                Path(mark).touch()
        os._exit(STATUS_STOPPED)

    for number in STOP_SIGNALS:
        signal.signal(number, leave)


def run_rank(body: Callable[[], Any], ranks: Ranks) -> int:
    """Run `body` as a rank and turn how it ends into an exit status and one `error:` line.

    Where `launch` or a spawning parent supervises, the line is left for it, which shows the first
    failure and not the ones that follow from it.
    """
    die_with_parent()
    keep_freed_memory()
    os.register_at_fork(before=_remember_parent, after_in_child=_end_with_rank)
    stop_at_once()
    os.umask(os.umask(0o077) | stat.S_IWOTH)  # what a run leaves is not for everybody to change
    try:
        body()
        return STATUS_FINISHED
    except StopRequested:
        return STATUS_STOPPED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # the outermost frame of a rank: every failure becomes a status
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a DataLoader's would raise in what follows
        return report(error, ranks)
    finally:
        # Loading processes ignore SIGTERM (common.stream), by which multiprocessing would end them.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in multiprocessing.active_children():
            child.kill()


def end_process(status: int) -> NoReturn:
    """End this process as sys.exit does, but leave its memory to the kernel.

    While Python takes itself apart, a thread of gloo's that comes to drop what its last collective
    left finds no interpreter, and aborts the process ("terminate called without an active
    exception", torch 2.15). Handlers run and threads are waited for as ever.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # among them who writes a snapshot
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def report(error: Exception, ranks: Ranks) -> int:
    """Show `error` to the person, or leave it for the supervisor; return its exit status."""
    from tqdm import tqdm

    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()  # else the line below would begin behind it
    status = STATUS_BAD_INPUT if isinstance(error, InputError) else STATUS_FAILED
    message = " ".join(_own_message(error).split())
    expected = isinstance(error, InputError | TrainingError)
    if advice := "" if expected else hints.hint(f"{type(error).__name__} {message}"):
        message = f"{_shortened(message)}: {advice}"
    where = f"rank {ranks.rank} on {socket.gethostname()}: "
    if isinstance(error, InputError) and (error.agreed is not False or ranks.is_main):
        where = ""
    line = f"error: {where}{message}"
    trace = "" if expected else "".join(traceback.format_exception(error))
    errors = os.environ.get("RECIPES_ERRORS")
    follows = isinstance(error, PeerError) or (not expected and hints.follows(error))
    if "TORCHELASTIC_ERROR_FILE" in os.environ and not follows:  # torchrun shows the first one
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    if errors:
        entry = {"rank": ranks.rank, "time": time.monotonic(), "line": line, "traceback": trace,
                 "status": status, "follows": follows,
                 "timed_out": follows and hints.timed_out(error)}  # fmt: skip
        try:
            with Path(errors).open("a") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError:  # the parent is gone
            _say(f"{line}\n{trace}".rstrip())
    elif isinstance(error, InputError) and error.agreed and ranks.rank > 0:
        time.sleep(1)  # rank 0 speaks: mpirun and torchrun end all ranks as soon as one ends
    elif not isinstance(error, PeerError):
        _say(f"{line}\n{trace}".rstrip())
    return status


def _shortened(message: str) -> str:
    """The first sentence of a long message of torch's, without its source file; all is below it."""
    message = re.sub(r"^\[(enforce fail at )?\S+\.(cc|cpp):\d+\] ", "", message)
    return re.sub(r"\. .*", "", message) if len(message) > 160 else message.rstrip(".")


def _own_message(error: Exception) -> str:
    """The message without the traceback that a DataLoader worker wraps around it."""
    text = str(error)
    if "in DataLoader worker process" in text:
        text = text.strip().splitlines()[-1]
        text = text.split(": ", 1)[-1]
    return text or type(error).__name__


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends."""
    pr_set_pdeathsig = 1
    _LIBC.prctl(pr_set_pdeathsig, signal.SIGKILL)


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, up to 1 GiB, for the next step, which wants as much again.

    It gives blocks from 32 MiB on back to the kernel at once, which clears every page anew: a tenth
    of the time of a step on a CPU. The bits and the peak stay what they are.

    Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3
    if hasattr(_LIBC, "mallopt"):  # glibc
        for name in (m_trim_threshold, m_mmap_threshold):
            _LIBC.mallopt(name, 2**30)


_parent = 0


def _remember_parent() -> None:
    global _parent
    _parent = os.getpid()


def _end_with_rank() -> None:
    # torch's loading processes look every 5 s whether their parent has changed since they began to
    # work: one whose rank is killed before that, or that is stuck, would stay for ever.
    end_with_parent()
    if os.getppid() != _parent:
        os._exit(STATUS_FAILED)


def die_with_parent() -> None:
    """Where `launch` or a spawning parent started this: end when it does. No orphan keeps a GPU."""
    parent = os.environ.get("RECIPES_PARENT")
    if parent and "RECIPES_ERRORS" in os.environ and os.getpid() != int(parent):
        end_with_parent()
        if os.getppid() != int(parent):  # it was gone before
            os._exit(STATUS_FAILED)
