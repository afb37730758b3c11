"""Timeouts, deadlines, cancellation, full queues, shedding, the watermark and degradation: who is ended,
refused or held back, in which step, and what the record says.
"""

from __future__ import annotations

from typing import Any

import pytest

from cbviz import events as ev
from cbviz.messages import RequestSpec
from cbviz.trace.metrics import metrics
from cbviz.trace.trace import Trace
from tests.core.byhand import admitted, byhand, found, plan, run, spec, waits
from tests.core.fuzz import make_engine, make_trace, play, solo

ONE_SEAT = {"max_num_seqs": 1}


def limited(
    specs: list[RequestSpec], at: dict[int, list[tuple[str, Any]]] | None = None, **fields: Any
) -> Trace:
    return play(byhand(specs, at, **fields))[1]


def ends(trace: Trace) -> dict[str, str]:
    return {
        r.request_id: "refused" if r.status == "refused" else r.finish_reason for r in trace.state().by_index
    }


def ended_in(trace: Trace, rid: str) -> int:
    return next(r.step for r in trace for e in r.events if isinstance(e, ev.Finished) and e.request_id == rid)


def first_step_at(trace: Trace, time_s: float) -> int:
    """The first step that starts at `time_s` or later."""
    return next(r.step for r in trace if r.t0_s >= time_s)


def half_way(steps: int = 20) -> float:
    """A time between the starts of two steps of a plain run."""
    t = run([spec("a", 4, 40)], max_num_seqs=1)
    return (t.record(steps).t0_s + t.record(steps + 1).t0_s) / 2


def test_a_timeout_ends_the_running_and_the_waiting() -> None:
    """a runs and b waits behind it; both came with step 1, and the timeout comes between steps 20 and 21:
    step 21 ends them, and gives c the seat at once.
    """
    t = limited(
        [spec("a", 4, 40), spec("b", 4, 40), spec("c", 4, 6, step=15)], timeout_s=half_way(20), **ONE_SEAT
    )
    assert found(t, ev.Finished, 21) == [ev.Finished("a", "timeout"), ev.Finished("b", "timeout")]
    assert [type(e).__name__ for e in t.record(21).events[:3]] == [
        "Finished",
        "Freed",
        "Finished",
    ]  # before anything is decided
    assert plan(t, 21) == "c0+4" and ends(t) == {"a": "timeout", "b": "timeout", "c": "length"}
    assert len(t.state().requests["a"].output_token_ids) == 20  # what it got before, it keeps
    m = metrics(t)
    assert (m["num_finished"], m["num_aborted"]) == (1, 2)


def test_the_timeout_of_a_request_that_comes_by_step_starts_with_that_step() -> None:
    """c arrives before step 15, long after the start: its time is not up with the others'."""
    t = limited([spec("a", 4, 40), spec("c", 4, 40, step=15)], timeout_s=half_way(20))
    assert ended_in(t, "a") == 21 and ends(t) == {"a": "timeout", "c": "timeout"}
    came = t.record(15).t0_s
    assert ended_in(t, "c") == first_step_at(t, came + half_way(20)) > 30
    assert t.state().requests["c"].arrival_s == came


def test_the_timeout_of_a_request_that_comes_by_time() -> None:
    late = RequestSpec("b", (1, 2, 3), 40, arrival_s=half_way(10))
    t = limited([spec("a", 4, 60), late], timeout_s=half_way(20))
    assert ended_in(t, "b") == first_step_at(t, half_way(10) + half_way(20)) > ended_in(t, "a") == 21


def test_a_deadline_is_a_time_of_the_run() -> None:
    specs = [
        spec("a", 4, 40, deadline_s=half_way(12)),
        spec("b", 4, 40),
        spec("c", 4, 40, deadline_s=half_way(5)),
    ]
    t = limited(specs, max_num_seqs=2)
    assert found(t, ev.Finished, 6) == [ev.Finished("c", "deadline")] and found(t, ev.Finished, 13) == [
        ev.Finished("a", "deadline")
    ]
    assert ends(t) == {"a": "deadline", "b": "length", "c": "deadline"} and "c" not in admitted(t)


def test_the_deadline_policy_saves_what_fcfs_loses() -> None:
    """Two of 10 steps each and one seat; the later arrival has 15 steps' time."""
    specs = [spec("a", 4, 4), spec("b", 4, 10), spec("c", 4, 10, deadline_s=half_way(15))]
    assert ends(limited(specs, policy="fcfs", **ONE_SEAT))["c"] == "deadline"
    assert ends(limited(specs, policy="deadline", **ONE_SEAT)) == {
        "a": "length",
        "b": "length",
        "c": "length",
    }


def test_shedding_drops_who_has_not_begun() -> None:
    """a runs, b waits from the start and is dropped, c comes at step 15 and gets its turn in time; d loses
    its blocks but has begun.
    """
    t = limited(
        [spec("a", 4, 24), spec("b", 4, 9), spec("c", 4, 9, step=15)], shed_after_s=half_way(20), **ONE_SEAT
    )
    assert ends(t) == {"a": "length", "b": "shed", "c": "length"}
    assert found(t, ev.Finished, 21) == [ev.Finished("b", "shed")]


def test_shedding_spares_the_preempted() -> None:
    t = limited(
        [spec("a", 8, 30), spec("b", 8, 30)], num_blocks=11, max_model_len=40, shed_after_s=half_way(8)
    )
    assert found(t, ev.Preempted) and set(ends(t).values()) == {"length"}


def test_cancellation_in_every_state() -> None:
    """A client goes away: r runs, w waits, p is preempted, n has not come yet; what they hold is back before
    the step is planned.
    """
    specs = [spec("r", 8, 30), spec("p", 8, 30), spec("w", 30, 4, step=2), spec("n", 4, 4, step=50)]
    fields: dict[str, Any] = {"num_blocks": 11, "max_model_len": 40}
    t = run(
        specs,
        {20: [("abort", "p"), ("abort", "w")], 22: [("abort", "r"), ("abort", "n"), ("abort", "nobody")]},
        **fields,
    )
    assert t.state(19).requests["p"].status == "preempted" and t.state(19).requests["w"].status == "waiting"
    assert found(t, ev.Finished, 20) == [ev.Finished("p", "abort"), ev.Finished("w", "abort")]
    assert found(t, ev.Finished, 22) == [ev.Finished("r", "abort")] and found(t, ev.Refused, 22) == [
        ev.Refused("n", "aborted before it arrived")
    ]
    assert [type(e).__name__ for e in t.record(22).events][:2] == ["Finished", "Freed"]
    assert t.record(22).inputs[0] == {"op": "abort", "request_id": "r"}
    assert metrics(t)["num_aborted"] == 3 and metrics(t)["num_refused"] == 1


def test_a_full_queue_refuses_by_requests() -> None:
    """The queue is looked at when a request comes, before the step's admissions: with room for two, the third
    of four that come at once is refused, however many seats are free.
    """
    t = limited(
        [spec(x, 4, 3) for x in "abcd"] + [spec("e", 4, 3, step=2)], max_waiting_requests=2, **ONE_SEAT
    )
    assert found(t, ev.Refused, 1) == [
        ev.Refused(x, "the queue is full: 2 requests wait, max_waiting_requests is 2") for x in "cd"
    ]
    assert admitted(t) == "a b e"  # a has left the queue in step 1, so there is room for e in step 2
    assert ends(t) == {"a": "length", "b": "length", "c": "refused", "d": "refused", "e": "length"}


def test_a_full_queue_refuses_by_tokens() -> None:
    specs = [spec("a", 10, 3), spec("b", 10, 3), spec("c", 5, 3), spec("d", 6, 3), spec("e", 5, 3)]
    t = limited(specs, max_waiting_tokens=30, **ONE_SEAT)
    # 10, 20, 25; d's 6 would be 31; e's 5 make it 30
    assert found(t, ev.Refused) == [
        ev.Refused("d", "the queue is full: 25 tokens wait, with these 6 they pass max_waiting_tokens, 30")
    ]
    assert admitted(t) == "a b c e"


def test_a_preempted_request_counts_with_its_outputs_and_is_never_refused() -> None:
    t = run(
        [spec("a", 8, 30), spec("b", 8, 30)],
        {14: [("configure", {"max_waiting_tokens": 20})]},
        num_blocks=11,
        max_model_len=40,
    )
    lost = next(r.step for r in t for e in r.events if isinstance(e, ev.Preempted))
    assert lost == 14 and set(ends(t).values()) == {"length"}
    c = byhand(
        [spec("a", 8, 30), spec("b", 8, 30), spec("c", 2, 2, step=16)],
        num_blocks=11,
        max_model_len=40,
        max_waiting_tokens=20,
    )
    refused = found(play(c)[1], ev.Refused)
    assert [e.request_id for e in refused] == ["c"] and "21 tokens wait, with these 2" in refused[
        0
    ].reason  # b's 8 and its 13 outputs


@pytest.mark.parametrize(
    "discipline, share, keep", [("chunked", 0.5, 5), ("paged", 0.0, 0), ("vllm", 0.25, 2)]
)
def test_an_admission_leaves_the_watermark(discipline: str, share: float, keep: int) -> None:
    """10 blocks, and 11 times the share must stay free; a takes 3. An empty engine admits whatever fits."""
    t = run(
        [spec("a", 12, 4), spec("b", 12, 4), spec("c", 12, 4)],
        discipline=discipline,
        num_blocks=11,
        max_model_len=16,
        watermark=share,
    )
    room = (10 - 3 - keep) // 3
    assert [e.request_id for e in found(t, ev.Admitted, 1)] == ["a", "b", "c"][: 1 + room]
    if room < 2:
        have = 10 - 3 - 3 * room - keep
        assert found(t, ev.NotAdmitted, 1) == [ev.NotAdmitted("abc"[1 + room], "watermark", 3, have)]


def test_the_paged_row_has_a_watermark_of_its_own() -> None:
    """1 % of 400 blocks: four stay free, a config's 0 notwithstanding."""
    t = run(
        [spec("a", 12, 4), spec("b", 396, 4)],
        discipline="paged",
        block_size=1,
        num_blocks=411,
        max_model_len=400,
        max_num_batched_tokens=500,
    )
    assert found(t, ev.NotAdmitted, 1) == [ev.NotAdmitted("b", "watermark", 396, 394)]


# degradation: with more than 6.4 of 16 blocks in use, batch-class requests (priority > 0) form static batches
# and let the others pass
DEGRADE = {"num_blocks": 17, "max_model_len": 40, "degrade_above": 0.4}


@pytest.mark.parametrize("discipline", ["chunked", "vllm", "paged", "max-util"])
def test_batch_class_requests_are_demoted_under_load(discipline: str) -> None:
    """i and b1 run with 7 blocks and more; b2 is of the batch class and first in the queue: it waits for b1,
    and j, which came later, passes it.
    """
    specs = [
        spec("i", 16, 12),
        spec("b1", 12, 10, priority=1),
        spec("b2", 4, 4, step=2, priority=1),
        spec("j", 4, 4, step=3),
    ]
    t = run(specs, discipline=discipline, **DEGRADE)
    assert waits(t, "b2")[0] == "degraded" and found(t, ev.NotAdmitted, 2) == [
        ev.NotAdmitted("b2", "degraded", 0, 1)
    ]
    assert admitted(t) == "i b1 j b2"
    steps = {e.request_id: r.step for r in t for e in r.events if isinstance(e, ev.Admitted)}
    assert steps["j"] == 3 and steps["b2"] > ended_in(t, "b1")
    assert (
        admitted(run(specs, discipline=discipline, **(DEGRADE | {"degrade_above": 0.0}))) == "i b1 b2 j"
    )  # the rule is off
    assert (
        admitted(run(specs, discipline=discipline, **(DEGRADE | {"degrade_above": 0.9}))) == "i b1 b2 j"
    )  # the load is not that high


def test_a_demoted_batch_starts_together() -> None:
    """Under load the class goes batch by batch: when b1 has ended, b2 and b3 are admitted in one step; b4,
    which comes later, waits for both.
    """
    specs = [
        spec("i", 24, 16),
        spec("b1", 4, 6, priority=1),
        spec("b2", 4, 6, step=2, priority=1),
        spec("b3", 4, 8, step=3, priority=2),
        spec("b4", 4, 4, step=9, priority=1),
    ]
    t = run(specs, **DEGRADE)
    steps = {e.request_id: r.step for r in t for e in r.events if isinstance(e, ev.Admitted)}
    assert steps == {
        "i": 1,
        "b1": 1,
        "b2": 7,
        "b3": 7,
        "b4": 15,
    }  # b1 ends with step 6, b2 with 12, b3 with 14
    assert t.record(14).events and waits(t, "b4") == ["degraded"]
    assert [e.have for e in found(t, ev.NotAdmitted) if e.request_id == "b4"] == [2, 1]


def test_nobody_is_passed_when_all_are_demoted() -> None:
    specs = [
        spec("b1", 28, 6, priority=1),
        spec("b2", 4, 6, step=2, priority=1),
        spec("b3", 4, 6, step=3, priority=1),
    ]
    t = run(specs, **DEGRADE)
    assert admitted(t) == "b1 b2 b3" and waits(t, "b2") == ["degraded"]


def test_the_limits_do_not_change_what_is_said() -> None:
    """Whoever ends by itself says what it says alone; whoever is ended, the beginning of it."""
    c = byhand(
        [spec(f"r{i}", 4 + i, 20, step=1 + i // 4, priority=i % 3) for i in range(12)],
        num_blocks=13,
        max_model_len=40,
        timeout_s=half_way(30),
        shed_after_s=half_way(9),
        degrade_above=0.4,
        max_waiting_requests=4,
    )
    engine, t = make_engine(c.config), make_trace(c.config)
    engine.enqueue(c.specs)
    while (record := engine.step()) is not None:
        t.append(record)
    reasons = ends(t)
    assert {"length", "shed", "refused"} <= set(reasons.values())
    for s in c.specs:
        said = t.state().requests[s.request_id].output_token_ids
        assert said == solo(s, c.config.seed, 40)[: len(said)] and (len(said) == 20) == (
            reasons[s.request_id] == "length"
        )
