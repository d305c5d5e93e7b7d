"""A data set, a model and its metrics, in plain torch and NumPy."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from torch.utils.data import Dataset

from common.data.datasets import Data
from common.data.stream import Samples


class Squares(Dataset[tuple[Tensor, Tensor]]):
    """Images (1, 16, 16) with one bright square, and its left edge, upper edge and side."""

    def __len__(self) -> int:
        return 1200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        side, x, y = np.random.default_rng(index).integers((4, 0, 0), (9, 8, 8))
        image = np.zeros((1, 16, 16))
        image[:, y : y + side, x : x + side] = 1
        image += np.random.normal(0, 0.2, image.shape)  # augmentation: other noise in every epoch
        return torch.tensor(image), torch.tensor([x, y, side]) / 16


def own_data(config: Any) -> Data:
    """80 % to train on, 20 % to validate on; change `fingerprint` if you change the data."""
    parts = (range(960), range(960, 1200))
    train, val = (Samples(Squares(), part, config.run.seed) for part in parts)
    return Data(train, val, fingerprint="squares, version 1")


class Finder(nn.Sequential):
    """Left edge, upper edge and side (samples, 3) of the squares in images."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()),
            *(nn.Dropout(0.1), nn.Linear(32 * 8 * 8, 3)),
        )


def own_model(config: Any) -> nn.Module:
    """The model that is trained, and that `evaluate` loads."""
    return Finder()


def score(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """The metrics of the validation data: one number for each sample."""
    images, places = batch
    found = model(images)
    losses = smooth_l1_loss(found, places, reduction="none").mean(1)
    return {"loss": losses, "error_px": 16 * (found - places).abs().mean(1)}
