"""The control plane as plain data: the queues, all requests, the pools and the counters.

Owns every change of a request's status or blocks (`seat`, `give_tokens`, `preempt`, `end` ...): the scheduler
decides and calls these, and `replay` calls the same ones with what a record says. Decides nothing itself.

    waiting --seat--> running --end--> gone
       ^                 |
       +-----preempt-----+

A preempted request is computed again (num_computed_tokens = 0, its outputs are kept), or its blocks wait on
the host (swap: num_computed_tokens stays).

`core.plain.FIELDS` declares each field once; undo, snapshot, restore and digest follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from cbviz.config import EngineConfig
from cbviz.core import expert_use, request
from cbviz.core.fields import REQUIRED, from_plain, to_plain
from cbviz.core.kv.block_pool import BlockPool
from cbviz.core.kv.kv_manager import KVManager
from cbviz.core.kv.swap import HostPool, restored_prefix
from cbviz.core.overtaken import Overtaken
from cbviz.core.plain import DIGEST_FORM, FIELDS, INIT_NEW_TOKEN_RATIO, plain_digest
from cbviz.core.policy import check_victim, get_policy
from cbviz.core.ranking import Policy
from cbviz.core.request import Request, Status, spec_of
from cbviz.core.session_ranks import SessionRank
from cbviz.core.speculative import get_proposer
from cbviz.core.undo import Undoable
from cbviz.events import AnyEvent
from cbviz.messages import Drafting, RequestSpec, child_spec

_CARRIED = tuple((f.name, f.carried_from) for f in FIELDS if f.carried_from is not REQUIRED)


class Tokens(Protocol):
    """A chunk of a plan, or the event that tells of it."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def padding(self) -> bool: ...


class ControlState(Undoable):
    """Everything that decides what the scheduler does next. `config` must be resolved."""

    def __init__(
        self,
        config: EngineConfig,
        eos_token_ids: Iterable[int] = (),
        use_output_len: bool = False,
        keep_planned_hashes: bool = False,
    ) -> None:
        if config.max_model_len is None or config.max_num_batched_tokens is None:
            raise ValueError(
                "the scheduler needs a resolved config: call EngineConfig.resolve(model_context) first"
            )
        contiguous = config.kv_allocation == "contiguous"
        self.journal: list[AnyEvent] = []
        """What happened since it was last drained, in order."""
        self.pool = BlockPool(config.num_blocks, config.enable_prefix_caching and not contiguous)
        self.kv = KVManager(
            self.pool,
            config.block_size,
            config.max_model_len,
            self.journal,
            config.sliding_window,
            config.contiguous_fit if contiguous else "",
            config.attention_sinks,
        )
        self.undo: list[tuple[Callable[..., Any], tuple[Any, ...]]] = self.pool.undo
        """How to take back what this step has done so far, as (function, arguments), in order."""
        self.host = HostPool(config.swap_blocks, self.undo)
        self.max_model_len = config.max_model_len
        self.block_size = config.block_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.use_output_len = use_output_len
        self.keep_planned_hashes = keep_planned_hashes
        """Two faults of vLLM's are kept; see `Scheduler`."""
        self.requests: dict[str, Request] = {}
        """All unfinished requests (and finished ones that still hold a seat), in order of arrival."""
        self.waiting: list[Request] = []
        """In the order in which they will be asked."""
        self.running: list[Request] = []
        self.overtaken = Overtaken(self.undo)
        """How often each waiting request was passed over."""
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
        self.new_token_ratio = INIT_NEW_TOKEN_RATIO
        """Share of the max_tokens still open that each running request is expected to use
        (`reserve="estimate"`).
        """
        self.served: dict[str, int] = {}
        """Tokens computed for each session so far; '' stands for all requests without one."""
        self.routed: expert_use.Counts = {}
        """Of a mixture: which experts the tokens of each session took; fed by the runner."""
        self.batch_open = False
        """Static batching: the budget cut the batch short, so its admission goes on in the next step."""
        self.ranked_by: Policy | None = None
        """The policy whose ranks the queue is sorted by; None: unknown."""
        self.session_ranks: dict[str, SessionRank] = {}
        """Under a policy that ranks sessions: the ranks that the waiting requests share, by session."""
        self._forget_caches()
        self.rules = config.rules
        self.configure(config)

    def configure(self, config: EngineConfig) -> None:
        """Takes a changed config; it holds from the next admission on, running requests keep their blocks and
        seats.
        """
        check_victim(config.victim)
        self.policy: Policy = get_policy(config.policy)
        rules = config.rules
        if rules.when_full != self.rules.when_full:
            self.ranked_by = None  # preempted requests stand elsewhere in the queue now
        self.proposer = get_proposer(config.speculative)
        self.num_lookahead = config.num_lookahead_tokens
        self.drafting = None
        if self.proposer is not None:
            self.drafting = Drafting(
                config.speculative,
                config.num_speculative_tokens,
                config.draft_layers,
                config.draft_acceptance,
            )
        self.config = config
        self.rules = rules
        self.ranked_now = False
        self.next_end_s = None

    # transitions --------------------------------------------------------------------------------------------

    def arrive(self, spec: RequestSpec, arrival_s: float) -> Request:
        """A new request, in no queue yet; it joins the next step."""
        r = Request(spec, self.num_arrived, self.eos_token_ids, self.step + 1, self.use_output_len)
        r.surroundings = self
        r.arrival_s = arrival_s
        self.undo.append((self._unarrive, (r,)))
        self.num_arrived += 1
        self.requests[r.request_id] = r
        self._note_group(r)
        return r

    def _note_group(self, r: Request) -> None:
        """Remembers that a request has, or is one of, several sequences."""
        if r.num_forks or r.parent:
            self.has_groups = True
            self.most_sequences = max(self.most_sequences, r.num_forks + 1, r.index + 1)

    def _unarrive(self, r: Request) -> None:
        self.num_arrived -= 1
        # Gone already if it was aborted in the same step; what `save_requests` kept is still to be put back.
        self.requests.pop(r.request_id, None)

    def enqueue(self, r: Request, place: int) -> None:
        """The request waits at `place` of the queue."""
        self.save_queues()
        self.waiting.insert(place, r)
        self.overtaken.join(r)

    def dequeue(self, r: Request, place: int) -> None:
        """The request at `place` of the queue waits no more, because it has ended."""
        self.save_queues()
        del self.waiting[place]
        self.overtaken.leave(r)

    def reorder(self, order: list[Request]) -> None:
        """The waiting queue in another order."""
        self.save_queues()
        self.waiting[:] = order

    def seat(self, r: Request, place: int, num_cached_tokens: int) -> None:
        """The request at `place` of the queue runs from now on.

        Its blocks are still to be given, and its place among the overtaken.
        """
        self.save(r)
        self.save_queues()
        del self.waiting[place]
        self.running.append(r)
        r.status = Status.RUNNING
        r.last_wait = None
        r.overtaken_before = 0
        r.num_computed_tokens = r.num_cached_tokens = num_cached_tokens

    def give_tokens(self, shares: Iterable[Request], chunks: Iterable[Tokens]) -> list[Request]:
        """Moves `num_computed_tokens` on, before anything is computed (as vLLM does).

        Returns the requests whose prefill begins or ends with this. Taken back by `take_tokens`, not by the
        undo log.
        """
        turned = []
        served = self.served
        for r, c in zip(shares, chunks, strict=True):
            if c.padding:
                continue
            r.num_computed_tokens += c.num_tokens
            if r.is_prefill_chunk is not (r.num_computed_tokens < len(r.token_ids)):
                r.is_prefill_chunk = not r.is_prefill_chunk
                turned.append(r)
            session = r.spec.session or ""
            served[session] = served.get(session, 0) + c.num_tokens
        return turned

    def take_tokens(self, shares: Iterable[Request], chunks: Iterable[Tokens], turned: list[Request]) -> None:
        """Takes back `give_tokens`, which returned `turned`."""
        for r in turned:
            r.is_prefill_chunk = not r.is_prefill_chunk
        served = self.served
        for r, c in zip(shares, chunks, strict=True):
            if not c.padding:
                r.num_computed_tokens -= c.num_tokens
                session = r.spec.session or ""
                served[session] -= c.num_tokens
                if not served[session]:
                    del served[session]

    def preempt(self, r: Request) -> list[int]:
        """A running request loses its seat and blocks; it is in no queue then. Returns the ids of its blocks."""
        self.save(r)
        self.save_queues()
        self.running.remove(r)
        r.max_computed = max(r.max_computed, r.num_computed_tokens)
        ids = self.kv.free(r)
        r.num_computed_tokens = 0
        r.shares_tail = False
        r.candidates = None  # they come again with the blocks
        r.num_preemptions += 1
        r.draft_token_ids = []
        r.status = Status.PREEMPTED
        r.queued_step = self.step
        r.last_wait = None
        return ids

    def keep_on_host(
        self, r: Request, host_block_ids: list[int], num_tokens: int, num_null_blocks: int
    ) -> None:
        """The KV of a request that was just preempted waits on the host, so its tokens stay computed."""
        r.host_block_ids = host_block_ids
        r.num_computed_tokens = num_tokens
        r.num_null_blocks = num_null_blocks

    def give_host_blocks_back(self, r: Request) -> None:
        """Nobody needs the request's copy on the host any more."""
        self.host.give(r.host_block_ids)
        r.host_block_ids = []

    def fork(self, r: Request, num_tokens: int) -> list[Request]:
        """The children of `r`, which has computed the `num_tokens` tokens of its prompt: seated behind it,
        sharing the blocks that hold them. Their first tokens are still to come.
        """
        num_full = num_tokens // self.block_size
        ids = r.block_ids[: -(-num_tokens // self.block_size)]
        children = []
        for i in range(1, r.num_forks + 1):
            c = Request(child_spec(r.spec, i), r.seq, self.eos_token_ids, r.queued_step, self.use_output_len)
            c.surroundings, c.arrival_s = self, r.arrival_s
            c.status, c.rank = Status.RUNNING, r.rank
            c.block_hashes = list(r.block_hashes[:num_full])
            c.num_computed_tokens = num_tokens
            c.num_cached_blocks = min(r.num_cached_blocks, num_full)
            c.num_null_blocks = r.num_null_blocks
            c.block_ids = list(ids)
            c.shares_tail = True
            self.pool.touch(ids, c.request_id)
            self.requests[c.request_id] = c
            children.append(c)
        at = self.running.index(r) + 1
        self.running[at:at] = children
        r.num_forks, r.shares_tail = 0, True
        return children

    def take_table_of(self, r: Request, parent: Request) -> None:
        """A beam goes on from another: it gives back its blocks and takes the other's table by reference."""
        if r.block_ids != parent.block_ids:
            self.pool.touch(parent.block_ids, r.request_id)
            self.pool.free(r.block_ids, r.request_id)
            r.block_ids = list(parent.block_ids)
        if r is not parent:
            r.block_hashes, r.num_cached_blocks = list(parent.block_hashes), parent.num_cached_blocks

    def end(self, r: Request, reason: str) -> None:
        """The request is over. Its blocks, its seat and its place among the requests are still to be freed."""
        r.status = Status.FINISHED
        r.draft_token_ids = []
        r.finish_reason = reason
        self.num_finished += 1

    def resize(self, num_blocks: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Another pool size, between steps; not undone.

        Returns (moved as (old id, new id), dropped cached ids).
        """
        moved, dropped = self.pool.resize(num_blocks)
        to = dict(moved)
        for r in self.requests.values():
            r.block_ids[:] = [to.get(b, b) for b in r.block_ids]
        return moved, dropped

    # asking -------------------------------------------------------------------------------------------------

    def prefix_blocks(self, r: Request) -> list[int]:
        """Blocks of the request's known tokens that the cache holds now."""
        return restored_prefix(r, self.kv) if r.host_block_ids else self.kv.find_prefix(r)

    def times_overtaken(self, r: Request) -> int:
        return self.overtaken.count(r)

    def served_tokens(self, session: str | None) -> int:
        return self.served.get(session or "", 0)

    def expert_use(self, r: Request | None) -> expert_use.Shares:
        """How often the request's session took each expert, as shares of its choices, [sparse layer][expert];
        None: those of all that run. Empty: nothing is known.
        """
        if r is not None:
            return expert_use.shares_of_request(self.routed, r)
        return expert_use.shares_of_all(self.routed, (x for x in self.running if not x.seat_held))

    # plain data ---------------------------------------------------------------------------------------------

    def carry(self) -> dict[str, Any]:
        """What the next step builds on and no event tells, where it differs from the start's."""
        return {name: value for name, start in _CARRIED if (value := getattr(self, name)) != start}

    def take_carry(self, carried: dict[str, Any]) -> None:
        """Sets what `carry` wrote."""
        for name, start in _CARRIED:
            setattr(self, name, carried.get(name, start))

    def snapshot(self, *, whole: bool = False) -> dict[str, Any]:
        """Everything that decides the future, as primitives.

        Request specs stand beside it, by id (they never change). `whole`: free lists one by one.
        """
        return (
            to_plain(self, FIELDS)
            | {"pool": self.pool.snapshot(whole=whole)}
            | self.host.snapshot(whole=whole)
        )

    def restore(self, data: dict[str, Any], specs: dict[str, RequestSpec]) -> None:
        """Makes the state equal a snapshot's. `specs` must hold every request that the snapshot names."""
        self.configure(EngineConfig(**data["config"]))
        from_plain(self, FIELDS, data)
        self.pool.step = self.step
        self.pool.num_blocks = self.config.num_blocks
        self.pool.restore(data["pool"])
        self.host.restore(data)
        self.overtaken = Overtaken(self.undo)
        self.requests = {rid: self._restored(rid, d, specs) for rid, d in data["requests"].items()}
        self.waiting = [self.requests[rid] for rid in data["waiting"]]
        self.running = [self.requests[rid] for rid in data["running"]]
        self.forget_ranks()
        self.journal.clear()
        self.undo.clear()

    def _restored(self, request_id: str, data: dict[str, Any], specs: dict[str, RequestSpec]) -> Request:
        spec = spec_of(request_id, data.get("parent", ""), specs)
        r = Request(spec, data["seq"], self.eos_token_ids, data["queued_step"], self.use_output_len)
        from_plain(r, request.FIELDS, data)
        r.surroundings = self
        self._note_group(r)
        return r

    def forget_ranks(self) -> None:
        """The queue's order stands, but by which ranks is not known, nor whose time is up next: the next step
        looks again.
        """
        self.ranked_by, self.ranked_now = None, False
        self.session_ranks = {}
        self.next_end_s = None

    def digest(self, form: int = DIGEST_FORM) -> str:
        """sha256 of the control plane, times excluded: equal digests, equal futures.

        `form`: see DIGEST_FORM.
        """
        return plain_digest(self.snapshot(whole=True), form)
