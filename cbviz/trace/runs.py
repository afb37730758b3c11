"""Where runs are kept that were given no name: a folder in the cache, which the explorer uses too.

Knows files and times, not what is in them.

A run of the command line is called `run-...`, and the last 20 of these are kept. It is written there line by
line as it goes, so what a crash leaves can be opened again: `cbviz show` without a name takes the newest.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from cbviz.model import hub

KEEP = 20


def folder() -> Path:
    """The folder of autosaved runs, which need not be there."""
    return hub.cache_path() / "runs"


def new_path(label: str) -> Path:
    """A fresh name for a run; the oldest of these names beyond KEEP are removed to make room.

    `label` says what it is, for whoever lists the folder.

    Raises OSError or ModelError where there is no folder for it and none can be made.
    """
    hub.cache_dir()
    folder().mkdir(exist_ok=True)
    for old in [path for path in recent() if path.name.startswith("run-")][KEEP - 1 :]:
        with suppress(OSError):  # not ours to remove
            old.unlink()
    base = f"run-{time.strftime('%Y%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', label).strip('-')[:60] or 'run'}-{os.getpid()}"
    path, n = folder() / f"{base}.jsonl", 2
    while path.exists():
        path, n = folder() / f"{base}-{n}.jsonl", n + 1
    return path


def recent() -> list[Path]:
    """The autosaved runs, the newest first."""
    found = []
    for path in folder().glob("*.jsonl"):
        try:
            found.append((path.stat().st_mtime_ns, path.name, path))
        except OSError:  # another process removed it just now
            continue
    return [path for _, _, path in sorted(found, reverse=True)]


def last() -> Path | None:
    """The newest autosaved run, None if there is none."""
    return next(iter(recent()), None)
