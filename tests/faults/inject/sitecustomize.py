"""What the fault matrix changes inside a rank; Python imports this before anything else.

FAULT names what happens on rank FAULT_RANK after step FAULT_STEP, once: FAULT_MARK is a file that
says that it has happened. Only `common.run.loop` is touched, when a recipe imports it.
"""

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def happen(loop: Any, losses: Any) -> None:
    """Do what FAULT names."""
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
    """Let `after_step` have a fault."""
    after_step = module.Loop.after_step

    def changed(self: Any, losses: Any) -> None:
        losses = losses.detach().clone()
        time.sleep(float(os.environ.get("STEP_S", 0)))
        mark = Path(os.environ.get("FAULT_MARK", "/"))
        due = self.state.step + 1 == int(os.environ.get("FAULT_STEP", 0))
        rank = int(os.environ.get("FAULT_RANK", 1))
        if due and self.run.ranks.rank == rank and not mark.exists():
            mark.touch()
            happen(self, losses)
        after_step(self, losses)

    module.Loop.after_step = changed


class Finder:
    """Patches `common.run.loop` when it is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """The module's own spec, with a loader that patches after it has loaded."""
        if name != "common.run.loop":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def load_and_patch(module: Any) -> None:
            load(module)
            patch(module)

        loader.exec_module = load_and_patch
        return spec


if "FAULT_STEP" in os.environ or "STEP_S" in os.environ:
    sys.meta_path.insert(0, Finder())
