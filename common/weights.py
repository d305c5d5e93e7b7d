"""The weights of a model: their names and hash, and how they are saved."""

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from common.errors import TrainingError
from common.fingerprint import tensor_bytes
from common.writing import RESUME, write_file


def weights_sha256(state_dict: dict[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and little-endian bytes, in the state_dict's order."""
    digest = hashlib.sha256()
    for name, value in state_dict.items():
        digest.update(name.encode() + str(value.dtype).encode() + str(value.shape).encode())
        digest.update(tensor_bytes(value))
    return digest.hexdigest()


def unwrapped(weights: dict[str, Tensor], own: Mapping[str, Any]) -> dict[str, Tensor]:
    """A state_dict without the prefixes of DDP and torch.compile, which the model's `own` lacks.

    Raises:
        TrainingError: some names have such a prefix, and others have not.
    """
    for _ in range(2):
        for prefix in ("module.", "_orig_mod."):
            if weights and all(k.startswith(prefix) and k not in own for k in weights):
                weights = {k.removeprefix(prefix): value for k, value in weights.items()}
    if odd := [k for k in weights if k.startswith(("module.", "_orig_mod.")) and k not in own]:
        raise TrainingError(
            f"the weights hold {odd[0]}, a name of a wrapper around the model: give the state_dict "
            "of the model inside it"
        )
    return weights


def holds(state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> bool:
    """Whether each of `weights` is in a state_dict: the same memory, or the same values by name."""
    memory = {leaf.data_ptr() for leaf in tree_leaves(state) if isinstance(leaf, Tensor)}

    def equal(name: str, value: Tensor) -> bool:
        own = state.get(name)
        return isinstance(own, Tensor) and torch.equal(own.cpu().double(), value.cpu().double())

    return all(value.data_ptr() in memory or equal(name, value) for name, value in weights.items())


def save_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Save a run's state_dict completely or not at all.

    Raises:
        TrainingError: it cannot be written.
    """
    write_file(path, partial(torch.save, weights), then=RESUME)
