"""The fold, where readers depend on it beyond what the engine's tests hold against the scheduler."""

from __future__ import annotations

from cbviz import events as ev
from cbviz.messages import RequestSpec, StepRecord
from cbviz.trace import Cursor, Trace
from cbviz.trace.schema import TraceHeader
from tests.golden import NUM_STEPS, golden


def same(a, b) -> bool:
    """Two states are drawn the same."""

    def seen(s):
        return (
            s.step,
            s.running,
            s.waiting,
            [s.block_kind(i) for i in range(s.num_blocks)],
            [s.owner(i) for i in range(s.num_blocks)],
            [
                (
                    r.request_id,
                    r.state,
                    r.status,
                    r.output_token_ids,
                    r.output_texts,
                    r.block_ids,
                    r.num_computed_tokens,
                )
                for r in s.by_index
            ],
        )

    return seen(a) == seen(b)


def test_seeking_in_any_order_finds_the_same_states() -> None:
    for order in (range(NUM_STEPS + 1), range(NUM_STEPS, -1, -1), (4, 1, 7, 3, 3, 8, 0, 5)):
        trace = golden()
        for step in order:
            assert same(trace.state(step), golden().share(step).state())


def test_the_last_event_of_a_step_is_the_step() -> None:
    trace = golden()
    for record in trace:
        assert same(trace.state(Cursor(record.step, len(record.events))), trace.state(record.step))


def test_truncate_forgets_what_came_later() -> None:
    trace = golden()
    trace.truncate(4)
    assert (
        len(trace) == 4
        and same(trace.state(), golden().state(4))
        and trace.segments == golden().share(4).segments
    )


def test_a_refused_double_leaves_the_first_alone() -> None:
    first, second = RequestSpec("x", (1, 2, 3), 5), RequestSpec("x", (9,), 1)
    trace = Trace(TraceHeader(num_blocks=4))
    trace.append(StepRecord(1, 0.0, 1.0, "modelled", [], [ev.Arrived("x", 0, 3, 5)], arrivals=[first]))
    trace.append(
        StepRecord(
            2,
            1.0,
            2.0,
            "modelled",
            [],
            [ev.Refused("x", "request id 'x' was used before")],
            arrivals=[second],
        )
    )
    assert trace.state().request("x").status == "waiting" and trace.state().waiting == ["x"]
    assert trace.specs["x"] == first and len(trace.state().by_index) == 1


def test_a_shared_block_is_as_full_as_its_fullest_holder() -> None:
    trace = Trace(TraceHeader(num_blocks=4, block_size=4))
    trace.append(
        StepRecord(
            1,
            0.0,
            1.0,
            "modelled",
            [],
            [
                ev.Arrived("a", 0, 4, 5),
                ev.Arrived("b", 1, 4, 5),
                ev.Admitted("a", False, 0, 0, 0),
                ev.Admitted("b", False, 0, 0, 1),
                ev.Allocated("a", [1]),
                ev.Shared("b", [1]),
                ev.Scheduled("b", 0, 3),
            ],
        )
    )
    assert trace.state().fill(1) == 3 and trace.state().block_kind(1) == "shared"
