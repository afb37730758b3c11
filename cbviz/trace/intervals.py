"""Where each request's steps went: waiting and for what, running, computing again, left out.

Knows the trace alone.

During a step a request waits (for the reason that the head of the queue was given: nobody overtakes it),
computes (prefill, decode, recompute), or holds a seat and is skipped. Counted in steps, which every trace
has, and in seconds of its steps, where it has times. Sums close: every step from a request's arrival to its
end is counted once. A sequence that was forked from a request counts from its fork on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cbviz import events as ev
from cbviz.trace.state import State
from cbviz.trace.trace import Cursor, Trace

NOT_RECORDED = "not recorded"


@dataclass
class Spent:
    """Steps and seconds of one request by what it did.

    `waiting`: before its first seat, by reason; `preempted`: after it had lost its blocks, by reason;
    `skipped`: with a seat but no token, by reason; `ran`: prefill, decode, recompute.
    """

    waiting: dict[str, tuple[int, float]] = field(default_factory=dict)
    preempted: dict[str, tuple[int, float]] = field(default_factory=dict)
    skipped: dict[str, tuple[int, float]] = field(default_factory=dict)
    ran: dict[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def waiting_steps(self) -> int:
        """Steps without a seat, before the first one and after preemptions."""
        return total(self.waiting)[0] + total(self.preempted)[0]

    @property
    def steps(self) -> int:
        return sum(total(x)[0] for x in (self.waiting, self.preempted, self.skipped, self.ran))


def total(parts: dict[str, tuple[int, float]]) -> tuple[int, float]:
    """Steps and seconds of all parts together."""
    return sum(n for n, _ in parts.values()), sum(s for _, s in parts.values())


def spent(trace: Trace, cursor: Cursor | int | None = None) -> dict[str, Spent]:
    """For each request that entered the queue, and each sequence forked from one, where its steps went up to
    the cursor (whole steps), in order of arrival.
    """
    at = trace.last if cursor is None else Cursor(cursor) if isinstance(cursor, int) else cursor
    state: State = trace.state(0).clone()
    out: dict[str, Spent] = {}
    for record in trace.records[: at.step if at.event is None else at.step - 1]:
        state.apply(record)
        seconds = record.t1_s - record.t0_s
        forked: dict[str, list[str]] = {}
        for e in record.events:
            if isinstance(e, ev.Arrived):
                out[e.request_id] = Spent()
            elif isinstance(e, ev.Forked):
                forked[e.request_id] = e.child_ids
                out.update((i, Spent()) for i in e.child_ids)
        seen: set[str] = set()
        for c in record.chunks:
            if not c.padding:
                kind = "decode" if c.kind == "decode" else "recompute" if c.num_recomputed else "prefill"
                for rid in (
                    c.request_id,
                    *forked.get(c.request_id, ()),
                ):  # the step that ends a prompt is the first of all its sequences
                    _add(out[rid].ran, kind, seconds)
                    seen.add(rid)
        reason = state.requests[state.waiting[0]].wait_reason if state.waiting else ""
        if not reason and any(isinstance(e, ev.Preempted) for e in record.events):
            reason = "preempted"  # it lost its seat after the queue had been asked
        for rid in state.waiting:
            mine = out[rid]
            _add(
                mine.preempted if state.requests[rid].status == "preempted" else mine.waiting,
                reason or NOT_RECORDED,
                seconds,
            )
        told = {e.request_id: e.reason for e in record.events if isinstance(e, ev.Skipped)}
        for rid in state.running:
            if rid not in seen and not state.requests[rid].finished:
                _add(out[rid].skipped, told.get(rid, NOT_RECORDED), seconds)
    return out


def _add(parts: dict[str, tuple[int, float]], key: str, seconds: float) -> None:
    n, s = parts.get(key, (0, 0.0))
    parts[key] = n + 1, s + seconds
