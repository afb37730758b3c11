"""Sums close, and the checks find what does not."""

from __future__ import annotations

import msgspec
import pytest

from cbviz.messages import Gauges, SlotAccount, StepRecord, TokenAccount
from cbviz.trace.accounting import check_record, check_trace, count_slots, executed_at, summary
from cbviz.trace.trace import Cursor, Trace
from tests.golden import golden, header, records


def changed(step: int, **fields: object) -> Trace:
    trace = Trace(header())
    for r in records():
        if r.step == step:
            for name, value in fields.items():
                setattr(r, name, value)
        trace.append(r)
    return trace


def test_the_hand_made_run_adds_up() -> None:
    check_trace(golden())


def test_slots_are_counted_at_the_forward_pass() -> None:
    trace = golden()
    for record in trace:
        assert count_slots(trace.state(Cursor(record.step, executed_at(record)))) == record.slots


def test_summary() -> None:
    s = summary(golden())
    assert s["tokens"] == {"total": 45, "useful": 37, "recomputed": 8, "padded": 0, "rejected": 0}
    assert s["slots"] == {
        "total": 28,
        "used": 0,
        "partly_empty": 0,
        "reserved": 0,
        "cached": 20,
        "free": 8,
        "fragmented": 0,
    }
    assert s["slot_steps"]["total"] == 8 * 28
    assert summary(golden(), 2)["tokens"]["total"] == 22
    assert summary(Trace())["tokens"]["total"] == 0


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"tokens": TokenAccount(9, 2, 8)}, "tokens do not add up: total 9, but useful 2"),
        (
            {"tokens": TokenAccount(10, 2, 8)},
            "10 tokens are accounted for, but its chunks and padding computed 9",
        ),
        ({"tokens": TokenAccount(9, 9)}, "0 recomputed tokens are accounted for, its chunks say 8"),
        ({"tokens": TokenAccount(9, 0, 8, 0, 1)}, "1 rejected"),
        ({"tokens": TokenAccount(9, 0, 8, 1)}, "1 padded"),
        ({"tokens": TokenAccount(9, 2, 8, -1)}, "negative"),
        ({"slots": SlotAccount(28, used=13)}, "slots do not add up"),
    ],
)
def test_a_wrong_sum_is_named(fields: dict[str, object], words: str) -> None:
    record = changed(6, **fields).record(6)
    with pytest.raises(AssertionError, match="step 6") as e:
        check_record(record)
    assert words in str(e.value)


def test_a_sum_that_closes_but_is_wrong_is_found_by_the_recount() -> None:
    with pytest.raises(AssertionError, match=r"step 4.*recount"):
        check_trace(changed(4, slots=SlotAccount(28, used=17, partly_empty=3, cached=4, free=4)))


def test_wrong_gauges_are_found() -> None:
    with pytest.raises(AssertionError, match="step 4: gauges say 1 running and 3 waiting"):
        check_trace(changed(4, gauges=Gauges(1, 3, 1, 4, 3)))
    with pytest.raises(AssertionError, match="step 4: gauges say 5 free blocks"):
        check_trace(changed(4, gauges=Gauges(1, 2, 1, 5, 3)))


def test_the_golden_run_survives_a_file(tmp_path) -> None:
    from cbviz.trace import load

    again = load(golden().save(tmp_path / "g.jsonl.gz"))
    check_trace(again)
    assert [msgspec.json.encode(r) for r in again] == [msgspec.json.encode(r) for r in golden()]
    assert isinstance(again[0], StepRecord)
