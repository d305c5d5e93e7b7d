"""Which rank did not come, to which collective, and where it is instead, from all ranks' records.

Reads files only: any rank can say it, also of other hosts, and so can the process that started the
ranks.
"""

import json
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

folder: Path | None = None
"""The records of the run of this process, once it is watched."""

Record = dict[str, Any]


class Verdict(NamedTuple):
    """What the records say about a rank."""

    rank: int
    """The one that did not come; -1: all came."""
    who: str
    """Its number and host."""
    says: str
    """What it did not do, and where it is."""
    stack: str
    """Its Python stack and whose it is; empty if it is not known."""


def path(logs: Path, rank: int) -> Path:
    """The file of a rank's record."""
    return logs / f"rank_{rank}.json"


def records(logs: Path) -> list[Record]:
    """What each rank has written, in rank order."""
    found: list[Record] = []
    while len(found) < (found[0].get("world_size", 0) if found else 1):
        record: Record = {"host": "an unknown host"}
        with suppress(OSError, ValueError, TypeError):  # not written, or damaged
            record |= json.loads(path(logs, len(found)).read_text())
        with suppress(OSError):
            record["c_stack"] = path(logs, len(found)).with_suffix(".stack").read_text()
        found.append(record)
    return found


def verdict(logs: Path | None) -> Verdict | None:
    """The rank for which the others wait in a collective; None if the records do not show one."""
    found = records(logs) if logs else []
    first = {rank: min(waits, key=_number) for rank, r in enumerate(found) if (waits := _waits(r))}
    if not first:
        return None
    absent = [rank for rank in range(len(found)) if rank not in first]
    if absent:
        rank = absent[0]
        waiting = min(first, key=lambda rank: _number(first[rank]))
        named = _named(first[waiting], waiting, found)
        more = f" (nor did rank {', '.join(map(str, absent[1:]))})" if absent[1:] else ""
        return _of(rank, found, f"did not come to {named}{more}: {whereabouts(found[rank])}")
    calls = {rank: (c["group"], c["number"], c["kind"], c["sizes"]) for rank, c in first.items()}
    times = Counter(map(str, calls.values()))
    rank = min(reversed(calls), key=lambda rank: times[str(calls[rank])])
    other = next((r for r in calls if calls[r] != calls[rank]), None)
    if other is None:
        named = _named(first[0], 0, found)
        says = f"all ranks came to {named}: the network between them is cut, or very slow"
        return Verdict(-1, "", says, "")
    theirs = f"rank {other} on {found[other]['host']} calls {_call(first[other])}"
    return _of(rank, found, f"calls {_call(first[rank])}, while {theirs}: they must be the same")


def _of(rank: int, found: list[Record], says: str) -> Verdict:
    who = f"rank {rank} on {found[rank]['host']}"
    stack = c_stack(found[rank]) or found[rank].get("stack", "")
    return Verdict(rank, who, says, f"{who} is here (Python stack):\n{stack}" if stack else "")


def _number(collective: Record) -> int:
    return int(collective["number"])


def _waits(record: Record) -> list[Record]:
    """The collectives that a rank waits for."""
    return [c for c in record.get("collectives", ()) if not c["done"]]


def _call(collective: Record) -> str:
    return "{kind} {number} at {place}".format(**collective)


def _named(collective: Record, rank: int, found: list[Record]) -> str:
    return (
        "{kind} {number}, which ".format(**collective)
        + f"rank {rank} on {found[rank]['host']} calls at {collective['place']}"
    )


def c_stack(record: Record) -> str:
    """The main thread's part of the newest stack that faulthandler wrote, the last one in it."""
    threads = re.split(r"(?m)^(?:Current thread|Thread) .*\n", record.get("c_stack", ""))
    return threads[-1].strip("\n") if len(threads) > 1 else ""


def whereabouts(record: Record) -> str:
    """Where a rank is, in a few words."""
    if stack := c_stack(record):
        file, line, name = re.findall(r'File "(.*)", line (\d+) in (.*)', stack)[0]
        return f"it is in C code that keeps the GIL, called at {file}:{line} ({name})"
    if place := record.get("place"):
        return f"it is at {place}"
    return "it has left no stack: it is stopped, its host is gone, or the network is cut"
