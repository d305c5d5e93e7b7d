"""Which rank did not come, to which collective, and where it is instead, from all ranks' records.

Reads files only: any rank can say it, also of other hosts, and so can the process that started the
ranks.
"""

import json
import re
from collections import Counter
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT

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


def read(logs: Path, rank: int) -> Record:
    """What a rank has written; also `who` it is, and the stack that C wrote (`c_stack`), if any."""
    record: Record = {"host": "an unknown host"}
    with suppress(OSError, ValueError, TypeError):  # not written, or damaged
        record |= json.loads(path(logs, rank).read_text())
    with suppress(OSError):
        text = path(logs, rank).with_suffix(".stack").read_text()
        _, *threads = re.split(r"(?m)^(?:Current thread|Thread) .*\n", text)
        record["c_stack"] = threads[-1].strip("\n") if threads else ""  # the main thread's
    return {**record, "who": f"rank {rank} on {record['host']}"}


def verdict(logs: Path) -> Verdict | None:
    """The rank for which the others wait in a collective; None if the records do not show one."""
    found = [read(logs, rank) for rank in range(read(logs, 0).get("world_size", 0))]
    first = {
        rank: min(waits, key=itemgetter("number"))
        for rank, record in enumerate(found)
        if (waits := record.get("collectives"))
    }
    if not first:
        return None
    alike = itemgetter("kind", "sizes")
    same = {rank: str(alike(call)) for rank, call in first.items()}
    usual = Counter(same.values()).most_common(1)[0][0]
    unlike = [rank for rank in first if same[rank] != usual]
    waiting = max(first, key=lambda rank: first[rank]["number"])
    call = _call(first[waiting], f", which {found[waiting]['who']} calls")
    # Numbers and kinds can be compared within a group only, and not those of send and recv.
    calls, pairs = first.values(), ("send", "recv")
    one_group = len({c["group"] for c in calls}) == 1 and all(c["kind"] not in pairs for c in calls)
    number = first[waiting]["number"]
    behind = [rank for rank in first if one_group and first[rank]["number"] < number]
    if late := [rank for rank in range(len(found)) if rank not in first] + behind:
        rank, *more = late
        also = f" (nor did rank {', '.join(map(str, more))})" if more else ""
        seen = f"it was last seen in {_call(first[rank])}" if rank in first else ""
        says = f"did not come to {call}{also}: {seen or whereabouts(found[rank])}"
    elif not one_group:
        says = f"each rank waits for another one, as in {call}: the network between them is cut"
        return Verdict(-1, "", f"{says}, or very slow, or a rank was stopped", "")
    elif unlike:
        rank, other = unlike[0], next(rank for rank in first if same[rank] == usual)
        theirs = f"{found[other]['who']} calls {_call(first[other])}"
        says = f"calls {_call(first[rank])}, while {theirs}: they must be the same"
    else:
        says = f"all ranks came to {call}: the network between them is cut, or very slow"
        return Verdict(-1, "", says, "")
    who, stack = found[rank]["who"], found[rank].get("c_stack") or found[rank].get("stack", "")
    return Verdict(rank, who, says, f"{who} is here (Python stack):\n{stack}" if stack else "")


def _call(collective: Record, by: str = "") -> str:
    return f"{collective['kind']} {collective['number']}{by} at {collective['place']}"


def whereabouts(record: Record) -> str:
    """Where a rank is, in a few words."""
    if found := re.search(r'File "(.*)", line (\d+) in (.*)', record.get("c_stack", "")):
        file, line, name = found.groups()
        file = file.removeprefix(f"{ROOT}/")
        return f"it is in C code that keeps the GIL, called at {file}:{line} ({name})"
    if place := record.get("place"):
        return f"it is at {place}"
    return "it has left no stack: it is stopped, its host is gone, or the network is cut"
