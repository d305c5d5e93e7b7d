"""The batch-size lesson: the same training with larger batches, as a figure."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common.figure import save_figure
from common.files import write_json
from common.seeds import seed_everything
from common.terminal import log, progress_bar
from common.training.evaluate import evaluate

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
        load: batch size to (batches, training loader, validation loader).
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
            batches, loader, val_loader = load(size)
            accuracies = found[rule][size] = []
            for epoch in range(LESSON_EPOCHS):
                batches.set_epoch(epoch)
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


def plot_lesson(found: dict[str, dict[int, list[float]]], *panels: Any) -> None:
    """Validation accuracy by epoch: one line per batch size, one panel per learning rate."""
    for axes, (rule, curves) in zip(panels, found.items(), strict=True):
        for size, accuracies in curves.items():
            axes.plot(range(1, len(accuracies) + 1), accuracies, "o-", label=f"batch {size}")
        axes.set(xlabel="epoch", ylabel="validation accuracy", ylim=(0, 1), title=rule)
        axes.legend()
