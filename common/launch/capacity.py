"""How many ranks this machine can hold at most: more are refused before the first one starts.

And how many CPU cores this process may use.
"""

import os
import resource
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from common.errors import InputError

RANK_BYTES, RANK_BYTES_WITH_CUDA = 224 * 2**20, 320 * 2**20
"""Memory that a rank shares with no other process, at least: with a torch without or with CUDA.

A tenth less than the least that was measured. In control groups, where the pages of the libraries
counted for another group, 1, 2 and 4 ranks of ddp_launch came to their first step (of digits, on
2 cores) from 412, 814 and 1595 MiB on with torch 2.15 for CUDA 13.2, and no start below that did.
2 ranks took 725 MiB with torch 2.10 for CUDA 12.8, and 519 MiB with torch 2.13 without CUDA.
"""

NEEDED = "0.8 GB"
"""Memory of a rank before its first batch, with its libraries, which ranks share (0.79 GB)."""

RANK_TASKS, LAUNCHER_TASKS = 8, 2
"""Least number of threads, which the kernel counts like processes: a rank's, its launcher's.

Where 18 were allowed, 2 ranks of check_network ended well, and with 16 not; ddp_launch needed 22.
With 14 or fewer, one of gloo's threads could not start, and the ranks aborted or waited.
"""

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def refuse_more_than_fit(ranks: int) -> None:
    """Raise InputError for more `ranks` than can start here, whatever else this machine does."""
    needed, swap = rank_bytes(), _meminfo().get("SwapFree:", 0) * 2**10
    limits = [
        *((size // needed, says, f"{needed >> 20} MiB") for size, says in _free_memory(swap)),
        *(((n - LAUNCHER_TASKS) // RANK_TASKS, says, str(RANK_TASKS)) for n, says in _tasks()),
    ]
    fit, says, least = min(limits, default=(ranks, "", ""))
    if ranks > max(1, fit):
        raise InputError(
            f"{ranks} processes do not fit on this host: {says}, and each process needs at least "
            f"{least}: start {max(1, fit)} or fewer"
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
    limits = [*_memory_of_cgroups(), *_of_slurm()]
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


def _free_memory(swap: int) -> Iterator[tuple[int, str]]:
    """What all processes of this host leave to the ranks [bytes], in words too."""
    kib = _meminfo()
    if "MemAvailable:" in kib:
        free = kib["MemAvailable:"] * 2**10 + swap
        yield free, f"{free >> 20} MiB of memory are free"


def _tasks() -> Iterator[tuple[int, str]]:
    """Limits of the number of processes and threads, each in words."""
    found = [
        (int(text), f"kernel.{name}")
        for name in ("pid_max", "threads-max")
        if (text := _read(_PROC / "sys" / "kernel" / name))
    ]
    found += [
        (n, "its control group") for n in _numbers(of_cgroups("pids", "pids.max", "pids.max"))
    ]
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit != resource.RLIM_INFINITY and os.geteuid() != 0:  # root may start more
        found.append((limit, "ulimit -u"))
    for number, who in found:
        yield number, f"{who} allows {number} processes and threads"


def _memory_of_cgroups() -> Iterator[int]:
    return _numbers(of_cgroups("memory", "memory.max", "memory.limit_in_bytes"))


def _numbers(texts: Iterable[str]) -> Iterator[int]:
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
