"""From a data set to this rank's batches, loaded by as many processes as are worth it."""

from functools import partial
from pathlib import Path

import torch

from common import log
from common.data.batches import DeviceBatches
from common.data.datasets import Data, LoaderOptions
from common.data.stream import GlobalBatches, eval_batch_size, fixed_batches, make_loader
from common.data.workers import choose_num_workers, fastest_num_workers
from common.launch.ranks import Ranks


def make_loaders(
    data: Data,
    options: LoaderOptions,
    global_batch_size: int,
    seed: int,
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype,
    folder: Path,
) -> tuple[GlobalBatches, DeviceBatches, DeviceBatches]:
    """This rank's keys of the training data, its training batches and its validation batches.

    The batches come on `device`, floating-point numbers as `dtype`. Calls collectives.

    Args:
        folder: the run's; `--num-workers auto` keeps there what it measured.

    Raises:
        InputError: world_size does not divide the batch, the batch is larger than the data, or
            /dev/shm is too small for the loading processes that the user asked for.
    """
    rank, world_size = ranks.rank, ranks.world_size
    batches = GlobalBatches(len(data.train), global_batch_size, seed, rank, world_size)
    held_out = fixed_batches(len(data.val), eval_batch_size(len(data.val)), rank, world_size)
    if not options.pin_memory and device.type == "cpu":
        log.warning("--no-pin-memory has no effect on a CPU")
    load = partial(make_loader, pin_memory=options.pin_memory and device.type == "cuda")
    largest = max([batches.batch_size_per_rank, *map(len, held_out)])
    workers = choose_num_workers(options, data.train, largest, device)
    if options.num_workers == "auto":
        epoch = list(batches)
        enough = epoch * -(-100 // len(epoch))  # a small data set several times over
        workers = fastest_num_workers(partial(load, data.train, enough), workers, device, folder)
    loader, val_loader = (
        DeviceBatches(load(samples, keys, num_workers=workers), device, dtype, data.mean, data.std)
        for samples, keys in ((data.train, batches), (data.val, held_out))
    )
    return batches, loader, val_loader
