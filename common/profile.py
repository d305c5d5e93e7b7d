"""`--profile N`: torch's profiler over N steps, on every rank."""

import json
import os
import threading
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from common import log
from common.watch.clock import Clock
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
        clock, folder, rank: the run's.
    """

    def __init__(
        self, steps: int, of_process: tuple[int, int], clock: Clock, folder: Path, rank: int
    ) -> None:
        self._first = of_process[0] + SETTLE
        self._last = min(self._first + steps - 1, of_process[1])
        self._clock, self._folder, self._rank = clock, folder / "profile", rank
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
        trace = self._folder / f"rank_{self._rank}.json"
        profiler, self._profiler = self._profiler, None
        try:
            with TemporaryDirectory() as folder:
                profiler.export_chrome_trace(f"{folder}/trace")
                content = Path(folder, "trace").read_bytes()
            json.loads(content)  # torch says nothing of a full disk
        except (OSError, ValueError):
            log.warning(f"--profile: no trace: is {gettempdir()} full? TMPDIR can name another")
            return
        write_bytes(trace, content)
        averages = profiler.key_averages()
        by = "self_cuda_time_total" if torch.cuda.is_initialized() else "self_cpu_time_total"
        table = averages.table(sort_by=by, row_limit=15, max_name_column_width=40)
        write_bytes(trace.with_suffix(".txt"), table.encode())
        log.info(f"{table}\nprofile: {trace} opens in https://ui.perfetto.dev")

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
