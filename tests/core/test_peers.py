"""What TensorRT-LLM's two capacity policies and SGLang's estimate make of one and the same workload, worked
out by hand.

Five requests of 4 prompt and 20 output tokens, one arriving before each of the steps 1 to 5; 20 blocks of 4
tokens. The last output token is never computed, so each comes to need 23 slots, 6 blocks; all five together
30.
"""

from __future__ import annotations

import pytest

from cbviz import events as ev
from cbviz.core.estimate import MIN_NEW_TOKEN_RATIO, NEW_TOKEN_RATIO_DECAY
from cbviz.core.plain import INIT_NEW_TOKEN_RATIO
from cbviz.disciplines import DISCIPLINES
from cbviz.trace.metrics import metrics
from cbviz.trace.trace import Trace
from tests.core.byhand import admitted, byhand, finish_steps, found, plan, run, spec, waits
from tests.core.fuzz import make_engine

FIVE = [spec(x, 4, 20, step=i) for i, x in enumerate("abcde", 1)]
DAY = {"num_blocks": 21, "max_model_len": 40}


def lost(trace: Trace) -> list[tuple[int, str, str, int]]:
    """(step, who lost its blocks, for whom, tokens to compute again)."""
    return [
        (r.step, e.request_id, e.for_id, e.num_tokens_lost)
        for r in trace
        for e in r.events
        if isinstance(e, ev.Preempted)
    ]


@pytest.mark.parametrize(
    "discipline, steps, preemptions, recomputed",
    [("no-evict", 41, 0, 0), ("max-util", 32, 2, 29), ("retract", 43, 1, 20)],
)
def test_the_same_five_requests(discipline: str, steps: int, preemptions: int, recomputed: int) -> None:
    t = run(FIVE, discipline=discipline, **DAY)
    m = metrics(t)
    assert (m["num_steps"], m["num_preemptions"], m["recomputed_tokens"]) == (steps, preemptions, recomputed)


def test_no_evict_admits_what_can_run_to_its_end() -> None:
    t = run(FIVE, discipline="no-evict", **DAY)
    assert admitted(t) == "a b c d e" and lost(t) == []
    assert plan(t, 3) == "a5+1 b4+1 c0+4"  # prompts join decodes in one step
    # step 4: a, b and c hold 2 blocks each and may come to 6: 12 more; with d's 6 that is 18, of 14 free
    assert found(t, ev.NotAdmitted, 4) == [ev.NotAdmitted("d", "guarantee", 18, 14)]
    assert waits(t, "d") == ["guarantee"] and waits(t, "e") == ["guarantee"]
    # a has gone with step 20, 8 blocks are free; b and c hold 6 each and need no more: d's 6 fit. e would be
    # next: 5 of d's and its own 6, of 7
    assert plan(t, 21) == "b22+1 c21+1 d0+4"
    assert found(t, ev.NotAdmitted, 21) == [ev.NotAdmitted("e", "guarantee", 11, 7)]
    assert plan(t, 22) == "c22+1 d4+1 e0+4"


def test_max_util_admits_whose_prompt_fits_and_pauses_the_last_started() -> None:
    t = run(FIVE, discipline="max-util", **DAY)
    assert admitted(t) == "a b c d e d* e*"
    assert plan(t, 5) == "a7+1 b6+1 c5+1 d4+1 e0+4"  # all five run, with 20 blocks for 30
    # step 13: each holds 4 blocks but e, which holds 3; one is free, and d has taken it by step 14, when e
    # needs its fourth: the last is e itself
    assert lost(t) == [(14, "e", "e", 12), (18, "d", "a", 17)]
    assert found(t, ev.NotAdmitted, 14) == [ev.NotAdmitted("e", "preempted", 0, 1)]
    assert waits(t, "e") == ["preempted", "blocks"]
    assert found(t, ev.NotAdmitted, 15) == [
        ev.NotAdmitted("e", "blocks", 4, 2)
    ]  # its 12 tokens and the one it had sampled
    assert (
        plan(t, 21) == "b22+1 c21+1 d0+18"
    )  # the earlier arrival is first again, and computes its 17 tokens anew
    assert t.record(21).chunks[2].num_recomputed == 17


def test_retract_admits_by_an_estimate_and_makes_room_for_the_whole_batch() -> None:
    t = run(FIVE, discipline="retract", **DAY)
    assert admitted(t) == "a b c d e d*"
    assert [plan(t, s) for s in range(1, 6)] == [
        "a0+4",
        "b0+4",
        "c0+4",
        "d0+4",
        "a4+1 b4+1 c4+1 d4+1",
    ]  # a step holds prompts or decodes
    # d, step 4: of a, b and c 0.7 x 3 x 19 = 39.9 tokens more are expected; with d's 4 + 20 and a block for
    # what doesn't come out even that is 67.9, under the 68 free.
    # e, step 5: 0.7 x 4 x 19 = 53.2, and 28: 81.2 tokens, over 20 blocks, of 16
    assert found(t, ev.NotAdmitted, 5) == [ev.NotAdmitted("e", "estimate", 21, 16)]
    # step 21: all four need their sixth block and none is free; all have 17 outputs and prompts of 4, so the
    # last comer goes, and the others go on in this very step
    assert found(t, ev.Preempted, 21) == [
        ev.Preempted(
            "d",
            "a",
            "fewest-outputs",
            20,
            found(t, ev.Preempted)[0].block_ids,
            [("d", "17, -4, -3"), ("c", "17, -4, -2"), ("b", "17, -4, -1"), ("a", "17, -4, 0")],
            1,
            4,
            0,
        )
    ]
    assert plan(t, 21) == "a20+1 b20+1 c20+1" and not found(t, ev.Skipped, 21)
    assert t.state(21).waiting == ["e", "d"]  # retracted, it stands behind the queue
    assert plan(t, 24) == "e0+4 d0+21"


def test_the_estimate_decays_jumps_and_starts_again() -> None:
    t = run(FIVE, discipline="retract", **DAY)

    def ratio(step: int) -> float:
        return t.record(step).carry.get("new_token_ratio", INIT_NEW_TOKEN_RATIO)

    assert ratio(4) == 0.7  # prefills do not touch it
    assert ratio(5) == pytest.approx(0.7 - (0.7 - 0.098) / 600)
    assert ratio(20) == pytest.approx(0.7 - 16 * NEW_TOKEN_RATIO_DECAY)
    assert ratio(21) == 1.0  # (3 x 17 decoded + 3 x 20) / (3 x 20 + 1), at most 1
    assert ratio(23) == pytest.approx(1 - 2 * NEW_TOKEN_RATIO_DECAY)
    assert ratio(42) < 1 and ratio(43) == INIT_NEW_TOKEN_RATIO  # nothing is left to do


def test_the_estimate_after_a_retraction_is_what_the_others_have_decoded() -> None:
    """z runs so long that little is expected of a and b any more; both come, and must not both stay."""
    t = run(
        [spec("z", 4, 600), spec("a", 4, 100, step=500), spec("b", 4, 100, step=501)],
        discipline="retract",
        num_blocks=171,
        max_model_len=800,
    )
    assert t.record(499).carry["new_token_ratio"] < 0.21
    step, who, _, _ = lost(t)[0]
    assert who == "b"
    decoded = sum(len(t.state(step - 1).requests[x].output_token_ids) for x in "za")
    assert (
        t.record(step).carry["new_token_ratio"] == pytest.approx((decoded + 2 * 20) / (600 + 100 + 1))
        and decoded < 650
    )


def test_the_estimate_has_a_floor() -> None:
    t = run([spec("a", 4, 700)], discipline="retract", num_blocks=201, max_model_len=800)
    assert t.record(690).carry["new_token_ratio"] == MIN_NEW_TOKEN_RATIO == pytest.approx(0.098)


def test_retraction_leaves_one() -> None:
    """Each of two could fill the pool of 10 blocks.

    Admitted by another rule, they come to 5 blocks each: the longer prompt goes, the other ends.
    """
    t = run(
        [spec("a", 4, 36), spec("b", 4, 36, first=50)],
        {3: [("configure", {"discipline": "retract"})]},
        num_blocks=11,
        max_model_len=40,
    )
    assert lost(t) == [(18, "b", "a", 20)] and admitted(t) == "a b b*"
    t = run(
        [spec("a", 6, 34), spec("b", 4, 36)],
        {3: [("configure", {"discipline": "retract"})]},
        num_blocks=11,
        max_model_len=40,
    )
    assert [(who, for_id) for _, who, for_id, _ in lost(t)] == [("a", "a")]  # it asked for the block itself


def test_the_estimate_counts_a_whole_prompt_though_a_chunk_is_computed() -> None:
    """8 tokens a step: b's first chunk would fit, its prompt of 40 would not beside what a is expected to
    use.
    """
    t = run(
        [spec("a", 4, 40), spec("b", 40, 8, step=2)],
        discipline="retract",
        num_blocks=16,
        max_model_len=60,
        max_num_batched_tokens=8,
    )
    # 0.7 x 39 = 27.3 of a, 40 + 4 + 8 of b: 79.3 tokens are over 19 blocks, 14 are free
    assert found(t, ev.NotAdmitted, 2) == [ev.NotAdmitted("b", "estimate", 20, 14)]


def test_queue_places_change_with_the_discipline() -> None:
    """A retracted request stands behind the queue; under the next discipline it goes back to the place of its
    arrival.
    """
    t = run(FIVE, {22: [("configure", {"discipline": "chunked"})]}, discipline="retract", **DAY)
    assert t.state(21).waiting == ["e", "d"] and ev.Reordered(["d", "e"]) in t.record(22).events
    assert t.state(22).waiting == ["d", "e"]


def test_the_rows_name_their_sources() -> None:
    assert (
        "GUARANTEED_NO_EVICT" in DISCIPLINES["no-evict"].source
        and "MAX_UTILIZATION" in DISCIPLINES["max-util"].source
        and "new_token_ratio" in DISCIPLINES["retract"].source
    )
    assert all(len(d.summary.split(". ")) == 1 for d in DISCIPLINES.values())  # one sentence


def test_a_run_can_be_taken_up_in_its_middle() -> None:
    """A retracted queue, an estimate and a stepwise arrival are in the snapshot: the rest of the run is the
    same.
    """
    c = byhand(FIVE, discipline="retract", **DAY)
    whole, other = make_engine(c.config), make_engine(c.config)
    whole.enqueue(c.specs)
    for _ in range(22):
        whole.step()
    other.restore(whole.snapshot(), {s.request_id: s for s in c.specs})
    assert other.digest() == whole.digest()
    while (record := whole.step()) is not None:
        again = other.step()
        assert again is not None and again.events == record.events and again.carry == record.carry
    assert finish_steps(run(FIVE, discipline="retract", **DAY))["e"] == whole.step_count
