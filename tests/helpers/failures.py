"""What failed ranks leave and say."""

from typing import Any

from common import hints

LATE = RuntimeError("Timed out waiting 6000ms for recv operation to complete")


def said(rank: int, error: Exception | str, time_s: float = 0.0) -> dict[str, Any]:
    """What a rank leaves."""
    known = error if isinstance(error, Exception) else ValueError(error)
    return {
        "rank": rank,
        "time": time_s,
        "line": f"error: rank {rank}: {error}",
        "traceback": "",
        "status": 1,
        "follows": hints.follows(known),
        "timed_out": hints.timed_out(known),
    }


# As torch 2.6 and later say it on each rank that waits, before they abort it (sgl-project/sglang
# #1693 shows one that waited); the last line is of a rank that hears of it from another rank.
WAITED = """\
[rank{rank}]:[E1016 03:31:38.928019586 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught \
collective operation timeout: WorkNCCL(SeqNum=9141, OpType=ALLREDUCE, NumelIn=19008, \
NumelOut=19008, Timeout(ms)=600000) ran for 600071 milliseconds before timing out.
[rank{rank}]:[E1016 03:31:38.929246900 ProcessGroupNCCL.cpp:627] [Rank {rank}] To avoid data \
inconsistency, we are taking the entire process down.
"""
