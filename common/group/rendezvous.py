"""The rendezvous: all ranks meet at rank 0's store, or all hear why they cannot."""

import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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

_ANSWER_S = 10.0
"""How long the store has to answer after a time-out, when its rank 0 may be gone or stopped."""

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


def meet(
    ranks: Ranks,
    timeout_s: float,
    refusal: InputError | None = None,
    *,
    gpu: str | None = None,
    nccl: bool = False,
) -> dist.Store:
    """Meet all other ranks at rank 0's store.

    Args:
        ranks: of this process.
        timeout_s: how long to wait for the others.
        refusal: why this rank cannot begin.
        gpu: UUID of this rank's GPU; None if it trains on the CPU.
        nccl: whether NCCL will connect the ranks.

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
    mine = {
        "rank": ranks.rank,
        "host": socket.gethostname(),
        "world_size": ranks.world_size,
        "code": code_sha256(),
        "error": str(refusal or ""),
        "gpu": gpu,
        "nccl": nccl,
    }
    deadline = time.monotonic() + timeout_s
    try:
        # Another program's server may accept the connection and never answer.
        with _ends_after(timeout_s + 2, lambda: refusal or _not_met(ranks, timeout_s), ranks):
            store = _open_store(ranks, timeout_s)
            # torchrun's agent keeps its store when it restarts the ranks (static rendezvous). With
            # env://, the new ranks would find the addresses of the old ones.
            own = dist.PrefixStore(f"session_{ranks.session}", store)
            _meet(own, ranks, deadline, timeout_s, mine)
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


@contextmanager
def connecting(
    store: dist.Store, ranks: Ranks, timeout_s: float, what: str, *, nccl: bool
) -> Iterator[None]:
    """The block, in which all ranks wait for one another, ends in time, or names who is missing.

    By itself, NCCL waits for ever while it connects, and after that its watchdog aborts the process
    and names nobody: a timer comes first. gloo raises an error.

    Raises:
        TrainingError: ranks did not come to this block, or could not connect, within `timeout_s`.
    """
    times = store.add(f"{what}/{ranks.rank}", 1)
    began_s = time.monotonic()

    def not_connected() -> TrainingError:
        return _not_connected(store, ranks, timeout_s, what, times)

    with _ends_after(timeout_s + (0 if nccl else 2), not_connected, ranks):
        try:
            yield
        except RuntimeError as error:
            if time.monotonic() - began_s < timeout_s:
                raise
            raise not_connected() from error


@contextmanager
def _ends_after(seconds: float, error: Callable[[], Exception], ranks: Ranks) -> Iterator[None]:
    """End this process with `error` if the block, which may wait in C++, takes longer."""

    def give_up() -> None:
        found = error()
        if isinstance(found, InputError):
            found.agreed = False
        os._exit(report(found, ranks))

    watchdog = threading.Timer(seconds, give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
        watchdog.join()  # at once, or it ends this process


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
    store: dist.Store, ranks: Ranks, deadline: float, timeout_s: float, mine: dict[str, Any]
) -> None:
    """Wait until every rank is there; raise on every rank what any rank refuses.

    Ranks are counted by arrival, so that two processes with the same rank are found.
    """
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
            message = _refusals(found) or _unlike_devices(found)
            break
        if refused and not mine["error"]:  # the other ranks may take as long to refuse the same
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


def _unlike_devices(found: list[dict[str, Any]]) -> str:
    """Why the devices of all ranks cannot train together; empty if they can."""
    gpus, of_each = [entry["gpu"] for entry in found], dict[bool, str]()
    for entry in sorted(found, key=lambda entry: int(entry["rank"])):
        of_each.setdefault(entry["gpu"] is None, f"rank {entry['rank']} on {entry['host']}")
    if len(of_each) > 1:
        return (
            f"{of_each[False]} has a GPU, {of_each[True]} sees none and would train on the CPU: "
            "check the driver there (nvidia-smi; --gpus all for a container), or give --device cpu "
            "on every host"
        )
    if found[0]["nccl"] and len(set(gpus)) < len(gpus):
        return (
            f"{len(gpus)} ranks share {len(set(gpus))} GPUs, which NCCL refuses: start one process "
            "per GPU, or give --backend gloo, with which ranks can share a GPU"
        )
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


def _not_connected(
    store: dist.Store, ranks: Ranks, timeout_s: float, what: str, times: int
) -> TrainingError:
    """The error for ranks that met and then did not connect; asks the store which did not come."""
    missing = ["rank 0, whose store does not answer"]

    def ask() -> None:
        asked = store.clone()  # another thread may be waiting at `store`
        keys = [f"arrived/{number + 1}" for number in range(ranks.world_size)]
        found = {entry["rank"]: entry["host"] for entry in map(json.loads, asked.multi_get(keys))}
        missing[:] = [
            f"rank {rank} on {host}"
            for rank, host in sorted(found.items())
            if asked.add(f"{what}/{rank}", 0) < times
        ]

    def ask_in_time() -> None:
        with suppress(RuntimeError):
            ask()

    asking = threading.Thread(target=ask_in_time, daemon=True)
    asking.start()
    asking.join(_ANSWER_S)
    if missing:
        return TrainingError(
            f"{', '.join(missing)} did not come to {what} in {timeout_s:.0f} s (--timeout-s): "
            "see its log, and whether it still runs"
        )
    return TrainingError(
        f"all {ranks.world_size} ranks came to {what}, but could not connect in "
        f"{timeout_s:.0f} s (--timeout-s): a firewall must let all ports pass between the hosts; "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface; NCCL_DEBUG=INFO shows more"
    )
