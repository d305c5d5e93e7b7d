"""Which devices a process uses, and the backend that connects them."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from common import log
from common.errors import InputError
from common.hints import with_hint
from common.launch.ranks import Ranks


def choose_device(device: str, ranks: Ranks) -> torch.device:
    """The device of this process, by local rank.

    A process that sees only one GPU takes it, whatever its local rank: Slurm's cgroups hide the
    others (`--gpus-per-task`). `process_group` checks that no two ranks share a GPU by NCCL.

    Args:
        device: auto (a GPU if there is one), cpu or cuda.
        ranks: of this process.

    Raises:
        InputError: torch can use no GPU, but --device cuda, or this process should have one; or
            more processes on this host than GPUs.
    """
    if device == "cpu":
        return torch.device("cpu")
    _warn_if_the_program_hides_gpus()
    expected = why_there_are_gpus()
    if device == "auto" and not expected and torch.cuda.device_count() == 0:
        return torch.device("cpu")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as failed:  # AssertionError: torch is built without CUDA
        said = with_hint(str(failed).partition("\n")[0])
        raise InputError(
            f"{expected or '--device cuda'}, but this process sees no GPU: {said}; or give "
            "--device cpu to train without GPUs"
        ) from None
    gpus = torch.cuda.device_count()
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
    if now and now != before and b"PATH=" in began:  # else a title of the process stands there
        was = "unset" if before is None else repr(before)
        log.warning(
            f"the program has changed {name} from {was} to {now!r}: CUDA or a launcher may have "
            "read it before; set it in the shell"
        )


def why_there_are_gpus() -> str:
    """What says that this process has GPUs, whether or not torch can use them; else empty."""
    if not {"SLURM_STEP_GPUS", "SLURM_JOB_GPUS"}.isdisjoint(os.environ):
        return "Slurm gave this job GPUs"
    visible = re.match("[0-9]|GPU-|MIG-", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    if visible and "SLURM_JOB_ID" not in os.environ and any(Path("/dev").glob("nvidia[0-9]*")):
        return "this host has GPUs (/dev/nvidia*)"
    return ""


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
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count() if on_gpus else 0)]
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


def open_contexts(*devices: torch.device) -> None:
    """Let autograd's thread for each GPU begin with a small backward pass.

    cuBLAS warns if it is the first that needs a CUDA context in a thread.
    """
    for device in devices:
        if device.type == "cuda":
            torch.ones((), device=device, requires_grad=True).mul(2).backward()


def device_in_words(asked: str, device: torch.device) -> str:
    """The kind of device, with a note if `--device auto` found no GPU."""
    return f"{device.type}{' (no GPU visible)' if (asked, device.type) == ('auto', 'cpu') else ''}"
