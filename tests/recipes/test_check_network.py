"""check_network: its figures mean what they say."""

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.launch.ranks import Ranks
from recipes.check_network import train as check
from tests.helpers.commands import Recipe
from tests.helpers.pool import Pool, in_group


def measured(ranks: Ranks) -> tuple[tuple[float, float], float, list[dict[str, float]]]:
    """Rank 1's clock is 5 s ahead."""
    ahead_s = 5.0 * (ranks.rank == 1)
    clock: Any = SimpleNamespace(time=lambda: time.time() + ahead_s, perf_counter=time.perf_counter)
    module = vars(check)
    module["time"] = clock
    try:
        options, cpu = check.CheckOptions(largest=2, rounds=2), torch.device("cpu")
        return (
            check.clock_offset_s(1),
            check.link_speed(1, options, cpu),
            check.all_reduce_speeds(options, cpu),
        )
    finally:
        module["time"] = time


def test_a_clock_ahead_is_found_within_its_bound(pool: Pool) -> None:
    found = pool.run(in_group, 3, measured)
    (ahead_s, bound_s), speed, sums = found[0]
    assert 0 < bound_s < 5
    assert abs(ahead_s - 5) <= bound_s
    assert speed > 0
    assert [row["bytes"] for row in sums] == [2**20, 2 * 2**20, 8 * 2**20]
    for row in sums:  # three ranks: each link carries 4/3 of the tensor
        expected = row["bytes"] * 4 / 3
        assert abs(row["bus_bytes_per_s"] * row["seconds"] / expected - 1) < 1e-9
    assert all(clock == found[0][0] for clock, _, _ in found), "every rank knows what rank 0 found"


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
