"""Forks in the middle of a run with another pool size or another device: nothing is lost, and the branch
replays like any other run.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import cbviz as cb
from cbviz import events as ev
from cbviz.config import ConfigError
from cbviz.core.check import check
from cbviz.disciplines import DISCIPLINES
from cbviz.session import Session
from cbviz.trace.accounting import check_trace


def as_the_engine(s: Session) -> None:
    """The fold of the trace stands where the engine stands, pool size included."""
    state, engine = s.trace.state(), s.engine.scheduler.state
    check(s.engine.scheduler)
    assert (state.num_blocks, state.num_free_blocks) == (engine.pool.num_blocks, engine.pool.num_free)
    assert {r.request_id: r.block_ids for r in engine.requests.values()} == {
        i: state.requests[i].block_ids for i in engine.requests
    }
    assert [b for b in range(1, state.num_blocks) if state.cached[b]] == [
        b for b in range(1, engine.pool.num_blocks) if engine.pool.block_hash[b] is not None
    ]


def least_pool(s: Session, at: int) -> int:
    """What the refusal of a pool of one block says is the least; 2 where everything has ended and one block
    will do.
    """
    try:
        s.fork(at=at, num_blocks=2)
    except ConfigError as e:
        return int(str(e).rsplit(" ", 1)[1])
    return 2


@pytest.mark.parametrize("size", [-1, 0, 1, 4_000_001])
def test_a_pool_of_no_possible_size_is_refused_though_nobody_needs_a_block(size: int) -> None:
    """Given a run before its first arrival, when it is forked with a pool that has no block to give out or
    too many, then the field and its limits are named.
    """
    s = Session([cb.RequestSpec("late", (1, 2), 2, arrival_step=9)], runner="sim")
    s.step(3)
    with pytest.raises(ConfigError, match=r"num_blocks is -?\d+"):
        s.fork(num_blocks=size)


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_another_pool_size_at_any_step(discipline: str, tmp_path: Path) -> None:
    rng = random.Random(discipline)
    refused = forks = 0
    for _ in range(8):
        s = Session(
            "preemption",
            runner="sim",
            discipline=discipline,
            num_blocks=rng.choice([40, 50, 64]),
            sliding_window=rng.choice([0, 0, 24]),
            policy=rng.choice(["fcfs", "sjf", "priority"]),
        )
        s.run()
        at, size = rng.randrange(1, len(s.trace)), rng.choice([20, 24, 30, 45, 100])
        if size < least_pool(s, at):
            with pytest.raises(ConfigError, match="the least is"):
                s.fork(at=at, num_blocks=size)
            refused += 1
            continue
        f = s.fork(at=at, num_blocks=size)
        forks += 1
        while f.step() is not None:
            as_the_engine(f)
        check_trace(f.trace)
        assert f.trace.num_blocks_at(cb.Cursor(at)) == s.config.num_blocks
        assert f.config.num_blocks == f.trace.num_blocks_at(f.trace.last) == size
        again = Session.from_trace(cb.load(f.trace.save(tmp_path / "run.jsonl")))
        assert again.digest() == f.digest()
        twin = f.fork(at=max(0, at - 3))
        twin.run()
        assert cb.compare(f.trace, twin.trace).equal
        f.rewind(at - 1)
        as_the_engine(f)
        assert f.engine.config.num_blocks == s.config.num_blocks
    assert forks and forks + refused == 8


def test_the_smallest_pool_moves_what_lies_beyond_its_end() -> None:
    s = Session("preemption", runner="sim", num_blocks=64)
    s.run()
    at = len(s.trace) * 2 // 3
    f = s.fork(at=at, num_blocks=least_pool(s, at))
    tables = {r.request_id: list(r.block_ids) for r in s.trace.state(at).by_index}
    f.step()
    resized = next(e for e in f.trace[at].events if isinstance(e, ev.Resized))
    assert resized.moved and all(a >= resized.num_blocks > b for a, b in resized.moved)
    to = dict(resized.moved)
    for r in f.engine.scheduler.state.running:
        before = tables[r.request_id]
        assert r.block_ids[: len(before)] == [to.get(b, b) for b in before]
    as_the_engine(f)


def test_another_device_prices_the_rest() -> None:
    s = Session("article", runner="sim")
    s.run(max_steps=60)
    f = s.fork(at=50, modelled_device="a100")
    f.run()
    assert [r.t1_s for r in f.trace][:50] == [r.t1_s for r in s.trace][:50]
    assert f.trace[55].cost.total_s > s.trace[55].cost.total_s  # type: ignore[union-attr]
    assert "A100" in f.trace.header.device and "priced" in f.notes[0]
    twin = f.fork(at=20)
    twin.run()
    assert [r.t1_s for r in twin.trace] == [r.t1_s for r in f.trace]
    f.rewind(20)  # before the change
    assert (f.trace.header.device, f.trace.header.peak_bytes_s) == (
        s.trace.header.device,
        s.trace.header.peak_bytes_s,
    )
    f.reset()  # as the parent started
    f.run(max_steps=60)
    assert [r.t1_s for r in f.trace] == [r.t1_s for r in s.trace]
    assert f.trace.header.device == s.trace.header.device and f.notes == s.notes


@pytest.mark.model
def test_the_real_model_goes_on_in_another_pool() -> None:
    s = Session(
        "preemption", runner="torch", precision="exact", clock="modelled", num_blocks=64, max_num_seqs=4
    )
    s.run(max_steps=20)
    f, parent = s.fork(num_blocks=48), s.fork()
    f.reset()
    assert f.engine.runner.kv.num_blocks == 64  # type: ignore[attr-defined]
    f = s.fork(num_blocks=48)
    assert f.runner.kv.num_blocks == 48  # type: ignore[attr-defined]
    f.run(max_steps=25)
    parent.run(max_steps=25)
    common = [r.request_id for r in parent.trace.state().by_index if r.output_token_ids]
    for i in common:
        ours, theirs = f.request(i).output_token_ids, parent.request(i).output_token_ids
        n = min(len(ours), len(theirs))
        assert ours[:n] == theirs[:n]
    f.rewind(10)
    assert f.runner.kv.num_blocks == 64  # type: ignore[attr-defined]


def test_a_pool_sized_by_bytes_makes_its_own_limit() -> None:
    """max_model_len was left to the pool, so a branch from the start with another pool has another one."""
    s = Session("article", runner="sim", kv_cache_memory_bytes=40_000_000)
    room = [
        x.config.max_model_len
        for x in (s.fork(at=0, kv_cache_memory_bytes=10_000_000), s, s.fork(at=0, kv_cache_dtype="int4"))
    ]
    assert [x or 0 for x in room] == sorted(x or 0 for x in room) and len(set(room)) == 3
    assert s.fork(at=0, max_model_len=300, kv_cache_memory_bytes=20_000_000).config.max_model_len == 300
