"""Which devices a process uses, and the backend that connects them."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from common import driver, log
from common.errors import InputError
from common.hints import with_hint
from common.launch.ranks import Ranks
from common.stack import stacks


def choose_device(device: str, ranks: Ranks) -> torch.device:
    """The device of this process, by local rank.

    A process that sees only one GPU takes it, whatever its local rank: Slurm's cgroups hide the
    others (`--gpus-per-task`). `process_group` checks that no two ranks share a GPU by NCCL.

    Args:
        device: auto (a GPU if there is one), cpu or cuda.
        ranks: of this process.

    Raises:
        InputError: no GPU, but --device cuda or a Slurm job that was given some; a driver with
            which torch cannot use this host's GPUs; or more processes on this host than GPUs.
    """
    if device == "cpu":
        return torch.device("cpu")
    _warn_if_the_program_hides_gpus()
    check_driver()
    gpus = gpu_count()
    if gpus == 0:
        if device == "auto" and driver.slurm_gave_gpus():
            raise InputError(
                "Slurm gave this job GPUs, but torch sees none: check the driver (srun nvidia-smi) "
                "and that it supports the CUDA stack of the environment, or give --device cpu to "
                "train without GPUs"
            )
        if device == "auto":
            return torch.device("cpu")
        raise InputError(
            "--device cuda, but this process sees no GPU: give --device cpu, or check "
            "the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        )
    if gpus == 1:
        return torch.device("cuda", 0)
    if ranks.local_world_size > gpus:  # true on every rank of this host, so none waits for others
        raise InputError(
            f"{ranks.local_world_size} processes on this host but {gpus} GPUs: start --nproc "
            f"{gpus} or fewer, or give --device cpu (set LOCAL_WORLD_SIZE if they are on several "
            "hosts)"
        )
    return torch.device("cuda", ranks.local_rank)


def _warn_if_the_program_hides_gpus() -> None:
    """Name a CUDA_VISIBLE_DEVICES that a line such as `os.environ[...] = "0"` has set."""
    name, began = "CUDA_VISIBLE_DEVICES", b""
    with suppress(OSError):
        began = Path("/proc/self/environ").read_bytes()  # as this process was started
    found = re.search(rb"(?:^|\0)CUDA_VISIBLE_DEVICES=([^\0]*)", began)
    before, now = os.fsdecode(found[1]) if found else None, os.environ.get(name)
    if b"PATH=" in began and now != before:  # else a title of the process stands there
        was, is_now = ("unset" if value is None else repr(value) for value in (before, now))
        log.warning(
            f"the program has changed {name} from {was} to {is_now}: CUDA or a launcher may have "
            "read it before; set it in the shell"
        )


def gpu_count() -> int:
    """GPUs that this process can use; a GPU in MIG mode counts as the one instance it can use."""
    counted = torch.cuda.device_count()
    usable = driver.usable_gpus() if counted > 1 else None
    return counted if usable is None else min(counted, usable)


def choose_devices(
    given: Sequence[str | int] | None, device: str, *, on_cpu: int = 1
) -> list[torch.device]:
    """The devices that one process drives, in the order given.

    Args:
        given: names such as `cuda:0 cuda:1` or `cpu cpu` (--devices), or numbers of GPUs
            (--device-ids). None: all visible GPUs; without GPUs, the CPU.
        device: auto, cpu or cuda.
        on_cpu: how many times the CPU counts if it is not given.

    Raises:
        InputError: a device is not there; GPUs and CPU are mixed; a GPU's number is given twice; or
            as from `choose_device`.
    """
    on_gpus = choose_device(device, Ranks()).type == "cuda"
    gpus = [f"cuda:{number}" for number in range(gpu_count() if on_gpus else 0)]
    if given is None:
        return list(map(torch.device, gpus or ["cpu"] * on_cpu))
    by_number = all(isinstance(entry, int) for entry in given)
    option = "--device-ids" if by_number else "--devices"
    names = [f"cuda:{entry}" if by_number else str(entry) for entry in given]
    there = gpus if by_number or device == "cuda" else ["cpu", *gpus]
    for name in names:
        if name not in there:
            raise InputError(
                f"{option} {name} is not there: this process sees {' '.join(there) or 'no GPU'} "
                f"(--device {device})"
            )
    if len({name.partition(":")[0] for name in names}) != 1:
        raise InputError(f"{option} {' '.join(names)}: name one or more, all cpu or all cuda:N")
    if by_number and len(set(names)) < len(names):
        raise InputError(f"{option} {' '.join(names)}: give each GPU once")
    return list(map(torch.device, names))


def choose_backend(backend: str, device: torch.device) -> str:
    """The backend of the process group, gloo or nccl; beside nccl, gloo is for tensors on CPUs.

    Raises:
        InputError: nccl without a GPU.
    """
    if device.type == "cpu":
        if backend == "nccl":
            raise InputError("--backend nccl needs GPUs: on a CPU use --backend gloo")
        return "gloo"
    return "gloo" if backend == "gloo" else "nccl"


def synchronize(*devices: torch.device) -> None:
    """Wait until the devices have finished their work, before the clock is read."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def check_driver(name: str = driver.LIBRARY) -> None:
    """Refuse a driver with which this torch cannot use this host's GPUs; without GPUs, all is fine.

    A driver runs programs for its own major version of CUDA and for older versions:
    https://docs.nvidia.com/deploy/cuda-compatibility (minor version compatibility).

    Raises:
        InputError: the driver is too old, with the stacks that fit it; or the host has GPUs, but
            its driver is not found or cannot start, or this torch is built without CUDA.
    """
    library, files = driver.load(name), driver.gpu_files()
    if library:
        _refuse_old_driver(driver.newest_cuda(library))
    if not files:
        return
    if library is None:
        why = f"the driver's {name} is not found"
    elif why := driver.failure(library):
        if not any(os.access(file, os.R_OK | os.W_OK) for file in files):
            why = f"this process may not open {files[0]} ({why})"
    elif not torch.backends.cuda.is_built():
        why = f"torch {torch.__version__} is built without CUDA: install another (make venv)"
    if why:
        raise InputError(
            f"{len(files)} GPUs under /dev, but {with_hint(why)}; or give --device cpu to train "
            "without GPUs"
        )


def _refuse_old_driver(newest_cuda: int) -> None:
    """Raise InputError if the driver supports no CUDA of torch's major version."""
    if torch.version.cuda is None or not newest_cuda:
        return
    newest, needed = newest_cuda // 1000, int(torch.version.cuda.split(".")[0])
    if newest >= needed:
        return
    fit = [name for name, parts in stacks().items() if int(parts["cuda"].split(".")[0]) <= newest]
    drivers = [p["driver"] for p in stacks().values() if p["cuda"].startswith(f"{needed}.")]
    raise InputError(
        f"this host's NVIDIA driver supports CUDA {newest}.{newest_cuda % 1000 // 10} at most, "
        f"but torch {torch.__version__} is built for CUDA {torch.version.cuda}, which needs "
        f"{f'driver {min(drivers)} or newer' if drivers else 'a newer driver'}: update the driver, "
        + (f"take stack {' or '.join(fit)} (STACK={fit[0]}), " if fit else "")
        + "or train with --device cpu"
    )
