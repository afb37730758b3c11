"""Measures what an accelerator reaches through torch: memory bandwidth and arithmetic in the precision of the
weights. Keeps nothing: that is `cost.calibrate`'s.

* bandwidth: the larger of reading an array (a sum) and copying it (bytes read and written), best of several
  passes; the array is far larger than any cache.
* arithmetic: a square matrix product in the given type, best of several passes.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

import torch

from cbviz.specs import DeviceSpec

_PASSES = 8


def name_of(device: torch.device) -> str:
    """The device's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def uuid_of(device: torch.device) -> str:
    """What NVML calls the card, '' where torch does not say: its own numbering need not be that of
    CUDA_VISIBLE_DEVICES.
    """
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"GPU-{found}" if found is not None else ""


def measure(
    device: torch.device,
    dtype: torch.dtype = torch.float16,
    progress: Callable[[float, str], None] | None = None,
    *,
    num_bytes: int = 2 << 30,
    side: int = 8192,
) -> DeviceSpec:
    """Measures (about a second). `num_bytes` and `side`: sizes of array and matrix."""
    tell = progress or (lambda share, text: None)
    tell(0.0, "measuring memory bandwidth")
    a = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    b = torch.empty_like(a)
    bandwidth = max(
        num_bytes / _best(a.sum, device), 2 * num_bytes / _best(functools.partial(b.copy_, a), device)
    )
    del a, b
    tell(0.6, "measuring arithmetic")
    m = torch.full((side, side), 0.5, dtype=dtype, device=device)
    out = torch.empty_like(m)
    flops = 2 * side**3 / _best(lambda: torch.mm(m, m, out=out), device)
    total = float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0.0
    kind = str(dtype).removeprefix("torch.")
    how = (
        f"best read or copy of {num_bytes >> 20} MiB; best {kind} product of {side} x {side}, torch "
        f"{torch.__version__}"
    )
    tell(1.0, "done")
    return DeviceSpec(
        name_of(device),
        total,
        bandwidth,
        flops,
        kind="gpu" if device.type == "cuda" else device.type,
        measured=True,
        source=how,
    )


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the quickest pass; the first two, which warm up, do not count."""
    best = math.inf
    for i in range(_PASSES + 2):
        _wait(device)
        t0 = time.perf_counter()
        work()
        _wait(device)
        if i > 1:
            best = min(best, time.perf_counter() - t0)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


__all__ = ["measure", "name_of", "uuid_of"]
