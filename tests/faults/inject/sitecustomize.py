"""What the fault matrix changes inside a rank; Python imports this file at start.

FAULT names what happens once, on rank FAULT_RANK after step FAULT_STEP. The file FAULT_MARK then
records that it has happened. Only `common.run.loop` is changed, when it is imported.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from tools.on_import import OnImport


def happen(loop: Any, losses: Any) -> None:
    """Do what FAULT names."""
    import ctypes
    import multiprocessing
    import resource

    import torch
    import torch.distributed as dist

    fault = os.environ["FAULT"]
    if fault == "raises":
        raise RuntimeError("a bug of this test")
    if fault == "exits":
        os._exit(7)
    if fault == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stops answering":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "sleeps for ever":
        time.sleep(1e6)
    if fault == "hangs in data loading":
        type(loop.data.train).__getitems__ = lambda *_: time.sleep(1e6)
    if fault == "keeps the GIL for ever":
        for mutex in [ctypes.create_string_buffer(64)] * 2:  # a second lock of it never returns
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    if fault == "waits in another collective":
        dist.broadcast(torch.zeros(3), src=0)
    if fault == "runs out of memory":
        resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
        torch.zeros(2**30)
    if fault == "loses a loading process":
        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    if fault == "calls another collective":
        dist.all_reduce(torch.zeros(3))
    if fault == "leaves a parameter out":
        loop.state.parts["model"].fc.forward = lambda x: x[:, :10]
    if fault == "has a loss that is not finite":
        losses.fill_(float("inf"))
    if fault == "sees the clock go back":
        now = time.time
        time.time = lambda: now() - 3600


def patch(module: Any) -> None:
    """Make `after_step` cause the fault."""
    after_step = module.Loop.after_step

    def changed(self: Any, losses: Any) -> None:
        losses = losses.detach().clone()
        time.sleep(float(os.environ.get("STEP_S", 0)))
        if self.run.ranks.rank == int(os.environ.get("SLOW_RANK", -1)):
            time.sleep(float(os.environ["SLOW_S"]))
        mark = Path(os.environ.get("FAULT_MARK", "/"))
        due = self.state.step + 1 == int(os.environ.get("FAULT_STEP", 0))
        rank = int(os.environ.get("FAULT_RANK", 1))
        if due and self.run.ranks.rank == rank and not mark.exists():
            mark.touch()
            happen(self, losses)
        after_step(self, losses)

    module.Loop.after_step = changed


if "FAULT_STEP" in os.environ or "STEP_S" in os.environ:
    OnImport("common.run.loop", patch)
