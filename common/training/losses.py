"""What each sample weighs in the loss; and does each sample have its own loss?"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from common import log
from common.errors import InputError, TrainingError

_PAGE = "docs/bring-your-own.md, The loss"


@dataclass(frozen=True)
class LossOptions:
    """The loss of training; evaluation always takes the plain cross-entropy."""

    class_weights: Literal["balanced"] | None = None
    """Weight of a sample's loss, by its class. balanced: rare classes weigh more, in proportion to
    1 / their samples; the mean over all samples is 1. train_loss is the weighted one."""
    label_smoothing: float | None = None
    """Share of each label that is spread over all classes, as torch's cross_entropy does it."""

    def __post_init__(self) -> None:
        if self.label_smoothing is not None and not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"--label-smoothing must be from 0 to below 1, got {self.label_smoothing}"
            )


def cross_entropy_of_samples(options: LossOptions, data: Any) -> nn.CrossEntropyLoss:
    """The loss of each sample, from logits (samples, classes) and labels (samples,).

    Divide its sum by the number of samples, not by the sum of their weights, as torch's mean does:
    that sum is another in each micro-batch and on each rank.

    Args:
        options: weights of the classes, and label smoothing.
        data: `common.data.datasets.Data`; weights need its `labels`.

    Raises:
        InputError: the data has no labels, or a class without training samples.
    """
    weights = _balanced(data) if options.class_weights else None
    smoothing = options.label_smoothing or 0.0
    return nn.CrossEntropyLoss(weights, reduction="none", label_smoothing=smoothing)


def _balanced(data: Any) -> Tensor:
    """Weights of the classes (classes,), as scikit-learn's `compute_class_weight("balanced")`."""
    labels, names = np.asarray(data.labels), data.class_names
    if len(labels) != len(data.train):
        raise InputError(
            f"--class-weights needs Data(labels=...), the class of each of {len(data.train)} "
            f"training samples: got {len(labels)}"
        )
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= len(names):
        raise InputError(
            f"--class-weights: Data.labels must be whole numbers from 0 to {len(names) - 1}, the "
            "places in Data.class_names"
        )
    counts = np.bincount(labels, minlength=len(names))
    if not counts.all():
        raise InputError(f"--class-weights: no training sample of class {names[counts.argmin()]}")
    weights = counts.sum() / (len(counts) * counts)
    shown = [
        f"{names[n]} {weights[n]:.3g} ({counts[n]} samples)"
        for n in np.argsort(counts, kind="stable")  # the rarest class first
    ]
    shown = shown if len(shown) <= 10 else [*shown[:5], "...", *shown[-5:]]
    log.info(f"class weights: {', '.join(shown)}")
    return torch.from_numpy(weights)


def refuse_other_losses(losses: Tensor, batch_size: int, *, even: bool = True) -> None:
    """Raise TrainingError unless there is one loss per sample of a rank's batch, or their mean.

    Args:
        losses: (samples,) or (samples, 1); or their mean, of no dimension.
        batch_size: samples of the rank's batch.
        even: whether all ranks have as many.
    """
    if not isinstance(losses, Tensor):
        raise TrainingError(
            f"loop.after_step got {type(losses).__name__}: give it a tensor with one loss per "
            f"sample, or their mean ({_PAGE})"
        )
    if losses.dim() == 0 and not even:
        raise TrainingError(
            "the loop got the mean of a rank's losses, but with --virtual-ranks the ranks have "
            "unequal numbers of samples: give it one loss per sample, and divide their sum by "
            f"plan.loss_divisor ({_PAGE})"
        )
    if losses.dim() == 0 or losses.numel() == batch_size == 1:
        return
    if not len(losses) == losses.numel() == batch_size:
        raise TrainingError(
            f"the loop got losses of shape {tuple(losses.shape)} for {batch_size} samples: give "
            "reduction='none' to the loss function, then take the mean over each sample; weights "
            f"must have the shape ({batch_size},) ({_PAGE})"
        )


def warn_of_means(losses: Tensor) -> None:
    """Warn if each loss of a rank's first batch holds a mean over the batch."""
    if losses.numel() > 1 and (name := _mean_over_samples(losses)):
        log.warning(
            f"each sample's loss holds a mean or a sum over the batch ({name}): weights of single "
            f"samples have no effect on it; give reduction='none' to the loss function ({_PAGE})"
        )


def _mean_over_samples(losses: Tensor) -> str:
    """Name of the operation that made one number of the whole batch; empty if there is none."""
    seen, todo = set(), [losses.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name, sizes = node.name(), getattr(node, "_saved_self_sym_sizes", ())
        # A loss function keeps its reduction: 0 none, 1 mean, 2 sum. L1 takes a plain mean.
        if getattr(node, "_saved_reduction", 0):
            return name
        if name == "MeanBackward0" and sizes[:1] == losses.shape[:1]:
            return name
        todo += [before for before, _ in node.next_functions]
    return ""
