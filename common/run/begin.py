"""How a run begins: logs, determinism, the seed, and a first line that says on what it trains."""

import torch

from common import log
from common.group.devices import choose_backend, choose_device
from common.launch.capacity import usable_cores
from common.launch.ranks import Ranks
from common.run.options import RunOptions
from common.seeds import choose_precision, seed_everything, set_determinism
from common.terminal import set_up_logs


def set_up(options: RunOptions, ranks: Ranks) -> None:
    """Set up logs and determinism, and seed every rank alike: all draw the same initial weights.

    Call it before any CUDA work.
    """
    set_up_logs(ranks)
    set_determinism(**options.determinism)
    seed_everything(options.seed)


def begin(recipe: str, options: RunOptions, ranks: Ranks) -> torch.device:
    """Set up this process, choose its device, and announce the run; returns the device."""
    set_up(options, ranks)
    device = choose_device(options.device, ranks)
    announce(recipe, options, ranks, device)
    return device


def announce(recipe: str, options: RunOptions, ranks: Ranks, device: torch.device) -> None:
    """Say how many processes train, on which device, and whether CPU cores stay idle."""
    backend = choose_backend(options.backend, device)
    precision = choose_precision(options.precision, device)
    log.info(
        f"{recipe}: world_size {ranks.world_size} (launcher: {ranks.launcher}), "
        f"device {device_in_words(options.device, device)}, backend {backend}, {precision}"
    )
    if (options.precision, precision, device.type) == ("auto", "fp32", "cuda"):
        log.info("this GPU does not compute in bf16: --precision fp16 trains faster than fp32")
    if options.tf32 and device.type == "cpu":
        log.warning("--tf32 has no effect on a CPU")
    busy, cores = ranks.local_world_size * options.cpu_threads, usable_cores()
    if device.type == "cpu" and busy < cores:
        log.info(
            f"training uses {busy} of {cores} CPU cores: to use more, give a larger --nproc (if "
            "the recipe has it) or --cpu-threads (changes the bits)"
        )


def device_in_words(asked: str, device: torch.device) -> str:
    """The kind of device, with a note if `--device auto` found no GPU."""
    return f"{device.type}{' (no GPU visible)' if (asked, device.type) == ('auto', 'cpu') else ''}"
