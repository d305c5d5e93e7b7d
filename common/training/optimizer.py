"""SGD; batch size, learning rate and its schedule, as given and never multiplied in secret."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from common.options import free


@dataclass(frozen=True)
class OptimizerOptions:
    """How long, with which batch and which steps."""

    epochs: int = 30
    """Passes over the training data [epochs]; also the length of the cosine schedule."""
    max_steps: int | None = free(None)
    """Stop after this many optimizer steps in all [steps], with the schedule left as it is."""
    global_batch_size: int | None = free(None)
    """Samples per step over all ranks [samples]. None: --batch-size-per-rank times the number of
    ranks, or else the recipe's own number."""
    batch_size_per_rank: int | None = free(None)
    """Samples per step on each rank [samples]: the other way to give the batch size."""
    lr: float = 0.1
    """Highest learning rate, used as given."""
    scale_lr: int | None = None
    """Linear scaling rule: the rate is lr x global batch size / SCALE_LR [samples]. It needs
    --warmup-epochs."""
    warmup_epochs: float = 0.0
    """Raise the learning rate linearly from 0 over this long [epochs]."""
    lrf: float = 0.01
    """Final learning rate as a share of the highest, reached by a cosine."""
    momentum: float = 0.9
    """SGD momentum."""
    weight_decay: float = 5e-3
    """SGD weight decay, on every trained parameter."""

    default_batch_size: ClassVar[int] = 96
    """Where neither is given [samples]; no option."""

    def __post_init__(self) -> None:
        """Refuse combinations that mean nothing."""
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
            raise ValueError(f"--lrf is a share of lr, 0 to 1, got {self.lrf}")
        if self.scale_lr is not None and self.warmup_epochs == 0:
            raise ValueError("--scale-lr reaches its rate by warm-up: give --warmup-epochs too")

    def total_batch_size(self, world_size: int) -> int:
        """Samples per step over all ranks."""
        if self.batch_size_per_rank is not None:
            return self.batch_size_per_rank * world_size
        return self.global_batch_size or self.default_batch_size

    def learning_rate(self, step: int, steps_per_epoch: int, global_batch_size: int) -> float:
        """The rate that optimizer step `step` (from 0) uses: a pure function, so nothing to resume.

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


def make_sgd(
    parameters: Iterable[nn.Parameter], options: OptimizerOptions, *, scaled: bool = False
) -> torch.optim.SGD:
    """SGD with momentum over the parameters that are trained and are on this rank.

    Args:
        parameters: of the model; frozen ones are left out, and those of other ranks' stages (meta).
        options: learning rate, momentum and weight decay; `set_lr` follows the schedule.
        scaled: the loss is scaled (fp16). A first step that overflows would leave fused SGD momenta
            of memory that nobody wrote (torch 2.15), so it is not fused then.
    """
    return torch.optim.SGD(
        [p for p in parameters if p.requires_grad and not p.is_meta],
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        fused=not scaled,  # one pass over parameters, gradients and momenta
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Let the next step of `optimizer` use `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr
