"""Being a rank: how the process ends, what it forks, and the memory that it keeps."""

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import shlex
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from sysconfig import get_path
from time import monotonic, sleep
from typing import Any, NoReturn

from common import ROOT, log, run_status
from common.errors import (
    STATUS_FAILED,
    STATUS_FINISHED,
    STATUS_STOPPED,
    STOP_SIGNALS,
    Checked,
    StopRequested,
    TrainingError,
)
from common.hints import with_hint
from common.launch.ranks import Ranks
from common.launch.report import begin_work, end_work, note, report, say_stopped

_LIBC = ctypes.CDLL(None)  # loaded now: in a forked child another thread may hold the loader's lock


def python_path(given: str | None) -> str:
    """PYTHONPATH for a program of this project: the repository first, then `given`."""
    return os.pathsep.join(filter(None, [str(ROOT), given]))


def command_line() -> str:
    """The command that the user typed, quoted for a shell; the interpreter is called `python`."""
    return os.environ.get("RECIPES_COMMAND") or shlex.join(["python", *sys.orig_argv[1:]])


def stop_at_once() -> None:
    """Let a stop signal end this process. Once training runs, `common.group.stop` replaces this."""
    for number in STOP_SIGNALS:
        signal.signal(number, _leave)
    if _wakeup:
        return
    # Python calls a handler only between two bytecodes of the main thread, which may be waiting in
    # C++ for other ranks. So a thread reads which signal came.
    came, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    _wakeup.append(wakeup)

    def watch() -> None:
        while numbers := os.read(came, 1):
            if signal.getsignal(numbers[0]) is _leave:
                _leave(numbers[0], None)

    threading.Thread(target=watch, daemon=True).start()


_wakeup: list[int] = []
_leaving = threading.RLock()  # the handler and the thread may both come to leave
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_main = [all(os.environ.get(name, "0") == "0" for name in _RANKS)]
"""Whether this is rank 0; a guess until `run_rank`."""


def _leave(number: int, _frame: object) -> None:
    """End this process. The peers of this rank may end with another status."""
    with _leaving:
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun so ends the peers of a failed rank
            note(STATUS_STOPPED)
            if _main[0]:
                say_stopped(number)
            run_status.stopped_early()
        end_work()
        os._exit(STATUS_STOPPED)


def run_rank(body: Callable[[], Any], ranks: Ranks) -> int:
    """Run `body` as a rank; report a failure and return the exit status."""
    die_with_parent()
    keep_freed_memory()
    os.register_at_fork(
        before=_remember_parent, after_in_parent=_hear_signals, after_in_child=_end_with_rank
    )
    fork_while_threads_sleep()
    _main[:] = [ranks.is_main]
    stop_at_once()
    begin_work()
    os.umask(os.umask(0o077) | stat.S_IWOTH)  # nobody outside the group may change the run
    failure: Exception | None = None
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # `interrupts_held`
        body()
        run_status.refuse_unfinished()
        end_work()
    except Checked:
        end_work()
        return STATUS_FINISHED
    except StopRequested:
        end_work()
        return STATUS_STOPPED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as error:  # called by a user's code, or by a library
        failure = TrainingError(with_hint(f"ended too early (status {error.code})"))
    except Exception as error:  # the outermost frame of a rank: every failure becomes a status
        failure = error
    finally:
        # A DataLoader's handler would raise for each loading process that ends here. These ignore
        # SIGTERM, with which multiprocessing would end them.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in multiprocessing.active_children():
            child.kill()
    return report(failure, ranks) if failure else STATUS_FINISHED


def end_process(status: int) -> NoReturn:
    """End this process like sys.exit, but without taking Python's objects apart.

    A gloo thread may still drop the result of its last collective, and aborts the process if the
    interpreter is gone ("terminate called without an active exception", torch 2.15).
    """
    threading.Thread(target=_end_without_threads, args=(status,), daemon=True).start()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    _end(status)


def _end(status: int) -> NoReturn:
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # the reader of a pipe is gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _end_without_threads(status: int) -> NoReturn:
    """Name the threads, of a library or of the user's code, that hold this process; then end it."""
    sleep(_THREADS_S / 30)
    log.warning(f"waiting up to {_THREADS_S:.0f} s for {_threads() or 'the functions of atexit'}")
    sleep(_THREADS_S)
    if held := _threads():
        log.warning(f"ended without {held}: give it daemon=True, or end it with your loop")
    os._exit(status)


_THREADS_S = 300.0


def _threads() -> str:
    """The threads that hold this process, and where they are in code that is not Python's own."""
    held = []
    for thread in threading.enumerate():
        frame = sys._current_frames().get(thread.ident or 0)
        if thread.daemon or thread is threading.main_thread() or not frame:
            continue
        frames = traceback.extract_stack(frame)
        own = [f for f in frames if not f.filename.startswith(get_path("stdlib"))] or frames
        held.append(f"the thread {thread.name}, at {own[-1].filename}:{own[-1].lineno}")
    return ", ".join(held)


def keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB of freed memory for the next step.

    By default it returns blocks from 32 MiB on to the kernel, which clears every page again: 10 %
    of the time of a step on a CPU. The results and the peak memory stay the same.

    Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3
    if hasattr(_LIBC, "mallopt"):  # glibc
        for name in (m_trim_threshold, m_mmap_threshold):
            _LIBC.mallopt(name, 2**30)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    pr_set_pdeathsig = 1
    _LIBC.prctl(pr_set_pdeathsig, signal.SIGKILL)


def die_with_parent() -> None:
    """End with the process that started this rank (RECIPES_PARENT): no orphan keeps a GPU."""
    parent = os.environ.get("RECIPES_PARENT")
    if parent and "RECIPES_ERRORS" in os.environ and os.getpid() != int(parent):
        end_with_parent()
        if os.getppid() != int(parent):  # it ended before
            os._exit(STATUS_FAILED)


def fork_while_threads_sleep() -> None:
    """Let each fork of this process wait, for 2 s at most, until threads of C sleep, on old Python.

    Else the child may hang for ever before its first line of Python: it inherits the interpreter's
    lock as taken if at this moment such a thread becomes known to Python, as gloo's do when they
    drop a collective's tensors.

    A rank forks loading processes only, which never use CUDA: `common.data.loaders`.

    Source: CPython's issue 112275, mended in Python 3.11.10 and 3.12.
    """
    if sys.version_info < (3, 11, 10):
        os.register_at_fork(before=_let_threads_sleep)


def _let_threads_sleep(at_most_s: float = 2) -> None:
    known = {str(thread.native_id) for thread in threading.enumerate()}
    until_s = monotonic() + at_most_s
    while monotonic() < until_s:
        states = set()
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                if thread.name not in known:
                    states.add((thread / "stat").read_text().rpartition(") ")[2][0])
        if states <= {"S"}:
            return
        sleep(0.0001)  # without the GIL


def show_messages_to_parent() -> None:
    """Let the process that started this rank pass on what libraries, not Python, write to stderr.

    NCCL's watchdog aborts each rank that waits too long for another one. Only the watchdog's
    message tells such a rank from the one that hangs.
    """
    if pipe := os.environ.get("RECIPES_MESSAGES"):  # to open it fails if that process is gone
        with contextlib.suppress(OSError), Path(pipe).open("w") as messages:
            sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
            os.dup2(messages.fileno(), 2)


_parent = 0
_held: list[set[int]] = []
"""Signals that were blocked before a fork; the stop signals are, until the child has its own.
One entry per `run_rank` of this process: each has registered the functions below."""


def _remember_parent() -> None:
    global _parent
    _parent = os.getpid()
    _held.append(signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS))


def _hear_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.pop())


def _end_with_rank() -> None:
    # torch's loading processes check their parent only every 5 s, and only while they work: one
    # that is stuck, or whose rank was killed before it began, would stay for ever.
    end_with_parent()
    signal.set_wakeup_fd(-1)  # the rank's
    for number in STOP_SIGNALS:  # with the rank's handlers, a pool of processes would never end
        signal.signal(number, signal.SIG_DFL)
    _hear_signals()
    if os.getppid() != _parent:
        os._exit(STATUS_FAILED)
