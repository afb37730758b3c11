"""Breakpoints stop where their condition first holds, forwards and backwards, and say why; watches are
checked word by word and never run as Python.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cbviz as cb
from cbviz import events as ev
from cbviz.breakpoints import (
    ATTRIBUTES,
    EVENTS,
    GAUGES,
    Breakpoint,
    BreakpointError,
    WatchError,
    last_stop,
    next_stop,
)
from cbviz.config import ConfigError
from cbviz.session import Session
from cbviz.trace.trace import Cursor
from tests.golden import golden
from tests.runs import run, specs


def session(n: int = 12, **config: Any) -> Session:
    return Session(
        specs(n),
        runner="sim",
        **({"max_num_seqs": 4, "num_blocks": 22, "block_size": 4, "max_model_len": 80} | config),
    )


# conditions -------------------------------------------------------------------------------------------------

GOLDEN = [
    (cb.on("preempted"), [4]),
    (cb.on("preempted", request="r1"), []),
    (cb.on("preempted", block=6), [4]),
    (cb.on("evicted"), [4, 5, 6, 7]),
    (cb.on("evicted", request="r2"), [5, 7]),
    (cb.on("evicted", block=3), [6]),
    (cb.on("prefix miss"), [1, 2, 6, 7]),
    (cb.on("prefix miss", request="r2"), []),
    (cb.on("finished"), [4, 5, 6, 8]),
    (cb.on("finished", request="r3"), [6]),
    (cb.on("refused"), [7]),
    (cb.on("waits"), [3, 4, 5]),
    (cb.on("starved"), []),
    (cb.on("allocated", block=7), [2, 4, 6]),
    (cb.on("shared", block=1), [2]),
    (cb.on("freed", block=7), [4, 6]),
    (cb.on("cached", block=7), [3, 6]),
    (cb.on(block=1), [1, 2, 4, 5]),
    (cb.on(request="r4"), [3, 6]),
    (cb.on(lambda record, state: len(state.waiting) == 2), [4, 5]),
    (cb.on(kv_above=0.99), [2, 3]),
    (cb.on(when="num_waiting >= 1"), [3, 4, 5]),
    (cb.on(when="r1.num_output_tokens == 3"), [3]),
    (cb.on("finished", when="num_waiting == 2"), [4, 5]),
]


@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_where_conditions_hold(case: int) -> None:
    condition, steps = GOLDEN[case]
    trace = golden()
    assert [r.step for r in trace if condition(r, trace.state(r.step))] == steps


@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_forwards_and_backwards_find_the_same_stops(case: int) -> None:
    condition, steps = GOLDEN[case]
    trace = golden()
    if condition.level:  # a level stops where it comes true
        steps = [s for s in steps if s - 1 not in steps]
    there, at = [], 0
    while (stop := next_stop(trace, [condition], at)) is not None:
        there.append(at := stop.step)
        assert stop.text.startswith(f"Step {at}: ") and json.dumps(stop.to_dict())
    back, at = [], len(trace) + 1
    while (stop := last_stop(trace, [condition], at)) is not None:
        back.append(at := stop.step)
    assert there == steps and back == steps[::-1]


def test_a_stop_says_why_and_where_inside_the_step() -> None:
    stop = next_stop(golden(), [cb.on("evicted"), cb.on("preempted", name="my own")], 0)
    assert (
        stop is not None
        and stop.step == 4
        and stop.names == ("evicted", "my own")
        and stop.cursor == Cursor(4, 1)
    )
    assert stop.sentences[0] == "Cached block 7 went to r1: r3 used it last, up to this step"
    assert (
        stop.text.startswith("Step 4: evicted: Cached block 7 went to r1")
        and "; my own: r3, last to arrive, was preempted for r1" in stop.text
    )
    level = next_stop(golden(), [cb.on(kv_above=0.9)], 0)
    assert (
        level is not None
        and level.text
        == "Step 2: KV above 90 % holds: 3 requests running, 0 waiting, 100 % of the blocks in use"
        and level.cursor == Cursor(2)
    )


def test_long_runs_are_searched_frame_by_frame() -> None:
    trace = run(specs(60), num_blocks=30, max_steps=2000)
    assert len(trace) > 150
    for condition in (cb.on("preempted"), cb.on(when="num_running == 1"), cb.on("finished", request="r1")):
        there, at = [], 0
        while (stop := next_stop(trace, [condition], at)) is not None:
            there.append(at := stop.step)
        back, at = [], len(trace) + 1
        while (stop := last_stop(trace, [condition], at)) is not None:
            back.append(at := stop.step)
        assert back[::-1] == there and there


@pytest.mark.parametrize(
    "wrong, what",
    [
        (lambda: cb.on("premepted"), "did you mean 'preempted'"),
        (lambda: cb.on(), "needs an event"),
        (lambda: cb.on(kv_above=90), "kv_above is 90"),
        (lambda: cb.on("arrived", block=3), "says nothing of blocks"),
        (lambda: cb.on(block=0), "1 or more"),
        (lambda: cb.on(lambda r, s: True, request="r1"), "a predicate sees the whole record"),
        (lambda: cb.on(when="kv_usge > 0.5"), "did you mean kv_usage"),
    ],
)
def test_wrong_conditions(wrong: Any, what: str) -> None:
    with pytest.raises((ConfigError, WatchError), match=what):
        wrong()


def test_names() -> None:
    assert cb.on("preempted", request="r3").name == "preempted r3"
    assert cb.on(block=5).name == "block 5"
    assert cb.on(kv_above=0.9).name == "KV above 90 %"
    assert (
        cb.on(lambda record, state: max(len(state.waiting), 1) > 3, name=None).name
        == "lambda record, state: max(len(state.waiting), 1) > 3"
    )

    def mine(record: Any, state: Any) -> bool:
        return False

    assert cb.on(mine).name == "mine"


# the session ------------------------------------------------------------------------------------------------


def test_a_run_stops_at_enabled_breakpoints_and_says_why() -> None:
    s = session()
    told: list[str] = []
    s.on_change(told.append)
    b = s.break_on("preempted")
    record = s.run()
    assert (
        record is not None and s.stopped_by is not None and s.stopped_by.step == record.step == len(s.trace)
    )
    assert any(isinstance(e, ev.Preempted) for e in record.events) and not any(
        isinstance(e, ev.Preempted) for r in s.trace.records[:-1] for e in r.events
    )
    assert "was preempted" in s.stopped_by.text and b.hits == 1
    assert told == ["breakpoints", "step"]
    b.enabled = False
    s.run()
    assert s.done and s.stopped_by is None


def test_until_and_breakpoints_both_count() -> None:
    s = session()
    s.break_on("finished")
    s.run(until=cb.on("arrived", request="r5"))
    assert s.stopped_by is not None and s.stopped_by.names in (("arrived r5",), ("finished",))
    plain = session()
    plain.breakpoints.append(lambda record, state: record.step == 3)
    plain.run()
    assert len(plain.trace) == 3 and isinstance(plain.breakpoints[0], Breakpoint)


def test_a_level_stops_once_each_time_it_comes_true() -> None:
    s = session()
    s.break_on(kv_above=0.6)
    stops = []
    while True:
        s.run()
        if s.stopped_by is None:
            break
        stops.append(s.stopped_by.step)
    usage = [0.0, *(1 - r.gauges.num_free_blocks / 21 for r in s.trace)]
    assert stops == [i for i in range(1, len(usage)) if usage[i] > 0.6 >= usage[i - 1]] and stops


def test_backwards_moves_the_cursor_alone() -> None:
    s = session()
    s.run()
    digest, steps = s.digest(), len(s.trace)
    s.break_on("preempted")
    held = [r.step for r in s.trace if any(isinstance(e, ev.Preempted) for e in r.events)]
    seen = []
    while (stop := s.run_back()) is not None:
        seen.append(stop.step)
        assert s.cursor == Cursor(stop.step) and s.stopped_by is stop
    assert seen == held[::-1] and len(held) > 1
    assert s.cursor.step == held[0] and s.stopped_by is None
    assert (s.digest(), len(s.trace)) == (digest, steps)
    forwards = []
    while (stop := s.run_on()) is not None:
        forwards.append(stop.step)
    assert [s.trace.state(0).step, *forwards] == [0, *held[1:]] and s.cursor == s.trace.last


def test_run_on_goes_over_recorded_steps_and_then_live() -> None:
    whole = session()
    whole.run()
    held = [r.step for r in whole.trace if any(isinstance(e, ev.Preempted) for e in r.events)]
    s = session()
    s.run(max_steps=held[1] - 1)
    s.seek(0)
    s.break_on("preempted")
    assert s.run_on().step == held[0] and len(s.trace) == held[1] - 1
    assert s.run_on().step == held[1] and len(s.trace) == held[1]


def test_run_to() -> None:
    s = session()
    s.run_to(5)
    assert s.cursor == Cursor(5) and len(s.trace) == 5
    s.run_to(2)
    assert s.cursor == Cursor(2) and len(s.trace) == 5
    s.break_on(lambda record, state: record.step == 7)
    assert s.run_to(9).step == 7 and len(s.trace) == 7
    with pytest.raises(IndexError):
        s.run_to(-1)


def test_step_stops_early() -> None:
    s = session()
    s.break_on(lambda record, state: record.step == 3)
    s.step(10)
    assert len(s.trace) == 3 and s.stopped_by is not None


def test_a_predicate_that_fails_is_named_and_the_run_goes_on() -> None:
    s = session()

    def typo(record: Any, state: Any) -> bool:
        return record.step > 2 and state.waitin

    b = s.break_on(typo)
    with pytest.raises(
        BreakpointError, match=r"breakpoint 'typo' failed at step 3: AttributeError: .*waitin"
    ):
        s.run()
    assert len(s.trace) == 3 and s.cursor == s.trace.last and not b.enabled and "AttributeError" in b.error
    s.run()
    clean = session()
    clean.run()
    assert s.done and cb.compare(s.trace, clean.trace).equal
    with pytest.raises(BreakpointError, match="step 1"):
        session().run(until=lambda record, state: 1 / 0)


def test_names_are_unique_and_can_be_cleared() -> None:
    s = session()
    assert [s.break_on("finished").name for _ in range(2)] == ["finished", "finished (2)"]
    s.clear("finished (2)")
    assert [b.name for b in s.breakpoints] == ["finished"]
    with pytest.raises(KeyError):
        s.clear("nobody")
    s.clear()
    assert s.breakpoints == []


# watches ----------------------------------------------------------------------------------------------------


def test_values_at_a_cursor_and_over_all_steps() -> None:
    trace = golden()
    assert cb.watch("num_running").series(trace) == [1, 3, 3, 1, 0, 0, 1, 0]
    assert cb.watch("kv_usage > 0.9").series(trace) == [False, True, True, False, False, False, False, False]
    assert cb.watch("r3.num_computed_tokens").series(trace) == [None, 9, 12, 0, 0, 13, 13, 13]
    assert cb.watch("r3.num_computed_tokens / r3.num_tokens >= 1").value(trace, 3) is False
    assert cb.watch("request('r2').num_preemptions + r3.num_preemptions").value(trace) == 1
    assert cb.watch("r4.status").series(trace) == [
        None,
        None,
        "waiting",
        "waiting",
        "waiting",
        "finished",
        "finished",
        "finished",
    ]
    assert cb.watch("r4.position").series(trace)[2:5] == [0, 1, 1]
    assert cb.watch("num_free_blocks if num_waiting else -1").series(trace)[:4] == [-1, -1, 0, 4]
    assert cb.watch("min(num_free_blocks, 4) * 2 - 1").value(trace, 1) == 7
    assert cb.watch("1 / num_waiting").series(trace)[:3] == [None, None, 1.0]
    assert cb.watch("num_waiting == 2 and not num_running > 1").series(trace)[3] is True
    assert cb.watch("0 < num_running <= 2").series(trace)[0] is True
    assert cb.watch("num_running").value(trace, 0) is None
    assert cb.watch("r3.num_blocks").value(trace, Cursor(4, 1)) == 0


def test_every_gauge_and_attribute_has_a_value_everywhere() -> None:
    trace = run(num_blocks=22)
    for name in GAUGES:
        assert None not in cb.watch(name).series(trace), name
    for name in ATTRIBUTES:
        if name != "position":
            assert None not in cb.watch(f"r1.{name}").series(trace), name
    assert set(EVENTS) >= {"preempted", "evicted", "prefix miss", "finished", "starved"}


def test_a_sessions_watches() -> None:
    s = session()
    s.watch("num_running")
    s.watch("r1.num_output_tokens * 1.0", name="out")
    s.run(max_steps=4)
    assert s.watched() == {
        "num_running": s.trace[-1].gauges.num_running,
        "out": float(len(s.request("r1").output_token_ids)),
    }
    assert [w.name for w in s.fork().watches] == ["num_running", "out"]


@pytest.mark.parametrize(
    "text, what",
    [
        ("", "is empty"),
        ("kv_usge > 1", "did you mean kv_usage"),
        ("r3", "r3.num_tokens"),
        ("r3.num_tokns", "did you mean num_tokens"),
        ("num_running.real", "is no request"),
        ("__import__('os').system('true')", "can't be watched"),
        ("open('x')", "can't be watched"),
        ("(lambda: 1)()", "can't be watched"),
        ("[x for x in (1, 2)]", "can't be watched"),
        ("'a'.join", "is no request"),
        ("r3.__class__", "a request has no __class__"),
        ("2 ** 9999999", "can't be watched"),
        ("1 << 99999999", "can't be watched"),
        ("f'{num_running}'", "can't be watched"),
        ("num_running := 3", "can't be read"),
        ("a = 1", "can't be read"),
        ("min(num_running)", "two values"),
        ("max(*r3)", "can't be watched"),
        ("round(num_running, ndigits=2)", "can't be watched"),
        ("request(1).num_tokens", "is no request"),
        ("request('r1', 'r2').num_tokens", "is no request"),
        ("1j", "neither a number nor a text"),
        ("b'x'", "neither a number nor a text"),
        ("...", "neither a number nor a text"),
        ("r1.num_tokens[0]", "can't be watched"),
        ("x" * 201, "201 characters"),
        ("(" * 150 + "1", "can't be read"),
        ("1;2", "can't be read"),
    ],
)
def test_what_is_no_expression_is_refused(text: str, what: str) -> None:
    with pytest.raises(WatchError, match=what):
        cb.watch(text)


def test_texts_are_not_computed_with() -> None:
    trace = golden()
    assert cb.watch("'a' * 999999999").value(trace) is None
    assert cb.watch("r1.status + r1.status").value(trace) is None
    assert cb.watch("r1.status < 3").value(trace) is None
    assert cb.watch("r1.status == 3").value(trace) is False


@given(st.text(max_size=60))
def test_any_text_is_refused_or_has_values(text: str) -> None:
    trace = golden().share(3)
    try:
        w = cb.watch(text)
    except WatchError:
        return
    w.series(trace)
