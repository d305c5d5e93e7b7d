"""From a data set to this rank's batches, with as many loading processes as are worth it."""

import logging
from pathlib import Path

import torch

from common.data.batches import DeviceBatches
from common.data.datasets import Data, DataOptions
from common.data.stream import (
    GlobalBatches,
    Samples,
    eval_batch_size,
    fixed_batches,
    make_loader,
)
from common.data.workers import (
    choose_num_workers,
    cores_per_rank,
    default_num_workers,
    most_workers,
)
from common.errors import InputError
from common.group.collectives import agreed, gather
from common.launch.hints import SHARED_MEMORY_HINT
from common.launch.ranks import Ranks

log = logging.getLogger("recipes")


def make_loaders(
    data: Data,
    options: DataOptions,
    global_batch_size: int,
    seed: int,
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype,
    folder: Path,
) -> tuple[GlobalBatches, DeviceBatches, DeviceBatches]:
    """This rank's share of the training data, its batches, and those of the validation data.

    The batches come on `device`, the images as `dtype`.

    Calls collectives. `folder` is the run's, where `--num-workers auto` keeps what it measured.

    Raises:
        InputError: a batch that the world size does not divide or the data cannot fill, or more
            loading processes than /dev/shm has room for.
    """
    batches = GlobalBatches(len(data.train), global_batch_size, seed, ranks.rank, ranks.world_size)
    held_out = fixed_batches(
        len(data.val), eval_batch_size(len(data.val)), ranks.rank, ranks.world_size
    )
    pin = options.pin_memory and device.type == "cuda"
    largest = max([batches.batch_size_per_rank, *map(len, held_out)])
    workers = _num_workers(data.train, batches, largest, options, device, pin, folder)
    loader = make_loader(
        data.train, batches, style=options.loader, num_workers=workers, pin_memory=pin
    )
    val_loader = make_loader(data.val, held_out, num_workers=workers, pin_memory=pin)
    moved, val_moved = (
        DeviceBatches(part, device, dtype, data.mean, data.std) for part in (loader, val_loader)
    )
    return batches, moved, val_moved


def _num_workers(
    samples: Samples,
    batches: GlobalBatches,
    largest: int,
    options: DataOptions,
    device: torch.device,
    pin: bool,
    folder: Path,
) -> int:
    """Loading processes per rank, the same number on every rank.

    Args:
        samples: to train on.
        batches: of them.
        largest: samples of the largest batch, which decides what fits into /dev/shm.
        options: `num_workers` is a number, "auto" to measure, or None to go by the cores.
        device: of this rank.
        pin: load into page-locked memory.
        folder: of the run.

    Raises:
        InputError: a number was given for which /dev/shm is too small.
    """
    asked = options.num_workers
    if asked == 0 or (asked is None and options.data != "imagefolder"):
        return 0
    cores, ranks_here = cores_per_rank()
    with agreed():
        room = most_workers(samples, largest, ranks_here)
    most, why = min(gather(room))
    if isinstance(asked, int):
        if asked > most:
            raise InputError(f"--num-workers {asked}: {why}; {SHARED_MEMORY_HINT}")
        return asked
    wanted = cores if asked == "auto" else default_num_workers(cores, device)
    if most < wanted:
        log.info(f"{why}; {SHARED_MEMORY_HINT}")
    wanted = min(most, wanted)
    if asked == "auto":
        known = choose_num_workers(samples, list(batches), device, pin, folder, wanted)
        return min(most, known)  # a resumed run's may be from a host with more room
    log.info(f"--num-workers {wanted} (CPU cores per rank: {cores})")
    return wanted
