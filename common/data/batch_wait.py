"""A rank waits for its next batch no longer than for another rank, and can be stopped meanwhile.

A thread looks at the wait, because the main thread may be in a call of the system that does not
return. A rank that waits has the state after its last step: once a stop signal has come and all
ranks wait, each saves that state and ends, from this thread.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common import log
from common.errors import STATUS_STOPPED, STOP_SIGNALS, StopRequested, TrainingError
from common.group.stop import StopAgreement
from common.launch.ranks import Ranks
from common.launch.report import end_work, report
from common.watch import record

_SLICE_S = 0.5
"""Time between two looks."""

_USUAL_S = 1.0
"""A wait that is not worth a look."""

_ANSWER_S = 2.0
"""How long a loading process may take to say where it is."""

_END = object()


class BatchWait:
    """Looks at each wait of this process for a batch, until `end`.

    Args:
        timeout_s: longest wait.
        stop: the loop's; its `leave` saves the state.
        ranks: who this process is.
        steps: gives the number of steps done.
    """

    def __init__(
        self, timeout_s: float, stop: StopAgreement, ranks: Ranks, steps: Callable[[], int]
    ) -> None:
        end()
        self.group = dist.group.WORLD
        self._timeout_s, self._stop, self._ranks, self._steps = timeout_s, stop, ranks, steps
        self._loader: Any = None
        self._since_s = 0.0  # 0: it does not wait
        self._warned_s = 0.0
        self._store = dist.distributed_c10d._get_default_store()
        self._voted = False
        self._lock = threading.Lock()
        """Whoever has it decides whether the rank goes on."""
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="batch wait", daemon=True).start()
        _current.append(self)

    def begin(self, loader: Any) -> None:
        """This rank waits for a batch from here on."""
        self._loader, self._since_s = loader, time.monotonic()

    def go_on(self) -> None:
        """The wait is over; if all ranks leave instead, this does not return."""
        with self._lock:
            self._since_s = 0.0
            if self._voted and not self._change_vote(mine=False):
                self._leave()

    def _run(self) -> None:
        if self._stop.devices and self._stop.devices[0].type == "cuda":
            torch.cuda.set_device(self._stop.devices[0])  # else on GPU 0
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # for `sigpending`
        while not self._ended.wait(_SLICE_S):
            since_s = self._since_s
            waited_s = time.monotonic() - since_s
            if not since_s or waited_s < _USUAL_S:
                continue
            if waited_s > self._timeout_s / 10 and since_s != self._warned_s:
                self._warned_s = since_s
                log.warning(f"no batch for {waited_s:.0f} s: {place(self._loader)}")
            with self._lock:
                if self._since_s == since_s:
                    self._look(waited_s)

    def _look(self, waited_s: float) -> None:
        if waited_s > self._timeout_s:
            where = place(self._loader)
            self._exit(TrainingError(f"got no batch for {self._timeout_s:.0f} s: {where}"))
        with suppress(RuntimeError):  # rank 0, which serves the store, is gone
            if self._asked() and not self._change_vote(mine=True):
                self._leave()

    def _asked(self) -> bool:
        """Whether a stop signal came to a rank that waits."""
        # A main thread that waits for a disk is not interrupted: the signal stays pending.
        pending = not signal.sigpending().isdisjoint(STOP_SIGNALS)
        if pending or self._stop.came:
            self._store.set("batch_wait/asked", "1")
            return True
        return bool(self._store.check(["batch_wait/asked"]))

    def _change_vote(self, *, mine: bool) -> bool:
        """Say that this rank waits, or not any more; False once all ranks have said so.

        The store changes a value only if it is what this rank has read, so that no rank goes on
        that another one takes for waiting.
        """
        key, own, seen = f"batch_wait/{self._steps()}", {str(self._ranks.rank)}, ""
        self._voted = True
        while True:
            ranks = set(seen.split())
            if len(ranks) == self._ranks.world_size:
                return False
            ranks = ranks | own if mine else ranks - own
            wanted = " ".join(sorted(ranks)) or " "  # empty: nobody has voted yet
            found = self._store.compare_set(key, seen, wanted).decode()
            if found == wanted:
                self._voted = mine
                return len(ranks) < self._ranks.world_size
            seen = found

    def _leave(self) -> None:
        try:
            self._stop.leave()
        except Exception as error:
            self._exit(error)

    def _exit(self, error: Exception) -> None:
        """End this process, whatever its main thread does."""
        if isinstance(error, StopRequested):
            record.stop()
            end_work()
            os._exit(STATUS_STOPPED)
        os._exit(report(error, self._ranks))


_current: list[BatchWait] = []


def end() -> None:
    """Look no more at this process's waits, if anything does."""
    while _current:
        _current.pop()._ended.set()


def each(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's batches; what it takes to get one is a wait."""
    batches: Iterator[Any] | None = None
    while True:
        # A loop that failed, in a process that goes on, has left its own.
        wait = next((each for each in _current if each.group is dist.group.WORLD), None)
        if wait:
            wait.begin(loader)
        try:
            batches = batches or iter(loader)  # starts the loading processes
            batch = next(batches, _END)
        finally:
            if wait:
                wait.go_on()
        if batch is _END:
            return
        yield batch


def place(loader: Any) -> str:
    """Where the code is that makes the loader's next batch, in this process or in another one."""
    batches: Any = getattr(loader, "_iterator", None)
    workers = getattr(batches, "_workers", ())
    if not workers:
        return f"it is at {record.place()}{_state(os.getpid())}"
    # torch takes the batches in order: which process makes the next one.
    worker, *_ = batches._task_info.get(batches._rcvd_idx, (0,))
    pid = workers[worker].pid
    os.ftruncate(_answers, 0)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGQUIT)
    until_s = time.monotonic() + _ANSWER_S
    while time.monotonic() < until_s:
        who, _, where = os.pread(_answers, 2**12, 0).decode(errors="replace").partition(" ")
        if who == str(pid):
            return f"its loading process {pid} is at {where}{_state(pid)}"
        time.sleep(0.05)
    return f"its loading process {pid} does not answer{_state(pid)}"


def _state(pid: int) -> str:
    """That a process waits for a disk (D) or is stopped (T), else nothing (proc(5))."""
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        return f" (in state {state})" if state in "DTt" else ""
    return ""


_answers = os.memfd_create("answers")
"""Where this process's loading processes say where they are."""


def answer() -> None:
    """In a loading process: say where its main thread is, whenever the rank asks by SIGQUIT."""

    def run() -> None:
        while True:
            signal.sigwait({signal.SIGQUIT})
            os.pwrite(_answers, f"{os.getpid()} {record.place()}".encode(), 0)

    # Blocked in all threads, the signal comes to this one even if the main thread waits for a disk.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGQUIT})
    threading.Thread(target=run, name="answer", daemon=True).start()
