"""Clocks of several hosts: how far one is ahead, within a bound."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from common.group import clocks
from common.launch.ranks import Ranks
from tests.helpers.pool import Pool, in_group

AHEAD_S = 5.0


def measured(ranks: Ranks) -> tuple[tuple[float, float], float]:
    """Ranks 1 and 2 are on another host, whose clock is ahead."""
    other = ranks.rank > 0
    clock: Any = SimpleNamespace(time=lambda: time.time() + AHEAD_S * other)
    host: Any = SimpleNamespace(gethostname=lambda: "b" if other else "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clocks, "time", clock)
        patch.setattr(clocks, "socket", host)
        return clocks.clock_offset_s(1), clocks.ahead_of_rank_0_s()


def test_a_clock_ahead_is_found_within_its_bound(pool: Pool) -> None:
    found = pool.run(in_group, 3, measured)
    (ahead_s, bound_s), _ = found[0]
    assert 0 < bound_s < AHEAD_S
    assert abs(ahead_s - AHEAD_S) <= bound_s
    assert all(offset == found[0][0] for offset, _ in found), "every rank knows what rank 0 found"
    assert found[0][1] == 0
    assert found[1][1] == found[2][1], "measured once for a host"
    assert abs(found[1][1] - AHEAD_S) < AHEAD_S
