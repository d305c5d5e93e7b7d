"""Measuring time and memory without fooling oneself."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.group import gather


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given, before the clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Throughput:
    """Samples per second of training, with the pauses (evaluation, snapshots) left out."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.samples = device, 0
        self._start_s, self._paused_s = time.perf_counter(), 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the block, counted from when the device has done what came before."""
        synchronize(self.device)
        start_s = time.perf_counter()
        try:
            yield
        finally:
            synchronize(self.device)
            self._paused_s += time.perf_counter() - start_s

    @property
    def samples_per_s(self) -> float:
        """Over all ranks, since the beginning of this process; 0 where nothing was trained."""
        return self.samples / (time.perf_counter() - self._start_s - self._paused_s)


def peak_memory_bytes(device: torch.device) -> list[int]:
    """Each rank's peak [bytes], in rank order: the allocator's on a GPU, else resident memory.

    Calls a collective.
    """
    if device.type == "cuda":
        return gather(torch.cuda.max_memory_allocated(device))
    return gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
