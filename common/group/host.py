"""What this process may use of its host: CPU cores, and the limits of its control groups."""

import os
from collections.abc import Iterator

from common.launch.capacity import of_cgroups


def usable_cores() -> int:
    """CPU cores in the affinity mask, or fewer if a control group limits CPU time [cores]."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *cpu_quotas()])))


def cpu_quotas() -> Iterator[float]:
    """CPU time that each control group (version 2) of this process allows [cores]."""
    for text in of_cgroups("cpu", "cpu.max", "cpu.max"):  # version 1 has no such file
        quota, period = text.split()
        if quota != "max":
            yield int(quota) / int(period)
