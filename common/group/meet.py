"""The process group: from ranks to a group that talks, and back to a clean end."""

import datetime
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from common.errors import InputError, StopRequested, TrainingError
from common.group.collectives import gather
from common.group.devices import choose_backend
from common.group.interfaces import choose_interface, interface_names
from common.launch.port import bind, unresolved
from common.launch.ranks import Ranks
from common.launch.report import report

_left: list[dist.ProcessGroup | None] = []

# A master on loopback cannot be reached from another host: no need to wait long to say so.
_LOOPBACK_PATIENCE_S = 20.0

# A rank that cannot begin waits this long for its peers, to tell them. Less than srun's --wait.
_REFUSAL_PATIENCE_S = 15.0


@contextmanager
def process_group(
    ranks: Ranks, device: torch.device, backend: str, timeout_s: float
) -> Iterator[None]:
    """Join the run's process group, and leave it by a clean end.

    A world of one gets a group too, so that a recipe has one code path. After a failure the group
    is left as it is: peers may be gone, and the launcher ends them.

    Args:
        ranks: from `common.launch.ranks.resolve`.
        device: from `choose_device`.
        backend: auto, gloo or nccl.
        timeout_s: how long to wait for a peer, when joining and in a collective.

    Raises:
        InputError: an address that cannot work, a port in use, two NCCL ranks on one GPU, GPUs for
            some ranks only.
        TrainingError: not every rank arrived in time.
    """
    name = choose_backend(backend, device)
    timeout = datetime.timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with gloo_does_not_disturb(name):
        if ranks.world_size == 1:
            store: dist.Store = dist.HashStore()
        else:
            choose_interface(ranks)
            try:
                store = _connect(ranks, timeout_s)
            except InputError as error:
                error.agreed = bool(error.agreed)  # peers that cannot be reached cannot be told
                raise
        dist.init_process_group(
            name, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout
        )
    try:
        if ranks.world_size > 1:
            gpu = device.type == "cuda"
            uuid = str(torch.cuda.get_device_properties(device).uuid) if gpu else ""
            _refuse_unlike_devices(device.type, uuid, nccl="nccl" in name)
        yield
    except BaseException as error:
        if isinstance(error, InputError):
            error.agreed = True  # what one rank alone finds goes through agreed()
        if isinstance(error, StopRequested | InputError):
            _leave()
        raise
    # Rank 0 serves the store: nobody may still be asking it when it leaves.
    dist.barrier()
    _leave()


@contextmanager
def gloo_does_not_disturb(backend: str) -> Iterator[None]:
    """Have gloo's threads, which the block starts, count as background work for the scheduler.

    One of them spins while it waits. Where cores are few it takes one from a rank that computes,
    or keeps a rank's other threads off an idle one until the kernel's next tick, 4 ms. As batch
    work it gives way; nobody needs a right for that. Nothing is done for other backends.

    Source: Linux, sched(7), SCHED_BATCH.
    """
    tasks = Path("/proc/self/task")
    before = set(tasks.glob("*"))
    yield
    for thread in set(tasks.glob("*")) - before if backend == "gloo" else ():
        with suppress(OSError):
            os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def keep_until_exit(group: dist.ProcessGroup | None) -> None:
    """Stay an owner of `group`: see `_leave`."""
    _left.append(group)


def _leave() -> None:
    # Up to torch 2.11 the last owner of a gloo group waits for the group's thread while it holds
    # Python's lock, and that thread may want the lock to drop what the last collective left: a
    # deadlock at the end of one run in some twenty. An owner that stays until exit avoids it.
    keep_until_exit(dist.group.WORLD)
    dist.destroy_process_group()


def refuse_together(error: InputError, ranks: Ranks) -> InputError:
    """Tell the peers what this rank found before it joined the group, and hear what they found.

    They hear it where all ranks meet first, at rank 0's store. So rank 0 shows it once, however
    many ranks found the same, and no rank waits for one that has ended. Where `common.launch`
    started all ranks it does that itself.

    Returns:
        The error that every rank ends with; this rank's own where the peers cannot be told.
    """
    supervised = "RECIPES_ERRORS" in os.environ and not ranks.several_hosts
    if error.agreed is not None or ranks.world_size == 1 or supervised:
        return error
    try:
        _connect(ranks, _REFUSAL_PATIENCE_S, error)
    except Exception as found:  # whatever is wrong with the store, this error is the one to show
        if isinstance(found, InputError) and found.agreed:
            return found
    error.agreed = False
    return error


def _agree_to_begin(store: dist.Store, ranks: Ranks, refusal: InputError | None) -> None:
    """Raise on every rank what any rank brings."""
    brought = [socket.gethostname(), str(refusal or "")]
    store.set(f"ready/{ranks.rank}", json.dumps(brought))
    everybody = range(ranks.world_size)
    found = [json.loads(value) for value in store.multi_get([f"ready/{r}" for r in everybody])]
    who: dict[str, list[str]] = {}
    for rank, (host, message) in enumerate(found):
        if message:
            who.setdefault(message, []).append(f"rank {rank} on {host}")
    if not who:
        return
    if ranks.rank > 0:
        store.set(f"heard/{ranks.rank}", "")
    else:  # the store ends with rank 0
        with suppress(RuntimeError):
            store.wait([f"heard/{r}" for r in everybody[1:]], datetime.timedelta(seconds=5))
    lines = []
    for message, names in who.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        where = "" if len(names) == ranks.world_size else f"{names[0]}{more}: "
        lines.append(f"{where}{message}")
    shared = InputError("; ".join(lines))
    shared.agreed = True
    raise shared


def _connect(ranks: Ranks, timeout_s: float, refusal: InputError | None = None) -> dist.Store:
    address, port = ranks.master_addr, ranks.master_port
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(unresolved(address, error)) from error
    if _several_hosts_on_loopback(ranks):
        timeout_s = min(timeout_s, _LOOPBACK_PATIENCE_S)
    # TCPStore's own time-out does not cover a stranger's server on that port that takes the
    # connection and never answers, and it tries more than once.
    watchdog = threading.Timer(timeout_s + 2, _give_up, (ranks, timeout_s, refusal))
    watchdog.daemon = True
    watchdog.start()
    is_master = ranks.rank == 0 and not ranks.agent_store
    try:
        listen_fd = ranks.listen_fd
        if is_master and listen_fd is None:
            # Of ranks by hand without LOCAL_WORLD_SIZE nobody knows where the others are.
            unknown = ranks.launcher == "torchrun" and "LOCAL_WORLD_SIZE" not in os.environ
            several_hosts = ranks.several_hosts or unknown
            listen_fd = bind(address, port, several_hosts=several_hosts).detach()
        store = dist.TCPStore(
            address,
            port,
            ranks.world_size,
            is_master=is_master,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=not ranks.agent_store,
            master_listen_fd=listen_fd,
        )
        # torchrun's agent keeps its store when it restarts the ranks (static rendezvous), and
        # env:// would then meet the addresses of the dead.
        own = dist.PrefixStore(f"session_{ranks.session}", store)
        _agree_to_begin(own, ranks, refusal)
        return own
    except OSError as error:
        host = socket.gethostname()
        taken = f"port {port} on {host} cannot be taken ({error.strerror}): "
        if "MASTER_PORT" not in os.environ:  # nobody chose it; a restarted job has another
            raise TrainingError(f"{taken}start again, or set MASTER_PORT to a free one") from error
        raise InputError(
            f"{taken}give another MASTER_PORT (or --master-port), or none to have a free one chosen"
        ) from error
    except RuntimeError as error:
        raise _not_met(ranks, timeout_s) from error
    finally:
        watchdog.cancel()


def _not_met(ranks: Ranks, timeout_s: float) -> Exception:
    """Why ranks did not meet at rank 0's address, as far as can be told from here."""
    if _several_hosts_on_loopback(ranks):
        return InputError(
            f"MASTER_ADDR {ranks.master_addr!r} is every host's own loopback, and "
            f"{ranks.world_size} ranks are spread over several hosts: give rank 0's address on "
            "the network between them (ip addr shows it)"
        )
    return TrainingError(
        f"not all {ranks.world_size} ranks met at {ranks.master_addr}:{ranks.master_port} within "
        f"{timeout_s:.0f} s. Was the command started on every host? Can they reach that address "
        "and port (firewall)? Does another program listen there (give another MASTER_PORT)? Is "
        f"the interface right? This host has {', '.join(interface_names()) or 'lo only'}; "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose one."
    )


def _several_hosts_on_loopback(ranks: Ranks) -> bool:
    # As written, not as resolved: Debian's /etc/hosts gives a host's own name 127.0.1.1.
    address = ranks.master_addr
    loopback = address in ("localhost", "::1") or address.startswith("127.")
    return loopback and ranks.several_hosts


def _give_up(ranks: Ranks, timeout_s: float, refusal: InputError | None) -> None:
    error = refusal or _not_met(ranks, timeout_s)
    if isinstance(error, InputError):
        error.agreed = False
    os._exit(report(error, ranks))


def _refuse_unlike_devices(kind: str, gpu: str, *, nccl: bool) -> None:
    """Compare the devices of all ranks.

    Args:
        kind: of this rank's device, cpu or cuda.
        gpu: its UUID.
        nccl: it is NCCL that connects them.
    """
    found = gather((socket.gethostname(), kind, gpu))
    kinds = [kind for _, kind, _ in found]
    if len(set(kinds)) > 1:
        with_one, without = (
            f"rank {(r := kinds.index(k))} on {found[r][0]}" for k in ("cuda", "cpu")
        )
        raise InputError(
            f"{with_one} has a GPU, {without} sees none and would train on the CPU: check the "
            "driver there (nvidia-smi; --gpus all for a container), or give --device cpu to all"
        )
    if nccl and len(set(found)) < len(found):
        raise InputError(
            f"{len(found)} ranks share {len(set(found))} GPUs, which NCCL refuses: start one "
            "process per GPU, or give --backend gloo to practise with several on one"
        )
