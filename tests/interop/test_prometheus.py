"""Prometheus text: every line parses, the figures are the trace's, histograms add up."""

from __future__ import annotations

import re

from cbviz.interop.prometheus import BUCKETS, to_prometheus
from cbviz.trace.metrics import PROMETHEUS, latencies, metrics
from tests.golden import golden

LINE = re.compile(r'^([a-zA-Z_:][a-zA-Z0-9_:]*)\{([a-z_]+="(?:[^"\\\n]|\\.)*"(?:,[a-z_]+="(?:[^"\\\n]|\\.)*")*)\} (\S+)$')


def parsed(text: str) -> dict[tuple[str, str], float]:
    out = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.match(r"^# (HELP|TYPE) [a-z0-9_:]+ \S", line)
            continue
        m = LINE.match(line)
        assert m, line
        out[m[1], m[2]] = float(m[3])
    return out


def test_the_figures_are_the_traces() -> None:
    trace = golden()
    lines = parsed(to_prometheus(trace))
    m = metrics(trace)
    label = 'model_name="paper",engine="0"'
    for name, (kind, key) in PROMETHEUS.items():
        if kind != "histogram" and name != "vllm:request_success_total":
            assert lines[name, label] == m[key]
    assert lines["vllm:request_success_total", f'{label},finished_reason="length"'] == 2
    assert lines["vllm:request_success_total", f'{label},finished_reason="stop"'] == 1
    assert lines["vllm:request_success_total", f'{label},finished_reason="abort"'] == 2


def test_histograms_count_every_value_once() -> None:
    trace = golden()
    lines = parsed(to_prometheus(trace))
    label = 'model_name="paper",engine="0",clock="modelled"'
    for name, (kind, key) in PROMETHEUS.items():
        if kind != "histogram":
            continue
        values = latencies(trace)[key]
        counts = [lines[f"{name}_bucket", f'{label},le="{b:g}"'] for b in BUCKETS[key]]
        assert counts == sorted(counts) and counts == [sum(v <= b for v in values) for b in BUCKETS[key]]
        assert lines[f"{name}_bucket", f'{label},le="+Inf"'] == lines[f"{name}_count", label] == len(values)
        assert abs(lines[f"{name}_sum", label] - sum(values)) < 1e-12


def test_a_name_cannot_break_a_line() -> None:
    lines = parsed(to_prometheus(golden(model='a"b\\c\nd')))
    assert any('model_name="a\\"b\\\\c\\nd"' in label for _, label in lines)


def test_without_times_no_latencies() -> None:
    trace = golden(capabilities=["schedule", "tokens"])
    assert "seconds" not in to_prometheus(trace)
    assert "vllm:num_requests_running" in to_prometheus(trace)
