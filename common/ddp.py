"""What DistributedDataParallel needs to give the same bits after a resume."""

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.errors import InputError
from common.seeds import rng_state, set_rng_state


def settle_buckets(
    model: DistributedDataParallel, image: Tensor, batch_size: int, autocast: torch.autocast
) -> None:
    """Run one backward pass whose result is thrown away, so that the gradient buckets are final.

    DDP lays its buckets out anew after the first backward pass, by the order in which gradients
    came. A ring all-reduce adds the ranks in an order that depends on an element's place in its
    bucket, so the first step after a resume would round otherwise than the same step of a run that
    was never interrupted (seen from three ranks on). Buffers and random generators are put back.

    Args:
        model: in train mode; its gradients are None afterwards.
        image: one sample (channels, height, width).
        batch_size: samples a batch of this rank.
        autocast: the context that training uses.

    Raises:
        InputError: a batch that the model cannot train on (BatchNorm over a single value).
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random_state = rng_state()
    try:
        with autocast:
            logits = model(image.expand(batch_size, *image.shape))
    except ValueError as error:
        raise InputError(f"{batch_size} samples a rank of {tuple(image.shape)}: {error}") from error
    logits.float().sum().backward()
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
        # The next forward pass is the one that lays them out, by what the backward has seen.
        model.reducer._rebuild_buckets()
    set_rng_state(random_state)
    if image.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(image.device)
