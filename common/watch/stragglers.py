"""Does one rank compute longer than the others?

Whole steps do not show it, because in each step all ranks wait for the slowest one. A rank computes
from the moment when all ranks have the averaged gradients (the optimizer's step begins) until its
own last gradient is ready. What Loop does between two steps is left out, and so is the exchange of
BatchNorm's buffers, in which the other ranks wait for rank 0.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.watch import verdict

WINDOW = 50
"""Steps that are compared at once [steps]."""

LEAST = 1.1
"""A rank is slow if it computes longer than the others by this factor, in both halves."""


class Slow(NamedTuple):
    """What a window shows."""

    ranks: list[int]
    """The slow ones, the slowest first."""
    excess: float
    """How much longer the slowest one computes than the median rank, as a share of that time."""
    faster: float
    """How many more steps per second the run would make without the slow ranks, as a share."""


def find_slow(halves: Sequence[Sequence[float]], step_s: float) -> Slow | None:
    """The ranks that compute much longer than the others; None if there are none.

    Disturbances come in bursts, so a rank must be slow in both halves of the window. Among an even
    number of ranks the lower median counts, so that one of two ranks can be slow.

    Args:
        halves: per rank, the median time that it computed per step in each half of the window [s].
        step_s: time of a whole step [s].
    """
    usual = [statistics.median_low(half) for half in zip(*halves, strict=True)]
    over = [min(own / all_s for own, all_s in zip(r, usual, strict=True)) for r in halves]
    slow = sorted((rank for rank, f in enumerate(over) if f > LEAST), key=lambda r: -over[r])
    if not slow:
        return None
    saved_s = (over[slow[0]] - max(f for f in over if f <= LEAST)) * min(usual)
    return Slow(slow, over[slow[0]] - 1, saved_s / max(step_s - saved_s, min(usual)))


class ComputeTime:
    """The time that this rank computes per step, over the last `WINDOW` steps.

    On a GPU, events are put into its queue and read after it has passed them, so that nothing ever
    waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._compared = device, 0
        self._since: Any = None
        self._ready: Any = None
        self._parts: list[tuple[Any, Any]] = []
        self._queued: deque[list[tuple[Any, Any]]] = deque()
        self._steps_s: deque[float] = deque(maxlen=WINDOW)
        self._slow = set[int]()

    def follow(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        """Begin to measure the steps of `ddp` and `optimizer`."""
        # DDP assumes, too, that gradients become ready in the opposite order of the parameters.
        last = next(parameter for parameter in ddp.parameters() if parameter.requires_grad)
        last.register_post_accumulate_grad_hook(self._note_ready)
        optimizer.register_step_pre_hook(self._release)
        if ddp.broadcast_buffers:
            ddp.register_forward_pre_hook(lambda *_: self._add(self._now()))
            ddp.module.register_forward_pre_hook(lambda *_: self.start())
        if tree := getattr(ddp.module, "tree", None):  # --virtual-ranks
            tree.waiting = self.waiting

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def start(self) -> None:
        """From now on this rank computes."""
        self._since = self._now()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it this rank waits for others and does not compute."""
        self._add(self._now())
        yield
        self.start()

    def _add(self, until: Any) -> None:
        if self._since is not None and until is not None:
            self._parts.append((self._since, until))
        self._since = None

    def _note_ready(self, _parameter: Tensor) -> None:
        self._ready = self._now()  # the last micro-batch counts

    def _release(self, *_: object) -> None:
        self._add(self._ready)
        self.start()

    def end_step(self) -> None:
        """What was measured since the last call is one step; now this rank does not compute."""
        if not self._parts:  # it follows no steps
            return
        self._add(self._now())
        self._queued.append(self._parts)
        self._parts = []
        gpu = self._device.type == "cuda"
        while self._queued and (not gpu or self._queued[0][-1][1].query()):
            parts = self._queued.popleft()
            parts_s = (a.elapsed_time(b) / 1000 if gpu else b - a for a, b in parts)
            self._steps_s.append(sum(parts_s))

    def halves(self) -> Tensor:
        """The median time per step in each half of the window [s], or zeros before it is full."""
        steps_s = list(self._steps_s) if len(self._steps_s) == WINDOW else [0.0] * WINDOW
        return torch.tensor(steps_s, dtype=torch.float64).view(2, -1).median(dim=1).values

    def compare(self, step: int, halves: Tensor, step_s: float) -> Slow | None:
        """The slow ranks, once per window, from all ranks' halves; None if there are none."""
        if step < self._compared + WINDOW or not halves.all():
            return None
        self._compared = step
        return find_slow(halves.tolist(), step_s)

    def news(self, found: Slow, logs: Path) -> str:
        """A line that names the slow ranks; empty if it was said before."""
        if self._slow.issuperset(found.ranks):
            return ""
        self._slow.update(found.ranks)
        about = [verdict.read(logs, rank) for rank in found.ranks]
        who, *more = (f"{record['who']} ({record.get('device', '?')})" for record in about)
        also = f" (slow, too: {', '.join(more)})" if more else ""
        return (
            f"{who} computes {found.excess:.0%} longer per step than the other ranks, which wait "
            f"for it{also}: without it the run would be {found.faster:.0%} faster"
        )
