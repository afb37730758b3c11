"""Preemption by swapping: nothing computed twice, host blocks counted, and everything that may happen to a
request meanwhile.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from cbviz import events as ev
from cbviz.config import ConfigError, EngineConfig
from cbviz.core.kv.swap import HostPool
from cbviz.messages import SchedulerOutput
from cbviz.session import Session
from cbviz.trace.accounting import check_trace
from cbviz.trace.explain import explain
from cbviz.trace.metrics import metrics
from cbviz.trace.why import why_preempted
from tests.core.byhand import found, run, spec
from tests.core.fuzz import DISCIPLINE_NAMES, LedgerRunner, case, make_engine, play
from tests.engine.test_replay import follow

SWAP: dict[str, Any] = {"preemption_mode": "swap", "swap_blocks": 200}
TIGHT: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 14,
    "max_model_len": 40,
    "max_num_seqs": 4,
    "watermark": 0.0,
}


@pytest.mark.parametrize("discipline", DISCIPLINE_NAMES)
def test_any_workload_under_any_discipline(discipline: str) -> None:
    """With aborts, prefix cache, windows and priorities as drawn: every slot read holds what it should though
    nothing is recomputed, and a mirror follows.
    """
    swapped = 0
    for seed in range(10):
        c = case(seed, discipline=discipline, **SWAP, **TIGHT)
        engine, _, trace = follow(c)
        check_trace(trace)
        assert isinstance(engine.runner, LedgerRunner) and engine.runner.healed == 0
        outs = found(trace, ev.SwappedOut)
        swapped += len(outs)
        assert len(outs) == len(found(trace, ev.SwappedIn)) + len(found(trace, ev.HostFreed))
        assert sum(r.tokens.recomputed for r in trace) == 0
    assert swapped or discipline in ("static", "static-padded", "orca", "no-evict", "retract")


def test_a_host_that_is_too_small() -> None:
    """Some are swapped out, some recomputed, with the reason; modes and limits change in the middle."""
    refused = out = aborted = kept = 0
    for seed in range(80):
        c = case(
            seed,
            discipline=("chunked", "vllm", "paged", "max-util")[seed % 4],
            enable_prefix_caching=seed % 5 > 1,
            preemption_mode="swap",
            swap_blocks=(2, 7, 60)[seed % 3],
            limits=seed % 2 == 0,
            **TIGHT,
        )
        c.at.setdefault(9, []).append(("configure", {"preemption_mode": "recompute"}))
        c.at.setdefault(14, []).append(("configure", {"preemption_mode": "swap"}))
        _, trace = play(c)
        for e in found(trace, ev.Preempted):
            refused += e.host_need > e.host_have
            assert not e.host_need or e.host_need > e.host_have
        out += len(found(trace, ev.SwappedOut))
        aborted += len(found(trace, ev.HostFreed))
        kept += sum(e.num_kept for e in found(trace, ev.SwappedIn))
    assert refused >= 10 and out >= 20 and aborted >= 1 and kept >= 5, (refused, out, aborted, kept)


@pytest.mark.parametrize("seed", range(12))
def test_a_step_that_fails_leaves_everything_as_it_was(seed: int) -> None:
    """Half-written blocks, host blocks overwritten by a swap that is taken back: the next try computes again
    what is lost, and tokens stay right.
    """
    rng = random.Random(seed)
    c = case(seed, **SWAP, **TIGHT)

    def fail(plan: SchedulerOutput) -> BaseException | None:
        return (
            OSError("power")
            if (plan.swaps_in or plan.swaps_out or plan.step % 7 == 0) and rng.random() < 0.5
            else None
        )

    play(c, make_engine(c.config, LedgerRunner(c.config, fail)), faults=(OSError,))


def test_by_hand() -> None:
    """Six blocks of 4. a and b grow until the pool is full; b goes to the host with its computed tokens,
    comes back when a has ended, and computes nothing twice.
    """
    t = run([spec("a", 8, 8), spec("b", 7, 8, first=50)], num_blocks=7, preemption_mode="swap", swap_blocks=8)
    out, back = found(t, ev.SwappedOut)[0], found(t, ev.SwappedIn)[0]
    assert (out.request_id, len(out.block_ids), out.host_block_ids, out.num_tokens) == ("b", 3, [0, 1, 2], 11)
    at = next(r.step for r in t if out in r.events)
    said = explain(t, at)
    assert any(
        s.startswith("b was swapped out: 3 blocks (11 tokens) to the host in ")
        and s.endswith("it comes back when 3 blocks are free at once")
        for s in said
    ), said
    assert any("b keeps what it computed, on the host" in s for s in said)
    assert t.state(at).request("b").state == "swapped" and t.state(at).request("b").num_computed_tokens == 11
    home = next(r.step for r in t if back in r.events)
    assert any(s.startswith("b was swapped in: 3 blocks from the host") for s in explain(t, home))
    head = "Its 11 computed tokens went to 3 blocks on the host; "
    assert why_preempted(t, at, "b").sentences[-1] == head + "it has no seat again yet"
    later = why_preempted(t, None, "b")
    assert (
        later.sentences[-1]
        == head + f"at step {home}, {home - at} steps later, it came back: nothing had to be computed again"
    )
    assert later.sentences[-1].kind == "swapped" and later.facts["tokens_again"] == 0
    assert t.record(at).gauges.num_host_blocks == 3 and t.record(home).gauges.num_host_blocks == 0
    assert sum(r.tokens.recomputed for r in t) == 0
    spans = {s.what: s for s in t.record(at).spans}
    assert spans["swap-out"].start_s == spans["pass"].start_s and spans["swap-out"].num_blocks == 3


def test_what_the_cache_still_has_is_not_copied() -> None:
    """The same with prefix caching: nobody takes b's first full blocks meanwhile, so they need not come back
    over the link.
    """
    t = run(
        [spec("a", 8, 6), spec("b", 8, 8, first=50)],
        num_blocks=7,
        preemption_mode="swap",
        swap_blocks=8,
        enable_prefix_caching=True,
    )
    back = found(t, ev.SwappedIn)[0]
    assert back.num_kept > 0 and len(back.block_ids) + back.num_kept == len(
        found(t, ev.SwappedOut)[0].block_ids
    )
    at = next(r.step for r in t if back in r.events)
    assert any("still here, in the prefix cache" in s for s in explain(t, at))


def test_what_comes_back_is_no_hit_of_the_cache() -> None:
    tight: dict[str, Any] = {
        "discipline": "chunked",
        "max_num_seqs": 8,
        "num_blocks": 33,
        "block_size": 16,
        "max_num_batched_tokens": 128,
        "swap_blocks": 32,
    }
    hits = {}
    for caching in (False, True):
        for mode in ("recompute", "swap"):
            s = Session(
                "preemption", runner="sim", preemption_mode=mode, enable_prefix_caching=caching, **tight
            )
            s.run()
            found = metrics(s.trace)
            hits[caching, mode] = found["prefix_hit_tokens"], found["resumed_hit_tokens"]
    assert hits[False, "recompute"] == hits[False, "swap"] == (0, 0)
    assert hits[True, "recompute"] == hits[True, "swap"]
    assert (
        hits[True, "swap"][0] == 0
    )  # the prompts share nothing: only those that come back find their own blocks
    assert hits[True, "swap"][1] > 0


def test_rewind_and_fork_while_somebody_is_away() -> None:
    specs = [spec("a", 8, 8), spec("b", 7, 8, first=50)]
    s = Session(
        specs,
        runner="sim",
        num_blocks=7,
        block_size=4,
        preemption_mode="swap",
        swap_blocks=8,
        discipline="chunked",
        enable_prefix_caching=False,
    )
    s.run(until=lambda record, state: any(isinstance(e, ev.SwappedOut) for e in record.events))
    away, digest = len(s.trace), s.digest()
    s.run()
    outputs = {i: s.request(i).output_token_ids for i in s.request_ids}
    s.rewind(away)
    assert s.digest() == digest and s.request("b").host_block_ids == [0, 1, 2]
    b = s.fork(remove=["b"])
    b.run()
    assert b.request("b").finish_reason == "abort" and any(
        isinstance(e, ev.HostFreed) for r in b.trace for e in r.events
    )
    s.run()
    assert {i: s.request(i).output_token_ids for i in s.request_ids} == outputs


def test_the_host_pool_undoes() -> None:
    undo: list[Any] = []
    pool = HostPool(6, undo)
    first = list(pool.free)
    a = pool.take(3)
    pool.give(a[:2])
    pool.take(4)
    while undo:
        f, args = undo.pop()
        f(*args)
    assert list(pool.free) == list(first)


def test_bad_values() -> None:
    with pytest.raises(ConfigError, match=r"preemption_mode is 'swop'.*did you mean 'swap'"):
        EngineConfig(preemption_mode="swop")
    with pytest.raises(ConfigError, match="swap_blocks is -1, the least is 0"):
        EngineConfig(swap_blocks=-1)
