"""The checker beside the structures: every invariant of the control plane, recomputed the slow obvious way.

Run after every step of every test.
"""

from __future__ import annotations

from cbviz.core.kv.block_pool import NULL_BLOCK
from cbviz.core.request import Status
from cbviz.core.scheduler import Scheduler
from cbviz.core.state import ControlState
from cbviz.messages import sequence_ids


def check(s: Scheduler) -> None:
    """Raises AssertionError naming what is wrong.

    Valid between steps (after `update`) and after `schedule`.
    """
    _check_state(s.state, s.drafts_in_flight)


def _check_state(s: ControlState, drafted: dict[str, int]) -> None:
    pool, bs = s.pool, s.kv.block_size
    refs = [0] * pool.num_blocks
    for r in s.requests.values():
        for i, b in enumerate(r.block_ids):
            assert 0 <= b < pool.num_blocks, f"{r.request_id}: block {b} at place {i} is not in the pool"
            if b == NULL_BLOCK:
                assert s.kv.sink_blocks <= i < r.num_null_blocks, (
                    f"{r.request_id}: null block at place {i}, out of the window are {s.kv.sink_blocks} to "
                    f"{r.num_null_blocks - 1}"
                )
            else:
                assert i >= r.num_null_blocks or i < s.kv.sink_blocks, (
                    f"{r.request_id}: block {b} at place {i} should be out of the window"
                )
                refs[b] += 1
        held = [b for b in r.block_ids if b != NULL_BLOCK]
        assert len(set(held)) == len(held), f"{r.request_id}: a block stands twice in its table {r.block_ids}"
        most = max(r.num_tokens, 1) + drafted.get(r.request_id, 0)
        assert 0 <= r.num_computed_tokens <= most, (
            f"{r.request_id}: computed {r.num_computed_tokens} of {r.num_tokens} tokens and "
            f"{drafted.get(r.request_id, 0)} drafts"
        )
        decodes = r.status is Status.RUNNING and r.num_computed_tokens == r.num_tokens - 1
        assert decodes or not r.draft_token_ids, (
            f"{r.request_id}: drafts {r.draft_token_ids} of a request that doesn't decode"
        )
        held_elsewhere = r.seat_held or r.host_block_ids
        assert r.num_computed_tokens <= len(r.block_ids) * bs or held_elsewhere, (
            f"{r.request_id}: {r.num_computed_tokens} computed tokens, {len(r.block_ids)} blocks"
        )
        if r.status in (Status.WAITING, Status.PREEMPTED):
            assert not r.block_ids, f"{r.request_id}: waits with blocks {r.block_ids}"
            away = -(-r.num_computed_tokens // bs) - r.num_null_blocks
            assert len(r.host_block_ids) == away, (
                f"{r.request_id}: waits with {r.num_computed_tokens} computed tokens and host blocks "
                f"{r.host_block_ids}"
            )
        else:
            assert not r.host_block_ids, (
                f"{r.request_id}: has host blocks {r.host_block_ids} and does not wait"
            )
        for i in range(r.num_cached_blocks):
            b = r.block_ids[i]
            if b != NULL_BLOCK:
                known = (
                    pool.block_hash[b] == r.block_hashes[i]
                    if i < len(r.block_hashes)
                    else pool.block_hash[b] is not None
                )
                assert known, f"{r.request_id}: block {b} has another hash than its tokens"
    for r in s.requests.values():
        if r.is_beam and not r.spec.parent and not r.num_forks:
            beams = [s.requests[i] for i in sequence_ids(r.spec)]
            assert len({b.num_tokens for b in beams}) == 1, (
                f"beams of {r.request_id} of different lengths: {[b.num_tokens for b in beams]}"
            )
            assert len({tuple(b.token_ids) for b in beams}) == len(beams), (
                f"two beams of {r.request_id} say the same"
            )
            assert any(b.candidates is None for b in beams), (
                f"all beams of {r.request_id} have candidates, and nothing was chosen"
            )
        if r.candidates is not None:
            assert r.status is Status.RUNNING and r.num_computed_tokens == r.num_tokens, (
                f"{r.request_id} has candidates, is {r.status} and has computed {r.num_computed_tokens}"
            )
    on_host = [b for r in s.requests.values() for b in r.host_block_ids]
    assert sorted([*on_host, *s.host.free]) == list(range(s.host.num_blocks)), (
        f"host blocks {sorted(on_host)} are held and {sorted(s.host.free)} free, of {s.host.num_blocks}"
    )
    refs[NULL_BLOCK] = 1
    assert refs == pool.ref_count, (
        "reference counts differ: "
        f"{[(b, n, m) for b, (n, m) in enumerate(zip(refs, pool.ref_count, strict=True)) if n != m][:5]} "
        "(block, counted, kept)"
    )
    free = pool.free_ids()
    assert len(free) == len(set(free)) == pool.num_free, (
        f"free list has {len(free)} entries, num_free is {pool.num_free}"
    )
    assert set(free) == {b for b in range(1, pool.num_blocks) if refs[b] == 0}, (
        "the free list is not the set of blocks without references"
    )
    assert pool.num_cached_free == sum(1 for b in free if pool.block_hash[b] is not None), (
        "num_cached_free is off"
    )
    for h, ids in pool.by_hash.items():
        assert ids, "an empty entry in by_hash"
        for b in ids:
            assert pool.block_hash[b] == h, f"block {b} is listed under a hash that it does not carry"
    hashed = sum(1 for h in pool.block_hash if h is not None)
    assert hashed == sum(len(ids) for ids in pool.by_hash.values()), (
        "a block carries a hash that is not listed"
    )
    waiting, running = {r.request_id for r in s.waiting}, {r.request_id for r in s.running}
    assert len(waiting) == len(s.waiting) and len(running) == len(s.running), (
        "a request stands twice in a queue"
    )
    assert not waiting & running, f"both waiting and running: {waiting & running}"
    assert waiting | running == set(s.requests), (
        f"requests in no queue: {set(s.requests) - waiting - running}"
    )
    for r in s.running:
        assert (r.status is Status.RUNNING) != r.seat_held, (
            f"{r.request_id} runs with status {r.status}, seat_held {r.seat_held}"
        )
