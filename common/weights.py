"""The weights of a model: their hash, and how they are saved."""

import hashlib
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from common.fingerprint import tensor_bytes
from common.writing import RESUME, write_file


def weights_sha256(state_dict: dict[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and little-endian bytes, in the state_dict's order."""
    digest = hashlib.sha256()
    for name, value in state_dict.items():
        digest.update(name.encode() + str(value.dtype).encode() + str(value.shape).encode())
        digest.update(tensor_bytes(value))
    return digest.hexdigest()


def save_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Save a run's state_dict completely or not at all.

    Raises:
        TrainingError: it cannot be written.
    """
    write_file(path, partial(torch.save, weights), then=RESUME)
