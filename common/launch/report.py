"""Failures: a rank reports its error, and the process that started the ranks shows the cause."""

import contextlib
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common import hints, log, run_status
from common.errors import (
    STATUS_BAD_INPUT,
    STATUS_FAILED,
    STATUS_FINISHED,
    STATUS_STOPPED,
    InputError,
    PeerError,
    SampleError,
    TrainingError,
)
from common.launch.capacity import memory_limit
from common.launch.ranks import Ranks
from common.masking import printable
from common.watch import verdict


def say_stopped(number: int) -> None:
    """Say that a stop signal came when there was nothing to save."""
    say(f"stopped by {signal.Signals(number).name} while it did not train")


def say(text: str) -> None:
    """Write to stderr at once."""
    with contextlib.suppress(OSError):  # the terminal is gone, or its disk is full
        print(printable(text.rstrip(), keep="\n\t"), file=sys.stderr, flush=True)


def note(status: int) -> None:
    """Leave a rank's status for slurm/job.sh: Slurm tells only the highest, perhaps of a peer."""
    if path := os.environ.get("RECIPES_STATUS"):
        with contextlib.suppress(OSError), Path(path).open("a") as file:
            file.write(f"{status}\n")


def report(error: Exception, ranks: Ranks) -> int:
    """Show `error`, or leave it for the process that started this rank; return the exit status."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)  # no bar without it
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()  # else the error would begin behind the bar
    expected = isinstance(error, InputError | TrainingError)
    if isinstance(error, InputError):
        note(STATUS_BAD_INPUT)
    follows = isinstance(error, PeerError) or (not expected and hints.follows(error))
    status = STATUS_BAD_INPUT if isinstance(error, InputError) else STATUS_FAILED
    timed_out = follows and hints.timed_out(error)
    found = verdict.verdict(verdict.folder) if timed_out and verdict.folder else None
    line = _error_line(error, ranks, f"{found.who} {found.says}".strip() if found else "")
    own = expected and not isinstance(error, SampleError)  # else it is in the user's code
    trace = "" if own else "".join(traceback.format_exception(error))
    trace = found.stack if found and found.stack else trace
    elastic = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if elastic and follows:
        time.sleep(1)  # torchrun ends this rank, which then says nothing
    if "RECIPES_ERRORS" in os.environ:
        entry = {
            "rank": ranks.rank,
            "time": time.monotonic(),
            "line": line,
            "traceback": trace,
            "status": status,
            "follows": follows,
            "timed_out": timed_out,
        }
        if not leave(entry):
            say(f"{line}\n{trace}")
    elif isinstance(error, InputError) and error.agreed and not _speaks(ranks, elastic):
        time.sleep(1)  # mpirun and torchrun end all ranks when the first one ends
    elif not isinstance(error, PeerError):
        say(f"{line}\n{trace}")
    # Last, because the run's folder may be on a disk that does not answer.
    _keep(f"{line}\n{trace}".rstrip())
    run_status.failed(error, line)
    if elastic and not follows and not isinstance(error, InputError):
        # torchrun shows the first failure; of two within a second, that of the lower rank.
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error
        except Exception:  # it records the exception that is being handled
            get_error_handler().record_exception(error)
    return status


def _keep(text: str) -> None:
    """Write what ended this rank into its log in the run's folder, if it has one by now."""
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, text, (), None)
    for handler in log.handlers:
        if isinstance(handler, logging.FileHandler) and handler.stream:
            with contextlib.suppress(OSError):  # the disk is full
                handler.stream.write(f"{handler.format(record)}\n")
                handler.flush()


def _speaks(ranks: Ranks, elastic: str | None) -> bool:
    """Whether this rank shows an error that every rank raises.

    It is rank 0. Under torchrun it is the first rank of each host, because torchrun may end rank 0
    before that speaks: the first one makes a file in the folder of this host's error files.
    """
    if not elastic:
        return ranks.is_main
    try:
        (Path(elastic).parents[1] / "shown").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return ranks.is_main
    return True


def _error_line(error: Exception, ranks: Ranks, verdict: str = "") -> str:
    """What happened, on which rank and host, and what to do, or the `verdict` on who caused it."""
    text = str(error)
    if "in DataLoader worker process" in text:  # a DataLoader puts the traceback in front
        text = text.strip().splitlines()[-1].split(": ", 1)[-1]
    message = printable(" ".join(text.split())) or type(error).__name__
    if not isinstance(error, InputError | TrainingError):
        advice = verdict or hints.hint(f"{type(error).__name__} {message}")
        message = f"{_shortened(message)}: {advice}" if advice else message
    if isinstance(error, InputError) and (error.agreed is not False or ranks.is_main):
        return f"error: {message}"  # the same on every rank
    return f"error: rank {ranks.rank} on {socket.gethostname()}: {message}"


def _shortened(message: str) -> str:
    """What NCCL said, or the first sentence of a long torch message without its source file."""
    if found := re.search(r"^NCCL error.*Last error: (.+)", message):
        return f"NCCL: {found[1]}"
    places = r"^\[(enforce fail at )?\S+\.(cc|cpp):\d+\] | (Search for `cuda|CUDA kernel errors).*"
    message = re.sub(places, "", message)
    return re.sub(r"(?<!e\.g)\. .*", "", message) if len(message) > 160 else message.rstrip(".")


def leave(entry: dict[str, Any]) -> bool:
    """Leave an entry for the process that started this rank; False if there is none."""
    try:
        with Path(os.environ.get("RECIPES_ERRORS", "/")).open("a") as file:
            file.write(json.dumps(entry) + "\n")
    except OSError:  # nobody started this rank, or that process is gone
        return False
    return True


def read_entries(errors: Path) -> list[dict[str, Any]]:
    """What the ranks have left."""
    entries = []
    for text in errors.read_text().splitlines():
        with contextlib.suppress(ValueError):  # a rank was killed while it wrote
            entries.append(json.loads(text))
    return entries


def begin_work() -> None:
    """Tell the launcher that this rank works; if it ends before `end_work`, it has failed.

    This is so even with status 0 or 75, as after `sys.exit()` in a user's code.
    """
    leave({"pid": os.getpid(), "works": True})


def end_work() -> None:
    """Tell that process that this rank is finished, or was asked to stop."""
    leave({"pid": os.getpid(), "works": False})


def still_works(pid: int, errors: Path) -> bool:
    """Whether a rank that has ended called `begin_work` and not `end_work`: its code called exit.

    Nothing is known of a rank that left nothing, because it could not, or ended before its work.
    """
    marks = [entry["works"] for entry in read_entries(errors) if entry.get("pid") == pid]
    return bool(marks and marks[-1])


def records_of(entries: list[dict[str, Any]]) -> Path | None:
    """The folder of the ranks' records (`common.watch`), once they have left it."""
    return next((Path(entry["watched"]) for entry in entries if "watched" in entry), None)


def answered(errors: Path, ranks: Sequence[int], since_s: float) -> bool:
    """Whether this host's ranks wrote down where they are after `since_s` (monotonic), or cannot.

    Before they begin to train they do not listen yet.
    """
    logs = records_of(read_entries(errors))
    return not logs or all(verdict.read(logs, r).get("asked_s", 0) >= since_s for r in ranks)


def show_whereabouts(errors: Path, ranks: Sequence[int]) -> None:
    """Say where this host's ranks are, and which rank the others wait for, if they wait."""
    if not (logs := records_of(read_entries(errors))):
        say("the ranks have not begun to train")
        return
    for record in (verdict.read(logs, rank) for rank in ranks):
        step = record.get("step", "?")
        say(f"{record['who']}, step {step}: {verdict.whereabouts(record)}")
    elsewhere = set(range(verdict.read(logs, 0).get("world_size", 0))) - set(ranks)
    if any("step" not in verdict.read(logs, rank) for rank in elsewhere):
        return  # other hosts' ranks were not asked: that they left nothing does not tell anything
    if late := verdict.verdict(logs):
        say(f"{late.who} {late.says}\n{late.stack}".strip())


def show_cause(
    failed: Sequence[tuple[int, int]],
    silent: dict[int, str],
    errors: Path,
    said: str = "",
    early: Sequence[int] = (),
) -> int:
    """Show the failure that caused the others; return the exit status of the run.

    Args:
        failed: rank and exit status (negative: a signal) of the ranks that ended, in that order.
        silent: ranks that had to be killed because they did not end, and what each was doing.
        errors: file with the ranks' reports.
        said: what the ranks' libraries wrote to stderr.
        early: ranks that ended with status 0 or 75 while they still worked.
    """
    entries = read_entries(errors)
    stopped = all(status == STATUS_STOPPED for _, status in failed) and not early
    if stopped and (failed or not any("line" in entry for entry in entries)):
        return STATUS_STOPPED if failed else STATUS_FINISHED
    waited, lost = (_who_said(text, said) for text in (hints.WAITED, hints.LOST))
    evidence = _Evidence(failed, silent, early, entries, waited, lost - waited)
    rules = (_killed, _early, _own_error, _mute, _late, _hung, _aborted)
    found = (rule(evidence) for rule in rules)
    line, status = next(filter(None, found), None) or _follower(evidence)
    say(line)
    for entry in evidence.entries:
        if "inode" in entry and status == STATUS_FAILED:
            said_first = line.strip().splitlines()[0]
            arguments = Path(entry["run"]), entry["inode"], said_first
            # The disk may not answer: this process ends all the same.
            writes = threading.Thread(target=run_status.correct, args=arguments, daemon=True)
            writes.start()
            writes.join(10)
    return status


def _who_said(text: str, said: str) -> set[int]:
    """The ranks whose library said that; torch puts [Rank 0] or [... Rank 0] or [rank0] before."""
    return {int(rank) for rank in re.findall(rf"(?i)\[[^]\n]*rank ?(\d+)\].*(?:{text})", said)}


@dataclass(frozen=True)
class _Evidence:
    """What is known of this host's ranks after a failure."""

    failed: Sequence[tuple[int, int]]
    silent: dict[int, str]
    early: Sequence[int]
    entries: list[dict[str, Any]]
    waited: set[int]
    """Ranks whose NCCL watchdog spoke: each waited too long for another rank."""
    lost: set[int]
    """Ranks whose NCCL said that another rank is gone."""

    @cached_property
    def reports(self) -> list[dict[str, Any]]:
        """The ranks' errors, the first one first."""
        return sorted((e for e in self.entries if "line" in e), key=lambda entry: entry["time"])

    @cached_property
    def own(self) -> dict[str, Any] | None:
        """The first error that is not about another rank."""
        return next((entry for entry in self.reports if not entry["follows"]), None)

    @property
    def abort(self) -> int | None:
        """The status of ranks that NCCL aborted, if something else explains that."""
        explained = self.own or self.waited or self.lost or self.early
        return -signal.SIGABRT if explained else None

    @property
    def hung(self) -> dict[int, str]:
        """Ranks that did not come to a collective, and what each was doing."""
        aborted = {r: "its own message is above" for r, s in self.failed if s == self.abort}
        return {
            r: doing
            for r, doing in (aborted | self.silent).items()
            if r not in self.waited | self.lost
        }


def _here(rank: int) -> str:
    return f"rank {rank} on {socket.gethostname()}"


# Each rule takes one failure for the cause of the others, and says why: the message and the run's
# exit status, or None where there is no such failure. The first rule that finds one counts.


def _killed(seen: _Evidence) -> tuple[str, int] | None:
    """A killed rank reports nothing, and its peers report that it is gone."""
    for rank, status in seen.failed:
        if status < 0 and status != seen.abort:
            what = f"{_here(rank)} was killed by {signal.Signals(-status).name}"
            said = hints.with_hint(what)
            if status == -signal.SIGKILL and (limit := memory_limit()):
                said = (
                    f"{what}: perhaps out of memory: this container or job may use "
                    f"{limit >> 20} MiB: give it more, or start fewer ranks"
                )
            # On a new line, because a progress bar may be on this one.
            return f"\nerror: {said}", STATUS_FAILED
    return None


def _early(seen: _Evidence) -> tuple[str, int] | None:
    """A rank that called exit reports nothing, and its peers report that it is gone."""
    for rank in seen.early:
        what = f"{_here(rank)} ended too early (status {dict(seen.failed)[rank]})"
        return f"\nerror: {hints.with_hint(what)}", STATUS_FAILED
    return None


def _own_error(seen: _Evidence) -> tuple[str, int] | None:
    """A rank that failed by itself reports that, and NCCL aborts its peers."""
    own = seen.own
    return (f"{own['line']}\n{own['traceback']}", int(own["status"])) if own else None


def _mute(seen: _Evidence) -> tuple[str, int] | None:
    """A rank that failed before it could report has printed its message itself."""
    reported = {entry["rank"] for entry in seen.reports}
    for rank, status in seen.failed:
        if status > 0 and status != STATUS_STOPPED and rank not in reported:
            line = f"error: {_here(rank)} exited with status {status}; its message is above"
            return line, STATUS_BAD_INPUT if status == STATUS_BAD_INPUT else STATUS_FAILED
    return None


def _late(seen: _Evidence) -> tuple[str, int] | None:
    """The ranks' records tell which one did not come to which collective."""
    logs = records_of(seen.entries)
    if not logs or not (seen.waited or any(entry["timed_out"] for entry in seen.reports)):
        return None
    late = verdict.verdict(logs)
    if not late or not (seen.waited or late.rank in {*dict(seen.failed), *seen.silent}):
        return None
    state = seen.silent.get(late.rank, "waiting")
    doing = f" stopped answering ({state}): it" if state != "waiting" else ""
    return f"error: {f'{late.who}{doing} {late.says}'.strip()}\n{late.stack}", STATUS_FAILED


def _hung(seen: _Evidence) -> tuple[str, int] | None:
    """A rank here without a watchdog's message, or one that computes or is stopped."""
    first, busy = [*seen.reports, None][0], set(seen.silent.values()) != {"waiting"}
    if not seen.hung or not (seen.waited or not first or (first["timed_out"] and busy)):
        return None
    rank, state = max(seen.hung.items(), key=lambda item: item[1] != "waiting")
    line = (
        f"error: {_here(rank)} stopped answering ({state}); the other ranks waited --timeout-s "
        "for it"
    )
    return line, STATUS_FAILED


def _aborted(seen: _Evidence) -> tuple[str, int] | None:
    """NCCL aborted ranks here because of one on another host, which hangs or is gone."""
    if seen.hung or not (seen.waited or (seen.lost and not seen.reports)):
        return None
    gone = "NCCL: remote process exited or there was a network error"
    rank, what = (min(seen.waited), hints.WATCHDOG) if seen.waited else (min(seen.lost), gone)
    return f"error: {hints.with_hint(f'{_here(rank)}: {what}')}", STATUS_FAILED


def _follower(seen: _Evidence) -> tuple[str, int]:
    """Else the cause is on another host, or a rank waits for a peer that does not answer."""
    ranks = ", ".join(map(str, seen.silent))
    still = f" (rank {ranks} here went on waiting)" if seen.silent else ""
    first = seen.reports[0]
    return f"{first['line']}{still}\n{first['traceback']}", STATUS_FAILED
