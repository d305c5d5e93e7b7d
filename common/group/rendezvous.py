"""The rendezvous: all ranks meet at rank 0's store, or all hear why they cannot."""

import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from common.errors import InputError, TrainingError, lacks_thread
from common.git import code_sha256
from common.group.interfaces import interface_names
from common.launch.port import bind, unresolved
from common.launch.ranks import Ranks
from common.launch.report import report, say

# How long a rank that cannot begin waits for its peers, to tell them. Less than srun's --wait.
_REFUSAL_TIMEOUT_S = 15.0

_NOTICE_S = 5.0
"""Ranks that wait for longer than this say so."""


def refuse_together(error: InputError, ranks: Ranks) -> InputError:
    """Exchange the error that this rank found before the rendezvous with those of its peers.

    They meet at rank 0's store. So rank 0 shows each error once, even if many ranks found it, and
    no rank waits for one that has ended. If `common.launch` started all ranks, it does both itself.

    Returns:
        The error that every rank ends with; this rank's own if the peers cannot be reached.
    """
    supervised = "RECIPES_ERRORS" in os.environ and not ranks.several_hosts
    if error.agreed is not None or ranks.world_size == 1 or supervised:
        return error
    try:
        meet(ranks, _REFUSAL_TIMEOUT_S, error)
    except Exception as found:  # whatever is wrong with the store, this error is the one to show
        if isinstance(found, InputError) and found.agreed:
            return found
    error.agreed = False
    return error


def meet(ranks: Ranks, timeout_s: float, refusal: InputError | None = None) -> dist.Store:
    """Meet all other ranks at rank 0's store.

    Raises:
        InputError: what any rank refuses, or ranks that contradict each other, on every rank; an
            address or a port that cannot work.
        TrainingError: not every rank arrived in time.
    """
    address, port = ranks.master_addr, ranks.master_port
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(unresolved(address, error)) from error
    # As written, not as resolved: Debian's /etc/hosts maps a host's own name to 127.0.1.1.
    loopback = address in ("localhost", "::1") or address.startswith("127.")
    if loopback and ranks.several_hosts:
        raise InputError(
            f"MASTER_ADDR {address!r} is every host's own loopback, and {ranks.world_size} ranks "
            "are spread over several hosts: give rank 0's address on the network between them (ip "
            "addr shows it)"
        )
    deadline = time.monotonic() + timeout_s
    # Another program's server may accept the connection and never answer.
    gave_up = refusal or _not_met(ranks, timeout_s)
    watchdog = threading.Timer(timeout_s + 2, _give_up, (gave_up, ranks))
    watchdog.daemon = True
    watchdog.start()
    try:
        store = _open_store(ranks, timeout_s)
        # torchrun's agent keeps its store when it restarts the ranks (static rendezvous). With
        # env://, the new ranks would find the addresses of the old ones.
        own = dist.PrefixStore(f"session_{ranks.session}", store)
        _meet(own, ranks, deadline, timeout_s, refusal)
        return own
    except OSError as error:
        host = socket.gethostname()
        taken = f"port {port} on {host} cannot be taken ({error.strerror}): "
        if "MASTER_PORT" not in os.environ:  # not chosen by the user; a restart takes another
            raise TrainingError(f"{taken}start again, or set MASTER_PORT to a free one") from error
        raise InputError(
            f"{taken}give another MASTER_PORT (or --master-port), or none to have a free one chosen"
        ) from error
    except RuntimeError as error:
        if isinstance(error, TrainingError) or lacks_thread(error):
            raise  # the latter has to do with no other rank
        raise _not_met(ranks, timeout_s) from error
    finally:
        watchdog.cancel()


def _open_store(ranks: Ranks, timeout_s: float) -> dist.TCPStore:
    """Serve the store as rank 0, else connect to it."""
    address, port, listen_fd = ranks.master_addr, ranks.master_port, ranks.listen_fd
    is_master = ranks.rank == 0 and not ranks.agent_store
    if is_master and listen_fd is None:
        # Without LOCAL_WORLD_SIZE, ranks started by hand may be on other hosts.
        unknown = ranks.launcher == "torchrun" and "LOCAL_WORLD_SIZE" not in os.environ
        listen_fd = bind(address, port, several_hosts=ranks.several_hosts or unknown).detach()
    waiting = f"waiting for rank 0 at {address}:{port}, up to {timeout_s:.0f} s"
    notice = threading.Timer(_NOTICE_S if ranks.local_rank == 0 else timeout_s, say, (waiting,))
    notice.daemon = True
    notice.start()
    try:
        return dist.TCPStore(
            address,
            port,
            is_master=is_master,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
    finally:
        notice.cancel()


def _meet(
    store: dist.Store, ranks: Ranks, deadline: float, timeout_s: float, refusal: InputError | None
) -> None:
    """Wait until every rank is there; raise on every rank what any rank refuses.

    Ranks are counted by arrival, so that two processes with the same rank are found.
    """
    mine = {
        "rank": ranks.rank,
        "host": socket.gethostname(),
        "world_size": ranks.world_size,
        "code": code_sha256(),
        "error": str(refusal or ""),
    }
    store.set(f"arrived/{store.add('arrived', 1)}", json.dumps(mine))
    found: list[dict[str, Any]] = []
    notice_s, pause_s, message = time.monotonic() + _NOTICE_S, 0.01, ""
    while True:
        if arrived := range(len(found) + 1, store.add("arrived", 0) + 1):
            found += map(json.loads, store.multi_get([f"arrived/{n}" for n in arrived]))
            message = _contradiction(found)
        if message:
            break
        now_s, refused = time.monotonic(), any(entry["error"] for entry in found)
        if len(found) >= ranks.world_size or (refused and now_s > deadline):
            message = _refusals(found)
            break
        if refused and not refusal:  # the other ranks may take as long to refuse the same
            deadline = min(deadline, now_s + _REFUSAL_TIMEOUT_S)
        if now_s > deadline:
            raise _not_met(ranks, timeout_s, sorted(entry["rank"] for entry in found))
        if ranks.local_rank == 0 and now_s > notice_s:
            notice_s = float("inf")
            say(
                f"waiting for {ranks.world_size - len(found)} of {ranks.world_size} ranks at "
                f"{ranks.master_addr}:{ranks.master_port}, up to {timeout_s:.0f} s"
            )
        pause_s = min(2 * pause_s, 0.5)  # thousands of ranks ask one store
        time.sleep(pause_s)
    if not message:
        return
    end_s = time.monotonic() + 5
    with suppress(RuntimeError):  # the store ends with rank 0, of which there may be two
        store.add("heard", 1)
        while ranks.rank == 0 and store.add("heard", 0) < len(found):
            if time.monotonic() > end_s:
                break
            time.sleep(0.02)
    shared = InputError(message)
    shared.agreed = True
    raise shared


def _contradiction(found: list[dict[str, Any]]) -> str:
    """What two ranks say that cannot both be true; empty if there is nothing."""
    first, hosts = found[0], dict[int, str]()
    for entry in found:
        who, other = (f"rank {e['rank']} on {e['host']}" for e in (entry, first))
        if entry["world_size"] != first["world_size"]:
            return (
                f"{who} is one of {entry['world_size']} processes, {other} one of "
                f"{first['world_size']}: give the same --nproc and --nnodes on every host"
            )
        if entry["code"] != first["code"]:
            return f"{who} runs other code than {other}: give every host the same copy"
        if entry["rank"] in hosts:
            return (
                f"two processes are rank {entry['rank']} ({hosts[entry['rank']]} and "
                f"{entry['host']}): give each host its own --node-rank, each process its own RANK"
            )
        hosts[entry["rank"]] = entry["host"]
    return ""


def _refusals(found: list[dict[str, Any]]) -> str:
    """The errors of all ranks as one message; empty if there is none."""
    who: dict[str, list[str]] = {}
    for entry in sorted(found, key=lambda entry: int(entry["rank"])):
        if entry["error"]:
            who.setdefault(entry["error"], []).append(f"rank {entry['rank']} on {entry['host']}")
    lines = []
    for message, names in who.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(message if len(names) == len(found) else f"{names[0]}{more}: {message}")
    return "; ".join(lines)


def _not_met(ranks: Ranks, timeout_s: float, there: Sequence[int] = ()) -> TrainingError:
    """The error for ranks that did not meet, with what this rank can know about the cause."""
    missing = sorted(set(range(ranks.world_size)) - set(there)) if there else []
    absent = f" (missing: rank {', '.join(map(str, missing))})" if missing else ""
    return TrainingError(
        f"not all {ranks.world_size} ranks met at {ranks.master_addr}:{ranks.master_port} within "
        f"{timeout_s:.0f} s{absent}. Was the command started on every host? Can they reach that "
        "address and port (firewall)? Does another program listen there (give another "
        "MASTER_PORT)? Is the interface right? This host has "
        f"{', '.join(interface_names()) or 'lo only'}; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
        "choose one."
    )


def _give_up(error: Exception, ranks: Ranks) -> None:
    if isinstance(error, InputError):
        error.agreed = False
    os._exit(report(error, ranks))
