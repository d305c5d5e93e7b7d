"""Whether all ranks hold the same bits.

Replicas start with the same bits and take the same steps, so a difference is a fault: of a device,
of memory or of a driver. It raises no error by itself.

Source: Dixit et al. 2021, "Silent Data Corruptions at Scale" (arXiv 2102.11245).
"""

import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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


def unlike_replicas(parts: Mapping[str, Any], step: int, *, buffers: bool) -> str:
    """Compare all ranks' parameters and optimizer states; every rank calls this.

    Args:
        parts: "model" (unwrapped) and "optimizer".
        step: after which the ranks compare them, for the message.
        buffers: compare the model's buffers, too. Without virtual ranks they differ by design until
            DDP sends rank 0's with the next forward pass.

    Returns:
        Which tensor differs and which rank is at fault; empty if nothing differs.
    """
    model, states = parts["model"], parts["optimizer"].state
    held: dict[str, Tensor] = dict(model.named_buffers() if buffers else ())
    for name, parameter in model.named_parameters():
        state = {f"{name} ({key})": value for key, value in states.get(parameter, {}).items()}
        held |= {name: parameter, **{k: v for k, v in state.items() if isinstance(v, Tensor)}}
    votes = enumerate(_votes(map(fingerprint, held.values())))
    return _verdict(f"differs between ranks after step {step}", list(held), votes)


def _votes(fingerprints: Iterable[Tensor]) -> list[tuple[int, ...]]:
    """Every rank's fingerprints, on every rank."""
    first, *rest = fingerprints
    mine = torch.stack([first, *(value.to(first.device) for value in rest)])
    return [tuple(vote) for vote in gather(mine.tolist())]


def _verdict(what: str, names: Sequence[str], votes: Iterable[tuple[int, tuple[int, ...]]]) -> str:
    """The first tensor that differs and the ranks at fault; empty if all votes are equal.

    A rank is at fault if its vote is not that of the majority, which needs two ranks or more.
    """
    votes = list(votes)
    usual, count = Counter(vote for _, vote in votes).most_common(1)[0]
    if count == len(votes):
        return ""
    columns = zip(names, *(vote for _, vote in votes), strict=True)
    first, *more = (name for name, *values in columns if len(set(values)) > 1)
    also = f" (and {len(more)} more)" if more else ""
    known = 2 * count > len(votes) and len({rank for rank, vote in votes if vote == usual}) > 1
    faulty = sorted({rank for rank, vote in votes if vote != usual or not known})
    hosts = gather(socket.gethostname())
    who = (" and " if known else " or ").join(f"rank {rank} on {hosts[rank]}" for rank in faulty)
    return f"{first}{also} {what}, at fault: {who}"
