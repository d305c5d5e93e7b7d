"""The process group: joined by all ranks, and destroyed at a clean end."""

import datetime
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.errors import Checked, InputError, StopRequested
from common.group.collectives import gather
from common.group.devices import choose_backend
from common.group.interfaces import choose_interface
from common.group.rendezvous import meet
from common.launch.process import show_messages_to_parent
from common.launch.ranks import Ranks
from common.watch import record


@contextmanager
def process_group(
    ranks: Ranks, device: torch.device, backend: str, timeout_s: float
) -> Iterator[None]:
    """Join the run's process group, and destroy it at a clean end.

    A single rank gets a group too, so that a recipe has one code path. After a failure the group
    is not destroyed: peers may be gone, and the launcher ends them. `timeout_s` is how long to wait
    for a peer, at the rendezvous and in a collective.

    Raises:
        InputError: the address cannot work, the port is in use, two NCCL ranks share a GPU, or only
            some ranks have a GPU.
        TrainingError: not every rank arrived in time.
    """
    name = choose_backend(backend, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "nccl" in name:
        show_messages_to_parent()
    # For `common.watch`. Later versions than torch 2.10 record so many collectives by themselves.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    with gloo_does_not_disturb(name):
        if ranks.world_size == 1:
            store: dist.Store = dist.HashStore()
        else:
            choose_interface(ranks)
            try:
                store = meet(ranks, timeout_s)
            except InputError as error:
                error.agreed = bool(error.agreed)  # there is no other way to tell the peers
                raise
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if name == "nccl" else name,
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    try:
        if ranks.world_size > 1:
            gpu = device.type == "cuda"
            uuid = str(torch.cuda.get_device_properties(device).uuid) if gpu else ""
            _refuse_unlike_devices(device.type, uuid, nccl="nccl" in name)
        yield
    except (
        Checked,
        InputError,
        StopRequested,
    ) as error:  # on every rank: see agreed(), StopAgreement, Loop.epochs
        if isinstance(error, InputError):
            error.agreed = True
        _leave()
        raise
    except BaseException:
        record.stop(keep=True)  # the records show how it was when this rank failed
        raise
    # Rank 0 serves the store, so it leaves only after every rank's last request.
    dist.barrier()
    _leave()


@contextmanager
def gloo_does_not_disturb(backend: str) -> Iterator[None]:
    """Make gloo's threads, which the block starts, background work for the scheduler.

    One of them spins while it waits. If cores are few it takes one from a rank that computes, for
    up to 4 ms (the kernel's next tick). As SCHED_BATCH it gives way, and this needs no privilege.

    Source: Linux, sched(7), SCHED_BATCH.
    """
    tasks = Path("/proc/self/task")
    before = set(tasks.glob("*"))
    yield
    for thread in set(tasks.glob("*")) - before if backend == "gloo" else ():
        with suppress(OSError):
            os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def make_mesh(device: torch.device, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """All ranks as a mesh with named dimensions. A collective.

    In its groups a rank waits as long as in the group of all ranks. By themselves they would wait
    for 30 minutes.
    """
    with gloo_does_not_disturb(dist.get_backend()):
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    c10d: Any = dist.distributed_c10d
    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout  # before torch 2.15
    of_all: Any = dist.group.WORLD
    for group in mesh.get_all_groups():
        set_timeout(of_all._get_backend(torch.device("cpu")).options._timeout, group)
    return mesh


def group_for_threads() -> dist.ProcessGroup:
    """One more gloo group of all ranks: two threads cannot share one. A collective."""
    with gloo_does_not_disturb("gloo"):
        group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


_kept: list[dist.ProcessGroup] = []
"""Up to torch 2.11: all groups until the process exits, because their destructor can deadlock.

It waits for the group's thread while it holds the GIL. That thread may need the GIL to free the
last collective's tensors: one run in twenty hung at its end. Later versions release the GIL.
"""


def _leave() -> None:
    record.stop()
    if torch.__version__ < "2.12":  # compared as versions
        _kept.extend(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()


def _refuse_unlike_devices(kind: str, gpu: str, *, nccl: bool) -> None:
    """Raise InputError on every rank if the ranks' devices cannot train together.

    Args:
        kind: of this rank's device, cpu or cuda.
        gpu: UUID of this rank's GPU, or empty.
        nccl: whether NCCL connects the devices.
    """
    found = gather((socket.gethostname(), kind, gpu))
    kinds = [kind for _, kind, _ in found]
    if len(set(kinds)) > 1:
        with_one, without = (
            f"rank {(r := kinds.index(k))} on {found[r][0]}" for k in ("cuda", "cpu")
        )
        raise InputError(
            f"{with_one} has a GPU, {without} sees none and would train on the CPU: check the "
            "driver there (nvidia-smi; --gpus all for a container), or give --device cpu on every "
            "host"
        )
    if nccl and len(set(found)) < len(found):
        raise InputError(
            f"{len(found)} ranks share {len(set(found))} GPUs, which NCCL refuses: start one "
            "process per GPU, or give --backend gloo, with which ranks can share a GPU"
        )
