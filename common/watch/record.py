"""A thread per rank that writes down where the rank is while it makes no steps.

It leaves two files in the run's `logs/`: `rank_1.json`, with the Python stack of the main thread
and the collectives for which torch's flight recorder says it waits; and `rank_1.stack`, which
faulthandler writes in C. A rank in C code that never gives back the GIL can run no thread of
Python, but it still leaves its stack.
"""

import faulthandler
import os
import pickle
import re
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from sysconfig import get_path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from common import ROOT, log
from common.errors import TrainingError
from common.owner import refuse_lost
from common.watch import verdict
from common.watch.verdict import Record
from common.writing import write_json

_OTHERS = (str(Path(torch.__file__).parent), get_path("stdlib"), "<")
"""Where code begins that is not shown as the place of a rank: torch and Python itself."""

_HELPERS = (*_OTHERS, f"{ROOT}/common/")
"""The same for a collective, whose caller is a recipe, if a recipe calls it."""

_MOST_S = 15.0
"""Longest time between two looks at a rank."""

_ASKED_S = 0.2
"""Time between two looks at whether the rank was asked where it is."""

_DISK_S = 10.0
"""How long a look may take: the run's folder may be on a disk that does not answer."""

# A loading process, which a rank forks, must not write into the rank's file.
os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGQUIT))


class Watch:
    """Looks at this rank a few times per `timeout_s`, and at once after SIGQUIT.

    Args:
        folder: of the ranks' files; it exists.
        rank: of this process.
        about: this rank's `device` and the `world_size`.
        timeout_s: how long a rank waits for another one.
        steps: gives the number of steps done.
    """

    def __init__(
        self, folder: Path, rank: int, about: Record, timeout_s: float, steps: Callable[[], int]
    ) -> None:
        stop()
        self._path, self._steps, self._step = verdict.path(folder, rank), steps, -1
        self._period_s = min(timeout_s / 4, _MOST_S)
        self._about = {"host": socket.gethostname(), "period_s": self._period_s, **about}
        self._stacks = self._path.with_suffix(".stack").open("a")
        self._stacks.truncate(0)
        # Only the main thread's stack: it gets the signal, and others may go on meanwhile.
        faulthandler.register(signal.SIGQUIT, file=self._stacks, all_threads=False)
        self._wrote = True  # perhaps an earlier start did
        self._look(asked=False)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        verdict.folder = folder
        _current.append(self)

    def _run(self) -> None:
        if str(self._about.get("device")).startswith("cuda"):
            torch.cuda.set_device(self._about["device"])  # else it opens a context on GPU 0
        next_s = 0.0
        while not self._ended.wait(min(_ASKED_S, self._period_s)):
            asked, now_s = self._asked(), time.monotonic()
            if asked or now_s >= next_s:
                with suppress(Exception):  # of torch's recorder: the next look may be better
                    self._look(asked=asked)
                next_s = now_s + self._period_s

    def _asked(self) -> bool:
        """Whether SIGQUIT came since the last look: faulthandler has then written a stack."""
        return os.fstat(self._stacks.fileno()).st_size > 0

    def _look(self, *, asked: bool) -> None:
        """Write down where the rank is, if it has made no step since the last look, or if asked."""
        self._stack_later()
        before, self._step = self._step, self._steps()
        if asked:
            self._stacks.truncate(0)
        stays = asked or before == self._step
        if stays or self._wrote:  # else it trains, and the record says so
            found: Record = {}
            if stays:
                stack = main_stack()
                found = {"step": self._step, "place": _place(reversed(stack))}
                found["stack"] = "".join(traceback.format_list(stack))
                # torch imports torch._inductor the first time: seconds, on a busy machine.
                # faulthandler takes no GIL: it would read frames that change, and can crash.
                faulthandler.cancel_dump_traceback_later()
                found["collectives"] = _collectives()
                self._stack_later()
            if asked:
                found["asked_s"] = time.monotonic()  # the launcher waits for it
            with suppress(TrainingError):  # the disk is full, or the folder is gone
                write_json(self._path, self._about | found)
            if asked and "RECIPES_ERRORS" not in os.environ:  # else the launcher says it
                log.info(f"step {self._step}: {verdict.whereabouts(found)}")
        self._wrote = stays

    def _stack_later(self) -> None:
        """Let faulthandler write the stack, unless it is put off in time, which needs the GIL."""
        faulthandler.dump_traceback_later(verdict.silence_s(self._period_s), file=self._stacks)

    def end(self, *, keep: bool) -> None:
        """Look no more; remove this rank's files unless `keep`."""
        if self._stacks.closed:  # it has ended
            return
        self._ended.set()
        self._thread.join(_DISK_S)
        if self._thread.is_alive():  # nor would the disk answer this thread
            return
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGQUIT)
        if self._asked() and "RECIPES_ERRORS" not in os.environ:  # else the launcher says it
            log.info(verdict.ENDED)
        self._stacks.close()
        with suppress(TrainingError):  # the files there are not this run's
            refuse_lost(self._path)
            for path in () if keep else (self._path, self._path.with_suffix(".stack")):
                path.unlink(missing_ok=True)


_current: list[Watch] = []


def stop(*, keep: bool = False) -> None:
    """Stop watching this process, if it is watched."""
    while _current:
        _current.pop().end(keep=keep)


def place() -> str:
    """Where the main thread is."""
    return _place(reversed(main_stack()))


def main_stack() -> list[traceback.FrameSummary]:
    """The main thread's Python stack, the newest frame last; empty if it cannot be written.

    faulthandler reads it in C and keeps the GIL. Python code that goes from frame to frame gives
    the GIL back in between, and the frames that it still has to read may end: with Python 3.11.7
    that killed about one rank in a thousand by SIGSEGV on a busy machine.

    Source: uWSGI's pull request 2621, CPython's issue 99110.
    """
    with suppress(OSError), tempfile.TemporaryFile() as written:
        faulthandler.dump_traceback(written)
        written.seek(0)
        _, *threads = re.split(r"(?m)^(?:Current thread|Thread) 0x", written.read().decode())
        main = threading.main_thread().ident
        own = next((text for text in threads if int(text.split()[0], 16) == main), "")
        return [
            traceback.FrameSummary(_unescape(file), int(line), _unescape(name))
            for file, line, name in reversed(re.findall(verdict.FRAME, own))
        ]
    return []


def _unescape(text: str) -> str:
    """A name as it is: faulthandler writes each character that is not ASCII as a number."""
    number = r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))"
    return re.sub(number, lambda found: chr(int("".join(found.groups("")), 16)), text)


def _place(frames: Iterable[traceback.FrameSummary], others: tuple[str, ...] = _OTHERS) -> str:
    """The first of the frames that is not in `others`."""
    for frame in frames:
        if not frame.filename.startswith(others):
            return f"{frame.filename.removeprefix(f'{ROOT}/')}:{frame.lineno} ({frame.name})"
    return ""


def _caller(frames: Iterable[Record]) -> str:
    """Who calls a collective; on a GPU the backward pass has no Python frames."""
    stack = [traceback.FrameSummary(f["filename"], f["line"], f["name"]) for f in frames]
    return _place(stack, _HELPERS) or _place(stack) or "the backward pass"


def _collectives() -> list[Record]:
    """The collectives that this rank waits for."""
    return [
        {
            "backend": backend,
            "group": entry["process_group"][0],
            "ranks": _members(entry["process_group"][0]),
            "number": entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
            "kind": entry["profiling_name"].partition(":")[2].partition(" ")[0],
            "sizes": entry["input_sizes"],
            "place": _caller(entry.get("frames", ())),
        }
        for backend, entry in _recorded()
        if not entry["retired"] and entry["state"] != "completed"
    ]


def _dump(backend: str) -> Any:
    """Pickled."""
    if backend == "nccl" and hasattr(c10d, "_dump_nccl_trace"):
        return c10d._dump_nccl_trace()
    try:
        return c10d._dump_fr_trace(backend=backend)
    except TypeError:  # before torch 2.15 it is gloo's, and takes no backend
        return c10d._dump_fr_trace() if backend == "gloo" else pickle.dumps({})


def _recorded() -> Iterator[tuple[str, Record]]:
    """Each backend of the group, and the calls in its flight recorder."""
    used = set(re.findall(r"\w+(?=,|$)", dist.get_backend_config()))
    for backend in sorted(used | ({"nccl2"} if "nccl" in used else set())):
        with suppress(AttributeError, RuntimeError, ValueError):  # torch has no such recorder
            for entry in pickle.loads(_dump(backend)).get("entries", ()):  # noqa: S301
                yield backend, entry


def _members(group: str) -> list[int]:
    """The ranks of a process group, by its name; empty if torch does not know it."""
    with suppress(RuntimeError, LookupError, ValueError):
        return dist.get_process_group_ranks(c10d._resolve_process_group(group))  # type: ignore[arg-type]
    return []
