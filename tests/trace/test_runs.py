"""What reads traces, on real runs of the simulated engine under every discipline and policy."""

from __future__ import annotations

import json

import pytest

from cbviz.core.policy import POLICIES
from cbviz.disciplines import DISCIPLINES
from cbviz.trace import compare, explain, load, metrics
from cbviz.trace.accounting import check_trace
from cbviz.trace.state import CODE
from tests.runs import run

BUILT_IN = ("fcfs", "priority", "sjf")


@pytest.mark.parametrize("policy", BUILT_IN)
@pytest.mark.parametrize("discipline", list(DISCIPLINES))
def test_accounts_close_and_every_step_can_be_told(discipline: str, policy: str) -> None:
    assert set(BUILT_IN) <= set(POLICIES)
    trace = run(
        discipline=discipline, policy=policy, at={5: ("abort", "r2"), 9: ("configure", {"max_num_seqs": 3})}
    )
    check_trace(trace)
    for record in trace:
        said = explain(trace, record.step)
        assert said
        assert all(s.kind and s.text and "  " not in s for s in said)
    m = metrics(trace)
    json.dumps(m, allow_nan=False)
    assert m["num_finished"] == 9 and m["num_aborted"] == 1
    assert 0 < m["batch_utilisation"] <= 1 and 0 < m["kv_usage_mean"] <= m["kv_usage_peak"] <= 1
    assert 0 < m["mbu"] <= 1 + 1e-9 and 0 < m["mfu"] <= 1
    assert m["num_preemptions"] == sum(r.num_preemptions for r in trace.state().by_index)


def test_preemption_and_eviction_happen_here() -> None:
    m = metrics(run(discipline="chunked"))
    assert (
        m["num_preemptions"] > 0
        and m["recomputed_tokens"] > 0
        and m["num_evictions"] > 0
        and m["prefix_hit_tokens"] > 0
    )


def test_seats_are_held_until_the_batch_ends() -> None:
    trace = run(discipline="static")
    held = [s for segments in trace.segments for s in segments if s.code == CODE["held"]]
    assert held
    ends = {e.request_id: r.step for r in trace for e in r.events if type(e).__name__ == "Finished"}
    freed = {
        rid: r.step
        for r in trace
        for e in r.events
        if type(e).__name__ == "SeatsFreed"
        for rid in e.request_ids
    }
    for r, segments in zip(trace.state().by_index, trace.segments):
        names = [(s.step, s.code) for s in segments]
        if freed.get(r.request_id, 0) > ends[r.request_id]:
            assert (ends[r.request_id] + 1, CODE["held"]) in names and names[-1] == (
                freed[r.request_id] + 1,
                CODE["finished"],
            )


def test_a_saved_run_equals_itself_and_another_discipline_does_not(tmp_path) -> None:
    a = run(discipline="chunked")
    same = compare(a, load(a.save(tmp_path / "a.jsonl")))
    assert same.equal and same.first_difference is None and same.tokens_equal_up_to_ties
    other = compare(a, run(discipline="static"))
    assert not other.schedules_equal and other.tokens_equal and not other.equal
    assert other.first_difference is not None and other.first_difference.step >= 1
