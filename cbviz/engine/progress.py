"""Whether a run still gets anywhere: the count of steps in which no request got further than ever before, and
why a run is stuck.

A request gets further when a position of its tokens is computed for the first time. Computing positions again
after a preemption is no progress, nor is padding, nor drafts alone. Everything follows from the records, so a
rewound, replayed or forked run counts as the first one did.
"""

from __future__ import annotations

from cbviz import events as ev
from cbviz.core.request import Request, Status
from cbviz.core.state import ControlState
from cbviz.messages import StepRecord

PATIENCE_STEPS = 64
"""Number of empty steps after which a run counts as stuck: a policy may count steps before it admits."""
ROUNDS = 4
"""Rounds of computing everything again before a run counts as stuck.

Of 20,000 random runs over tight pools, none that ended went beyond the second.
"""


def got_further(record: StepRecord) -> bool:
    """Return whether a request got further than ever before in this step, or something changed from outside,
    or a request ended.
    """
    if record.arrivals or record.inputs:
        return True
    if any(not c.padding and c.num_recomputed + c.num_draft < c.num_tokens for c in record.chunks):
        return True
    return any(isinstance(e, ev.Finished) for e in record.events)


def patience(s: ControlState) -> int:
    """Number of steps without progress after which the run counts as stuck.

    PATIENCE_STEPS, and ROUNDS times the steps in which all requests that have ever run could be computed
    again, one after the other.

    Why no honest run needs more. In a step without progress only lost tokens are computed again. Every victim
    rule is a total order, so one running request loses its blocks to nobody. It gets a chunk (the budget, or
    `long_prefill_token_threshold` where that is less) in each step, or requests before it get theirs. It is
    back where it was after its tokens / chunk steps. If another request takes its place on the way, that one
    does so once before somebody gets further. So one round over all of them is enough; steps that a
    preemption ends early come on top. The number stays the same for as long as nobody gets further, because
    no request grows, arrives or ends.
    """
    budget = max(1, s.config.max_num_batched_tokens or 1)
    chunk = min(budget, s.config.long_prefill_token_threshold or budget)
    again = sum(1 + -(-r.num_tokens // chunk) for r in _who(s))
    return PATIENCE_STEPS + ROUNDS * again


def why_stuck(s: ControlState, num_steps: int, num_computing: int) -> str:
    """Say who got nowhere in the last `num_steps` steps, why, and what to do.

    `num_computing`: number of these steps in which tokens were computed.
    """
    who = sorted(_who(s), key=lambda r: -r.num_preemptions)
    names, many = _listed([r.request_id for r in who]), len(who) > 1
    said = (
        f"No request got further than before in the last {num_steps} steps, since step {s.step - num_steps}: "
    )
    lost = [r for r in who if r.num_preemptions]
    if lost and num_computing:
        times = _listed([str(r.num_preemptions) for r in lost])
        why = (
            f"{names} {'compute' if many else 'computes'} the same tokens again and again. "
            f"{_listed([r.request_id for r in lost])} lost {'their' if len(lost) > 1 else 'its'} blocks "
            f"{times} times."
        )
        return (
            f"{said}{why} Choose another victim rule or policy, lower max_num_seqs, fork with more "
            f"num_blocks, or abort {lost[0].request_id}"
        )
    running = [r for r in who if r.status is Status.RUNNING]
    waiting = [r for r in who if r.status is not Status.RUNNING]
    parts = []
    if running:
        names = _listed([r.request_id for r in running])
        gets = "run and get no tokens" if len(running) > 1 else "runs and gets no tokens"
        parts.append(f"{names} {gets}")
    if waiting:
        names = _listed([r.request_id for r in waiting])
        back = (
            "lost their blocks and are not let in again"
            if len(waiting) > 1
            else "lost its blocks and is not let in again"
        )
        parts.append(f"{names} {back}")
    why = " and ".join(parts) or "nobody runs"
    return (
        f"{said}{why}. No token was computed in these steps. The budget is "
        f"{s.config.max_num_batched_tokens} tokens a step (max_num_batched_tokens): raise it, choose another "
        f"discipline or policy, or abort {who[0].request_id if who else 'what waits'}"
    )


def why_never_admitted(s: ControlState) -> str:
    """Why the head of the queue waits for ever, if nothing runs and nothing is to arrive; '' if that may
    change.
    """
    r = next(iter(s.waiting), None)
    if r is None or any(not x.seat_held for x in s.running):
        return ""  # for a thread that only looks: a step may have begun in this moment
    reason, need, have = r.last_wait or ("", 0, 0)
    waited = s.step - r.queued_step
    if reason == "policy" and waited < PATIENCE_STEPS:
        return ""  # it may count steps, as ageing does
    blocks = s.kv.need_at_admission(s.prefix_blocks(r), r.num_tokens)
    why = (
        f"policy {s.policy.name} has refused it for {waited} steps; choose another policy"
        if reason == "policy"
        else f"{reason or 'nothing is planned'}, it needs {need}, {have} are there; change what it lacks"
    )
    behind = f"; {len(s.waiting) - 1} more wait" if len(s.waiting) > 1 else ""
    return (
        f"{r.request_id} can never be admitted: {why}, or abort {r.request_id}. Nothing runs and "
        "nothing is to arrive, so nothing will change. "
        f"It would take a seat of {s.config.max_num_seqs} and {blocks} blocks; {s.pool.num_free} of "
        f"{s.config.num_usable_blocks} are free{behind}"
    )


def _who(s: ControlState) -> list[Request]:
    """The unfinished requests that have run."""
    return [
        r
        for r in s.requests.values()
        if not r.seat_held and (r.status is Status.RUNNING or r.num_preemptions)
    ]


def _listed(items: list[str]) -> str:
    """The first three, in words."""
    if len(items) > 3:
        return f"{', '.join(items[:3])} and {len(items) - 3} more"
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)
