"""Prometheus text: every line parses, histograms add up, nothing is ever taken back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cbviz.interop.prometheus import number, to_prometheus
from cbviz.interop.vllm_metrics import NAMES, bucket_bounds, vllm_metrics
from cbviz.messages import RequestSpec, Sampling
from cbviz.session import Session
from cbviz.trace import Trace
from tests.golden import golden

LINE = re.compile(
    r'^([a-zA-Z_:][a-zA-Z0-9_:]*)\{([a-z_]+="(?:[^"\\\n]|\\.)*"(?:,[a-z_]+="(?:[^"\\\n]|\\.)*")*)\} (\S+)$'
)
LABELS = 'model_name="paper",engine="0"'


def parsed(text: str) -> dict[tuple[str, str], float]:
    out = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.match(r"^# (HELP|TYPE) [a-z0-9_:]+ \S", line)
            continue
        m = LINE.match(line)
        assert m, line
        assert (m[1], m[2]) not in out, line
        out[m[1], m[2]] = float(m[3])
    return out


def test_figures_of_the_golden_run() -> None:
    lines = parsed(to_prometheus(golden()))

    def of(name: str, label: str = "") -> float:
        return lines[f"vllm:{name}", f"{LABELS},{label}" if label else LABELS]

    assert (of("num_requests_running"), of("num_requests_waiting"), of("kv_cache_usage_perc")) == (0, 0, 0)
    assert (of("prompt_tokens_total"), of("generation_tokens_total")) == (10 + 10 + 12 + 6, 4 + 4 + 2 + 1)
    assert (of("prefix_cache_queries_total"), of("prefix_cache_hits_total"), of("num_preemptions_total")) == (
        10 + 10 + 12 + 6,
        8,
        1,
    )
    assert [of("request_success_total", f'finished_reason="{reason}"') for reason in ("length", "stop")] == [
        2,
        1,
    ]
    assert (
        of("request_success_total", 'finished_reason="abort"') == 0
    )  # as in vLLM: a client's abort is no finished request
    assert (of("request_prompt_tokens_sum"), of("request_prompt_tokens_count")) == (10 + 10 + 12, 3)


def test_histograms_count_every_value_once() -> None:
    trace = golden()
    lines = parsed(to_prometheus(trace))
    found = vllm_metrics(trace).observed
    for name, d in NAMES.items():
        if d.kind != "histogram":
            continue
        label = LABELS + (',clock="modelled"' if name.endswith("_seconds") else "")
        values = found[name]
        bounds = bucket_bounds(name, int(trace.header.config["max_model_len"]))
        counts = [lines[f"{name}_bucket", f'{label},le="{number(b)}"'] for b in bounds]
        assert counts == sorted(counts) and counts == [sum(v <= b for v in values) for b in bounds]
        assert lines[f"{name}_bucket", f'{label},le="+Inf"'] == lines[f"{name}_count", label] == len(values)
        assert abs(lines[f"{name}_sum", label] - sum(values)) < 1e-12


def test_a_name_cannot_break_a_line() -> None:
    lines = parsed(to_prometheus(golden(model='a"b\\c\nd')))
    assert any('model_name="a\\"b\\\\c\\nd"' in label for _, label in lines)


def test_without_times_no_latencies() -> None:
    text = to_prometheus(golden(capabilities=["schedule", "tokens"]))
    assert "_seconds" not in re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    assert "vllm:num_requests_running" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1.0"),
        (0.025, "0.025"),
        (7680, "7680.0"),
        (500_000, "500000.0"),
        (1_000_000, "1e+06"),
        (2_500_000, "2.5e+06"),
        (123_456_789, "1.23456789e+08"),
        (1e-5, "1e-05"),
        (2e20, "2e+20"),
    ],
)
def test_numbers_are_written_as_prometheus_clients_write_them(value: float, text: str) -> None:
    assert number(value) == text


def _aborted_after_its_preemption() -> Trace:
    """A pool of five blocks: b is preempted, and aborted before it comes back."""
    asked = [
        RequestSpec(i, tuple(range(8)), 40, arrival_step=1, sampling=Sampling(ignore_eos=True), output_len=40)
        for i in "ab"
    ]
    s = Session(asked, runner="sim", discipline="vllm", block_size=4, num_blocks=14, max_model_len=48)
    while not s.state().requests or not s.request("b").num_preemptions:
        s.step()
    s.step(2)
    s.abort("b")
    s.run()
    return s.trace


def test_what_was_counted_is_never_taken_back() -> None:
    trace = _aborted_after_its_preemption()
    before: dict[tuple[str, str], float] = {}
    for step in range(len(trace) + 1):
        now = parsed(to_prometheus(trace, step))
        gauges = {name for name, d in NAMES.items() if d.kind == "gauge"}
        shrunk = {
            sample: (value, now[sample])
            for sample, value in before.items()
            if sample[0] not in gauges and now[sample] < value
        }
        assert not shrunk, (step, shrunk)
        before = now
    end = vllm_metrics(trace)
    assert len(end.observed["vllm:time_to_first_token_seconds"]) == 2  # also of the aborted one
    assert end.values["vllm:num_preemptions_total"] == 0  # it never gave output again


def test_the_docs_hold_the_tables() -> None:
    from cbviz.interop.vllm_metrics import left_out_table, table

    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert table() in text
    assert left_out_table() in text
