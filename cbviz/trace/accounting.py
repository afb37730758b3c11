"""Everything is accounted for: the sums of tokens and slots, and the checks that they close.

Knows the trace alone.

    tokens of a step:  total = useful + recomputed + padded + rejected
    slots of the pool: total = used + partly_empty + reserved + cached + free + fragmented     (the null block is left out)

The producer counts as it goes; `check_trace` folds the events again and counts the slots from the state,
block by block.
"""

from __future__ import annotations

from typing import Any

from cbviz import events as ev
from cbviz.messages import SlotAccount, StepRecord, TokenAccount
from cbviz.trace.state import NULL_BLOCK, State
from cbviz.trace.trace import Cursor, Trace

TOKEN_PARTS = ("useful", "recomputed", "padded", "rejected")
SLOT_PARTS = ("used", "partly_empty", "reserved", "cached", "free", "fragmented")
TIME_PARTS = ("prefill", "decode", "mixed", "nothing", "idle")


def check_record(record: StepRecord) -> None:
    """Raises AssertionError with the figures if a step's tokens or slots do not add up, or tokens differ from
    what its chunks computed.
    """
    _check_sum(record, "tokens", record.tokens, TOKEN_PARTS)
    _check_sum(record, "slots", record.slots, SLOT_PARTS)
    computed = sum(c.num_tokens for c in record.chunks) + record.num_padding_tokens
    assert record.tokens.total == computed, (
        f"step {record.step}: {record.tokens.total} tokens are accounted for, but its chunks and padding "
        f"computed {computed}"
    )
    recomputed = sum(c.num_recomputed for c in record.chunks if not c.padding)
    assert record.tokens.recomputed == recomputed, (
        f"step {record.step}: {record.tokens.recomputed} recomputed tokens are accounted for, its chunks "
        f"say {recomputed}"
    )
    rejected = sum(e.num_rejected for e in record.events if isinstance(e, ev.Sampled))
    assert record.tokens.rejected == rejected, (
        f"step {record.step}: {record.tokens.rejected} rejected tokens are accounted for, its samples say "
        f"{rejected}"
    )
    padded = sum(c.num_tokens for c in record.chunks if c.padding) + record.num_padding_tokens
    assert record.tokens.padded == padded, (
        f"step {record.step}: {record.tokens.padded} padded tokens are accounted for, its chunks and "
        f"padding say {padded}"
    )


def _check_sum(
    record: StepRecord, what: str, account: TokenAccount | SlotAccount, parts: tuple[str, ...]
) -> None:
    values = {p: getattr(account, p) for p in parts}
    text = " + ".join(f"{p} {v}" for p, v in values.items())
    assert account.total == sum(values.values()), (
        f"step {record.step}: {what} do not add up: total {account.total}, but {text} = "
        f"{sum(values.values())}"
    )
    assert min(values.values()) >= 0, f"step {record.step}: a part of the {what} is negative: {text}"


def count_slots(state: State) -> SlotAccount:
    """The slots of the pool, counted block by block from a folded state: O(num_blocks)."""
    size = state.block_size
    used = partly = reserved = cached = free = 0
    for block in range(state.num_blocks):
        if block == NULL_BLOCK:
            continue
        if state.ref_count(block):
            filled = state.fill(block)
            if filled:
                used += filled
                partly += size - filled
            else:
                reserved += size
        elif state.is_cached(block):
            cached += size
        else:
            free += size
    if state.fragmented:
        return SlotAccount(
            total=(state.num_blocks - 1) * size,
            used=used,
            partly_empty=partly,
            reserved=reserved,
            cached=cached,
            fragmented=free,
        )
    return SlotAccount(
        total=(state.num_blocks - 1) * size if state.num_blocks else 0,
        used=used,
        partly_empty=partly,
        reserved=reserved,
        cached=cached,
        free=free,
    )


def executed_at(record: StepRecord) -> int:
    """How many events stand before the forward pass (all of them, if nothing was executed)."""
    return next((i for i, e in enumerate(record.events) if isinstance(e, ev.Executed)), len(record.events))


def check_trace(trace: Trace) -> None:
    """Raises AssertionError at the first step whose sums do not close, or whose slots differ from a recount,
    or whose gauges differ from the folded state.

    Folds the whole trace once and counts every block at every step: for tests, not for a live picture.
    """
    state = State(trace.header.num_blocks, trace.header.block_size, trace.header.config)
    blocks = trace.has("blocks") and trace.header.num_blocks > 0
    for record in trace:
        if trace.has("accounting"):
            check_record(record)
            if blocks:
                inside = state.clone()
                inside.apply(record, upto=executed_at(record))
                counted = count_slots(inside)
                assert record.slots == counted, (
                    f"step {record.step}: the record says {record.slots}, a recount at the forward pass "
                    f"{counted}"
                )
        state.apply(record)
        g = record.gauges
        if trace.has("queue"):
            running = sum(1 for rid in state.running if not state.requests[rid].seat_held)
            assert (g.num_running, g.num_waiting) == (running, len(state.waiting)), (
                f"step {record.step}: gauges say {g.num_running} running and {g.num_waiting} waiting, the "
                f"fold has {running} and {len(state.waiting)}"
            )
        if blocks:
            cached = sum(
                1 for b in range(1, state.num_blocks) if state.is_cached(b) and not state.ref_count(b)
            )
            assert (g.num_free_blocks, g.num_cached_blocks) == (state.num_free_blocks, cached), (
                f"step {record.step}: gauges say {g.num_free_blocks} free blocks, {g.num_cached_blocks} of "
                f"them cached; the fold has {state.num_free_blocks} and {cached}"
            )
        if blocks and g.num_saved_blocks:
            saved = sum(len(h) - 1 for h in state.holders.values())
            assert g.num_saved_blocks == saved, (
                f"step {record.step}: gauges say that sharing saves {g.num_saved_blocks} blocks, the fold "
                f"counts {saved}"
            )
        if trace.has("queue"):
            assert g.num_host_blocks == state.num_host_blocks, (
                f"step {record.step}: gauges say {g.num_host_blocks} blocks on the host, the fold has "
                f"{state.num_host_blocks}"
            )
            away = [h for rid in state.waiting for h in state.requests[rid].host_block_ids]
            assert len(set(away)) == len(away), f"step {record.step}: a host block is held twice: {away}"
    sums = summary(trace)
    assert sums["tokens"]["total"] == sum(sums["tokens"][p] for p in TOKEN_PARTS), (
        f"the run's tokens do not add up: {sums['tokens']}"
    )
    if trace.has("tokens"):
        sampled = sum(
            len(e.token_ids) for record in trace for e in record.events if isinstance(e, ev.Sampled)
        )
        held = sum(
            len(r.output_token_ids) for r in trace.state().by_index if r.beam_score is None
        )  # beams share what was sampled, and drop most of it
        assert sampled == held, f"the run sampled {sampled} tokens, its requests hold {held}"


def summary(trace: Trace, cursor: Cursor | int | None = None) -> dict[str, Any]:
    """The accounts of a run up to `cursor`: where its tokens, its memory and its time went.

    `tokens`: sums over steps, and `token_shares` of all computed. `slots`: of the last step; `slot_steps`:
    sums over steps (slots times steps), and `slot_shares` of the pool. `time_s`: seconds of steps that only
    prefilled, only decoded, did both, or computed nothing, and `idle` between steps; None without times.
    """
    state = trace.state(cursor)
    records = trace.records[: state.step if state.event is None else state.step - 1]
    tokens = dict.fromkeys(("total", *TOKEN_PARTS), 0)
    slot_steps = dict.fromkeys(("total", *SLOT_PARTS), 0)
    time_s = dict.fromkeys(("total", *TIME_PARTS), 0.0)
    end_s = records[0].t0_s if records else 0.0
    for record in records:
        for p in tokens:
            tokens[p] += getattr(record.tokens, p)
        for p in slot_steps:
            slot_steps[p] += getattr(record.slots, p)
        time_s[_time_part(record)] += record.t1_s - record.t0_s
        time_s["idle"] += record.t0_s - end_s
        end_s = record.t1_s
    time_s["total"] = sum(time_s[p] for p in TIME_PARTS)
    last = records[-1].slots if records else SlotAccount()
    return {
        "num_steps": len(records),
        "tokens": tokens,
        "token_shares": _shares(tokens, TOKEN_PARTS),
        "slots": {p: getattr(last, p) for p in slot_steps},
        "slot_steps": slot_steps,
        "slot_shares": _shares(slot_steps, SLOT_PARTS),
        "time_s": time_s if trace.has("time") else None,
        "time_shares": _shares(time_s, TIME_PARTS) if trace.has("time") else None,
    }


def _time_part(record: StepRecord) -> str:
    kinds = {c.kind for c in record.chunks}
    return "nothing" if not kinds else "mixed" if len(kinds) > 1 else kinds.pop()


def _shares(sums: dict[str, Any], parts: tuple[str, ...]) -> dict[str, float] | None:
    """Each part of the total, None if the total is 0."""
    return {p: sums[p] / sums["total"] for p in parts} if sums["total"] else None
