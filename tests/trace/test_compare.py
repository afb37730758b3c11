"""Two runs: equal, or where they part, with the figures."""

from __future__ import annotations

import json

import msgspec
import pytest

from cbviz import events as ev
from cbviz.messages import ChunkRecord, StepRecord
from cbviz.trace import Trace, compare, compare_tokens, metrics
from cbviz.trace.compare import KEYS, metrics_table, step_values
from tests.golden import golden, header, records


def altered(step: int, change, **fields) -> Trace:
    trace = Trace(header(**fields))
    for r in records():
        if r.step == step:
            change(r)
        trace.append(r)
    return trace


def swap(record: StepRecord, old: type, **fields) -> None:
    record.events[:] = [msgspec.structs.replace(e, **fields) if type(e) is old else e for e in record.events]


def test_a_run_equals_itself_whatever_the_times() -> None:
    def later(r: StepRecord) -> None:
        r.t1_s += 0.001
        r.clock = "measured"

    c = compare(golden(), altered(3, later))
    assert c.equal and c.schedules_equal and c.blocks_equal and c.tokens_equal
    assert c.first_difference is None and c.first_token_difference is None and c.ties == []


def test_a_chunk_that_differs() -> None:
    def shorter(r: StepRecord) -> None:
        r.chunks[2] = ChunkRecord("r3", 0, 8, "prefill")

    c = compare(golden(), altered(2, shorter), ("a", "b"))
    assert not c.equal and not c.schedules_equal and c.blocks_equal and c.tokens_equal
    d = c.first_difference
    assert (d.step, d.key) == (2, "scheduled")
    assert (d.ours[2], d.theirs[2]) == (["r3", 0, 9], ["r3", 0, 8])
    assert str(d) == "step 2, scheduled: a has r3 0 9, b has r3 0 8"


def test_a_block_that_differs() -> None:
    def other(r: StepRecord) -> None:
        swap(r, ev.Allocated, block_ids=[1, 2, 4])

    c = compare(golden(), altered(1, other))
    assert c.schedules_equal and not c.blocks_equal and c.tokens_equal and not c.equal
    assert str(c.first_difference) == "step 1, blocks: ours has r1 [1, 2, 3], theirs has r1 [1, 2, 4]"


@pytest.mark.parametrize("step, gap, tie", [(2, 0.0004, True), (1, 0.5, False)])
def test_a_token_that_differs_and_a_tie(step: int, gap: float, tie: bool) -> None:
    def other(r: StepRecord) -> None:
        r.events[:] = [ev.Sampled("r1", [99]) if isinstance(e, ev.Sampled) and e.request_id == "r1" else e for e in r.events]

    c = compare(golden(), altered(step, other))
    assert c.schedules_equal and c.blocks_equal and not c.tokens_equal
    t = c.first_token_difference
    assert (t.request_id, t.position, t.ours, t.theirs, t.gap_nats, t.tie) == ("r1", step - 1, 10 + step, 99, gap, tie)
    assert c.tokens_equal_up_to_ties is tie and bool(c.ties) is tie
    assert ("a tie" in str(t)) is tie and f"token {10 + step} against 99" in str(t)


def test_the_second_token_of_a_step_has_its_own_gap() -> None:
    def two(ids: list[int]):
        def change(r: StepRecord) -> None:
            r.events[:] = [ev.Sampled("r2", ids) if isinstance(e, ev.Sampled) and e.request_id == "r2" else e for e in r.events]
            r.gaps = {"r1": [0.0004], "r2": [0.7, 0.0002]}

        return change

    t = compare(altered(2, two([21, 50])), altered(2, two([21, 51]))).first_token_difference
    assert (t.position, t.gap_nats, t.tie) == (1, 0.0002, True)


def test_one_run_goes_on_longer() -> None:
    c = compare(golden(), golden().share(5))
    assert not c.schedules_equal and c.first_difference.key == "steps" and c.first_difference.step == 6
    assert str(c.first_difference) == "step 6: theirs has ended, ours goes on"
    t = c.first_token_difference
    assert (t.request_id, t.position, t.ours, t.theirs, t.tie) == ("r3", 1, 32, None, False)
    assert str(t) == "r3: equal for 1 tokens, then only ours goes on"
    assert [d.request_id for d in c.token_differences] == ["r3", "r6", "r5"]


def test_without_blocks_or_tokens_the_rest_is_compared_and_said() -> None:
    c = compare(golden(), golden(capabilities=["schedule"]), ("ours", "log"))
    assert c.schedules_equal and c.first_difference is None
    assert "blocks were not compared: log has none" in c.notes and "tokens were not compared: log has none" in c.notes


def test_reasons_and_times_are_not_compared() -> None:
    values = step_values(golden().record(4))
    assert tuple(values) == KEYS
    assert values["preempted"] == ["r3"] and values["scheduled"] == [["r1", 12, 1], ["r2", 11, 1]] and values["evicted"] == [7]


def test_metrics_side_by_side() -> None:
    c = compare(golden(), golden().share(4))
    ours, theirs, ratio = c.metrics["output_tokens"]
    assert (ours, theirs, ratio) == (11, 8, pytest.approx(8 / 11))
    text = str(c)
    assert "schedules differ, blocks equal, tokens differ" in text and "output_tokens" in text and "0.73x" in text
    json.dumps(c.to_dict(), allow_nan=False)
    assert "not comparable" in " ".join(compare(golden(), altered(1, lambda r: setattr(r, "clock", "measured"))).notes)


def test_tables_of_several_runs() -> None:
    table = metrics_table({"static": metrics(golden()), "chunked": metrics(golden().share(4))})
    assert table.splitlines()[0].split() == ["static", "chunked"]
    assert "times are modelled" in table.splitlines()[-1]


def test_tokens_of_several_runs() -> None:
    def other(r: StepRecord) -> None:
        r.events[:] = [ev.Sampled("r1", [99]) if isinstance(e, ev.Sampled) and e.request_id == "r1" else e for e in r.events]

    c = compare_tokens({"static": golden(), "chunked": golden(), "orca": altered(2, other)})
    assert not c.equal and c.equal_up_to_ties
    assert str(c).splitlines()[0] == "chunked: all 6 requests have the same tokens as under static"
    assert "orca: 1 of 6 requests differ from static, 1 of them first at a tie" in str(c)
    assert compare_tokens([golden(), golden()]).equal
    with pytest.raises(ValueError, match="at least 2"):
        compare_tokens([golden()])


def test_empty_traces() -> None:
    c = compare(Trace(), Trace())
    assert c.equal and str(c)
