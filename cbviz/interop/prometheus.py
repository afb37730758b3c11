"""A trace's figures as Prometheus text (exposition format 0.0.4) under vLLM's metric names, so that a dashboard made for vLLM reads them. Knows the trace and that format.

What vLLM counts differently is said in the HELP line; times are the trace's own, and whether they are measured or modelled stands in a label.
"""

from __future__ import annotations

from cbviz.trace.metrics import METRICS, PROMETHEUS, clock, latencies, metrics
from cbviz.trace.state import NORMAL_ENDS
from cbviz.trace.trace import Cursor, Trace

_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
BUCKETS: dict[str, tuple[float, ...]] = {"ttft_s": _TTFT, "itl_s": _SECONDS, "tpot_s": _SECONDS, "e2e_s": _REQUEST, "queue_time_s": _REQUEST}
"""Upper bounds of vLLM's histograms, in seconds (vllm/v1/metrics/loggers.py)."""
_TITLES = {"ttft_s": "Time to first token", "itl_s": "Inter-token latency", "tpot_s": "Time per output token after the first",
           "e2e_s": "End-to-end latency", "queue_time_s": "Time in the queue"}


def to_prometheus(trace: Trace, cursor: Cursor | int | None = None) -> str:
    """The figures up to `cursor` (default: the end) as text, one metric family after the other; a figure that the trace does not have is left out."""
    m = metrics(trace, cursor)
    values = latencies(trace, cursor)
    labels = f'model_name="{_escape(trace.header.model)}",engine="0"'
    timed = f'{labels},clock="{clock(trace.records) or trace.header.clock}"'
    out: list[str] = []
    for name, (kind, key) in PROMETHEUS.items():
        if kind == "histogram":
            if trace.has("time"):
                _head(out, name, kind, f"{_TITLES[key]} in seconds.")
                _histogram(out, name, timed, values[key], BUCKETS[key])
            continue
        if m[key] is None:
            continue
        _head(out, name, kind, f"{METRICS[key].title[:1].upper()}{METRICS[key].title[1:]}.")
        if name == "vllm:request_success_total":
            ends = [r.finish_reason for r in trace.state(cursor).by_index if r.finished]
            for reason in (*NORMAL_ENDS, *sorted({e for e in ends if e not in NORMAL_ENDS and not e.startswith("refused")})):
                out.append(f'{name}{{{labels},finished_reason="{_escape(reason)}"}} {ends.count(reason)}')
        else:
            out.append(f"{name}{{{labels}}} {_number(m[key])}")
    return "\n".join(out) + "\n"


def _head(out: list[str], name: str, kind: str, text: str) -> None:
    out += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _histogram(out: list[str], name: str, labels: str, values: list[float], bounds: tuple[float, ...]) -> None:
    for bound in bounds:
        out.append(f'{name}_bucket{{{labels},le="{bound:g}"}} {sum(v <= bound for v in values)}')
    out += [f'{name}_bucket{{{labels},le="+Inf"}} {len(values)}', f"{name}_sum{{{labels}}} {_number(sum(values))}", f"{name}_count{{{labels}}} {len(values)}"]


def _number(value: float) -> str:
    return repr(float(value)) if isinstance(value, float) else str(value)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
