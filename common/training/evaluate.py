"""Exact evaluation: every validation sample counted once, whatever the number of ranks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Evaluation:
    """What a model does on the whole validation set; the same object on every rank."""

    loss: float
    """Mean cross-entropy over the samples."""
    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """Share of the samples whose highest logit is their class."""
        return self.correct / self.total


@torch.no_grad()
def evaluate(
    model: Callable[[Tensor], Tensor | None],
    batches: Iterable[tuple[Tensor, Tensor]],
    total: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> Evaluation:
    """Evaluate the unwrapped `model` on batches dealt out by `common.data.stream.fixed_batches`.

    No sample is padded in, so ranks may see different numbers of batches, and one call of a DDP
    wrapper would wait for its peers: pass `ddp.module`. Buffers (BatchNorm's running statistics)
    differ by rank in training and are first set to rank 0's, which are the ones that are saved.
    Each batch's loss is added in the order of batches, so that the sum has the same bits at any
    world size too.

    Args:
        model: returns logits (samples, classes); None on a rank that holds a pipeline's earlier
            stage and so has no share in the result.
        batches: this rank's (images, labels), as the model takes them.
        total: samples over all ranks, checked.
        device: of the logits.
        group: the ranks that hold copies of this model, among which the batches were dealt out.
            None: all of them.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    for module in modules:
        for buffer in module.buffers(recurse=False):
            dist.broadcast(buffer, group=group, group_src=0)
    was_training = [module for module in modules if module.training]
    for module in modules:
        module.training = False
    rows = []  # a row per batch of this rank
    for images, labels in batches:
        logits = model(images)
        if logits is None:
            continue
        labels = labels.to(device)
        loss = nn.functional.cross_entropy(logits.double(), labels, reduction="sum")
        correct = (logits.argmax(1) == labels).sum().double()
        rows.append(torch.stack([loss, correct, torch.tensor(len(labels), device=device)]))
    for module in was_training:
        module.training = True
    most = torch.tensor(len(rows))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    results = torch.zeros(int(most) * world_size, 3, dtype=torch.float64)  # in the order of batches
    if rows:
        results[rank::world_size][: len(rows)] = torch.stack(rows).cpu()
    dist.all_reduce(results)  # each row is one rank's: adding the others' zeros is exact
    results = results[results[:, 2] > 0]  # rows that no rank filled would change the order of sums
    loss_sum, correct_sum, seen = (float(column.sum()) for column in results.T)
    assert seen == total, f"evaluated {seen:.0f} of {total} samples"
    return Evaluation(loss_sum / total, int(correct_sum), total)
