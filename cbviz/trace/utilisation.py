"""How hard the machine worked in a step: achieved bytes and operations a second against its peaks, decode and
prefill apart, and what ran inside.

Owns the definitions and the sentences; knows records and the header's peaks alone. In symbols, for a step of
t seconds:

    bytes/s   = (weights read once + KV read and written) / t      MBU = bytes/s over the peak bandwidth
    FLOP/s    = multiplications and additions / t                  MFU = FLOP/s over the peak rate
    intensity = operations / bytes                                 below peak rate / peak bandwidth reading memory is the limit, above it arithmetic
    roof      = min(peak rate, intensity x peak bandwidth)         no step can be above it
    busy      = seconds in which kernels ran / t                   accelerators only; the rest is the host's gap

Work is counted from shapes (or modelled where the pass was), t is measured (or modelled: then all of it
follows from the model, and says so). A step that computes prompts and decodes together is two points: each
has its own operations and KV, both read the same weights, and they share t.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cbviz.messages import StepProfile, StepRecord
from cbviz.trace.metrics import seconds, work
from cbviz.trace.trace import Trace

PHASES = ("decode", "prefill", "mixed")
"""`mixed`: a step of both whose shares are not known (an imported log)."""


class Phase(NamedTuple):
    """One point under the roof: `moved` bytes, `took` seconds of the step. `alone`: the step did nothing
    else.
    """

    kind: str
    flops: float
    moved: float
    took: float
    alone: bool

    @property
    def intensity(self) -> float:
        return self.flops / self.moved

    @property
    def flops_s(self) -> float:
        return self.flops / self.took


def took(record: StepRecord) -> float:
    """Seconds of the step: the pass' own wall time where it was measured, else t1 - t0."""
    return (
        record.measured_s
        if record.measured_s is not None and record.clock == "measured"
        else record.t1_s - record.t0_s
    )


def phases(record: StepRecord) -> list[Phase]:
    """Decode and prefill of the step, those that it had; none where its work or time is not known."""
    done, t = work(record), took(record)
    if done is None or not record.chunks or t <= 0 or not done[1]:
        return []
    flops, moved = done[0], done[1]
    cost = record.cost
    kinds = {c.kind for c in record.chunks}
    if (
        len(kinds) == 1 or cost is None or not 0 < cost.decode_flops < cost.flops
    ):  # older recordings do not tell the two apart
        return [Phase(kinds.pop() if len(kinds) == 1 else "mixed", flops, moved, t, True)]
    decode = cost.decode_flops / cost.flops
    # A pass that was counted by itself is split in the proportion of the cost model's count.
    kv = record.counted["kv_bytes"] if record.counted and "kv_bytes" in record.counted else cost.kv_bytes
    weights, share = moved - kv, cost.decode_kv_bytes / cost.kv_bytes if cost.kv_bytes else 0.0
    return [
        Phase("decode", decode * flops, weights + share * kv, t, False),
        Phase("prefill", (1 - decode) * flops, weights + (1 - share) * kv, t, False),
    ]


def roof(intensity: float, peak_bytes_s: float, peak_flops_s: float) -> float:
    """Operations a second that no step of this intensity can pass."""
    return min(peak_flops_s, intensity * peak_bytes_s)


def rate(value: float, unit: str) -> str:
    """24.5 GB/s, 1.20 TFLOP/s."""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")):
        if value >= scale or scale == 1.0:
            n = value / scale
            return (
                f"{n:,.0f} {prefix}{unit}"
                if n >= 100
                else f"{n:.1f} {prefix}{unit}"
                if n >= 10
                else f"{n:.2f} {prefix}{unit}"
            )
    raise AssertionError("unreachable")


def basis(trace: Trace, record: StepRecord) -> str:
    """What the figures rest on: `counted work, measured time, measured peaks of ...`."""
    done, h = work(record), trace.header
    peaks = (
        "no known peaks"
        if not (h.peak_bytes_s and h.peak_flops_s)
        else f"{'measured' if h.peaks_measured else 'data-sheet'} peaks of {h.device or 'the device'}"
    )
    return f"{done[2] if done else 'no'} work, {record.clock} time, {peaks}"


def sentences(trace: Trace, step: int) -> list[str]:
    """The step's utilisation in words, the basis first; what is missing, and what to do about it."""
    record, h = trace.record(step), trace.header
    done, t = work(record), took(record)
    if not trace.has("time") or not trace.has("cost") or done is None or t <= 0 or not record.chunks:
        return [
            "the work or the time of this step is not known"
            if record.chunks
            else "this step computed nothing"
        ]
    flops, moved = done[0], done[1]
    if not moved:
        return ["the cost model of this run prices time alone: it counts no bytes and no operations"]
    out = [basis(trace, record)]
    if h.peak_bytes_s and h.peak_flops_s:
        out.append(
            f"{rate(moved / t, 'B/s')} = {moved / t / h.peak_bytes_s:.0%} of the peak "
            f"{rate(h.peak_bytes_s, 'B/s')} (MBU)"
        )
        out.append(
            f"{rate(flops / t, 'FLOP/s')} = {flops / t / h.peak_flops_s:.1%} of the peak "
            f"{rate(h.peak_flops_s, 'FLOP/s')} (MFU)"
        )
        if h.peaks_measured and max(moved / t / h.peak_bytes_s, flops / t / h.peak_flops_s) > 1.02:
            out.append(
                "that is more than the peak: it was measured while something else ran (cbviz calibrate "
                "measures again)"
            )
        ridge = h.peak_flops_s / h.peak_bytes_s
        for p in phases(record):
            top = roof(p.intensity, h.peak_bytes_s, h.peak_flops_s)
            limit = "reading memory" if p.intensity < ridge else "arithmetic"
            also = "" if p.alone else ", beside the other in one step"
            out.append(
                f"{p.kind}: {p.intensity:.3g} operations a byte, so {limit} is the limit; "
                f"{p.flops_s / top:.0%} of the roof there{also}"
            )
    else:
        out.append(
            f"{rate(moved / t, 'B/s')}, {rate(flops / t, 'FLOP/s')}; for shares of the peak, measure them: "
            "cbviz calibrate, then run again"
        )
    out += device_sentences(record)
    return out


def device_sentences(record: StepRecord) -> list[str]:
    """What was measured on an accelerator, if it was."""
    d, out = record.device or {}, []
    if "busy_s" in d:
        gap = d.get("gap_s", 0.0)
        share = d["busy_s"] / (d["busy_s"] + gap) if d["busy_s"] + gap else 0.0
        out.append(
            f"kernels ran {seconds(d['busy_s'])} = {share:.0%} of the step (measured, CUDA events); "
            f"{seconds(gap)} it waited for the host"
        )
    forms = {
        "gpu_share": lambda v: f"a kernel ran in {v:.0%} of the driver's last period",
        "memory_share": lambda v: f"memory was read or written in {v:.0%}",
        "power_w": lambda v: f"{v:.0f} W",
        "clock_hz": lambda v: f"{v / 1e9:.2f} GHz",
        "memory_bytes": lambda v: f"{v / 2**30:.1f} GiB in use",
    }
    sampled = [form(d[key]) for key, form in forms.items() if key in d]
    if sampled:
        out.append("NVML: " + ", ".join(sampled))
    return out


class Ran(NamedTuple):
    """Everything of one name in a profile: how often, and seconds in all."""

    name: str
    times: int
    total_s: float


def totals(p: StepProfile) -> list[Ran]:
    """What ran inside the step by name, the longest first."""
    times: dict[int, list[float]] = {}
    for name, duration in zip(p.name, p.duration_s):
        times.setdefault(name, []).append(duration)
    return sorted(
        (Ran(p.names[n], len(v), math.fsum(v)) for n, v in times.items()), key=lambda r: (-r.total_s, r.name)
    )


def profiled_steps(trace: Trace) -> list[int]:
    """Steps that were watched from inside."""
    return [r.step for r in trace if r.profile is not None]


__all__ = [
    "PHASES",
    "Phase",
    "Ran",
    "basis",
    "device_sentences",
    "phases",
    "profiled_steps",
    "rate",
    "roof",
    "sentences",
    "took",
    "totals",
]
