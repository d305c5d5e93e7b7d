"""What ranks tell each other besides gradients."""

import time

import pytest
import torch

from common.errors import InputError
from common.group.collectives import together
from common.group.process_group import process_group
from common.launch.ranks import Ranks
from tests.helpers.pool import Pool, in_group

TIMEOUT_S = 3.0


def long_on_rank_1(ranks: Ranks) -> int:
    def work() -> int:
        if ranks.rank == 1:
            time.sleep(2 * TIMEOUT_S)
        return ranks.rank

    with process_group(ranks, torch.device("cpu"), "gloo", TIMEOUT_S):
        return together(work)


def failing_on_rank_1(ranks: Ranks) -> None:
    def work() -> None:
        if ranks.rank == 1:
            raise InputError("nothing to read")

    together(work)


def test_one_ranks_work_may_take_longer_than_a_collective(pool: Pool) -> None:
    pool.run(in_group, 2, repr)  # imports what a busy machine needs longer than TIMEOUT_S for
    assert pool.run(long_on_rank_1, 2) == [0, 1]


def test_what_one_rank_finds_is_raised_on_all(pool: Pool) -> None:
    with pytest.raises(InputError, match="rank 1: nothing to read"):
        pool.run(in_group, 2, failing_on_rank_1)
