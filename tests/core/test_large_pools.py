"""Pools of millions of blocks: what an engine and each fork of it hold in memory, and that long free lists
come back as they were.
"""

from __future__ import annotations

import json
import random
import tracemalloc

import cbviz as cb
from cbviz.core.kv.block_pool import BlockPool
from cbviz.core.kv.runs import LONG_LIST, ids_of, runs_of
from cbviz.core.kv.swap import HostPool
from cbviz.events import Allocated
from cbviz.messages import RequestSpec
from cbviz.trace.state import FIRST_BLOCKS, State


def test_runs_hold_any_list_of_ids() -> None:
    rng = random.Random(1)
    for _ in range(500):
        ids = [rng.randrange(8) for _ in range(rng.randrange(12))]
        assert list(ids_of(runs_of(ids))) == ids


def test_a_long_free_list_comes_back_from_a_snapshot_as_it_was() -> None:
    pool = BlockPool(LONG_LIST + 2000)
    taken, _ = pool.allocate(700, "a")
    pool.cache(taken[3], b"h" * 32)
    pool.free(taken[:400:3], "a")
    plain = json.loads(json.dumps(pool.snapshot()))
    assert "free" not in plain and len(plain["free_runs"]) < 300
    other = BlockPool(pool.num_blocks)
    other.restore(plain)
    assert other.free_ids() == pool.free_ids() == pool.snapshot(whole=True)["free"]
    assert (other.num_free, other.num_cached_free) == (pool.num_free, pool.num_cached_free)
    host = HostPool(LONG_LIST + 10, [])
    kept = host.take(20)
    host.give(kept[5:9])
    twin = HostPool(host.num_blocks, [])
    twin.restore(json.loads(json.dumps(host.snapshot())))
    assert list(twin.free) == list(host.free) == host.snapshot(whole=True)["host_free"]


def test_a_pool_and_a_state_take_few_bytes_a_block() -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        made = BlockPool(1_000_000), HostPool(1_000_000, []), State(1_000_000, 16)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert made[0].num_free == 999_999
    assert (after - before) / 1_000_000 < 50
    assert (peak - before) / 1_000_000 < 60


def test_a_state_makes_room_for_the_blocks_that_are_used() -> None:
    s = cb.Session([RequestSpec("a", (5,) * 40, 8)], runner="sim", num_blocks=FIRST_BLOCKS + 50)
    engine = s.engine.scheduler.state.pool
    engine.allocate(FIRST_BLOCKS + 20, "somebody")
    s.run()
    state = s.trace.state()
    top = max(b for e in s.trace[0].events if isinstance(e, Allocated) for b in e.block_ids)
    assert top > FIRST_BLOCKS
    assert state.held_last(top) == 0
    assert (
        state.place(engine.num_blocks - 1),
        state.held_last(engine.num_blocks - 1),
        state.is_cached(engine.num_blocks - 1),
    ) == (0, -1, False)
