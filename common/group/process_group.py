"""The process group: joined by all ranks, and destroyed at a clean end."""

import datetime
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.errors import Checked, InputError, StopRequested
from common.group.devices import choose_backend, open_contexts, synchronize
from common.group.interfaces import choose_interface
from common.group.rendezvous import connecting, meet
from common.launch.process import show_messages_to_parent
from common.launch.ranks import Ranks
from common.watch import record


@contextmanager
def process_group(
    ranks: Ranks, device: torch.device, backend: str, timeout_s: float, *, one_device: bool = True
) -> Iterator[None]:
    """Join the run's process group, and destroy it at a clean end.

    A single rank gets a group too, so that a recipe has one code path. After a failure the group
    is not destroyed: peers may be gone, and the launcher ends them.

    Args:
        ranks: of this process.
        device: of this process.
        backend: auto, gloo or nccl.
        timeout_s: how long to wait for a peer: at the rendezvous, while the ranks connect, and in a
            collective.
        one_device: all collectives on GPUs are of tensors on `device`.

    Raises:
        InputError: the address cannot work, the port is in use, two NCCL ranks share a GPU, or only
            some ranks have a GPU.
        TrainingError: not every rank arrived in time.
    """
    name, gpu = choose_backend(backend, device), None
    nccl = "nccl" in name
    if device.type == "cuda":
        torch.cuda.set_device(device)
        open_contexts(device)
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    if nccl:
        show_messages_to_parent()
        _choose_nccl()
    # For `common.watch`. Later versions than torch 2.10 record so many collectives by themselves.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    _in_time.clear()
    with gloo_does_not_disturb(name):
        if ranks.world_size == 1:
            store: dist.Store = dist.HashStore()
        else:
            choose_interface(ranks)
            try:
                store = meet(ranks, timeout_s, gpu=gpu, nccl=nccl)
            except InputError as error:
                error.agreed = bool(error.agreed)  # there is no other way to tell the peers
                raise
            _in_time.append(partial(connecting, store, ranks, timeout_s, nccl=nccl))
        with _connecting("the process group"):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if nccl else name,
                store=store,
                rank=ranks.rank,
                world_size=ranks.world_size,
                timeout=datetime.timedelta(seconds=timeout_s),
                # Without it, nccl2 would guess the GPU; with it, NCCL refuses tensors on others.
                device_id=device if nccl and one_device else None,
            )
        with _connecting("the first all-reduce"):
            _all_reduce(device)
    try:
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
    _meet_at_the_end()
    _leave()


def _meet_at_the_end() -> None:
    """Rank 0 serves the store, so it leaves only after every rank's last request."""
    try:
        dist.barrier()
    except RuntimeError as error:
        # A rank that has left the barrier closes its connections. On a busy machine, gloo says that
        # before this thread has seen that the barrier is over. A rank that died says so itself.
        if "Connection closed by peer" not in str(error):
            raise


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


def _choose_nccl() -> None:
    """Set what NCCL reads when it connects, unless the user has."""
    # From torch 2.15 on, "nccl" is by default a new backend, nccl2, with which DDP would wait for
    # each all-reduce during the backward pass, and which this project's hang reports do not know.
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    if torch.are_deterministic_algorithms_enabled():
        # These add in the switch or the network card, and NVLS in another order at each call:
        # https://github.com/NVIDIA/nccl/issues/1497. torch excludes NVLS only.
        os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree,CollnetDirect,CollnetChain")


_in_time: list[Callable[[str], AbstractContextManager[None]]] = []
"""Of the present process group: `rendezvous.connecting`; empty if the ranks did not meet."""


def _connecting(what: str) -> AbstractContextManager[None]:
    return _in_time[0](what) if _in_time else nullcontext()


def _all_reduce(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Connect the ranks of a group now, not in the first step: NCCL may connect when it is used."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    synchronize(device)


@contextmanager
def making_groups(what: str) -> Iterator[None]:
    """The block in which all ranks make `what`: groups besides that of all ranks.

    Raises:
        TrainingError: not every rank came to it in time.
    """
    with gloo_does_not_disturb(dist.get_backend()), _connecting(what):
        yield


def make_mesh(device: torch.device, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """All ranks as a mesh with named dimensions. A collective.

    In its groups a rank waits as long as in the group of all ranks. By themselves they would wait
    for 30 minutes.
    """
    c10d: Any = dist.distributed_c10d
    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout  # before torch 2.15
    of_all: Any = dist.group.WORLD
    with making_groups("the groups of the mesh"):
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
        for group in mesh.get_all_groups():
            set_timeout(of_all._get_backend(torch.device("cpu")).options._timeout, group)
            _all_reduce(device, group)
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
