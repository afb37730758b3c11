"""Attention sinks in the block tables: their blocks stay, what lies between them and the window is given
back, and a prefix without its sinks is no hit.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbviz import events as ev
from cbviz.config import ConfigError, EngineConfig
from cbviz.core.check import check
from cbviz.core.kv.block_pool import BlockPool
from cbviz.core.kv.kv_manager import KVManager
from cbviz.core.request import Request
from cbviz.core.scheduler import Scheduler
from cbviz.messages import RequestSpec
from tests.core.fuzz import DISCIPLINE_NAMES, POLICY_NAMES, case, play


def manager(sinks: int, window: int = 6, num_blocks: int = 40) -> KVManager:
    return KVManager(BlockPool(num_blocks), 4, 200, [], window, "", sinks)


def asked(n: int, start: int = 100, name: str = "a") -> Request:
    return Request(RequestSpec(name, tuple(range(start, start + n)), 10), 0, frozenset(), 1, False)


@pytest.mark.parametrize("sinks, kept", [(0, 0), (1, 1), (4, 1), (5, 2), (100, 4)])
def test_blocks_with_sinks_stay(sinks: int, kept: int) -> None:
    kv, r = manager(sinks), asked(24)
    assert kv.allocate(r, 16) is None
    before = list(r.block_ids)
    r.num_computed_tokens = 16
    assert kv.allocate(r, 4) is None  # position 16 sees 11..16: blocks 0 and 1 (positions 0..7) have left
    gone = 2 if kept < 2 else kept
    assert (
        r.block_ids == [*before[:kept], *[0] * (gone - kept), *before[gone:], r.block_ids[-1]]
        and len(r.block_ids) == 5
    )
    told = [e for e in kv.journal if isinstance(e, ev.OutOfWindow)]
    assert [(e.first_index, list(e.block_ids)) for e in told] == (
        [(kept, before[kept:gone])] if kept < 2 else []
    )
    assert kv.free(r) == [*before[:kept], *before[gone:], 5] and kv.pool.num_free == 39


def test_undo_of_the_first_blocks_to_leave() -> None:
    kv, r = manager(4), asked(24)
    kv.allocate(r, 16)
    r.num_computed_tokens = 16
    table, mark = list(r.block_ids), len(kv.undo)
    kv.allocate(r, 4)
    assert r.num_null_blocks == 2
    kv.pool.rollback(mark)
    assert r.block_ids == table and r.num_null_blocks == 0


def filled(sinks: int) -> tuple[KVManager, list[int]]:
    """A request of 40 tokens has ended; its ten blocks can be found.

    Window 6: a hit needs two adjacent blocks.
    """
    kv, r = manager(sinks), asked(40)
    kv.allocate(r, 40)
    ids = kv.free(r)
    return kv, ids


@pytest.mark.parametrize(
    "lost, with_sinks, without",
    [
        ((), 9, 9),
        ((0,), 0, 9),
        ((1,), 1, 9),
        ((2,), 9, 9),
        ((5,), 9, 9),
        ((8,), 8, 8),
        ((7,), 7, 7),
        ((3, 4, 6, 8), 3, 3),
        ((1, 3, 5, 7), 1, 1),
        ((2, 4, 6, 8), 2, 2),
    ],
)
def test_a_hit_holds_the_sinks_as_well(lost: tuple[int, ...], with_sinks: int, without: int) -> None:
    for sinks, length in ((5, with_sinks), (0, without)):
        kv, ids = filled(sinks)
        for i in lost:
            b = ids[i]
            h = kv.pool.block_hash[b]
            assert h is not None
            kv.pool._drop_hash(b, "")
        hits = kv.find_prefix(asked(40))
        assert len(hits) == length, (lost, sinks, hits)
        front = min(2 if sinks else 0, length)
        assert hits[:front] == ids[:front] and all(b in (0, ids[i]) for i, b in enumerate(hits))
        if length > 4 and sinks:
            assert hits[-2:] == ids[length - 2 : length] and hits[2:-2] == [0] * (length - 4)


def test_hashes_differ_by_sinks() -> None:
    """What stands behind the window was computed with the sinks in sight, so it is another content."""
    heads = {tuple(manager(s).hashes(asked(8), 2)) for s in (0, 1, 4)} | {
        tuple(manager(4, 0).hashes(asked(8), 2)),
        tuple(manager(4, 7).hashes(asked(8), 2)),
    }
    assert len(heads) == 5
    assert manager(4, 0).sink_blocks == 0


@settings(max_examples=60)
@given(
    st.integers(0, 10**9),
    st.sampled_from(DISCIPLINE_NAMES),
    st.sampled_from(POLICY_NAMES),
    st.booleans(),
    st.integers(1, 20),
    st.integers(1, 24),
)
def test_preemption_prefix_caching_and_aborts_with_sinks(
    seed: int, discipline: str, policy: str, caching: bool, window: int, sinks: int
) -> None:
    """The judge reads every slot that a query sees, sinks included, and finds what belongs there; tables,
    counts and digests are checked after every step.
    """
    play(
        case(
            seed,
            discipline=discipline,
            policy=policy,
            enable_prefix_caching=caching,
            sliding_window=window,
            attention_sinks=sinks,
        )
    )


def test_the_cases_meet_sinks() -> None:
    kept = hits = 0
    for seed in range(40):
        _, trace = play(
            case(
                seed,
                discipline=("chunked", "vllm")[seed % 2],
                sliding_window=5,
                attention_sinks=3,
                enable_prefix_caching=True,
            )
        )
        for record in trace:
            for e in record.events:
                kept += isinstance(e, ev.OutOfWindow) and e.first_index > 0
                hits += isinstance(e, ev.PrefixHit) and 0 in e.block_ids and e.block_ids[0] != 0
    assert kept > 50 and hits > 5, (kept, hits)


def test_a_full_length_admission_counts_the_sinks() -> None:
    """vLLM's rule caps what a windowed request can hold at once; sinks come on top."""
    for sinks, blocks, admitted in ((0, 4, True), (0, 3, False), (8, 6, True), (8, 5, False)):
        config, _ = EngineConfig(
            discipline="vllm",
            block_size=4,
            num_blocks=blocks + 1,
            max_model_len=60,
            max_num_batched_tokens=8,
            sliding_window=5,
            attention_sinks=sinks,
            enable_prefix_caching=False,
        ).resolve(60)
        s = Scheduler(config)
        s.add(RequestSpec("x", tuple(range(50)), 4), 0.0)
        assert bool(s.schedule(0.0).chunks) == admitted, (sinks, blocks)
        check(s)


def test_sinks_need_a_window() -> None:
    with pytest.raises(ConfigError, match="attention_sinks is 4, but there is no window"):
        EngineConfig(attention_sinks=4).resolve(100)
    with pytest.raises(ConfigError, match="attention_sinks is 4 and preemption_mode is 'swap'"):
        EngineConfig(attention_sinks=4, sliding_window=8, preemption_mode="swap")
    assert EngineConfig(attention_sinks=4, sliding_window=8).resolve(100)[0].attention_sinks == 4
    assert EngineConfig(attention_sinks=4).resolve(100, window=8)[0].sliding_window == 8
