"""The loaders and the model of a run; what `auto` became is recorded in its config.json."""

import torch
from torch import nn

from common.data.batches import DeviceBatches
from common.data.datasets import Data, LoaderOptions
from common.data.loaders import rank_loaders
from common.data.stream import GlobalBatches
from common.run.folder import Run
from common.training.models import ModelOptions, move, prepare_model


def make_loaders(
    run: Run,
    options: LoaderOptions,
    data: Data,
    batch_size: int,
    dtype: torch.dtype,
    *,
    share: tuple[int, int] | None = None,
    shards: int = 0,
    device: torch.device | None = None,
) -> tuple[GlobalBatches, DeviceBatches, DeviceBatches]:
    """This rank's keys of the training data, its training batches and its validation batches.

    Calls collectives.

    Args:
        run: its seed decides the order of the samples.
        options: how the data are loaded.
        data: what is loaded.
        batch_size: of all ranks together.
        dtype: of the batches' floating-point numbers.
        share: number of this rank's share of each batch, and of shares. None: one per rank.
        shards: virtual ranks, which may be divided unevenly between the shares; 0: none.
        device: where the batches come. None: the run's first device.

    Raises:
        InputError: as `rank_loaders`.
    """
    share = share or run.ranks.share
    device = device or run.devices[0]
    seed, folder = run.options.seed, run.folder
    loaders = rank_loaders(data, options, batch_size, seed, share, device, dtype, folder, shards)
    loaders[1].on_batch = run.clock.end_load
    run.resolve(num_workers=loaders[1].loader.num_workers)
    return loaders


def make_model(
    run: Run, options: ModelOptions, data: Data, dtype: torch.dtype, *, download: bool
) -> nn.Module:
    """The model for the data, with the weights to begin with, on the run's first device.

    Raises:
        InputError: as `prepare_model`.
    """
    model = prepare_model(options, *data.sizes_for_model, dtype, download=download)
    run.resolve(**options.resolved(data.side))
    return move(model, run.devices[0], dtype)
