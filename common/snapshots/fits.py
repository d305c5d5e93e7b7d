"""Whether a saved state is that of a model or an optimizer."""

from typing import Any

import torch
from torch import Tensor


def refuse_other_state(part: Any, given: dict[str, Any]) -> None:
    """Raise ValueError for entries that `part` would ignore, miss or convert."""
    if isinstance(part, torch.optim.Optimizer):
        parameters = [p for group in part.param_groups for p in group["params"]]
        trained = {index for index, p in enumerate(parameters) if p.requires_grad}
        if given["state"] and given["state"].keys() != trained:
            raise ValueError(f"an optimizer of {len(given['state'])} parameters")
        pairs: list[tuple[str, Any, Any]] = [
            (f"{name} {index}", value, parameters[index])
            for index, held in given["state"].items()
            for name, value in held.items()
            if isinstance(value, Tensor) and value.dim()
        ]
    else:
        own = part.state_dict()
        pairs = [(name, given.get(name), own.get(name)) for name in own.keys() | given.keys()]
    for name, theirs, ours in pairs:
        if _kind(theirs) != _kind(ours):
            raise ValueError(f"{name} is {_kind(theirs)}, not {_kind(ours)}")


def _kind(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"{value.dtype} {tuple(value.shape)}" if is_tensor else type(value).__name__
