"""The options of a training's length, batch size and learning rate; the optimizer."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from common import log
from common.option_rules import may_change, refuse_below


class Default(float):
    """A number that the user did not give, so it may be fitted to the data."""


@dataclass(frozen=True)
class ScheduleOptions:
    """Length of the training, batch size and learning rate."""

    epochs: int = 30
    """Passes over the training data [epochs]; also the length of the cosine schedule."""
    max_steps: int | None = may_change(None)
    """Stop after this many optimizer steps [steps]; the schedule does not change."""
    global_batch_size: int | None = may_change(None)
    """Samples per step over all ranks [samples].
    None: --batch-size-per-rank times the number of ranks, or 96 (fsdp: 32; dp_scratch and
    checkpoint_rnn: 64), or the nearest number that the ranks can share. That is halved, and the
    default --lr with it, until an epoch of a small data set has 10 steps."""
    batch_size_per_rank: int | None = may_change(None)
    """Samples per step on each rank [samples], in place of --global-batch-size."""
    lr: float = Default(0.1)
    """Highest learning rate, used as given."""
    scale_lr: int | None = None
    """Linear scaling rule [samples]: the learning rate is --lr x global batch size / SCALE_LR.
    A global batch of 5,000 or more needs --warmup-epochs with it."""
    warmup_epochs: float = 0.0
    """Time over which the learning rate rises linearly from 0 [epochs]."""
    lr_schedule: Literal["cosine", "cosine-by-epoch", "constant"] = "cosine"
    """Learning rate after the warm-up. cosine: falls at every step; cosine-by-epoch: after each
    epoch, as in many tutorials; constant: stays."""
    lrf: float = 0.01
    """Final learning rate as a share of the highest, for a cosine schedule."""

    default_batch_size: ClassVar[int] = 64
    """Global batch size if no option gives one [samples]."""

    def __post_init__(self) -> None:
        if self.global_batch_size is not None and self.batch_size_per_rank is not None:
            raise ValueError("give --global-batch-size or --batch-size-per-rank, not both")
        refuse_below(self, epochs=1, max_steps=1, global_batch_size=1, batch_size_per_rank=1)
        refuse_below(self, scale_lr=1, warmup_epochs=0)
        if self.warmup_epochs > 1e6:
            raise ValueError(f"--warmup-epochs must be at most 1e6, got {self.warmup_epochs}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"--lr must be positive and finite, got {self.lr}")
        if not 0 <= self.lrf <= 1:
            raise ValueError(f"--lrf must be from 0 to 1 (a share of --lr), got {self.lrf}")


@dataclass(frozen=True)
class OptimizerOptions(ScheduleOptions):
    """Optimizer, length of the training, batch size and learning rate."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimizer; adamw needs a much lower --lr, such as 0.001."""
    momentum: float = 0.9
    """SGD momentum; AdamW's beta1."""
    weight_decay: float = 5e-3
    """Weight decay, on every trained parameter."""
    clip_grad_norm: float | None = None
    """Largest norm of all gradients together; larger gradients are scaled down to it.
    None: they are used as they are."""

    default_batch_size: ClassVar[int] = 96

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_below(self, momentum=0, weight_decay=0)
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ValueError(f"--clip-grad-norm must be positive, got {self.clip_grad_norm}")
        if self.optimizer == "adamw" and self.momentum >= 1:
            raise ValueError(f"--momentum must be below 1 for adamw, got {self.momentum}")


def make_optimizer(
    parameters: Iterable[nn.Parameter], options: OptimizerOptions, *, scaled: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of the parameters that are trained and are on this rank (not on `meta`).

    Args:
        parameters: of the model.
        options: see `OptimizerOptions`.
        scaled: a GradScaler scales the loss (fp16).
    """
    trained = [p for p in parameters if p.requires_grad and not p.is_meta]
    # A fused optimizer would keep uninitialized momenta if its first step overflows, and it refuses
    # complex parameters (torch 2.15).
    fused = not scaled and not any(p.is_complex() for p in trained)
    # A snapshot holds plain numbers, and not a `Default`.
    common: Any = {"lr": float(options.lr), "weight_decay": options.weight_decay, "fused": fused}
    if options.optimizer == "adamw":
        if options.lr > 0.01:
            log.warning(f"--lr {options.lr:g} is high for adamw: 0.001 or less is usual")
        return torch.optim.AdamW(trained, betas=(options.momentum, 0.999), **common)
    optimizer = torch.optim.SGD(trained, momentum=options.momentum, **common)
    if fused and options.momentum:
        # The same as torch's first step makes; but the fused one refuses a parameter whose first
        # gradient comes in a later step than the others' (torch 2.15).
        for parameter in trained:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
