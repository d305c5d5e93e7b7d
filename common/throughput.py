"""How fast a run trains, and how much memory it needs."""

import math
import resource
import time

import torch

from common.group.collectives import gather
from common.group.devices import synchronize


class Throughput:
    """Samples per second of training, without pauses (evaluation, snapshots) and the first step.

    The first step of a process connects the ranks, compiles and allocates.
    """

    def __init__(self, devices: list[torch.device]) -> None:
        self.devices, self._samples, self._started = devices, 0, False
        self._trained_s, self._since_s = 0.0, math.inf

    def add(self, samples: int) -> None:
        """Count a step; the first one starts the clock instead."""
        if self._started:
            self._samples += samples
        else:
            self._started = True
            self.resume()

    def pause(self) -> None:
        """Stop the clock when the devices have finished their work."""
        synchronize(*self.devices)
        self._trained_s += max(0.0, time.perf_counter() - self._since_s)
        self._since_s = math.inf

    def resume(self) -> None:
        """Start the clock again when the devices have finished the work of the pause."""
        if self._started:
            synchronize(*self.devices)
            self._since_s = time.perf_counter()

    def measured(self) -> dict[str, float]:
        """`samples_per_s` over all ranks since this process's first step; {} before its second."""
        trained_s = self._trained_s + max(0.0, time.perf_counter() - self._since_s)
        return {"samples_per_s": self._samples / trained_s} if self._samples else {}


def peak_memory_bytes(devices: list[torch.device]) -> list[int]:
    """Peak memory of every rank [bytes]: per GPU (PyTorch's allocator), or resident on CPUs.

    Calls a collective.
    """
    own = [torch.cuda.max_memory_allocated(gpu) for gpu in devices if gpu.type == "cuda"]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [peak for peaks in gather(own or [resident]) for peak in peaks]
