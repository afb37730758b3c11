"""Physical KV blocks: who is free, who is shared, what can be found again.

Knows nothing of requests, tokens or attention.

Struct of arrays, index = physical block id. Block 0 is the null block: never given out, it stands in tables
for places that hold nothing (as in vLLM, so that block ids compare). The free list is a doubly linked list
over two arrays, in eviction order:

    head -> [freed uncached, reused at once ... | cached, least recently used first ... ] -> tail

Freeing (vLLM's rule): cached blocks go to the tail, uncached ones to the head. A block loses its hash when it
is handed out again, not when it is freed. Every change can be undone (`undo`), in reverse order: a removal
notes its neighbours, so undoing it relinks exactly ("dancing links", Knuth 2000; noted outside the node,
because a block may be taken and freed again within one step).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from cbviz.core.kv.runs import LONG_LIST, ids_of, runs_of

NULL_BLOCK = 0
ROOT = sha256(b"cbviz kv block v1").digest()
"""Parent of every first block. Fixed, so hashes are equal from run to run."""


def hash_block(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Chained hash of one full block: sha256 over the parent's hash, how many ids, the token ids and whatever
    else decides the KV (adapter, window).

    Collision-resistant, so a crafted prompt can't hit another's blocks.

    >>> a = hash_block(ROOT, [1, 2, 3, 4])
    >>> a == hash_block(ROOT, [1, 2, 3, 4]), a == hash_block(a, [1, 2, 3, 4])
    (True, False)
    """
    return sha256(
        parent + len(token_ids).to_bytes(4, "little") + array("q", token_ids).tobytes() + extra
    ).digest()


class BlockPool:
    """`num_blocks` blocks, block 0 the null block.

    Allocation raises nothing: callers ask `num_free` first.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.ref_count = [0] * num_blocks
        self.ref_count[NULL_BLOCK] = 1
        self.block_hash: list[bytes | None] = [None] * num_blocks
        self.by_hash: dict[bytes, dict[int, None]] = {}
        """Hash -> blocks that carry it, oldest first; the first is served."""
        self.last_owner = [""] * num_blocks
        """A tag that callers give, only for reasons: who held the block last."""
        self.freed_step = [0] * num_blocks
        self.step = 0
        self.num_free = num_blocks - 1
        self.num_cached_free = 0
        """Free blocks that can still be found."""
        self.evictions: OrderedDict[bytes, tuple[int, str, int]] = OrderedDict()
        """Hash -> (step, who took the block, number of the eviction), the last 4 x num_blocks of them, oldest
        first: why a prefix missed.
        """
        self._num_evictions = 0
        # Arrays: a list of millions of numbers takes ten times as much, at every fork.
        self._next = array("i", range(1, num_blocks))
        self._next.append(NULL_BLOCK)
        self._prev = array("i", (num_blocks - 1,))
        self._prev.extend(range(num_blocks - 1))
        self.undo: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    # the free list: index 0 (the null block) is the sentinel, its next the head, its prev the tail ----------

    def _unlink(self, b: int) -> tuple[int, int]:
        """Takes the block out. Returns its neighbours, for `_relink`."""
        p, n = self._prev[b], self._next[b]
        self._next[p] = n
        self._prev[n] = p
        self.num_free -= 1
        if self.block_hash[b] is not None:
            self.num_cached_free -= 1
        return p, n

    def _relink(self, b: int, p: int, n: int) -> None:
        """Exact inverse of `_unlink`, if everything since was undone."""
        self._prev[b], self._next[b] = p, n
        self._next[p] = b
        self._prev[n] = b
        self.num_free += 1
        if self.block_hash[b] is not None:
            self.num_cached_free += 1

    def _insert(self, b: int, after: int) -> None:
        n = self._next[after]
        self._prev[b], self._next[b] = after, n
        self._next[after] = b
        self._prev[n] = b
        self.num_free += 1
        if self.block_hash[b] is not None:
            self.num_cached_free += 1

    def free_ids(self) -> list[int]:
        """Free blocks in the order in which they will be given out."""
        out, b = [], self._next[NULL_BLOCK]
        while b != NULL_BLOCK:
            out.append(b)
            b = self._next[b]
        return out

    # blocks -------------------------------------------------------------------------------------------------

    def find(self, block_hash: bytes) -> int:
        """The block that holds this content, 0 if none does."""
        found = self.by_hash.get(block_hash)
        return next(iter(found)) if found else NULL_BLOCK

    def allocate(self, n: int, owner: str) -> tuple[list[int], list[tuple[int, str, int]]]:
        """Takes `n` blocks from the head (the caller has checked `num_free`).

        Returns (ids, evicted as (block, last owner, idle steps)).
        """
        ids: list[int] = []
        evicted: list[tuple[int, str, int]] = []
        nxt, undo = self._next, self.undo
        for _ in range(n):
            b = nxt[NULL_BLOCK]
            undo.append((self._undo_take, (b, self.last_owner[b], *self._unlink(b))))
            self.ref_count[b] = 1
            if self.block_hash[b] is not None:
                evicted.append((b, self.last_owner[b], self.step - self.freed_step[b]))
                self._drop_hash(b, owner)
            self.last_owner[b] = owner
            ids.append(b)
        return ids, evicted

    def take(self, b: int, owner: str) -> None:
        """Takes one free block out of the middle of the free list. It carries no hash."""
        self.undo.append((self._undo_take, (b, self.last_owner[b], *self._unlink(b))))
        self.ref_count[b] = 1
        self.last_owner[b] = owner

    def _undo_take(self, b: int, owner: str, p: int, n: int) -> None:
        self.ref_count[b] = 0
        self.last_owner[b] = owner
        self._relink(b, p, n)

    def _drop_hash(self, b: int, owner: str) -> None:
        h = self.block_hash[b]
        assert h is not None
        same = self.by_hash[h]
        before = tuple(same)
        del same[b]
        if not same:
            del self.by_hash[h]
        self.block_hash[b] = None
        known = self.evictions.pop(h, None)
        self._num_evictions += 1
        self.evictions[h] = (self.step, owner, self._num_evictions)
        gone = self.evictions.popitem(last=False) if len(self.evictions) > 4 * self.num_blocks else None
        self.undo.append((self._undo_drop_hash, (b, h, before, known, gone)))

    def _undo_drop_hash(
        self,
        b: int,
        h: bytes,
        before: tuple[int, ...],
        known: tuple[int, str, int] | None,
        gone: tuple[bytes, tuple[int, str, int]] | None,
    ) -> None:
        self.block_hash[b] = h
        self.by_hash[h] = dict.fromkeys(before)
        del self.evictions[h]
        if known is not None:
            self.evictions[h] = known
            self.evictions = OrderedDict(
                sorted(self.evictions.items(), key=_number)
            )  # back to its place; rare
        if gone is not None:
            self.evictions[gone[0]] = gone[1]
            self.evictions.move_to_end(gone[0], last=False)

    def touch(self, block_ids: Sequence[int], owner: str) -> None:
        """One more reference to each block; free ones leave the free list. Null blocks are skipped."""
        for b in block_ids:
            if b == NULL_BLOCK:
                continue
            if self.ref_count[b] == 0:
                self.undo.append((self._undo_take, (b, self.last_owner[b], *self._unlink(b))))
            else:
                self.undo.append((self._undo_touch, (b, self.last_owner[b])))
            self.ref_count[b] += 1
            self.last_owner[b] = owner

    def _undo_touch(self, b: int, owner: str) -> None:
        self.ref_count[b] -= 1
        self.last_owner[b] = owner

    def cache(self, b: int, block_hash: bytes) -> None:
        """The block is full and can be found from now on."""
        self.block_hash[b] = block_hash
        self.by_hash.setdefault(block_hash, {})[b] = None
        self.undo.append((self._undo_cache, (b, block_hash)))

    def _undo_cache(self, b: int, block_hash: bytes) -> None:
        self.block_hash[b] = None
        same = self.by_hash[block_hash]
        del same[b]
        if not same:
            del self.by_hash[block_hash]

    def uncache(self, b: int) -> None:
        """Takes back `cache` for a block in use: what it was to hold will not be computed."""
        h = self.block_hash[b]
        assert h is not None and self.ref_count[b]
        same = self.by_hash[h]
        before = tuple(same)
        del same[b]
        if not same:
            del self.by_hash[h]
        self.block_hash[b] = None
        self.undo.append((self._undo_uncache, (b, h, before)))

    def _undo_uncache(self, b: int, h: bytes, before: tuple[int, ...]) -> None:
        self.block_hash[b] = h
        self.by_hash[h] = dict.fromkeys(before)

    def free(self, block_ids: Sequence[int], owner: str) -> None:
        """Drops one reference to each block, given first to last of a table; they are freed last to first.

        Free blocks with a hash go to the tail, the last block of the table before the first, so that a prefix
        outlives its continuation; those without go to the head, the last block foremost.
        """
        tail = self._prev
        at = NULL_BLOCK
        for b in reversed(block_ids):
            if b == NULL_BLOCK:
                continue
            self.ref_count[b] -= 1
            self.undo.append(
                (self._undo_free, (b, self.last_owner[b], self.freed_step[b], self.ref_count[b] == 0))
            )
            self.last_owner[b] = owner
            if self.ref_count[b] == 0:
                self.freed_step[b] = self.step
                if self.block_hash[b] is not None and self.enable_caching:
                    self._insert(b, tail[NULL_BLOCK])
                else:
                    self._insert(b, at)
                    at = b

    def _undo_free(self, b: int, owner: str, step: int, linked: bool) -> None:
        if linked:
            self._unlink(b)
        self.ref_count[b] += 1
        self.last_owner[b] = owner
        self.freed_step[b] = step

    def rollback(self, mark: int = 0) -> None:
        """Undoes everything since the undo log had `mark` entries."""
        while len(self.undo) > mark:
            f, args = self.undo.pop()
            f(*args)

    def resize(self, num_blocks: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Gives the pool another number of blocks, between steps; not undone.

        Returns (moved as (old id, new id), dropped cached ids).

        New blocks go to the tail of the free list. When it shrinks, blocks in use beyond the new end move to
        free ones, those that would be given out first. Raises ValueError if the blocks in use don't fit.
        """
        old = self.num_blocks
        used = old - 1 - self.num_free
        if num_blocks < used + 1:
            raise ValueError(f"{used} blocks are in use")
        free = self.free_ids()
        beyond = [b for b in range(num_blocks, old) if self.ref_count[b]]
        homes = [b for b in free if b < num_blocks][: len(beyond)]
        taken = set(homes)
        dropped = [b for b in free if self.block_hash[b] is not None and (b >= num_blocks or b in taken)]
        for b in dropped:
            self._drop_hash(b, "")
        to = dict(zip(beyond, homes, strict=True))
        extra = max(0, num_blocks - old)
        for name, empty in (("ref_count", 0), ("block_hash", None), ("last_owner", ""), ("freed_step", 0)):
            column = getattr(self, name)
            for b, home in to.items():
                column[home] = column[b]
            setattr(self, name, (column + [empty] * extra)[:num_blocks])
        self.by_hash = {h: {to.get(b, b): None for b in ids} for h, ids in self.by_hash.items()}
        self.num_blocks = num_blocks
        self._next, self._prev = _zeros(num_blocks), _zeros(num_blocks)
        self.num_free = self.num_cached_free = 0
        for b in [b for b in free if b < num_blocks and b not in taken] + list(range(old, num_blocks)):
            self._insert(b, self._prev[NULL_BLOCK])
        self.undo.clear()
        return list(to.items()), dropped

    # plain data ---------------------------------------------------------------------------------------------

    def snapshot(self, *, whole: bool = False) -> dict[str, Any]:
        """The pool as primitives: everything that decides its future.

        `whole`: the free list one by one, however long it is.
        """
        free = self.free_ids()
        return {
            "ref_count": {str(b): n for b, n in enumerate(self.ref_count) if n and b != NULL_BLOCK},
            "by_hash": {h.hex(): list(ids) for h, ids in self.by_hash.items()},
            **({"free": free} if whole or len(free) <= LONG_LIST else {"free_runs": runs_of(free)}),
            "last_owner": {str(b): o for b, o in enumerate(self.last_owner) if o},
            "freed_step": {str(b): n for b, n in enumerate(self.freed_step) if n},
            "evictions": [[h.hex(), s, o] for h, (s, o, _) in self.evictions.items()],
        }

    def restore(self, data: dict[str, Any]) -> None:
        n = self.num_blocks
        self.ref_count = [0] * n
        self.ref_count[NULL_BLOCK] = 1
        for b, c in data["ref_count"].items():
            self.ref_count[int(b)] = c
        self.block_hash = [None] * n
        self.by_hash = {}
        for h, ids in data["by_hash"].items():
            raw = bytes.fromhex(h)
            self.by_hash[raw] = dict.fromkeys(ids)
            for b in ids:
                self.block_hash[b] = raw
        self.last_owner = [""] * n
        for b, o in data["last_owner"].items():
            self.last_owner[int(b)] = o
        self.freed_step = [0] * n
        for b, c in data["freed_step"].items():
            self.freed_step[int(b)] = c
        self.evictions = OrderedDict(
            (bytes.fromhex(h), (s, o, i)) for i, (h, s, o) in enumerate(data["evictions"])
        )
        self._num_evictions = len(self.evictions)
        self._next, self._prev = _zeros(n), _zeros(n)
        self.num_free = self.num_cached_free = 0
        for b in data["free"] if "free" in data else ids_of(data["free_runs"]):
            self._insert(b, self._prev[NULL_BLOCK])
        self.undo.clear()


def _zeros(n: int) -> array[int]:
    return array("i", bytes(4 * n))


def _number(item: tuple[bytes, tuple[int, str, int]]) -> int:
    return item[1][2]
