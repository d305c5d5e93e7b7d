"""Stop on request: all ranks stop after the same step, without a collective in every step."""

import signal
import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from common.errors import STOP_SIGNALS, StopRequested
from common.group.devices import synchronize


def _leave() -> NoReturn:
    raise StopRequested


class StopAgreement:
    """Turn a signal at any rank into one step after which all ranks stop.

    Ranks reach a step at different moments, so no rank may stop alone: the others would wait for it
    in the next all-reduce. About once every `interval_s` they all-reduce two numbers: whether a
    signal came, and the slowest rank's time per step. Every rank computes the step of the next
    agreement from the same two numbers, whether a step takes 1 ms or 10 s.

    Args:
        devices: that do the steps. A step counts when they have done it: a GPU may have hundreds of
            steps still to do.
        interval_s: time between two agreements.
        leave: raises StopRequested; a loop's own saves the state first.
    """

    def __init__(
        self,
        devices: Sequence[torch.device] = (),
        interval_s: float = 1.0,
        leave: Callable[[], Any] = _leave,
    ) -> None:
        self.devices, self.interval_s, self.leave = devices, interval_s, leave
        self.group = dist.group.WORLD
        self.came: list[int] = []
        """The stop signals that came to this process."""
        self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        _of_the_loop[:] = [self]
        self.begin()

    def begin(self) -> None:
        """Count steps from here on."""
        self._last_step, self._next_step, self._since = -1, 0, time.monotonic()

    def _note(self, number: int, _frame: object) -> None:
        self.came.append(number)

    def release(self) -> None:
        """Restore the signal handlers: no more agreements follow."""
        _of_the_loop.clear()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def after(self, step: int, *, at_once: bool = False) -> bool:
        """Whether all ranks stop after `step`; every rank calls this with the same steps, in order.

        Args:
            step: optimizer steps done.
            at_once: agree now, even if the interval has not passed.
        """
        if self._last_step < 0:
            self._last_step = step - 1
        if step < self._next_step and not at_once:
            return False
        synchronize(*self.devices)
        now = time.monotonic()
        step_s = (now - self._since) / max(1, step - self._last_step)
        asked = float(bool(self.came))
        agreement = torch.tensor([asked, step_s], dtype=torch.float64)
        dist.all_reduce(agreement, op=dist.ReduceOp.MAX)
        stop, slowest_s = agreement.tolist()
        self._since, self._last_step = now, step
        self._next_step = step + max(1, int(self.interval_s / max(slowest_s, 1e-6)))
        return bool(stop)


_of_the_loop: list[StopAgreement] = []
"""At most one: the one that listens for signals, which come to the whole process."""


def agreement_in_evaluation() -> StopAgreement | None:
    """One on the same signals as the loop's, which counts batches; None outside of a loop."""
    if not _of_the_loop or _of_the_loop[0].group is not dist.group.WORLD:
        return None
    inner = copy(_of_the_loop[0])
    inner.begin()
    return inner
