"""check_network: its figures mean what they say."""

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.launch.ranks import Ranks
from recipes.check_network import clocks
from recipes.check_network import train as check
from tests.helpers.commands import Recipe
from tests.helpers.pool import Pool, in_group


def measured(_ranks: Ranks) -> tuple[float, list[dict[str, float]]]:
    options, cpu = check.CheckOptions(largest=2, rounds=2), torch.device("cpu")
    return check.link_speed(1, options, cpu), check.all_reduce_speeds(options, cpu)


def test_speeds_are_what_their_names_say(pool: Pool) -> None:
    speed, sums = pool.run(in_group, 3, measured)[0]
    assert speed > 0
    assert [row["bytes"] for row in sums] == [2**20, 2 * 2**20, 8 * 2**20]
    for row in sums:  # three ranks: each link carries 4/3 of the tensor
        expected = row["bytes"] * 4 / 3
        assert abs(row["bus_bytes_per_s"] * row["seconds"] / expected - 1) < 1e-9


AHEAD_S = 5.0


def offset(ranks: Ranks) -> tuple[float, float]:
    """Of rank 1, whose clock is ahead."""
    clock: Any = SimpleNamespace(time=lambda: time.time() + AHEAD_S * (ranks.rank == 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clocks, "time", clock)
        return clocks.clock_offset_s(1)


def test_a_clock_ahead_is_found_within_its_bound(pool: Pool) -> None:
    found = pool.run(in_group, 3, offset)
    ahead_s, bound_s = found[0]
    assert 0 < bound_s < AHEAD_S
    assert abs(ahead_s - AHEAD_S) <= bound_s
    assert found[1:] == [found[0]] * 2, "every rank knows what rank 0 found"


@pytest.mark.slow
def test_check_network_by_its_command_line(recipe: Recipe) -> None:
    result = recipe("check_network", "--largest", "1", "--rounds", "1").assert_ok()
    found = json.loads((result.folder / "network.json").read_text())
    assert [rank for rank, _ in enumerate(found["ranks"])] == [0, 1]
    assert found["links_of_rank_0"] == {}, "one host"
    assert "world_size 2" in result.stdout
    assert "bus MiB/s" in result.stdout
    again = recipe("check_network")
    assert again.status == 2
    assert "already holds network.json" in again.errors[0]
