"""The optimizer, its batch size, and its learning rate, which is used as given."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from common import log
from common.errors import InputError
from common.option_rules import may_change, refuse_below

STEPS_PER_EPOCH = 10
"""The default batch is small enough for so many steps per epoch; a run with fewer warns."""


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

    def fit(self, samples: int, world_size: int, micro_batches: int = 1) -> tuple[Self, int]:
        """These options for a data set, and its global batch size; says where each comes from.

        An epoch leaves out the samples that fill no batch, others in each epoch. With ten steps or
        more they are less than a tenth of the data. A smaller last batch would leave out none, but
        its samples would weigh more, and most numbers of ranks would not divide it.

        Args:
            samples: of the training data.
            world_size: ranks that share a batch.
            micro_batches: equal parts into which each rank cuts its share.

        Raises:
            InputError: there are fewer samples than parts; or as `total_batch_size`.
        """
        if micro_batches > 1 and (least := world_size * micro_batches) > samples:
            raise InputError(
                f"each rank cuts its share of a batch into {micro_batches} parts (--accumulate, "
                f"--virtual-ranks or --micro-batches): that needs {least} samples, and there are "
                f"{samples}"
            )
        size = self.total_batch_size(world_size, micro_batches, samples)
        usual, default = self._default_batch(samples), self.default_batch_size
        fitted, rate = self, f"{'default' if isinstance(self.lr, Default) else '--lr'} {self.lr:g}"
        if self.batch_size_per_rank:
            source = f"--batch-size-per-rank {self.batch_size_per_rank} x {world_size}"
        elif self.global_batch_size:
            source = "--global-batch-size"
        else:
            source = f"default {default}"
            if usual < default:
                source += f", halved to {usual} for more steps per epoch"
                if isinstance(self.lr, Default) and not self.scale_lr:
                    fitted = replace(self, lr=self.lr * usual / default)
                    rate += f" x {usual} / {default}"
            if size != usual:
                source += f", the nearest multiple of {world_size * micro_batches}"
        if self.scale_lr:
            rate += f" x {size} / {self.scale_lr}"
        steps = samples // size
        log.info(
            f"batch size {size} ({source}), steps per epoch: {steps}, "
            f"learning rate {fitted.peak_lr(size):g} ({rate})"
        )
        if 0 < steps < STEPS_PER_EPOCH:
            parts = world_size * micro_batches
            smaller = max(1, min(usual, samples // STEPS_PER_EPOCH) // parts) * parts
            would = f"with --global-batch-size {smaller} there would be {samples // smaller}"
            small = f"the data set has {samples} samples only"
            log.warning(f"few steps per epoch: {would if smaller < size else small}")
        if self.warmup_epochs >= self.epochs:
            log.warning(
                f"--warmup-epochs {self.warmup_epochs:g} of --epochs {self.epochs}: the learning "
                "rate rises until the end"
            )
        return fitted, size

    def total_batch_size(
        self, world_size: int, micro_batches: int = 1, samples: float = math.inf
    ) -> int:
        """Samples per step over all ranks: as given, or near the default, in equal parts.

        The default is for a data set of so many `samples`.

        Raises:
            InputError: linear scaling of a batch of 5,000 or more, without warm-up.
        """
        size = (self.batch_size_per_rank or 0) * world_size or self.global_batch_size
        if not size:
            parts = world_size * micro_batches
            size = max(1, round(self._default_batch(samples) / parts)) * parts
        if self.scale_lr and not self.warmup_epochs:
            if size >= 5000:
                raise InputError(f"--scale-lr for a global batch of {size} needs --warmup-epochs")
            rate = f"{self.peak_lr(size):g}"
            log.warning(f"--scale-lr without --warmup-epochs: training begins with --lr {rate}")
        return size

    def _default_batch(self, samples: float) -> int:
        """The default batch size, halved until an epoch has ten steps.

        Below 8 only if there are fewer samples than that.
        """
        size = self.default_batch_size
        while size > samples > 0 or (size >= 16 and samples // size < STEPS_PER_EPOCH):
            size //= 2
        return size

    def peak_lr(self, global_batch_size: int) -> float:
        """The highest learning rate, by linear scaling if the options ask for it."""
        return self.lr * (global_batch_size / self.scale_lr if self.scale_lr else 1)

    def learning_rate(self, step: int, steps_per_epoch: int, global_batch_size: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0.

        Sources: linear scaling with warm-up, Goyal et al. 2017 (arXiv 1706.02677), section 2;
        cosine, Loshchilov & Hutter 2016 (arXiv 1608.03983), equation 5.
        """
        peak = self.peak_lr(global_batch_size)
        warmup = round(self.warmup_epochs * steps_per_epoch)
        if step < warmup:
            return peak * (step + 1) / warmup
        if self.lr_schedule == "constant":
            return peak
        done, rest = step - warmup, max(1, self.epochs * steps_per_epoch - 1 - warmup)
        if self.lr_schedule == "cosine-by-epoch":  # the last epoch does not reach the final rate
            done, rest = step // steps_per_epoch * steps_per_epoch - warmup, rest + 1
        cosine = (1 + math.cos(math.pi * min(1.0, max(0, done) / rest))) / 2
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
    common: Any = {"lr": options.lr, "weight_decay": options.weight_decay, "fused": fused}
    if options.optimizer == "adamw":
        if options.lr > 0.01:
            log.warning(f"--lr {options.lr:g} is high for adamw: 0.001 or less is usual")
        return torch.optim.AdamW(trained, betas=(options.momentum, 0.999), **common)
    return torch.optim.SGD(trained, momentum=options.momentum, **common)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
