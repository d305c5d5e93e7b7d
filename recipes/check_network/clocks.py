"""How far the clocks of two hosts are apart.

Source: Mills 1991, "Internet Time Synchronization: the Network Time Protocol".
"""

import time

import torch
import torch.distributed as dist

from common.group.collectives import broadcast


def clock_offset_s(peer: int) -> tuple[float, float]:
    """How far the clock of `peer` is ahead of rank 0's, and the bound of the error [s].

    The bound is half the round trip, so the quickest of several exchanges counts. Every rank calls
    it.
    """
    rank, clock = dist.get_rank(), torch.zeros(1, dtype=torch.float64)
    best = (0.0, float("inf"))
    for _ in range(20):
        if rank == 0:
            sent_s = time.time()
            dist.send(clock, peer)
            dist.recv(clock, peer)
            back_s = time.time()
            offset_s, bound_s = clock.item() - (sent_s + back_s) / 2, (back_s - sent_s) / 2
            best = min(best, (offset_s, bound_s), key=lambda found: found[1])
        elif rank == peer:
            dist.recv(clock, 0)
            clock.fill_(time.time())
            dist.send(clock, 0)
    return broadcast(best)
