"""Light mode: whether this machine has room for the real model, and if not, why.

Knows no widget and loads no torch.

In light mode the explorer begins with recorded tokens (`cbviz.recordings`) or the simulator; the engine
itself is the same.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import suppress
from pathlib import Path

import psutil

NEEDED_BYTES = 0.75e9
"""Free memory below which a kernel with the real model is not begun. docs/teaching.md has what one takes,
measured.
"""
_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def free_bytes() -> float:
    """Memory that this process may still take: what the system has, the container's limit and the hub's
    ($MEM_LIMIT), whichever is least.

    Pages of files count as free: they are given up when somebody needs them.
    """
    free = float(psutil.virtual_memory().available)
    for limit, used, stat in _LIMITS:
        most, now = _number(limit), _number(used)
        if most is not None and now is not None:
            files = next(
                (
                    int(line.split()[1])
                    for line in _text(stat).splitlines()
                    if line.startswith(("inactive_file ", "total_inactive_file "))
                ),
                0,
            )
            free = min(free, most - now + files)
    with suppress(ValueError):
        # A hub's limit holds for all of the user's processes, and only the hub counts them: what this one
        # takes is all that is known here.
        free = min(free, float(os.environ.get("MEM_LIMIT") or "inf") - psutil.Process().memory_info().rss)
    return max(0.0, free)


def reason() -> str:
    """Why the real model should not be begun here, in words; '' if nothing speaks against it."""
    try:
        found = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        found = None
    if found is None:
        return "PyTorch is not installed"
    free = free_bytes()
    if free < NEEDED_BYTES:
        return f"{free / 1e6:,.0f} MB of memory are free, the real model wants {NEEDED_BYTES / 1e6:,.0f}"
    return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text("ascii", "replace")
    except OSError:
        return ""


def _number(path: str) -> float | None:
    text = _text(path).strip()
    return float(text) if text.isdigit() else None
