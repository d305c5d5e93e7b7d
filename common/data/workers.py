"""How many loading processes: by what the host has, or measured on the user's own data.

`tune_loader` shows the whole sweep; `--num-workers auto` in a training recipe uses the same code
and remembers its answer in the run's folder.
"""

import json
import logging
import math
import os
import socket
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.data.stream import Key, Samples, make_loader
from common.files import mebibytes, write_json
from common.group.collectives import broadcast, gather
from common.group.devices import synchronize
from common.group.host import cpu_quotas

log = logging.getLogger("recipes")

GAIN = 1.05
"""One more loading process must be worth this much: below it is noise."""

MOST_BY_DEFAULT = 8
"""Loading processes per rank: a core decodes some 600 photos/s, a fast GPU's ResNet-50 takes 3,000.
More cost memory."""

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


def cores_per_rank() -> tuple[int, int]:
    """CPU cores for each rank, the least of all ranks, and the ranks here. Calls collectives.

    Ranks may have cores of their own (srun and mpirun can bind them) or share a host's: a core that
    three ranks may use counts as a third for each.

    Returns:
        Cores of a rank, at least 1, and how many ranks are on this host.
    """
    host, mine = socket.gethostname(), os.sched_getaffinity(0)
    here = [cores for name, cores in gather((host, mine)) if name == host]
    users = Counter(core for cores in here for core in cores)
    cores = min([sum(1 / users[core] for core in mine), *(q / len(here) for q in cpu_quotas())])
    return max(1, int(min(gather(cores)) + 1e-6)), len(here)


def default_num_workers(cores: int, device: torch.device) -> int:
    """Loading processes per rank of so many cores, of which training on a CPU takes its threads."""
    busy = torch.get_num_threads() if device.type == "cpu" else 0
    return max(0, min(cores - busy, MOST_BY_DEFAULT))


def counts(cpu_cores: int) -> Iterator[int]:
    """Numbers of loading processes to try: 0, 1, 2, ... to the cores, then in larger steps."""
    number = 0
    while True:
        yield number
        number += 1 if number < max(4, cpu_cores) else max(2, cpu_cores // 2)


def most_workers(
    samples: Samples, batch_size: int, ranks_here: int, free_bytes: int | None = None
) -> tuple[int, str]:
    """The most loading processes per rank whose batches fit into this host's shared memory.

    A batch goes from its loading process to the rank through /dev/shm, of which Docker gives a
    container 64 MB; a process that finds it full dies of a bus error. Each has up to two batches
    ready, and the rank holds up to two more.

    Args:
        samples: to load, all of one shape.
        batch_size: of the largest batch that a rank loads.
        ranks_here: ranks on this host.
        free_bytes: of /dev/shm; asked where None. A machine without one has no limit.

    Returns:
        The number, and how it comes about, for the user.
    """
    if free_bytes is None:
        if not _SHARED_MEMORY.is_dir():
            return sys.maxsize, f"no {_SHARED_MEMORY}"
        status = os.statvfs(_SHARED_MEMORY)
        free_bytes = status.f_bavail * status.f_frsize
    image, _ = samples[(0, 0)]
    batch_bytes = batch_size * (image.nbytes + 8)
    most = max(0, (free_bytes // (batch_bytes * ranks_here) - 2) // 2)
    ranks = "" if ranks_here == 1 else f" on each of {ranks_here} ranks"
    return most, (
        f"{_SHARED_MEMORY} has {mebibytes(free_bytes)} free, and batches of "
        f"{mebibytes(batch_bytes)} leave room for {most} loading processes{ranks}"
    )


def samples_per_s(
    samples: Samples,
    batches: Sequence[list[Key]],
    device: torch.device,
    *,
    num_workers: int,
    pin_memory: bool,
    limit_s: float = math.inf,
) -> float:
    """Load batches and copy them to the device, as training does but with nothing else to do.

    The loading processes are started before the clock, because they start once a run; and they
    have loaded nothing ahead when it starts, because that would be counted as speed.

    Args:
        samples: to load.
        batches: keys of each batch, two or more.
        device: that the batches are copied to.
        num_workers: loading processes.
        pin_memory: load into page-locked memory.
        limit_s: leave the rest unloaded after this long [s].
    """
    with warnings.catch_warnings():  # more processes than cores are tried on purpose
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        loader = make_loader(samples, list(batches), num_workers=num_workers, pin_memory=pin_memory)
        next(iter(loader))
        iterator = iter(loader)  # takes back what was under way
        count, start_s = 0, time.perf_counter()
        for images, _ in iterator:
            moved: Tensor = images.to(device, non_blocking=True)
            count += len(moved)
            if time.perf_counter() - start_s > limit_s:
                break
        synchronize(device)
        return count / (time.perf_counter() - start_s)


def recommend(speeds: dict[int, float]) -> tuple[int, str]:
    """The smallest number of loading processes that nothing beats by more than noise, and why."""
    best = max(speeds, key=lambda number: speeds[number])
    chosen = min(number for number in speeds if speeds[number] * GAIN >= speeds[best])
    ratio = speeds[chosen] / speeds[0]
    if chosen == 0:
        why = "loading processes gain nothing here: handing batches over costs what they save"
    elif chosen == best:
        why = f"the fastest, {ratio:.1f} times loading in the training process"
    else:
        why = (
            f"{ratio:.1f} times loading in the training process; {best} would be "
            f"{speeds[best] / speeds[chosen] - 1:.0%} faster, within noise"
        )
    return chosen, why


def done(speeds: dict[int, float]) -> bool:
    """Whether the last two numbers of loading processes brought nothing."""
    return len(speeds) > 2 and recommend(speeds)[0] not in list(speeds)[-2:]


def choose_num_workers(
    samples: Samples,
    batches: Sequence[list[Key]],
    device: torch.device,
    pin_memory: bool,
    folder: Path,
    cpu_cores: int,
) -> int:
    """Measure on all ranks at the same time, as they will load in training; every rank calls it.

    Args:
        samples: of the training data.
        batches: this rank's, of one epoch.
        device: of this rank.
        pin_memory: load into page-locked memory.
        folder: of the run, where the answer is kept in loader.json and read again on a resume.
        cpu_cores: of each rank, the same number on all: no more processes are tried.
    """
    file = folder / "loader.json"
    known: Any = broadcast(json.loads(file.read_text()) if file.is_file() else None)
    if known is None:
        speeds: dict[int, float] = {}
        enough = list(batches) * -(-100 // len(batches))  # a small data set several times over
        for number in counts(cpu_cores):
            own = samples_per_s(
                samples, enough, device, num_workers=number, pin_memory=pin_memory, limit_s=1.0
            )
            speeds[number] = min(gather(own))  # training waits for the slowest rank
            if number >= cpu_cores or done(speeds):
                break
        chosen, why = recommend(speeds)
        known = {"num_workers": chosen, "why": why, "samples_per_s_a_rank": speeds}
        if torch.distributed.get_rank() == 0:
            write_json(file, known)
            log.info(f"--num-workers auto: {chosen} ({why})")
    return int(known["num_workers"])
