"""How many loading processes: by the CPU cores, by the room in /dev/shm, or the fastest number.

`tune_loader` shows the whole sweep; `--num-workers auto` of a training recipe makes the same one.
"""

import os
import socket
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from common import log
from common.data.datasets import LoaderOptions
from common.data.image_folder import ImageFiles
from common.data.packed import PackedImages
from common.data.stream import Samples
from common.errors import InputError
from common.group.collectives import agreed, broadcast, gather
from common.hints import SHARED_MEMORY_HINT
from common.launch.capacity import cpu_quotas
from common.reading import read_json
from common.terminal import mebibytes
from common.throughput import samples_per_s
from common.writing import write_json

GAIN = 1.05
"""More loading processes must be faster by this factor: a smaller gain is noise."""

MOST_BY_DEFAULT = 16
"""Loading processes per rank. One decodes about 420 photos/s, and ResNet-50 on an H200 takes 4,200
photos/s, 6,200 with --compile. More processes would only cost memory."""

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


def cores_per_rank() -> tuple[int, int]:
    """CPU cores per rank, and the ranks on this host. Calls collectives.

    srun and mpirun can bind each rank to its own cores; otherwise the ranks share the host's. A
    core that three ranks may use counts as a third for each of them.

    Returns:
        The cores of the rank that has the fewest, at least 1; and the number of ranks.
    """
    host, mine = socket.gethostname(), os.sched_getaffinity(0)
    here = [cores for name, cores in gather((host, mine)) if name == host]
    users = Counter(core for cores in here for core in cores)
    cores = min([sum(1 / users[core] for core in mine), *(q / len(here) for q in cpu_quotas())])
    return max(1, int(min(gather(cores)) + 1e-6)), len(here)


def choose_num_workers(
    options: LoaderOptions, samples: Samples, largest: int, device: torch.device
) -> int:
    """Loading processes per rank, the same number on every rank; for "auto" the most to try.

    Args:
        largest: size of the largest batch, which decides what fits into /dev/shm [samples].

    Raises:
        InputError: /dev/shm is too small for the number that the user gave.
    """
    asked = options.num_workers
    if asked == 0 or (asked is None and not isinstance(samples.source, ImageFiles | PackedImages)):
        return 0
    cores, ranks_here = cores_per_rank()
    with agreed():
        room = most_workers(samples, largest, ranks_here)
    most, why = min(gather(room))
    if isinstance(asked, int):
        if asked > most:
            raise InputError(f"--num-workers {asked}: {why}; {SHARED_MEMORY_HINT}")
        if asked > cores:
            log.info(
                f"--num-workers {asked} is more than the CPU cores per rank ({cores}): fewer may "
                f"load faster; --num-workers auto measures it{_more_cores()}"
            )
        return asked
    wanted = cores if asked == "auto" else default_num_workers(cores, device)
    if most < wanted:
        log.info(f"{why}; {SHARED_MEMORY_HINT}")
    if asked is None:
        log.info(f"--num-workers {min(most, wanted)} (CPU cores per rank: {cores}{_more_cores()})")
    return min(most, wanted)


def _more_cores() -> str:
    """How a job of Slurm gets more cores per rank."""
    in_slurm = "SLURM_JOB_ID" in os.environ
    return "; Slurm gives a rank more by --cpus-per-task" if in_slurm else ""


def default_num_workers(cores: int, device: torch.device) -> int:
    """Loading processes for a rank's CPU cores, less the cores that training on a CPU uses."""
    busy = torch.get_num_threads() if device.type == "cpu" else 0
    return max(0, min(cores - busy, MOST_BY_DEFAULT))


def most_workers(
    samples: Samples, batch_size: int, ranks_here: int, free_bytes: int | None = None
) -> tuple[int, str]:
    """The most loading processes per rank whose batches fit into this host's shared memory.

    A loading process hands its batches over in /dev/shm, of which Docker gives a container 64 MB. A
    process that finds it full dies of a bus error. Each process has up to two batches ready, and
    the rank holds two more.

    Args:
        samples: all of about one size.
        batch_size: size of the largest batch that a rank loads [samples].
        ranks_here: ranks on this host.
        free_bytes: free space in /dev/shm. None: ask the system.

    Returns:
        The number, and the reason as a clause for a message.
    """
    if free_bytes is None:
        if not _SHARED_MEMORY.is_dir():
            return sys.maxsize, f"no {_SHARED_MEMORY}"
        if not os.access(_SHARED_MEMORY, os.W_OK):
            return 0, f"{_SHARED_MEMORY} is not writable"
        status = os.statvfs(_SHARED_MEMORY)
        free_bytes = status.f_bavail * status.f_frsize
    sample = tree_leaves(samples.__getitems__([(0, 0)]))
    batch_bytes = batch_size * sum(part.nbytes for part in sample if isinstance(part, Tensor))
    most = max(0, (free_bytes // (batch_bytes * ranks_here) - 2) // 2)
    ranks = "" if ranks_here == 1 else f" on each of {ranks_here} ranks"
    return most, (
        f"{_SHARED_MEMORY} has {mebibytes(free_bytes)} free, and batches of "
        f"{mebibytes(batch_bytes)} leave room for {most} loading processes{ranks}"
    )


def sweep(measure: Callable[[int], float], most: int, cores: int) -> dict[int, float]:
    """What `measure` says [samples/s] of 0, 1, 2, ... loading processes, until two bring nothing.

    Args:
        measure: takes the number of loading processes.
        most: the largest number to try.
        cores: CPU cores of this rank; beyond them the steps are larger.
    """
    speeds: dict[int, float] = {}
    number = 0
    while number <= most and not done(speeds):
        speeds[number] = measure(number)
        number += 1 if number < max(4, cores) else max(2, cores // 2)
    return speeds


def done(speeds: dict[int, float]) -> bool:
    """Whether the last two numbers of loading processes brought nothing."""
    return len(speeds) > 2 and recommend(speeds)[0] not in list(speeds)[-2:]


def recommend(speeds: dict[int, float]) -> tuple[int, str]:
    """The smallest number of loading processes that none beats by more than noise; and why."""
    best = max(speeds, key=lambda number: speeds[number])
    chosen = min(number for number in speeds if speeds[number] * GAIN >= speeds[best])
    why = f"{speeds[chosen] / speeds[0]:.1f} times loading in the training process"
    if chosen == 0:
        why = "loading processes gain nothing here: handing over batches costs the time they save"
    elif chosen == best:
        why = f"the fastest, {why}"
    else:
        why += f"; {best} would be {speeds[best] / speeds[chosen] - 1:.0%} faster, within noise"
    return chosen, why


def fastest_num_workers(
    load: Callable[..., DataLoader[Any]], most: int, device: torch.device, folder: Path
) -> int:
    """The recommended number of loading processes, measured on all ranks at the same time.

    The answer is kept in loader.json in `folder`, and a resumed run reads it there.

    Args:
        load: makes the DataLoader to measure; takes `num_workers`.
        most: the largest number to try, the same on every rank.
        device: this rank's.
        folder: the run's.
    """

    def measure(number: int) -> float:
        own = samples_per_s(partial(load, num_workers=number), device, limit_s=1.0)
        return min(gather(own))  # training waits for the slowest rank

    file, known = folder / "loader.json", {}
    with agreed():
        if dist.get_rank() == 0 and file.is_file():
            known = read_json(file, "num_workers")
    known = broadcast(known)
    if not known:
        speeds = sweep(measure, most, most)
        chosen, why = recommend(speeds)
        known = {"num_workers": chosen, "why": why, "samples_per_s_a_rank": speeds}
        if dist.get_rank() == 0:
            write_json(file, known)
            log.info(f"--num-workers auto: {chosen} ({why})")
    return min(most, int(known["num_workers"]))  # the run may resume on a smaller host
