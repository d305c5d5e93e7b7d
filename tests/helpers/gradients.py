"""Gradients by name, and how far two of them are apart."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")


def largest_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).detach().abs().max()) for name in a)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def relative_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Of the parameter whose gradient differs most, as a share of its norm."""
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)
