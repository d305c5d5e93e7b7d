"""Whether all ranks hold the same bits.

Replicas start with the same bits and take the same steps, so a difference is a fault: of the loop's
code, a device, memory or a driver. It raises no error by itself.

Source: Dixit et al. 2021, "Silent Data Corruptions at Scale" (arXiv 2102.11245).
"""

import socket
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.group.collectives import gather

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """A hash of all bits, int64 (), on the tensor's device.

    It is the XOR of each row (first dimension), and a sum of the rows with a weight for each. It
    cannot see an even number of equal flips within a row, nor elements of a row that swap places.
    """
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = tensor.detach().view(_INTEGERS[tensor.element_size()])
    rows = torch.hash_tensor(bits.flatten(1) if bits.dim() > 1 else bits.reshape(-1, 1), dim=1)
    weights = 2 * torch.arange(len(rows), device=rows.device) + 1
    return (rows.view(torch.int64) * weights).sum()


def fingerprints(weights: Mapping[str, Any]) -> frozenset[int]:
    """Those of a whole model's tensors; none if one of them is sharded, or on `meta`."""
    values = [value for value in weights.values() if isinstance(value, Tensor)]
    if any(type(v) not in (Tensor, nn.Parameter) or v.is_meta or v.is_quantized for v in values):
        return frozenset()
    return frozenset(torch.stack([fingerprint(v).cpu() for v in values]).tolist() if values else ())


def unlike_replicas(parts: Mapping[str, Any], step: int, *, buffers: bool) -> str:
    """Compare all ranks' parameters, optimizer states and learning rates; every rank calls this.

    Args:
        parts: of the training state; "model" is unwrapped.
        step: after which the ranks compare them, for the message.
        buffers: compare the models' buffers, too. Without virtual ranks they differ by design until
            DDP sends rank 0's with the next forward pass.

    Returns:
        Which tensor differs, and which ranks are at fault: those that differ from the majority,
        or all ranks where there is none. Empty if nothing differs.
    """
    held: dict[str, Tensor] = {}
    optimizers = {name: part for name, part in parts.items() if isinstance(part, Optimizer)}
    for name, optimizer in optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            rate = torch.as_tensor(group["lr"], dtype=torch.float64)
            held[f"the learning rate of {name}'s group {number}"] = rate
    models = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    for of, model in models.items():
        prefix = "" if of == "model" else f"{of}."
        held |= {prefix + name: value for name, value in model.named_buffers() if buffers}
        for name, value in model.named_parameters():
            held[prefix + name] = value
            for optimizer in optimizers.values():
                state = optimizer.state.get(value, {}).items()
                held |= {f"{prefix}{name} ({k})": v for k, v in state if isinstance(v, Tensor)}
    theirs = gather({name: int(fingerprint(value)) for name, value in held.items()})
    names = list(dict.fromkeys(name for each in theirs for name in each))
    votes = [tuple(each.get(name) for name in names) for each in theirs]
    usual, count = Counter(votes).most_common(1)[0]
    if count == len(votes):
        return ""
    columns = zip(names, *votes, strict=True)
    first, *more = (name for name, *values in columns if len(set(values)) > 1)
    also = f" (and {len(more)} more)" if more else ""
    known = 2 * count > len(votes)  # else no vote has a majority
    faulty = [rank for rank, vote in enumerate(votes) if vote != usual or not known]
    hosts = gather(socket.gethostname())
    who = (" and " if known else " or ").join(f"rank {rank} on {hosts[rank]}" for rank in faulty)
    return f"{first}{also} differs between ranks after step {step}, at fault: {who}"
