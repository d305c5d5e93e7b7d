"""Exact evaluation: every validation sample counted once, on any number of ranks."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter, length_hint
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common import log
from common.errors import TrainingError
from common.group.collectives import gather, gather_numbers
from common.group.stop import agreement_in_evaluation
from common.replicas import fingerprints
from common.terminal import progress_bar

Scores = Mapping[str, Tensor] | None

_NO_LABEL = -(2**31)
"""In place of -100, for which torch would count no loss in silence."""


@dataclass(frozen=True)
class Evaluation:
    """A model's result on the whole validation set; the same on every rank."""

    means: dict[str, float]
    """Mean of each metric over the samples, by name."""
    total: int
    """Samples."""
    correct: int | None = None
    """Samples whose accuracy is 1. None: there is no such metric, or it is not always 0 or 1."""
    weights: frozenset[int] = frozenset()
    """`fingerprint` of each of this rank's tensors of the model; empty if they are sharded."""

    @property
    def not_finite(self) -> list[str]:
        """Names of the metrics that are not finite."""
        return [name for name, mean in self.means.items() if not math.isfinite(mean)]


def score_classes(model: nn.Module, batch: Any) -> Scores:
    """Of a batch (inputs, labels): cross-entropy, and whether the likeliest class is right.

    With more than five classes, also whether the right class is one of the five likeliest.

    Raises:
        TrainingError: labels are no class numbers. IndexError: one is no class, such as -100.
    """
    inputs, labels = batch
    logits = model(inputs)
    return None if logits is None else score_logits(logits, labels)  # a pipeline's stage has none


def score_logits(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """As `score_classes`, of logits (samples, classes) and labels (samples,)."""
    labels, classes = labels.to(logits.device), logits.shape[1]
    if labels.dim() != 1:
        raise TrainingError(
            f"labels of shape {tuple(labels.shape)} are no class numbers (samples,): give "
            "evaluate(..., score=) a function that compares them with the model's outputs"
        )
    loss_of = partial(nn.functional.cross_entropy, ignore_index=_NO_LABEL, reduction="none")
    losses = loss_of(logits.double(), labels)
    scores = {"loss": losses, "accuracy": logits.argmax(1) == labels}
    if classes > 5:
        scores["top5"] = (logits.topk(5).indices == labels[:, None]).any(1)
    return scores


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    total: int,
    group: dist.ProcessGroup | None = None,
    score: Callable[[nn.Module, Any], Scores] = score_classes,
) -> Evaluation:
    """Evaluate `model` on the batches that `common.data.stream.FixedBatches` gave to each rank.

    If a signal asks the run to stop, all ranks leave after the same batch: the loop has saved its
    state before, and a run that resumes evaluates again.

    Of DDP, the model inside is evaluated: ranks may have different numbers of batches, and DDP's
    own forward would wait for the other ranks. In training, buffers such as BatchNorm's statistics
    differ by rank; here every rank takes those of rank 0, which are the ones that are saved.

    Args:
        model: in eval mode during the evaluation. A function around a module would hide its
            dropout from that, so it is refused.
        batches: this rank's.
        total: samples over all ranks, for a check.
        group: the ranks that share the batches. None: all ranks.
        score: gives for (model, batch) each metric by name: one number (samples,) for each sample.
            None: this rank's pipeline stage has no outputs.
    """
    model = model.module if isinstance(model, DistributedDataParallel) else model
    if not isinstance(model, nn.Module):
        raise TypeError(f"evaluate needs an nn.Module to switch to eval mode, got {model!r}")
    if hasattr(getattr(batches, "keys", None), "set_epoch"):
        raise TrainingError("evaluate needs the loader of the validation data, got the training's")
    for buffer in model.buffers():
        dist.broadcast(buffer, group=group, group_src=0)
    trained = [module for module in model.modules() if module.training]
    model.eval()
    names: list[str] = []
    sums: list[Tensor] = []
    seen, fractions = 0, torch.tensor(False)  # read at the end: no batch waits for a GPU
    own, main = length_hint(batches) or None, dist.get_rank() == 0
    bar = progress_bar(own, main=main, unit="batch", desc="evaluation", keep=False)
    stop = agreement_in_evaluation()
    on_all = int(gather_numbers(torch.tensor(float(own or 0))).min()) if stop else 0
    for number, batch in enumerate(batches, 1):
        drawn = None if sums else torch.get_rng_state().numpy().tobytes()
        scores = score(model, batch)
        _refuse_other_kinds(scores)
        if drawn is not None:
            _refuse_training(model, drawn)
        if scores:
            if not names:
                names = list(scores)
                _refuse_reserved(names)
            _refuse_other_names(scores, names)
            shapes = {name: tuple(values.shape) for name, values in scores.items()}
            if len({*shapes.values()}) > 1 or len(shapes[names[0]]) != 1:
                raise ValueError(
                    f"score must give one number for each sample, got the shapes {shapes}: give "
                    "reduction='none' to the loss function, or take the mean over each sample"
                )
            by_metric = torch.stack([scores[name].double() for name in names])
            seen += by_metric.shape[1]
            sums.append(by_metric.sum(1))
            accuracy = scores.get("accuracy", by_metric[:0])
            fractions = fractions | ((accuracy != 0) & (accuracy != 1)).any()
        bar.update()
        if stop and number < on_all and stop.after(number):
            bar.close()
            stop.leave()
    bar.close()
    for module in trained:
        module.training = True
    found = gather((names, seen, torch.stack(sums).tolist() if sums else [], bool(fractions)))
    seen = sum(count for _, count, *_ in found)
    if seen != total:
        raise ValueError(
            f"score gave {seen} numbers per metric for {total} samples: it must give one for each"
        )
    # fsum rounds once, so the order of the batches, which depends on world_size, does not matter.
    names = max(names for names, *_ in found)  # a rank without batches has none
    columns: dict[str, list[float]] = {name: [] for name in names}
    for theirs, _, rows, _ in filter(itemgetter(0), found):
        _refuse_other_names(theirs, names)
        for row in rows:  # in the order of that rank's names
            for name, value in zip(theirs, row, strict=True):
                columns[name].append(value)
    means = {name: math.fsum(column) / total for name, column in columns.items()}
    whole = "accuracy" in means and not any(fractions for *_, fractions in found)
    correct = round(math.fsum(columns["accuracy"])) if whole else None
    return Evaluation(means, total, correct, fingerprints(model.state_dict()))


def _refuse_training(model: nn.Module, drawn: bytes) -> None:
    """After the first batch: is the model still in eval mode, and draws no random numbers?"""
    if model.training:
        raise TrainingError("score switched the model to train mode: leave out model.train()")
    if drawn != torch.get_rng_state().numpy().tobytes():
        log.warning(
            "the model drew random numbers in an evaluation: give F.dropout training=self.training"
        )


def _refuse_other_kinds(scores: Any) -> None:
    found = type(scores).__name__
    if isinstance(scores, Mapping):
        if all(isinstance(value, Tensor) for value in scores.values()):
            return
        found = ", ".join(f"{name!r}: {type(value).__name__}" for name, value in scores.items())
    if scores is not None:
        raise TrainingError(
            f"score gave {found}: it must give a dict of tensors, with one number for each sample "
            "under each metric's name"
        )


def _refuse_reserved(names: list[str]) -> None:
    if odd := [name for name in names if not isinstance(name, str)]:
        raise TrainingError(
            f"score gave a metric called {odd[0]!r}, which is no text: call it {str(odd[0])!r}"
        )
    if taken := [name for name in ("correct", "total") if name in names]:
        raise TrainingError(
            f"score gave a metric called {taken[0]}, but val_{taken[0]} in summary.json is a "
            "number of samples: give it another name"
        )


def _refuse_other_names(found: Iterable[str], names: list[str]) -> None:
    if {*found} != {*names}:
        raise TrainingError(
            f"score gave the metrics {', '.join(found)} for a batch, but {', '.join(names)} for "
            "another one: give the same metrics for every batch"
        )


def explosion(found: Mapping[str, float], before: Mapping[str, float], classes: int) -> str:
    """In words, if the loss exploded in this epoch; else empty.

    The training loss did if it is twice that of guessing and still grows. Without classes: ten
    times the loss of the epoch before. With BatchNorm the validation loss may explode first; that
    of a model that learns its samples by heart grows, too, but does not double in an epoch.

    Args:
        found: metrics of the epoch.
        before: metrics of the epoch before; empty in the first one.
        classes: number of them; 0: the loss is not that of classes.
    """

    def explodes(name: str, growth: float) -> bool:
        loss, last = found.get(name, 0.0), before.get(name, 0.0)
        limit = 2 * math.log(classes) if classes > 1 else 10 * max(last, 0) or math.inf
        return loss > max(limit, growth * last)

    if not explodes("train_loss", 1) and not (before and explodes("val_loss", 2)):
        return ""
    if not before:
        guessing = f"guessing has {math.log(classes):.4g}"
        return f"train_loss {found['train_loss']:.4g} explodes ({guessing})"
    both = [
        f"{name} {before[name]:.4g} -> {found[name]:.4g}"
        for name in ("train_loss", "val_loss")
        if name in found
    ]
    return f"{', '.join(both)}: the loss explodes"
