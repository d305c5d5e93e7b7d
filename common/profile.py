"""`--profile N`: torch's profiler over N steps, on every rank."""

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from common import log
from common.group.clocks import ahead_of_rank_0_s
from common.watch.clock import KINDS, Clock
from common.writing import write_bytes

SETTLE = 3
"""Steps of this process that come before the recorded ones: they allocate and compile."""


class Profile:
    """Records steps: what the CPU and the GPU do, in ranges named after the step and its phases.

    On a GPU the wait for gradients is in the range `compute`: a thread of autograd begins it. An
    evaluation must not begin meanwhile: its loading processes would record for ever, too.

    Args:
        steps: to record. 0: none, and nothing is changed.
        of_process: its first and its last step.
        clock, folder: the run's.
        parts: the model, and the optimizer if there is one.
    """

    def __init__(
        self,
        steps: int,
        of_process: tuple[int, int],
        clock: Clock,
        folder: Path,
        parts: Mapping[str, Any],
    ) -> None:
        self._first = of_process[0] + SETTLE
        self._last = min(self._first + steps - 1, of_process[1])
        self._clock, self._folder, self._parts = clock, folder / "profile", parts
        self._ahead_s = 0.0
        self._ranges: list[Any] = []
        self._thread = threading.get_ident()
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []
        self._profiler: Any = None
        if steps:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it talks, of missing GPUs too
            self._profiler = profile(
                activities=[ProfilerActivity.CPU, *gpu], record_shapes=True, profile_memory=True
            )

    def before(self, step: int) -> None:
        """Begin to record, or the next step's range."""
        if not self._profiler or not self._first <= step <= self._last:
            return
        if step == self._first:
            self._ahead_s = ahead_of_rank_0_s()
            self._profiler.start()
            self._clock.on_kind = self._phase
        self._enter(f"step {step}")

    def after(self, step: int) -> None:
        """End the step's range; after the last one, write what was recorded."""
        if not self._profiler or not self._first <= step <= self._last:
            return
        self._close(0)
        if step == self._last:
            self.end()

    def end(self) -> None:
        """Write the trace and a table of the most expensive operations, unless that is done."""
        if not self._profiler:
            return
        if self._clock.on_kind != self._phase:
            log.warning(f"--profile: the run made no step to record; steps 1 to {SETTLE} never are")
            return
        self._clock.on_kind = None
        self._close(0)
        self._profiler.stop()
        trace = self._folder / f"rank_{dist.get_rank()}.json"
        profiler, self._profiler = self._profiler, None
        try:
            with TemporaryDirectory() as folder:
                profiler.export_chrome_trace(f"{folder}/trace")
                content = json.loads(Path(folder, "trace").read_bytes())
            # json.loads also finds the half trace of a full disk, of which torch says nothing
        except (OSError, ValueError):
            log.warning(f"--profile: no trace: is {gettempdir()} full? TMPDIR can name another")
            return
        memory = memory_in_words(self._parts, content["traceEvents"])
        arrange(content["traceEvents"], dist.get_rank(), self._ahead_s)
        write_bytes(trace, json.dumps(content).encode())
        averages = profiler.key_averages()
        by = "self_cuda_time_total" if torch.cuda.is_initialized() else "self_cpu_time_total"
        table = averages.table(sort_by=by, row_limit=15, max_name_column_width=40)
        table += f"\n{memory}\n"
        write_bytes(trace.with_suffix(".txt"), table.encode())
        log.info(
            f"{table}profile: {trace} opens in https://ui.perfetto.dev, and a zip of all ranks' "
            "files opens as one"
        )

    def _enter(self, name: str) -> None:
        entered = record_function(name)
        entered.__enter__()
        self._ranges.append(entered)

    def _phase(self, kind: str) -> None:
        if threading.get_ident() != self._thread or not self._ranges:
            return
        self._close(1)
        self._enter(kind)

    def _close(self, but: int) -> None:
        while len(self._ranges) > but:
            self._ranges.pop().__exit__(None, None, None)


def arrange(events: list[dict[str, Any]], rank: int, ahead_s: float) -> None:
    """Make the traces of several ranks open as one: a clock, a name, and the phases on a track.

    Perfetto drops ranges of a track that overlap, as a phase and a range of torch's may.
    """
    # Linux numbers processes and threads below 2 ** 22, on each host; torch numbers GPUs from 0.
    apart = rank << 22
    for event in events:
        of_torch, name = event.get("pid"), event.get("name", "")
        if "ts" in event:
            event["ts"] -= ahead_s * 1e6
        for place in ("pid", "tid"):
            if isinstance(event.get(place), int):
                event[place] += apart
        if event.get("cat") == "user_annotation" and (name in KINDS or name.startswith("step ")):
            event["tid"] = "phases"
        if name == "process_name" and of_torch == os.getpid():
            event["args"]["name"] = f"rank {rank}"


def memory_in_words(parts: Mapping[str, Any], events: list[dict[str, Any]]) -> str:
    """What this rank's model and optimizer take, and how much more a step takes for a while."""
    sizes = {name: bytes_of(part.state_dict()) for name, part in parts.items()}
    taken = [f"{name} {size / 2**20:,.1f}" for name, size in sizes.items() if size]
    for kind, device in enumerate(("CPU", "GPU")):
        changes = [event["args"] for event in events if event.get("name") == "[memory]"]
        changes = [change for change in changes if change["Device Type"] == kind]
        if changes:
            before = changes[0]["Total Allocated"] - changes[0]["Bytes"]
            more = max(change["Total Allocated"] for change in changes) - before
            taken.append(f"gradients, activations and the rest on the {device} {more / 2**20:,.1f}")
    return f"memory at most: {', '.join(taken)} MiB"


def bytes_of(tree: Any) -> int:
    """Bytes of this rank's parts of all tensors in it."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return sum(getattr(tensor, "to_local", lambda t=tensor: t)().nbytes for tensor in tensors)
