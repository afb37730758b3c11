"""Runs that once computed tokens for ever without anybody coming nearer to an end: each ends now, and the
property over every knob says so of all.
"""

from __future__ import annotations

from typing import Any

import pytest

from cbviz.messages import RequestSpec, Sampling
from cbviz.session import Session
from tests.core.byhand import spec
from tests.strategies import Drawn


def ran(specs: list[RequestSpec], most: int = 1000, **knobs: Any) -> Session:
    s = Session(specs, runner="sim", **knobs)
    s.run(max_steps=most)
    assert s.done and not s.engine.stuck and all(r.finished for r in s.state().by_index)
    return s


def test_padding_comes_after_the_live_rows_have_their_tokens() -> None:
    """Eight rows of a budget that was 5: the five that had finished took all of it."""
    specs = [
        RequestSpec(f"q{i}", (5,), 4, arrival_step=0, output_len=n)
        for i, n in enumerate([1, 1, 1, 1, 2, 4, 4, 4])
    ]
    s = ran(specs, discipline="static-padded", max_num_seqs=8, max_model_len=5)
    assert len(s.trace) == 4


def test_every_row_of_a_padded_batch_fits_the_budget() -> None:
    """As `generate()` does it, each step computes all rows: a smaller budget is raised, and a note says so."""
    s = ran(
        [spec("q", 20, 2, sampling=Sampling(n=4))],
        discipline="static-padded",
        enable_chunked_prefill=True,
        max_num_batched_tokens=3,
    )
    assert s.config.max_num_batched_tokens == 8
    assert (
        "max_num_batched_tokens raised from 3 to 8: static-padded computes every row in each step, "
        "max_num_seqs of them"
    ) in s.notes
    s.configure(max_num_seqs=12)
    assert s.engine._planned().max_num_batched_tokens == 12


def test_a_budget_set_below_the_rows_leaves_padding_out_first() -> None:
    """The budget may be lowered in the middle; then finished rows stand still, and the live ones go on."""
    specs = [spec(f"q{i}", 4, n) for i, n in enumerate([1, 1, 1, 9, 9])]
    s = Session(
        specs,
        runner="sim",
        discipline="static-padded",
        enable_chunked_prefill=True,
        max_num_seqs=5,
        max_model_len=16,
    )
    s.step(2)
    s.configure(max_num_batched_tokens=2)
    s.run(max_steps=100)
    assert s.done
    for r in s.trace.records[2:]:
        assert [c.request_id for c in r.chunks] == ["q3", "q4"] and not r.tokens.padded


SIBLINGS = [
    (14, 6, 2, {"discipline": "paged", "num_blocks": 4, "enable_prefix_caching": False}, 19),
    (12, 27, 4, {"discipline": "chunked", "num_blocks": 5}, 71),
]


@pytest.mark.parametrize("prompt, out, n, knobs, steps", SIBLINGS)
def test_sequences_of_one_request_lose_their_blocks_last_first(
    prompt: int, out: int, n: int, knobs: dict[str, Any], steps: int
) -> None:
    """They tie in priority and arrival; the tie falls on the last in the running order, so the first goes on
    to its end.
    """
    s = ran(
        [spec("q", prompt, out, first=10, sampling=Sampling(n=n))],
        policy="priority",
        block_size=16,
        long_prefill_token_threshold=3,
        **knobs,
    )
    assert len(s.trace) == steps


@pytest.mark.parametrize("rule", ["policy", "last", "lowest-priority", "least-work-lost", "fewest-outputs"])
def test_no_victim_rule_lets_siblings_evict_each_other_for_ever(rule: str) -> None:
    for policy in ("fcfs", "priority", "sjf", "fair"):
        ran(
            [spec("q", 12, 27, first=10, sampling=Sampling(n=4))],
            policy=policy,
            victim=rule,
            discipline="chunked",
            num_blocks=5,
            block_size=16,
            long_prefill_token_threshold=3,
        )


def test_prefills_that_do_not_fit_together_do_not_keep_decodes_from_their_tokens() -> None:
    """Where prefills go first and are cut into chunks, another prefill joins only if all of them fit.

    Before, prefills that came back took each other's blocks for ever, and the decodes that held the rest
    never got a token.
    """
    specs = [
        spec("a", 19, 71, priority=3, sampling=Sampling(n=3)),
        spec("b", 26, 64, first=50, output_len=43, sampling=Sampling(n=4)),
    ]
    ran(
        specs,
        6000,
        discipline="paged",
        block_size=8,
        num_blocks=20,
        long_prefill_token_threshold=1,
        enable_prefix_caching=False,
    )


@pytest.mark.parametrize("discipline", ["chunked", "vllm", "max-util"])
def test_sessions_with_a_fair_share_do_not_take_each_others_blocks_in_turn(discipline: str) -> None:
    """Computing lost tokens again counts as service, so the session served most may not be the one that
    loses.
    """
    specs = [spec(f"r{i}", 2, 10, first=100 * i, session="AB"[i % 2]) for i in range(4)]
    ran(
        specs,
        discipline=discipline,
        policy="fair",
        victim="policy",
        block_size=2,
        num_blocks=7,
        max_model_len=12,
        long_prefill_token_threshold=1,
        enable_prefix_caching=False,
    )


def test_a_beam_that_waits_does_not_keep_its_siblings_out_as_a_batch_of_its_class() -> None:
    """Degradation lets batch-class requests start only where none of their class runs; the waiting beam was
    taken for one, and its siblings never came back.
    """
    knobs: dict[str, Any] = {
        "policy": "sjf-wrong",
        "victim": "least-work-lost",
        "degrade_above": 0.05,
        "num_blocks": 4,
        "block_size": 16,
        "max_model_len": 40,
    }
    other = spec("other", 20, 8)
    search = RequestSpec(
        "search", (1, 2, 3, 4), 6, arrival_step=2, priority=3, sampling=Sampling(beam_width=3)
    )
    drawn = Drawn([other, search], {**knobs, "seed": 0, "scheduler_reserve_full_isl": False})
    assert drawn.play(drawn.session()) == "ended"
