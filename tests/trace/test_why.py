"""Answers about one thing: the golden run word for word, and held against what the engine itself said in runs
of all disciplines.
"""

from __future__ import annotations

import json

import pytest

from cbviz import events as ev
from cbviz.disciplines import DISCIPLINES
from cbviz.trace.trace import Cursor
from cbviz.trace.why import _hits, why_block, why_chunk, why_missed, why_preempted, why_waiting
from tests.golden import NUM_STEPS, golden
from tests.runs import run, specs


def test_waiting_for_a_seat() -> None:
    w = why_waiting(golden(), 3, "r4")
    assert w.sentences == [
        "r4 is at the head of the queue",
        "r4 waits: all 3 seats are taken",
        "A seat: all 3 are taken; r1 ends first, after at most 1 more token",
        "Blocks: all its known tokens, 3, fill 1 block of 4; it needs 1, 0 are free",
        "1 block is missing: r1 gives back 1 after at most 1 more token; then there are enough",
    ]
    f = w.facts
    assert (
        f["position"],
        f["reason"],
        f["seats"],
        f["seats_taken"],
        f["blocks_needed"],
        f["blocks_free"],
        f["enough_after"],
    ) == (0, "seats", 3, 3, 1, 0, "r1")
    assert f["frees"] == [
        {"request_id": "r1", "blocks": 1, "tokens_left": 1},
        {"request_id": "r3", "blocks": 3, "tokens_left": 1},
        {"request_id": "r2", "blocks": 1, "tokens_left": 6},
    ]


def test_waiting_for_the_head() -> None:
    w = why_waiting(golden(), 5, "r4")
    assert w.sentences[:2] == [
        "r4 is second in the queue: r3 stands before it, and nobody is overtaken",
        "r3 waits: it needs 3 blocks, 2 are free",
    ]
    assert w.facts["ahead"] == ["r3"] and w.facts["reason"] == "blocks"
    inside = why_waiting(
        golden(), Cursor(5, 4), "r3"
    )  # the cached block 5 is hit, and is one of the free ones
    assert (
        inside.facts["blocks_free"] == 3
        and inside.facts["blocks_cached"] == 1
        and inside.facts["blocks_needed"] == 4
    )


def test_who_does_not_wait() -> None:
    assert str(why_waiting(golden(), 5, "r1")) == "r1 does not wait: it has finished"
    assert str(why_waiting(golden(), 2, "r2")) == "r2 does not wait: it is running"
    assert str(why_waiting(golden(), 7, "r6")) == "r6 does not wait: it was refused"
    with pytest.raises(KeyError, match="r9"):
        why_waiting(golden(), 3, "r9")


def test_what_capped_a_chunk() -> None:
    w = why_chunk(golden(), 2, "r3")
    assert w.sentences == [
        "r3's prefill takes 9 of 12 tokens: 1 decode and 1 prefill took 3 of the step's budget of 12",
        "Before it, r1 (1) and r2 (2) took 3 of the step's 12 tokens; 9 were left",
    ]
    assert (w.facts["num_tokens"], w.facts["wanted"], w.facts["cap"], w.facts["before"]) == (
        9,
        12,
        "budget",
        [["r1", 1], ["r2", 2]],
    )
    assert (
        why_chunk(golden(), 2, "r1").sentences[-1]
        == "Nothing held it back: it took the one token that it had to compute"
    )
    assert why_chunk(golden(), 4, "r3").facts["cap"] == "preempted"
    assert why_chunk(golden(), 4, "r4").facts["cap"] == "waiting"
    assert str(why_chunk(golden(), 8, "r1")) == "r1 had no part in step 8: it is finished"


def test_why_preempted() -> None:
    w = why_preempted(golden(), 4, "r3")
    assert w.sentences[1:] == [
        "Candidates by place in the running order, first to lose first: r3 (came last; 12 computed, 3 "
        "blocks of its own), r2 (came second; 11 computed, 1 block of its own) "
        "and r1 (came first; 12 computed, 1 block of its own)",
        "It held 3 blocks; 3 became free",
        "It lost 12 computed tokens; it has no seat again yet",
    ]
    assert [x["request_id"] for x in w.facts["ranking"]] == ["r3", "r2", "r1"] and w.facts[
        "tokens_lost"
    ] == 12
    later = why_preempted(golden(), 8, "r3")
    assert later.step == 4 and later.sentences[-1] == (
        "It lost 12 computed tokens; at step 6, 2 steps later, it came back: the cache still had 4 of "
        "them, 8 had to be computed again"
    )
    assert str(why_preempted(golden(), 3, "r3")) == "r3 has not been preempted"


def test_why_a_prefix_missed() -> None:
    evicted = why_missed(golden(), 6, "r3")
    assert evicted.sentences == [
        "The prefix of r3 stopped matching at block 1: it was cached until step 5, when r2 took the block",
        "It lay in block 6, filled for r3; r3 used it last, 1 step before, when r2 took it at step 5",
    ]
    assert (evicted.facts["block_id"], evicted.facts["idle_steps"], evicted.facts["tokens_found"]) == (
        6,
        1,
        4,
    )
    assert (
        why_missed(golden(), 2, "r2").sentences[-1]
        == "Its last 2 tokens, from position 8, fill no block of 4: only whole blocks are found"
    )
    assert (
        why_missed(golden(), 2, "r3").sentences[-1]
        == "No request that ran before it begins with the same token"
    )
    assert why_missed(golden(), 3, "r4").facts["cause"] == ""
    assert why_missed(run(enable_prefix_caching=False), None, "r1").facts == {"cause": "off"}


def test_the_first_differing_token_of_a_miss() -> None:
    """In runs whose prompts share 12 tokens, a `new` miss names an earlier request and the position at which
    the two really part.
    """
    trace = run(specs(12), num_blocks=60)
    parted = 0
    for record in trace:
        for e in record.events:
            if not (isinstance(e, ev.PrefixMiss) and e.cause == "new"):
                continue
            f = why_missed(trace, record.step, e.request_id).facts
            if f["other"] is None:
                continue
            a, b = (
                trace.specs[x].prompt_token_ids + tuple(trace.state().request(x).output_token_ids)
                for x in (e.request_id, f["other"])
            )
            n = f["position"]
            assert n >= 12 and a[:n] == b[:n]
            if f["ours"] is not None and f["theirs"] is not None:
                assert (a[n], b[n]) == (f["ours"], f["theirs"]) and a[n] != b[n]
                assert n // 4 == e.block_index
                parted += 1
    assert parted > 3


def test_the_life_of_a_block() -> None:
    w = why_block(golden(), 8, 7)
    assert w.sentences == [
        "Block 7 is free, but what r3 left in it can still be found; nobody has used it for 2 steps",
        "Step 2: r3 took it as a new block",
        "Step 3: r3 filled it: it can be found from now on",
        "Step 4: r3 gave it back when it was preempted",
        "Step 4: it was evicted: r1 took it; r3 had used it last, in that same step",
        "Step 4: r1 took it as a new block",
        "Step 4: r1 gave it back when it ended",
        "Step 6: r3 took it as a new block",
        "Step 6: r3 filled it: it can be found from now on",
        "Step 6: r3 gave it back when it ended",
    ]
    assert w.facts["kind"] == "cached"
    shared = why_block(golden(), 2, 1)
    assert (
        shared.sentences[0]
        == "Block 1 is shared by r1 and r2, as block 0 of their tables; 4 of its 4 slots hold a token"
    )
    assert shared.sentences[-1] == "Step 2: r2 found it in the cache and shares it with 1 other"
    assert str(why_block(golden(), 0, 5)) == "Block 5 is free: it was never used"
    assert "null block" in str(why_block(golden(), 1, 0))
    with pytest.raises(IndexError, match=r"blocks 0\.\.7"):
        why_block(golden(), 1, 8)


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_what_is_worked_out_is_what_the_engine_found(discipline: str) -> None:
    """Hits and needs computed from the trace alone are those that the scheduler had when it decided."""
    trace = run(specs(14), discipline=discipline, num_blocks=24)
    for record in trace:
        for i, e in enumerate(record.events):
            at = Cursor(record.step, i)
            if isinstance(e, ev.Admitted):
                state = trace.state(at)
                hit = next(
                    (
                        x.num_tokens
                        for x in record.events[:i]
                        if isinstance(x, ev.PrefixHit) and x.request_id == e.request_id
                    ),
                    0,
                )
                assert (
                    len(_hits(trace, state, at, e.request_id)) * state.block_size
                    == hit
                    == e.num_cached_tokens
                )
            elif isinstance(e, ev.NotAdmitted) and (
                e.reason == "reserve" or (discipline == "vllm" and e.reason == "blocks")
            ):
                f = why_waiting(trace, at, e.request_id).facts
                assert (f["blocks_needed"], f["blocks_free"]) == (e.need, e.have)


@pytest.mark.parametrize("discipline", ["vllm", "static-padded", "retract"])
def test_every_question_has_an_answer_everywhere(discipline: str) -> None:
    trace = run(specs(10), discipline=discipline, num_blocks=24, at={6: ("abort", "r3")})
    for step in range(0, len(trace) + 1, 4):
        state = trace.state(step)
        for rid in state.requests:
            answers = [
                why_waiting(trace, step, rid),
                why_preempted(trace, step, rid),
                why_missed(trace, step, rid),
            ]
            if step:
                answers.append(why_chunk(trace, step, rid))
            for a in answers:
                assert a.sentences and json.loads(json.dumps(a.to_dict(), allow_nan=False))[
                    "facts"
                ] == json.loads(json.dumps(a.facts))
    for block in range(24):
        assert why_block(trace, len(trace), block).sentences


def test_no_answer_shows_what_came_later() -> None:
    whole = golden()
    for step in range(1, NUM_STEPS + 1):
        cut = whole.share(step)
        for rid in cut.state().requests:
            for ask in (why_preempted, why_missed):
                assert ask(whole, step, rid) == ask(cut, step, rid)
        for block in range(8):
            assert why_block(whole, step, block) == why_block(cut, step, block)
