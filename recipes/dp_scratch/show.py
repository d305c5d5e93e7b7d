"""The two steps of data parallelism on numbers that one can add up by hand (`--show`)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common import log


def show_steps(
    devices: Sequence[torch.device],
    scatter: Callable[[Tensor, Sequence[torch.device]], list[Tensor]],
    all_reduce: Callable[[Sequence[Tensor]], None],
) -> None:
    """Log what each device holds before and after a scatter and an all-reduce.

    A sample is a row of two numbers. A device's gradient is the sum of its rows here, as if the
    loss were the sum over the samples of the product of the parameters and the sample.

    Args:
        devices: at least one.
        scatter: the recipe's.
        all_reduce: the recipe's.
    """

    def say(when: str, held: Sequence[Tensor | None]) -> None:
        log.info(f"{when}:")
        for number, tensor in enumerate(held):
            values = "nothing" if tensor is None else tensor.tolist()
            log.info(f"  device {number} ({devices[number]}): {values}")

    batch = torch.arange(2.0 * (2 * len(devices) + 1), device=devices[0]).view(-1, 2)
    say(f"before the scatter of {len(batch)} samples", [batch] + [None] * (len(devices) - 1))
    parts = scatter(batch, devices)
    say("after the scatter", parts)
    gradients = [part.sum(0) for part in parts]
    say("before the all-reduce: each device's gradient", gradients)
    all_reduce(gradients)
    say("after the all-reduce", gradients)
    log.info(f"the gradient of the whole batch on one device: {batch.sum(0).tolist()}")
