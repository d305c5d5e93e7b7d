"""Notes the time of each optimizer step, for all contestants; Python imports this file at start.

When a process that took optimizer steps ends, it writes the time after each step [s since the
epoch] and its peak resident memory [bytes] to PEERS_STAMPS/rank_N.json. Only
`torch.optim.optimizer` is changed, when it is imported. Launchers take no step and write nothing.
"""

import atexit
import json
import os
import time
from pathlib import Path
from typing import Any

from tools.on_import import OnImport

stamps: list[float] = []


def note(*_: Any) -> None:
    """Called by torch after each optimizer step."""
    stamps.append(time.time())


def write() -> None:
    """Write what was measured, without torch, which may be partly unloaded at exit."""
    # Lightning's rank 0 is the process that the user started: its environment has no rank.
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    # Not ru_maxrss: a process inherits it from its parent.
    status = Path("/proc/self/status").read_text().splitlines()
    peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    if stamps:
        path = Path(os.environ["PEERS_STAMPS"]) / f"rank_{rank}.json"
        path.write_text(json.dumps({"stamps": stamps, "peak_bytes": peak_kib * 1024}))


def hook(module: Any) -> None:
    """Watch the optimizers of `torch.optim.optimizer`."""
    module.register_optimizer_step_post_hook(note)
    atexit.register(write)


def linear(module: Any) -> None:
    """Give ddp_launch the model of `host.py`."""

    def prepare_model(*_: Any, **__: Any) -> Any:
        from benchmarks.peers.task import make_model

        return make_model()

    module.prepare_model = prepare_model


if "PEERS_STAMPS" in os.environ:
    OnImport("torch.optim.optimizer", hook)
if "PEERS_LINEAR" in os.environ:
    OnImport("common.run.parts", linear)
