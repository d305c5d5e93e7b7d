"""What ranks tell each other besides gradients: gather, broadcast, and agree on an error."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import InputError, PeerError

T = TypeVar("T")


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's `value` in rank order, on every rank. Any object that pickles."""
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values  # type: ignore[return-value]


def gather_to_rank_0(value: T) -> list[T]:
    """Every rank's `value` in rank order on rank 0, an empty list elsewhere."""
    values: list[T] | None = [value] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values or []


def broadcast(value: T, source: int = 0) -> T:
    """The `value` of rank `source` on every rank. Any object that pickles."""
    values = [value]
    dist.broadcast_object_list(values, src=source)
    return values[0]


def gather_numbers(values: Tensor) -> Tensor:
    """Every rank's numbers, on every rank; cheaper than `gather`.

    Args:
        values: as many numbers on each rank.

    Returns:
        (world_size, numbers), float64, on the CPU.
    """
    numbers = torch.zeros(dist.get_world_size(), values.numel(), dtype=torch.float64)
    numbers[dist.get_rank()] = values.reshape(-1)
    dist.all_reduce(numbers)  # exact: adds zeros to each number
    return numbers


def together(work: Callable[[], T]) -> T:
    """`work()` of each rank, which may take far longer on some; it calls no collective itself.

    A rank that waited for the others in one collective would give up after --timeout-s.

    Raises:
        InputError, PeerError: as `agreed`.
    """
    if dist.get_world_size() == 1:
        return work()
    results: list[T] = []
    errors: list[Exception] = []

    def body() -> None:
        try:
            results.append(work())
        except Exception as error:  # raised below, on all ranks
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    wait_s = 0.001
    while not all(gather(not thread.is_alive())):
        thread.join(wait_s)
        wait_s = min(2 * wait_s, 1.0)
    with agreed():
        if errors:
            raise errors[0]
    return results[0]


@contextmanager
def agreed(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise what one rank raises inside the block on every rank, with that rank's message.

    Without it, one rank's missing file leaves the other ranks waiting in the next collective. The
    block itself must not call a collective.

    Raises:
        InputError: on every rank, if a rank raised one.
        PeerError: on the ranks that raised nothing, if a rank raised anything else.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # the peers must know before it is raised here
        error = caught
    said = None if error is None else (isinstance(error, InputError), str(error))
    found = gather(said, group)
    failed = [(rank, *entry) for rank, entry in enumerate(found) if entry is not None]
    if not failed:
        return
    rank, is_input, message = failed[0]
    if is_input:
        where = "" if rank == 0 else f"rank {rank}: "
        raise InputError(f"{where}{message}") from error
    if error is not None:
        raise error
    raise PeerError(f"rank {rank} failed: {message}")
