"""Measures what this machine's processor reaches: memory read bandwidth and float32 arithmetic.

Owns `calibration.json` in the cache folder, and keeps there what `model.device_peaks` measured of an
accelerator (a file a device).

Knows no model and no torch. What is measured, and named so wherever it is shown:

* bandwidth: numpy reads an array at least sixteen times the last-level cache, one slice a thread, reduced
  with a bitwise or (one pass, no write); bytes of the array over the best of several passes. Reads only: a
  mix with writes gives less. (At four times the cache a quarter of the array may still lie in it, and the
  figure came out a sixth too high.)
* arithmetic: numpy's BLAS multiplies two float32 matrices of 1,024 x 1,024 with its own threads; 2 n^3
  operations over the best time.

A peak is an upper bound, and other work (or another guest of the same host) can only slow a pass down: so the
best of several passes is taken, and an earlier measurement of the same machine by the same method is kept
where it was quicker, for each figure alone. A share of such a peak is then too low where the machine is busy
now, never too high. `now` in the answer's source says what this measurement alone gave, and
`measure(fresh=True)` forgets the earlier ones. Both figures are what a program reaches, not data-sheet peaks.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
import re
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from cbviz.specs import DeviceSpec

FILE = "calibration.json"
VERSION = 2
_LEAST_PASSES = 5
_LEAST_S = 0.4
_MATRIX = 1024
Progress = Callable[[float, str], None]
"""Called with the share done (0..1) and what is being done."""


def cache_dir() -> Path:
    """CBVIZ_CACHE, else the platform's: the folder that `model.hub` keeps weights in, which this layer may
    not import. Not made here.
    """
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


def measure(progress: Progress | None = None, *, fresh: bool = False) -> DeviceSpec:
    """Measures this machine (one or two seconds) and keeps the result in the cache.

    `kind` is `cpu`, `flops_s` is float32, `measured` is true.

    `fresh`: earlier measurements no longer count. A cache that can't be written is no error: the result is
    returned all the same.
    """
    tell = progress or (lambda share, text: None)
    threads = num_threads()
    tell(0.0, "measuring memory bandwidth")
    num_bytes = array_bytes()
    read_s = _read_time(num_bytes, threads)
    tell(0.7, "measuring float32 arithmetic")
    a = np.full((_MATRIX, _MATRIX), 0.5, dtype=np.float32)
    out = np.empty_like(a)
    multiply_s = _best(lambda: np.matmul(a, a, out=out))
    how = (
        f"best read of {num_bytes >> 20} MiB by {threads} threads; best float32 product of {_MATRIX} x "
        f"{_MATRIX}, numpy {np.__version__}"
    )
    spec = DeviceSpec(
        f"{cpu_name()} ({threads} threads)",
        memory_bytes(),
        num_bytes / read_s,
        2 * _MATRIX**3 / multiply_s,
        kind="cpu",
        measured=True,
        source=how,
    )
    spec = keep(spec, cpu_name(), threads, fresh=fresh)
    tell(1.0, "done")
    return spec


def array_bytes() -> int:
    """Bytes of the array that the bandwidth is measured with."""
    return min(max(16 * _last_level_cache_bytes(), 256 << 20), 512 << 20)


def keep(spec: DeviceSpec, device: str, threads: int = 0, *, fresh: bool = False) -> DeviceSpec:
    """Puts a measurement beside the earlier ones of the same device and returns the best of each figure.

    `spec.source` says how it was measured.
    """
    now = f"{spec.bandwidth_bytes_s / 1e9:,.1f} GB/s, {spec.flops_s / 1e9:,.0f} GFLOP/s"
    earlier = None if fresh else load(device, threads)
    bandwidth, flops = spec.bandwidth_bytes_s, spec.flops_s
    if earlier is not None:
        bandwidth, flops = max(bandwidth, earlier.bandwidth_bytes_s), max(flops, earlier.flops_s)
    today = datetime.date.today().isoformat()
    slower = (bandwidth, flops) != (spec.bandwidth_bytes_s, spec.flops_s)
    spec = dataclasses.replace(
        spec,
        bandwidth_bytes_s=bandwidth,
        flops_s=flops,
        source=f"measured {today}: {spec.source}" + (f"; the best so far, now {now}" if slower else ""),
    )
    _save(spec, device, threads, today)
    return spec


def load(device: str | None = None, threads: int | None = None) -> DeviceSpec | None:
    """The kept measurement of this processor with this number of threads (or of the named accelerator), or
    None: never measured, another machine, or an unreadable file.
    """
    device, threads = (
        device if device is not None else cpu_name(),
        threads if threads is not None else num_threads(),
    )
    try:
        kept = json.loads(file_of(device).read_text(encoding="utf-8"))
        if (kept["version"], kept["cpu"], kept["threads"]) != (VERSION, device, threads):
            return None
        spec = DeviceSpec(**kept["device"])
        return spec if spec.bandwidth_bytes_s > 0 and spec.flops_s > 0 else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def file_of(device: str) -> Path:
    """Where the measurement of a device is kept."""
    return cache_dir() / (
        FILE
        if device == cpu_name()
        else "calibration-" + re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"
    )


def _save(spec: DeviceSpec, cpu: str, threads: int, date: str) -> None:
    kept = {
        "version": VERSION,
        "date": date,
        "cpu": cpu,
        "threads": threads,
        "device": {
            f: getattr(spec, f)
            for f in ("name", "memory_bytes", "bandwidth_bytes_s", "flops_s", "kind", "measured", "source")
        },
    }
    try:
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        # Written aside and moved: several processes of one classroom may measure at once.
        part = folder / f".{FILE}.{os.getpid()}-{secrets.token_hex(4)}.part"
        try:
            part.write_text(json.dumps(kept, indent=1), encoding="utf-8")
            os.replace(part, file_of(cpu))
        finally:  # a full disk or an interrupt: nothing is left lying there
            part.unlink(missing_ok=True)
    except OSError:
        return


def _read_time(num_bytes: int, threads: int, seconds: float | None = None) -> float:
    """Seconds of the quickest read of `num_bytes` by `threads` threads (numpy's reductions release the
    interpreter lock).
    """
    # Ones, not zeros: untouched zero pages may all be one page that stays in the cache.
    slices = np.array_split(np.ones(num_bytes // 8, dtype=np.int64), threads)
    with ThreadPoolExecutor(threads) as pool:
        return _best(lambda: list(pool.map(np.bitwise_or.reduce, slices)), seconds)


def _best(work: Callable[[], object], seconds: float | None = None) -> float:
    """Seconds of the quickest pass; the first, which warms up, does not count."""
    seconds = _LEAST_S if seconds is None else seconds
    work()
    best = math.inf
    begin, passes = time.perf_counter(), 0
    while passes < _LEAST_PASSES or time.perf_counter() - begin < seconds:
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


def bandwidth_now(seconds: float = 0.1) -> float:
    """Bytes a second that this machine reads here and now, the best pass of about `seconds`: for a bench,
    beside what it measures. Nothing is kept.
    """
    return array_bytes() / _read_time(array_bytes(), num_threads(), seconds)


__all__ = [
    "array_bytes",
    "bandwidth_now",
    "cache_dir",
    "cpu_name",
    "file_of",
    "keep",
    "load",
    "measure",
    "memory_bytes",
    "num_threads",
]
