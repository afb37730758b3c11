"""Figures make sense in any run, at every step: no duration is negative, counts add up, a request's sequences
share its arrival.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from cbviz.config import ConfigError
from cbviz.interop.prometheus import to_prometheus
from cbviz.interop.vllm_metrics import NAMES, VllmMetrics
from cbviz.messages import RequestSpec, Sampling
from cbviz.session import Session
from cbviz.trace import Cursor, Trace, metrics, request_metrics
from cbviz.trace.metrics import METRICS
from tests.strategies import draw

GAUGES = {name for name, d in NAMES.items() if d.kind == "gauge"}
STEPS_LOOKED_AT = 12
MOST_STEPS = 300


class Enough(Exception):
    """The run is long enough: whether it ends is another property."""


def enough(s: Session) -> None:
    if len(s.trace) >= MOST_STEPS:
        raise Enough


def check_rows(rows: list[dict[str, Any]]) -> None:
    """Latencies of each sequence come in their order, and those of one request begin together."""
    by_id = {r["request_id"]: r for r in rows}
    for r in rows:
        queue, ttft, e2e = r["queue_time_s"], r["ttft_s"], r["e2e_s"]
        assert queue is None or queue >= 0, r
        assert ttft is None or (queue is not None and ttft >= queue), r
        assert e2e is None or (ttft is not None and e2e >= ttft), r
        assert all(gap >= 0 for gap in r["itl_s"]), r
        assert r["tpot_s"] is None or r["tpot_s"] >= 0, r
        if r["parent"]:
            request = by_id[r["parent"]]
            same = ("arrival_s", "arrival_step", "first_scheduled_step", "prompt_tokens")
            assert [r[f] for f in same] == [request[f] for f in same], (r, request)
        steps = [
            r[f]
            for f in ("arrival_step", "first_scheduled_step", "first_token_step", "finish_step")
            if r[f] is not None
        ]
        assert steps == sorted(steps), r


def check_figures(trace: Trace, cursor: Cursor) -> dict[str, Any]:
    """Every figure has a possible value, and the counts of requests add up."""
    rows, m = request_metrics(trace, cursor), metrics(trace, cursor)
    check_rows(rows)
    for name, shown in METRICS.items():
        value = m[name]
        assert value is None or value >= 0, (name, value)
        if shown.unit == "share" and name not in ("mfu", "mbu"):
            assert value is None or value <= 1, (name, value)
    assert m["num_requests"] == m["num_finished"] + m["num_aborted"] + m["num_refused"] + m["num_unfinished"]
    assert m["num_requests"] == sum(not r["parent"] for r in rows) and m["num_sequences"] == len(rows)
    assert m["num_running"] + m["num_waiting"] == sum(
        r["status"] in ("running", "preempted", "waiting") for r in rows
    )
    assert (
        m["prefix_hit_tokens"] <= m["prefix_query_tokens"]
        and m["resumed_hit_tokens"] <= m["resumed_query_tokens"]
    )
    assert m["prompt_tokens"] == sum(
        r["prompt_tokens"] for r in rows if not r["parent"] and r["first_token_step"] is not None
    )
    state = trace.state(cursor)
    assert (state.num_requests, state.num_ended) == (
        m["num_requests"],
        m["num_requests"] - m["num_unfinished"],
    )
    return m


def check_exported(trace: Trace) -> None:
    """What is exported under vLLM's names only grows, and no observed value is negative."""
    found = VllmMetrics(trace.header.config, trace.header.num_blocks)
    for record in trace:
        before = dict(found.values)
        found.take(record)
        shrunk = [
            name
            for name, value in before.items()
            if name.partition("{")[0] not in GAUGES and found.values[name] < value
        ]
        assert not shrunk, (record.step, shrunk)
        assert found.values["vllm:kv_cache_usage_perc"] == pytest.approx(
            1 - trace.state(record.step).num_free_blocks / (trace.state(record.step).num_blocks - 1)
        )
    assert all(value >= 0 for values in found.observed.values() for value in values)
    m = metrics(trace)
    assert found.values["vllm:prefix_cache_queries_total"] == m["prefix_query_tokens"]
    assert found.values["vllm:prefix_cache_hits_total"] == m["prefix_hit_tokens"]
    assert found.values["vllm:num_preemptions_total"] <= m["num_preemptions"]
    assert to_prometheus(trace)


def holds_in(seed: int) -> bool:
    """Plays one drawn run and checks it; False if its knobs were refused."""
    rng = random.Random(seed)
    drawn = draw(rng)
    with drawn.named():
        try:
            s = drawn.session()
        except ConfigError:
            return False
        try:
            how = drawn.play(s, after=enough)
        except Enough:
            how = "goes on"
        steps = len(s.trace)
        looked_at = (
            range(steps + 1)
            if steps < STEPS_LOOKED_AT
            else [*sorted(rng.sample(range(steps), STEPS_LOOKED_AT)), steps]
        )
        for step in looked_at:
            check_figures(s.trace, Cursor(step))
        if steps:
            inside = rng.randint(1, steps)
            check_figures(s.trace, Cursor(inside, rng.randint(0, len(s.trace.record(inside).events))))
        check_exported(s.trace)
        if how == "ended":
            m = metrics(s.trace)
            assert (m["num_unfinished"], m["num_running"], m["num_waiting"]) == (0, 0, 0)
            assert not m["kv_usage"], "nothing runs, so nothing is held"
    return True


def test_figures_hold_in_any_run() -> None:
    assert sum(map(holds_in, range(500))) > 400


@pytest.mark.slow
@pytest.mark.parametrize("first", range(500, 2500, 500))
def test_figures_hold_in_any_run_many_more(first: int) -> None:
    assert sum(map(holds_in, range(first, first + 500))) > 400


def _late_request_of_several() -> list[RequestSpec]:
    """b fills the budget of five steps; a, with three sequences, arrives while b's prompt is being computed."""
    sampling = Sampling(ignore_eos=True)
    return [
        RequestSpec("a", tuple(range(600)), 10, arrival_step=2, sampling=Sampling(n=3, ignore_eos=True)),
        RequestSpec("b", tuple(range(600, 1200)), 10, arrival_step=1, sampling=sampling),
    ]


def test_sequences_have_the_latencies_of_their_request() -> None:
    s = Session(_late_request_of_several(), runner="sim", discipline="chunked", max_num_batched_tokens=128)
    s.run()

    rows = {r["request_id"]: r for r in request_metrics(s.trace)}
    for name in ("a", "a.1", "a.2"):
        assert [round(rows[name][f] * 1e6, 1) for f in ("queue_time_s", "ttft_s", "e2e_s")] == [
            198.1,
            718.9,
            1570.5,
        ]
    m = metrics(s.trace)
    assert [round(m[f] * 1e6, 1) for f in ("mean_queue_time_s", "mean_ttft_s")] == [148.6, 625.9]
    assert (m["num_requests"], m["num_sequences"], m["num_finished"], m["prompt_tokens"]) == (2, 4, 2, 1200)
    assert s.num_requests == 2 and len(s.request_ids) == 4


def test_the_answers_preset_shows_its_waiting() -> None:
    s = Session("answers", runner="sim")
    s.run()
    m = metrics(s.trace)
    assert [round(1e3 * m[f], 2) for f in ("mean_ttft_s", "mean_queue_time_s")] == [3.08, 3.0]
    assert (m["num_requests"], m["num_sequences"]) == (7, 21)


def test_a_request_of_several_is_aborted_if_one_of_its_sequences_was() -> None:
    s = Session(
        [RequestSpec("a", (1, 2, 3), 9, arrival_step=1, sampling=Sampling(n=2, ignore_eos=True))],
        runner="sim",
    )
    s.step(2)
    s.abort("a.1")
    s.step()
    assert metrics(s.trace)["num_unfinished"] == 1
    s.run()
    m = metrics(s.trace)
    assert (m["num_requests"], m["num_aborted"], m["num_finished"]) == (1, 1, 0)


def test_preempted_requests_that_find_their_own_blocks_are_no_prefix_hits() -> None:
    rng = random.Random(3)
    prompts = [tuple(rng.randint(100, 40000) for _ in range(64)) for _ in range(12)]
    specs = [
        RequestSpec(f"r{i}", ids, 64, sampling=Sampling(ignore_eos=True), output_len=64)
        for i, ids in enumerate(prompts)
    ]
    s = Session(specs, runner="sim", discipline="vllm", num_blocks=40, block_size=16, max_num_seqs=12)
    s.run()
    m = metrics(s.trace)
    assert m["num_preemptions"] > 0
    assert (m["prefix_query_tokens"], m["prefix_hit_tokens"], m["prefix_hit_rate"]) == (768, 0, 0.0)
    assert (m["resumed_query_tokens"], m["resumed_hit_tokens"]) == (1320 - 768, 224)


def test_without_a_prefix_cache_nothing_is_looked_up() -> None:
    s = Session("article", runner="sim", enable_prefix_caching=False)
    s.run()
    assert metrics(s.trace)["prefix_query_tokens"] == 0 and metrics(s.trace)["prefix_hit_rate"] is None


def test_seats_that_are_taken_away_still_count_while_they_are_held() -> None:
    """Four requests run when the seats become two.

    They keep theirs, so the batch uses four of four, not four of two.
    """
    specs = [
        RequestSpec(f"r{i}", (1, 2, 3, i), 30, arrival_step=1, sampling=Sampling(ignore_eos=True))
        for i in range(4)
    ]
    s = Session(specs, runner="sim", max_num_seqs=4)
    s.step(5)
    s.configure(max_num_seqs=2)
    s.step(5)
    assert metrics(s.trace)["batch_utilisation"] == 1.0
