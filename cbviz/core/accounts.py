"""What a step's tokens were spent on, and what the pool's slots hold after it."""

from __future__ import annotations

from cbviz import events as ev
from cbviz.core.iteration import Iteration
from cbviz.core.state import ControlState
from cbviz.messages import SlotAccount, TokenAccount


def close(state: ControlState, it: Iteration) -> None:
    """The plan stands: its requests get their tokens, and the step's tokens and slots are counted."""
    turned = state.give_tokens(it.shares, it.records)
    state.undo.append((state.take_tokens, (it.shares, it.records, turned)))
    total = again = padded = 0
    for c in it.records:
        total += c.num_tokens
        again += c.num_recomputed
        if c.padding:
            padded += c.num_tokens
    padded += it.plan.num_padding_tokens
    total += it.plan.num_padding_tokens
    it.tokens = TokenAccount(total, total - again - padded, again, padded)
    it.slots = _slots(state)
    state.journal.append(ev.Executed())


def note_rejected(it: Iteration, num_rejected: int) -> None:
    """Drafts that were computed and turned out wrong are no useful tokens."""
    t = it.tokens
    it.tokens = TokenAccount(t.total, t.useful - num_rejected, t.recomputed, t.padded, num_rejected)


def _slots(state: ControlState) -> SlotAccount:
    block_size, pool = state.block_size, state.pool
    partly = reserved = 0
    shared: dict[int, int] = {}
    for r in state.running:
        empty = len(r.block_ids) * block_size - r.num_computed_tokens
        if empty <= 0:  # a finished row that only holds its seat has no blocks any more
            continue
        tail = -r.num_computed_tokens % block_size
        reserved += empty - tail
        if state.has_groups and tail:
            b = r.block_ids[r.num_computed_tokens // block_size]
            if pool.ref_count[b] > 1:  # it counts once, as far as the one who has come furthest
                shared[b] = min(tail, shared.get(b, tail))
                continue
        partly += tail
    partly += sum(shared.values())
    total, cached = (pool.num_blocks - 1) * block_size, pool.num_cached_free * block_size
    free = pool.num_free * block_size - cached
    used = total - cached - free - partly - reserved
    head = state.waiting[0].last_wait if state.waiting else None
    if head is not None and head[0] == "fragments":
        return SlotAccount(total, used, partly, reserved, cached, fragmented=free)
    return SlotAccount(total, used, partly, reserved, cached, free)
