"""The time of a run over all its starts: which share of it made steps that count?

A snapshot has the time that was spent until then. What came after it, until the last line of
metrics, is done again. A start that left no snapshot is not known.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.watch.clock import STEP


def last_sign(folder: Path) -> float:
    """When a run's metrics changed for the last time [s, Unix]; 0 if there are none.

    Not its logs: a start that is refused writes there, too.
    """
    with suppress(OSError):
        return (folder / "metrics.jsonl").stat().st_mtime
    return 0.0


class History:
    """Seconds of each kind on rank 0, over all starts of a run until now.

    The first start is the first one that left a snapshot.
    """

    def __init__(self, signs: float) -> None:
        """`signs` is the folder's `last_sign` before this start wrote into it."""
        self._began, self._signs = time.time(), signs
        self._first, self._spent_s = self._began, dict[str, float]()

    def go_on(self, before: Mapping[str, Any]) -> None:
        """Begin after the starts that a snapshot tells of."""
        self._first, self._spent_s = float(before["first"]), dict(before["spent_s"])
        ended = min(max(self._signs, before["until"]), self._began)
        # again: steps that were lost. between: no process ran.
        lost = {"again": ended - before["until"], "between": self._began - ended}
        for kind, more_s in lost.items():
            self._spent_s[kind] = self._spent_s.get(kind, 0.0) + max(0.0, more_s)

    def until_now(self, spent_s: Mapping[str, float]) -> dict[str, Any]:
        """What a snapshot keeps, from the seconds of each kind since this start."""
        kinds = [*spent_s, *(self._spent_s.keys() - spent_s.keys())]
        sums = {kind: spent_s.get(kind, 0.0) + self._spent_s.get(kind, 0.0) for kind in kinds}
        return {"first": self._first, "until": time.time(), "spent_s": sums}

    def summary(self, spent_s: Mapping[str, float]) -> dict[str, Any]:
        """`goodput`, the share of the time since the first start that made steps that count.

        After several starts also `all_starts_s`, the seconds of each kind.
        """
        now = self.until_now(spent_s)
        steps_s = sum(now["spent_s"][kind] for kind in STEP)
        # The clock may have been set back since the first start.
        whole_s = max(now["until"] - now["first"], sum(now["spent_s"].values()), 1e-9)
        found = {"goodput": round(steps_s / whole_s, 4)}
        if not self._spent_s:
            return found
        in_order = sorted(now["spent_s"].items(), key=lambda pair: -pair[1])
        return found | {"all_starts_s": {kind: round(own_s, 3) for kind, own_s in in_order}}
