"""Exact evaluation: every validation sample counted once, on any number of ranks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Evaluation:
    """A model's result on the whole validation set; the same object on every rank."""

    loss: float
    """Mean cross-entropy over the samples."""
    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """Share of correct samples."""
        return self.correct / self.total


@torch.no_grad()
def evaluate(
    model: Callable[[Tensor], Tensor | None],
    batches: Iterable[tuple[Tensor, Tensor]],
    total: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> Evaluation:
    """Evaluate `model` on the batches that `common.data.stream.fixed_batches` gave to each rank.

    Pass the model inside DDP: ranks may have different numbers of batches, and DDP's own forward
    would wait for the other ranks. In training, buffers such as BatchNorm's statistics differ by
    rank; here every rank takes those of rank 0, which are the ones that are saved.

    Args:
        model: returns logits (samples, classes), or None on a rank whose pipeline stage has none.
        batches: this rank's (images, labels).
        total: samples over all ranks, for a check.
        device: of the logits.
        group: the ranks that share the batches. None: all ranks.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    trained: list[nn.Module] = []
    if isinstance(model, nn.Module):
        for buffer in model.buffers():
            dist.broadcast(buffer, group=group, group_src=0)
        trained = [module for module in model.modules() if module.training]
        model.eval()
    rows = []  # (loss, correct, samples) of each batch
    for images, labels in batches:
        logits = model(images)
        if logits is None:
            continue
        labels = labels.to(device)
        loss = nn.functional.cross_entropy(logits.double(), labels, reduction="sum")
        correct = (logits.argmax(1) == labels).sum().double()
        rows.append(torch.stack([loss, correct, torch.tensor(len(labels), device=device)]))
    for module in trained:
        module.training = True
    # Sums in the order of the batches have the same bits at any world size. Each row is filled by
    # one rank, so adding the zeros of the other ranks is exact.
    most = torch.tensor(len(rows))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    results = torch.zeros(int(most) * world_size, 3, dtype=torch.float64)
    if rows:
        results[rank::world_size][: len(rows)] = torch.stack(rows).cpu()
    dist.all_reduce(results)
    results = results[results[:, 2] > 0]  # empty rows would change the order of the sums
    loss_sum, correct_sum, seen = (float(column.sum()) for column in results.T)
    assert seen == total, f"evaluated {seen:.0f} of {total} samples"
    return Evaluation(loss_sum / total, int(correct_sum), total)
