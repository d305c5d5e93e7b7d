"""The optimizer, its batch size, and its learning rate, which is used as given."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from common import log
from common.errors import InputError
from common.options import free, refuse_below


@dataclass(frozen=True)
class ScheduleOptions:
    """Length of the training, batch size and learning rate."""

    epochs: int = 30
    """Passes over the training data [epochs]; also the length of the cosine schedule."""
    max_steps: int | None = free(None)
    """Stop after this many optimizer steps [steps]; the schedule does not change."""
    global_batch_size: int | None = free(None)
    """Samples per step over all ranks [samples].
    None: --batch-size-per-rank times the number of ranks, or near the recipe's default."""
    batch_size_per_rank: int | None = free(None)
    """Samples per step on each rank [samples], in place of --global-batch-size."""
    lr: float = 0.1
    """Highest learning rate, used as given."""
    scale_lr: int | None = None
    """Linear scaling rule [samples]: the learning rate is --lr x global batch size / SCALE_LR.
    A global batch of 5,000 or more needs --warmup-epochs with it."""
    warmup_epochs: float = 0.0
    """Time over which the learning rate rises linearly from 0 [epochs]."""
    lrf: float = 0.01
    """Final learning rate as a share of the highest; the schedule is a cosine."""

    default_batch_size: ClassVar[int] = 64
    """Global batch size if no option gives one [samples]."""

    def __post_init__(self) -> None:
        """Refuse values and combinations that cannot work."""
        if self.global_batch_size is not None and self.batch_size_per_rank is not None:
            raise ValueError("give --global-batch-size or --batch-size-per-rank, not both")
        refuse_below(self, epochs=1, max_steps=1, global_batch_size=1, batch_size_per_rank=1)
        refuse_below(self, scale_lr=1, warmup_epochs=0)
        if not 0 < self.lr < math.inf:
            raise ValueError(f"--lr must be positive and finite, got {self.lr}")
        if not 0 <= self.lrf <= 1:
            raise ValueError(f"--lrf must be from 0 to 1 (a share of --lr), got {self.lrf}")

    def total_batch_size(self, world_size: int, micro_batches: int = 1) -> int:
        """Samples per step over all ranks: as given, or near the default, in equal parts.

        Raises:
            InputError: linear scaling of a batch of 5,000 or more, without warm-up.
        """
        parts, default = world_size * micro_batches, self.default_batch_size
        size = (self.batch_size_per_rank or 0) * world_size or self.global_batch_size
        if size is None:
            size = max(1, round(default / parts)) * parts
            if size != default:
                near = f"the multiple of {parts} nearest to the default of {default}"
                log.info(f"--global-batch-size {size}: {near}")
        if self.scale_lr and not self.warmup_epochs:
            if size >= 5000:
                raise InputError(f"--scale-lr for a global batch of {size} needs --warmup-epochs")
            rate = f"{self.learning_rate(0, 1, size):g}"
            log.warning(f"--scale-lr without --warmup-epochs: training begins with --lr {rate}")
        return size

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
        """Refuse values and combinations that cannot work."""
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
    # A fused optimizer would keep uninitialized momenta if its first step overflows (torch 2.15).
    common: Any = {"lr": options.lr, "weight_decay": options.weight_decay, "fused": not scaled}
    if options.optimizer == "adamw":
        if options.lr > 0.01:
            log.warning(f"--lr {options.lr:g} is high for adamw: 0.001 or less is usual")
        return torch.optim.AdamW(trained, betas=(options.momentum, 0.999), **common)
    return torch.optim.SGD(trained, momentum=options.momentum, **common)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
