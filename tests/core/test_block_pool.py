"""The block pool against a slow obvious twin: lists and dictionaries, copied before each change that may be
taken back.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from cbviz.core.kv.block_pool import NULL_BLOCK, ROOT, BlockPool, hash_block


class Twin:
    """What the pool says it is: a list of free blocks in the order in which they will be given out, counts,
    hashes. No linked list, no undo log.
    """

    def __init__(self, num_blocks: int, caching: bool) -> None:
        self.caching = caching
        self.free = list(range(1, num_blocks))
        self.refs = [1] + [0] * (num_blocks - 1)
        self.hash: list[bytes | None] = [None] * num_blocks
        self.by_hash: list[tuple[bytes, int]] = []
        """(hash, block), in the order in which they were cached."""
        self.evictions: list[tuple[bytes, int, str]] = []
        self.owner = [""] * num_blocks

    def find(self, h: bytes) -> int:
        return next((b for x, b in self.by_hash if x == h), NULL_BLOCK)

    def allocate(self, n: int, owner: str, step: int, most: int) -> tuple[list[int], list[int]]:
        ids, evicted = self.free[:n], []
        self.free = self.free[n:]
        for b in ids:
            self.refs[b] = 1
            h = self.hash[b]
            if h is not None:
                evicted.append(b)
                self.by_hash.remove((h, b))
                self.hash[b] = None
                self.evictions = ([x for x in self.evictions if x[0] != h] + [(h, step, owner)])[-most:]
            self.owner[b] = owner
        return ids, evicted

    def touch(self, ids: list[int], owner: str) -> None:
        for b in ids:
            if b == NULL_BLOCK:
                continue
            if self.refs[b] == 0:
                self.free.remove(b)
            self.refs[b] += 1
            self.owner[b] = owner

    def cache(self, b: int, h: bytes) -> None:
        self.hash[b] = h
        self.by_hash.append((h, b))

    def uncache(self, b: int) -> None:
        self.by_hash.remove((self.hash[b], b))  # type: ignore[arg-type]
        self.hash[b] = None

    def drop(self, ids: list[int], owner: str) -> None:
        head = []
        for b in reversed(ids):
            if b == NULL_BLOCK:
                continue
            self.refs[b] -= 1
            self.owner[b] = owner
            if self.refs[b] == 0:
                if self.hash[b] is not None and self.caching:
                    self.free.append(b)
                else:
                    head.append(b)
        self.free = head + self.free


def same(pool: BlockPool, twin: Twin) -> None:
    assert pool.free_ids() == twin.free
    assert pool.num_free == len(twin.free)
    assert pool.num_cached_free == sum(1 for b in twin.free if twin.hash[b] is not None)
    assert pool.ref_count == twin.refs
    assert pool.block_hash == twin.hash
    assert pool.last_owner == twin.owner
    assert [(h, s, o) for h, (s, o, _) in pool.evictions.items()] == twin.evictions
    listed: dict[bytes, list[int]] = {}
    for h, b in twin.by_hash:
        listed.setdefault(h, []).append(b)
    assert {h: list(ids) for h, ids in pool.by_hash.items()} == listed
    back, b = [], pool._prev[NULL_BLOCK]  # the list is whole in the other direction, too
    while b != NULL_BLOCK:
        back.append(b)
        b = pool._prev[b]
    assert back == twin.free[::-1]


@pytest.mark.parametrize("seed", range(60))
def test_the_pool_is_its_twin(seed: int) -> None:
    """Random allocations, hits, frees, hashes; transactions that are kept or taken back as a whole or to a
    mark; snapshots.
    """
    rng = random.Random(seed)
    num_blocks, caching = rng.randint(2, 14), rng.random() < 0.8
    pool, twin = BlockPool(num_blocks, caching), Twin(num_blocks, caching)
    tables: list[list[int]] = []
    hashes = [bytes([i]) * 4 for i in range(10)]
    saved: list[tuple[int, Twin, list[list[int]]]] = []
    for i in range(300):
        pool.step = i
        what = rng.random()
        owner = f"r{rng.randrange(5)}"
        if what < 0.3:
            n = rng.randint(0, pool.num_free)
            freed_at = list(pool.freed_step)
            ids, evicted = pool.allocate(n, owner)
            assert (ids, [b for b, _, _ in evicted]) == twin.allocate(n, owner, i, 4 * num_blocks)
            assert all(idle == i - freed_at[b] for b, _, idle in evicted)
            if ids:
                tables.append(ids)
        elif what < 0.45:
            hits = [b for b in (pool.find(h) for h in rng.sample(hashes, 3)) if b]
            assert hits == [b for b in hits if twin.find(pool.block_hash[b] or b"") == b]
            hits = [NULL_BLOCK] * rng.randint(0, 1) + list(dict.fromkeys(hits))
            pool.touch(hits, owner)
            twin.touch(hits, owner)
            tables.append(hits)
        elif what < 0.6 and tables:
            bare = [b for b in rng.choice(tables) if b and pool.block_hash[b] is None]
            if bare and caching:
                b, h = rng.choice(bare), rng.choice(hashes)
                pool.cache(b, h)
                twin.cache(b, h)
        elif what < 0.65:
            carried = [
                b for b in range(1, num_blocks) if pool.block_hash[b] is not None and pool.ref_count[b]
            ]
            if carried:
                b = rng.choice(carried)
                pool.uncache(b)
                twin.uncache(b)
        elif what < 0.85 and tables:
            ids = tables.pop(rng.randrange(len(tables)))
            pool.free(ids, owner)
            twin.drop(ids, owner)
        elif what < 0.9:
            saved.append((len(pool.undo), copy.deepcopy(twin), [list(t) for t in tables]))
        elif what < 0.96 and saved:
            mark, twin, tables = saved.pop(rng.randrange(len(saved)))
            saved = [x for x in saved if x[0] <= mark]
            pool.rollback(mark)
        elif what < 0.98:
            pool.undo.clear()
            saved = []
        else:
            plain = json.loads(json.dumps(pool.snapshot()))
            pool = BlockPool(num_blocks, caching)
            pool.restore(plain)
            assert pool.snapshot() == plain
            saved = []
        same(pool, twin)


def test_a_block_taken_and_freed_in_one_step_goes_back_to_its_place() -> None:
    pool = BlockPool(6)
    before = pool.snapshot()
    ids, _ = pool.allocate(3, "a")
    pool.free(ids, "a")
    again, _ = pool.allocate(2, "b")
    pool.free(again[:1], "b")
    pool.rollback()
    assert pool.snapshot() == before and pool.free_ids() == [1, 2, 3, 4, 5]


def test_freed_blocks_are_reused_in_vllms_order() -> None:
    """Uncached blocks of a freed table come back first, the last one foremost; cached ones last, the last of
    the table before the first.
    """
    pool = BlockPool(8)
    ids, _ = pool.allocate(5, "a")
    assert ids == [1, 2, 3, 4, 5]
    for b in ids[:3]:
        pool.cache(b, bytes([b]))
    pool.free(ids, "a")
    assert pool.free_ids() == [5, 4, 6, 7, 3, 2, 1]
    assert (pool.num_free, pool.num_cached_free) == (7, 3)


def test_a_hash_survives_until_the_block_is_given_out_again() -> None:
    pool = BlockPool(3)
    ids, _ = pool.allocate(1, "a")
    pool.cache(ids[0], b"x")
    pool.step = 4
    pool.free(ids, "a")
    assert pool.find(b"x") == ids[0]
    pool.step = 9
    _, evicted = pool.allocate(2, "b")
    assert evicted == [(ids[0], "a", 5)]
    assert pool.find(b"x") == NULL_BLOCK and pool.evictions[b"x"][:2] == (9, "b")


def chain(tokens: list[int], size: int, extra: bytes = b"") -> list[bytes]:
    out: list[bytes] = []
    for i in range(0, len(tokens) - size + 1, size):
        out.append(hash_block(out[-1] if out else ROOT, tokens[i : i + size], extra))
    return out


def test_the_hash_is_the_same_in_every_run() -> None:
    """A golden value: sha256 over the parent, the number of ids, the ids as 64-bit integers and the extra.

    It must not depend on the process, its hash seed or the machine's word size.
    """
    assert (
        hash_block(ROOT, (1, 2, 3)).hex()
        == "622ecdd1b67656196168b548ad806099aa4ccb8aa73debe055fc15805f5ac9d9"
    )


def test_crafted_prompts_do_not_collide() -> None:
    """Whoever knows the scheme still can't make one prompt look like another: other parents, other cuts,
    other signs and sizes of ids, other windows.
    """
    prompts: list[tuple[list[int], int, bytes]] = [
        ([1, 2, 3, 4], 2, b""),
        ([1, 2, 3, 4], 4, b""),
        ([1, 2, 3, 4], 1, b""),
        ([3, 4, 1, 2], 2, b""),
        ([12, 34], 2, b""),
        ([1, 234], 2, b""),
        ([123, 4], 2, b""),
        ([-1, -2], 2, b""),
        ([2**63 - 1, -2], 2, b""),
        ([0xFFFFFFFF, 0xFFFFFFFE], 2, b""),
        ([0, 0], 2, b""),
        ([0], 1, b""),
        ([0, 0, 0], 3, b""),
        ([1, 2], 2, b"window 4"),
        ([256, 0], 2, b""),
        ([0, 256], 2, b""),
        ([1 << 32, 0], 2, b""),
        ([0, 1 << 32], 2, b""),
        ([1, 2], 2, b"window 44"),
    ]
    seen: dict[bytes, Any] = {ROOT: "root"}
    for tokens, size, extra in prompts:
        done: tuple[int, ...] = ()
        for i, h in enumerate(chain(tokens, size, extra)):
            done = (*done, *tokens[i * size : (i + 1) * size])
            cuts = (done, size, extra)
            assert seen.setdefault(h, cuts) == cuts
    # the same tokens after another beginning are another block
    assert chain([1, 2, 9, 9], 2)[1] != chain([3, 4, 9, 9], 2)[1]
    # and equal beginnings are equal blocks, whatever follows
    assert chain([1, 2, 3, 4], 2)[0] == chain([1, 2, 5, 6], 2)[0]


def test_an_extra_cannot_be_forged_by_tokens() -> None:
    """A window's mark is bytes behind whole 64-bit ids: a block of one more token whose bytes spell the mark
    has another number of ids.
    """
    mark = b"window 4"
    spelled = int.from_bytes(mark, "little")
    assert len(mark) == 8
    assert hash_block(ROOT, [1], mark) != hash_block(ROOT, [1, spelled])


@pytest.mark.parametrize("bad", [[1.5], ["1"], [2**63]])
def test_ids_that_are_no_64_bit_integers_are_refused(bad: list[Any]) -> None:
    with pytest.raises((TypeError, OverflowError)):
        hash_block(ROOT, bad)
