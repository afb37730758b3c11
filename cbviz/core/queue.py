"""The waiting queue: in which order requests are asked, and who is asked next."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import partial
from operator import itemgetter
from typing import Any

from cbviz import events as ev
from cbviz.core import beam
from cbviz.core.policies import Fcfs
from cbviz.core.policy import rank_of, ranks_of
from cbviz.core.ranking import Policy, PolicyError
from cbviz.core.request import Request, Status
from cbviz.core.session_ranks import SessionRank, members_of, plain_rank, same_order, session_of
from cbviz.core.state import ControlState
from cbviz.messages import RequestSpec


def key(state: ControlState, r: Request) -> tuple[Any, ...]:
    """Among equal ranks the first to arrive goes first, then the first sequence of a request: no two are
    equal, so the order is the same however they came here.

    A retracted request has joined the queue anew, behind those that arrived in that step.
    """
    if state.rules.when_full == "retract":
        return plain_rank(r.rank), r.queued_step, r.status is Status.PREEMPTED, r.seq, r.index
    return plain_rank(r.rank), r.seq, r.index


def join(state: ControlState, r: Request, now_s: float) -> int:
    """Ranks the request and puts it where its rank says. Returns its place. Raises PolicyError."""
    r.rank = rank_of(state.policy, _ranked_as(state, r), now_s)
    if state.policy.ranks_sessions:
        shared = state.session_ranks.setdefault(session_of(r), SessionRank(r, r.rank))
        if shared.value == r.rank:
            r.rank = shared
        else:  # added between two steps: the next one ranks everybody anew
            state.ranked_by = None
    waiting = state.waiting
    key_of = partial(key, state)
    try:
        mine = key_of(r)
        last = not waiting or not mine < key_of(waiting[-1])
        place = len(waiting) if last else bisect_right(waiting, mine, key=key_of)
    except TypeError as e:
        raise PolicyError(
            f"policy {state.policy.name}: the rank {plain_rank(r.rank)!r} of request {r.request_id} doesn't "
            f"compare with the others' ({e})"
        ) from None
    state.enqueue(r, place)
    return place


def place_of(state: ControlState, r: Request) -> int:
    """Place of a waiting request in the queue: by its rank, else by looking through it."""
    waiting = state.waiting
    key_of = partial(key, state)
    try:
        place = bisect_left(waiting, key_of(r), key=key_of)
    except Exception:  # ranks of two policies, before the queue is ranked again
        place = len(waiting)
    return place if place < len(waiting) and waiting[place] is r else waiting.index(r)


def sort(state: ControlState, now_s: float) -> None:
    """Ranks the queue again where the ranks may have changed, and says so if the order did.

    Raises PolicyError.
    """
    p, waiting = state.policy, state.waiting
    state.ranked_now = True
    if not waiting or (p.static and state.ranked_by is p):
        state.session_ranks = {}
        state.ranked_by = p
        return
    if p.ranks_sessions:
        if _rank_sessions(state, p, now_s):
            return
    else:
        ranked_as = [_ranked_as(state, r) for r in waiting] if state.has_groups else waiting
        for r, rank in zip(waiting, ranks_of(p, ranked_as, now_s), strict=True):
            if rank != r.rank:
                state.change(r, "rank", rank)
    try:
        order = sorted(waiting, key=partial(key, state))
    except TypeError as e:
        raise PolicyError(f"policy {p.name}: its ranks don't compare with each other ({e})") from None
    if order != waiting:
        state.reorder(order)
        state.journal.append(ev.Reordered([r.request_id for r in order]))
    state.ranked_by = p


def _rank_sessions(state: ControlState, p: Policy, now_s: float) -> bool:
    """Ranks the sessions that wait. True if the order of the queue stays as it is."""
    known = state.session_ranks
    if state.ranked_by is p and known:
        before = [x.value for x in known.values()]
        after = [rank_of(p, x.member, now_s) for x in known.values()]
        for x, rank in zip(known.values(), after, strict=True):
            _set_value(state, x, rank)
        if same_order(before, after):
            return True
    ranks = {}
    for name, member in members_of(state.waiting).items():
        x = known.get(name) or SessionRank(member, None)
        _set_value(state, x, rank_of(p, member, now_s))
        ranks[name] = x
    state.session_ranks = ranks
    for r in state.waiting:
        if r.rank is not (shared := ranks[session_of(r)]):
            state.change(r, "rank", shared)
    return False


def _set_value(state: ControlState, x: SessionRank, rank: Any) -> None:
    state.undo.append((setattr, (x, "value", x.value)))
    x.value = rank


def rank_as_restored(state: ControlState) -> None:
    """A restored queue stands in its order; a policy whose ranks never change says them again."""
    if state.policy.static:
        for r in state.waiting:
            r.rank = rank_of(state.policy, _ranked_as(state, r), 0.0)
        state.ranked_by = state.policy


def _ranked_as(state: ControlState, r: Request) -> Request:
    """Beams share the rank of sequence 0 and stay adjacent, so a search at the head never waits behind
    another request.
    """
    return beam.root_of(state, r) if r.is_beam else r


def why_full(state: ControlState, spec: RequestSpec) -> str:
    """Why the queue takes no further request; '' if it does."""
    c, waiting = state.config, state.waiting
    if c.max_waiting_requests and len(waiting) >= c.max_waiting_requests:
        return (
            f"the queue is full: {len(waiting)} requests wait, max_waiting_requests is "
            f"{c.max_waiting_requests}"
        )
    if c.max_waiting_tokens:
        if state.tokens_waiting is None:
            state.tokens_waiting = sum(r.num_tokens for r in waiting)
        tokens, more = state.tokens_waiting, len(spec.prompt_token_ids)
        if tokens + more > c.max_waiting_tokens:
            return (
                f"the queue is full: {tokens} tokens wait, with these {more} they pass max_waiting_tokens, "
                f"{c.max_waiting_tokens}"
            )
    return ""


def wait(state: ControlState, r: Request, reason: str, need: int, have: int) -> None:
    """Says why a request is not admitted, when that has changed."""
    why = (reason, need, have)
    if r.last_wait != why:
        state.change(r, "last_wait", why)
        state.journal.append(ev.NotAdmitted(r.request_id, reason, need, have))


def place_to_ask(state: ControlState, num_batch_class: int) -> int:
    """Place of the request to ask next: the head, unless the degradation rule demotes it. -1 if all are
    demoted and must wait.

    Over `degrade_above` of the pool in use, batch-class requests (priority > 0) form static batches: they
    start only when none of their class ran before this step's admissions (`num_batch_class`), and others pass
    them meanwhile.
    """
    pool = state.pool
    in_use = 1 - pool.num_free / (pool.num_blocks - 1)
    if not num_batch_class or in_use <= state.config.degrade_above:
        return 0
    for i, r in enumerate(state.waiting):
        if r.priority <= 0:
            return i
        if i == 0:
            wait(state, r, "degraded", 0, num_batch_class)
    return -1


def num_batch_class(state: ControlState) -> int:
    """Running requests of the batch class, if `degrade_above` demotes that class.

    A beam that waits for its siblings doesn't count: it would keep them from coming back.
    """
    if not state.config.degrade_above:
        return 0
    return sum(1 for r in state.running if r.priority > 0 and not r.seat_held and r.candidates is None)


def may_overtake(policy: object, place: int) -> bool:
    """Can an admission from `place` of the queue have passed somebody over?"""
    return place > 0 or not isinstance(policy, Fcfs)


def note_overtaken(state: ControlState, r: Request) -> None:
    """Counts whom `r`, just seated, passed over; says so when a count reaches 8, 16, 32, ...: that is how
    starvation looks.
    """
    reached = [(place_of(state, w), w, n) for w, n in state.overtaken.admit(r, state.waiting)]
    for place, w, n in sorted(reached, key=itemgetter(0)):
        need = state.kv.need_at_admission(state.prefix_blocks(w), w.num_tokens)
        waited = state.step - w.queued_step
        state.journal.append(ev.Starving(w.request_id, n, waited, need, state.pool.num_free, place))
