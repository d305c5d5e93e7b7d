"""How a run begins: logs, determinism, seed, devices, a first line, process group and folder."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from common import log
from common.group.devices import choose_backend, choose_device, device_in_words
from common.group.process_group import process_group
from common.launch.capacity import usable_cores
from common.launch.ranks import Ranks
from common.run.folder import Run
from common.run.options import RunOptions
from common.seeds import choose_precision, seed_everything, set_determinism
from common.terminal import set_up_logs


@contextmanager
def start(
    recipe: str,
    config: Any,
    ranks: Ranks,
    choose: Callable[[], Sequence[torch.device]] | None = None,
    *,
    one_device: bool = True,
) -> Iterator[Run]:
    """A run, with its logs, determinism, seed, devices, process group and folder.

    Every rank is seeded alike: all draw the same initial weights. Nothing may use CUDA before.

    Args:
        recipe: its name.
        config: its options, of which `run` are `RunOptions`.
        ranks: of this process.
        choose: gives the devices that this process uses, first that of the loss. None: one.
        one_device: all collectives on GPUs are of tensors on the first device.

    Raises:
        InputError: as `process_group` and `Run`.
    """
    options, imports_s, begun_s = config.run, age_of_process_s(), time.monotonic()
    set_up_logs(ranks)
    set_determinism(**options.determinism)
    seed_everything(options.seed)
    devices = choose() if choose else [choose_device(options.device, ranks)]
    announce(recipe, options, ranks, devices[0])
    more = {"one_device": one_device}
    with process_group(ranks, devices[0], options.backend, options.timeout_s, **more):
        run = Run(recipe, config, ranks, *devices)
        run.start_s = {"imports": round(imports_s, 3)}
        run.lap("ranks", begun_s)
        yield run


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


def age_of_process_s() -> float:
    """Time since the kernel started this process [s]."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
