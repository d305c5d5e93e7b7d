"""Being a rank: how it ends, and what it says when it fails."""

import atexit
import contextlib
import ctypes
import json
import multiprocessing
import os
import re
import shlex
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from common import ROOT
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
from common.launch import hints
from common.launch.ranks import Ranks

_LIBC = ctypes.CDLL(None)  # looked up now: in a forked child the loader's lock may be held


def python_path(given: str | None) -> str:
    """PYTHONPATH for a program of the project: the repository before what was `given`."""
    return os.pathsep.join(filter(None, [str(ROOT), given]))


def command_line() -> str:
    """The command that started the run, for a shell, with the interpreter's bare name."""
    return os.environ.get("RECIPES_COMMAND") or shlex.join(["python", *sys.orig_argv[1:]])


def say(text: str) -> None:
    """Write to stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def stop_at_once() -> None:
    """Until training listens for stop signals there is nothing to save: one ends this process.

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
        # Loading processes ignore SIGTERM, by which multiprocessing would end them.
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
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        # torchrun shows the failure that it sees first, and of two in one second the lower rank's.
        if follows:
            time.sleep(1)
        else:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
    if errors:
        entry = {
            "rank": ranks.rank,
            "time": time.monotonic(),
            "line": line,
            "traceback": trace,
            "status": status,
            "follows": follows,
            "timed_out": follows and hints.timed_out(error),
        }
        try:
            with Path(errors).open("a") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError:  # the parent is gone
            say(f"{line}\n{trace}".rstrip())
    elif isinstance(error, InputError) and error.agreed and ranks.rank > 0:
        time.sleep(1)  # rank 0 speaks: mpirun and torchrun end all ranks as soon as one ends
    elif not isinstance(error, PeerError):
        say(f"{line}\n{trace}".rstrip())
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
