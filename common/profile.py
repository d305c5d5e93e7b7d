"""`--profile N`: torch's profiler over N steps, on every rank."""

import json
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile, schedule

from common import log
from common.watch.clock import KINDS, Clock
from common.writing import write_bytes

SETTLE = 3
"""Steps of this process that come before the recorded ones: they allocate and compile."""

_NO_STEP = f"--profile: no step to record: the first {SETTLE} of a process never are"


class Profile:
    """Records steps: what the CPU and the GPU do, in ranges named after the phases of a step.

    On a GPU the wait for gradients is in the range `compute`: a thread of autograd begins it. An
    evaluation must not begin meanwhile: its loading processes would record for ever, too.

    Args:
        steps: to record. 0: none, and nothing is changed.
        settle: steps of this process that come before them, `SETTLE` or more.
        left: steps until the first evaluation after those.
        clock, folder: the run's.
    """

    def __init__(self, steps: int, settle: int, left: int, clock: Clock, folder: Path) -> None:
        self._settle, self._clock, self._folder = settle, clock, folder / "profile"
        self._range, self._thread = ExitStack(), threading.get_ident()
        self._profiler: profile | None = None
        if steps and left <= settle:
            log.warning(_NO_STEP)
        elif steps:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it talks, of missing GPUs too
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []
            active = min(steps, left - settle)
            self._profiler = profile(
                activities=[ProfilerActivity.CPU, *gpu],
                schedule=schedule(wait=settle - 1, warmup=1, active=active, repeat=1),
                on_trace_ready=self._write,
                record_shapes=True,
                profile_memory=True,
            )
            self._profiler.start()
            clock.on_kind = self._phase

    def after_step(self) -> None:
        """A step has ended; after the last one of those to record, the files are written."""
        if self._profiler:
            self._range.close()
            self._profiler.step()
            if self._clock.on_kind is None:  # they are written
                self.end()

    def end(self) -> None:
        """Write what was recorded, unless that is done."""
        if self._profiler:
            self._range.close()
            if self._profiler.step_num <= self._settle:
                self._profiler.on_trace_ready = None
                log.warning(_NO_STEP)
            self._profiler.stop()
            self._profiler = self._clock.on_kind = None

    def _phase(self, kind: str) -> None:
        if threading.get_ident() == self._thread:
            self._range.close()
            self._range.enter_context(record_function(kind))

    def _write(self, profiler: profile) -> None:
        """The trace, and a table of the most expensive operations."""
        self._clock.on_kind = None
        trace = self._folder / f"rank_{dist.get_rank()}.json"
        try:
            with TemporaryDirectory() as folder:
                profiler.export_chrome_trace(f"{folder}/trace")
                content = json.loads(Path(folder, "trace").read_bytes())
            # json.loads also finds the half trace of a full disk, of which torch says nothing
        except (OSError, ValueError):
            log.warning(f"--profile: no trace: is {gettempdir()} full? TMPDIR can name another")
            return
        for event in content["traceEvents"]:  # Perfetto drops ranges of a track that overlap
            if event.get("cat") == "user_annotation" and event["name"] in KINDS:
                event["tid"] = "phases"
        write_bytes(trace, json.dumps(content).encode())
        by = "self_cuda_time_total" if torch.cuda.is_initialized() else "self_cpu_time_total"
        averages = profiler.key_averages()
        table = averages.table(sort_by=by, row_limit=15, max_name_column_width=40)
        write_bytes(trace.with_suffix(".txt"), table.encode())
        log.info(f"{table}\nprofile: {trace} opens in https://ui.perfetto.dev")
