"""What runs inside one pass: the parts of the compiled CPU pass by its own marks, else every operator and
kernel as torch's profiler sees it.

Owns the clocks and the shape of a `StepProfile`; knows no step and no request. The compiled pass is timed by
itself (it costs nothing that could be seen); under torch's profiler a pass takes longer than it does
otherwise, and `total_s` says how long it took then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from cbviz.messages import StepProfile

T = TypeVar("T")
Span = tuple[str, float, float, int]
"""Name, start and duration in seconds from the beginning of the pass, lane."""
MOST_SPANS = 4000
"""A pass of more operators keeps the longest: a trace is for people."""


def watch(run: Callable[[], T], whole: Any, device: torch.device) -> tuple[T, StepProfile]:
    """Calls `run` once and tells what ran inside.

    `whole`: the decoder's pass in one call, or None. Raises what `run` raises.
    """
    if hasattr(whole, "marking"):
        return _by_marks(run, whole)
    return _by_torch(run, device)


def _by_marks(run: Callable[[], T], whole: Any) -> tuple[T, StepProfile]:
    from cbviz.model.cpu_pass import PARTS

    whole.marks, whole.marking = [], True
    begin = time.perf_counter()
    try:
        out = run()
    finally:
        whole.marking = False
    total = time.perf_counter() - begin
    spans: list[Span] = []
    if whole.marks:
        at = max(0.0, whole.began_s - begin)
        spans.append(("before the pass: checks, tables", 0.0, at, 0))
        last = 0.0
        for part, end in whole.marks:
            spans.append((PARTS[part], at + last, end - last, 0))
            last = end
        spans.append(("after the pass: choice of tokens, ledger", at + last, max(0.0, total - at - last), 0))
    return out, profile(
        "the compiled pass's own clock", spans, ["One pass, its parts in turn, each on all threads"], total
    )


def _by_torch(run: Callable[[], T], device: torch.device) -> tuple[T, StepProfile]:
    from torch.profiler import ProfilerActivity, record_function
    from torch.profiler import profile as torch_profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with torch_profile(activities=activities) as watched, record_function(_PASS):
        begin = time.perf_counter()
        out = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        total = time.perf_counter() - begin
    spans, lanes = from_events(watched.events() or ())
    return out, profile("torch.profiler: slower than an unwatched pass", spans, lanes, total)


_PASS = "cbviz pass"


def from_events(events: Iterable[Any]) -> tuple[list[Span], list[str]]:
    """Spans and lanes of torch's profiler events: operators of the host that no other holds, and each
    stream's kernels and copies in a lane of its own.
    """
    listed = list(events)
    outer = next((e for e in listed if e.name == _PASS and "CUDA" not in str(e.device_type)), None)
    begin, end = (
        (outer.time_range.start, outer.time_range.end)
        if outer is not None
        else (min((e.time_range.start for e in listed), default=0.0), float("inf"))
    )
    host: list[Span] = []
    streams: dict[Any, list[Span]] = {}
    covered = begin
    for e in sorted(listed, key=lambda e: (e.time_range.start, -e.time_range.end)):
        start, stop = e.time_range.start, e.time_range.end
        if e.name == _PASS or stop <= start:
            continue
        span = (e.name, (start - begin) * 1e-6, (stop - start) * 1e-6)
        if "CUDA" in str(e.device_type):
            streams.setdefault(getattr(e, "device_resource_id", 0), []).append((*span, 0))
        elif (
            start >= covered and start < end and e.thread == (outer.thread if outer is not None else e.thread)
        ):
            host.append((*span, 0))
            covered = stop
    lanes = ["Operators, as the host calls them"]
    spans = host
    for n, (stream, ran) in enumerate(sorted(streams.items()), 1):
        lanes.append(f"Kernels on the device, stream {stream}")
        spans += [(name, start, duration, n) for name, start, duration, _ in ran]
    return spans, lanes


def profile(source: str, spans: list[Span], lanes: list[str], total_s: float) -> StepProfile:
    """The spans as a record holds them, in the order of their start; of too many the longest."""
    if len(spans) > MOST_SPANS:
        spans = sorted(spans, key=lambda s: -s[2])[:MOST_SPANS]
        source += f"; the {MOST_SPANS:,} longest"
    spans = sorted(spans, key=lambda s: (s[1], s[3]))
    names = list(dict.fromkeys(s[0] for s in spans))
    place = {name: i for i, name in enumerate(names)}
    return StepProfile(
        source,
        names,
        [place[s[0]] for s in spans],
        [round(s[1], 9) for s in spans],
        [round(s[2], 9) for s in spans],
        [s[3] for s in spans],
        lanes,
        total_s,
    )


__all__ = ["from_events", "profile", "watch"]
