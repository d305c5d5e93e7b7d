"""From a data set to this rank's batches, loaded by as many processes as are worth it."""

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

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
    cores_per_rank,
    default_num_workers,
    most_workers,
    recommend,
    samples_per_s,
    sweep,
)
from common.errors import InputError
from common.files import write_json
from common.group.collectives import agreed, broadcast, gather
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
    """This rank's keys of the training data, its training batches and its validation batches.

    The batches come on `device`, their images as `dtype`. Calls collectives.

    Args:
        folder: the run's; `--num-workers auto` keeps there what it measured.

    Raises:
        InputError: world_size does not divide the batch, the batch is larger than the data, or
            /dev/shm is too small for the loading processes that the user asked for.
    """
    rank, world_size = ranks.rank, ranks.world_size
    batches = GlobalBatches(len(data.train), global_batch_size, seed, rank, world_size)
    held_out = fixed_batches(len(data.val), eval_batch_size(len(data.val)), rank, world_size)
    load = partial(make_loader, pin_memory=options.pin_memory and device.type == "cuda")
    largest = max([batches.batch_size_per_rank, *map(len, held_out)])
    workers = _num_workers(options, data.train, largest, device)
    if options.num_workers == "auto":
        epoch = list(batches)
        enough = epoch * -(-100 // len(epoch))  # a small data set several times over
        workers = _fastest(partial(load, data.train, enough), workers, device, folder)
    loader, val_loader = (
        DeviceBatches(load(samples, keys, num_workers=workers), device, dtype, data.mean, data.std)
        for samples, keys in ((data.train, batches), (data.val, held_out))
    )
    return batches, loader, val_loader


def _num_workers(options: DataOptions, samples: Samples, largest: int, device: torch.device) -> int:
    """Loading processes per rank, the same number on every rank; for "auto" the most to try.

    Args:
        largest: size of the largest batch, which decides what fits into /dev/shm [samples].

    Raises:
        InputError: /dev/shm is too small for the number that the user gave.
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
    if asked is None:
        log.info(f"--num-workers {min(most, wanted)} (CPU cores per rank: {cores})")
    return min(most, wanted)


def _fastest(
    load: Callable[..., DataLoader[Any]], most: int, device: torch.device, folder: Path
) -> int:
    """The recommended number of loading processes, measured on all ranks at the same time.

    The answer is kept in loader.json in `folder`, and a resumed run reads it there.

    Args:
        load: makes the DataLoader to measure; takes `num_workers`.
        most: the largest number to try, the same on every rank.
        device: this rank's.
        folder: the run's.
    """

    def measure(number: int) -> float:
        own = samples_per_s(partial(load, num_workers=number), device, limit_s=1.0)
        return min(gather(own))  # training waits for the slowest rank

    file = folder / "loader.json"
    known: Any = broadcast(json.loads(file.read_text()) if file.is_file() else None)
    if known is None:
        speeds = sweep(measure, most, most)
        chosen, why = recommend(speeds)
        known = {"num_workers": chosen, "why": why, "samples_per_s_a_rank": speeds}
        if dist.get_rank() == 0:
            write_json(file, known)
            log.info(f"--num-workers auto: {chosen} ({why})")
    return min(most, int(known["num_workers"]))  # the run may resume on a smaller host
