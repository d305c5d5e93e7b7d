"""Stop on request: all ranks stop after the same step, without a collective in every step."""

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from common.errors import STOP_SIGNALS, StopRequested
from common.group.devices import synchronize


def _leave() -> NoReturn:
    raise StopRequested


class _Requests:
    """The stop signals that came to this process."""

    def __init__(self) -> None:
        self.came: int | None = None
        self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}

    def _note(self, number: int, _frame: object) -> None:
        self.came = number

    def release(self) -> None:
        """Restore the signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


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
        requests: of the loop, for an agreement inside of it. None: begin to listen for signals.
    """

    def __init__(
        self,
        devices: Sequence[torch.device] = (),
        interval_s: float = 1.0,
        leave: Callable[[], Any] = _leave,
        requests: _Requests | None = None,
    ) -> None:
        self.devices, self.interval_s, self.leave = devices, interval_s, leave
        self.group = dist.group.WORLD
        if requests is None:
            _of_the_loop[:] = [self]
        self.requests = requests or _Requests()
        self._last_step = -1
        self._next_step = 0
        self._since = time.monotonic()

    def release(self) -> None:
        """Restore the signal handlers: no more agreements follow."""
        _of_the_loop.clear()
        self.requests.release()

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
        asked = float(self.requests.came is not None)
        agreement = torch.tensor([asked, step_s], dtype=torch.float64)
        dist.all_reduce(agreement, op=dist.ReduceOp.MAX)
        stop, slowest_s = agreement.tolist()
        self._since, self._last_step = now, step
        self._next_step = step + max(1, int(self.interval_s / max(slowest_s, 1e-6)))
        return bool(stop)


_of_the_loop: list[StopAgreement] = []
"""At most one: the one that listens for signals, which come to the whole process."""


def agreement_in_evaluation() -> StopAgreement | None:
    """One on the same requests as the loop's, which counts batches; None outside of a loop."""
    if not _of_the_loop or _of_the_loop[0].group is not dist.group.WORLD:
        return None
    outer = _of_the_loop[0]
    return StopAgreement(outer.devices, outer.interval_s, outer.leave, outer.requests)
