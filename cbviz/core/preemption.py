"""Who loses its blocks when the pool is full, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cbviz import events as ev
from cbviz.core import queue
from cbviz.core.iteration import Iteration
from cbviz.core.kv.swap import swap_out
from cbviz.core.policy import rank_of
from cbviz.core.ranking import PolicyError
from cbviz.core.request import Request, is_prefill
from cbviz.core.state import ControlState


class VictimRule(NamedTuple):
    """A row of `VICTIM_RULES`: what a running request is ranked by, and which end of that order loses first."""

    rank: Callable[[ControlState, Request, float], Any]
    """(state, request, now in seconds) -> anything that compares with the others'."""
    highest_first: bool = False


def _policy_rank(state: ControlState, r: Request, now_s: float) -> Any:
    return rank_of(state.policy, r, now_s), r.seq


VICTIM_RULES: dict[str, VictimRule] = {
    "rank": VictimRule(_policy_rank, highest_first=True),
    "lowest-priority": VictimRule(lambda state, r, now_s: (r.priority, r.seq), highest_first=True),
    "least-work-lost": VictimRule(lambda state, r, now_s: (r.num_computed_tokens, -r.seq)),
    "fewest-outputs": VictimRule(lambda state, r, now_s: (r.num_output_tokens, -r.num_prompt_tokens, -r.seq)),
}
"""The rules besides `last`, which asks for nothing but the running order."""


def victim_rule(state: ControlState) -> str:
    """The name of the rule in force."""
    rule = state.rules.victim
    return state.policy.victim if rule == "policy" else rule


def candidates(state: ControlState, now_s: float) -> list[tuple[Any, Request]]:
    """Who could lose its blocks, first to lose first, with what they were ranked by. Raises PolicyError.

    The order is total. Sequences of one request tie in all that a rule looks at: then the last in the running
    order loses first, as under `last`. If the first lost instead, it would come back behind its sibling and
    take the blocks from that one, and so on for ever.
    """
    name = victim_rule(state)
    last_first = [r for r in reversed(state.running) if not r.seat_held]
    if name == "last":
        return [(len(last_first) - 1 - i, r) for i, r in enumerate(last_first)]
    rule = VICTIM_RULES[name]
    ranked = [(rule.rank(state, r, now_s), r) for r in last_first]
    try:
        return sorted(ranked, key=_rank, reverse=rule.highest_first)
    except TypeError as e:
        raise PolicyError(
            f"policy {state.policy.name}: its ranks of running requests don't compare with each other ({e})"
        ) from None


def _rank(ranked: tuple[Any, Request]) -> Any:
    return ranked[0]


def victim_of(state: ControlState, now_s: float) -> Request:
    """Who loses its blocks next."""
    return candidates(state, now_s)[0][1]


def preempt(
    state: ControlState,
    it: Iteration,
    victim: Request,
    for_r: Request,
    short: tuple[int, int],
    rule: str = "",
) -> None:
    """The victim gives its blocks, wanted by `for_r`, and goes back to the queue.

    `short`: (blocks needed, blocks free). `rule`: why it is the victim where no rule chose it. Raises
    PolicyError.
    """
    ranking = []
    if not rule:
        ranking = [(r.request_id, _rank_text(rank)) for rank, r in candidates(state, it.now_s)]
    it.num_preempted += 1
    it.plan.preempted_ids.append(victim.request_id)
    if it.take_back(victim):
        if not state.keep_planned_hashes:
            state.kv.uncache_planned(victim)
        state.journal.append(ev.Unscheduled(victim.request_id))
    lost = victim.num_computed_tokens
    swapped, too_many = None, 0
    if state.config.preemption_mode == "swap":
        swapped, too_many = swap_out(victim, state.kv, state.host, it.plan)
    if state.kv.copies:
        gone = set(victim.block_ids)
        state.kv.copies = [x for x in state.kv.copies if x[1] not in gone]
    ids = state.preempt(victim)
    if swapped is not None:
        state.keep_on_host(victim, swapped.host_block_ids, lost, swapped.first_index)
        lost = 0
    place = queue.join(state, victim, it.now_s)
    state.journal.append(
        ev.Preempted(
            victim.request_id,
            for_r.request_id,
            rule or victim_rule(state),
            lost,
            ids,
            ranking,
            place,
            short[0],
            short[1],
            too_many,
            len(state.host.free) if too_many else 0,
        )
    )
    if swapped is not None:
        state.journal.append(swapped)


def retract(state: ControlState, it: Iteration) -> None:
    """Before a decode step: victims lose their blocks until all others can take one token each.

    One always stays (SGLang's retraction). Raises PolicyError.
    """
    kv = state.kv
    while True:
        rows = [r for r in state.running if not r.seat_held and not is_prefill(r)]
        missing = []
        for r in rows:
            tokens = r.num_computed_tokens + 1 + len(r.draft_token_ids) + state.num_lookahead
            missing.append((r, kv.blocks_for(tokens) - len(r.block_ids)))
        short_of = [r for r, n in missing if n > 0]
        need = sum(n for _, n in missing if n > 0)
        # What a sliding window is about to give back is not counted: at worst one more is retracted than had
        # to be.
        if need <= state.pool.num_free or len(rows) < 2:
            return
        victim = next(r for _, r in candidates(state, it.now_s) if r in rows)
        for_r = next((r for r in short_of if r is not victim), victim)
        preempt(state, it, victim, for_r, (need, state.pool.num_free))


def _rank_text(rank: Any) -> str:
    if isinstance(rank, tuple):
        return ", ".join(f"{x:g}" if isinstance(x, float) else str(x) for x in rank)
    return str(rank)
