"""Applies a recorded step to the scheduler again: the same changes, from the record alone.

Asks no policy, runner or clock.

Owns the inverse of the journal: each event that `Scheduler` writes says enough to do what it tells, by the same
transitions of `ControlState` that the scheduler called. Block ids are taken from the pool in its own order and
held against the record's, so a record of another run is noticed at once.
"""

from __future__ import annotations

from typing import Any

from cbviz import events as ev
from cbviz.core import beam, expert_use
from cbviz.core.queue import may_overtake
from cbviz.core.request import Request, Status
from cbviz.core.state import ControlState
from cbviz.messages import RequestSpec, StepRecord


class ReplayError(RuntimeError):
    """A record does not fit the state it is applied to. Names the step and what differs."""


def apply(s: ControlState, record: StepRecord, config_changes: dict[str, Any]) -> None:
    """Takes the state from the end of step `record.step - 1` to the end of that step.

    `config_changes`: the knobs that the user turned before it.

    Raises ReplayError; the state is then no longer usable (restore a snapshot).
    """
    if record.step != s.step + 1:
        raise ReplayError(f"step {record.step} can't follow step {s.step}")
    s.begin()
    if config_changes:
        s.configure(s.config.replace(**config_changes))
    s.step = s.pool.step = record.step
    told = _Teller(s, record)
    for e in record.events:
        told.apply(e)
    if s.routed:
        expert_use.forget_ended(s.routed, s.requests)
    s.finished_ids = [
        e.request_id for e in record.events if isinstance(e, ev.Finished) and e.reason != "abort"
    ]
    s.take_carry(record.carry)
    s.forget_ranks()
    s.undo.clear()
    s.journal.clear()


class _Teller:
    """One record being applied."""

    def __init__(self, s: ControlState, record: StepRecord) -> None:
        self.s = s
        self.step = record.step
        self.specs: dict[str, RequestSpec] = {x.request_id: x for x in record.arrivals}
        self.planned: dict[str, ev.Scheduled] = {}
        self.routed = record.routed or {}
        self.holding = {e.request_id for e in record.events if isinstance(e, ev.SeatHeld)}
        """Requests that end and keep their seat: they keep their place among the requests too."""

    def wrong(self, what: str) -> ReplayError:
        return ReplayError(f"step {self.step} does not fit the state before it: {what}")

    def request(self, request_id: str) -> Request:
        r = self.s.requests.get(request_id)
        if r is None:
            raise self.wrong(f"{request_id} is not there")
        return r

    def apply(self, e: Any) -> None:
        f = _APPLY.get(type(e))
        if f is not None:
            f(self, e)

    def arrived(self, e: ev.Arrived) -> None:
        s = self.s
        spec = self.specs.get(e.request_id)
        if spec is None:
            raise self.wrong(f"{e.request_id} arrives without its prompt")
        r = s.arrive(spec, e.arrival_s)
        r.queued_step = self.step
        s.enqueue(r, e.position)

    def resized(self, e: ev.Resized) -> None:
        s = self.s
        moved, _ = s.resize(e.num_blocks)
        if moved != [(a, b) for a, b in e.moved]:
            raise self.wrong(f"the pool of {e.num_blocks} blocks moves {moved}, the record {e.moved}")
        s.configure(s.config.replace(num_blocks=e.num_blocks))

    def reordered(self, e: ev.Reordered) -> None:
        self.s.reorder([self.request(i) for i in e.request_ids])

    def not_admitted(self, e: ev.NotAdmitted) -> None:
        self.request(e.request_id).last_wait = (e.reason, e.need, e.have)

    def admitted(self, e: ev.Admitted) -> None:
        s, r = self.s, self.request(e.request_id)
        place = s.waiting.index(r)
        s.seat(r, place, e.num_cached_tokens)
        if not e.resumed and may_overtake(s.policy, place):
            s.overtaken.admit(r, s.waiting)
        else:
            s.overtaken.leave(r)

    def shared(self, e: ev.Shared) -> None:
        self.s.kv.share(self.request(e.request_id), list(e.block_ids))

    def allocated(self, e: ev.Allocated) -> None:
        r, pool = self.request(e.request_id), self.s.pool
        if len(e.block_ids) > pool.num_free:
            raise self.wrong(f"{e.request_id} takes {len(e.block_ids)} blocks, {pool.num_free} are free")
        ids, _ = self.s.kv.take(len(e.block_ids), r.request_id)
        if ids != list(e.block_ids):
            raise self.wrong(f"{e.request_id} takes blocks {e.block_ids}, the pool gives {ids}")
        r.block_ids.extend(ids)

    def block_cached(self, e: ev.BlockCached) -> None:
        r, kv = self.request(e.request_id), self.s.kv
        i = r.block_ids.index(e.block_id)
        h = kv.hashes(r, i + 1)[i]
        if not h.hex().startswith(e.hash):
            raise self.wrong(f"block {e.block_id} of {e.request_id} has another hash")
        self.s.pool.cache(e.block_id, h)
        r.num_cached_blocks = i + 1

    def scheduled(self, e: ev.Scheduled) -> None:
        if e.padding:
            return
        r, s = self.request(e.request_id), self.s
        if s.pool.enable_caching:
            r.num_cached_blocks = max(
                r.num_cached_blocks, min(e.start + e.num_tokens, r.num_tokens) // s.kv.block_size
            )
        r.draft_token_ids = []
        r.shares_tail = False
        self.planned[e.request_id] = e

    def unscheduled(self, e: ev.Unscheduled) -> None:
        self.s.kv.uncache_planned(self.request(e.request_id))
        del self.planned[e.request_id]

    def preempted(self, e: ev.Preempted) -> None:
        r = self.request(e.request_id)
        self.s.preempt(r)
        self.s.enqueue(r, e.position)

    def forked(self, e: ev.Forked) -> None:
        r = self.request(e.request_id)
        if [c.request_id for c in self.s.fork(r, e.num_tokens)] != list(e.child_ids):
            raise self.wrong(f"{e.request_id} forks other sequences than {e.child_ids}")

    def copied(self, e: ev.Copied) -> None:
        r, kv = self.request(e.request_id), self.s.kv
        if r.num_computed_tokens // kv.block_size != e.place or not kv.pool.num_free:
            raise self.wrong(f"{e.request_id} copies place {e.place} of its table")
        kv.copy_tail(r)
        if r.block_ids[e.place] != e.dst:
            raise self.wrong(f"{e.request_id} copies to block {e.dst}, the pool gives {r.block_ids[e.place]}")

    def swapped_out(self, e: ev.SwappedOut) -> None:
        r, host = self.request(e.request_id), self.s.host
        if len(e.host_block_ids) > len(host.free) or (ids := host.take(len(e.host_block_ids))) != list(
            e.host_block_ids
        ):
            raise self.wrong(
                f"{e.request_id} goes to host blocks {e.host_block_ids}, which are not the next free ones"
            )
        self.s.keep_on_host(r, ids, e.num_tokens, e.first_index)

    def swapped_in(self, e: ev.SwappedIn) -> None:
        self.host_freed(e)

    def host_freed(self, e: ev.SwappedIn | ev.HostFreed) -> None:
        self.s.give_host_blocks_back(self.s.requests.get(e.request_id) or self.ended)

    def out_of_window(self, e: ev.OutOfWindow) -> None:
        self.s.kv.leave(self.request(e.request_id), e.first_index, e.first_index + len(e.block_ids))

    def executed(self, e: ev.Executed) -> None:
        planned = self.planned.values()
        self.s.give_tokens([self.request(p.request_id) for p in planned], planned)

    def sampled(self, e: ev.Sampled) -> None:
        r = self.request(e.request_id)
        r.token_ids.extend(e.token_ids)
        if (layers := self.routed.get(e.request_id)) is not None:  # a child's first token is its parent's row
            expert_use.note(self.s.routed, r, layers)
        r.num_computed_tokens -= e.num_rejected

    def scored(self, e: ev.Scored) -> None:
        r = self.request(e.request_id)
        r.candidates = list(zip(e.token_ids, e.logprobs, strict=True))
        if self.routed:
            expert_use.note(self.s.routed, r, self.routed[e.request_id])

    def beams(self, e: ev.BeamStep | ev.BeamsEnded) -> None:
        root = self.request(e.request_id)
        decided = beam.decide(self.s, root)
        if decided is None or decided[0] != e:
            raise self.wrong(f"the beams of {e.request_id} go on otherwise")
        if isinstance(e, ev.BeamStep):
            beam.go_on(self.s, root, e, decided[1])
        else:
            beam.end(self.s, e)

    def proposed(self, e: ev.Proposed) -> None:
        self.request(e.request_id).draft_token_ids = list(e.token_ids)

    def finished(self, e: ev.Finished) -> None:
        s, r = self.s, self.request(e.request_id)
        if r.status is Status.RUNNING:
            s.running.remove(r)
        else:
            s.dequeue(r, s.waiting.index(r))
        s.end(r, e.reason)
        self.ended = r
        if r.request_id not in self.holding:
            del s.requests[r.request_id]

    def freed(self, e: ev.Freed) -> None:
        s = self.s
        r = s.requests.get(e.request_id) or self.ended
        if s.kv.free(r) != list(e.block_ids):
            raise self.wrong(f"{e.request_id} gives back other blocks than it holds")
        if self.leaving is not None and r.request_id in self.leaving:
            del s.requests[r.request_id]
            self.leaving.discard(r.request_id)

    def seat_held(self, e: ev.SeatHeld) -> None:
        r = self.ended
        r.seat_held = True
        self.s.running.insert(e.position, r)

    def seats_freed(self, e: ev.SeatsFreed) -> None:
        s = self.s
        for i in e.request_ids:
            r = self.request(i)
            r.seat_held = False
            s.running.remove(r)
            if r.block_ids:
                self.leaving = (self.leaving or set()) | {i}
            else:
                del s.requests[i]

    leaving: set[str] | None = None
    ended: Request


_APPLY: dict[type, Any] = {
    ev.Arrived: _Teller.arrived,
    ev.Resized: _Teller.resized,
    ev.Reordered: _Teller.reordered,
    ev.NotAdmitted: _Teller.not_admitted,
    ev.Admitted: _Teller.admitted,
    ev.Shared: _Teller.shared,
    ev.Allocated: _Teller.allocated,
    ev.BlockCached: _Teller.block_cached,
    ev.Scheduled: _Teller.scheduled,
    ev.Unscheduled: _Teller.unscheduled,
    ev.Preempted: _Teller.preempted,
    ev.SwappedOut: _Teller.swapped_out,
    ev.SwappedIn: _Teller.swapped_in,
    ev.HostFreed: _Teller.host_freed,
    ev.Forked: _Teller.forked,
    ev.Copied: _Teller.copied,
    ev.OutOfWindow: _Teller.out_of_window,
    ev.Executed: _Teller.executed,
    ev.Sampled: _Teller.sampled,
    ev.Proposed: _Teller.proposed,
    ev.Scored: _Teller.scored,
    ev.BeamStep: _Teller.beams,
    ev.BeamsEnded: _Teller.beams,
    ev.Finished: _Teller.finished,
    ev.Freed: _Teller.freed,
    ev.SeatHeld: _Teller.seat_held,
    ev.SeatsFreed: _Teller.seats_freed,
}
