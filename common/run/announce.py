"""The first lines of a run: on what it trains."""

import torch

from common import log
from common.group.devices import choose_backend
from common.group.host import usable_cores
from common.launch.ranks import Ranks
from common.run.options import RunOptions


def announce(recipe: str, options: RunOptions, ranks: Ranks, device: torch.device) -> None:
    """Say how many processes train, on which device, and whether CPU cores stay idle."""
    backend = choose_backend(options.backend, device)
    log.info(
        f"{recipe}: world_size {ranks.world_size} (launcher: {ranks.launcher}), "
        f"device {device_in_words(options.device, device)}, backend {backend}, {options.precision}"
    )
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
