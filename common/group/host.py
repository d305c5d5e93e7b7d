"""What of this host this process may use: CPU cores, and the limits of its control groups."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def usable_cores() -> int:
    """CPU cores of its affinity mask, or fewer where the container may use less time [cores]."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *cpu_quotas()])))


def cpu_quotas() -> Iterator[float]:
    """What this process's control groups allow [cores]."""
    for limit in control_group_limits("cpu.max"):
        quota, period = limit.split()
        yield int(quota) / int(period)


def control_group_limits(name: str) -> Iterator[str]:
    """What the file `name` says in this process's group and those above it (version 2)."""
    with suppress(OSError):
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].strip("/")
        group = Path("/sys/fs/cgroup") / own
        for path in (group, *group.parents):
            if (path / name).is_file():
                text = (path / name).read_text()
                if not text.startswith("max"):
                    yield text
