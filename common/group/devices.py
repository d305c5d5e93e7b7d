"""Which device a process uses, and by which backend the devices talk."""

import os
from collections.abc import Sequence

import torch

from common.errors import InputError
from common.launch.ranks import Ranks
from common.launch.stack import check_driver


def choose_device(device: str, ranks: Ranks, visible_gpus: int | None = None) -> torch.device:
    """The device of this process, by local rank.

    A process that sees one GPU only takes it whatever its local rank: Slurm's cgroups hide the
    others (`--gpus-per-task`). Whether two ranks then share one is checked by `process_group`.

    Args:
        device: auto (a GPU where there is one), cpu or cuda.
        ranks: this process's ranks.
        visible_gpus: GPUs this process sees; counted where None.

    Raises:
        InputError: cuda without a GPU, auto without one in a Slurm job that was given some, a
            driver too old for this torch, or more processes on this host than GPUs.
    """
    if device == "cpu":
        return torch.device("cpu")
    check_driver()
    gpus = torch.cuda.device_count() if visible_gpus is None else visible_gpus
    if gpus == 0:
        if device == "auto" and slurm_gave_gpus():
            raise InputError(
                "Slurm gave this job GPUs, but torch sees none: check the driver "
                "(srun nvidia-smi) and that the environment is of a CUDA stack that "
                "it knows, or give --device cpu to train without"
            )
        if device == "auto":
            return torch.device("cpu")
        raise InputError(
            "--device cuda, but this process sees no GPU: give --device cpu, or check "
            "the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        )
    if gpus == 1:
        return torch.device("cuda", 0)
    if ranks.local_world_size > gpus:  # on every rank alike: none is left waiting for the others
        raise InputError(
            f"{ranks.local_world_size} processes on this host but {gpus} GPUs: start --nproc "
            f"{gpus} or fewer, or give --device cpu (set LOCAL_WORLD_SIZE if they are on several "
            "hosts)"
        )
    return torch.device("cuda", ranks.local_rank)


def slurm_gave_gpus() -> bool:
    """Whether this process is in a Slurm job or step with GPUs."""
    return not {"SLURM_STEP_GPUS", "SLURM_JOB_GPUS"}.isdisjoint(os.environ)


def choose_devices(
    names: Sequence[str] | None, device: str, on_cpu: int = 2, visible_gpus: int | None = None
) -> list[torch.device]:
    """The devices that one process drives, in the order given.

    Args:
        names: like `cuda:0 cuda:1`, or `cpu cpu` to learn without a GPU; a device may come twice.
            None: all visible GPUs, or where there is none `on_cpu` times the CPU.
        device: auto, cpu or cuda, for where `names` is None.
        on_cpu: how often the CPU counts.
        visible_gpus: GPUs this process sees; counted where None.

    Raises:
        InputError: a device that is not there, GPUs and CPU mixed, cuda without a GPU, or a driver
            too old for this torch.
    """
    if device != "cpu":
        check_driver()
    gpus = torch.cuda.device_count() if visible_gpus is None else visible_gpus
    if names is None:
        if choose_device(device, Ranks(), gpus).type == "cpu":
            return [torch.device("cpu")] * on_cpu
        return [torch.device("cuda", number) for number in range(gpus)]
    devices = []
    for name in names:
        number = name.removeprefix("cuda:")
        if name == "cpu" and device != "cuda":
            devices.append(torch.device("cpu"))
        elif name != number and number.isdecimal() and int(number) < gpus and device != "cpu":
            devices.append(torch.device("cuda", int(number)))
        else:
            there = " ".join(["cpu", *(f"cuda:{n}" for n in range(gpus))])
            raise InputError(
                f"--devices {name} is not there: this process sees {there} (--device {device})"
            )
    if len({d.type for d in devices}) != 1:
        raise InputError(f"--devices {' '.join(names)}: name one or more, all cpu or all cuda:N")
    return devices


def choose_backend(backend: str, device: torch.device) -> str:
    """What `init_process_group` gets: small things always travel between CPUs by gloo.

    Raises:
        InputError: nccl without a GPU.
    """
    if device.type == "cpu":
        if backend == "nccl":
            raise InputError("--backend nccl needs GPUs: on a CPU use --backend gloo")
        return "gloo"
    return "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"


def synchronize(*devices: torch.device) -> None:
    """Wait until the devices have done all they were given, before the clock is read."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
