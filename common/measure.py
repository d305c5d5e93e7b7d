"""Measuring time and memory without fooling oneself."""

import math
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from common.group.collectives import gather
from common.group.devices import synchronize


class Throughput:
    """Samples per second of training, without pauses (evaluation, snapshots) and the first step.

    A process's first step connects, compiles and allocates what the others find there.
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
        """Stop the clock, when the device has done what came before."""
        synchronize(*self.devices)
        self._trained_s += max(0.0, time.perf_counter() - self._since_s)
        self._since_s = math.inf

    def resume(self) -> None:
        """Let the clock run again, when the device has done what came in the pause."""
        if self._started:
            synchronize(*self.devices)
            self._since_s = time.perf_counter()

    @property
    def samples_per_s(self) -> float:
        """Over all ranks, since the first step of this process; 0 where there was no other."""
        running_s = max(0.0, time.perf_counter() - self._since_s)
        return self._samples / (self._trained_s + running_s) if self._samples else 0.0


def peak_memory_bytes(devices: list[torch.device]) -> list[int]:
    """Peak of each of every rank's GPUs (the allocator's), else of each rank (resident) [bytes].

    Calls a collective.
    """
    own = [torch.cuda.max_memory_allocated(gpu) for gpu in devices if gpu.type == "cuda"]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [peak for peaks in gather(own or [resident]) for peak in peaks]


class Utilization:
    """Share of time in which each GPU ran any kernel, as nvidia-smi samples it twice a second.

    Args:
        devices: the GPUs; on CPUs nothing is sampled.

    Source: NVIDIA, nvidia-smi, "utilization.gpu".
    """

    def __init__(self, devices: list[torch.device]) -> None:
        gpus = [device for device in devices if device.type == "cuda"]
        self._uuids = [f"GPU-{torch.cuda.get_device_properties(gpu).uuid}" for gpu in gpus]
        self._sampler, self._said = None, tempfile.TemporaryFile("w+")  # noqa: SIM115 - read in stop()
        if gpus and shutil.which("nvidia-smi"):
            self._sampler = subprocess.Popen(
                [
                    "nvidia-smi",
                    "--query-gpu=uuid,utilization.gpu",
                    "--format=csv,noheader,nounits",
                    "--loop-ms=500",
                ],
                stdout=self._said,
                stderr=subprocess.DEVNULL,
            )

    def stop(self) -> list[float | None]:
        """End the sampling: the mean of each device [%], None where there was no sample."""
        if self._sampler is None:
            return [None] * len(self._uuids)
        self._sampler.terminate()
        self._sampler.wait()
        self._said.seek(0)
        samples: dict[str, list[float]] = {uuid: [] for uuid in self._uuids}
        for line in self._said:
            uuid, _, percent = line.partition(", ")
            if uuid in samples and percent.strip().isdigit():
                samples[uuid].append(float(percent))
        return [sum(s) / len(s) if s else None for s in samples.values()]


class PeakMemory:
    """Peak memory of this process above what it held when this was made.

    On a GPU, what PyTorch's allocator gave out. On a CPU, resident memory: the kernel's high-water
    mark (VmHWM) after setting it back by writing 5 to /proc/self/clear_refs. Memory that was freed
    before and is still resident hides as much, so measure in a fresh process what is to be exact.

    Source: Linux, proc(5), /proc/pid/clear_refs; PyTorch, torch.cuda.max_memory_allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._start = torch.cuda.memory_allocated(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self._start = _status_bytes("VmRSS")

    def above_start(self) -> int:
        """Bytes at the peak so far, above the start."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._start
        return _status_bytes("VmHWM") - self._start


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
