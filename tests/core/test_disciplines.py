"""What each discipline means, on workloads small enough to work out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from cbviz import events as ev
from cbviz.config import ConfigError, EngineConfig
from cbviz.disciplines import DISCIPLINES
from cbviz.messages import RequestSpec
from cbviz.session import Session
from cbviz.trace.trace import Trace
from tests.core.fuzz import Case, case, make_engine, play


def hand(discipline: str, specs: list[RequestSpec], **fields: Any) -> Case:
    base = {
        "block_size": 4,
        "num_blocks": 33,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "sliding_window": 0,
        "enable_prefix_caching": False,
        "watermark": 0.0,
        "long_prefill_token_threshold": 0,
        "scheduler_reserve_full_isl": None,
        "victim": None,
    }
    c = case(0, discipline=discipline, **{"policy": "fcfs", **base, **fields}, inputs=False)
    c.specs = specs
    return c


def spec(rid: str, prompt: int, outputs: int, step: int = 1, first: int = 0, **more: Any) -> RequestSpec:
    return RequestSpec(rid, tuple(range(first, first + prompt)), outputs, arrival_step=step, **more)


def plan(trace: Trace, step: int) -> list[tuple[str, int, int]]:
    """(request, first position, tokens) of each chunk."""
    return [(c.request_id, c.start, c.num_tokens) for c in trace.record(step).chunks]


def found(trace: Trace, step: int, kind: type) -> list[Any]:
    return [e for e in trace.record(step).events if isinstance(e, kind)]


THREE = [spec("a", 5, 2), spec("b", 3, 4), spec("c", 4, 2)]
"""At two seats: a and b form the first batch, a ends with step 2 and b with step 4."""


def test_static_holds_seats_and_admits_only_into_an_empty_batch() -> None:
    _, t = play(hand("static", THREE, max_num_seqs=2))
    assert plan(t, 1) == [("a", 0, 5), ("b", 0, 3)]
    assert found(t, 1, ev.NotAdmitted) == [ev.NotAdmitted("c", "seats", 1, 0)]
    assert plan(t, 2) == [("a", 5, 1), ("b", 3, 1)]
    assert found(t, 2, ev.Finished) == [ev.Finished("a", "length")] and found(t, 2, ev.SeatHeld) == [
        ev.SeatHeld("a", 0)
    ]
    assert (
        t.state(2).running == ["a", "b"] and t.state(2).requests["a"].block_ids == []
    )  # the seat is held, the blocks are not
    assert plan(t, 3) == [("b", 4, 1)] and plan(t, 4) == [("b", 5, 1)]
    assert found(t, 2, ev.NotAdmitted) == [ev.NotAdmitted("c", "batch", 0, 2)] and found(
        t, 3, ev.NotAdmitted
    ) == [ev.NotAdmitted("c", "batch", 0, 1)]
    assert found(t, 4, ev.SeatsFreed) == [ev.SeatsFreed(["a", "b"])]
    assert plan(t, 5) == [("c", 0, 4)] and len(t) == 6
    assert all(r.tokens.padded == 0 for r in t)


def test_static_reserves_prompt_and_max_tokens() -> None:
    _, t = play(hand("static", THREE, max_num_seqs=2))
    # a: 5 + 2 = 7 tokens, 2 blocks of 4; b: 3 + 4 = 7 tokens, 2 blocks
    assert found(t, 1, ev.Allocated) == [ev.Allocated("a", [1, 2]), ev.Allocated("b", [3, 4])]
    # 8 tokens in 16 slots: 3 slots left in a's second block, 1 in b's first, and b's second block is reserved
    s = t.record(1).slots
    assert (s.used, s.partly_empty, s.reserved) == (8, 4, 4)


def test_static_batch_that_the_budget_cuts_goes_on_in_the_next_step() -> None:
    """Three prompts of 20 tokens, 40 tokens a step: the batch takes two steps to form, and only then decodes."""
    specs = [spec(x, 20, 2) for x in "abc"]
    _, t = play(hand("static", specs, max_model_len=30, max_num_batched_tokens=40))
    assert plan(t, 1) == [("a", 0, 20), ("b", 0, 20)]
    assert found(t, 1, ev.NotAdmitted) == [ev.NotAdmitted("c", "budget", 1, 0)]
    assert plan(t, 2) == [("c", 0, 20)]
    assert plan(t, 3) == [("a", 20, 1), ("b", 20, 1), ("c", 20, 1)]


def test_static_padded_computes_padding_and_finished_rows() -> None:
    _, t = play(hand("static-padded", THREE, max_num_seqs=2))
    one = t.record(1)
    assert plan(t, 1) == [("a", 0, 5), ("b", 0, 3)]
    assert one.num_padding_tokens == 2  # b's prompt of 3 is padded to a's 5
    assert (one.tokens.total, one.tokens.useful, one.tokens.padded) == (10, 8, 2)
    three = t.record(3)
    assert [(c.request_id, c.start, c.num_tokens, c.padding, c.sample) for c in three.chunks] == [
        ("a", 5, 1, True, False),
        ("b", 4, 1, False, True),
    ]
    assert (three.tokens.total, three.tokens.useful, three.tokens.padded) == (2, 1, 1)
    assert t.state(3).requests["a"].block_ids  # it runs along in its own blocks
    assert not t.state(4).requests["a"].block_ids
    assert sum(r.tokens.padded for r in t) == 2 + 2  # two steps of a's row


def test_orca_reserves_everything_at_admission() -> None:
    specs = [spec("a", 4, 12), spec("b", 4, 12), spec("c", 4, 4)]
    _, t = play(hand("orca", specs, num_blocks=8, max_model_len=28, max_num_batched_tokens=28))  # 7 blocks
    assert found(t, 1, ev.Allocated) == [ev.Allocated("a", [1, 2, 3, 4])]
    assert found(t, 1, ev.NotAdmitted) == [ev.NotAdmitted("b", "reserve", 4, 3)]
    assert t.record(1).slots.reserved == 12
    assert not any(isinstance(e, ev.Preempted) for r in t for e in r.events)
    assert plan(t, 12) == [("a", 14, 1)]
    assert plan(t, 13) == [("b", 0, 4), ("c", 0, 4)]  # iteration level: whoever fits joins


def test_orca_joins_at_every_iteration() -> None:
    _, t = play(hand("orca", THREE, max_num_seqs=2))
    assert plan(t, 3) == [("b", 4, 1), ("c", 0, 4)]  # a ended with step 2, c takes its seat at once


def test_paged_separates_prefill_and_decode() -> None:
    specs = [spec("a", 5, 4), spec("b", 3, 4, step=2), spec("c", 4, 2, step=4)]
    _, t = play(hand("paged", specs))
    assert [plan(t, s) for s in range(1, 6)] == [
        [("a", 0, 5)],
        [("b", 0, 3)],
        [("a", 5, 1), ("b", 3, 1)],
        [("c", 0, 4)],
        [("a", 6, 1), ("b", 4, 1), ("c", 4, 1)],
    ]
    assert found(t, 2, ev.Skipped) == [ev.Skipped("a", "prefill-step")]
    assert found(t, 4, ev.Skipped) == [ev.Skipped("a", "prefill-step"), ev.Skipped("b", "prefill-step")]
    assert found(t, 1, ev.Allocated) == [ev.Allocated("a", [1, 2])] and found(t, 6, ev.Allocated) == []


def test_paged_never_mixes() -> None:
    for seed in range(20):
        _, t = play(case(seed, discipline="paged", policy="fcfs", long_prefill_token_threshold=0))
        for r in t:
            assert len({c.kind for c in r.chunks}) <= 1 or all(c.num_tokens == 1 for c in r.chunks)


def test_chunked_decodes_first_and_fills_the_budget_with_prompts() -> None:
    specs = [spec("a", 4, 6), spec("b", 20, 2, step=2), spec("c", 7, 2, step=2)]
    _, t = play(hand("chunked", specs, max_num_batched_tokens=8))
    assert plan(t, 1) == [("a", 0, 4)]
    assert plan(t, 2) == [("a", 4, 1), ("b", 0, 7)]
    assert plan(t, 3) == [("a", 5, 1), ("b", 7, 7)]
    assert plan(t, 4) == [("a", 6, 1), ("b", 14, 6), ("c", 0, 1)]
    assert plan(t, 5) == [("a", 7, 1), ("b", 20, 1), ("c", 1, 6)]
    assert plan(t, 6) == [("a", 8, 1), ("c", 7, 1)]
    assert [e for e in found(t, 2, ev.Scheduled) if e.cap] == [
        ev.Scheduled("b", 0, 7, wanted=20, cap="budget")
    ]
    assert all(r.tokens.total <= 8 for r in t)


def test_decodes_pass_half_done_prompts() -> None:
    """c decodes before b's next chunk, though b came first; under `vllm` the queue's order holds."""
    specs = [spec("a", 4, 3), spec("b", 24, 2, step=2), spec("c", 2, 6, step=2)]
    _, t = play(hand("chunked", specs, max_num_batched_tokens=8, long_prefill_token_threshold=4))
    assert plan(t, 3) == [("a", 5, 1), ("c", 2, 1), ("b", 4, 4)]
    _, t = play(hand("vllm", specs, max_num_batched_tokens=8, long_prefill_token_threshold=4))
    assert plan(t, 3) == [("a", 5, 1), ("b", 4, 4), ("c", 2, 1)]


def test_the_last_comer_loses_its_blocks() -> None:
    specs = [spec("a", 8, 8), spec("b", 8, 8)]
    _, t = play(hand("chunked", specs, num_blocks=6, max_model_len=16))  # 5 blocks, 4 taken
    assert found(t, 1, ev.Allocated) == [ev.Allocated("a", [1, 2]), ev.Allocated("b", [3, 4])]
    assert found(t, 2, ev.Preempted) == [
        ev.Preempted("b", "b", "last", 8, [3, 4], [("b", "1"), ("a", "0")], 0, 1, 0)
    ]
    assert t.state(2).waiting == ["b"] and t.state(2).running == ["a"]
    done = t.state()
    assert done.requests["b"].num_preemptions == 1 and len(done.requests["b"].output_token_ids) == 8
    again = next(r for r in t if r.step > 2 and any(c.request_id == "b" for c in r.chunks))
    assert again.tokens.recomputed == 8 and again.chunks[-1].num_recomputed == 8


@pytest.mark.parametrize(
    "rule, loser",
    [("last", "c"), ("lowest-priority", "b"), ("least-work-lost", "b"), ("fewest-outputs", "c")],
)
def test_victim_rules(rule: str, loser: str) -> None:
    """Blocks for two and a half: a is the oldest, b has the worst priority and the fewest tokens, c the
    fewest outputs.
    """
    specs = [spec("a", 6, 18), spec("b", 2, 18, step=1, priority=3), spec("c", 9, 14, step=3)]
    _, t = play(
        hand("vllm", specs, num_blocks=8, max_model_len=24, victim=rule, scheduler_reserve_full_isl=False)
    )
    first = next(e for r in t for e in r.events if isinstance(e, ev.Preempted))
    assert (first.rule, first.request_id) == (rule, loser)
    assert first.ranking[0][0] == loser and {x for x, _ in first.ranking} <= {"a", "b", "c"}


def test_a_watermark_keeps_blocks_free() -> None:
    specs = [spec("a", 8, 2), spec("b", 8, 2)]
    _, t = play(
        hand("chunked", specs, num_blocks=11, max_model_len=16, watermark=0.7)
    )  # 7 of 10 must stay free
    assert found(t, 1, ev.NotAdmitted) == [
        ev.NotAdmitted("b", "watermark", 2, 1)
    ]  # 8 are free, of which 7 must stay so
    assert found(t, 1, ev.Admitted)[0].request_id == "a"  # an empty engine admits


def test_whole_prompts_need_the_budget() -> None:
    for name, d in DISCIPLINES.items():
        if not d.chunked:
            with pytest.raises(
                ConfigError,
                match=r"max_num_batched_tokens is 63, but discipline .* must be at least max_model_len, 64",
            ):
                EngineConfig(discipline=name, max_num_batched_tokens=63, max_model_len=64)
            config, notes = EngineConfig(discipline=name, max_num_batched_tokens=63).resolve(64)
            assert config.max_num_batched_tokens == 64 and "raised from 63 to 64" in notes[0]


@pytest.mark.parametrize(
    "discipline, seats, steps",
    [("static", 4, 815), ("chunked", 4, 581), ("static", 8, 555), ("chunked", 8, 364)],
)
def test_the_articles_steps(discipline: str, seats: int, steps: int) -> None:
    """20 requests, 2,160 output tokens, all there at the start."""
    s = Session("article", runner="sim", discipline=discipline, max_num_seqs=seats)
    s.run()
    assert len(s.trace) == steps
    assert sum(len(r.output_token_ids) for r in s.state().by_index) == 2160
    assert all(r.finish_reason == "length" for r in s.state().by_index)


def test_all_disciplines_say_the_same() -> None:
    runs = {}
    for name in DISCIPLINES:
        s = Session("article", runner="sim", discipline=name)
        s.run()
        runs[name] = {r.request_id: r.output_token_ids for r in s.state().by_index}
    assert all(tokens == runs["static"] for tokens in runs.values())


def test_rows_differ() -> None:
    """Each discipline differs from every other in more than its words."""
    rows = {
        name: tuple(getattr(d, f) for f in d.__slots__ if f not in ("name", "title", "summary", "source"))
        for name, d in DISCIPLINES.items()
    }
    assert len(set(rows.values())) == len(rows)


def test_engine_refuses_what_scheduler_needs_resolved() -> None:
    with pytest.raises(ValueError, match="resolved config"):
        make_engine(EngineConfig())
