"""SGD, its batch size, and its learning rate, which is used as given."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from common.options import free


@dataclass(frozen=True)
class OptimizerOptions:
    """Length of the training, batch size and learning rate."""

    epochs: int = 30
    """Passes over the training data [epochs]; also the length of the cosine schedule."""
    max_steps: int | None = free(None)
    """Stop after this many optimizer steps [steps]; the schedule does not change."""
    global_batch_size: int | None = free(None)
    """Samples per step over all ranks [samples].
    None: --batch-size-per-rank times the number of ranks, or the recipe's default."""
    batch_size_per_rank: int | None = free(None)
    """Samples per step on each rank [samples], in place of --global-batch-size."""
    lr: float = 0.1
    """Highest learning rate, used as given."""
    scale_lr: int | None = None
    """Linear scaling rule [samples]; it needs --warmup-epochs.
    The learning rate is --lr x global batch size / SCALE_LR."""
    warmup_epochs: float = 0.0
    """Time over which the learning rate rises linearly from 0 [epochs]."""
    lrf: float = 0.01
    """Final learning rate as a share of the highest; the schedule is a cosine."""
    momentum: float = 0.9
    """SGD momentum."""
    weight_decay: float = 5e-3
    """SGD weight decay, on every trained parameter."""

    default_batch_size: ClassVar[int] = 96
    """Global batch size where no option gives one [samples]."""

    def __post_init__(self) -> None:
        """Refuse values and combinations that cannot work."""
        if self.global_batch_size is not None and self.batch_size_per_rank is not None:
            raise ValueError("give --global-batch-size or --batch-size-per-rank, not both")
        for name, minimum in (
            ("epochs", 1),
            ("max_steps", 1),
            ("global_batch_size", 1),
            ("batch_size_per_rank", 1),
            ("scale_lr", 1),
            ("warmup_epochs", 0),
            ("momentum", 0),
            ("weight_decay", 0),
        ):
            value = getattr(self, name)
            if value is not None and not value >= minimum:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {minimum}: {value}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"--lr must be positive and finite, got {self.lr}")
        if not 0 <= self.lrf <= 1:
            raise ValueError(f"--lrf must be from 0 to 1 (a share of --lr), got {self.lrf}")
        if self.scale_lr is not None and self.warmup_epochs == 0:
            raise ValueError("--scale-lr needs a warm-up: give --warmup-epochs too")

    def total_batch_size(self, world_size: int) -> int:
        """Samples per step over all ranks."""
        if self.batch_size_per_rank is not None:
            return self.batch_size_per_rank * world_size
        return self.global_batch_size or self.default_batch_size

    def learning_rate(self, step: int, steps_per_epoch: int, global_batch_size: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0.

        Sources: linear scaling with warm-up, Goyal et al. 2017 (arXiv 1706.02677), section 2;
        cosine, Loshchilov & Hutter 2016 (arXiv 1608.03983), equation 5.
        """
        peak = self.lr * (global_batch_size / self.scale_lr if self.scale_lr else 1)
        warmup = round(self.warmup_epochs * steps_per_epoch)
        if step < warmup:
            return peak * (step + 1) / warmup
        rest = max(1, self.epochs * steps_per_epoch - 1 - warmup)
        cosine = (1 + math.cos(math.pi * min(1.0, (step - warmup) / rest))) / 2
        return peak * (self.lrf + (1 - self.lrf) * cosine)


@dataclass(frozen=True)
class SmallBatchOptions(OptimizerOptions):
    """Length of the training, batch size and learning rate."""

    default_batch_size: ClassVar[int] = 64


def make_sgd(
    parameters: Iterable[nn.Parameter], options: OptimizerOptions, *, scaled: bool = False
) -> torch.optim.SGD:
    """SGD over the parameters that are trained and are on this rank (not on `meta`).

    Args:
        parameters: of the model.
        options: see `OptimizerOptions`.
        scaled: a GradScaler scales the loss (fp16).
    """
    return torch.optim.SGD(
        [p for p in parameters if p.requires_grad and not p.is_meta],
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        # Fused SGD would keep uninitialized momenta if its first step overflows (torch 2.15).
        fused=not scaled,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
