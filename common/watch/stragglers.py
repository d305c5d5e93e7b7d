"""Does one rank compute longer than the others?

Whole steps do not show it, because in each step all ranks wait for the slowest one. A rank computes
from the start of a step until its own last gradient is ready, and from the moment when it has the
averaged gradients until the end of the step; in between it waits. What Loop does between two steps
is left out. The exchange of BatchNorm's buffers, in which the other ranks wait for rank 0, counts
as waiting.

On shared cores, other programs slow down now one rank, now another one, each for some seconds. So a
rank is named only after it was the slow one for a while without a break.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from common.watch import verdict
from common.watch.clock import Clock

WINDOW = 50
"""Steps that are compared at once [steps]."""

LEAST = 1.1
"""A rank is slow if it computes longer than the others by this factor, in both halves."""

WINDOWS, LASTS_S = 6, 60.0
"""A rank is named if it was slow in so many successive windows, and for so long [s]."""

PARTS = 2 * 2
"""Numbers per rank and window: the times that it computed and waited in each half."""


class Slow(NamedTuple):
    """What a window shows."""

    ranks: list[int]
    """The slow ones, the slowest first."""
    much_slower: list[int]
    """Those with at least a tenth of the slowest one's excess: beside a very slow rank, small
    differences between the others mean nothing."""
    excess: float
    """How much longer the slowest one computes than the median rank, as a share of that time."""
    faster: float
    """How many more steps per second the run would make without `much_slower`, as a share."""


def find_slow(
    halves: Sequence[Sequence[float]], waits: Sequence[Sequence[float]], step_s: float
) -> Slow | None:
    """The ranks that compute much longer than the others, which wait for them; None if none do.

    Disturbances come in bursts, so a rank must be slow in both halves of the window. Among an even
    number of ranks the lower median counts, so that one of two ranks can be slow.

    Args:
        halves: per rank, the median time that it computed per step in each half of the window [s].
        waits: per rank, the median time that it waited for other ranks in the same steps [s].
        step_s: time of a whole step [s].
    """
    usual = [statistics.median_low(half) for half in zip(*halves, strict=True)]
    usual_wait = [statistics.median_high(half) for half in zip(*waits, strict=True)]
    over = [min(own / all_s for own, all_s in zip(r, usual, strict=True)) for r in halves]

    def others_wait(rank: int) -> bool:
        """Whether they wait at least half of the time that this rank computes longer."""
        own = zip(halves[rank], usual, waits[rank], usual_wait, strict=True)
        return all(all_wait - wait >= (s - all_s) / 2 for s, all_s, wait, all_wait in own)

    slow = [rank for rank, factor in enumerate(over) if factor > LEAST and others_wait(rank)]
    slow.sort(key=lambda rank: -over[rank])
    if not slow:
        return None
    excess = over[slow[0]] - 1
    much_slower = [rank for rank in slow if over[rank] - 1 >= excess / 10]
    rest = [factor for rank, factor in enumerate(over) if rank not in much_slower]
    saved_s = max(over[slow[0]] - max(rest), 0.0) * min(usual)
    return Slow(slow, much_slower, excess, saved_s / max(step_s - saved_s, min(usual)))


class ComputeTime:
    """The time that this rank computes and waits per step, over the last `WINDOW` steps.

    A rank that waits for data computes: the others wait for it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._compared, self._share = clock, 0, 1.0
        clock.on_step = self._add
        self._steps_s: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._lasts: dict[int, tuple[int, float]] = {}  # slow ranks: windows, since when
        self._named = set[int]()

    def follow(self, ddp: DistributedDataParallel) -> None:
        """Begin to measure the steps of `ddp`."""
        # DDP assumes, too, that gradients become ready in the opposite order of the parameters.
        last = next(parameter for parameter in ddp.parameters() if parameter.requires_grad)
        last.register_post_accumulate_grad_hook(self._note_ready)
        if ddp.broadcast_buffers:
            ddp.register_forward_pre_hook(lambda *_: self._clock.turn_to("communication"))
            ddp.module.register_forward_pre_hook(lambda *_: self._clock.end_wait())
        if tree := getattr(ddp.module, "tree", None):  # --virtual-ranks
            tree.waiting = self._clock.communicating
            self._share = len(tree.mine) * tree.world_size / tree.shards

    def _note_ready(self, _parameter: Tensor) -> None:
        self._clock.turn_to("communication")
        # DDP waits for the other ranks in a callback at the end of the backward pass. It registers
        # that callback after this hook, so only a callback's callback runs after it.
        queue = Variable._execution_engine.queue_callback
        queue(lambda: queue(self._clock.end_wait))

    def _add(self, step_s: Mapping[str, float]) -> None:
        if waited_s := step_s["communication"]:
            self._steps_s.append(((step_s["data"] + step_s["compute"]) / self._share, waited_s))

    def halves(self) -> Tensor:
        """`PARTS` medians of the window [s], or zeros before it is full.

        The time that a step computes in the first and the second half, then that it waits.
        """
        full = len(self._steps_s) == WINDOW
        steps_s = [*self._steps_s] if full else [(0.0, 0.0)] * WINDOW
        by_half = torch.tensor(steps_s, dtype=torch.float64).view(2, -1, 2)
        return by_half.median(dim=1).values.T.flatten()

    def compare(self, step: int, halves: Tensor, step_s: float) -> Slow | None:
        """The slow ranks, once per window, from all ranks' halves; None if there are none."""
        if step < self._compared + WINDOW or not halves[:, :2].all():
            return None
        self._compared, now_s = step, monotonic()
        found = find_slow(halves[:, :2].tolist(), halves[:, 2:].tolist(), step_s)
        before = self._lasts
        self._lasts = {}
        for rank in found.ranks if found else ():
            windows, since_s = before.get(rank, (0, now_s))
            self._lasts[rank] = (windows + 1, since_s)
        return found

    def news(self, found: Slow, logs: Path) -> str:
        """A line that names the ranks that are slow for long; empty if it was said before."""
        now_s = monotonic()
        lasting = [
            rank
            for rank in found.much_slower
            for windows, since_s in [self._lasts[rank]]
            if windows >= WINDOWS and now_s - since_s >= LASTS_S
        ]
        if found.ranks[0] not in lasting or self._named.issuperset(lasting):
            return ""
        self._named.update(lasting)
        about = [verdict.read(logs, rank) for rank in lasting]
        who, *more = (f"{record['who']} ({record.get('device', '?')})" for record in about)
        also = f" (slow, too: {', '.join(more)})" if more else ""
        return (
            f"{who} computes {found.excess:.0%} longer per step than the other ranks, which "
            f"wait for it{also}: without it the run would be {found.faster:.0%} faster"
        )
