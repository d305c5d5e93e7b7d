"""How much memory training needs, above what the process held before it."""

from pathlib import Path

import torch


class PeakMemory:
    """Peak memory of this process above what it held when this object was made.

    On a GPU, it counts the memory of PyTorch's allocator. On a CPU, it counts resident memory: the
    kernel's high-water mark (VmHWM), reset by writing 5 to /proc/self/clear_refs. Freed memory may
    stay resident and hide a peak, so an exact measurement needs a new process.

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
        """The peak so far above the start [bytes]."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._start
        return _status_bytes("VmHWM") - self._start


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
