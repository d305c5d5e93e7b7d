"""How fast a run trains and its data load, how much memory it needs, how busy its GPUs are."""

import math
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

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


GPU_FIGURES = ("gpu_utilization_percent", "gpu_power_w", "gpu_memory_used_bytes")


def gpu_use(devices: list[torch.device]) -> Tensor:
    """`GPU_FIGURES` (3,) as the driver sees them now: means of this rank's GPUs; NaN: unknown.

    Utilisation is the share of the last moment (at most 1 s) in which any kernel ran; memory is
    that of all processes. torch asks NVML, by way of the package nvidia-ml-py. A part of a GPU
    (MIG) has no utilisation.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    found = []
    for ask in (torch.cuda.utilization, torch.cuda.power_draw, torch.cuda.device_memory_used):
        value = math.nan
        with suppress(Exception):  # no GPU, no package, no such sensor: of many types
            value = fmean(ask(gpu) for gpu in gpus)
        found.append(value)
    return torch.tensor(found, dtype=torch.float64) / torch.tensor([1, 1000, 1])  # mW


def samples_per_s(
    make_loader: Callable[[], DataLoader[Any]], device: torch.device, limit_s: float = math.inf
) -> float:
    """Speed of loading batches and copying them to the device, with nothing else to do.

    The clock starts when the loading processes run, because they start once per run, but before
    they have loaded anything.

    Args:
        make_loader: makes the DataLoader to measure. Its loading processes must outlive an
            iteration.
        device: where the batches go.
        limit_s: stop after this time [s].
    """
    loader = make_loader()
    next(iter(loader))
    iterator = iter(loader)  # drops the batches that were loaded ahead
    count, start_s = 0, time.perf_counter()
    for batch in iterator:
        parts = (part for part in tree_leaves(batch) if isinstance(part, Tensor))
        count += max(len(part.to(device, non_blocking=True)) for part in parts)
        if time.perf_counter() - start_s > limit_s:
            break
    synchronize(device)
    return count / (time.perf_counter() - start_s)
