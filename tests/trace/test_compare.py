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
        r.events[:] = [
            ev.Sampled("r1", [99]) if isinstance(e, ev.Sampled) and e.request_id == "r1" else e
            for e in r.events
        ]

    c = compare(golden(), altered(step, other))
    assert c.schedules_equal and c.blocks_equal and not c.tokens_equal
    t = c.first_token_difference
    assert (t.request_id, t.position, t.ours, t.theirs, t.gap_nats, t.tie) == (
        "r1",
        step - 1,
        10 + step,
        99,
        gap,
        tie,
    )
    assert c.tokens_equal_up_to_ties is tie and bool(c.ties) is tie
    assert ("a tie" in str(t)) is tie and f"token {10 + step} against 99" in str(t)


def test_the_second_token_of_a_step_has_its_own_gap() -> None:
    def two(ids: list[int]):
        def change(r: StepRecord) -> None:
            r.events[:] = [
                ev.Sampled("r2", ids) if isinstance(e, ev.Sampled) and e.request_id == "r2" else e
                for e in r.events
            ]
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
    assert (
        "blocks were not compared: log has none" in c.notes
        and "tokens were not compared: log has none" in c.notes
    )


def test_reasons_and_times_are_not_compared() -> None:
    values = step_values(golden().record(4))
    assert tuple(values) == KEYS
    assert (
        values["preempted"] == ["r3"]
        and values["scheduled"] == [["r1", 12, 1], ["r2", 11, 1]]
        and values["evicted"] == [7]
    )


def test_metrics_side_by_side() -> None:
    c = compare(golden(), golden().share(4))
    ours, theirs, ratio = c.metrics["output_tokens"]
    assert (ours, theirs, ratio) == (11, 8, pytest.approx(8 / 11))
    text = str(c)
    assert (
        "schedules differ, blocks equal, tokens differ" in text
        and "output_tokens" in text
        and "0.73x" in text
    )
    json.dumps(c.to_dict(), allow_nan=False)
    assert "not comparable" in " ".join(
        compare(golden(), altered(1, lambda r: setattr(r, "clock", "measured"))).notes
    )


def test_tables_of_several_runs() -> None:
    table = metrics_table({"static": metrics(golden()), "chunked": metrics(golden().share(4))})
    assert table.splitlines()[0].split() == ["static", "chunked"]
    assert "times are modelled" in table.splitlines()[-1]


def test_tokens_of_several_runs() -> None:
    def other(r: StepRecord) -> None:
        r.events[:] = [
            ev.Sampled("r1", [99]) if isinstance(e, ev.Sampled) and e.request_id == "r1" else e
            for e in r.events
        ]

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


# where they part, causes, alignment -------------------------------------------------------------------------


def test_where_schedules_part_and_why() -> None:
    from tests.runs import run, specs

    a, b = (
        run(specs(14), discipline="vllm", num_blocks=30),
        run(specs(14), discipline="vllm", num_blocks=30, policy="sjf"),
    )
    p = compare(a, b, ("fcfs", "sjf")).parting
    assert p is not None and p.changed == ("policy: fcfs / sjf",)
    assert all(
        step_values(a.record(s)) == step_values(b.record(s)) for s in range(1, p.step)
    ) and step_values(a.record(p.step)) != step_values(b.record(p.step))
    assert "r5 got a seat at once" in p.ours and "r5 waits: all 4 seats are taken" in p.theirs
    assert p.text.startswith(f"the schedules part at step {p.step}. fcfs: ") and not set(p.ours) & set(
        p.theirs
    )
    assert compare(a, a).parting is None and compare(a, a).causes == []


def test_blocks_that_part_first_do_not_hide_where_the_schedules_do() -> None:
    from tests.runs import run, specs

    c = compare(
        run(specs(14), num_blocks=30, discipline="vllm"), run(specs(14), num_blocks=30, discipline="orca")
    )
    assert c.first_difference.key == "blocks" and c.first_difference.step == 1
    assert c.parting.step > 1 and "the schedules part" in c.parting.text

    def other(r: StepRecord) -> None:
        swap(r, ev.Allocated, block_ids=[1, 2, 4])

    assert "the block tables part at step 1" in compare(golden(), altered(1, other)).parting.text


def test_causes_are_the_sums_of_the_waits() -> None:
    from cbviz.trace.intervals import spent, total
    from tests.runs import run, specs

    a, b = run(specs(14), discipline="vllm", num_blocks=30), run(specs(14), discipline="vllm", num_blocks=22)
    c = compare(a, b, ("large", "small"))
    x, y = spent(a), spent(b)
    n, m = (sum(total(s.waiting)[0] for s in z.values()) for z in (x, y))
    assert (
        m > n
        and c.causes[0].startswith(f"Requests waited {n} steps (")
        and f"{m} (" in c.causes[0]
        and "more for blocks" in c.causes[0]
    )
    longer = next(s for s in c.causes if "waited longer" in s)
    worst = max(x, key=lambda r: total(y[r].waiting)[0] - total(x[r].waiting)[0])
    by = total(y[worst].waiting)[0] - total(x[worst].waiting)[0]
    assert f"{worst} by {by} steps" in longer and worst in longer.request_ids
    assert any(
        s.kind == "preempted"
        and s.startswith("Requests were preempted 1 time under large (r6) and 5 times under small")
        for s in c.causes
    )
    json.dumps(c.to_dict(), allow_nan=False)
    assert c.causes[0] in str(c) and c.parting.text in str(c)


@pytest.mark.parametrize(
    "discipline", ["vllm", "chunked", "paged", "static", "static-padded", "orca", "retract"]
)
def test_every_step_of_a_request_is_counted_once(discipline: str) -> None:
    from cbviz.trace.intervals import NOT_RECORDED, spent
    from tests.runs import run, specs

    trace = run(specs(14), discipline=discipline, num_blocks=24, at={9: ("abort", "r4")})
    for rid, s in spent(trace).items():
        r = trace.state().request(rid)
        alive = r.finish_step - r.first_step + (r.finish_reason != "abort")
        assert s.steps == alive, (rid, s)
        assert sum(n for n, _ in s.ran.values()) == sum(
            c.request_id == rid and not c.padding for record in trace for c in record.chunks
        )
        assert NOT_RECORDED not in {**s.waiting, **s.preempted, **s.skipped}, (rid, s)


def test_proof_of_equal_outputs() -> None:
    from cbviz.trace.compare import tokens_digest

    c = compare(golden(), golden())
    assert c.proof == (
        "outputs are equal: 11 tokens of 6 requests, compared one by one (sha256 of both: "
        f"{tokens_digest(golden())[:16]})"
    )

    def other(r: StepRecord) -> None:
        r.events[:] = [
            ev.Sampled("r1", [99]) if isinstance(e, ev.Sampled) and e.request_id == "r1" else e
            for e in r.events
        ]
        r.gaps = {"r1": [0.25], "r2": [0.7]}
        r.logprobs = {"r1": [-1.5]}

    changed = altered(2, other)
    c = compare(golden(), changed, ("a", "b"))
    t = c.first_token_difference
    assert t.gaps == (0.0004, 0.25) and t.logprobs == (None, -1.5) and t.gap_nats == 0.0004
    assert c.proof == (
        "outputs differ for 1 of 6 requests, first r1, output 1: token 12 against 99; its two best "
        "tokens were apart by 0.0004 nats in a and 0.2500 nats in b, a tie"
    )
    assert tokens_digest(changed) != tokens_digest(golden())


def test_cursors_side_by_side() -> None:
    from cbviz.config import ConfigError
    from cbviz.trace.compare import align
    from cbviz.trace.trace import Cursor

    a = golden()

    def slower(r: StepRecord) -> None:
        r.t0_s, r.t1_s = 2 * r.t0_s, 2 * r.t1_s

    b = Trace(header())
    for r in records():
        slower(r)
        b.append(r)
    assert [align(a, b, s).step for s in range(9)] == list(range(9))
    assert (
        align(a, a.share(4), 7) == Cursor(4)
        and align(a, a, Cursor(4, 3)) == Cursor(4, 3)
        and align(a, a, Cursor(2, 99)) == Cursor(2, 18)
    )
    assert [align(a, a, s, "time").step for s in range(8)] == list(
        range(8)
    )  # though steps 7 and 8 end at one moment
    assert align(a, b, 4, "time") == Cursor(2)  # a has come to 44 ms, b's second step ended at 40
    assert align(b, a, 2, "time") == Cursor(3)
    assert align(a, b, 0, "time") == Cursor(0) and align(a, a, Cursor(4, 3), "time") == Cursor(3)
    with pytest.raises(ConfigError, match="'step' or 'time'"):
        align(a, b, 1, "tokens")
    with pytest.raises(IndexError):
        align(a, b, 99)


def test_several_against_the_first() -> None:
    from cbviz.trace.compare import compare_all

    found = compare_all({"a": golden(), "b": golden(), "c": golden().share(4)})
    assert (
        list(found) == ["b", "c"]
        and found["b"].equal
        and not found["c"].equal
        and found["c"].names == ("a", "c")
    )
    with pytest.raises(ValueError, match="at least 2"):
        compare_all({"a": golden()})


def test_every_reason_has_an_end_of_a_sentence() -> None:
    from cbviz.trace.compare import FOR
    from cbviz.trace.explain import SKIPS
    from tests.trace.test_explain import documented, written

    assert documented(ev.NotAdmitted) | written("_wait") | set(SKIPS) <= set(FOR)


def test_a_branch_with_another_policy_parts_where_it_first_decides_otherwise() -> None:
    from cbviz.session import Session
    from tests.runs import specs

    s = Session(
        specs(14),
        runner="sim",
        discipline="vllm",
        max_num_seqs=4,
        num_blocks=30,
        block_size=4,
        max_model_len=80,
    )
    s.run()
    b = s.fork(at=3, policy="sjf")
    b.run()
    c = compare(s.trace, b.trace, ("fcfs", "sjf"))
    assert c.first_difference.step == 4 and c.first_difference.key == "configured"  # the change itself
    assert (
        c.parting.step == 7
        and "r5 waits: all 4 seats are taken" in c.parting.theirs
        and "policy: fcfs / sjf" in c.parting.changed
    )
    assert c.tokens_equal and c.causes
