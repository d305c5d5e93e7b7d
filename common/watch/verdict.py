"""Which rank did not come, to which collective, and where it is instead, from all ranks' records.

Reads files only: any rank can say it, also of other hosts, and so can the process that started the
ranks.
"""

import json
import math
import re
from collections import Counter, defaultdict
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT

folder: Path | None = None
"""The records of the run of this process, once it is watched."""

ENDED = "the run ended before it could say where its ranks are"
"""The answer to SIGQUIT at the end of a run."""

FRAME = r'File "(.*)", line (\d+) in (.*)'
"""A line of a stack, as faulthandler writes it: file, line, function."""

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


def silence_s(period_s: float) -> float:
    """Time after which a rank that has written nothing, and makes no step, cannot write [s]."""
    return 2 * period_s + 1


def read(logs: Path, rank: int) -> Record:
    """What a rank has written; also `who` it is, and the stack that C wrote (`c_stack`), if any."""
    record: Record = {"host": "an unknown host"}
    with suppress(OSError, ValueError, TypeError):  # not written, or damaged
        record |= json.loads(path(logs, rank).read_text())
        record["written_s"] = path(logs, rank).stat().st_mtime
    with suppress(OSError):
        text = path(logs, rank).with_suffix(".stack").read_text()
        _, *threads = re.split(r"(?m)^(?:Current thread|Thread|Stack) .*\n", text)
        record["c_stack"] = threads[-1].strip("\n") if threads else ""  # the main thread's
    return {**record, "who": f"rank {rank} on {record['host']}"}


def verdict(logs: Path) -> Verdict | None:
    """The rank for which the others wait in a collective; None if the records do not show one."""
    found = [read(logs, rank) for rank in range(read(logs, 0).get("world_size", 0))]
    newest_s = max((record.get("written_s", 0) for record in found), default=0)
    for record in found:  # a rank that lives writes once per period as long as it makes no step
        silent_s = newest_s - record.get("written_s", newest_s)
        if silent_s > silence_s(record.get("period_s", math.inf)):
            record["silent_s"] = silent_s
    waits = {
        rank: calls
        for rank, record in enumerate(found)
        # A stack that only C could write is newer than the calls.
        if (calls := record.get("collectives")) and not record.get("c_stack")
    }
    if not waits:
        return None
    by_number = itemgetter("number")
    first = {rank: min(calls, key=by_number) for rank, calls in waits.items()}
    for rank in [rank for rank in range(len(found)) if rank not in first]:
        # With virtual ranks, each pair is a group: only a call of its own pairs waits for this one.
        need = {
            other: min(calls, key=by_number)
            for other, own in waits.items()
            if (calls := [call for call in own if rank in (call.get("ranks") or [rank])])
        }
        if need:
            waiting = max(need, key=lambda other: need[other]["number"])
            members = need[waiting].get("ranks") or range(len(found))
            more = [other for other in members if other > rank and other not in first]
            return _late(found, rank, waiting, need[waiting], more)
    groups = defaultdict[tuple[str, str], dict[int, Record]](dict)
    for rank, calls in waits.items():
        for backend in {call.get("backend", "") for call in calls}:  # each one counts its own calls
            own = [call for call in calls if call.get("backend", "") == backend]
            call = min(own, key=by_number)
            if call["kind"] not in ("send", "recv"):  # their numbers and kinds need not be equal
                groups[backend, call["group"]][rank] = call
    for first in groups.values():
        ranks = [*first]
        waiting = max(ranks, key=lambda rank: first[rank]["number"])
        number = first[waiting]["number"]
        if behind := [rank for rank in ranks if first[rank]["number"] < number]:
            seen = f"it was last seen in {_call(first[behind[0]])}"
            return _late(found, behind[0], waiting, first[waiting], behind[1:], seen)
        same = {rank: (first[rank]["kind"], str(first[rank]["sizes"])) for rank in ranks}
        usual = Counter(same.values()).most_common(1)[0][0]
        for rank in [rank for rank in ranks if same[rank] != usual]:
            other = next(rank for rank in ranks if same[rank] == usual)
            theirs = f"{found[other]['who']} calls {_call(first[other])}"
            says = f"calls {_call(first[rank])}, while {theirs}: they must be the same"
            return _of(found, rank, says)
    first = {rank: min(calls, key=by_number) for rank, calls in waits.items()}
    waiting = max(first, key=lambda rank: first[rank]["number"])
    call = _call(first[waiting], f", which {found[waiting]['who']} calls")
    if [len(ranks) for ranks in groups.values()] == [len(first)]:
        came = "all ranks" if len(first) == len(found) else f"ranks {', '.join(map(str, first))}"
        says = f"{came} came to {call}: the network between them is cut, or very slow"
    else:
        says = f"each rank waits for another one, as in {call}: the network between them is cut"
        says += ", or very slow, or a rank was stopped"
    return Verdict(-1, "", says, "")


def _late(
    found: list[Record], rank: int, waiting: int, call: Record, more: list[int], seen: str = ""
) -> Verdict:
    """Rank `rank`, and `more`, did not come to the call in which rank `waiting` waits."""
    also = f" (nor did rank {', '.join(map(str, more))})" if more else ""
    where = _call(call, f", which {found[waiting]['who']} calls")
    return _of(found, rank, f"did not come to {where}{also}: {seen or whereabouts(found[rank])}")


def _of(found: list[Record], rank: int, says: str) -> Verdict:
    who, stack = found[rank]["who"], found[rank].get("c_stack", "")
    if not stack and "silent_s" not in found[rank]:
        stack = found[rank].get("stack", "")
    return Verdict(rank, who, says, f"{who} is here (Python stack):\n{stack}" if stack else "")


def _call(collective: Record, by: str = "") -> str:
    return f"{collective['kind']} {collective['number']}{by} at {collective['place']}"


def whereabouts(record: Record) -> str:
    """Where a rank is, in a few words."""
    if found := re.search(FRAME, record.get("c_stack", "")):
        file, line, name = found.groups()
        file = file.removeprefix(f"{ROOT}/")
        return f"it is in C code that keeps the GIL, called at {file}:{line} ({name})"
    if (place := record.get("place")) and (silent_s := record.get("silent_s")):
        return (
            f"it was last seen at {place}, and has been silent for {silent_s:.0f} s: it is "
            "stopped, its host is gone, or the network is cut"
        )
    if place:
        return f"it is at {place}"
    return "it has left no stack: it is stopped, its host is gone, or the network is cut"
