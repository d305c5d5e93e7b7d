"""How many ranks this machine can hold at most: more are refused before the first one starts.

And how many CPU cores this process may use.
"""

import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from common.errors import InputError

RANK_BYTES, RANK_BYTES_WITH_CUDA = 224 * 2**20, 320 * 2**20
"""The least memory that a rank needs for itself, with a torch built without or with CUDA [bytes].

Libraries, which ranks share, are not in it. Measured: a rank of ddp_launch (torch 2.15) reached its
first step with a tenth more, and with no less.
"""

NEEDED = "0.8 GB"
"""Memory of a rank before its first batch, with its libraries, which ranks share (0.79 GB)."""

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def refuse_more_than_fit(ranks: int) -> None:
    """Raise InputError for more `ranks` than can start here, whatever else this machine does."""
    needed, kib = rank_bytes(), _meminfo()
    swap = kib.get("SwapFree:", 0) * 2**10
    free = kib.get("MemAvailable:", 0) * 2**10 + swap
    if ranks > max(1, free // needed) and "MemAvailable:" in kib:
        raise InputError(
            f"{ranks} processes do not fit on this host: {free >> 20} MiB of memory are free, and "
            f"each process needs at least {needed >> 20} MiB: start {max(1, free // needed)} or "
            "fewer"
        )
    limit = min(_memory_of_cgroups(), default=None)
    if limit is not None and limit + swap < ranks * needed:
        raise InputError(too_little_memory(limit + swap, ranks))


def too_little_memory(limit: int, ranks: int = 0) -> str:
    """What to say of a limit [bytes] that is too small for `ranks` (0: of an unknown number)."""
    who = {0: "each rank needs", 1: "one rank needs"}.get(ranks, f"each of {ranks} ranks needs")
    return (
        f"this container or job may use {limit >> 20} MiB, and {who} about {NEEDED} before its "
        f"first batch: give it more{'' if ranks == 1 else ', or start fewer ranks'}"
    )


@cache
def rank_bytes() -> int:
    """Memory that a rank of this environment's torch shares with no other, at least [bytes]."""
    torch = find_spec("torch")  # imports nothing
    lib = Path(torch.origin or "").parent / "lib" if torch else Path()
    return RANK_BYTES_WITH_CUDA if (lib / "libtorch_cuda.so").exists() else RANK_BYTES


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
