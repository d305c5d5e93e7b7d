"""One flipped bit in what a rank holds or computes."""

from typing import Any

import torch
from torch import Tensor

BIT = 20
"""Of 32; in fp32 it changes a number by 6 to 12 %."""


def flip(tensor: Tensor, bit: int = BIT) -> None:
    """Flip a bit of the first element, in place."""
    size = tensor.element_size()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    first = tensor.detach().view(integers).view(-1)[:1]
    first.bitwise_xor_(torch.ones_like(first) << bit)


def plant(loop: Any, where: str) -> None:
    """Flip a bit between two steps of this rank.

    `where`: "weight", "momentum", "buffer", or "gradient": that of the next step, before it is
    sent.
    """
    model, optimizer = loop.state.parts["model"], loop.state.parts["optimizer"]
    weight = next(model.parameters())
    if where == "weight":
        flip(weight)
    elif where == "momentum":
        flip(optimizer.state[weight]["momentum_buffer"])
    elif where == "buffer":
        flip(next(model.buffers()))
    elif where == "gradient":

        def once(gradient: Tensor) -> Tensor:
            handle.remove()
            wrong = gradient.clone()
            flip(wrong)
            return wrong

        handle = weight.register_hook(once)
    else:
        raise ValueError(where)
