"""The weights of a model: their names and hash, and how they are saved."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
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


WRAPPERS = ("module.", "_orig_mod.")
"""What DDP and torch.compile put before each name."""
PREFIXES = (*WRAPPERS, "model.", "net.", "backbone.")
"""What other trainers' modules put there, too."""


def without_prefix(
    found: dict[str, Tensor], own: Collection[str], prefixes: Sequence[str] = PREFIXES
) -> tuple[dict[str, Tensor], str]:
    """A state_dict without the prefix that all its names have, and the prefix.

    It stays if one of the model's `own` names is among them.
    """
    bare, taken = found, ""
    while bare and not bare.keys() & set(own):
        shared = (p for p in prefixes if all(name.startswith(p) for name in bare))
        if not (prefix := next(shared, "")):
            break
        bare = {name.removeprefix(prefix): value for name, value in bare.items()}
        taken += prefix
    return bare, taken


def unwrapped(weights: dict[str, Tensor], own: Collection[str]) -> dict[str, Tensor]:
    """A state_dict without the prefix of a wrapper that the model's `own` names lack.

    Raises:
        TrainingError: only some names have such a prefix.
    """
    weights, _ = without_prefix(weights, own, WRAPPERS)
    if odd := [k for k in weights if k.startswith(WRAPPERS) and k not in own]:
        raise TrainingError(
            f"the weights hold {odd[0]}, a name of a wrapper around the model: give the state_dict "
            "of the model inside it"
        )
    return weights


def memory_of(state: Any) -> set[int]:
    """The addresses of all tensors in nested lists and dicts, such as a state_dict."""
    return {leaf.data_ptr() for leaf in tree_leaves(state) if isinstance(leaf, Tensor)}


def hold(states: Sequence[Mapping[str, Any]], weights: Mapping[str, Tensor]) -> bool:
    """Whether state_dicts hold each of `weights`: its memory, or equal values of its name."""
    memory = memory_of(states)
    named: dict[str, Any] = {}
    for state in reversed(states):  # of two values of one name, the first part's counts
        named |= {name.removeprefix("module."): value for name, value in state.items()}

    def equal(name: str, value: Tensor) -> bool:
        own = named.get(name)
        return isinstance(own, Tensor) and torch.equal(own.cpu().to(value.dtype), value.cpu())

    return all(value.data_ptr() in memory or equal(name, value) for name, value in weights.items())


def save_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Save a run's state_dict completely or not at all.

    Raises:
        TrainingError: it cannot be written.
    """
    write_file(path, partial(torch.save, weights), then=RESUME)
