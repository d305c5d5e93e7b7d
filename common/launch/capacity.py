"""What this host, container or job has: memory, and CPU cores."""

import os
from collections.abc import Iterator
from pathlib import Path

from common.errors import InputError

RANK_BYTES = 224 * 2**20
"""The least memory that a rank needs for itself, without the libraries that ranks share [bytes]."""

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def refuse_more_than_fit(ranks: int) -> None:
    """Raise InputError for more `ranks` than can start here, whatever else this machine does."""
    kib = _meminfo()
    free = kib.get("MemAvailable:", ranks * RANK_BYTES // 2**10) * 2**10
    free = min([free, *_memory_of_cgroups()]) + kib.get("SwapFree:", 0) * 2**10
    if ranks > (fit := max(1, free // RANK_BYTES)):
        raise InputError(
            f"{ranks} processes do not fit here: {free >> 20} MiB of memory are free, and each "
            f"needs at least {RANK_BYTES >> 20} MiB: start {fit} or fewer"
        )


def memory_limit() -> int | None:
    """Memory that this container or job may use [bytes]; None if it may use all of the host's."""
    total = _meminfo().get("MemTotal:", 0) * 2**10
    least = min(_memory_of_cgroups(), default=total)
    return least if least < total else None


def _meminfo() -> dict[str, int]:
    lines = [line.split() for line in (_read(_PROC / "meminfo") or "").splitlines()]
    return {line[0]: int(line[1]) for line in lines}


def _memory_of_cgroups() -> Iterator[int]:
    texts = of_cgroups("memory", "memory.max", "memory.limit_in_bytes")
    return (int(text) for text in texts if text.isdecimal())  # not "max"


def of_cgroups(controller: str, name: str, name_in_v1: str) -> Iterator[str]:
    """The limits of this process's control group and of those around it, as they are written."""
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
            if text := _read(root / group / file):
                yield text


def usable_cores() -> int:
    """CPU cores in the affinity mask, or fewer if a control group limits CPU time [cores]."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *cpu_quotas()])))


def cpu_quotas() -> Iterator[float]:
    """CPU time that each control group (version 2) of this process allows [cores]."""
    for text in of_cgroups("cpu", "cpu.max", "cpu.max"):  # version 1 has no such file
        quota, period = text.split()
        if quota != "max":
            yield int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
