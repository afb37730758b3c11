"""Who waits for ever and why: starvation seen, named and cured; a run in which nothing will ever happen again
says what is lacking.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import cbviz as cb
from cbviz import events as ev
from cbviz.core.policy import POLICIES
from cbviz.engine.engine import Engine
from cbviz.engine.progress import PATIENCE_STEPS
from cbviz.messages import RequestSpec
from cbviz.trace.explain import explain
from tests.core.byhand import byhand, found, run, spec
from tests.core.fuzz import make_engine

# one seat. A request of two steps arrives at every second step, so the seat is free at each odd step; L,
# longer and less urgent, came first
STREAM = [spec("L", 4, 12, priority=1), *(spec(f"s{i}", 2, 2, step=1 + 2 * i) for i in range(40))]


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = dict(POLICIES)
    yield
    POLICIES.clear()
    POLICIES.update(before)


def start(trace: Any, rid: str = "L") -> int:
    return next(r.step for r in trace for e in r.events if isinstance(e, ev.Admitted) and e.request_id == rid)


@pytest.mark.parametrize("policy", ["sjf", "srpt", "priority"])
def test_a_stream_of_preferred_requests_starves_the_other(policy: str) -> None:
    t = run(STREAM, policy=policy, max_num_seqs=1)
    assert start(t) == 81  # only when the stream has ended
    # overtaken at steps 1, 3, 5, ...: for the eighth time at step 15, the sixteenth at 31, the 32nd at 63
    assert [(r.step, e) for r in t for e in r.events if isinstance(e, ev.Starving)] == [
        (15, ev.Starving("L", 8, 14, 1, 31)),
        (31, ev.Starving("L", 16, 30, 1, 31)),
        (63, ev.Starving("L", 32, 62, 1, 31)),
    ]


def test_ageing_cures_it() -> None:
    """25 steps of waiting are worth one level: at step 25 L stands at 1 - 24/25, behind a fresh 0; at step 27
    at 1 - 26/25, before it.
    """
    t = run(STREAM, policy="ageing", max_num_seqs=1)
    assert start(t) == 27
    assert [e.num_overtaken for e in found(t, ev.Starving)] == [8]


def test_first_come_first_served_never_starves() -> None:
    t = run(STREAM, policy="fcfs", max_num_seqs=1)
    assert start(t) == 1 and not found(t, ev.Starving)


def test_the_cure_may_come_in_the_middle() -> None:
    t = run(STREAM, {40: [("configure", {"policy": "ageing"})]}, policy="sjf", max_num_seqs=1)
    assert start(t) == 41  # it has aged all the while


def test_the_sentence_names_the_request_and_what_it_lacks() -> None:
    t = run(STREAM, policy="sjf", max_num_seqs=1)
    [said] = [s.text for s in explain(t, 15) if s.kind == "starving"]
    assert said == (
        "L is starving: 8 later requests were admitted in its 14 steps of waiting; its admission would "
        "take 1 block, 31 are free: "
        "what it lacks is its turn, policy sjf prefers others"
    )


def test_a_starving_request_may_lack_blocks_and_have_others_before_it() -> None:
    """L's prompt of 17 needs 5 blocks of 7.

    Three short ones arrive at every second step, two run at a time and hold 2 blocks each: 3 are free, and
    the queue before L grows.
    """
    specs = [spec("L", 17, 4), *(spec(f"s{i}", 5, 3, step=1 + 2 * (i // 3)) for i in range(30))]
    t = run(specs, policy="sjf", max_num_seqs=2, num_blocks=8, max_model_len=28)
    first = found(t, ev.Starving)[0]
    assert (
        (first.request_id, first.num_overtaken, first.need) == ("L", 8, 5)
        and first.have < 5
        and first.num_ahead > 0
    )
    step = next(r.step for r in t if first in r.events)
    assert (
        t.state(step).waiting.index("L") >= first.num_ahead
    )  # those before it then; the step may have put others there
    [said] = [s.text for s in explain(t, step) if s.kind == "starving"]
    assert (
        f"take 5 blocks, {first.have} {'is' if first.have == 1 else 'are'} free ({first.num_ahead} waiting "
        "requests before it now)"
    ) in said


def test_a_preempted_request_can_starve_too() -> None:
    """L runs, loses its blocks to a shorter request, and then shorter ones come again and again."""
    specs = [spec("L", 12, 28), *(spec(f"s{i}", 9, 6, step=4 + 3 * i) for i in range(24))]
    t = run(specs, policy="sjf", max_num_seqs=2, num_blocks=11, max_model_len=40)
    assert t.state().requests["L"].num_preemptions >= 1
    named = found(t, ev.Starving)
    assert named and named[0].request_id == "L"
    lost = next(r.step for r in t for e in r.events if isinstance(e, ev.Preempted) and e.request_id == "L")
    step = next(r.step for r in t if named[0] in r.events)
    assert named[0].num_waiting_steps == step - lost


def test_who_was_admitted_starts_counting_anew() -> None:
    engine = make_engine(byhand(STREAM, policy="sjf", max_num_seqs=1).config)
    engine.enqueue(STREAM)
    while engine.step_count < 60:
        engine.step()
    assert engine.scheduler.state.requests["L"].num_overtaken == 30
    engine.configure(policy="fcfs")
    while "L" not in [r.request_id for r in engine.scheduler.state.running]:
        engine.step()
    assert engine.scheduler.state.requests["L"].num_overtaken == 0


# nothing will ever happen again -----------------------------------------------------------------------------


def idle(engine: Engine, specs: list[RequestSpec], most: int = 300) -> int:
    """Steps until the engine says that it is stuck."""
    engine.enqueue(specs)
    for step in range(most):
        if engine.stuck:
            return step
        assert engine.step() is not None
    raise AssertionError("never stuck")


def test_a_policy_that_admits_nobody() -> None:
    @cb.policy
    class Closed:
        def admit(self, r: Any, now: float) -> bool:
            return bool(r.num_prompt_tokens < 9)

    engine = make_engine(byhand([], policy="Closed").config)
    steps = idle(engine, [spec("a", 4, 3), spec("b", 30, 3), spec("c", 4, 3)])
    assert steps == PATIENCE_STEPS + 1
    assert engine.stuck == (
        "b can never be admitted: policy Closed has refused it for 64 steps; choose another policy, or "
        "abort b. Nothing runs and nothing is to arrive, "
        "so nothing will change. It would take a seat of 8 and 8 blocks; 32 of 32 are free; 1 more wait"
    )
    engine.configure(policy="fcfs")
    assert not engine.stuck
    while engine.step() is not None:
        pass
    assert engine.scheduler.state.num_finished == 3


def test_a_policy_may_count_steps_before_it_admits() -> None:
    @cb.policy
    class Slow:
        def admit(self, r: Any, now: float) -> bool:
            return bool(r.num_waiting_steps >= 20)

    t = run([spec("a", 4, 3)], policy="Slow")
    assert start(t, "a") == 21 and len(t) == 23


def test_an_engine_with_work_is_not_stuck() -> None:
    engine = make_engine(byhand([]).config)
    engine.enqueue(STREAM[:5])
    while engine.step() is not None:
        assert engine.stuck == ""
    assert engine.stuck == ""
