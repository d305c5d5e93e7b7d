"""A data set of text, a model and its metrics: a collate function makes batches that are dicts."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import Dataset

from common.data.datasets import Data, LoaderOptions
from common.data.stream import Samples

LENGTH = 64


@dataclass(frozen=True)
class TextOptions(LoaderOptions):
    """What to train on."""

    text: Path
    """Text file; each line is a sample."""


class Lines(Dataset[Tensor]):
    """The lines of a file as bytes, each with its own length."""

    def __init__(self, file: Path) -> None:
        lines = file.read_bytes().splitlines()
        self.lines = [line[: LENGTH + 1] for line in lines if len(line) > 1]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(list(self.lines[index]))


def collate(lines: list[Tensor]) -> dict[str, Tensor]:
    """Bytes (samples, LENGTH), and the byte that follows each of them; 0 at the end of a line."""
    padded = torch.stack([pad(line, (0, LENGTH + 1 - len(line))) for line in lines])
    return {"bytes": padded[:, :-1], "next": padded[:, 1:]}


def own_data(config: Any) -> Data:
    """Every fifth line is kept for validation; the file's hash says whether the data changed."""
    file, seed = config.data.text, config.run.seed
    lines = Lines(file)
    to_validate = range(0, len(lines), 5)
    to_train = sorted(set(range(len(lines))) - set(to_validate))
    train, val = (Samples(lines, part, seed, collate) for part in (to_train, to_validate))
    return Data(train, val, fingerprint=hashlib.sha256(file.read_bytes()).hexdigest())


class Speller(nn.Module):
    """Predicts each byte of a line from the five bytes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.convolution = nn.Conv1d(32, 128, 5)
        self.head = nn.Linear(128, 256)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits (samples, LENGTH, 256) of the next byte."""
        features = self.convolution(pad(self.embedding(batch["bytes"]).transpose(1, 2), (4, 0)))
        logits: Tensor = self.head(features.relu().transpose(1, 2))
        return logits


def own_model(config: Any) -> nn.Module:
    """The model that is trained, and that `evaluate` loads."""
    return Speller()


def losses_of(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy (samples,) over the bytes of each line."""
    next_bytes = batch["next"]
    losses = cross_entropy(logits.flatten(0, 1), next_bytes.flatten(), reduction="none")
    known = next_bytes > 0
    return (losses.view_as(next_bytes) * known).sum(1) / known.sum(1)


def score(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The metrics of the validation data: one number for each sample."""
    logits, known = model(batch), batch["next"] > 0
    right = (logits.argmax(2) == batch["next"]) & known
    return {"loss": losses_of(logits, batch), "right": right.sum(1) / known.sum(1)}
