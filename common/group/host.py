"""What this process may use of its host: CPU cores, and the limits of its control groups."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def usable_cores() -> int:
    """CPU cores in the affinity mask, or fewer if a control group limits CPU time [cores]."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *cpu_quotas()])))


def cpu_quotas() -> Iterator[float]:
    """CPU time that each control group (version 2) of this process allows [cores]."""
    name = "cpu.max"
    with suppress(OSError):
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].strip("/")
        group = Path("/sys/fs/cgroup") / own
        for path in (group, *group.parents):
            if (path / name).is_file():
                quota, period = (path / name).read_text().split()
                if quota != "max":
                    yield int(quota) / int(period)
