"""This file says how many of the host's cores this process may really use: more threads than that
wait for each other. It does not know what they compute.
"""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(root: Path = CGROUP) -> int:
    """Cores of the affinity mask, or fewer under a quota of CPU time (a container's)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(count or 1, cores_quota(root) or 1 << 16))


def cores_quota(root: Path) -> int | None:
    """The quota in cores, rounded up; None if there is none (version 2, then 1)."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:  # "max", or -1
        return None
    return -(-int(quota) // int(period)) or None
