"""The text twin, as it stands on the golden run."""

from __future__ import annotations

import pytest

from cbviz import events as ev
from cbviz.messages import StepRecord
from cbviz.trace import Trace
from cbviz.trace.schema import TraceHeader
from cbviz.trace.show import LETTERS, owner_sign, printable, show, strip
from cbviz.trace.state import STATES
from tests.golden import NUM_STEPS, golden
from tests.runs import run


def test_step_four() -> None:
    text = show(golden(), 4)
    assert text.splitlines()[:3] == [
        "cbviz  paper | sim | vllm | fcfs",
        (
            "step 4 of 8  1/4 done  1 running of 3 seats  2 waiting  t 44 ms  181.8 tokens/s  KV 42.9 %  1 "
            "preemption"
        ),
        "times are modelled (a device of 1 GB/s and 1 GFLOP/s): lower bounds, not a measurement",
    ]
    assert (
        "  0 r1 |#===      | finished     4/4\n  1 r2 | #==      | decode       3/8    3 bl\n  2 r3 | ##x  "
        "    | preempted    1/2\n  3 r4 |  ..      | waiting      0/5\n"
    ) in text
    assert "       0 _11:1::.\n" in text
    assert "r3, last to arrive, was preempted for r1" in text
    assert "  2 of 12 tokens (f prefill, r recomputed, d decode, p padded):\n  r1 1d  r2 1d\n" in text
    assert "QUEUE\n  r3 (reason: preempted)  r4\n" in text
    assert "tokens of the step  2 = 2 useful + 0 recomputed + 0 padded + 0 rejected" in text
    assert "slots of the pool   28 = 17 used + 3 partly empty + 0 reserved + 8 cached + 0 free" in text


def test_signs_of_blocks() -> None:
    assert "       0 _**01222\n" in show(golden(), 2)
    assert owner_sign(0) == "0" and owner_sign(61) == "z" and owner_sign(62) == "0" and owner_sign(-1) == "?"


def test_strips() -> None:
    assert [strip(golden(), i, 8) for i in range(6)] == [
        "#===    ",
        " #===   ",
        " ##xxr  ",
        "  ...aaa",
        "      aa",
        "      #a",
    ]
    assert strip(golden(), 2, 8, 3) == "r  " and strip(golden(), 0, 0) == ""
    assert set(LETTERS) == set(STATES)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_wider_than_asked(width: int) -> None:
    for trace in (golden(), run(discipline="static-padded"), Trace()):
        for step in range(len(trace) + 1):
            assert max(map(len, show(trace, step, width).splitlines())) <= width


def test_start_end_and_beyond() -> None:
    assert "no request has arrived" in show(golden(), 0)
    assert show(golden()) == show(golden(), NUM_STEPS)
    with pytest.raises(IndexError, match=r"steps 0\.\.8"):
        show(golden(), 9)


def test_many_requests_are_cut_to_the_unfinished_and_the_last_to_end() -> None:
    text = show(run(discipline="chunked"), max_rows=4)
    assert "(6 more rows not shown)" in text


def test_no_text_can_steer_a_terminal() -> None:
    trace = Trace(TraceHeader(num_blocks=4, model="m\x1b[2J"))
    evil = "r\x1b]0;x\x07"
    trace.append(
        StepRecord(
            1, 0.0, 1.0, "measured", [], [ev.Arrived(evil, 0, 1, 1), ev.NotAdmitted(evil, "seats\x1b", 1, 0)]
        )
    )
    assert "\x1b" not in show(trace) and "\x07" not in show(trace)
    assert printable("a\nb\x1b") == "a⏎b·"


def test_a_trace_without_tables_is_shown_without_them() -> None:
    text = show(golden(capabilities=["schedule"]), 4)
    assert "BLOCKS" not in text and "ACCOUNTING" not in text and "tokens/s" not in text and "TIMELINE" in text
