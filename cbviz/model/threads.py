"""How many threads torch should use here: what the process may really have, not what the machine has.

Owns the reading of container limits. A barrier among more threads than cores waits for a scheduler's slice,
which made single operators 30 to 300 times slower when it was measured; so the quota counts, not the number
of cores.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from cbviz.config import whole_number


def available_cpus(root: Path = Path("/")) -> int:
    """Whole cores this process may use, at least 1: the least of the cores seen, the affinity mask and the
    container's quota (cgroup v2 and v1).

    `root`: where /proc and /sys lie.
    """
    cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cpus = min(cpus, len(os.sched_getaffinity(0)))
    quota = _quota(root)
    return max(1, min(cpus, math.ceil(quota)) if quota is not None else cpus)


def use_available_cpus() -> int:
    """Sets torch's threads to `available_cpus()`, or OMP_NUM_THREADS where the user set it.

    Returns the number.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    count = whole_number(asked) or available_cpus()
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    return count


def _quota(root: Path) -> float | None:
    """Cores that the innermost limiting control group allows, None if there is no limit."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            base = root / "sys/fs/cgroup"
            for folder in _upwards(base, path):
                limit = _read(folder / "cpu.max").split()
                if len(limit) == 2 and limit[0].isdigit():
                    found.append(int(limit[0]) / int(limit[1]))
        elif "cpu" in controllers.split(","):
            for mount in ("cpu", "cpu,cpuacct"):
                for folder in _upwards(root / "sys/fs/cgroup" / mount, path):
                    quota, period = (
                        _read(folder / "cpu.cfs_quota_us").strip(),
                        _read(folder / "cpu.cfs_period_us").strip(),
                    )
                    if quota.isdigit() and period.isdigit():
                        found.append(int(quota) / int(period))
    return min(found, default=None)


def _upwards(base: Path, path: str) -> list[Path]:
    """The group's folder and those above it.

    Inside a container the path of the host's view may not exist; the base then does.
    """
    parts = [p for p in path.split("/") if p not in ("", "..")]
    return [base.joinpath(*parts[:i]) for i in range(len(parts), -1, -1)]


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
