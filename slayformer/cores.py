"""How many processor cores there are for threads and processes of ours."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the cores this process may use: a container or `taskset` can leave it fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
