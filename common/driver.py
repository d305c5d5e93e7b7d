"""What the NVIDIA driver says about its GPUs. Without torch, and without memory on any GPU."""

import ctypes
import os
import re
from pathlib import Path

LIBRARY = "libcuda.so.1"
"""The driver's own library. It belongs to the host, and a container gets it from there."""


def slurm_gave_gpus() -> bool:
    """Whether this process is in a Slurm job or step with GPUs."""
    return not {"SLURM_STEP_GPUS", "SLURM_JOB_GPUS"}.isdisjoint(os.environ)


def device_files() -> list[Path]:
    """The device files of the GPUs here."""
    return list(Path("/dev").glob("nvidia[0-9]*"))


def gpu_files() -> list[Path]:
    """The device files of the GPUs that neither the user nor Slurm hides from this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and not re.match("[0-9]|GPU-|MIG-", visible)
    if hidden or ("SLURM_JOB_ID" in os.environ and not slurm_gave_gpus()):
        return []
    return device_files()


def load(name: str = LIBRARY) -> ctypes.CDLL | None:
    """The driver's library; None if the loader does not find it."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def newest_cuda(library: ctypes.CDLL) -> int:
    """The newest CUDA that the driver supports, as 1000 * major + 10 * minor; 0 if unknown."""
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    return number.value


def failure(library: ctypes.CDLL) -> str:
    """Why the driver cannot start in this process, in its own words; empty if it can."""
    status, text = library.cuInit(0), ctypes.c_char_p()
    if status == 0:
        return ""
    library.cuGetErrorString(status, ctypes.byref(text))
    return f"CUDA error {status}: {(text.value or b'unknown').decode()}"


def usable_gpus() -> int | None:
    """GPUs, or instances of a GPU in MIG mode, that this process can use; None if no driver.

    NVML, which torch asks first, counts each GPU in MIG mode, of which CUDA gives one instance.
    """
    library, count = load(), ctypes.c_int()
    if library is None:
        return None
    if not failure(library):
        library.cuDeviceGetCount(ctypes.byref(count))
    return count.value
