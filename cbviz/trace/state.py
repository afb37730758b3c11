"""The state a trace describes at one moment: a fold of its events.

Knows no engine: an imported log folds the same way.

Owns `State` (what the views draw) and the rules by which each event changes it. The engine's own state is a
different thing (`core`); tests hold the two against each other after every step.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from cbviz import events as ev
from cbviz.messages import RequestSpec, StepRecord, child_spec

# Codes of what a request was during one step, as the timeline draws them. `finished` and `none` are what
# follows and precedes.
STATES = (
    "none",
    "waiting",
    "prefill",
    "decode",
    "preempted",
    "swapped",
    "finished",
    "idle",
    "held",
    "padded",
    "recompute",
    "aborted",
    "transferring",
    "accepted",
    "rejected",
)
CODE = {name: i for i, name in enumerate(STATES)}
NORMAL_ENDS = ("length", "stop", "max_model_len")
NULL_BLOCK = 0
FIRST_BLOCKS = 16_384
"""Blocks for which a state has room from the start; for others room is made when one is used, so that a state
of a huge pool stays small.
"""


class RequestState:
    """One request as far as the trace has told.

    `status`: waiting, running, preempted, finished or refused.
    """

    __slots__ = (
        "arrival_s",
        "arrival_step",
        "beam_score",
        "block_ids",
        "checked_drafts",
        "child_ids",
        "code",
        "draft_token_ids",
        "finish_reason",
        "finish_s",
        "finish_step",
        "first_scheduled_s",
        "first_scheduled_step",
        "first_token_s",
        "first_token_step",
        "fork_step",
        "host_block_ids",
        "index",
        "last_step",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "output_drafted",
        "output_steps",
        "output_texts",
        "output_token_ids",
        "parent",
        "priority",
        "request_id",
        "seat_held",
        "spec",
        "status",
        "wait_have",
        "wait_need",
        "wait_reason",
    )

    def __init__(self, request_id: str, index: int, num_prompt_tokens: int, max_tokens: int) -> None:
        self.request_id = request_id
        self.index = index
        """Order of arrival in this trace, from 0: the row on the timeline."""
        self.spec: RequestSpec | None = None
        self.status = "waiting"
        self.code = CODE["waiting"]
        """What it was during the last step (index into STATES)."""
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.priority = 0
        self.arrival_s = 0.0
        self.arrival_step = 0
        """The step before which the request arrived. The sequences of one request share its arrival."""
        self.fork_step = -1
        """The step that forked this sequence from its parent; -1: it is the request itself."""
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.output_token_ids: list[int] = []
        self.output_steps: list[int] = []
        """For each output token the step that made it."""
        self.output_texts: list[str] = []
        self.draft_token_ids: list[int] = []
        """Proposed and not yet checked."""
        self.output_drafted: list[int] = []
        """Places in the output whose token was an accepted draft."""
        self.checked_drafts: tuple[int, list[int], int] = (-1, [], 0)
        """The last check: its step, the drafts, and how many of them were right and kept."""
        self.block_ids: list[int] = []
        self.beam_score: float | None = None
        """A beam: log-probability of its output, once it has ended its score. None: no beam."""
        self.parent = ""
        """The request whose prompt it was forked from (`n` > 1)."""
        self.child_ids: list[str] = []
        """The sequences that were forked from it."""
        self.host_block_ids: list[int] = []
        """Host blocks that hold its KV while it is swapped out. Never changed in place."""
        self.seat_held = False
        self.first_scheduled_step = -1
        self.first_scheduled_s = -1.0
        self.first_token_step = -1
        self.first_token_s = -1.0
        self.finish_step = -1
        self.finish_s = -1.0
        self.finish_reason = ""
        self.wait_reason = ""
        self.wait_need = 0
        self.wait_have = 0
        self.last_step = -1
        """The last step in which it was scheduled."""

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def first_step(self) -> int:
        """The first step in which this sequence exists: its fork, or the arrival of a request."""
        return self.fork_step if self.parent else self.arrival_step

    @property
    def finished(self) -> bool:
        return self.status in ("finished", "refused")

    @property
    def state(self) -> str:
        """One of STATES: what it is now.

        (A request that ended in the last step was `decode` during it and is `finished` now.)
        """
        if self.finished and not self.seat_held:
            return "finished" if self.finish_reason in NORMAL_ENDS else "aborted"
        return STATES[self.code]

    def clone(self) -> RequestState:
        new = copy.copy(self)
        new.output_token_ids = self.output_token_ids.copy()
        new.output_steps = self.output_steps.copy()
        new.output_texts = self.output_texts.copy()
        new.output_drafted = self.output_drafted.copy()
        new.block_ids = self.block_ids.copy()
        return new


class State:
    """Requests, queues and blocks after `step` steps (and, inside a step, after `event` of its events)."""

    def __init__(self, num_blocks: int, block_size: int, config: dict[str, Any] | None = None) -> None:
        self.step = 0
        self.event: int | None = None
        self.time_s = 0.0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.config: dict[str, Any] = dict(config or {})
        self.requests: dict[str, RequestState] = {}
        self.by_index: list[RequestState] = []
        self.running: list[str] = []
        """Requests with a seat, in the scheduler's order."""
        self.waiting: list[str] = []
        """Requests without one, in the order in which they will be asked."""
        self.holders: dict[int, list[int]] = {}
        """Block id -> indices of the requests whose table holds it."""
        self.position: array[int] = array("i")
        """Place of the block in its holders' tables.

        This and the next two are as long as the highest block that was ever used needs: ask `place` and so
        on.
        """
        self.last_owner: array[int] = array("i")
        """Index of the request that held the block last, -1 if none did."""
        self.cached = bytearray()
        """1: the block has a hash and can be found."""
        self._grow(min(num_blocks, FIRST_BLOCKS))
        self.touched: set[int] = set()
        """Blocks changed since a reader last cleared this set (for incremental drawing)."""
        self.changed: set[int] = set()
        """Indices of requests changed since a reader last cleared this set."""
        self.arriving: dict[str, RequestSpec] = {}
        """Specs of the requests that came before the step that is being folded, by id."""
        self.num_forked = 0
        """Sequences in `by_index` that were forked from a request (`n` > 1, beams)."""

    def outputs(self, request_id: str) -> list[list[int]]:
        """The output token ids of all the request's sequences (`n` > 1), its own first; of beams the best
        first.
        """
        return [r.output_token_ids for r in self._sequences(request_id)]

    def scores(self, request_id: str) -> list[float]:
        """Of a beam search, beside `outputs`: log-probabilities so far, at the end those of the hypotheses /
        length ** length_penalty. Empty for others.
        """
        return [r.beam_score for r in self._sequences(request_id) if r.beam_score is not None]

    def _sequences(self, request_id: str) -> list[RequestState]:
        r = self.request(request_id)
        all_of_it = [self.requests[i] for i in (request_id, *r.child_ids)]
        return all_of_it if r.beam_score is None else sorted(all_of_it, key=lambda x: -(x.beam_score or 0.0))

    # reading ------------------------------------------------------------------------------------------------

    def request(self, request_id: str) -> RequestState:
        try:
            return self.requests[request_id]
        except KeyError:
            raise KeyError(f"no request {request_id!r} at step {self.step}") from None

    @property
    def num_requests(self) -> int:
        """Requests that have come so far, refused ones included.

        Each counts once, whatever the number of its sequences.
        """
        return len(self.by_index) - self.num_forked

    @property
    def num_ended(self) -> int:
        """Requests all of whose sequences have ended, refused ones included."""
        return self.num_requests - len({r.parent or r.request_id for r in self.by_index if not r.finished})

    def place(self, block_id: int) -> int:
        """Place of the block in its holders' tables."""
        return self.position[block_id] if block_id < len(self.position) else 0

    def held_last(self, block_id: int) -> int:
        """Index of the request that held the block last, -1 if none did."""
        return self.last_owner[block_id] if block_id < len(self.last_owner) else -1

    def is_cached(self, block_id: int) -> bool:
        """Whether the block has a hash and can be found."""
        return block_id < len(self.cached) and bool(self.cached[block_id])

    def _grow(self, num_blocks: int) -> None:
        """Room for blocks 0 .. `num_blocks` - 1 at least."""
        extra = num_blocks - len(self.cached)
        if extra > 0:
            self.position.extend(array("i", bytes(4 * extra)))
            self.last_owner.extend(array("i", b"\xff" * (4 * extra)))
            self.cached.extend(bytes(extra))

    def _room(self, block_ids: Iterable[int]) -> None:
        """Room for these blocks. Raises IndexError for one that the pool does not have."""
        top = max(block_ids, default=0)
        if top >= len(self.cached):
            if top >= self.num_blocks:
                raise IndexError(f"block {top} is not in this pool: it has blocks 0..{self.num_blocks - 1}")
            self._grow(min(self.num_blocks, max(top + 1, 2 * len(self.cached))))

    def ref_count(self, block_id: int) -> int:
        return len(self.holders.get(block_id, ()))

    def owner(self, block_id: int) -> int:
        """Index of the request that holds the block (the first of several), or held it last; -1 if nobody
        did.
        """
        held = self.holders.get(block_id)
        return held[0] if held else self.held_last(block_id)

    def fill(self, block_id: int) -> int:
        """Slots of the block that hold a token, as far as its fullest holder has come."""
        held = self.holders.get(block_id)
        if not held:
            return self.block_size if self.is_cached(block_id) else 0
        most = max(self.by_index[i].num_computed_tokens for i in held)
        return max(0, min(self.block_size, most - self.place(block_id) * self.block_size))

    def block_kind(self, block_id: int) -> str:
        """`null`, `shared`, `used`, `reserved` (taken, no token yet), `cached` (free but findable) or `free`."""
        if block_id == NULL_BLOCK:
            return "null"
        n = self.ref_count(block_id)
        if n > 1:
            return "shared"
        if n:
            return "used" if self.fill(block_id) else "reserved"
        return "cached" if self.is_cached(block_id) else "free"

    @property
    def num_host_blocks(self) -> int:
        """Host blocks that hold the KV of requests swapped out."""
        return sum(len(self.requests[rid].host_block_ids) for rid in self.waiting)

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody refers to, cached ones included, without the null block."""
        return self.num_blocks - 1 - len(self.holders)

    def free_runs(self) -> list[range]:
        """Runs of blocks that nobody refers to, by address."""
        out: list[range] = []
        first = 0
        for b in range(1, self.num_blocks + 1):
            if b < self.num_blocks and b not in self.holders:
                first = first or b
            elif first:
                out.append(range(first, b))
                first = 0
        return out

    @property
    def fragmented(self) -> bool:
        """The head of the queue waits because no run of free blocks is long enough (contiguous reservation)."""
        return bool(self.waiting) and self.requests[self.waiting[0]].wait_reason == "fragments"

    @property
    def size(self) -> int:
        """About how many numbers a copy of this state holds of its own (finished requests are shared)."""
        return (
            3 * self.num_blocks
            + len(self.by_index)
            + sum(
                60 + 3 * len(r.output_token_ids) + len(r.block_ids)
                for r in self.by_index
                if not r.finished or r.seat_held
            )
        )

    # folding ------------------------------------------------------------------------------------------------

    def clone(self) -> State:
        """A copy that may be folded on. Finished requests never change again and are shared."""
        new = copy.copy(self)
        new.config = dict(self.config)
        new.by_index = [r if r.finished and not r.seat_held else r.clone() for r in self.by_index]
        new.requests = {r.request_id: r for r in new.by_index}
        new.running = self.running.copy()
        new.waiting = self.waiting.copy()
        new.holders = {b: h.copy() for b, h in self.holders.items()}
        new.position = self.position[:]
        new.last_owner = self.last_owner[:]
        new.cached = self.cached[:]
        new.touched = set()
        new.changed = set()
        return new

    def apply(self, record: StepRecord, upto: int | None = None) -> None:
        """Folds one record into this state; with `upto`, only its first events, and the state then stands
        inside the step.
        """
        self.event = None
        self.arriving = {x.request_id: x for x in record.arrivals}
        for i, e in enumerate(record.events):
            if upto is not None and i >= upto:
                self.step, self.event = record.step, upto
                return
            _FOLD[type(e)](self, e, record)
        self.step = record.step
        self.time_s = record.t1_s
        self._settle(record)

    def apply_each(self, record: StepRecord) -> Iterator[None]:
        """Folds one record as `apply` does, and pauses after each event and once more when the step has
        ended.
        """
        self.arriving = {x.request_id: x for x in record.arrivals}
        for i, e in enumerate(record.events):
            _FOLD[type(e)](self, e, record)
            self.step, self.event = record.step, i + 1
            yield
        self.event = None
        self.step = record.step
        self.time_s = record.t1_s
        self._settle(record)
        yield

    def _settle(self, record: StepRecord) -> None:
        """After the last event: what each request was during this step."""
        for c in record.chunks:
            r = self.requests[c.request_id]
            if c.num_draft and c.kind == "decode" and r.checked_drafts[1]:  # what came of its drafts
                r.code = CODE["accepted" if r.output_steps[-2:] == [record.step, record.step] else "rejected"]
                self.changed.add(r.index)
                continue
            r.code = (
                CODE["padded"]
                if c.padding
                else CODE["decode"]
                if c.kind == "decode"
                else CODE["recompute"]
                if c.num_recomputed
                else CODE["prefill"]
            )
            self.changed.add(r.index)
        for rid in self.running:
            r = self.requests[rid]
            if r.last_step != record.step:
                code = CODE["held"] if r.seat_held else CODE["idle"]
                if r.code != code:
                    r.code = code
                    self.changed.add(r.index)

    def _take(self, r: RequestState, block_ids: list[int]) -> None:
        self._room(block_ids)
        for b in block_ids:
            self.position[b] = len(r.block_ids)
            r.block_ids.append(b)
            if b != NULL_BLOCK:
                self.holders.setdefault(b, []).append(r.index)
                self.last_owner[b] = r.index
                self.touched.add(b)
        self.changed.add(r.index)

    def _drop(self, r: RequestState, block_ids: list[int]) -> None:
        for b in block_ids:
            held = self.holders.get(b)
            if held is None or r.index not in held:
                continue
            held.remove(r.index)
            self.last_owner[b] = r.index
            if not held:
                del self.holders[b]
            self.touched.add(b)
        self.changed.add(r.index)


def _arrived(s: State, e: ev.Arrived, record: StepRecord) -> None:
    r = RequestState(e.request_id, len(s.by_index), e.num_prompt_tokens, e.max_tokens)
    r.arrival_s, r.arrival_step, r.priority = e.arrival_s, record.step, e.priority
    r.spec = s.arriving.get(e.request_id)
    s.requests[e.request_id] = r
    s.by_index.append(r)
    s.waiting.insert(e.position, e.request_id)
    s.changed.add(r.index)


def _refused(s: State, e: ev.Refused, record: StepRecord) -> None:
    if e.request_id in s.requests:
        return  # refused because its id is taken: the one that has it goes on
    spec = s.arriving.get(e.request_id)
    r = RequestState(
        e.request_id,
        len(s.by_index),
        len(spec.prompt_token_ids) if spec else 0,
        spec.max_tokens if spec else 0,
    )
    r.spec, r.status, r.code, r.finish_reason = spec, "refused", CODE["aborted"], "refused: " + e.reason
    r.arrival_step = r.finish_step = record.step
    r.arrival_s = r.finish_s = record.t0_s
    s.requests[e.request_id] = r
    s.by_index.append(r)
    s.changed.add(r.index)


def _configured(s: State, e: ev.Configured, record: StepRecord) -> None:
    s.config[e.field] = e.new


def _resized(s: State, e: ev.Resized, record: StepRecord) -> None:
    old = s.num_blocks
    s.num_blocks = max(old, e.num_blocks)
    to = dict(e.moved)
    s._room([*e.dropped, *to, *to.values()])
    for b in e.dropped:
        s.cached[b] = 0
    for a, b in to.items():
        if a in s.holders:
            s.holders[b] = s.holders.pop(a)
        s.position[b], s.last_owner[b], s.cached[b] = s.position[a], s.last_owner[a], s.cached[a]
    for rid in s.running:
        r = s.requests[rid]
        r.block_ids[:] = [to.get(b, b) for b in r.block_ids]
        s.changed.add(r.index)
    del s.position[e.num_blocks :], s.last_owner[e.num_blocks :], s.cached[e.num_blocks :]
    s.num_blocks = e.num_blocks
    s._grow(min(s.num_blocks, FIRST_BLOCKS))
    s.touched.update(range(1, max(old, e.num_blocks)))


def _reordered(s: State, e: ev.Reordered, record: StepRecord) -> None:
    s.waiting = list(e.request_ids)


def _not_admitted(s: State, e: ev.NotAdmitted, record: StepRecord) -> None:
    r = s.requests[e.request_id]
    r.wait_reason, r.wait_need, r.wait_have = e.reason, e.need, e.have
    s.changed.add(r.index)


def _admitted(s: State, e: ev.Admitted, record: StepRecord) -> None:
    r = s.requests[e.request_id]
    s.waiting.remove(e.request_id)
    s.running.append(e.request_id)
    r.status = "running"
    r.num_computed_tokens = r.num_cached_tokens = e.num_cached_tokens
    r.wait_reason = ""
    if r.first_scheduled_step < 0:
        r.first_scheduled_step, r.first_scheduled_s = record.step, record.t0_s
    s.changed.add(r.index)


def _forked(s: State, e: ev.Forked, record: StepRecord) -> None:
    parent = s.requests[e.request_id]
    at = s.running.index(e.request_id) + 1
    for i, child in enumerate(e.child_ids, 1):
        r = RequestState(child, len(s.by_index), parent.num_prompt_tokens, parent.max_tokens)
        r.arrival_s, r.arrival_step, r.priority = parent.arrival_s, parent.arrival_step, parent.priority
        r.fork_step = record.step
        r.spec = child_spec(parent.spec, i) if parent.spec is not None else None
        r.parent, r.status, r.code = e.request_id, "running", CODE["prefill"]
        r.num_computed_tokens, r.last_step = e.num_tokens, record.step
        r.first_scheduled_step, r.first_scheduled_s = parent.first_scheduled_step, parent.first_scheduled_s
        s.requests[child] = r
        s.by_index.append(r)
        s._take(r, e.block_ids)
    s.running[at:at] = e.child_ids
    parent.child_ids = list(e.child_ids)
    s.num_forked += len(e.child_ids)


def _copied(s: State, e: ev.Copied, record: StepRecord) -> None:
    r = s.requests[e.request_id]
    s._drop(r, [e.src])
    r.block_ids[e.place] = e.dst
    s._room((e.dst,))
    s.position[e.dst] = e.place
    s.holders.setdefault(e.dst, []).append(r.index)
    s.last_owner[e.dst] = r.index
    s.touched.add(e.dst)


def _evicted(s: State, e: ev.Evicted, record: StepRecord) -> None:
    s.cached[e.block_id] = 0
    s.touched.add(e.block_id)


def _allocated(s: State, e: ev.Allocated, record: StepRecord) -> None:
    s._take(s.requests[e.request_id], e.block_ids)


def _shared(s: State, e: ev.Shared, record: StepRecord) -> None:
    s._take(s.requests[e.request_id], e.block_ids)


def _scheduled(s: State, e: ev.Scheduled, record: StepRecord) -> None:
    r = s.requests[e.request_id]
    if not e.padding:
        first = e.start // s.block_size
        r.num_computed_tokens = e.start + e.num_tokens
        s.touched.update(r.block_ids[first : (r.num_computed_tokens - 1) // s.block_size + 1])
    r.last_step = record.step
    if e.num_draft or r.draft_token_ids:
        r.checked_drafts = record.step, [] if e.draft_padding else r.draft_token_ids[: e.num_draft], 0
        r.draft_token_ids = []
    s.changed.add(r.index)


def _unscheduled(s: State, e: ev.Unscheduled, record: StepRecord) -> None:
    s.requests[e.request_id].last_step = -1
    before = record.events[: record.events.index(e)]
    first = (
        next((x.start for x in before if isinstance(x, ev.Scheduled) and x.request_id == e.request_id), 0)
        // s.block_size
    )
    # blocks that this step would have filled; those of accepted drafts, found from now on, were filled before
    for x in before:
        if isinstance(x, ev.BlockCached) and x.request_id == e.request_id and s.position[x.block_id] >= first:
            s.cached[x.block_id] = 0
            s.touched.add(x.block_id)


def _preempted(s: State, e: ev.Preempted, record: StepRecord) -> None:
    r = s.requests[e.request_id]
    s._drop(r, r.block_ids)
    r.block_ids = []
    r.num_computed_tokens = 0
    r.num_preemptions += 1
    r.status, r.code, r.draft_token_ids = "preempted", CODE["preempted"], []
    s.running.remove(e.request_id)
    s.waiting.insert(e.position, e.request_id)


def _swapped_out(s: State, e: ev.SwappedOut, record: StepRecord) -> None:
    r = s.requests[e.request_id]
    r.host_block_ids, r.num_computed_tokens, r.code = e.host_block_ids, e.num_tokens, CODE["swapped"]
    s.changed.add(r.index)


def _host_freed(s: State, e: ev.SwappedIn | ev.HostFreed, record: StepRecord) -> None:
    s.requests[e.request_id].host_block_ids = []


def _out_of_window(s: State, e: ev.OutOfWindow, record: StepRecord) -> None:
    r = s.requests[e.request_id]
    s._drop(r, e.block_ids)
    for i in range(e.first_index, e.first_index + len(e.block_ids)):
        r.block_ids[i] = NULL_BLOCK


def _executed(s: State, e: ev.Executed, record: StepRecord) -> None:
    pass


def _block_cached(s: State, e: ev.BlockCached, record: StepRecord) -> None:
    s._room((e.block_id,))
    s.cached[e.block_id] = 1
    s.touched.add(e.block_id)


def _sampled(s: State, e: ev.Sampled, record: StepRecord) -> None:
    r = s.requests[e.request_id]
    if r.first_token_step < 0:
        r.first_token_step, r.first_token_s = record.step, record.t1_s
    if e.num_rejected:
        s.touched.update(r.block_ids[(r.num_computed_tokens - e.num_rejected) // s.block_size :])
        r.num_computed_tokens -= e.num_rejected
    step, drafts, _ = r.checked_drafts
    if step == record.step and drafts:
        right = len(drafts) - e.num_rejected
        r.checked_drafts = step, drafts, right
        r.output_drafted.extend(range(len(r.output_token_ids), len(r.output_token_ids) + right))
    r.output_token_ids.extend(e.token_ids)
    r.output_steps.extend([record.step] * len(e.token_ids))
    if record.texts is not None:
        r.output_texts.extend(record.texts.get(e.request_id, ()))
    s.changed.add(r.index)


def _beam_step(s: State, e: ev.BeamStep, record: StepRecord) -> None:
    beams = [s.requests[i] for i in e.beam_ids]
    before = [(b.output_token_ids, b.output_steps, b.output_texts) for b in beams]
    for b, parent, token, score in zip(beams, e.parents, e.token_ids, e.scores, strict=True):
        table = beams[parent].block_ids
        if b.block_ids != table:
            s._drop(b, b.block_ids)
            b.block_ids = []
            s._take(b, table)
        tokens, steps, texts = before[parent]
        b.output_token_ids, b.output_steps = [*tokens, token], [*steps, record.step]
        b.output_texts = [*texts, *(record.texts or {}).get(b.request_id, ())]
        b.beam_score = score
        if b.first_token_step < 0:
            b.first_token_step, b.first_token_s = record.step, record.t1_s
        s.changed.add(b.index)


def _beams_ended(s: State, e: ev.BeamsEnded, record: StepRecord) -> None:
    steps = [*s.requests[e.request_id].output_steps, record.step]
    for rid, tokens, score in zip(e.beam_ids, e.outputs, e.scores, strict=True):
        b = s.requests[rid]
        b.output_token_ids, b.output_steps, b.output_texts = (
            list(tokens),
            steps[: len(tokens)],
            list((record.texts or {}).get(rid, ())),
        )
        b.beam_score = score
        if b.first_token_step < 0:
            b.first_token_step, b.first_token_s = record.step, record.t1_s
        s.changed.add(b.index)


def _proposed(s: State, e: ev.Proposed, record: StepRecord) -> None:
    r = s.requests[e.request_id]
    r.draft_token_ids = list(e.token_ids)
    s.changed.add(r.index)


def _finished(s: State, e: ev.Finished, record: StepRecord) -> None:
    r = s.requests[e.request_id]
    if r.request_id in s.waiting:
        s.waiting.remove(r.request_id)
    if r.request_id in s.running:
        s.running.remove(r.request_id)
    r.status = "finished"
    r.finish_reason, r.finish_step, r.finish_s = e.reason, record.step, record.t1_s
    r.draft_token_ids = []
    r.code = CODE["finished"] if e.reason in NORMAL_ENDS else CODE["aborted"]
    s.changed.add(r.index)


def _seat_held(s: State, e: ev.SeatHeld, record: StepRecord) -> None:
    r = s.requests[e.request_id]
    r.seat_held = True
    s.running.insert(e.position, r.request_id)
    s.changed.add(r.index)


def _seats_freed(s: State, e: ev.SeatsFreed, record: StepRecord) -> None:
    ran = any(isinstance(x, ev.Executed) for x in record.events[: record.events.index(e)])
    for rid in e.request_ids:
        r = s.requests[rid]
        r.seat_held = False
        if ran and record.step > r.finish_step:
            r.code = CODE["held"]  # while the step ran the seat was still taken; `state` says what it is now
        else:
            r.code = CODE["finished"] if r.finish_reason in NORMAL_ENDS else CODE["aborted"]
        s.running.remove(rid)
        s.changed.add(r.index)


def _freed(s: State, e: ev.Freed, record: StepRecord) -> None:
    r = s.requests[e.request_id]
    s._drop(r, e.block_ids)
    r.block_ids = []


_FOLD: dict[type, Any] = {
    ev.Arrived: _arrived,
    ev.Starving: _executed,
    ev.Refused: _refused,
    ev.Configured: _configured,
    ev.Resized: _resized,
    ev.Reordered: _reordered,
    ev.NotAdmitted: _not_admitted,
    ev.Admitted: _admitted,
    ev.PrefixHit: _executed,
    ev.PrefixMiss: _executed,
    ev.Evicted: _evicted,
    ev.Allocated: _allocated,
    ev.Shared: _shared,
    ev.Scheduled: _scheduled,
    ev.Skipped: _executed,
    ev.Unscheduled: _unscheduled,
    ev.Preempted: _preempted,
    ev.SwappedOut: _swapped_out,
    ev.SwappedIn: _host_freed,
    ev.HostFreed: _host_freed,
    ev.Forked: _forked,
    ev.Copied: _copied,
    ev.Scored: _executed,
    ev.BeamStep: _beam_step,
    ev.BeamsEnded: _beams_ended,
    ev.OutOfWindow: _out_of_window,
    ev.Executed: _executed,
    ev.BlockCached: _block_cached,
    ev.Sampled: _sampled,
    ev.Proposed: _proposed,
    ev.Finished: _finished,
    ev.SeatHeld: _seat_held,
    ev.SeatsFreed: _seats_freed,
    ev.Freed: _freed,
}
