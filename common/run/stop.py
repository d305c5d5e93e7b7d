"""Stopping on request: every rank leaves after the same step, with no synchronisation a step."""

import signal
import time

import torch
import torch.distributed as dist

from common.errors import STOP_SIGNALS


class StopAgreement:
    """Turn a signal at any rank into one step after which all ranks stop.

    Ranks reach a step at different moments, so none may stop on its own: the others would wait for
    it in the next all-reduce. They agree by a two-number all-reduce, and not at every step: the
    slowest rank's time a step, which travels along, sets how many steps pass until the next
    agreement, so that it comes about once every `interval_s` whether a step takes 1 ms or 10 s.
    Every rank computes that from the same reduced numbers and so comes to the same step.
    """

    def __init__(self, interval_s: float = 1.0) -> None:
        self.interval_s = interval_s
        self.requested: int | None = None
        self._last_step = -1
        self._next_step = 0
        self._since = time.monotonic()
        self._before = {number: signal.signal(number, self._request) for number in STOP_SIGNALS}

    def release(self) -> None:
        """Give the signals back: nobody asks for an agreement any more."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, _frame: object) -> None:
        self.requested = number

    def after(self, step: int, *, at_once: bool = False) -> bool:
        """Whether all ranks stop after `step`, which never goes down and is alike on every rank.

        Args:
            step: done so far.
            at_once: agree now, and not only when the interval has passed.
        """
        if self._last_step < 0:
            self._last_step = step - 1
        if step < self._next_step and not at_once:
            return False
        now = time.monotonic()
        step_s = (now - self._since) / max(1, step - self._last_step)
        agreement = torch.tensor([float(self.requested is not None), step_s], dtype=torch.float64)
        dist.all_reduce(agreement, op=dist.ReduceOp.MAX)
        stop, slowest_s = agreement.tolist()
        self._since, self._last_step = now, step
        self._next_step = step + max(1, int(self.interval_s / max(slowest_s, 1e-6)))
        return bool(stop)
