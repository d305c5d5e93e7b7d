"""The batch-size lesson: the same training with larger batches, as a figure."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from common import log
from common.figure import save_figure
from common.seeds import seed_everything
from common.terminal import progress_bar
from common.training import evaluate
from common.writing import write_json
from recipes.dp_scratch.lenet import lenet

LESSON_EPOCHS = 6


def show_lesson(
    start: Callable[[], Any],
    train_step: Callable[..., Any],
    load: Callable[[int], Any],
    total: int,
    seed: int,
    folder: Path,
) -> None:
    """Train with larger and larger batches: the accuracy after the same epochs falls.

    A larger batch says little more than a small one, and an epoch has fewer steps. A larger
    learning rate makes up for that, but only up to a point.

    Args:
        start: draws the initial parameters, on one device.
        train_step: trains (parameters, images, labels, learning rate) by one step.
        load: batch size to (training loader, validation loader).
        total: validation samples.
        seed: of the initial parameters.
        folder: of the run.
    """
    if (folder / "lesson.json").exists():
        return
    found: dict[str, dict[int, list[float]]] = {"lr 0.1": {}, "lr 0.1 x batch / 32": {}}
    bar = progress_bar(2 * 3 * LESSON_EPOCHS, unit="epoch", desc="batch-size lesson")
    for rule, scale in zip(found, (0, 1), strict=True):
        for size in (32, 128, 512):
            seed_everything(seed)
            replicas = start()
            lr = 0.1 * (size / 32) ** scale
            loader, val_loader = load(size)
            accuracies = found[rule][size] = []
            for epoch in range(LESSON_EPOCHS):
                loader.keys.set_epoch(epoch)
                for images, labels in loader:
                    train_step(replicas, images, labels, lr)
                result = evaluate(replicas, val_loader, total)
                accuracies.append(result.means["accuracy"])
                bar.update()
    bar.close()
    save_figure(folder / "lesson.png", partial(plot_lesson, found), panels=2)
    write_json(folder / "lesson.json", found)
    log.info(f"validation accuracy after {LESSON_EPOCHS} epochs ({folder}/lesson.png):")
    for rule, curves in found.items():
        ends = ", ".join(f"batch {size} {curve[-1]:.3f}" for size, curve in curves.items())
        log.info(f"  {rule}: {ends}")
    seed_everything(seed)
    show_diversity(start().copies[0], load, folder)


def show_diversity(parameters: dict[str, Tensor], load: Callable[[int], Any], folder: Path) -> None:
    """Compare gradients of batches of different samples with those of one sample copied.

    A gradient that points where the gradient of all samples points is a good step. More different
    samples bring it nearer. More copies of one sample bring nothing, whatever the batch size.

    Args:
        parameters: of the LeNet, before training.
        load: see `show_lesson`.
        folder: of the run; gets diversity.json.
    """

    def gradient(images: Tensor, labels: Tensor) -> Tensor:
        cross_entropy(lenet(parameters, images), labels).backward()
        parts = [value.grad.flatten() for value in parameters.values() if value.grad is not None]
        for value in parameters.values():
            value.grad = None
        return torch.cat(parts)

    most = min(load(1)[0].keys.samples, 1024)  # bounds the memory
    images, labels = next(iter(load(most)[0]))
    whole = gradient(images, labels)

    def cosine(batches: list[list[int]]) -> float:
        gradients = [gradient(images[batch], labels[batch]) for batch in batches]
        return sum(float(cosine_similarity(own, whole, 0)) for own in gradients) / len(gradients)

    found: dict[str, dict[int, float]] = {"different samples": {}, "one sample copied": {}}
    for size in (1, 8, 64):
        different = [[(n * size + i) % most for i in range(size)] for n in range(8)]
        found["different samples"][size] = cosine(different)
        found["one sample copied"][size] = cosine([[n] * size for n in range(8)])
    write_json(folder / "diversity.json", found)
    log.info(f"cosine between the gradients of a batch and of {most} samples, mean of 8 batches:")
    for kind, cosines in found.items():
        ends = ", ".join(f"batch {size} {mean:.2f}" for size, mean in cosines.items())
        log.info(f"  {kind}: {ends}")


def plot_lesson(found: dict[str, dict[int, list[float]]], *panels: Any) -> None:
    """Validation accuracy by epoch: one line per batch size, one panel per learning rate."""
    for axes, (rule, curves) in zip(panels, found.items(), strict=True):
        for size, accuracies in curves.items():
            axes.plot(range(1, len(accuracies) + 1), accuracies, "o-", label=f"batch {size}")
        axes.set(xlabel="epoch", ylabel="validation accuracy", ylim=(0, 1), title=rule)
        axes.legend()
