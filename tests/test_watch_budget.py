"""An expression costs what its parts cost and no more, whatever numbers stand in it: it has a value or it is
refused.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cbviz as cb
from cbviz.bounded import MOST_BITS
from cbviz.breakpoints import BreakpointError, WatchError
from cbviz.session import Session
from tests.golden import golden
from tests.runs import specs

CALLS_A_PART = 25
"""Calls of Python functions that one part of an expression may take; counted, so that the test says the same
on any machine.
"""

NUMBERS = (
    "0",
    "1",
    "2",
    "-1",
    "10",
    "0.5",
    "1e308",
    "-1e308",
    "1e-320",
    "1e999",
    "9" * 60,
    "0x" + "f" * 60,
    "-99999999999",
    "99999999999",
    "True",
    "None",
)
TEXTS = ("''", "'a'", "'running'", "'\\u2028</script>'")
NAMES = (
    "num_running",
    "kv_usage",
    "step",
    "r1.num_tokens",
    "r2.position",
    "r9.num_tokens",
    "r1.status",
    "request('r3').priority",
)


def joined(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """The rules of the grammar, each over smaller expressions."""
    signs = st.sampled_from(["+", "-", "*", "/", "//", "%", "<", "<=", "==", "!=", "and", "or"])
    pairs = st.tuples(children, signs, children).map(lambda x: f"({x[0]} {x[1]} {x[2]})")
    unary = st.tuples(st.sampled_from(["-", "+", "not "]), children).map(lambda x: f"({x[0]}{x[1]})")
    chosen = st.tuples(children, children, children).map(lambda x: f"({x[0]} if {x[1]} else {x[2]})")
    called = st.tuples(st.sampled_from(["min", "max", "round"]), children, children).map(
        lambda x: f"{x[0]}({x[1]}, {x[2]})"
    )
    alone = st.tuples(st.sampled_from(["abs", "round"]), children).map(lambda x: f"{x[0]}({x[1]})")
    return st.one_of(pairs, unary, chosen, called, alone)


EXPRESSIONS = st.recursive(st.sampled_from([*NUMBERS, *TEXTS, *NAMES]), joined, max_leaves=12)


def calls_of(work: Callable[[], Any]) -> tuple[Any, int]:
    """What `work` returns, and how many calls of functions it took."""
    count = 0

    def note(frame: Any, event: str, what: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = work()
    finally:
        sys.setprofile(before)
    return result, count


@settings(max_examples=500)
@given(EXPRESSIONS)
def test_an_expression_of_the_grammar_has_a_small_value_or_is_refused_within_a_counted_budget(
    text: str,
) -> None:
    trace = golden()
    record, state = trace.record(4), trace.state(4)

    try:
        watch = cb.watch(text)
    except WatchError:
        return

    def value() -> Any:
        try:
            return watch.of(record, state)
        except WatchError as e:
            return e

    found, calls = calls_of(value)
    assert calls <= CALLS_A_PART * len(list(ast.walk(ast.parse(text, mode="eval"))))
    assert found is None or isinstance(found, (bool, int, float, str, WatchError))
    if isinstance(found, int):
        assert found.bit_length() <= MOST_BITS


@pytest.mark.parametrize(
    "text, what",
    [
        ("round(10, -99999999999)", "round takes -308 to 308 places"),
        ("round(num_running, -99999999999)", "round takes"),
        ("round(1e308) * round(1e308)", "the most is 1,024"),
        ("round(num_running, 5000000000 * -1)", "round takes"),
        ("1 if num_running else round(10, -99999999999)", "round takes"),
        ("-" * 150 + "1", "nested"),
        (f"max({','.join('1' * 97)})", "parts"),
        ("not " * 40 + "1", "nested"),
        ("(" * 60 + "1" + ")" * 60 + "." * 3, "can't be read"),
        ("abs(" * 30 + "1" + ")" * 30, "nested"),
        ("'\\ud800'", "half a character"),
        ("request('\\udfff').num_tokens == '\\udfff'", "half a character"),
    ],
)
def test_what_costs_too_much_is_refused_when_it_is_written(text: str, what: str) -> None:
    with pytest.raises(WatchError, match=what):
        cb.watch(text)


def test_a_number_that_grows_beyond_the_limit_at_some_step_is_refused_there_with_the_limit() -> None:
    trace = golden()
    grows = cb.watch("round(1e308) * num_running")
    assert grows.value(trace, 0) is None
    with pytest.raises(WatchError, match=r"bits, the most is 1,024"):
        grows.series(trace)


def test_a_session_refuses_a_costly_watch_or_breakpoint_at_once_and_keeps_what_it_has() -> None:
    s = Session(specs(3), runner="sim", num_blocks=40, block_size=4, max_model_len=80)
    s.run(max_steps=2)
    costly = "round(10, -99999999999 * num_running)"
    for add in (s.watch, lambda text: s.break_on(when=text)):
        with pytest.raises(WatchError, match="round takes"):
            add(costly)
    assert s.watches == []
    assert s.breakpoints == []


def test_a_breakpoint_that_becomes_too_costly_is_switched_off_with_its_reason_and_the_run_goes_on() -> None:
    s = Session(specs(3), runner="sim", num_blocks=40, block_size=4, max_model_len=80)
    b = s.break_on(when="round(1, -200 * step) > 1")
    with pytest.raises(BreakpointError, match=r"at step 2: .*round takes"):
        s.run()
    assert not b.enabled
    assert "round takes" in b.error
    s.run()
    assert s.done
