"""How many processor cores there are for threads and processes of ours."""

from __future__ import annotations

import math
import os
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the cores this process may use: a container or `taskset` can leave it fewer."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return int(min(allowed, _cores_of_time()))


def _cores_of_time() -> float:
    """Return for how many cores' time a container on Linux is let run, infinite without a limit.

    Part of a core counts as one. `docker run --cpus` and Kubernetes set it.
    """
    # the second version of control groups, then the first
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            told = " ".join((CONTROL_GROUPS / name).read_text(encoding="ascii") for name in files)
            quota, period = map(int, told.split())
        except (OSError, ValueError):
            # no such file, or no limit: "max 100000"
            continue
        # no limit in the first version is -1
        if quota > 0 and period > 0:
            return math.ceil(quota / period)
    return math.inf
