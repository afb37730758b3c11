"""Waiting requests get seats: every gate of the discipline must let the head through, so nobody is overtaken.

`GATES` holds the gates in the order in which they are asked. A gate looks at an `Admission` and returns None,
or a `Wait`: the reason that is written down is the gate that said no.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from cbviz import events as ev
from cbviz.core import estimate, queue
from cbviz.core.iteration import Iteration
from cbviz.core.kv.swap import swap_in
from cbviz.core.policy import admits
from cbviz.core.request import Request, Status, is_prefill
from cbviz.core.running import give, long_prefill_threshold
from cbviz.core.sequences import seats_to_come
from cbviz.core.state import ControlState
from cbviz.disciplines import Discipline


class Wait(NamedTuple):
    """Why a request is not admitted now."""

    reason: str
    need: int = 0
    """What the gate asks for (seats, tokens or blocks, as the reason says)."""
    have: int = 0
    """What there is of it."""


class Admission:
    """One request that is asked, and what its admission would take. `measure` fills in the second half."""

    __slots__ = (
        "cap",
        "hits",
        "it",
        "joins",
        "num_cached",
        "num_tokens",
        "padding",
        "r",
        "running_ran",
        "state",
        "wanted",
    )

    def __init__(
        self, state: ControlState, it: Iteration, r: Request, running_ran: bool, joins: bool
    ) -> None:
        self.state = state
        self.it = it
        self.r = r
        self.running_ran = running_ran
        """Running requests have tokens in this step."""
        self.joins = joins
        """Somebody was admitted in this step before it."""
        self.hits: list[int] = []
        """Blocks of its known tokens that the prefix cache holds."""
        self.num_cached = 0
        """Leading tokens that need not be computed."""
        self.num_tokens = 0
        """Tokens that this step computes for it."""
        self.wanted = 0
        """Tokens that it would compute without the limit `cap`."""
        self.cap = ""
        self.padding = False
        """Its drafts stand for nothing."""

    @property
    def end(self) -> int:
        """Slots that are filled after this step."""
        return self.num_cached + self.num_tokens + self.state.num_lookahead

    @property
    def most_tokens(self) -> int:
        """Slots that it may ever need."""
        return self.r.num_prompt_tokens + self.r.max_tokens + self.state.config.num_draft_slots

    def blocks(self, num_tokens: int, at_most: int | None = None) -> int:
        """Blocks that leave the free list if that many of its tokens get slots."""
        return self.state.kv.need_at_admission(self.hits, num_tokens, at_most)

    def lacks(self, reason: str, need: int) -> Wait | None:
        """Are `need` blocks free, and as many besides as the watermark keeps?"""
        state = self.state
        free = state.pool.num_free
        if need > free:
            return Wait(reason, need, free)
        if state.running:
            share = max(state.rules.admission_watermark, state.config.watermark)
            keep = int(share * state.pool.num_blocks)
            if need + keep > free:
                return Wait("watermark", need, max(0, free - keep))
        return None


# gates, as they are asked -----------------------------------------------------------------------------------


def nobody_preempted(a: Admission) -> Wait | None:
    """A step that took blocks away admits nobody."""
    return Wait("preempted", 0, a.it.num_preempted) if a.it.num_preempted else None


def batch_over(a: Admission) -> Wait | None:
    """Static batching: nobody joins a batch that runs."""
    state = a.state
    if not state.running or a.joins or state.batch_open:
        return None
    return Wait("batch", 0, sum(1 for x in state.running if not x.seat_held))


def budget_left(a: Admission) -> Wait | None:
    """At least one token of the step's budget is left."""
    return Wait("budget", 1, 0) if a.it.budget <= 0 else None


def seat_free(a: Admission) -> Wait | None:
    """A seat for it, and one for each sequence that it will fork."""
    state, more = a.state, a.r.num_forks
    taken = len(state.running) + (seats_to_come(state.running) if state.has_groups else 0)
    if taken + more < state.config.max_num_seqs:
        return None
    return Wait("seats", 1 + more, max(0, state.config.max_num_seqs - taken) if more else 0)


def policy_agrees(a: Admission) -> Wait | None:
    """The policy's own `admit`."""
    return None if admits(a.state.policy, a.r, a.it.now_s) else Wait("policy")


def measure(a: Admission) -> Wait | None:
    """How many tokens it would compute; the budget must hold all of them where prompts are not split."""
    state, it, r = a.state, a.it, a.r
    rules = state.rules
    a.hits = state.prefix_blocks(r)
    # What was swapped out comes back.
    a.num_cached = max(len(a.hits) * state.block_size, r.num_computed_tokens)
    n = r.num_tokens - a.num_cached
    threshold = long_prefill_threshold(state)
    a.padding = n == 1 and not r.num_forks and rules.pad_drafts and _pads_drafts(a, threshold)
    if a.padding:
        n = 1 + state.config.num_speculative_tokens
    a.wanted = n
    if a.padding and n > it.budget:
        return Wait("budget", n, it.budget)
    if 0 < threshold < n:
        n, a.cap = threshold, "threshold"
    if n > it.budget:
        if not rules.chunked:
            return Wait("budget", n, it.budget)
        n, a.cap = it.budget, "budget"
    a.num_tokens = n
    return None


def _pads_drafts(a: Admission, threshold: int) -> bool:
    """vLLM's rule: a request that joins with one token to compute while others decode is made as long as they
    are, so that the step fits a recorded graph.

    Not while a running request is in its prefill, not where max_model_len leaves no room; the first step of
    all needs a hit for it.
    """
    state, it = a.state, a.it
    n = 1 + state.config.num_speculative_tokens
    if state.proposer is None or it.prefill_ran or 0 < threshold < n:
        return False
    if not (a.running_ran or a.num_cached):
        return False
    never_fits = not state.running and n > (state.config.max_num_batched_tokens or 0)
    if never_fits and not state.keep_planned_hashes:
        return False  # vLLM 0.32 waits for a budget that never comes
    return a.num_cached + n + 1 <= state.max_model_len


def whole_prompt_fits(a: Admission) -> Wait | None:
    """All known tokens fit in the free blocks, though only a chunk is allocated (vLLM)."""
    return a.lacks("blocks", a.blocks(a.r.num_tokens, _most_at_once(a.state)))


def half_done_prefills_fit(a: Admission) -> Wait | None:
    """Where prefills go before decodes, another prefill joins them only if all of them fit.

    Otherwise they take each other's blocks for ever, and the decodes, which alone could give blocks back,
    never get a token. A lone prefill that runs out ends the prefill step, so decodes go on then.
    """
    state = a.state
    most = _most_at_once(state)
    owed = 0
    for x in state.running:
        if not x.seat_held and is_prefill(x):
            whole = state.kv.blocks_for(x.num_tokens + state.num_lookahead)
            if most is None:
                owed += max(0, whole - len(x.block_ids))
            else:
                owed += max(0, min(most, whole) - state.kv.num_held(x))
    return a.lacks("blocks", a.blocks(a.r.num_tokens, most) + owed) if owed else None


def _most_at_once(state: ControlState) -> int | None:
    """Blocks that a request with a sliding window holds at most; None: there is no window."""
    kv = state.kv
    if not kv.sliding_window:
        return None
    tokens = min(kv.sliding_window - 1 + (state.config.max_num_batched_tokens or 0), state.max_model_len)
    return -(-tokens // kv.block_size) + 1 + kv.sink_blocks


def chunk_fits(a: Admission) -> Wait | None:
    """The tokens of this step fit in the free blocks."""
    return a.lacks("blocks", a.blocks(a.end))


def reservation_fits(a: Admission) -> Wait | None:
    """Prompt and max_tokens fit at once, because that is what it takes."""
    return a.lacks("reserve", a.blocks(a.most_tokens))


def everybody_can_end(a: Admission) -> Wait | None:
    """Everybody's prompt and max_tokens still fit (TensorRT-LLM's GUARANTEED_NO_EVICT)."""
    state = a.state
    ahead = state.config.num_draft_slots
    growth = sum(
        max(0, state.kv.blocks_for(x.num_prompt_tokens + x.max_tokens + ahead) - len(x.block_ids))
        for x in state.running
        if not x.seat_held
    )
    return a.lacks("guarantee", a.blocks(a.most_tokens) + growth)


def run_of_blocks_free(a: Admission) -> Wait | None:
    """Contiguous reservation: one run of free blocks is long enough."""
    run = a.state.kv.lacks_run(a.r.num_prompt_tokens + a.r.max_tokens)
    return None if run is None else Wait("fragments", *run)


def estimate_fits(a: Admission) -> Wait | None:
    """What everybody is expected to use fits (SGLang's new-token ratio)."""
    state, r = a.state, a.r
    if not state.running:
        return None
    free, block_size = state.pool.num_free, state.block_size
    # The whole prompt, though only a chunk may be computed now; cached blocks that nobody holds; and one block
    # for what doesn't come out even.
    unheld_hits = a.blocks(0) + 1 - len(a.hits)
    tokens = (
        estimate.expected_tokens(state, a.it)
        + r.num_tokens
        + unheld_hits * block_size
        + estimate.open_tokens(r)
    )
    if tokens < free * block_size:
        return None
    return Wait("estimate", int(tokens // block_size) + 1, free)


class Gate(NamedTuple):
    """A row of `GATES`."""

    ask: Callable[[Admission], Wait | None]
    asked_by: Callable[[Discipline], bool] = lambda rules: True
    """Which disciplines ask it, besides those that name it in `Discipline.gates`."""


def only_named(rules: Discipline) -> bool:
    """For a gate that is asked by nobody but the disciplines that name it."""
    return False


GATES: dict[str, Gate] = {
    "preempted": Gate(nobody_preempted),
    "batch": Gate(batch_over, lambda rules: rules.admit_when == "batch-empty"),
    "budget": Gate(budget_left),
    "seats": Gate(seat_free),
    "policy": Gate(policy_agrees),
    "tokens": Gate(measure),
    "whole-prompt": Gate(whole_prompt_fits, lambda rules: rules.reserve_full_isl),
    "half-done": Gate(half_done_prefills_fit, lambda rules: rules.mix == "prefill-first"),
    "blocks": Gate(chunk_fits),
    "reserve": Gate(reservation_fits, lambda rules: rules.reserve == "max-tokens"),
    "guarantee": Gate(everybody_can_end, lambda rules: rules.reserve == "guaranteed"),
    "fragments": Gate(run_of_blocks_free),
    "estimate": Gate(estimate_fits, lambda rules: rules.reserve == "estimate"),
}


@functools.cache
def gates_of(rules: Discipline) -> tuple[Callable[[Admission], Wait | None], ...]:
    """The gates that a discipline asks, in order: those of its fields, and those that it names."""
    return tuple(gate.ask for name, gate in GATES.items() if gate.asked_by(rules) or name in rules.gates)


# admission --------------------------------------------------------------------------------------------------


def admit(state: ControlState, it: Iteration) -> None:
    """Seats waiting requests, head first, until one can't be seated. Raises PolicyError."""
    rules = state.rules
    joins = False
    if state.waiting:
        gates = gates_of(rules)
        running_ran = bool(it.plan.chunks)
        num_batch_class = queue.num_batch_class(state)
    while state.waiting:
        place = queue.place_to_ask(state, num_batch_class)
        if place < 0:
            break
        a = Admission(state, it, state.waiting[place], running_ran, joins)
        if (why := _refusal(a, gates)) is not None:
            queue.wait(state, a.r, *why)
            break
        _seat(a, place)
        joins = True
    if rules.admit_when == "batch-empty":
        head = state.waiting[0].last_wait if state.waiting else None
        state.batch_open = joins and head is not None and head[0] == "budget"
    if rules.pad and joins:
        # A row that was admitted before may be longer than those that join it.
        longest = max(c.num_tokens for c in it.plan.chunks)
        it.plan.num_padding_tokens = sum(longest - c.num_tokens for c in it.plan.chunks)


def _refusal(a: Admission, gates: tuple[Callable[[Admission], Wait | None], ...]) -> Wait | None:
    for gate in gates:
        if (why := gate(a)) is not None:
            return why
    return None


def _seat(a: Admission, place: int) -> None:
    """All gates are open: the request takes its seat, its blocks and its tokens."""
    state, it, r, kv = a.state, a.it, a.r, a.state.kv
    resumed = r.status is Status.PREEMPTED
    miss = None if r.host_block_ids else kv.explain_miss(r, len(a.hits))
    state.seat(r, place, a.num_cached)
    if a.hits and not (r.host_block_ids and kv.sliding_window):
        state.journal.append(ev.PrefixHit(r.request_id, len(a.hits) * kv.block_size, a.hits))
    if miss is not None:
        state.journal.append(miss)
    waited = state.step - r.queued_step
    state.journal.append(ev.Admitted(r.request_id, resumed, a.num_cached, waited, len(state.running) - 1))
    if a.hits:
        kv.share(r, a.hits)
    if r.host_block_ids:
        swap_in(r, kv, state.host, it.plan)
    reserve = a.most_tokens if state.rules.reserve == "max-tokens" else 0
    failed = kv.allocate(r, a.num_tokens, reserve, state.num_lookahead)
    assert failed is None, f"admission of {r.request_id} was checked, but {failed}"
    if not r.num_preemptions and queue.may_overtake(state.ranked_by, place):
        queue.note_overtaken(state, r)
    else:
        state.overtaken.leave(r)
    give(state, it, r, a.num_tokens, a.wanted, a.cap, a.padding)
