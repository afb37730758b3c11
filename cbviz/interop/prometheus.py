"""A trace's figures as Prometheus text (exposition format 0.0.4) under vLLM's metric names.

A dashboard made for vLLM can read it. `vllm_metrics` and docs/metrics.md say what each name counts. Times are
the trace's own; a label says whether they are measured or modelled.
"""

from __future__ import annotations

from bisect import bisect_right

from cbviz.config import whole_number
from cbviz.interop.vllm_metrics import NAMES, Definition, bucket_bounds, vllm_metrics
from cbviz.trace.metrics import clock
from cbviz.trace.trace import Cursor, Trace

NO_LIMIT = 10**6
"""Upper end of the token buckets where a trace does not say its max_model_len."""


def to_prometheus(trace: Trace, cursor: Cursor | int | None = None) -> str:
    """The figures up to `cursor` (default: the end) as text, one metric family after the other.

    A figure that the trace does not have is left out.
    """
    found = vllm_metrics(trace, cursor)
    labels = f'model_name="{_escape(trace.header.model)}",engine="0"'
    timed = f'{labels},clock="{clock(trace.records) or trace.header.clock}"'
    max_model_len = whole_number(str(trace.header.config.get("max_model_len", ""))) or NO_LIMIT
    samples: dict[str, list[tuple[str, float]]] = {}
    for sample, value in found.values.items():
        name, _, own = sample.partition("{")
        samples.setdefault(name, []).append((own.removesuffix("}"), value))
    out: list[str] = []
    for name, d in NAMES.items():
        in_seconds = name.endswith("_seconds")
        if d.kind == "histogram" and (trace.has("time") or not in_seconds):
            out += _head(name, d)
            out += _histogram(
                name,
                timed if in_seconds else labels,
                found.observed[name],
                bucket_bounds(name, max_model_len),
            )
        elif name in samples:
            out += _head(name, d)
            out += [
                f"{name}{{{labels}{',' * bool(own)}{own}}} {number(value)}" for own, value in samples[name]
            ]
    return "\n".join(out) + "\n"


def _head(name: str, d: Definition) -> list[str]:
    text = d.vllm + (f" In cbviz: {d.here}." if d.here else "")
    return [f"# HELP {name} {text}", f"# TYPE {name} {d.kind}"]


def _histogram(name: str, labels: str, values: list[float], bounds: tuple[float, ...]) -> list[str]:
    ordered = sorted(values)
    lines = [
        f'{name}_bucket{{{labels},le="{number(bound)}"}} {number(bisect_right(ordered, bound))}'
        for bound in bounds
    ]
    return [
        *lines,
        f'{name}_bucket{{{labels},le="+Inf"}} {number(len(values))}',
        f"{name}_sum{{{labels}}} {number(sum(values))}",
        f"{name}_count{{{labels}}} {number(len(values))}",
    ]


def number(value: float) -> str:
    """A float as Prometheus clients write it: 1.0, 0.025, 1e+06."""
    text = repr(float(value))
    whole, _, fraction = text.partition(".")
    if "e" in text or len(whole) <= 6 or value < 0:
        return text
    digits = f"{whole[1:]}{fraction}".rstrip("0")
    return f"{whole[0]}{'.' * bool(digits)}{digits}e+{len(whole) - 1:02d}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
