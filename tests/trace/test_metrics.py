"""Metrics against figures worked out by hand, and on traces with nothing in them."""

from __future__ import annotations

import json

import pytest

from cbviz.events import Arrived
from cbviz.messages import RequestSpec, StepRecord
from cbviz.trace import Cursor, Trace, format_metrics, metrics, request_metrics
from cbviz.trace.metrics import METRICS, format_value, kv_usage, latencies, percentile, seconds, whose_time
from cbviz.trace.schema import TraceHeader
from tests.golden import golden


def test_figures_of_the_golden_run() -> None:
    m = metrics(golden())
    near = lambda x: pytest.approx(x, rel=1e-12)  # noqa: E731
    assert m["makespan_s"] == near(0.110)
    assert m["busy_s"] == near(0.082)
    assert (
        m["num_steps"],
        m["num_requests"],
        m["num_finished"],
        m["num_aborted"],
        m["num_refused"],
        m["num_unfinished"],
    ) == (8, 6, 3, 2, 1, 0)
    assert m["num_sequences"] == 6
    assert (m["num_running"], m["num_waiting"]) == (0, 0)
    assert m["output_tokens"] == 4 + 4 + 2 + 1
    assert m["prompt_tokens"] == 10 + 10 + 12 + 6
    assert m["output_throughput"] == near(11 / 0.110)
    assert m["total_throughput"] == near(49 / 0.110)
    # TTFT: r1 .010 - 0, r2 .020 - .005, r3 .032 - .008; r5 was aborted and does not count.
    assert m["mean_ttft_s"] == near((0.010 + 0.015 + 0.024) / 3)
    assert m["p50_ttft_s"] == near(0.015)
    assert m["p99_ttft_s"] == near(0.015 + 0.98 * 0.009)
    # TPOT: r1 (.044 - .010)/3, r2 (.060 - .020)/3, r3 .072 - .032
    assert m["mean_tpot_s"] == near((0.034 / 3 + 0.040 / 3 + 0.040) / 3)
    assert m["mean_itl_s"] == near((0.010 + 0.012 + 0.012 + 0.012 + 0.012 + 0.016 + 0.040) / 7)
    assert m["mean_e2e_s"] == near((0.044 + 0.055 + 0.064) / 3)
    # queue: r1 0, r2 .010 - .005, r3 .010 - .008
    assert m["mean_queue_time_s"] == near((0 + 0.005 + 0.002) / 3)
    assert (m["num_preemptions"], m["recomputed_tokens"], m["num_evictions"]) == (1, 8, 5)
    assert m["recompute_tax"] == near(8 / 45)
    # looked up: r1 10, r2 10, r3 12, r5 6; found: r2 8. After its preemption r3 looked up 12 + 1 and found 4.
    assert (m["prefix_query_tokens"], m["prefix_hit_tokens"]) == (38, 8)
    assert (m["resumed_query_tokens"], m["resumed_hit_tokens"]) == (13, 4)
    assert m["prefix_hit_rate"] == near(8 / 38)
    # rows with useful work a seat: 1/3 3/3 3/3 2/3 1/3, then 2 seats: r3 recomputes 8 and computes 1 anew, r5
    assert m["batch_utilisation"] == near((1 / 3 + 1 + 1 + 2 / 3 + 1 / 3 + 1 / 2 + 1 / 2) / 7)
    assert m["kv_usage_mean"] == near((12 + 28 + 28 + 20 + 16 + 16 + 8 + 0) / 28 / 8)
    assert m["kv_usage_peak"] == 1.0
    assert m["kv_usage"] == 0  # nothing runs any more
    # SLOs: r1 meets both, r2 misses its TTFT by 5 ms
    assert m["slo_attainment"] == 0.5
    assert m["goodput"] == near(1 / 0.110)
    assert m["mfu"] == near(44e6 / 0.082 / 1e9)
    assert m["mbu"] == near((7 * 4e6 + 11e6) / 0.082 / 1e9)
    assert m["clock"] == "modelled"
    assert m["token_accounts"] == {"total": 45, "useful": 37, "recomputed": 8, "padded": 0, "rejected": 0}
    json.dumps(m, allow_nan=False)


def test_up_to_a_cursor_nothing_later_is_counted() -> None:
    m = metrics(golden(), Cursor(3))
    assert (m["num_steps"], m["num_running"], m["num_waiting"], m["num_finished"], m["output_tokens"]) == (
        3,
        3,
        1,
        0,
        6,
    )
    assert m["mean_e2e_s"] is None and m["mean_ttft_s"] == pytest.approx((0.010 + 0.015 + 0.024) / 3)
    assert metrics(golden(), Cursor(4, 3))["num_steps"] == 3


def test_one_row_a_request() -> None:
    rows = {r["request_id"]: r for r in request_metrics(golden())}
    assert list(rows) == ["r1", "r2", "r3", "r4", "r6", "r5"]
    assert rows["r3"]["num_preemptions"] == 1 and rows["r3"]["itl_s"] == pytest.approx([0.040])
    assert rows["r4"]["ttft_s"] is None and rows["r4"]["finish_reason"] == "abort"
    assert rows["r5"]["ttft_s"] is None and rows["r5"]["output_tokens"] == 1
    assert rows["r6"]["status"] == "refused" and rows["r6"]["first_token_step"] is None
    assert (rows["r1"]["slo_met"], rows["r2"]["slo_met"], rows["r3"]["slo_met"]) == (True, False, None)
    assert latencies(golden())["ttft_s"] == pytest.approx([0.010, 0.015, 0.024])


@pytest.mark.parametrize(
    "trace", [Trace(), Trace(TraceHeader(num_blocks=8)), Trace(TraceHeader(capabilities=["schedule"]))]
)
def test_an_empty_trace_has_zeros_and_none(trace: Trace) -> None:
    m = metrics(trace)
    json.dumps(m, allow_nan=False)
    assert set(METRICS) < set(m)
    assert m["num_steps"] == m["output_tokens"] == m["num_preemptions"] == 0
    assert (
        m["mean_ttft_s"]
        is m["p99_ttft_s"]
        is m["output_throughput"]
        is m["batch_utilisation"]
        is m["kv_usage_mean"]
        is None
    )
    assert format_metrics(m)
    assert request_metrics(trace) == []


def test_without_times_there_are_no_times() -> None:
    m = metrics(golden(capabilities=["schedule", "tokens", "blocks"]))
    assert m["output_tokens"] == 11
    assert all(m[name] is None for name, d in METRICS.items() if d.timed and name != "mean_schedule_s")


def test_arrival_by_step_is_the_start_of_that_step() -> None:
    trace = Trace(TraceHeader())
    trace.append(StepRecord(1, 5.0, 6.0, "measured", [], []))
    spec = RequestSpec("a", (1,), 1, arrival_s=0.0, arrival_step=2)
    trace.append(StepRecord(2, 6.0, 7.0, "measured", [], [Arrived("a", 0, 1, 1, 0.0)], arrivals=[spec]))
    assert request_metrics(trace)[0]["arrival_s"] == 6.0
    assert metrics(trace)["clock"] == "measured"


def test_every_definition_is_listed() -> None:
    assert list(metrics(golden()))[: len(METRICS)] == list(METRICS)


@pytest.mark.parametrize(
    "values, share, want",
    [([], 0.5, None), ([3.0], 0.99, 3.0), ([1, 2, 3, 4], 0.5, 2.5), ([4, 1, 3, 2], 1.0, 4), ([1, 2], 0.0, 1)],
)
def test_percentile(values: list[float], share: float, want: float | None) -> None:
    assert percentile(values, share) == want


def test_percentile_is_numpys() -> None:
    import numpy as np

    values = np.random.default_rng(0).exponential(size=37)
    for share in (0.01, 0.5, 0.9, 0.99):
        assert percentile(list(values), share) == pytest.approx(np.percentile(values, 100 * share))


def test_kv_usage_from_gauges_where_slots_were_not_counted() -> None:
    from cbviz.messages import Gauges

    r = StepRecord(1, 0.0, 1.0, "measured", [], [], gauges=Gauges(num_running=1, num_free_blocks=3))
    assert kv_usage(r, 9) == pytest.approx(5 / 8)
    assert kv_usage(StepRecord(1, 0.0, 1.0, "measured", [], []), 9) is None


def test_figures_are_written_with_units() -> None:
    assert (seconds(1.5), seconds(0.0123), seconds(4.56e-6), seconds(1234.5), seconds(0)) == (
        "1.5 s",
        "12.3 ms",
        "4.56 µs",
        "1,234.5 s",
        "0 µs",
    )
    assert format_value("batch_utilisation", 0.814) == "81.4 %"
    assert format_value("output_tokens", 2160) == "2,160 tokens"
    assert format_value("mean_ttft_s", None) == "-"
    text = format_metrics(metrics(golden()))
    assert "output_throughput" in text and "100.0 tokens/s" in text
    assert (
        text.splitlines()[-1]
        == "times are modelled (a device of 1 GB/s and 1 GFLOP/s): lower bounds, not a measurement"
    )
    assert whose_time({"clock": "measured", "device": ""}) == "times are measured"
