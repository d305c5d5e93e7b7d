"""A thread per rank that writes down where the rank is while it makes no steps.

It leaves two files in the run's `logs/`: `rank_1.json`, with the Python stack of the main thread
and the newest collectives of torch's flight recorder; and `rank_1.stack`, which faulthandler writes
in C. A rank in C code that never gives back the GIL can run no thread of Python, but it still
leaves its stack.
"""

import faulthandler
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from sysconfig import get_path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from common import ROOT
from common.files import write_json
from common.watch import verdict

_OTHERS = (str(Path(torch.__file__).parent), get_path("stdlib"), "<")
"""Where code begins that is not shown as the place of a rank: torch and Python itself."""

_MOST_S = 15.0
"""Longest time between two looks at a rank."""

# A loading process, which a rank forks, must not write into the rank's file.
os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGQUIT))


class Progress(Protocol):
    """Something that counts steps."""

    step: int


class Watch:
    """Looks at this rank a few times per `timeout_s`, and at once after SIGQUIT.

    Args:
        folder: of the ranks' files; it exists.
        rank: of this process.
        world_size: all ranks.
        device: that this rank computes on, for messages.
        timeout_s: how long a rank waits for another one.
        progress: its `step` is the number of steps done.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        device: str,
        timeout_s: float,
        progress: Progress,
    ) -> None:
        stop()
        self._path, self._progress, self._step = verdict.path(folder, rank), progress, -1
        self._about = {"host": socket.gethostname(), "device": device, "world_size": world_size}
        self._period_s = min(timeout_s / 4, _MOST_S)
        self._stacks = self._path.with_suffix(".stack").open("a")
        self._stacks.truncate(0)
        faulthandler.register(signal.SIGQUIT, file=self._stacks)
        self._write({})
        self._put_off_stack()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        verdict.folder = folder
        _current.append(self)

    def _run(self) -> None:
        next_s = 0.0
        while not self._ended.wait(min(1.0, self._period_s)):
            asked, now_s = os.fstat(self._stacks.fileno()).st_size > 0, time.monotonic()
            if asked or now_s >= next_s:
                self._look(asked=asked)
                next_s = now_s + self._period_s

    def _put_off_stack(self) -> None:
        """Let faulthandler write the stack, unless this is called again in time: needs the GIL."""
        faulthandler.dump_traceback_later(2 * self._period_s, file=self._stacks)

    def _look(self, *, asked: bool) -> None:
        """Write down where the rank is, if it has made no step since the last look, or if asked."""
        self._put_off_stack()
        before, self._step = self._step, self._progress.step
        if asked:
            self._stacks.truncate(0)
        if asked or before == self._step:
            main = threading.main_thread().ident or 0
            frames = traceback.extract_stack(sys._current_frames()[main])
            self._write(
                {
                    "step": self._step,
                    "place": _place((f.filename, f.lineno, f.name) for f in reversed(frames)),
                    "stack": "".join(traceback.format_list(frames)),
                    "collectives": _collectives(),
                }
            )
            self._wrote = True
        elif self._wrote:  # it trains again
            self._write({})

    def _write(self, found: dict[str, Any]) -> None:
        self._wrote = bool(found)
        with suppress(OSError):  # the disk is full, or the folder is gone
            write_json(self._path, self._about | found)

    def end(self, *, keep: bool) -> None:
        """Look no more; remove this rank's files unless `keep`."""
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGQUIT)
        self._stacks.close()
        for path in () if keep else (self._path, self._path.with_suffix(".stack")):
            path.unlink(missing_ok=True)


_current: list[Watch] = []


def stop(*, keep: bool = False) -> None:
    """Stop watching this process, if it is watched."""
    while _current:
        _current.pop().end(keep=keep)


def _place(frames: Iterable[tuple[str, int | None, str]]) -> str:
    """The first of the frames (file, line, function) that is neither in torch nor in Python."""
    for file, line, name in frames:
        if not file.startswith(_OTHERS):
            return f"{file.removeprefix(f'{ROOT}/')}:{line} ({name})"
    return ""


def _collectives() -> list[dict[str, Any]]:
    """The collectives that this rank waits for, and the last one, of each process group."""
    names = ["_dump_fr_trace"] + ["_dump_nccl_trace"] * ("nccl" in dist.get_backend_config())
    dumps = [getattr(c10d, name)() for name in names if hasattr(c10d, name)]
    newest: dict[str, dict[str, Any]] = {}
    waits = []
    for entry in (e for dump in dumps for e in pickle.loads(dump).get("entries", ())):  # noqa: S301
        frames = [(f["filename"], f["line"], f["name"]) for f in entry.get("frames", ())]
        found = {
            "group": entry["process_group"][0],
            "number": entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
            "kind": entry["profiling_name"].partition(":")[2].partition(" ")[0],
            "sizes": entry["input_sizes"],
            "place": _place(frames) or "the backward pass",  # on a GPU it has no Python frames
            "done": entry["retired"] or entry["state"] == "completed",
        }
        newest[found["group"]] = found
        if not found["done"]:
            waits.append(found)
    return waits + [found for found in newest.values() if found["done"]]
