"""Which blocks a request needs, finds and gives back.

Owns the rules between a request's tokens and the pool; decides nothing about queues.

One admission, drawn:

    block table  |<-- hit: shared, already computed -->|<-- allocated now: this step -->|<-- reserved ahead
    (orca, static) -->|
    tokens       0                                num_cached_tokens            num_computed_tokens + num_new

With contiguous reservation the table is one run of neighbours, taken whole at admission; nothing is shared.

All facts go to the journal where they happen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cbviz import events as ev
from cbviz.core.kv.block_pool import NULL_BLOCK, ROOT, BlockPool, hash_block
from cbviz.core.kv.contiguous import allocate_run, free_runs
from cbviz.core.request import Request
from cbviz.events import AnyEvent


class KVManager:
    """Block tables of all requests over one pool.

    `sliding_window` W > 0: a query sees the last W positions (itself included), so blocks that lie wholly
    left of every later window are returned and stand as 0 in the table. `attention_sinks` S > 0: every query
    sees the first S tokens too, so the blocks that hold them stay, and the null blocks stand behind them:

        block table  |<-- sinks -->| 0 | 0 | 0 |<-- window -->|
                     0       sink_blocks    num_null_blocks
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_model_len: int,
        journal: list[AnyEvent],
        sliding_window: int = 0,
        contiguous: str = "",
        attention_sinks: int = 0,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.sliding_window = sliding_window
        self.sink_blocks = -(-attention_sinks // block_size) if sliding_window else 0
        self.contiguous = contiguous
        """How a run of blocks is chosen (`first-fit`, `best-fit`); '': blocks are taken one by one, wherever
        they lie.
        """
        self.journal = journal
        self.copies: list[tuple[int, int]] = []
        """Blocks that this step copies, as (source, destination), in order; the scheduler empties it."""
        self.undo: list[tuple[Callable[..., Any], tuple[Any, ...]]] = pool.undo
        self._extra = (
            (f"window {sliding_window}" + f" sinks {attention_sinks}" * (attention_sinks > 0)).encode()
            if sliding_window
            else b""
        )

    # prefix cache -------------------------------------------------------------------------------------------

    def hashes(self, r: Request, num_blocks: int) -> list[bytes]:
        """The request's block hashes, computed as far as `num_blocks` full blocks."""
        have = r.block_hashes
        bs = self.block_size
        while len(have) < num_blocks:
            i = len(have)
            have.append(
                hash_block(have[-1] if have else ROOT, r.token_ids[i * bs : (i + 1) * bs], self._extra)
            )
        return have

    def find_prefix(self, r: Request) -> list[int]:
        """Blocks of the longest cached prefix, at most num_tokens - 1 tokens of it (one token must be
        computed to get logits).

        With a sliding window only the last ceil((W - 1) / block_size) blocks of a prefix matter: looked for
        from the right, with null blocks before them; where there is no such run, the leading run counts
        (vLLM's rule). With sinks their blocks must be there as well: what comes behind them was computed with
        them in sight.
        """
        if not self.pool.enable_caching:
            return []
        limit = (r.num_tokens - 1) // self.block_size
        hashes = self.hashes(r, limit)
        find = self.pool.find
        if self.sliding_window:
            need = -(-(self.sliding_window - 1) // self.block_size)
            found = [NULL_BLOCK] * limit
            sinks = min(self.sink_blocks, limit)
            for i in range(sinks):
                found[i] = find(hashes[i])
                if found[i] == NULL_BLOCK:
                    return found[:i]
            run = 0
            for i in range(limit - 1, sinks - 1, -1):
                b = find(hashes[i])
                if b == NULL_BLOCK:
                    run = 0
                    continue
                found[i] = b
                run += 1
                if run >= need:
                    return found[: i + run]
            return found[: sinks + run]
        out: list[int] = []
        for i in range(limit):
            b = find(hashes[i])
            if b == NULL_BLOCK:
                break
            out.append(b)
        return out

    def explain_miss(self, r: Request, num_hit: int) -> AnyEvent | None:
        """Why the prefix of `num_hit` blocks goes no further."""
        if not self.pool.enable_caching:
            return None
        full, rest = divmod(r.num_tokens, self.block_size)
        limit = (r.num_tokens - 1) // self.block_size
        if num_hit >= limit:
            if rest == 0 and self.pool.find(self.hashes(r, full)[full - 1]) != NULL_BLOCK:
                return ev.PrefixMiss(r.request_id, full - 1, "last-token")
            return ev.PrefixMiss(r.request_id, num_hit, "partial") if num_hit else None
        h = self.hashes(r, num_hit + 1)[num_hit]
        gone = self.pool.evictions.get(h)
        if gone is not None and self.pool.find(h) == NULL_BLOCK:
            return ev.PrefixMiss(r.request_id, num_hit, "evicted", gone[0], gone[1])
        return ev.PrefixMiss(
            r.request_id,
            num_hit,
            "window" if self.sliding_window and self.pool.find(h) != NULL_BLOCK else "new",
        )

    # allocation ---------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self.max_model_len) // self.block_size)

    def need_at_admission(self, hits: list[int], num_tokens: int, at_most: int | None = None) -> int:
        """Blocks that leave the free list if `num_tokens` tokens (from 0) are to have slots: new ones, and
        hits that nobody holds now.

        `at_most` caps the blocks counted for the tokens (a window never holds more at once).
        """
        ref = self.pool.ref_count
        blocks = self.blocks_for(num_tokens)
        if at_most is not None and at_most < blocks:
            blocks = at_most
        return max(0, blocks - len(hits)) + sum(1 for b in hits if b != NULL_BLOCK and ref[b] == 0)

    def share(self, r: Request, hits: list[int]) -> None:
        """Puts the hit blocks at the front of the (empty) table."""
        self.pool.touch(hits, r.request_id)
        r.block_ids.extend(hits)
        r.num_cached_blocks = len(hits)
        i = self.sink_blocks
        while i < len(hits) and hits[i] == NULL_BLOCK:
            i += 1
            r.num_null_blocks = i
        self.journal.append(ev.Shared(r.request_id, hits))

    def allocate(
        self, r: Request, num_new: int, reserve_tokens: int = 0, num_lookahead: int = 0
    ) -> tuple[int, int] | None:
        """Slots for `num_new` tokens after `num_computed_tokens` (and for `reserve_tokens` tokens in all,
        taken ahead).

        None if done; (blocks needed, blocks free) if the pool can't. Blocks that left the window are returned
        first, as vLLM does.
        """
        if self.sliding_window:
            self._leave_window(r)
        end = r.num_computed_tokens + num_new
        slots = max(end + num_lookahead, reserve_tokens)
        need = self.blocks_for(slots) - len(r.block_ids)
        shared = r.shares_tail and self._writes_shared(r)
        if need > 0 or shared:
            if max(0, need) + shared > self.pool.num_free:
                return max(0, need) + shared, self.pool.num_free
            if shared:
                self.copy_tail(r)
            if need > 0:
                self.grow(r, need)
        if r.shares_tail:
            self.undo.append((_set_shares, (r,)))
            r.shares_tail = False  # what it writes from here on is its own
        if self.pool.enable_caching:
            full = min(end, r.num_tokens) // self.block_size
            if full > r.num_cached_blocks:
                self._cache_full(r, full)
        return None

    def _writes_shared(self, r: Request) -> bool:
        """Would the next token go into a block that others hold too?"""
        place, offset = divmod(r.num_computed_tokens, self.block_size)
        return offset > 0 and place < len(r.block_ids) and self.pool.ref_count[r.block_ids[place]] > 1

    def copy_tail(self, r: Request) -> None:
        """Copy-on-write: a block of its own for the place that is written next.

        The caller has checked that one is free.
        """
        place = r.num_computed_tokens // self.block_size
        src = r.block_ids[place]
        (dst,), evicted = self.take(1, r.request_id)
        for b, owner, idle in evicted:
            self.journal.append(ev.Evicted(b, owner, r.request_id, idle))
        self.undo.append((_set_place, (r, place, src)))
        r.block_ids[place] = dst
        self.pool.free([src], r.request_id)
        self.copies.append((src, dst))
        self.journal.append(ev.Copied(r.request_id, src, dst, place))

    def grow(self, r: Request, n: int) -> list[int]:
        """`n` more blocks at the end of the table; the caller has checked that they are there."""
        ids, evicted = self.take(n, r.request_id)
        for b, owner, idle in evicted:
            self.journal.append(ev.Evicted(b, owner, r.request_id, idle))
        self.undo.append((_cut_table, (r, len(r.block_ids))))
        r.block_ids.extend(ids)
        self.journal.append(ev.Allocated(r.request_id, ids))
        return ids

    def take(self, n: int, owner: str) -> tuple[list[int], list[tuple[int, str, int]]]:
        """`n` blocks from the pool, as `BlockPool.allocate` gives them; in one run if allocation is
        contiguous.
        """
        return (
            (allocate_run(self.pool, n, owner, self.contiguous), [])
            if self.contiguous
            else self.pool.allocate(n, owner)
        )

    def lacks_run(self, num_tokens: int) -> tuple[int, int] | None:
        """(blocks needed in one run, longest run of free blocks) if allocation is contiguous and no run holds
        `num_tokens` tokens; else None.
        """
        if not self.contiguous:
            return None
        need = self.blocks_for(num_tokens)
        longest = max((length for _, length in free_runs(self.pool)), default=0)
        return (need, longest) if need > longest else None

    def _cache_full(self, r: Request, full: int) -> None:
        hashes = self.hashes(r, full)
        self.undo.append((_set_cached, (r, r.num_cached_blocks)))
        for i in range(r.num_cached_blocks, full):
            b = r.block_ids[i]
            if b != NULL_BLOCK:
                self.pool.cache(b, hashes[i])
                self.journal.append(ev.BlockCached(r.request_id, b, hashes[i].hex()[:16]))
        r.num_cached_blocks = full

    def uncache_planned(self, r: Request) -> None:
        """The request's tokens of this step will not be computed after all: blocks that they would have
        filled can't be found.
        """
        for i in range(r.num_computed_tokens // self.block_size, r.num_cached_blocks):
            if r.block_ids[i] != NULL_BLOCK:
                self.pool.uncache(r.block_ids[i])

    def _leave_window(self, r: Request) -> None:
        gone = min(
            max(0, r.num_computed_tokens - self.sliding_window + 1) // self.block_size, len(r.block_ids)
        )
        first = max(r.num_null_blocks, self.sink_blocks)
        if gone > first:
            self.journal.append(ev.OutOfWindow(r.request_id, self.leave(r, first, gone), first))

    def leave(self, r: Request, first: int, gone: int) -> list[int]:
        """Gives back the blocks at places `first` ..

        `gone` - 1 and puts null blocks there. Returns their ids.
        """
        ids = r.block_ids[first:gone]
        self.undo.append((_refill, (r, first, ids, r.num_null_blocks)))
        r.block_ids[first:gone] = [NULL_BLOCK] * len(ids)
        r.num_null_blocks = gone
        self.pool.free(ids, r.request_id)
        return ids

    def num_held(self, r: Request) -> int:
        """Blocks in the request's table, null blocks aside."""
        return len(r.block_ids) - max(0, r.num_null_blocks - self.sink_blocks)

    def free(self, r: Request) -> list[int]:
        """Gives back all of the request's references.

        Returns the ids, in table order, without null blocks.
        """
        ids = (
            r.block_ids[: self.sink_blocks] + r.block_ids[r.num_null_blocks :]
            if r.num_null_blocks
            else r.block_ids
        )
        self.pool.free(ids, r.request_id)
        r.block_ids = []
        r.num_null_blocks = r.num_cached_blocks = 0
        return ids


def _cut_table(r: Request, length: int) -> None:
    del r.block_ids[length:]


def _set_place(r: Request, place: int, b: int) -> None:
    r.block_ids[place] = b


def _set_shares(r: Request) -> None:
    r.shares_tail = True


def _set_cached(r: Request, n: int) -> None:
    r.num_cached_blocks = n


def _refill(r: Request, first: int, ids: list[int], num_null_blocks: int) -> None:
    r.block_ids[first : first + len(ids)] = ids
    r.num_null_blocks = num_null_blocks
