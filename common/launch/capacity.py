"""How many ranks this machine can hold at most: more are refused before the first one starts."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from common.errors import InputError

RANK_BYTES = 256 * 2**20
"""Memory that a rank shares with no other process, at least. check_network takes 370 MiB."""

RANK_TASKS = 4
"""Threads of a rank, at least, which the kernel counts like processes. check_network has 7."""

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def refuse_more_than_fit(ranks: int) -> None:
    """Raise InputError for more `ranks` than can start here, whatever else this machine does."""
    limits = [
        *((size // RANK_BYTES, says, f"{RANK_BYTES >> 20} MiB") for size, says in _memory()),
        *((number // RANK_TASKS, says, str(RANK_TASKS)) for number, says in _tasks()),
    ]
    fit, says, least = min(limits, default=(ranks, "", ""))
    if ranks > max(1, fit):
        raise InputError(
            f"{ranks} processes do not fit on this host: {says}, and each process needs at least "
            f"{least}: start {max(1, fit)} or fewer"
        )


def memory_limit() -> int | None:
    """Memory that this container or job may use [bytes]; None if it may use all of the host's."""
    limits = [*_of_cgroups("memory", "memory.max", "memory.limit_in_bytes"), *_of_slurm()]
    total = _meminfo().get("MemTotal:", 0) * 2**10
    least = min(limits, default=total)
    return least if least < total else None


def _meminfo() -> dict[str, int]:
    lines = [line.split() for line in (_read(_PROC / "meminfo") or "").splitlines()]
    return {line[0]: int(line[1]) for line in lines}


def _of_slurm() -> Iterator[int]:
    """The memory of a Slurm job on this node [bytes]; 0 would be all of the node's.

    For advice only: a shell may have these variables from another job.
    """
    cores = os.environ.get("SLURM_CPUS_ON_NODE", "1")
    for name, times in (("SLURM_MEM_PER_NODE", "1"), ("SLURM_MEM_PER_CPU", cores)):
        given = os.environ.get(name, "0")
        if given.isdecimal() and times.isdecimal() and int(given):
            yield int(given) * int(times) * 2**20


def _memory() -> Iterator[tuple[int, str]]:
    """Limits of the memory of all ranks [bytes], each in words."""
    kib = _meminfo()
    if "MemAvailable:" not in kib:
        return
    swap = kib.get("SwapFree:", 0) * 2**10
    free = kib["MemAvailable:"] * 2**10 + swap
    yield free, f"{free >> 20} MiB of memory are free"
    for limit in _of_cgroups("memory", "memory.max", "memory.limit_in_bytes"):
        yield limit + swap, f"its control group allows {(limit + swap) >> 20} MiB of memory"


def _tasks() -> Iterator[tuple[int, str]]:
    """Limits of the number of processes and threads, each in words."""
    found = [
        (int(text), f"kernel.{name}")
        for name in ("pid_max", "threads-max")
        if (text := _read(_PROC / "sys" / "kernel" / name))
    ]
    found += [(limit, "its control group") for limit in _of_cgroups("pids", "pids.max", "pids.max")]
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit != resource.RLIM_INFINITY and os.geteuid() != 0:  # root may start more
        found.append((limit, "ulimit -u"))
    for number, who in found:
        yield number, f"{who} allows {number} processes and threads"


def _of_cgroups(controller: str, name: str, name_in_v1: str) -> Iterator[int]:
    """The limits of this process's control group and of the groups around it."""
    for line in (_read(_PROC / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, file = _CGROUPS, name
        elif controller in controllers.split(","):
            root, file = _CGROUPS / controller, name_in_v1
        else:
            continue
        own = Path(path).relative_to("/")  # in a container perhaps a path of the host, not here
        for group in (own, *own.parents):
            text = _read(root / group / file) or "max"
            if text.isdecimal():
                yield int(text)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
