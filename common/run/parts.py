"""The loaders and the model of a run; what `auto` became is recorded in its config.json."""

from dataclasses import replace

import torch
from torch import nn

from common import log
from common.data.batches import DeviceBatches
from common.data.datasets import Data, LoaderOptions
from common.data.loaders import rank_loaders
from common.run.folder import Run
from common.run.plan import Plan
from common.seeds import choose_precision
from common.training.models import ModelOptions, move, prepare_model


def make_loaders(
    run: Run,
    options: LoaderOptions,
    data: Data,
    plan: Plan,
    *,
    share: int | None = None,
    device: torch.device | None = None,
) -> tuple[DeviceBatches, DeviceBatches]:
    """This rank's training batches and its validation batches. Calls collectives.

    Args:
        run: its seed decides the order of the samples.
        options: how the data are loaded.
        data: what is loaded.
        plan: says how each batch is shared.
        share: number of this rank's share of each batch. None: its rank.
        device: where the batches come. None: the run's first device.

    Raises:
        InputError: as `rank_loaders`.
    """
    share = run.ranks.rank if share is None else share
    device = device or run.device
    seed, folder = run.options.seed, run.folder
    loaders = rank_loaders(data, options, plan.sizes, seed, share, device, run.dtype, folder)
    loaders[0].on_batch = run.clock.end_load
    run.resolve(num_workers=loaders[0].loader.num_workers)
    return loaders


def make_model(run: Run, options: ModelOptions, data: Data, *, download: bool) -> nn.Module:
    """The model for the data, with the weights to begin with, on the run's first device.

    Raises:
        InputError: as `prepare_model`.
    """
    if options.model == "auto" and data.side:
        options = options.for_images(data.side)
        if options.model != "convnet":
            log.info(f"model {options.model} (--model), for images of {data.side} px")
    bf16 = choose_precision(run.options.precision, run.device) == "bf16"
    if bf16 and run.options.precision == "auto" and options.model.startswith("resnet"):
        options = replace(options, channels_last=True)
    model = prepare_model(options, *data.sizes_for_model, run.dtype, download=download)
    found = {**options.resolved(data.side), "model": options.model}
    run.resolve(**found, channels_last=options.channels_last)
    return move(model, run.device, run.dtype)
