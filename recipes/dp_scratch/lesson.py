"""The batch-size lesson: the same training with larger batches, as a figure."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.data.datasets import Data
from common.data.loaders import make_loaders
from common.figure import save_figure
from common.files import write_json
from common.launch.ranks import Ranks
from common.run.logs import log, progress_bar
from common.seeds import mixed_precision, seed_everything
from common.training.evaluate import evaluate
from recipes.dp_scratch.train import Config, Replicas, initialize, train_step

LESSON_EPOCHS = 6


def show_lesson(
    config: Config, data: Data, ranks: Ranks, device: torch.device, folder: Path
) -> None:
    """Train on one device with larger and larger batches: accuracy per epoch falls off.

    More samples of the same data in a step say little more, and an epoch has fewer steps. A larger
    learning rate makes up for that, but only up to a point.
    """
    if (folder / "lesson.json").exists():
        return
    found: dict[str, dict[int, list[float]]] = {"lr 0.1": {}, "lr 0.1 x batch / 32": {}}
    seed, dtype = config.run.seed, mixed_precision(config.run.precision, device)[0]
    bar = progress_bar(2 * 3 * LESSON_EPOCHS, 0, ranks, unit="epoch", desc="batch-size lesson")
    for rule, scale in zip(found, (0, 1), strict=True):
        for size in (32, 128, 512):
            seed_everything(seed)
            replicas = Replicas(initialize(dtype), [device])
            lr = 0.1 * (size / 32) ** scale
            batches, loader, val_loader = make_loaders(
                data, config.data, size, seed, ranks, device, dtype, folder
            )
            accuracies = found[rule][size] = []
            for epoch in range(LESSON_EPOCHS):
                batches.set_epoch(epoch)
                for images, labels in loader:
                    train_step(replicas, images, labels, lr)
                result = evaluate(replicas, val_loader, len(data.val), device)
                accuracies.append(result.accuracy)
                bar.update()
    bar.close()
    save_figure(folder / "lesson.png", partial(plot_lesson, found), panels=2)
    write_json(folder / "lesson.json", found)
    log.info(f"validation accuracy after {LESSON_EPOCHS} epochs ({folder}/lesson.png):")
    for rule, curves in found.items():
        ends = ", ".join(f"batch {size} {curve[-1]:.3f}" for size, curve in curves.items())
        log.info(f"  {rule}: {ends}")


def plot_lesson(found: dict[str, dict[int, list[float]]], *panels: Any) -> None:
    """Validation accuracy by epoch: a line for each batch size, a panel for each learning rate."""
    for axes, (rule, curves) in zip(panels, found.items(), strict=True):
        for size, accuracies in curves.items():
            axes.plot(range(1, len(accuracies) + 1), accuracies, "o-", label=f"batch {size}")
        axes.set(xlabel="epoch", ylabel="validation accuracy", ylim=(0, 1), title=rule)
        axes.legend()
