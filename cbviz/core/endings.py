"""How a request ends: it is finished, aborted, late, or its batch is over."""

from __future__ import annotations

import math

from cbviz import events as ev
from cbviz.core import queue
from cbviz.core.request import Request, Status
from cbviz.core.state import ControlState


def finish(state: ControlState, r: Request, reason: str, stop_id: int) -> None:
    """A running request has its last token. It keeps its seat where the discipline says so."""
    hold = state.rules.hold_seat
    _end(state, r, reason, stop_id, hold_seat=hold, keep_blocks=hold and state.rules.pad)
    if hold:
        state.journal.append(ev.SeatHeld(r.request_id, state.running.index(r)))


def _end(
    state: ControlState,
    r: Request,
    reason: str,
    stop_id: int,
    *,
    hold_seat: bool = False,
    keep_blocks: bool = False,
) -> None:
    r.seat_held = hold_seat
    state.end(r, reason)
    state.finished_ids.append(r.request_id)
    state.journal.append(ev.Finished(r.request_id, reason, stop_id))
    if r.host_block_ids:
        state.journal.append(ev.HostFreed(r.request_id, r.host_block_ids))
        state.give_host_blocks_back(r)
        r.num_null_blocks = 0
    if not keep_blocks:
        _free_blocks(state, r)
    if not hold_seat:
        del state.requests[r.request_id]


def _free_blocks(state: ControlState, r: Request) -> None:
    if ids := state.kv.free(r):
        state.journal.append(ev.Freed(r.request_id, ids))


def close_batch(state: ControlState, *, force: bool = False) -> None:
    """Static batching: when the last of a batch has ended, its seats (and, padded, its blocks) are free.

    `force`: give held seats back now.
    """
    held = [r for r in state.running if r.seat_held]
    if not held or (len(held) < len(state.running) and not force):
        return
    state.save_queues()
    state.save_requests()
    for r in held:
        state.save(r)
    state.journal.append(ev.SeatsFreed([r.request_id for r in held]))
    for r in held:
        r.seat_held = False
        _free_blocks(state, r)
        del state.requests[r.request_id]
    state.running = [r for r in state.running if r.status is Status.RUNNING]


def abort(state: ControlState, request_id: str, reason: str = "abort") -> bool:
    """Ends an unfinished request in any state, and the sequences forked from it; blocks come back at once.

    False if there is nothing to end.
    """
    r = state.requests.get(request_id)
    if r is not None and r.is_beam:  # one beam is nothing without the others
        request_id = r.parent or request_id
    done = _abort(state, request_id, reason)
    for i in range(1, state.most_sequences):
        child = state.requests.get(f"{request_id}.{i}")
        if child is not None and child.parent == request_id:
            done = _abort(state, child.request_id, reason) or done
    return done


def _abort(state: ControlState, request_id: str, reason: str) -> bool:
    r = state.requests.get(request_id)
    if r is None or r.status is Status.FINISHED:
        return False
    state.save(r)
    state.save_queues()
    state.save_requests()
    if r.status is Status.RUNNING:
        state.running.remove(r)
    else:
        state.dequeue(r, queue.place_of(state, r))
        if state.tokens_waiting is not None:
            state.tokens_waiting -= r.num_tokens
    state.undo.append((_undo_end, (state, state.batch_open)))
    _end(state, r, reason, -1)
    close_batch(state)
    return True


def _undo_end(state: ControlState, batch_open: bool) -> None:
    state.num_finished -= 1
    state.batch_open = batch_open


def expire(state: ControlState, now_s: float) -> None:
    """Ends requests whose time is up, in order of arrival; their blocks come back before anything is decided."""
    if state.next_end_s is not None and now_s < state.next_end_s:
        return
    late: list[tuple[Request, str]] = []
    next_end = math.inf
    for r in state.requests.values():
        if r.status is Status.FINISHED:
            continue
        end_s, reason = end_of(state, r, now_s)
        if reason:
            late.append((r, reason))
        else:
            next_end = min(next_end, end_s)
    state.next_end_s = next_end
    for r, reason in late:
        abort(state, r.request_id, reason)


def end_of(state: ControlState, r: Request, now_s: float = -math.inf) -> tuple[float, str]:
    """A moment before which the request's time is not up (inf: it never is), and why its time is up at
    `now_s` ('': it is not).
    """
    timeout, shed, deadline = state.config.timeout_s, state.config.shed_after_s, r.spec.deadline_s
    if not (timeout or shed or deadline is not None):
        return math.inf, ""
    if deadline is not None and now_s >= deadline:
        return now_s, "deadline"
    if timeout and now_s - r.arrival_s >= timeout:
        return now_s, "timeout"
    sheds = shed and r.status is Status.WAITING
    if sheds and now_s - r.arrival_s >= shed:
        return now_s, "shed"
    waits = min(timeout or math.inf, shed if sheds else math.inf)
    end_s = min(math.inf if deadline is None else deadline, r.arrival_s + waits)
    if end_s < math.inf:  # a little early: `now - arrival` is rounded otherwise than `arrival + wait`
        end_s -= 1e-9 * (1 + abs(end_s))
    return end_s, ""
