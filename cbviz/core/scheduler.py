"""The scheduler: two queues, one pool, one budget; who computes what in the next step, and why.

Owns the queues and all requests. Knows no clock (times are given), no tensors, no costs, no trace: it appends
events to its journal and whoever steps it drains them. Disciplines (`config.Discipline`) are rows of a table;
`schedule` reads the row, it has no modes of its own. The `vllm` row does step for step what vLLM 0.32's v1
scheduler does.

    waiting --admit--> running --finish--> gone
       ^                  |
       +-----preempt------+          (recompute: num_computed_tokens = 0, outputs kept; swap: it stays, the blocks wait on the host)

`schedule` and `deliver` note how to undo what they did; `rollback` leaves the state as it was before the
step.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any

from cbviz import events as ev
from cbviz.config import ConfigError, EngineConfig
from cbviz.core import beam
from cbviz.core.block_pool import NULL_BLOCK, BlockPool, ids_of
from cbviz.core.groups import fork, seats_to_come, spec_of
from cbviz.core.kv_manager import KVManager
from cbviz.core.overtaken import Overtaken
from cbviz.core.policy import (
    POLICIES,
    Fcfs,
    Policy,
    PolicyError,
    admits,
    check_victim,
    get_policy,
    rank_of,
    ranks_of,
)
from cbviz.core.request import Request, Status
from cbviz.core.session_ranks import SessionRank, members_of, plain_rank, same_order, session_of
from cbviz.core.speculative import PROPOSERS, drafts_for, get_proposer
from cbviz.core.swap import HostPool, restored_prefix, swap_in, swap_out
from cbviz.events import AnyEvent
from cbviz.messages import (
    Chunk,
    ChunkRecord,
    Drafting,
    RequestSpec,
    RunnerOutput,
    SchedulerOutput,
    SlotAccount,
    TokenAccount,
    sequence_ids,
)

_SAVED = (
    "status",
    "num_computed_tokens",
    "num_cached_tokens",
    "num_preemptions",
    "max_computed",
    "num_null_blocks",
    "num_cached_blocks",
    "last_wait",
    "queued_step",
    "seat_held",
    "finish_reason",
    "rank",
    "overtaken_before",
    "is_prefill_chunk",
    "host_block_ids",
    "num_forks",
    "shares_tail",
    "candidates",
)
NO_DRAFT = -1
"""Stands in a plan for a draft that is none: computed, and never right."""
INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO = INIT_NEW_TOKEN_RATIO * 0.14
NEW_TOKEN_RATIO_DECAY = (INIT_NEW_TOKEN_RATIO - MIN_NEW_TOKEN_RATIO) / 600
RETRACT_DECODE_STEPS = 20
"""SGLang's defaults for `reserve="estimate"`: the share starts at 0.7 (and again whenever nothing is left to
do), falls to 0.14 of that in 600 decode steps, and after a retraction it is what the others have decoded and
20 steps more, of their max_tokens. Left out: after a refusal SGLang asks no more until a request has gone;
here the head is asked in every step.
"""
MOST_EXPECTED_TOKENS = 4096
"""Of one request's open max_tokens, the estimate counts no more than these (SGLang's CLIP_MAX_NEW_TOKENS)."""


DIGEST_FORM = 2
"""What a digest covers.

Form 1 (recorded by earlier versions) leaves out the order of the requests, on which the order of time-outs
depends.
"""


class RunnerOutputError(RuntimeError):
    """A runner broke its contract: a sampling chunk got no token, or more than its drafts allow.

    Nothing was changed.
    """


class Scheduler:
    """Continuous batching over a paged pool. `config` must be resolved (`EngineConfig.resolve`)."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        eos_token_ids: Iterable[int] = (),
        use_output_len: bool = False,
        keep_planned_hashes: bool = False,
    ) -> None:
        """`keep_planned_hashes`: a request taken out of a step leaves the hashes of the blocks it would have
        filled, as vLLM 0.32 does. These blocks can then be hit though nothing was ever computed into them: a
        fault of vLLM's, for replaying its recordings, never for running a model. So is waiting for ever where
        padding drafts alone pass the budget, which is kept then too.
        """
        if config.max_model_len is None or config.max_num_batched_tokens is None:
            raise ValueError(
                "the scheduler needs a resolved config: call EngineConfig.resolve(model_context) first"
            )
        self.journal: list[AnyEvent] = []
        self.pool = BlockPool(
            config.num_blocks, config.enable_prefix_caching and config.kv_allocation == "paged"
        )
        self.kv = KVManager(
            self.pool,
            config.block_size,
            config.max_model_len,
            self.journal,
            config.sliding_window,
            config.contiguous_fit if config.kv_allocation == "contiguous" else "",
            config.attention_sinks,
        )
        self.undo: list[tuple[Callable[..., Any], tuple[Any, ...]]] = self.pool.undo
        self.host = HostPool(config.swap_blocks, self.pool.undo)
        self.max_model_len = config.max_model_len
        self.block_size = config.block_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.use_output_len = use_output_len
        self.keep_planned_hashes = keep_planned_hashes
        self.requests: dict[str, Request] = {}
        """All unfinished requests (and finished ones that still hold a seat)."""
        self.waiting: list[Request] = []
        """In the order in which they will be asked: by (rank, arrival)."""
        self.running: list[Request] = []
        self.overtaken = Overtaken(self.undo)
        self.step = 0
        """Steps scheduled so far."""
        self.has_groups = False
        """Some request has had several sequences (`Sampling.n`)."""
        self.most_sequences = 1
        """Most sequences that a request has had."""
        self.num_arrived = 0
        self.num_finished = 0
        self.finished_ids: list[str] = []
        """Ended since the last plan; the next plan tells the runner."""
        self.chunk_records: list[ChunkRecord] = []
        self.tokens = TokenAccount()
        self.slots = SlotAccount()
        self.new_token_ratio = INIT_NEW_TOKEN_RATIO
        """Share of the max_tokens still open that each running request is expected to use
        (`reserve="estimate"`).
        """
        self.served: dict[str, int] = {}
        """Tokens computed for each session so far; '' stands for all requests without one."""
        self.routed: dict[str, list[list[int]]] = {}
        """Of a mixture: how often the tokens of each session (of a request without one: its own) took each
        expert, [sparse layer][expert]; fed by the runner.
        """
        self.batch_open = False
        """Static batching: the budget cut the batch short, so its admission goes on in the next step."""
        self._shares: list[Request] = []
        self._num_preempted = 0
        self._prefill_ran = False
        """A running request that was in its prefill has tokens in this step."""
        self._queues_saved = False
        self._ranked_by: Policy | None = None
        """The policy whose ranks the queue is sorted by; None: unknown."""
        self._session_ranks: dict[str, SessionRank] = {}
        """Under a policy that ranks sessions: the ranks that the waiting requests share, by session."""
        self._ranked_now = False
        """The ranks are those of this step."""
        self._requests_saved = False
        self._tokens_waiting: int | None = None
        """Tokens of the waiting queue while requests arrive; None: to be counted."""
        self._next_end_s: float | None = None
        """Nobody's time is up before this moment; None: to be looked up."""
        self._begun: tuple[Any, ...] = ()
        self.rules = config.rules
        self.configure(config)

    # inputs between steps -----------------------------------------------------------------------------------

    def configure(self, config: EngineConfig) -> None:
        """Takes a changed config; it holds from the next admission on, running requests keep their blocks and
        seats.
        """
        check_victim(config.victim)
        self.policy: Policy = get_policy(config.policy)
        rules = config.rules
        if rules.when_full != self.rules.when_full:
            self._ranked_by = None  # preempted requests stand elsewhere in the queue now
        self.proposer = get_proposer(config.speculative)
        self.num_lookahead = config.num_lookahead_tokens
        self._drafting = (
            Drafting(
                config.speculative,
                config.num_speculative_tokens,
                config.draft_layers,
                config.draft_acceptance,
            )
            if self.proposer is not None
            else None
        )
        self.config = config
        self.rules = rules
        self._ranked_now = False
        self._next_end_s = None

    def resize(self, num_blocks: int) -> None:
        """Another pool size, between steps.

        Raises ConfigError, with the figures, if what is under way does not fit.
        """
        new = self.config.replace(num_blocks=num_blocks)
        if beams := [beam.blocks_at_most(r.spec, new) for r in self.requests.values() if r.is_beam]:
            if num_blocks - 1 < max(beams):
                raise ConfigError(
                    f"num_blocks is {num_blocks}, but the beams of a request may need {max(beams)} after "
                    f"step {self.step}: the least is {max(beams) + 1}"
                )
        largest = max(self.requests.values(), key=lambda r: r.num_prompt_tokens + r.max_tokens, default=None)
        need = (
            self.kv.blocks_for(largest.num_prompt_tokens + largest.max_tokens + self.config.num_draft_slots)
            if largest is not None
            else 0
        )
        used = self.pool.num_blocks - 1 - self.pool.num_free
        if largest is not None and num_blocks - 1 < max(need, used):
            why = f"{largest.request_id} may need {need}" if need >= used else f"{used} are in use"
            raise ConfigError(
                f"num_blocks is {num_blocks}, which leaves {num_blocks - 1} to give out after step "
                f"{self.step}, but {why}: the least is {max(need, used) + 1}"
            )
        if self.kv.contiguous and (
            beyond := [b for b in range(num_blocks, self.pool.num_blocks) if self.pool.ref_count[b]]
        ):
            raise ConfigError(
                f"num_blocks is {num_blocks}, but block {beyond[-1]} is in use after step {self.step} and "
                f"a contiguous run can't move: the least is {beyond[-1] + 1}"
            )
        self.pool.step = self.step + 1  # it belongs to the step that comes
        moved, dropped = self.pool.resize(num_blocks)
        to = dict(moved)
        for r in self.requests.values():
            r.block_ids[:] = [to.get(b, b) for b in r.block_ids]
        self.journal.append(ev.Configured("num_blocks", str(self.config.num_blocks), str(num_blocks)))
        self.journal.append(ev.Resized(num_blocks, moved, dropped))
        self.configure(new)

    def add(self, spec: RequestSpec, now_s: float = 0.0, leaving: bool = False) -> Request | None:
        """Puts a request into the waiting queue; None if the queue is full.

        The caller has checked that it can be served at all.

        `leaving`: it was aborted meanwhile, so it ends at once and no policy is asked where it would stand.
        """
        if spec.request_id in self.requests:
            raise ValueError(f"request id {spec.request_id!r} is in use")
        if full := self._queue_full(spec):
            self.journal.append(ev.Refused(spec.request_id, full))
            return None
        r = Request(spec, self.num_arrived, self.eos_token_ids, self.step + 1, self.use_output_len)
        r.surroundings = self
        if spec.arrival_step is not None:
            r.arrival_s = now_s
        if not (self._ranked_now or leaving):
            self._rank_waiting(
                now_s
            )  # so that its place follows from the queue as it is now, not from ranks of another step
        self.undo.append((self._undo_add, (r,)))
        self._save_queues()
        self.num_arrived += 1
        self.requests[r.request_id] = r
        self.note_group(r)
        if leaving:
            self.waiting.append(r)
            self.overtaken.join(r)
        position = len(self.waiting) - 1 if leaving else self._enqueue(r, now_s)
        if self._tokens_waiting is not None:
            self._tokens_waiting += r.num_tokens
        if self._next_end_s is not None:
            self._next_end_s = min(self._next_end_s, self._end_of(r)[0])
        self.journal.append(
            ev.Arrived(r.request_id, position, r.num_prompt_tokens, r.max_tokens, r.arrival_s, r.priority)
        )
        if leaving:
            self.abort(r.request_id)
        return r

    def note_group(self, r: Request) -> None:
        """Remembers that a request has, or is one of, several sequences."""
        if r.num_forks or r.spec.parent is not None:
            self.has_groups = True
            self.most_sequences = max(self.most_sequences, r.num_forks + 1, r.index + 1)

    def times_overtaken(self, r: Request) -> int:
        return self.overtaken.count(r)

    def _queue_full(self, spec: RequestSpec) -> str:
        c = self.config
        if c.max_waiting_requests and len(self.waiting) >= c.max_waiting_requests:
            return (
                f"the queue is full: {len(self.waiting)} requests wait, max_waiting_requests is "
                f"{c.max_waiting_requests}"
            )
        if c.max_waiting_tokens:
            if self._tokens_waiting is None:
                self._tokens_waiting = sum(r.num_tokens for r in self.waiting)
            tokens = self._tokens_waiting
            if tokens + len(spec.prompt_token_ids) > c.max_waiting_tokens:
                return (
                    f"the queue is full: {tokens} tokens wait, with these {len(spec.prompt_token_ids)} "
                    f"they pass max_waiting_tokens, {c.max_waiting_tokens}"
                )
        return ""

    def _undo_add(self, r: Request) -> None:
        self.num_arrived -= 1
        self.requests.pop(
            r.request_id,
            None,
            # gone already if it was aborted in the same step; what `_save_requests` kept is still to be put
            # back
        )

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """Ends an unfinished request in any state, and the sequences forked from it; blocks come back at
        once. False if there is nothing to end.
        """
        r = self.requests.get(request_id)
        if r is not None and r.is_beam:  # one beam is nothing without the others
            request_id = r.spec.parent or request_id
        done = self._abort(request_id, reason)
        for i in range(1, self.most_sequences):
            child = self.requests.get(f"{request_id}.{i}")
            if child is not None and child.spec.parent == request_id:
                done = self._abort(child.request_id, reason) or done
        return done

    def _abort(self, request_id: str, reason: str) -> bool:
        r = self.requests.get(request_id)
        if r is None or r.status is Status.FINISHED:
            return False
        self._save(r)
        self._save_queues()
        self._save_requests()
        if r.status is Status.RUNNING:
            self.running.remove(r)
        else:
            del self.waiting[self._place_of(r)]
            self.overtaken.leave(r)
            if self._tokens_waiting is not None:
                self._tokens_waiting -= r.num_tokens
        self.undo.append((self._undo_end, (self.batch_open,)))
        self._end(r, reason, -1)
        self._close_batch()
        return True

    def _undo_end(self, batch_open: bool) -> None:
        self.num_finished -= 1
        self.batch_open = batch_open

    # undo ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts a step: what follows, up to `update`, can be taken back by `rollback`."""
        self.undo.clear()
        self.pool.step = self.step + 1
        self.overtaken.tidy()
        self._queues_saved = self._requests_saved = False
        self._ranked_now = False
        self._tokens_waiting = None
        self._begun = (
            len(self.journal),
            len(self.finished_ids),
            self.finished_ids,
            self.batch_open,
            self.step,
            self.new_token_ratio,
            self.config,
            self.rules,
            self.policy,
            self._ranked_by,
            self.proposer,
            self.num_lookahead,
            self._drafting,
        )
        # Their cells may have been run again. One that is gone stays in force: the input that replaces it
        # must get through.
        self.policy = POLICIES.get(self.config.policy, self.policy)
        self.proposer = PROPOSERS.get(self.config.speculative, self.proposer)

    def rollback(self) -> None:
        """Takes back everything since `begin`."""
        self.pool.rollback()
        (
            length,
            num_finished,
            self.finished_ids,
            self.batch_open,
            self.step,
            self.new_token_ratio,
            self.config,
            self.rules,
            self.policy,
            self._ranked_by,
            self.proposer,
            self.num_lookahead,
            self._drafting,
        ) = self._begun
        del self.journal[length:]
        del self.finished_ids[num_finished:]
        self.pool.step = self.step
        self._shares = []
        self._queues_saved = self._requests_saved = self._ranked_now = False
        self._tokens_waiting = self._next_end_s = None

    def _save(self, r: Request) -> None:
        self.undo.append(
            (
                _restore_fields,
                (r, [getattr(r, f) for f in _SAVED], r.block_ids, len(r.block_ids), r.draft_token_ids),
            )
        )

    def _save_queues(self) -> None:
        if not self._queues_saved:
            self._queues_saved = True
            self.undo.append((self._restore_queues, (self.waiting.copy(), self.running.copy())))

    def _save_requests(self) -> None:
        """Keeps all requests in their order, before the first of them leaves: put back one by one they would
        stand in another.
        """
        if not self._requests_saved:
            self._requests_saved = True
            self.undo.append((self._restore_requests, (self.requests.copy(),)))

    def _restore_requests(self, requests: dict[str, Request]) -> None:
        self.requests = requests

    def _restore_queues(self, waiting: list[Request], running: list[Request]) -> None:
        self.waiting[:] = waiting
        self.running[:] = running

    # the waiting queue --------------------------------------------------------------------------------------

    def _queue_key(self, r: Request) -> tuple[Any, ...]:
        """Among equal ranks the first to arrive goes first, then the first sequence of a request: no two are
        equal, so the order is the same however they came here.

        A retracted request has joined the queue anew, behind those that arrived in that step.
        """
        if self.rules.when_full == "retract":
            return plain_rank(r.rank), r.queued_step, r.status is Status.PREEMPTED, r.seq, r.index
        return plain_rank(r.rank), r.seq, r.index

    def _enqueue(self, r: Request, now_s: float) -> int:
        r.rank = rank_of(self.policy, self._ranked_as(r), now_s)
        if self.policy.ranks_sessions:
            shared = self._session_ranks.setdefault(session_of(r), SessionRank(r, r.rank))
            if shared.value == r.rank:
                r.rank = shared
            else:  # added between two steps: the next one ranks everybody anew
                self._ranked_by = None
        try:
            key = self._queue_key(r)
            last = not self.waiting or not key < self._queue_key(self.waiting[-1])
            place = len(self.waiting) if last else bisect_right(self.waiting, key, key=self._queue_key)
        except TypeError as e:
            raise PolicyError(
                f"policy {self.policy.name}: the rank {plain_rank(r.rank)!r} of request {r.request_id} doesn't compare "
                f"with the others' ({e})"
            ) from None
        self.waiting.insert(place, r)
        self.overtaken.join(r)
        return place

    def _place_of(self, r: Request) -> int:
        """Place of a waiting request in the queue: by its rank, else by looking through it."""
        try:
            place = bisect_left(self.waiting, self._queue_key(r), key=self._queue_key)
        except Exception:  # ranks of two policies, before the queue is ranked again
            place = len(self.waiting)
        if place < len(self.waiting) and self.waiting[place] is r:
            return place
        return self.waiting.index(r)

    def _ranked_as(self, r: Request) -> Request:
        """Beams of one request stand side by side in the queue, as their sequence 0 ranks: so the search
        whose beam is its head is never behind one that it waits for.
        """
        return beam.root_of(self, r) if r.is_beam else r

    def _rank_waiting(self, now_s: float) -> None:
        """Ranks the queue again where the ranks may have changed, and says so if the order did."""
        p = self.policy
        self._ranked_now = True
        if (p.static and self._ranked_by is p) or not self.waiting:
            if self._session_ranks:
                self._keep_session_ranks({})
            self._ranked_by = p
            return
        if p.ranks_sessions:
            if self._rank_sessions(p, now_s):
                return
        else:
            asked = [self._ranked_as(r) for r in self.waiting] if self.has_groups else self.waiting
            for r, rank in zip(self.waiting, ranks_of(p, asked, now_s), strict=True):
                if rank != r.rank:
                    self.undo.append((_set_rank, (r, r.rank)))
                    r.rank = rank
        try:
            order = sorted(self.waiting, key=self._queue_key)
        except TypeError as e:
            raise PolicyError(f"policy {p.name}: its ranks don't compare with each other ({e})") from None
        if order != self.waiting:
            self._save_queues()
            self.waiting[:] = order
            self.journal.append(ev.Reordered([r.request_id for r in order]))
        self._ranked_by = p

    def _rank_sessions(self, p: Policy, now_s: float) -> bool:
        """Ranks the sessions that wait. True if the order of the queue stays as it is."""
        known = self._session_ranks
        if self._ranked_by is p and known:
            before = [x.value for x in known.values()]
            after = [rank_of(p, x.member, now_s) for x in known.values()]
            for x, rank in zip(known.values(), after, strict=True):
                self.undo.append((_set_value, (x, x.value)))
                x.value = rank
            if same_order(before, after):
                return True
        ranks = {}
        for name, member in members_of(self.waiting).items():
            x = known.get(name) or SessionRank(member, None)
            self.undo.append((_set_value, (x, x.value)))
            x.value = rank_of(p, member, now_s)
            ranks[name] = x
        self._keep_session_ranks(ranks)
        for r in self.waiting:
            if r.rank is not (shared := ranks[session_of(r)]):
                self.undo.append((_set_rank, (r, r.rank)))
                r.rank = shared
        return False

    def _keep_session_ranks(self, ranks: dict[str, SessionRank]) -> None:
        self.undo.append((self._restore_session_ranks, (self._session_ranks,)))
        self._session_ranks = ranks

    def _restore_session_ranks(self, ranks: dict[str, SessionRank]) -> None:
        self._session_ranks = ranks

    # schedule -----------------------------------------------------------------------------------------------

    def schedule(self, now_s: float = 0.0) -> SchedulerOutput:
        """Decides the next step. Raises PolicyError (the state is then as `rollback` leaves it)."""
        self.step += 1
        self.pool.step = self.step
        plan = SchedulerOutput(self.step, self.block_size)
        plan.finished_ids, self.finished_ids = self.finished_ids, []
        self.chunk_records = []
        self.kv.copies = []
        self._shares = []
        self._num_preempted = 0
        self._prefill_ran = False
        plan.drafting = self._drafting
        self._budget = self.config.max_num_batched_tokens or 0
        self._now = now_s
        self._close_batch(force=not self.rules.hold_seat)
        self._expire(now_s)
        self._rank_waiting(now_s)
        if self.rules.mix == "prefill-first":
            half_done = [r for r in self.running if _is_prefill(r) and not r.seat_held]
            if half_done:
                self._run(plan, half_done)
            self._admit(plan)
            if plan.chunks:
                self.journal.extend(
                    ev.Skipped(r.request_id, "prefill-step")
                    for r in self.running
                    if not r.seat_held and r not in self._shares
                )
            else:  # also where every half-done prefill has just lost its blocks: somebody must get on
                if self.rules.when_full == "retract":
                    self._retract(plan)
                self._run(plan, self.running)
                if self.rules.pad:
                    self._pad(plan)
                self._adapt_ratio()
        else:
            order = self.running
            if self.rules.mix == "decode-first" and any(_is_prefill(r) for r in order):
                order = sorted(order, key=_is_prefill)
            self._run(plan, order)
            self._admit(plan)
        if self.has_groups and not plan.chunks and not self._num_preempted:
            self._unstall(plan)
        plan.copies = tuple(self.kv.copies)
        self._advance(plan)
        return plan

    def _unstall(self, plan: SchedulerOutput) -> None:
        """Beams that wait for a sibling hold blocks and seats.

        Where nobody else runs and the head of the queue lacks just these, those of another request give way.
        """
        while not plan.chunks and self.waiting:
            head = self.waiting[0]
            reason, need, have = head.last_wait or ("", 0, 0)
            idle = [
                r
                for r in self.running
                if r.candidates is not None and beam.root_of(self, r) is not beam.root_of(self, head)
            ]
            if not idle or reason not in ("seats", "blocks", "watermark"):
                return
            self._preempt(idle[-1], head, (need, have), plan, "idle-beam")
            self._num_preempted = 0
            self._admit(plan)

    def _expire(self, now_s: float) -> None:
        """Ends requests whose time is up, in order of arrival; their blocks come back before anything is
        decided.
        """
        if self._next_end_s is not None and now_s < self._next_end_s:
            return
        late: list[tuple[Request, str]] = []
        next_end = math.inf
        for r in self.requests.values():
            if r.status is Status.FINISHED:
                continue
            end_s, reason = self._end_of(r, now_s)
            if reason:
                late.append((r, reason))
            else:
                next_end = min(next_end, end_s)
        self._next_end_s = next_end
        for r, reason in late:
            self.abort(r.request_id, reason)

    def _end_of(self, r: Request, now_s: float = -math.inf) -> tuple[float, str]:
        """A moment before which the request's time is not up (inf: it never is), and why its time is up at
        `now_s` ('': it is not).
        """
        timeout, shed, deadline = self.config.timeout_s, self.config.shed_after_s, r.spec.deadline_s
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
        return (
            end_s - 1e-9 * (1 + abs(end_s)) if end_s < math.inf else end_s,
            "",
        )  # a little early: `now - arrival` is rounded otherwise than `arrival + wait`

    def _adapt_ratio(self) -> None:
        """SGLang's estimate after a decode step: a little lower each time; after a retraction, from what
        those that stay have decoded.
        """
        if self.rules.reserve != "estimate":
            return
        if self._num_preempted:
            rows = [r for r in self.running if not r.seat_held]
            decoded = sum(r.num_output_tokens for r in rows)
            self.new_token_ratio = min(
                1.0, (decoded + RETRACT_DECODE_STEPS * len(rows)) / (sum(r.max_tokens for r in rows) + 1)
            )
        else:
            self.new_token_ratio = max(MIN_NEW_TOKEN_RATIO, self.new_token_ratio - NEW_TOKEN_RATIO_DECAY)

    def _run(self, plan: SchedulerOutput, order: list[Request]) -> None:
        """Gives running requests their tokens, in the given order, preempting when blocks run out."""
        running = self.running
        kv, bs, limit = self.kv, self.kv.block_size, self.max_model_len - 1
        threshold = self.config.long_prefill_token_threshold
        if len(running) + len(self.waiting) == 1:
            threshold = 0
        windowed, caching, ahead, drafting = (
            kv.sliding_window > 0,
            self.pool.enable_caching,
            self.num_lookahead,
            self.proposer is not None,
        )
        i = 0
        while i < len(order) and self._budget > 0:
            r = order[i]
            if r.seat_held:
                i += 1
                continue
            if r.candidates is not None:
                self.journal.append(ev.Skipped(r.request_id, "beams"))
                i += 1
                continue
            start = r.num_computed_tokens
            n = len(r.token_ids) - start
            if drafting:
                n += len(r.draft_token_ids)
            wanted = n
            cap = ""
            if 0 < threshold < n:
                n, cap = threshold, "threshold"
            if n > self._budget:
                n, cap = self._budget, "budget"
            if n > limit - start:
                n, cap = limit - start, "max_model_len"
            if n <= 0:
                self.journal.append(ev.Skipped(r.request_id, "max_model_len"))
                i += 1
                continue
            end = start + n
            if (
                windowed
                or r.shares_tail
                or end + ahead > len(r.block_ids) * bs
                or (caching and end // bs > r.num_cached_blocks)
            ):
                short = kv.allocate(r, n, num_lookahead=ahead)
                while short is not None:
                    victim = self._victim()
                    place = order.index(victim) if victim in order else len(order)
                    self._preempt(victim, r, short, plan)
                    if order is not running:
                        del order[place : place + 1]
                    if place < i:
                        i -= 1
                    if victim is r:
                        self.journal.extend(
                            ev.Skipped(x.request_id, "blocks") for x in order[i:] if not x.seat_held
                        )
                        return
                    short = kv.allocate(r, n, num_lookahead=ahead)
            if r.is_prefill_chunk:
                self._prefill_ran = True
            self._share(r, n, wanted, cap, plan)
            i += 1
        self.journal.extend(ev.Skipped(r.request_id, "budget") for r in order[i:] if not r.seat_held)

    def _pad(self, plan: SchedulerOutput) -> None:
        """static-padded: finished rows run along in their seats, with what the live rows have left of the
        budget: padding never keeps anybody from a token.
        """
        row = 0
        for r in self.running:
            if r.seat_held and self._budget > 0:
                self._pad_row(r, plan, row)
            row += row < len(self._shares) and self._shares[row] is r

    def _share(
        self, r: Request, n: int, wanted: int, cap: str, plan: SchedulerOutput, padding: bool = False
    ) -> None:
        """Puts `n` tokens of the request into the plan: known ones, then as many of its drafts as fit.

        `padding`: drafts that stand for nothing.
        """
        start = r.num_computed_tokens
        known = len(r.token_ids)
        sample = start + n >= known
        num_draft, drafts = start + n - known if sample else 0, r.draft_token_ids
        if drafts:
            self.undo.append((_set_drafts, (r, drafts)))
            r.draft_token_ids = []  # those cut off are forgotten too
        chunk = Chunk(r.request_id, start, n, r.token_ids, r.block_ids, sample, r.sampling)
        if num_draft:
            chunk.num_draft, chunk.draft_token_ids = (
                num_draft,
                [NO_DRAFT] * num_draft if padding else drafts[:num_draft],
            )
        if r.is_beam:
            chunk.num_candidates = beam.num_candidates(r.sampling, r.stop_ids) if sample else 0
        elif r.num_forks and sample:
            chunk.fork_ids = sequence_ids(r.spec)[1:]
        plan.chunks.append(chunk)
        self._shares.append(r)
        self._budget -= n
        again = min(start + n, r.max_computed) - start if start < r.max_computed else 0
        decode = start == known - 1 and known > r.num_prompt_tokens
        self.chunk_records.append(
            ChunkRecord(r.request_id, start, n, "decode" if decode else "prefill", num_draft, sample, again)
        )
        self.journal.append(ev.Scheduled(r.request_id, start, n, num_draft, wanted, cap, False, padding))

    def _pad_row(self, r: Request, plan: SchedulerOutput, place: int) -> None:
        """Computes the row's last position again, into its own slot; the output is thrown away.

        `place`: its row in the plan.
        """
        start = max(0, r.num_computed_tokens - 1)
        plan.chunks.insert(place, Chunk(r.request_id, start, 1, r.token_ids, r.block_ids, False, r.sampling))
        self._shares.insert(place, r)
        self._budget -= 1
        self.chunk_records.insert(place, ChunkRecord(r.request_id, start, 1, "decode", padding=True))
        self.journal.append(ev.Scheduled(r.request_id, start, 1, wanted=1, padding=True))

    # preemption ---------------------------------------------------------------------------------------------

    def _retract(self, plan: SchedulerOutput) -> None:
        """Before a decode step: victims lose their blocks until all others can take one token each.

        One always stays.
        """
        kv = self.kv
        while True:
            rows = [r for r in self.running if not r.seat_held and not _is_prefill(r)]
            missing = [
                (
                    r,
                    kv.blocks_for(r.num_computed_tokens + 1 + len(r.draft_token_ids) + self.num_lookahead)
                    - len(r.block_ids),
                )
                for r in rows
            ]
            short_of = [r for r, n in missing if n > 0]
            need = sum(n for _, n in missing if n > 0)
            # what a sliding window is about to give back is not counted: at worst one more is retracted than
            # had to be
            if need <= self.pool.num_free or len(rows) < 2:
                return
            victim = next(r for _, r in self._candidates() if r in rows)
            for_r = next((r for r in short_of if r is not victim), victim)
            self._preempt(victim, for_r, (need, self.pool.num_free), plan)

    @property
    def victim_rule(self) -> str:
        rule = self.rules.victim
        return self.policy.victim if rule == "policy" else rule

    def _candidates(self) -> list[tuple[Any, Request]]:
        """Who could lose its blocks, first to lose first, with what they were ranked by.

        The order is total. Sequences of one request tie in all that a rule looks at: then the last in the
        running order loses first, as under `last`. If the first lost instead, it would come back behind its
        sibling and take the blocks from that one, and so on for ever.
        """
        rule = self.victim_rule
        last_first = [r for r in reversed(self.running) if not r.seat_held]
        if rule == "last":
            return [(len(last_first) - 1 - i, r) for i, r in enumerate(last_first)]
        if rule == "rank":
            keyed = [((rank_of(self.policy, r, self._now), r.seq), r) for r in last_first]
            try:
                return sorted(keyed, key=_first, reverse=True)
            except TypeError as e:
                raise PolicyError(
                    f"policy {self.policy.name}: its ranks of running requests don't compare with each "
                    f"other ({e})"
                ) from None
        if rule == "lowest-priority":
            return sorted((((r.priority, r.seq), r) for r in last_first), key=_first, reverse=True)
        if rule == "least-work-lost":
            return sorted((((r.num_computed_tokens, -r.seq), r) for r in last_first), key=_first)
        return sorted(
            (((r.num_output_tokens, -r.num_prompt_tokens, -r.seq), r) for r in last_first), key=_first
        )

    def _victim(self) -> Request:
        return self._candidates()[0][1]

    def _preempt(
        self, victim: Request, for_r: Request, short: tuple[int, int], plan: SchedulerOutput, rule: str = ""
    ) -> None:
        ranking = [] if rule else [(r.request_id, _rank_text(rank)) for rank, r in self._candidates()]
        self._save(victim)
        self._save_queues()
        self.running.remove(victim)
        self._num_preempted += 1
        plan.preempted_ids.append(victim.request_id)
        if victim in self._shares:
            place = self._shares.index(victim)
            self._budget += plan.chunks[place].num_tokens
            del self._shares[place], plan.chunks[place], self.chunk_records[place]
            if not self.keep_planned_hashes:
                self.kv.uncache_planned(victim)
            self.journal.append(ev.Unscheduled(victim.request_id))
        lost = victim.num_computed_tokens
        victim.max_computed = max(victim.max_computed, lost)
        swapped, too_many = (
            swap_out(victim, self.kv, self.host, plan) if self.config.preemption_mode == "swap" else (None, 0)
        )
        if self.kv.copies:
            gone = set(victim.block_ids)
            self.kv.copies = [x for x in self.kv.copies if x[1] not in gone]
        ids = self.kv.free(victim)
        victim.num_computed_tokens = 0
        victim.shares_tail = False
        victim.candidates = None  # they come again with the blocks
        if swapped is not None:
            victim.num_computed_tokens, victim.num_null_blocks, victim.host_block_ids, lost = (
                lost,
                swapped.first_index,
                swapped.host_block_ids,
                0,
            )
        victim.num_preemptions += 1
        victim.draft_token_ids = []
        victim.status = Status.PREEMPTED
        victim.queued_step = self.step
        victim.last_wait = None
        position = self._enqueue(victim, self._now)
        self.journal.append(
            ev.Preempted(
                victim.request_id,
                for_r.request_id,
                rule or self.victim_rule,
                lost,
                ids,
                ranking,
                position,
                short[0],
                short[1],
                too_many,
                len(self.host.free) if too_many else 0,
            )
        )
        if swapped is not None:
            self.journal.append(swapped)

    # admission ----------------------------------------------------------------------------------------------

    def _admit(self, plan: SchedulerOutput) -> None:
        """Seats waiting requests, head first, until one can't be seated: nobody is overtaken."""
        rules, config, kv = self.rules, self.config, self.kv
        admitted = False
        running_ran = bool(plan.chunks)
        num_batch_class = 0
        if (
            config.degrade_above
        ):  # a beam that waits for its siblings doesn't count: it would keep them from coming back
            num_batch_class = sum(
                1 for r in self.running if r.priority > 0 and not r.seat_held and r.candidates is None
            )
        while self.waiting:
            place = self._next_in_line(num_batch_class)
            if place < 0:
                break
            r = self.waiting[place]
            if self._num_preempted:
                self._wait(r, "preempted", 0, self._num_preempted)
                break
            if rules.admit_when == "batch-empty" and self.running and not admitted and not self.batch_open:
                self._wait(r, "batch", 0, sum(1 for x in self.running if not x.seat_held))
                break
            if self._budget <= 0:
                self._wait(r, "budget", 1, 0)
                break
            if (
                len(self.running) + (seats_to_come(self.running) + r.num_forks if self.has_groups else 0)
                >= config.max_num_seqs
            ):
                self._wait(
                    r,
                    "seats",
                    1 + r.num_forks,
                    max(0, config.max_num_seqs - len(self.running) - seats_to_come(self.running))
                    if r.num_forks
                    else 0,
                )
                break
            if not admits(self.policy, r, self._now):
                self._wait(r, "policy", 0, 0)
                break
            hits = self.prefix_blocks(r)
            cached = max(len(hits) * kv.block_size, r.num_computed_tokens)  # what was swapped out comes back
            wanted = n = r.num_tokens - cached
            cap = ""
            threshold = config.long_prefill_token_threshold
            if len(self.running) + len(self.waiting) == 1:
                threshold = 0
            padding = (
                n == 1
                and not r.num_forks
                and rules.pad_drafts
                and self._pads_drafts(cached, running_ran, threshold)
            )
            if padding:
                wanted = n = 1 + config.num_speculative_tokens
                if n > self._budget:
                    self._wait(r, "budget", n, self._budget)
                    break
            if 0 < threshold < n:
                n, cap = threshold, "threshold"
            if n > self._budget:
                if not rules.chunked:
                    self._wait(r, "budget", n, self._budget)
                    break
                n, cap = self._budget, "budget"
            if (short := self._no_room(r, hits, n)) is not None:
                self._wait(r, *short)
                break
            self._seat(r, hits, cached, place)
            if r.host_block_ids:
                swap_in(r, kv, self.host, plan)
            reserve = (
                r.num_prompt_tokens + r.max_tokens + config.num_draft_slots
                if rules.reserve == "max-tokens"
                else 0
            )
            failed = kv.allocate(r, n, reserve, self.num_lookahead)
            assert failed is None, f"admission of {r.request_id} was checked, but {failed}"
            if not r.num_preemptions and (place or not isinstance(self._ranked_by, Fcfs)):
                self._note_overtaken(r)
            else:
                self.overtaken.leave(r)
            self._share(r, n, wanted, cap, plan, padding)
            admitted = True
        if rules.admit_when == "batch-empty":
            self.batch_open = (
                bool(self.waiting)
                and admitted
                and self.waiting[0].last_wait is not None
                and self.waiting[0].last_wait[0] == "budget"
            )
        if rules.pad and admitted:
            longest = max(
                c.num_tokens for c in plan.chunks
            )  # a row that was admitted before may be longer than those that join it
            plan.num_padding_tokens = sum(longest - c.num_tokens for c in plan.chunks)

    def _pads_drafts(self, cached: int, running_ran: bool, threshold: int) -> bool:
        """vLLM's rule: a request that joins with one token to compute while others decode is made as long as
        they are, so that the step fits a recorded graph.

        Not while a running request is in its prefill, not where max_model_len leaves no room; the first step
        of all needs a hit for it.
        """
        n = 1 + self.config.num_speculative_tokens
        if self.proposer is None or self._prefill_ran or not (running_ran or cached) or 0 < threshold < n:
            return False
        if (
            not self.running
            and n > (self.config.max_num_batched_tokens or 0)
            and not self.keep_planned_hashes
        ):
            return False  # vLLM 0.32 waits for a budget that never comes
        return cached + n + 1 <= self.max_model_len

    def _next_in_line(self, num_batch_class: int) -> int:
        """Place of the request to ask next: the head, unless the degradation rule demotes it. -1 if all are
        demoted and must wait.

        Over `degrade_above` of the pool in use, batch-class requests (priority > 0) form static batches: they
        start only when none of their class ran before this step's admissions (`num_batch_class`), and others
        pass them meanwhile.
        """
        above = self.config.degrade_above
        if not num_batch_class or 1 - self.pool.num_free / (self.pool.num_blocks - 1) <= above:
            return 0
        for i, r in enumerate(self.waiting):
            if r.priority <= 0:
                return i
            if i == 0:
                self._wait(r, "degraded", 0, num_batch_class)
        return -1

    def _no_room(self, r: Request, hits: list[int], n: int) -> tuple[str, int, int] | None:
        """Why the blocks for an admission are not there: (reason, need, have), or None if they are."""
        kv, rules, free = self.kv, self.rules, self.pool.num_free
        end = max(len(hits) * kv.block_size, r.num_computed_tokens) + n + self.num_lookahead
        ahead = self.config.num_draft_slots
        keep = (
            int(max(rules.admission_watermark, self.config.watermark) * self.pool.num_blocks)
            if self.running
            else 0
        )
        checks: list[tuple[str, int]] = []
        most = None
        if kv.sliding_window:
            most = (
                -(
                    -min(
                        kv.sliding_window - 1 + (self.config.max_num_batched_tokens or 0), self.max_model_len
                    )
                    // kv.block_size
                )
                + 1
                + kv.sink_blocks
            )
        if rules.reserve_full_isl:
            checks.append(("blocks", kv.need_at_admission(hits, r.num_tokens, most)))
        if rules.mix == "prefill-first" and (owed := self._blocks_owed(most)):
            checks.append(("blocks", kv.need_at_admission(hits, r.num_tokens, most) + owed))
        checks.append(("blocks", kv.need_at_admission(hits, end)))
        if rules.reserve == "max-tokens":
            checks.append(("reserve", kv.need_at_admission(hits, r.num_prompt_tokens + r.max_tokens + ahead)))
        if rules.reserve == "guaranteed":
            growth = sum(
                max(0, kv.blocks_for(x.num_prompt_tokens + x.max_tokens + ahead) - len(x.block_ids))
                for x in self.running
                if not x.seat_held
            )
            checks.append(
                ("guarantee", kv.need_at_admission(hits, r.num_prompt_tokens + r.max_tokens + ahead) + growth)
            )
        for reason, need in checks:
            if need > free:
                return reason, need, free
            if need + keep > free:
                return "watermark", need, max(0, free - keep)
        if (run := kv.lacks_run(r.num_prompt_tokens + r.max_tokens)) is not None:
            return "fragments", *run
        if rules.reserve == "estimate" and self.running:
            expected = 0.0
            for x in self.running:
                rest = min(x.max_tokens - x.num_output_tokens, MOST_EXPECTED_TOKENS)
                expected += 0 if x.seat_held else rest if x in self._shares else rest * self.new_token_ratio
            # the whole prompt, though only a chunk may be computed now, cached blocks that nobody holds, and
            # one block for what doesn't come out even
            bs, taken = kv.block_size, kv.need_at_admission(hits, 0) + 1
            tokens = (
                expected
                + r.num_tokens
                + (taken - len(hits)) * bs
                + min(r.max_tokens - r.num_output_tokens, MOST_EXPECTED_TOKENS)
            )
            if tokens >= free * bs:
                return "estimate", int(tokens // bs) + 1, free
        return None

    def _blocks_owed(self, most: int | None) -> int:
        """Blocks that running requests in the middle of their prefill still take before they decode; each
        holds `most` at once.

        Where prefills go before decodes, another prefill joins them only if all of them fit. Otherwise they
        take each other's blocks for ever, and the decodes, which alone could give blocks back, never get a
        token. A lone prefill that runs out ends the prefill step, so decodes go on then.
        """
        owed = 0
        for x in self.running:
            if not x.seat_held and _is_prefill(x):
                whole = self.kv.blocks_for(x.num_tokens + self.num_lookahead)
                owed += max(
                    0, whole - len(x.block_ids) if most is None else min(most, whole) - self.kv.num_held(x)
                )
        return owed

    def _seat(self, r: Request, hits: list[int], cached: int, place: int) -> None:
        self._save(r)
        self._save_queues()
        resumed = r.status is Status.PREEMPTED
        miss = None if r.host_block_ids else self.kv.explain_miss(r, len(hits))
        del self.waiting[place]
        self.running.append(r)
        r.status = Status.RUNNING
        r.last_wait = None
        r.overtaken_before = 0
        r.num_computed_tokens = r.num_cached_tokens = cached
        if hits and not (r.host_block_ids and self.kv.sliding_window):
            self.journal.append(ev.PrefixHit(r.request_id, len(hits) * self.kv.block_size, hits))
        if miss is not None:
            self.journal.append(miss)
        self.journal.append(
            ev.Admitted(r.request_id, resumed, cached, self.step - r.queued_step, len(self.running) - 1)
        )
        if hits:
            self.kv.share(r, hits)

    def _note_overtaken(self, r: Request) -> None:
        """Counts who was passed over; says so when somebody's count reaches 8, 16, 32, ...: that is how
        starvation looks.
        """
        reached = [(self._place_of(w), w, n) for w, n in self.overtaken.admit(r, self.waiting)]
        for place, w, n in sorted(reached, key=_first):
            hits = self.prefix_blocks(w)
            need = self.kv.need_at_admission(hits, w.num_tokens)
            self.journal.append(
                ev.Starving(w.request_id, n, self.step - w.queued_step, need, self.pool.num_free, place)
            )

    def _wait(self, r: Request, reason: str, need: int, have: int) -> None:
        """Why the head waits: written when it changes."""
        why = (reason, need, have)
        if r.last_wait != why:
            self.undo.append((_set_wait, (r, r.last_wait)))
            r.last_wait = why
            self.journal.append(ev.NotAdmitted(r.request_id, reason, need, have))

    # after the decisions ------------------------------------------------------------------------------------

    def _advance(self, plan: SchedulerOutput) -> None:
        """Counts the step's tokens and slots, and moves `num_computed_tokens` on, before anything is computed
        (as vLLM does).
        """
        total = again = padded = 0
        turned: list[Request] = []  # those whose prefill begins or ends with this step
        for r, c in zip(self._shares, self.chunk_records, strict=True):
            total += c.num_tokens
            if c.padding:
                padded += c.num_tokens
            else:
                again += c.num_recomputed
                r.num_computed_tokens += c.num_tokens
                if r.is_prefill_chunk is not (r.num_computed_tokens < len(r.token_ids)):
                    r.is_prefill_chunk = not r.is_prefill_chunk
                    turned.append(r)
                name = r.spec.session or ""
                self.served[name] = self.served.get(name, 0) + c.num_tokens
        self.undo.append((_take_back, (self._shares, self.chunk_records, self.served, turned)))
        padded += plan.num_padding_tokens
        total += plan.num_padding_tokens
        self.tokens = TokenAccount(total, total - again - padded, again, padded)
        self.slots = self._slot_account()
        self.journal.append(ev.Executed())

    def _slot_account(self) -> SlotAccount:
        bs, pool = self.kv.block_size, self.pool
        partly = reserved = 0
        shared: dict[int, int] = {}
        for r in self.running:
            empty = len(r.block_ids) * bs - r.num_computed_tokens
            if empty > 0:  # a finished row that only holds its seat has no blocks any more
                tail = -r.num_computed_tokens % bs
                reserved += empty - tail
                if (
                    self.has_groups
                    and tail
                    and pool.ref_count[b := r.block_ids[r.num_computed_tokens // bs]] > 1
                ):
                    shared[b] = min(
                        tail, shared.get(b, tail)
                    )  # counts once, as far as the one who has come furthest
                else:
                    partly += tail
        partly += sum(shared.values())
        usable = pool.num_blocks - 1
        total, cached = usable * bs, pool.num_cached_free * bs
        free = pool.num_free * bs - cached
        used = total - cached - free - partly - reserved
        if (
            self.waiting
            and self.waiting[0].last_wait is not None
            and self.waiting[0].last_wait[0] == "fragments"
        ):
            return SlotAccount(total, used, partly, reserved, cached, fragmented=free)
        return SlotAccount(total, used, partly, reserved, cached, free)

    # update -------------------------------------------------------------------------------------------------

    def update(self, plan: SchedulerOutput, out: RunnerOutput) -> None:
        """Takes the step's tokens: appends them, ends what is finished, frees its blocks.

        Raises RunnerOutputError before any change.
        """
        got = out.token_ids
        for c in plan.chunks:
            if c.num_candidates:
                if len(out.candidates.get(c.request_id) or ()) != c.num_candidates:
                    raise RunnerOutputError(
                        f"step {plan.step}: the runner must return {c.num_candidates} candidates for beam "
                        f"{c.request_id}"
                    )
            elif c.sample:
                new = got.get(c.request_id)
                if not new:
                    raise RunnerOutputError(
                        f"step {plan.step}: the runner returned no token for {c.request_id}"
                    )
                if c.fork_ids and any(len(got.get(i) or ()) != 1 for i in c.fork_ids):
                    raise RunnerOutputError(
                        f"step {plan.step}: the runner returned no token for a sequence of {c.request_id}: "
                        f"{', '.join(c.fork_ids)} need one each"
                    )
                if len(new) > 1 + c.num_draft:
                    raise RunnerOutputError(
                        f"step {plan.step}: the runner returned {len(new)} tokens for {c.request_id}, "
                        f"whose {c.num_draft} drafts allow {1 + c.num_draft}"
                    )
        proposed = self._propose(plan, out) if self.proposer is not None else {}
        journal, limit, routed = self.journal, self.max_model_len, out.routed
        ended = False
        num_rejected = 0
        for r, c in zip(self._shares, plan.chunks, strict=True):
            if not c.sample:
                continue
            if c.num_candidates:
                self._score(r, c, out)
                continue
            new = got[c.request_id]
            children = fork(self, r, c.start + c.num_tokens) if c.fork_ids else ()
            if routed:
                self.note_routed(r, routed[c.request_id])
            if len(new) == 1 and new[0] not in r.stop_ids and limit > len(r.token_ids) + 1 < r.latest_end:
                kept, reason, stop = 1, "", -1  # as nearly always: it goes on
            else:
                kept, reason, stop = self._kept(r, new)
            rejected = past_end = 0
            if c.num_draft:
                past_end = max(0, len(new) - 1 - kept)
                rejected = c.num_draft - (len(new) - 1) + past_end
                num_rejected += rejected
                r.num_computed_tokens -= rejected
                new = new[:kept]
            r.token_ids.extend(new)
            journal.append(ev.Sampled(c.request_id, new, rejected, past_end))
            if proposed and (drafts := proposed.get(c.request_id)):
                r.draft_token_ids = drafts
                journal.append(ev.Proposed(c.request_id, drafts, self.config.speculative))
            if reason:
                ended = True
                self._finish(r, reason, stop)
            for child in children:
                first = got[child.request_id]
                _, reason, stop = self._kept(child, first)
                child.token_ids.extend(first)
                journal.append(ev.Sampled(child.request_id, first))
                if reason:
                    ended = True
                    self._finish(child, reason, stop)
        if self.has_groups:
            for root in {
                beam.root_of(self, self.requests[c.request_id]): None for c in plan.chunks if c.num_candidates
            }:
                ended = self._choose(root) or ended
        if num_rejected:
            t = self.tokens
            self.tokens = TokenAccount(t.total, t.useful - num_rejected, t.recomputed, t.padded, num_rejected)
        if ended:
            self.running = [r for r in self.running if r.status is not Status.FINISHED or r.seat_held]
            self._close_batch()
        if self.routed:
            self.forget_routed()
        if not self.requests:
            self.new_token_ratio = INIT_NEW_TOKEN_RATIO
        self._shares = []
        self.undo.clear()

    def _score(self, r: Request, c: Chunk, out: RunnerOutput) -> None:
        """A beam has its candidates; the first to have some comes with the rest of the beams."""
        if r.num_forks:
            fork(self, r, c.start + c.num_tokens)
        if out.routed:
            self.note_routed(r, out.routed[c.request_id])
        r.candidates = [(t, logprob) for t, logprob in out.candidates[c.request_id]]
        self.journal.append(
            ev.Scored(r.request_id, [t for t, _ in r.candidates], [x for _, x in r.candidates])
        )

    def _choose(self, root: Request) -> bool:
        """The beams of a request go on, or end (True), if all have their candidates."""
        if (decided := beam.decide(self, root)) is None:
            return False
        e, done = decided
        self.journal.append(e)
        if isinstance(e, ev.BeamStep):
            beam.go_on(self, root, e, done)
            return False
        for b in beam.end(self, e):
            last = b.token_ids[-1]
            self._finish(b, "stop" if last in b.stop_ids else "length", last if last in b.stop_ids else -1)
        return True

    def _kept(self, r: Request, new: list[int]) -> tuple[int, str, int]:
        """How many of the new tokens the request keeps, why it ends with the last of them ('': it goes on),
        and the stop id or -1.
        """
        n, prompt, limit = len(r.token_ids), r.num_prompt_tokens, self.max_model_len
        for kept, t in enumerate(new, 1):
            n += 1
            if t in r.stop_ids:
                return kept, "stop", t
            if n - prompt == r.output_end:
                return kept, "stop", -1
            if n - prompt >= r.max_tokens:
                return kept, "length", -1
            if n >= limit:
                return kept, "max_model_len", -1
        return len(new), "", -1

    def _propose(self, plan: SchedulerOutput, out: RunnerOutput) -> dict[str, list[int]]:
        """The drafts of each request that got tokens and goes on: the runner's, or from the tokens alone.

        Changes nothing. Raises ProposerError.
        """
        found: dict[str, list[int]] = {}
        k, trim, p = self.config.num_speculative_tokens, self.rules.trim_drafts, self.proposer
        assert p is not None
        for r, c in zip(self._shares, plan.chunks, strict=True):
            if not c.sample:
                continue
            new = out.token_ids[c.request_id]
            kept, reason, _ = self._kept(r, new)
            if reason:
                continue
            n = r.num_tokens + kept
            most = k
            if trim:  # the model's own token behind the drafts needs a place too
                most = max(0, min(k, r.num_prompt_tokens + r.max_tokens - n - 1))
            if out.draft_ids is not None:
                drafts = out.draft_ids.get(c.request_id, [])[:most]
            else:
                drafts = drafts_for(
                    p, c.request_id, r.token_ids + new, min(most, self.max_model_len - n), self.config
                )
            if drafts:
                found[c.request_id] = drafts
        return found

    def _finish(self, r: Request, reason: str, stop_id: int) -> None:
        if self.rules.hold_seat:
            place = self.running.index(r)
            r.seat_held = True
            self._end(r, reason, stop_id, keep_blocks=self.rules.pad)
            self.journal.append(ev.SeatHeld(r.request_id, place))
        else:
            self._end(r, reason, stop_id)

    def _end(self, r: Request, reason: str, stop_id: int, keep_blocks: bool = False) -> None:
        """The request is over. Its blocks come back unless its row runs on."""
        r.status = Status.FINISHED
        r.draft_token_ids = []
        r.finish_reason = reason
        self.num_finished += 1
        self.finished_ids.append(r.request_id)
        self.journal.append(ev.Finished(r.request_id, reason, stop_id))
        if r.host_block_ids:
            self.host.give(r.host_block_ids)
            self.journal.append(ev.HostFreed(r.request_id, r.host_block_ids))
            r.host_block_ids, r.num_null_blocks = [], 0
        if not keep_blocks:
            ids = self.kv.free(r)
            if ids:
                self.journal.append(ev.Freed(r.request_id, ids))
        if not r.seat_held:
            del self.requests[r.request_id]

    def _close_batch(self, force: bool = False) -> None:
        """Static batching: when the last of a batch has ended, its seats (and, padded, its blocks) are free.

        `force`: give held seats back now.
        """
        held = [r for r in self.running if r.seat_held]
        if not held or (len(held) < len(self.running) and not force):
            return
        self._save_queues()
        self._save_requests()
        for r in held:
            self._save(r)
        self.journal.append(ev.SeatsFreed([r.request_id for r in held]))
        for r in held:
            r.seat_held = False
            ids = self.kv.free(r)
            if ids:
                self.journal.append(ev.Freed(r.request_id, ids))
            del self.requests[r.request_id]
        self.running = [r for r in self.running if r.status is Status.RUNNING]

    def forget_ranks(self) -> None:
        """The queue's order stands, but by which ranks is not known, nor whose time is up next: the next step
        looks again.
        """
        self._ranked_by, self._ranked_now = None, False
        self._session_ranks = {}
        self._next_end_s = None

    def carry(self) -> dict[str, Any]:
        """What the next step builds on and no event tells, where it differs from the start's."""
        out: dict[str, Any] = {}
        if self.batch_open:
            out["batch_open"] = True
        if self.new_token_ratio != INIT_NEW_TOKEN_RATIO:
            out["new_token_ratio"] = self.new_token_ratio
        return out

    # reading ------------------------------------------------------------------------------------------------

    def prefix_blocks(self, r: Request) -> list[int]:
        """Blocks of the request's known tokens that the cache holds now (for views)."""
        return restored_prefix(r, self.kv) if r.host_block_ids else self.kv.find_prefix(r)

    def served_tokens(self, session: str | None) -> int:
        return self.served.get(session or "", 0)

    def note_routed(self, r: Request, layers: list[list[int]]) -> None:
        """Adds the experts that a request's newest token took, [sparse layer][choice]."""
        counts = self.routed.setdefault(_experts_of(r), [[] for _ in layers])
        for row, chosen in zip(counts, layers, strict=True):
            for e in chosen:
                row.extend([0] * (e + 1 - len(row)))
                row[e] += 1

    def forget_routed(self) -> None:
        """Choices of requests that have ended and belong to no session are of no more use."""
        for name in [n for n in self.routed if n.startswith("r ") and n[2:] not in self.requests]:
            del self.routed[name]

    def expert_use(self, r: Request | None) -> tuple[tuple[float, ...], ...]:
        """How often the request's session took each expert, as shares of its choices, [sparse layer][expert];
        None: those of all that run. Empty: nothing is known.
        """
        if r is not None:
            return _shares_of(self.routed.get(_experts_of(r), []))
        total: list[list[int]] = []
        for name in {_experts_of(x): None for x in self.running if not x.seat_held}:
            for i, row in enumerate(self.routed.get(name, [])):
                if i == len(total):
                    total.append([])
                total[i].extend([0] * (len(row) - len(total[i])))
                for e, n in enumerate(row):
                    total[i][e] += n
        return _shares_of(total)

    @property
    def drafts_in_flight(self) -> dict[str, int]:
        """Between `schedule` and `update`: how many drafts each request has in the step."""
        return (
            {r.request_id: c.num_draft for r, c in zip(self._shares, self.chunk_records, strict=True)}
            if self._shares
            else {}
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting) or any(not r.seat_held for r in self.running)

    def drain(self) -> list[AnyEvent]:
        """The events since the last call, in order."""
        out = self.journal.copy()
        self.journal.clear()
        return out

    # plain data ---------------------------------------------------------------------------------------------

    def snapshot(self, *, whole: bool = False) -> dict[str, Any]:
        """Everything that decides the scheduler's future, as primitives.

        Request specs stand beside it, by id (they never change). `whole`: free lists one by one.
        """
        return (
            {
                "step": self.step,
                "num_arrived": self.num_arrived,
                "num_finished": self.num_finished,
                "batch_open": self.batch_open,
                "new_token_ratio": self.new_token_ratio,
                "served": dict(self.served),
                "finished_ids": list(self.finished_ids),
                "config": self.config.to_dict(),
                "waiting": [r.request_id for r in self.waiting],
                "running": [r.request_id for r in self.running],
                "requests": {
                    r.request_id: {
                        "seq": r.seq,
                        "arrival_s": r.arrival_s,
                        "status": r.status.value,
                        "output_token_ids": r.output_token_ids,
                        "num_computed_tokens": r.num_computed_tokens,
                        "num_cached_tokens": r.num_cached_tokens,
                        "num_preemptions": r.num_preemptions,
                        "max_computed": r.max_computed,
                        "block_ids": list(r.block_ids),
                        "host_block_ids": list(r.host_block_ids),
                        "num_null_blocks": r.num_null_blocks,
                        "num_cached_blocks": r.num_cached_blocks,
                        "draft_token_ids": list(r.draft_token_ids),
                        "queued_step": r.queued_step,
                        "last_wait": list(r.last_wait) if r.last_wait else None,
                        "seat_held": r.seat_held,
                        "finish_reason": r.finish_reason,
                        "num_overtaken": r.num_overtaken,
                        "num_forks": r.num_forks,
                        "shares_tail": r.shares_tail,
                        "parent": r.spec.parent or "",
                        "is_prefill_chunk": r.is_prefill_chunk,
                    }
                    | ({"beam": [r.candidates, r.beam_score, r.hypotheses]} if r.is_beam else {})
                    for r in self.requests.values()
                },
                "pool": self.pool.snapshot(whole=whole),
            }
            | self.host.snapshot(whole=whole)
            | (
                {"routed": {k: [list(row) for row in v] for k, v in self.routed.items()}}
                if self.routed
                else {}
            )
        )

    def restore(self, data: dict[str, Any], specs: dict[str, RequestSpec]) -> None:
        """Makes the state equal a snapshot's. `specs` must hold every request that the snapshot names."""
        self.configure(EngineConfig(**data["config"]))
        self.step = self.pool.step = data["step"]
        self.num_arrived = data["num_arrived"]
        self.num_finished = data["num_finished"]
        self.batch_open = data["batch_open"]
        self.new_token_ratio = data["new_token_ratio"]
        self.served = dict(data["served"])
        self.routed = {k: [list(row) for row in v] for k, v in data.get("routed", {}).items()}
        self.finished_ids = list(data["finished_ids"])
        self.pool.num_blocks = self.config.num_blocks
        self.pool.restore(data["pool"])
        self.host.restore(data)
        self.requests = {}
        self.overtaken = Overtaken(self.undo)
        for rid, d in data["requests"].items():
            r = Request(
                spec_of(rid, d.get("parent", ""), specs),
                d["seq"],
                self.eos_token_ids,
                d["queued_step"],
                self.use_output_len,
            )
            r.arrival_s = d["arrival_s"]
            r.status = Status(d["status"])
            r.token_ids.extend(d["output_token_ids"])
            for f in (
                "num_computed_tokens",
                "num_cached_tokens",
                "num_preemptions",
                "max_computed",
                "num_null_blocks",
                "num_cached_blocks",
                "seat_held",
                "finish_reason",
            ):
                setattr(r, f, d[f])
            r.overtaken_before = d["num_overtaken"]
            r.block_ids = list(d["block_ids"])
            r.host_block_ids = list(d.get("host_block_ids", ()))
            r.num_forks, r.shares_tail = d.get("num_forks", 0), d.get("shares_tail", False)
            self.note_group(r)
            if "beam" in d:
                candidates, r.beam_score, hypotheses = d["beam"]
                r.candidates = None if candidates is None else [(t, x) for t, x in candidates]
                r.hypotheses = [(x, list(tokens)) for x, tokens in hypotheses]
            r.draft_token_ids = list(d["draft_token_ids"])
            r.is_prefill_chunk = d.get("is_prefill_chunk", False)
            r.last_wait = (
                (d["last_wait"][0], d["last_wait"][1], d["last_wait"][2]) if d["last_wait"] else None
            )
            r.surroundings = self
            self.requests[rid] = r
        self.waiting = [self.requests[rid] for rid in data["waiting"]]
        self.running = [self.requests[rid] for rid in data["running"]]
        self._ranked_by, self._ranked_now = None, False
        self._session_ranks = {}
        if self.policy.static:
            for r in self.waiting:
                r.rank = rank_of(self.policy, self._ranked_as(r), 0.0)
            self._ranked_by = self.policy
        self.journal.clear()
        self.undo.clear()
        self._shares = []
        self._next_end_s = None

    def digest(self, form: int = DIGEST_FORM) -> str:
        """sha256 of the control plane, times excluded: equal digests, equal futures.

        `form`: see DIGEST_FORM.
        """
        return plain_digest(self.snapshot(whole=True), form)


def plain_digest(snapshot: dict[str, Any], form: int = DIGEST_FORM) -> str:
    """The digest of a scheduler's snapshot."""
    plain = {**snapshot, "pool": dict(snapshot["pool"])}
    for short, d, whole in (("free_runs", plain["pool"], "free"), ("host_free_runs", plain, "host_free")):
        if short in d:  # a digest covers the free lists one by one
            d[whole] = list(ids_of(d.pop(short)))
    plain["requests"] = {
        rid: {f: v for f, v in d.items() if f != "arrival_s"} for rid, d in snapshot["requests"].items()
    }
    if form > 1:
        plain["order"] = list(plain["requests"])
    return sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _is_prefill(r: Request) -> bool:
    return len(r.token_ids) - r.num_computed_tokens > 1


def _first(pair: tuple[Any, ...]) -> Any:
    return pair[0]


def _rank_text(rank: Any) -> str:
    return (
        ", ".join(f"{x:g}" if isinstance(x, float) else str(x) for x in rank)
        if isinstance(rank, tuple)
        else str(rank)
    )


def _restore_fields(
    r: Request, values: list[Any], block_ids: list[int], length: int, drafts: list[int]
) -> None:
    for f, v in zip(_SAVED, values, strict=True):
        setattr(r, f, v)
    del block_ids[length:]
    r.block_ids = block_ids
    r.draft_token_ids = drafts


def _set_value(x: SessionRank, value: Any) -> None:
    x.value = value


def _set_rank(r: Request, rank: object) -> None:
    r.rank = rank


def _set_drafts(r: Request, drafts: list[int]) -> None:
    r.draft_token_ids = drafts


def _set_wait(r: Request, why: tuple[str, int, int] | None) -> None:
    r.last_wait = why


def _experts_of(r: Request) -> str:
    """Under which name a request's choices of experts are kept: its session's, else its own."""
    return f"s {r.spec.session}" if r.spec.session else f"r {r.request_id}"


def _shares_of(counts: list[list[int]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(n / (sum(row) or 1) for n in row) for row in counts)


def _take_back(
    shares: list[Request], records: list[ChunkRecord], served: dict[str, int], turned: list[Request]
) -> None:
    for r in turned:
        r.is_prefill_chunk = not r.is_prefill_chunk
    for r, c in zip(shares, records, strict=True):
        if not c.padding:
            r.num_computed_tokens -= c.num_tokens
            name = r.spec.session or ""
            served[name] -= c.num_tokens
            if not served[name]:
                del served[name]


__all__ = ["NULL_BLOCK", "RunnerOutputError", "Scheduler"]
