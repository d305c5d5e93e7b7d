"""The one instrument of all contestants; Python imports this before anything else.

A process that takes optimizer steps writes, when it ends, the time after each [s since the epoch]
and its peak resident memory [bytes] to PEERS_STAMPS/rank_N.json. Only `torch.optim.optimizer` is
touched, when the contestant imports it; launchers, which take no step, write nothing.
"""

import atexit
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

stamps: list[float] = []


def note(*_: Any) -> None:
    """Called by torch after each optimizer step."""
    stamps.append(time.time())


def write() -> None:
    """Leave what was measured; without torch, which may be half gone."""
    # Lightning's rank 0 is the process that the user started, which has no rank in its environment.
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    # Not ru_maxrss: a process inherits that from the one that started it.
    status = Path("/proc/self/status").read_text().splitlines()
    peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    if stamps:
        path = Path(os.environ["PEERS_STAMPS"]) / f"rank_{rank}.json"
        path.write_text(json.dumps({"stamps": stamps, "peak_bytes": peak_kib * 1024}))


class Finder:
    """Adds the hook when `torch.optim.optimizer` is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """The module's own spec, with a loader that adds the hook after it has loaded."""
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def load_and_hook(module: Any) -> None:
            load(module)
            module.register_optimizer_step_post_hook(note)
            atexit.register(write)

        loader.exec_module = load_and_hook
        return spec


if "PEERS_STAMPS" in os.environ:
    sys.meta_path.insert(0, Finder())
