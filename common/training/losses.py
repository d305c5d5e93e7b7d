"""Does each sample have its own loss? Shapes show most of what is wrong in silence."""

from torch import Tensor

from common import log
from common.errors import TrainingError

_PAGE = "docs/bring-your-own.md, The loss"


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
