"""What all peers share: the model, the data and the options of ddp_launch, but no training code."""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import Dataset

from common.data.datasets import ArraySamples, DataOptions, digits_data, shifted
from common.run.options import RunOptions
from common.run.plan import batch_size_of
from common.training.models import ModelOptions, build_model
from common.training.optimizer import OptimizerOptions

LINEAR = "PEERS_LINEAR" in os.environ
"""The model is one layer, and batches are small: what is left is the host's work (`host.py`)."""
GLOBAL_BATCH_SIZE = 8 if LINEAR else batch_size_of(OptimizerOptions())
LOG_EVERY = RunOptions().log_every
STEPS_PER_EPOCH = 1437 // GLOBAL_BATCH_SIZE
"""Of digits: 1,437 training samples, in whole batches."""


@dataclass(frozen=True)
class Task:
    """The task of one run."""

    processes: int
    steps: int
    """Optimizer steps of the run [steps]."""
    snapshot_after: int
    """Save the training state after this step, counted from 1."""
    folder: Path
    """Folder of the run; exists."""

    @property
    def epochs(self) -> int:
        """Length of the schedule [epochs]; the last epoch may stop early."""
        return -(-self.steps // STEPS_PER_EPOCH)

    @property
    def last_step(self) -> int:
        """The step at which the learning rate is lowest, counted from 0."""
        return self.epochs * STEPS_PER_EPOCH - 1


class Digits(Dataset[tuple[Tensor, int]]):
    """A plain data set: the recipe's images and augmentation, torch's own random numbers."""

    def __init__(self, samples: ArraySamples) -> None:
        self.images, self.labels = samples.source
        self.indices = samples.indices
        self.augmented = samples.shift

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        places = [self.indices[index] for index in indices]
        images = self.images[places]
        if self.augmented:
            images = shifted(images, torch.randint(2**62, (len(places),)).numpy().astype("u8"))
        return list(zip(images, self.labels[places].tolist(), strict=True))


def parse() -> Task:
    """The task from the command line."""
    parser = argparse.ArgumentParser()
    for option in ("--processes", "--steps", "--snapshot-after"):
        parser.add_argument(option, type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    return Task(**vars(parser.parse_args()))


def make_data() -> tuple[Digits, Digits]:
    """Training and validation data, split and augmented as by the recipe."""
    data = digits_data(DataOptions(), seed=0)
    assert isinstance(data.train, ArraySamples)
    assert isinstance(data.val, ArraySamples)
    return Digits(data.train), Digits(data.val)


def make_model() -> nn.Module:
    """The default model of the recipe, or one layer."""
    if LINEAR:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return build_model(ModelOptions(), channels=1, classes=10, side=8)


def make_optimizer(
    model: nn.Module, task: Task
) -> tuple[optim.SGD, optim.lr_scheduler.CosineAnnealingLR]:
    """SGD and a cosine by step, with the recipe's numbers."""
    ours = OptimizerOptions()
    optimizer = optim.SGD(
        model.parameters(), lr=ours.lr, momentum=ours.momentum, weight_decay=ours.weight_decay
    )
    schedule = optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=task.last_step, eta_min=ours.lr * ours.lrf
    )
    return optimizer, schedule


def finish(task: Task, val_accuracy: Any) -> None:
    """Write the accuracy, which shows that the training was the same. Only rank 0 calls this."""
    (task.folder / "summary.json").write_text(json.dumps({"val_accuracy": float(val_accuracy)}))
