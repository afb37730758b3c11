"""Contiguous reservation: one run of blocks a request, fragmentation seen and told, tokens as ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbviz import events as ev
from cbviz.config import ConfigError, EngineConfig
from cbviz.core.kv.block_pool import BlockPool
from cbviz.core.kv.contiguous import allocate_run, free_runs
from cbviz.session import Session
from cbviz.trace.accounting import check_trace
from cbviz.trace.explain import explain
from cbviz.trace.trace import Trace
from cbviz.trace.why import why_waiting
from tests.core.byhand import found, run, spec
from tests.core.fuzz import DISCIPLINE_NAMES, case, play
from tests.engine.test_replay import follow

CONTIGUOUS = {"kv_allocation": "contiguous", "sliding_window": 0}


def in_one_run(trace: Trace) -> None:
    """At every step each table is a run of neighbours, as long as the request may become, and nothing is
    shared.
    """
    for step in range(1, len(trace) + 1):
        state = trace.state(step)
        for r in state.by_index:
            if r.block_ids:
                first = r.block_ids[0]
                assert r.block_ids == list(
                    range(first, first + -(-(r.num_prompt_tokens + r.max_tokens) // state.block_size))
                )
        assert all(state.ref_count(b) <= 1 for b in range(1, state.num_blocks))


@pytest.mark.parametrize("fit", ["first-fit", "best-fit"])
@pytest.mark.parametrize("discipline", DISCIPLINE_NAMES)
def test_any_workload_under_any_discipline(discipline: str, fit: str) -> None:
    """With aborts and (seed 5) limits; a mirror that is only told follows; the accounts close; nobody is ever
    preempted for blocks.
    """
    for seed in range(3):
        c = case(seed, discipline=discipline, contiguous_fit=fit, **CONTIGUOUS)
        _, _, trace = follow(c)
        check_trace(trace)
        in_one_run(trace)
        assert not found(trace, ev.Preempted)
    play(case(5, discipline=discipline, contiguous_fit=fit, limits=True, **CONTIGUOUS))


def holes(fit: str) -> Trace:
    specs = [
        spec("a", 8, 4),
        spec("b", 4, 28, first=20),
        spec("c", 5, 3, first=60),
        spec("d", 8, 24, first=80),
        spec("e", 4, 4, step=6, first=120),
        spec("f", 8, 4, step=6, first=140),
    ]
    return run(
        specs,
        num_blocks=22,
        max_num_batched_tokens=64,
        contiguous_fit=fit,
        at={3: [("abort", "a")], 4: [("abort", "c")]},
        **CONTIGUOUS,
    )


def test_first_fit_and_best_fit_by_hand() -> None:
    """a 1-3, b 4-11, c 12-13, d 14-21. a's three and c's two come back. e needs 2: first-fit takes 1-2, and
    f, which needs 3, finds no run; best-fit takes 12-13 and leaves 1-3 for f.
    """
    first, best = holes("first-fit"), holes("best-fit")
    assert [e.block_ids for e in found(first, ev.Allocated)][:5] == [
        [1, 2, 3],
        list(range(4, 12)),
        [12, 13],
        list(range(14, 22)),
        [1, 2],
    ]
    assert [e.block_ids for e in found(best, ev.Allocated)][4:] == [[12, 13], [1, 2, 3]]
    assert found(best, ev.NotAdmitted) == []
    wait = found(first, ev.NotAdmitted)[0]
    assert (wait.request_id, wait.reason, wait.need, wait.have) == ("f", "fragments", 3, 2)
    at = next(r.step for r in first if wait in r.events)
    slots = first.record(at).slots
    assert (slots.fragmented, slots.free) == (3 * 4, 0)  # blocks 3, 12 and 13
    said = [s for s in explain(first, at) if s.kind == "waits"]
    assert said == [
        (
            "f waits: it needs 3 blocks side by side for its prompt and longest output; enough are free, but "
            "the longest free run has 2 (external fragmentation)"
        )
    ]
    why = why_waiting(first, at, "f")
    assert why.facts["longest_run"] == 2 and why.facts["blocks_free"] == 3
    assert any("room in one piece" in s for s in why.sentences)
    check_trace(first)


def around(a: int, taken: set[int], num_blocks: int) -> int:
    """Length of the free run that holds `a`."""
    lo, hi = a, a
    while lo - 1 not in taken and lo > 1:
        lo -= 1
    while hi + 1 < num_blocks and hi + 1 not in taken:
        hi += 1
    return hi - lo + 1


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 40), st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), max_size=30))
def test_the_pool_gives_the_run_that_was_asked_for(
    num_blocks: int, ops: list[tuple[int, bool, bool]]
) -> None:
    """Against a twin that tries every address."""
    pool = BlockPool(num_blocks, enable_caching=False)
    rng = random.Random(num_blocks)
    held: list[list[int]] = []
    for n, give, best in ops:
        if give and held:
            pool.free(held.pop(rng.randrange(len(held))), "x")
            continue
        taken = {b for ids in held for b in ids} | {0}
        fits = [a for a in range(1, num_blocks - n + 1) if taken.isdisjoint(range(a, a + n))]

        assert max((length for _, length in free_runs(pool)), default=0) == max(
            (around(a, taken, num_blocks) for a in range(1, num_blocks) if a not in taken), default=0
        )
        if fits:
            want = min(fits, key=lambda a: (around(a, taken, num_blocks), a)) if best else fits[0]
            held.append(allocate_run(pool, n, "x", "best-fit" if best else "first-fit"))
            assert held[-1] == list(range(want, want + n))
    assert sorted(pool.free_ids()) == [
        b for b in range(1, num_blocks) if b not in {b for ids in held for b in ids}
    ]


def test_what_does_not_go_together() -> None:
    with pytest.raises(ConfigError, match="Set sliding_window to 0 or kv_allocation to 'paged'"):
        EngineConfig(kv_allocation="contiguous", sliding_window=8)
    with pytest.raises(ConfigError, match="kv_allocation is 'heap', it must be one of paged, contiguous"):
        EngineConfig(kv_allocation="heap")
    config, notes = EngineConfig(kv_allocation="contiguous").resolve(2048)
    assert not config.enable_prefix_caching and "nobody shares blocks" in notes[0]


def test_a_fork_can_take_free_blocks_away_but_moves_no_run() -> None:
    s = Session(
        [spec("a", 8, 8), spec("b", 8, 8)],
        runner="sim",
        num_blocks=33,
        block_size=4,
        kv_allocation="contiguous",
    )
    s.step(2)
    b = s.fork(num_blocks=9)
    b.run()
    s.run()
    assert b.request("b").output_token_ids == s.request("b").output_token_ids
    s.rewind(1)
    assert s.step() is not None
    with pytest.raises(ConfigError, match="num_blocks is 8"):
        s.fork(num_blocks=8)
