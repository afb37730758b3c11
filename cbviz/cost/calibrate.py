"""Measures what this machine's processor reaches: memory read bandwidth and float32 arithmetic. Owns `calibration.json` in the cache folder.

Knows no model and no torch. What is measured, and named so wherever it is shown:

* bandwidth: numpy reads an array at least four times the last-level cache, one slice a thread, reduced with a bitwise or (one pass, no write);
  bytes of the array over the best of several passes. Reads only: a mix with writes gives less.
* arithmetic: numpy's BLAS multiplies two float32 matrices of 1,024 x 1,024 with its own threads; 2 n^3 operations over the best time.

The best of several is taken, and an earlier measurement of the same machine is kept where it was quicker:
other work can only slow a pass down. Both are what a program reaches, not data-sheet peaks.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from cbviz.config import DeviceSpec

FILE = "calibration.json"
VERSION = 1
_LEAST_PASSES = 5
_LEAST_S = 0.4
_MATRIX = 1024
Progress = Callable[[float, str], None]
"""Called with the share done (0..1) and what is being done."""


def cache_dir() -> Path:
    """CBVIZ_CACHE, else the platform's: the folder that `model.hub` keeps weights in, which this layer may not import. Not made here."""
    if named := os.environ.get("CBVIZ_CACHE"):
        return Path(named).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "cbviz" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cbviz"


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    lines = (_read("/proc/cpuinfo") or "").splitlines()
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def num_threads() -> int:
    """Cores this process may use: its affinity, and a control group's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = (_read("/sys/fs/cgroup/cpu.max") or "").split()
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
        cores = min(cores, math.ceil(int(quota[0]) / int(quota[1])))
    return max(1, cores)


def memory_bytes() -> float:
    """Memory this process may use, 0 if the system does not say."""
    total = 0
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = (_read("/sys/fs/cgroup/memory.max") or "").strip()
    return float(min(total, int(limit)) if limit.isdigit() and total else total)


def measure(progress: Progress | None = None) -> DeviceSpec:
    """Measures this machine (about a second) and keeps the result in the cache. `kind` is `cpu`, `flops_s` is float32, `measured` is true.

    A cache that can't be written is no error: the result is returned all the same.
    """
    tell = progress or (lambda share, text: None)
    threads = num_threads()
    tell(0.0, "measuring memory bandwidth")
    num_bytes = min(max(4 * _last_level_cache_bytes(), 128 << 20), 512 << 20)
    read_s = _read_time(num_bytes, threads)
    tell(0.7, "measuring float32 arithmetic")
    a = np.full((_MATRIX, _MATRIX), 0.5, dtype=np.float32)
    out = np.empty_like(a)
    multiply_s = _best(lambda: np.matmul(a, a, out=out))
    bandwidth, flops = num_bytes / read_s, 2 * _MATRIX**3 / multiply_s
    if (earlier := load()) is not None:
        bandwidth, flops = max(bandwidth, earlier.bandwidth_bytes_s), max(flops, earlier.flops_s)
    name = cpu_name()
    today = datetime.date.today().isoformat()
    spec = DeviceSpec(f"{name} ({threads} threads)", memory_bytes(), bandwidth, flops, kind="cpu", measured=True,
                      source=f"measured {today}: best read of {num_bytes >> 20} MiB by {threads} threads; best float32 product of {_MATRIX} x {_MATRIX}, numpy {np.__version__}")
    _save(spec, name, threads, today)
    tell(1.0, "done")
    return spec


def load() -> DeviceSpec | None:
    """The kept measurement of this processor with this number of threads, or None: never measured, another machine, or an unreadable file."""
    try:
        kept = json.loads((cache_dir() / FILE).read_text(encoding="utf-8"))
        if (kept["version"], kept["cpu"], kept["threads"]) != (VERSION, cpu_name(), num_threads()):
            return None
        spec = DeviceSpec(**kept["device"])
        return spec if spec.bandwidth_bytes_s > 0 and spec.flops_s > 0 else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _save(spec: DeviceSpec, cpu: str, threads: int, date: str) -> None:
    kept = {"version": VERSION, "date": date, "cpu": cpu, "threads": threads,
            "device": {f: getattr(spec, f) for f in ("name", "memory_bytes", "bandwidth_bytes_s", "flops_s", "kind", "measured", "source")}}
    try:
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        # Written aside and moved: several processes of one classroom may measure at once.
        handle, part = tempfile.mkstemp(dir=folder, prefix=FILE)
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            json.dump(kept, f, indent=1)
        os.replace(part, folder / FILE)
    except OSError:
        return


def _read_time(num_bytes: int, threads: int) -> float:
    """Seconds of the quickest read of `num_bytes` by `threads` threads (numpy's reductions release the interpreter lock)."""
    # Ones, not zeros: untouched zero pages may all be one page that stays in the cache.
    slices = np.array_split(np.ones(num_bytes // 8, dtype=np.int64), threads)
    with ThreadPoolExecutor(threads) as pool:
        return _best(lambda: list(pool.map(np.bitwise_or.reduce, slices)))


def _best(work: Callable[[], object]) -> float:
    """Seconds of the quickest pass; the first, which warms up, does not count."""
    work()
    best = math.inf
    begin, passes = time.perf_counter(), 0
    while passes < _LEAST_PASSES or time.perf_counter() - begin < _LEAST_S:
        t0 = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - t0)
        passes += 1
    return best


def _last_level_cache_bytes() -> int:
    text = (_read("/sys/devices/system/cpu/cpu0/cache/index3/size") or "").strip()
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 0)
    return int(text[:-1]) * unit if unit and text[:-1].isdigit() else 0


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


__all__ = ["cache_dir", "cpu_name", "load", "measure", "memory_bytes", "num_threads"]
