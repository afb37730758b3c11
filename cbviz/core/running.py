"""Running requests get their tokens for the step."""

from __future__ import annotations

from cbviz import events as ev
from cbviz.core import beam
from cbviz.core.iteration import Iteration
from cbviz.core.preemption import preempt, victim_of
from cbviz.core.request import Request
from cbviz.core.state import ControlState
from cbviz.messages import Chunk, ChunkRecord, sequence_ids

NO_DRAFT = -1
"""Stands in a plan for a draft that is none: computed, and never right."""


def long_prefill_threshold(state: ControlState) -> int:
    """`long_prefill_token_threshold`; 0, no limit, for a request that has the engine to itself."""
    alone = len(state.running) + len(state.waiting) == 1
    return 0 if alone else state.config.long_prefill_token_threshold


def run(state: ControlState, it: Iteration, order: list[Request]) -> None:
    """Gives running requests their tokens, in the given order, preempting when blocks run out.

    `order` is `state.running` or a list of its own; whoever is preempted leaves it.
    """
    journal, kv, block_size = state.journal, state.kv, state.block_size
    limit = state.max_model_len - 1
    threshold = long_prefill_threshold(state)
    windowed, caching = kv.sliding_window > 0, state.pool.enable_caching
    ahead, drafting = state.num_lookahead, state.proposer is not None
    i = 0
    while i < len(order) and it.budget > 0:
        r = order[i]
        if r.seat_held:
            i += 1
            continue
        if r.candidates is not None:
            journal.append(ev.Skipped(r.request_id, "beams"))
            i += 1
            continue
        start = r.num_computed_tokens
        n = len(r.token_ids) - start
        if drafting:
            n += len(r.draft_token_ids)
        wanted = n
        cap = ""
        if 0 < threshold < n:
            n, cap = threshold, "threshold"
        if n > it.budget:
            n, cap = it.budget, "budget"
        if n > limit - start:
            n, cap = limit - start, "max_model_len"
        if n <= 0:
            journal.append(ev.Skipped(r.request_id, "max_model_len"))
            i += 1
            continue
        end = start + n
        if (
            windowed
            or r.shares_tail
            or end + ahead > len(r.block_ids) * block_size
            or (caching and end // block_size > r.num_cached_blocks)
        ):
            i = _find_blocks(state, it, order, i, n)
            if i < 0:
                return
        if r.is_prefill_chunk:
            it.prefill_ran = True
        give(state, it, r, n, wanted, cap)
        i += 1
    journal.extend(ev.Skipped(r.request_id, "budget") for r in order[i:] if not r.seat_held)


def _find_blocks(state: ControlState, it: Iteration, order: list[Request], i: int, n: int) -> int:
    """Blocks for `n` tokens of `order[i]`; victims lose theirs until they are there.

    Returns the request's place in the order then, -1 if it was the victim itself: the step ends there.
    """
    r = order[i]
    while (short := state.kv.allocate(r, n, num_lookahead=state.num_lookahead)) is not None:
        victim = victim_of(state, it.now_s)
        place = order.index(victim) if victim in order else len(order)
        preempt(state, it, victim, r, short)
        if order is not state.running:
            del order[place : place + 1]
        if place < i:
            i -= 1
        if victim is r:
            rest = [x for x in order[i:] if not x.seat_held]
            state.journal.extend(ev.Skipped(x.request_id, "blocks") for x in rest)
            return -1
    return i


def give(
    state: ControlState,
    it: Iteration,
    r: Request,
    n: int,
    wanted: int,
    cap: str,
    padding: bool = False,
) -> None:
    """Puts `n` tokens of the request into the plan: known ones, then as many of its drafts as fit.

    `wanted`: tokens that it would have taken without the limit `cap`. `padding`: drafts that stand for nothing.
    """
    start = r.num_computed_tokens
    known = len(r.token_ids)
    sample = start + n >= known
    num_draft, drafts = start + n - known if sample else 0, r.draft_token_ids
    if drafts:
        state.change(r, "draft_token_ids", [])  # those cut off are forgotten too
    chunk = Chunk(r.request_id, start, n, r.token_ids, r.block_ids, sample, r.sampling)
    if num_draft:
        chunk.num_draft = num_draft
        chunk.draft_token_ids = [NO_DRAFT] * num_draft if padding else drafts[:num_draft]
    if r.is_beam:
        chunk.num_candidates = beam.num_candidates(r.sampling, r.stop_ids) if sample else 0
    elif r.num_forks and sample:
        chunk.fork_ids = sequence_ids(r.spec)[1:]
    again = min(start + n, r.max_computed) - start if start < r.max_computed else 0
    decode = start == known - 1 and known > r.num_prompt_tokens
    kind = "decode" if decode else "prefill"
    it.plan.chunks.append(chunk)
    it.shares.append(r)
    it.records.append(ChunkRecord(r.request_id, start, n, kind, num_draft, sample, again))
    it.budget -= n
    state.journal.append(ev.Scheduled(r.request_id, start, n, num_draft, wanted, cap, False, padding))


def pad(state: ControlState, it: Iteration) -> None:
    """static-padded: finished rows run along in their seats, with what the live rows have left of the budget:
    padding never keeps anybody from a token.
    """
    row = 0
    for r in state.running:
        if r.seat_held and it.budget > 0:
            _pad_row(state, it, r, row)
        row += row < len(it.shares) and it.shares[row] is r


def _pad_row(state: ControlState, it: Iteration, r: Request, place: int) -> None:
    """Computes the row's last position again, into its own slot; the output is thrown away."""
    start = max(0, r.num_computed_tokens - 1)
    chunk = Chunk(r.request_id, start, 1, r.token_ids, r.block_ids, False, r.sampling)
    it.put_at(place, r, chunk, ChunkRecord(r.request_id, start, 1, "decode", padding=True))
    state.journal.append(ev.Scheduled(r.request_id, start, 1, wanted=1, padding=True))
