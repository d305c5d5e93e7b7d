"""What each sample weighs in the loss; and what was the loss computed from?"""

import math
from collections.abc import Collection, Iterator, Sequence
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
            "reduction='none' to the loss function, then take the mean over each sample; give "
            f"those of all micro-batches; weights must have the shape ({batch_size},) ({_PAGE})"
        )


def warn_of_scale(backward: Sequence[Tensor], losses: Tensor, divisor: int) -> None:
    """Warn if a rank's first step began its backward passes from a multiple of its losses.

    Nothing is said where a penalty is added to the loss, which makes no whole multiple.

    Args:
        backward: the losses that were scaled for backward().
        losses: of the batch's samples (samples,).
        divisor: of their sum.
    """
    if not backward or not losses.dim():
        return
    ratio = float(sum(loss.double().sum() for loss in backward) / losses.double().sum()) * divisor
    times = max(ratio, 1 / ratio) if math.isfinite(ratio) and ratio > 0 else 1.0
    if round(times) > 1 and math.isclose(times, round(times), rel_tol=1e-3):
        log.warning(
            f"the backward passes of the first step began from {ratio:.4g} times the batch's loss: "
            "divide the sum of each micro-batch's losses by plan.loss_divisor, and call backward() "
            f"once for it ({_PAGE})"
        )


def warn_of_graph(losses: Tensor, held: Collection[Tensor] | None = None) -> None:
    """Warn of what the losses of a rank's first batch were computed from and should not be.

    That is a mean over the batch, a softmax where the loss takes one itself, or a parameter that no
    optimizer holds, such as that of a layer in a plain list. In a compiled model only the last is
    seen.

    Args:
        losses: (samples,), or their mean, with the graph of their backward pass.
        held: what the optimizers hold. None: unknown.
    """
    nodes = [*_graph(losses)]
    if losses.numel() > 1 and (name := next(filter(None, (_mean(n, losses) for n in nodes)), "")):
        log.warning(
            f"each sample's loss holds a mean or a sum over the batch ({name}): weights of single "
            f"samples have no effect on it; give reduction='none' to the loss function ({_PAGE})"
        )
    for twice in (("LogSoftmax", "Softmax"), ("BinaryCrossEntropyWithLogits", "Sigmoid")):
        if any(_follow(node, *twice) for node in nodes):
            log.warning(
                f"the loss function takes the model's outputs before the {twice[1].lower()}, which "
                "it computes itself: leave that out of the model"
            )
    leaves = (getattr(node, "variable", None) for node in nodes)
    if others := [v for v in leaves if isinstance(v, nn.Parameter) and v not in (held or {v})]:
        log.warning(
            f"the loss depends on {len(others)} parameters that no optimizer holds, one of shape "
            f"{tuple(others[0].shape)}: register them in the model (a layer in a list needs "
            "nn.ModuleList) and train them, or call requires_grad_(False)"
        )


def _graph(losses: Tensor) -> Iterator[Any]:
    """The operations that the losses depend on; the last ones first."""
    seen, todo = set(), [losses.grad_fn]
    while todo:
        if (node := todo.pop()) is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
            yield node


def _mean(node: Any, losses: Tensor) -> str:
    """The operation's name, if it made one number of the whole batch; else empty."""
    sizes, name = getattr(node, "_saved_self_sym_sizes", ()), str(node.name())
    # A loss function keeps its reduction: 0 none, 1 mean, 2 sum. L1 takes a plain mean.
    of_batch = name == "MeanBackward0" and sizes[:1] == losses.shape[:1]
    return name if getattr(node, "_saved_reduction", 0) or of_batch else ""


def _follow(node: Any, second: str, first: str) -> bool:
    before = node.next_functions[0][0] if node.next_functions else None
    names = (node.name(), before.name()) if before else ()
    return names == (f"{second}Backward0", f"{first}Backward0")
