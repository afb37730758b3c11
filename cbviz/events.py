"""What can happen inside a step, as frozen records: names and fields, nothing else.

Events stand in a `StepRecord` in the order in which they happened, so a cursor can stop between two of them.
Every decision carries its reason in its own fields. `trace.explain` turns them into sentences; `trace.state`
folds them into the drawn state. All are msgspec Structs, tagged by `type`, so that a trace line is plain
JSON.
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower, omit_defaults=True, gc=False):
    """Base of all events."""


class Arrived(Event):
    """A request entered the waiting queue at `position`."""

    request_id: str
    position: int
    num_prompt_tokens: int
    max_tokens: int
    arrival_s: float = 0.0
    priority: int = 0


class Starving(Event):
    """A waiting request was overtaken again and again: `num_overtaken` later arrivals were admitted in its
    `num_waiting_steps` steps of waiting. `need` and `have`: the free blocks that its admission would take
    now, and those there are; `num_ahead`: waiting requests that the policy still puts before it. Written when
    the count doubles, from 8 on.
    """

    request_id: str
    num_overtaken: int
    num_waiting_steps: int
    need: int
    have: int
    num_ahead: int = 0


class Refused(Event):
    """A request never entered the queue. `reason` is a sentence with the figures."""

    request_id: str
    reason: str


class Configured(Event):
    """The user changed a knob; it holds from this step's admission on."""

    field: str
    old: str
    new: str


class Resized(Event):
    """The pool has `num_blocks` blocks from here on (a fork with another pool size).

    `moved`: blocks in use that lay beyond the new end, as [old id, new id]; their contents go along.
    `dropped`: cached blocks that can no longer be found.
    """

    num_blocks: int
    moved: list[tuple[int, int]]
    dropped: list[int]


class Reordered(Event):
    """The policy put the waiting queue into another order; `request_ids` is the whole new order."""

    request_ids: list[str]


class NotAdmitted(Event):
    """The head of the waiting queue was not admitted.

    Written when the reason changes and whenever the figures do.

    `reason`: `seats` (all taken: need 1, have 0), `blocks` (need / have free blocks), `budget` (need / have
    tokens of the step), `batch` (static: the last batch has not ended; have = requests still running),
    `preempted` (nobody is admitted in a step that preempted), `watermark`, `reserve` (the reservation does
    not fit: orca and static), `guarantee` (everybody's prompt + max_tokens would not fit: no-evict),
    `fragments` (contiguous: enough blocks are free, but need > have, the longest run of free blocks),
    `estimate` (the expected rest of all would not fit: retract), `degraded` (batch class, demoted: it starts
    when no other batch-class request runs), `policy` (the policy said no). Requests behind the head wait for
    the head.
    """

    request_id: str
    reason: str
    need: int = 0
    have: int = 0


class PrefixHit(Event):
    """The first `num_tokens` tokens were found in the cache."""

    request_id: str
    num_tokens: int
    block_ids: list[int]


class PrefixMiss(Event):
    """Where the prefix stopped matching: block number `block_index` of the request.

    `cause`: `new` (this content was never seen or is forgotten), `evicted` (was cached until step
    `evicted_step`, when `evicted_by` took the block), `last-token` (whole prompt is cached, but one token
    must be computed to get logits), `partial` (the rest does not fill a block), `window`.
    """

    request_id: str
    block_index: int
    cause: str
    evicted_step: int = -1
    evicted_by: str = ""


class Admitted(Event):
    """A request got a seat.

    `resumed`: it had been preempted. Its first `num_cached_tokens` tokens need no computing.
    """

    request_id: str
    resumed: bool
    num_cached_tokens: int
    num_waiting_steps: int
    seat: int


class Forked(Event):
    """The request's prompt is computed: its other sequences have come to life, seated behind it, and share
    the blocks that hold the prompt's `num_tokens` tokens.
    """

    request_id: str
    child_ids: list[str]
    block_ids: list[int]
    num_tokens: int


class Copied(Event):
    """Copy-on-write: the request is about to write into block `src`, which others hold too, so place `place`
    of its table is block `dst` from now on, a copy.
    """

    request_id: str
    src: int
    dst: int
    place: int


class Evicted(Event):
    """A cached block nobody used was given to `by`; its content can no longer be found.

    `owner` held it last, `idle_steps` ago.
    """

    block_id: int
    owner: str
    by: str
    idle_steps: int


class Allocated(Event):
    """Blocks added to the end of the request's table."""

    request_id: str
    block_ids: list[int]


class Shared(Event):
    """Cached blocks put at the front of the request's table by a prefix hit; reference counts went up by one.

    Block 0 (null) is skipped.
    """

    request_id: str
    block_ids: list[int]


class Scheduled(Event):
    """The request takes `num_tokens` tokens of this step, from position `start`.

    `cap` says what held the chunk below `wanted`: `budget`, `threshold` (long_prefill_token_threshold),
    `max_model_len`, or '' (nothing). `padding`: the row is computed but its output discarded (static-padded).
    The last `num_draft` tokens are drafts to be checked; with `draft_padding` they stand for nothing, the row
    is only made as long as the others (vLLM).
    """

    request_id: str
    start: int
    num_tokens: int
    num_draft: int = 0
    wanted: int = 0
    cap: str = ""
    padding: bool = False
    draft_padding: bool = False


class Skipped(Event):
    """A running request got no token in this step.

    `reason`: `budget` (used up), `blocks` (a preemption in this step ended the round), `prefill-step` (a step
    of prefills under a prefill-first discipline), `max_model_len`, `beams` (it waits for the other beams of
    its request).
    """

    request_id: str
    reason: str


class Preempted(Event):
    """`request_id` lost its blocks so that `for_id` could go on; it will recompute `num_tokens_lost` tokens,
    less what is still cached.

    With `preemption_mode=swap`, no tokens are lost and `SwappedOut` follows. If `host_need` > `host_have`,
    the host had too few free blocks and the request is recomputed. `ranking`: all candidates, first to lose
    first, as [request id, rank as text]; `rule` names the victim rule. `position`: place in the queue.
    """

    request_id: str
    for_id: str
    rule: str
    num_tokens_lost: int
    block_ids: list[int]
    ranking: list[tuple[str, str]]
    position: int
    need: int
    have: int
    host_need: int = 0
    host_have: int = 0


class SwappedOut(Event):
    """The preempted request's `num_tokens` computed tokens go to the host: `block_ids` (its places
    `first_index` on; before them the window has left) are copied to `host_block_ids` before anybody writes
    them. It comes back when as many blocks are free at once.
    """

    request_id: str
    block_ids: list[int]
    host_block_ids: list[int]
    num_tokens: int
    first_index: int = 0


class SwappedIn(Event):
    """The request is back: `host_block_ids` are copied to `block_ids` before anybody reads them. The first
    `num_kept` of its blocks on the host are not copied: the prefix cache still had them. All its host blocks
    are free.
    """

    request_id: str
    block_ids: list[int]
    host_block_ids: list[int]
    num_kept: int = 0


class HostFreed(Event):
    """The request ended while it was swapped out: its host blocks are free."""

    request_id: str
    host_block_ids: list[int]


class Unscheduled(Event):
    """A request already scheduled in this step was preempted: its chunk is taken back (priority preemption)."""

    request_id: str


class OutOfWindow(Event):
    """Blocks left of the sliding window were given back; their places in the table are 0 (the null block)
    now.
    """

    request_id: str
    block_ids: list[int]
    first_index: int


class Executed(Event):
    """The forward pass ran: what stands before was decided by schedule(), what follows by update()."""


class BlockCached(Event):
    """A block is full and can be found by its hash from now on."""

    request_id: str
    block_id: int
    hash: str


class Sampled(Event):
    """The request got these tokens.

    `num_rejected` of its drafts were thrown away: the model chose other tokens, or the request had ended
    before them.

    `num_past_end` of the rejected are drafts of the second kind: the model chose them too, but the request
    ended at a token before them.
    """

    request_id: str
    token_ids: list[int]
    num_rejected: int = 0
    num_past_end: int = 0


class Scored(Event):
    """A beam has its candidates: its best next tokens, best first, and their log-probabilities.

    It idles until its siblings have theirs.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]


class BeamStep(Event):
    """Beam search chose: beam i (`beam_ids[i]`) goes on from beam `parents[i]` with `token_ids[i]`; `scores`
    are the log-probabilities of all its output so far.

    A beam that is nobody's parent was dropped: it gave back its blocks and shares its parent's. `num_done`:
    finished hypotheses kept.
    """

    request_id: str
    beam_ids: list[str]
    parents: list[int]
    token_ids: list[int]
    scores: list[float]
    num_done: int = 0


class BeamsEnded(Event):
    """Beam search is over: `outputs` are its hypotheses, best first, `scores` their log-probabilities /
    length ** length_penalty. Hypothesis i is the output of beam i.
    """

    request_id: str
    beam_ids: list[str]
    outputs: list[list[int]]
    scores: list[float]


class Proposed(Event):
    """`token_ids` are drafts of what the request will say next, from proposer `by`; the next step that
    schedules the request checks them.
    """

    request_id: str
    token_ids: list[int]
    by: str = ""


class Finished(Event):
    """`reason`: `length` (max_tokens), `stop` (end of sequence or a stop id, in `stop_id`), `max_model_len`,
    `abort`, `timeout` (timeout_s after its arrival), `deadline` (deadline_s passed), `shed` (waited
    shed_after_s without ever running).
    """

    request_id: str
    reason: str
    stop_id: int = -1


class SeatHeld(Event):
    """Static batching: the request is finished, but its seat (`position` in the running order) stays taken
    until the batch ends.
    """

    request_id: str
    position: int


class SeatsFreed(Event):
    """Static batching: the batch ended and its seats are free."""

    request_ids: list[str]


class Freed(Event):
    """The request's references to these blocks were dropped, in this order.

    A block whose count reaches 0 is free; with a hash it stays findable.
    """

    request_id: str
    block_ids: list[int]


AnyEvent = (
    Arrived
    | Resized
    | Starving
    | Refused
    | Configured
    | Reordered
    | NotAdmitted
    | PrefixHit
    | PrefixMiss
    | Admitted
    | Evicted
    | Allocated
    | Shared
    | Scheduled
    | Preempted
    | SwappedOut
    | SwappedIn
    | HostFreed
    | Forked
    | Copied
    | Skipped
    | Unscheduled
    | OutOfWindow
    | Executed
    | BlockCached
    | Sampled
    | Scored
    | BeamStep
    | BeamsEnded
    | Proposed
    | Finished
    | SeatHeld
    | SeatsFreed
    | Freed
)
