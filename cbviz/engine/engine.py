"""One step for every mode: deliver arrivals, schedule, execute, update, return a record.

Owns the clock, the requests still to arrive and the user's inputs; the scheduler owns everything else.
Returns records and forgets them: it knows no trace, session or widget. A step that raises, or is interrupted,
leaves the state as it was before the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from time import perf_counter
from typing import Any
from weakref import ref

import msgspec

from cbviz import events as ev
from cbviz.config import CONFIG_FIELDS, ConfigError, EngineConfig, check_names
from cbviz.core import beam, replay
from cbviz.core.plain import DIGEST_FORM
from cbviz.core.plain import plain_digest as control_digest
from cbviz.core.policy import check_victim, get_policy
from cbviz.core.scheduler import Scheduler
from cbviz.core.speculative import get_proposer
from cbviz.cost.base import CostModel
from cbviz.engine import interrupts
from cbviz.engine.progress import PATIENCE_STEPS, got_further, patience, why_stuck
from cbviz.messages import (
    Gauges,
    RequestError,
    RequestSpec,
    SchedulerOutput,
    Span,
    StepCost,
    StepRecord,
    sequence_ids,
)
from cbviz.runners.base import Runner


class Engine:
    """`config` must be resolved.

    `cost` prices every step; under the modelled clock its total is the step's duration.
    """

    def __init__(self, config: EngineConfig, runner: Runner, cost: CostModel) -> None:
        self.runner = runner
        self.cost = cost
        self.simulated = bool(getattr(runner, "simulated", False))
        self.scheduler = Scheduler(config, eos_token_ids=runner.eos_token_ids, use_output_len=self.simulated)
        self.now_s = 0.0
        self.inputs: list[dict[str, Any]] = []
        """What the user asked for since the last step, in order; taken at the start of the next."""
        self._plan = config, self.inputs, 0, config
        """What `_planned` found last: from which config and inputs, how many of them, and the result."""
        self._by_time: list[_Pending] = []
        self._by_step: list[_Pending] = []
        """Requests still to arrive, the next one last; ties arrive in the order in which they were given."""
        self._done: list[dict[str, Any]] = []
        """Inputs that took effect at once, to stand in the next record before the others."""
        self._under_way: list[dict[str, Any]] = []
        """Inputs that the step under way has taken."""
        self._arriving: tuple[list[_Pending], list[_Pending]] = [], []
        """Requests that the step under way has taken from `_by_time` and `_by_step`."""
        self._taken_back = 0
        """How many steps failed."""
        self._known: set[str] = set()
        """All ids ever used, those of requests still to arrive included."""
        self._order = 0
        self._idle = False
        """The last step found nothing to do."""
        self._stalled = 0
        """Steps since a request got further than ever before; see `engine.progress`."""
        self._stalled_computing = 0
        """Those of them in which tokens were computed (again)."""
        self._patience = 0
        """Number of such steps after which the run is stuck; 0: not asked yet."""
        self._kv_stale = False
        """A failed pass wrote into blocks that running requests hold: the next step computes them again
        first.
        """
        self._kv_doubtful = False
        """Blocks that can be hit may hold something else (after a failed pass or a restore): a hit is
        checked, and computed again where it must be.
        """

    # asking -------------------------------------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig:
        return self.scheduler.config

    @property
    def step_count(self) -> int:
        return self.scheduler.step

    @property
    def num_pending(self) -> int:
        """Requests that have not arrived yet."""
        return len(self._by_time) + len(self._by_step)

    @property
    def pending_ids(self) -> list[str]:
        """Ids of the requests that have not arrived yet, in order of arrival."""
        return _ids(
            self._by_time[::-1], self._by_step[::-1]
        )  # slices: another thread's step may take some away meanwhile

    @property
    def coming_ids(self) -> list[str]:
        """Ids of the requests that stand in no kept record yet: added ones, those of the step under way, and
        those still to arrive. Any thread may ask.
        """
        while True:
            seen = self._taken_back
            # A request moves from the first three to the next two, so none is missed in this order, unless a
            # failed step moves it back meanwhile.
            inputs, by_time, by_step = self.inputs[:], self._by_time[::-1], self._by_step[::-1]
            taken, arriving = self._under_way[:], [x[:] for x in self._arriving]
            if seen == self._taken_back:
                ended = [
                    i["request_id"] for i in taken if i["op"] == "abort" and i["request_id"] in self._known
                ]  # it may not have arrived yet
                added = [i["spec"].request_id for i in (*taken, *inputs) if i["op"] == "add"]
                return list(dict.fromkeys([*ended, *added, *_ids(*arriving), *_ids(by_time, by_step)]))

    def settle(self) -> None:
        """The last step's record is kept: its requests are found there from here on."""
        self._under_way, self._arriving = [], ([], [])

    @property
    def has_work(self) -> bool:
        return bool(self.inputs or self._by_time or self._by_step) or self.scheduler.has_unfinished

    @property
    def stuck(self) -> str:
        """Why nothing more will come of this run though requests are unfinished; '' if that is not so.

        Either nothing will ever happen again, or what happens brings nobody further (`engine.progress`). An
        input, such as a changed knob or an abort, ends it.
        """
        s = self.scheduler
        if self.inputs:
            return ""
        if self._stalled > PATIENCE_STEPS:
            self._patience = self._patience or patience(s.state)
            if self._stalled > self._patience:
                return why_stuck(s.state, self._stalled, self._stalled_computing)
        if (
            not self._idle
            or self.num_pending
            or not s.state.waiting
            or any(not r.seat_held for r in s.state.running)
        ):
            return ""
        r = next(iter(s.state.waiting), None)
        if r is None:
            return ""  # a thread that only looks: a step began in this moment
        reason, need, have = r.last_wait or ("", 0, 0)
        waited = s.step - r.queued_step
        if reason == "policy" and waited < PATIENCE_STEPS:
            return ""  # it may count steps, as ageing does
        blocks = s.state.kv.need_at_admission(s.state.prefix_blocks(r), r.num_tokens)
        why = (
            f"policy {s.state.policy.name} has refused it for {waited} steps; choose another policy"
            if reason == "policy"
            else f"{reason or 'nothing is planned'}, it needs {need}, {have} are there; change what it lacks"
        )
        behind = f"; {len(s.state.waiting) - 1} more wait" if len(s.state.waiting) > 1 else ""
        return (
            f"{r.request_id} can never be admitted: {why}, or abort {r.request_id}. Nothing runs and "
            "nothing is to arrive, so nothing will change. "
            f"It would take a seat of {self.config.max_num_seqs} and {blocks} blocks; {s.state.pool.num_free} of "
            f"{self.config.num_usable_blocks} are free{behind}"
        )

    # inputs -------------------------------------------------------------------------------------------------

    def check_request(self, spec: RequestSpec) -> None:
        """Raises RequestError, with the figures, if the request can't be served by this engine at all."""
        c = self._planned()
        limit = c.max_model_len or 0
        n, total = len(spec.prompt_token_ids), len(spec.prompt_token_ids) + spec.max_tokens
        if n >= limit:
            raise RequestError(
                f"{spec.request_id}: the prompt has {n} tokens; with max_model_len {limit} it may have at "
                f"most {limit - 1}"
            )
        if total > limit:
            raise RequestError(
                f"{spec.request_id}: prompt {n} + max_tokens {spec.max_tokens} = {total} tokens, over "
                f"max_model_len {limit}: lower max_tokens to {limit - n}"
            )
        drafts = min(c.num_draft_slots, limit - total)
        if total + drafts > c.pool_tokens:
            size = c.block_size
            extra = f" and {drafts} slots for drafts" if drafts else ""
            raise RequestError(
                f"{spec.request_id}: prompt {n} + max_tokens {spec.max_tokens} = {total} tokens{extra} "
                f"need {-(-(total + drafts) // size)} blocks of {size}; "
                f"the pool has {c.num_usable_blocks}: raise num_blocks or lower max_tokens"
            )
        if spec.sampling.n > 1:
            if spec.sampling.n > c.max_num_seqs:
                raise RequestError(
                    f"{spec.request_id}: n is {spec.sampling.n}, but there are {c.max_num_seqs} seats, and "
                    "each sequence needs one: raise max_num_seqs or lower n"
                )
            if c.kv_allocation == "contiguous":
                raise RequestError(
                    f"{spec.request_id}: n is {spec.sampling.n}, but with kv_allocation contiguous nobody "
                    "shares blocks: set kv_allocation to 'paged', or ask "
                    f"{spec.sampling.n} times"
                )
        if spec.sampling.beam_width > 1 and (why := self._refuses_beams(spec, c)):
            raise RequestError(f"{spec.request_id}: beam_width is {spec.sampling.beam_width}, but {why}")
        vocab = self.runner.spec.vocab_size
        ids = spec.prompt_token_ids
        if set(map(type, ids)) != {int}:
            bad = next(t for t in ids if type(t) is not int)
            raise RequestError(f"{spec.request_id}: token id {bad!r} is no whole number")
        if min(ids) < 0 or max(ids) >= vocab:
            raise RequestError(
                f"{spec.request_id}: token id {next(t for t in ids if not 0 <= t < vocab)} is outside the "
                f"model's vocabulary 0..{vocab - 1}"
            )

    def _planned(self) -> EngineConfig:
        """The config as the inputs before the next step will have it."""
        base, inputs, seen, planned = self._plan
        if base is not self.config or inputs is not self.inputs or seen > len(inputs):
            seen, planned = 0, self.config
        for i in self.inputs[seen:]:
            if i["op"] == "configure":
                planned = planned.changed(**i["changes"])
        self._plan = self.config, self.inputs, len(self.inputs), planned
        return planned

    def _refuses_beams(self, spec: RequestSpec, c: EngineConfig) -> str:
        """Why the request's beam search can't run under config `c`; '' if it can."""
        k = spec.sampling.beam_width
        if not getattr(self.runner, "gives_candidates", False):
            name = getattr(self.runner, "name", type(self.runner).__name__)
            return (
                f"runner {name!r} makes up or repeats its tokens and knows no probabilities: use runner "
                "'torch'"
            )
        if why := beam.refusal(c):
            return why
        if k > c.max_num_seqs:
            return (
                f"there are {c.max_num_seqs} seats, and each beam needs one: raise max_num_seqs or lower "
                "beam_width"
            )
        if (need := beam.blocks_at_most(spec, c)) > c.num_usable_blocks:
            return (
                f"its beams may need {need} blocks, the pool has {c.num_usable_blocks}: raise num_blocks, "
                "or lower beam_width or max_tokens"
            )
        stops = frozenset(spec.sampling.stop_token_ids) | (
            frozenset() if spec.sampling.ignore_eos else self.scheduler.state.eos_token_ids
        )
        if (most := beam.num_candidates(spec.sampling, stops)) > self.runner.spec.vocab_size:
            return (
                f"it looks at {most} candidates a beam, more than the {self.runner.spec.vocab_size} tokens "
                "of the vocabulary: lower beam_width"
            )
        return ""

    def enqueue(self, specs: Iterable[RequestSpec]) -> None:
        """Requests of a workload, to be delivered at their arrival time or step.

        Ones that can't be served are refused on arrival.

        Raises RequestError for an id that was used before.
        """
        for spec in specs:
            self._take_ids(spec)
            if spec.arrival_step is None:
                self._by_time.append((spec.arrival_s, self._order, spec))
            else:
                self._by_step.append((spec.arrival_step, self._order, spec))
            self._order += 1
        self._by_time.sort(key=_when, reverse=True)
        self._by_step.sort(key=_when, reverse=True)

    def add(self, spec: RequestSpec) -> None:
        """A user's request; it joins the next step. Raises RequestError."""
        self.check_request(spec)
        self._take_ids(spec)
        self.inputs.append({"op": "add", "spec": spec})

    def _take_ids(self, spec: RequestSpec) -> None:
        for request_id in sequence_ids(spec):
            if request_id in self._known:
                raise RequestError(f"request id {request_id!r} was used before: ids must be unique in a run")
        self._known.update(sequence_ids(spec))

    def discard(self, request_id: str) -> None:
        """A request that has not arrived never will; its ids may be used again.

        Raises KeyError if it is not among them.
        """
        self._known.difference_update(sequence_ids(self._pending_spec(request_id)))
        self._by_time = [x for x in self._by_time if x[2].request_id != request_id]
        self._by_step = [x for x in self._by_step if x[2].request_id != request_id]

    def revise(self, spec: RequestSpec) -> None:
        """Another spec for a request that has not arrived; its place in the order of arrival stays.

        Raises KeyError if it is not among them.
        """
        self._pending_spec(spec.request_id)
        self._by_time = [(t, n, spec if x.request_id == spec.request_id else x) for t, n, x in self._by_time]
        self._by_step = [(t, n, spec if x.request_id == spec.request_id else x) for t, n, x in self._by_step]

    def _pending_spec(self, request_id: str) -> RequestSpec:
        for _, _, spec in (*self._by_time, *self._by_step):
            if spec.request_id == request_id:
                return spec
        raise KeyError(f"{request_id!r} is not among the requests still to arrive")

    def abort(self, request_id: str) -> None:
        """Ends a request just before the next step, in whatever state it is; one that has not arrived yet
        never will.
        """
        self.inputs.append({"op": "abort", "request_id": request_id})

    def asked(self) -> list[dict[str, Any]]:
        """What was asked for since the last step, as plain data: the inputs of the next step, an added
        request with its `spec`.
        """
        return [
            _plain_input(i) | ({"spec": msgspec.to_builtins(i["spec"])} if i["op"] == "add" else {})
            for i in (*self._done, *self.inputs)
        ]

    def resize(self, num_blocks: int) -> None:
        """Another pool size from here on; it stands in the record of the next step.

        The runner must have that many blocks and be synced. Raises ConfigError.
        """
        self.scheduler.resize(num_blocks)
        self._done.append({"op": "resize", "num_blocks": num_blocks})

    def reprice(self, config: EngineConfig) -> None:
        """Another modelled device or cost model from here on; the caller sets `cost`.

        It stands in the record of the next step.
        """
        now = self.config
        changes = {f: getattr(config, f) for f in CONFIG_FIELDS if getattr(config, f) != getattr(now, f)}
        self.scheduler.state.journal.extend(
            ev.Configured(f, str(getattr(now, f)), str(v)) for f, v in changes.items()
        )
        self.scheduler.configure(config)
        self._done.append({"op": "configure", "changes": changes})

    def configure(self, **changes: Any) -> None:
        """Changes live knobs from the next step on.

        Raises ConfigError for a field that can't change during a run.
        """
        check_names(changes)
        for name in changes:
            if not CONFIG_FIELDS[name].metadata["live"]:
                raise ConfigError(f"{name} can't change during a run: start a new one (or fork) with it")
        if "policy" in changes:
            get_policy(changes["policy"])
        check_victim(changes.get("victim"))
        get_proposer(changes.get("speculative", "off"))
        planned = self._planned()
        new = planned.changed(**changes)
        changes = {f: getattr(new, f) for f in CONFIG_FIELDS if getattr(new, f) != getattr(planned, f)}
        if not changes:
            return
        queued = [i["spec"] for i in self.inputs if i["op"] == "add"]
        here = self.scheduler.state.requests.values()
        self._check_drafts(new, [r.spec for r in here] + queued)
        for spec in [r.spec for r in here if r.num_forks] + queued:
            if spec.sampling.n > new.max_num_seqs:
                raise ConfigError(
                    f"max_num_seqs is {new.max_num_seqs}, but the {spec.sampling.n} sequences of "
                    f"{spec.request_id} need a seat each: the least is {spec.sampling.n}"
                )
        for spec in [r.spec for r in here if not r.spec.parent] + queued:
            if spec.sampling.beam_width > 1 and (why := self._refuses_beams(spec, new)):
                raise ConfigError(f"{spec.request_id} runs beam search: {why}, or wait until it has ended")
        self.inputs.append({"op": "configure", "changes": changes})

    def _check_drafts(self, new: EngineConfig, specs: list[RequestSpec]) -> None:
        """Raises ConfigError where a request would not fit the pool any more with the slots that drafts need:
        it would take its own blocks for ever.
        """
        limit, pool = new.max_model_len or 0, new.pool_tokens
        if new.num_draft_slots > self._planned().num_draft_slots:
            for x in specs:
                if (n := min(limit, len(x.prompt_token_ids) + x.max_tokens + new.num_draft_slots)) > pool:
                    raise ConfigError(
                        f"speculative {new.speculative!r} with {new.num_speculative_tokens} drafts may "
                        f"need {n} slots for {x.request_id}, the pool has {pool}: "
                        "lower num_speculative_tokens, or fork with more num_blocks"
                    )

    # stepping -----------------------------------------------------------------------------------------------

    def step(self, duration_s: float | None = None, *, idle: bool = False) -> StepRecord | None:
        """One iteration. None if there is nothing to do.

        Raises what the policy or runner raised, with the state as before.

        `duration_s`: how long this step took in the run that is being repeated; under the measured clock it
        counts instead of this pass's own time. `idle`: make the step even if there is nothing to do, as the
        run that is being repeated did.
        """
        if not (self.has_work or idle):
            return None
        with interrupts.held():
            return self._step(duration_s)

    def _step(self, duration_s: float | None) -> StepRecord:
        s = self.scheduler
        if self._kv_stale or self._runner_was_elsewhere():
            with interrupts.let_in():
                self.sync()
        self.settle()
        before = (self.now_s, self.inputs, self._by_time, self._by_step)
        lengths = len(self._by_time), len(self._by_step)
        begun: SchedulerOutput | None = None
        s.begin()
        try:
            t0, arrivals, inputs = self._deliver()
            control = perf_counter()
            plan = s.schedule(t0)
            control = perf_counter() - control
            if self._kv_doubtful:
                with interrupts.let_in():
                    self._confirm_hits()
            begun = plan
            if self.simulated:
                out = self.runner.execute(plan)
            else:
                with interrupts.let_in():
                    out = self.runner.execute(plan)
            if duration_s is not None and out.measured_s is not None:
                out.measured_s = duration_s
            cost = self.cost.price(plan)
            measured = self.config.clock == "measured"
            t1 = t0 + (out.measured_s or 0.0 if measured else cost.total_s if plan.chunks else 0.0)
            again = perf_counter()
            padding = plan.num_padding_tokens
            s.update(plan, out)
            control += perf_counter() - again
        except BaseException:
            written = _written_blocks(begun) if begun is not None else set()
            s.rollback()
            self.now_s, self.inputs, self._by_time, self._by_step = before
            for pending, arriving, length in zip(before[2:], self._arriving, lengths, strict=True):
                pending += reversed(arriving[: length - len(pending)])
            self._taken_back += 1
            self.settle()
            try:
                self._distrust(self.runner.damaged_blocks() | written)
            except BaseException:
                self._kv_stale = self._kv_doubtful = True
                raise
            raise
        inputs, self._done = self._done + inputs, []
        self.now_s = t1
        self._idle = not plan.chunks and not arrivals and not inputs
        record = StepRecord(
            step=plan.step,
            t0_s=t0,
            t1_s=t1,
            clock="measured" if measured else "modelled",
            chunks=s.it.records,
            events=s.drain(),
            tokens=s.it.tokens,
            slots=s.it.slots,
            gauges=Gauges(
                sum(1 for r in s.state.running if not r.seat_held),
                len(s.state.waiting),
                s.state.num_finished,
                s.state.pool.num_free,
                s.state.pool.num_cached_free,
                _saved_blocks(s) if s.state.has_groups or s.state.pool.enable_caching else 0,
                s.state.host.num_blocks - len(s.state.host.free),
            ),
            cost=cost,
            spans=out.spans if measured else _modelled_spans(plan, cost),
            measured_s=out.measured_s,
            counted=out.counted,
            expert_load=out.expert_load,
            routed=out.routed,
            device=out.device,
            profile=out.profile,
            logprobs=out.logprobs,
            gaps=out.gaps,
            arrivals=arrivals,
            inputs=inputs,
            num_padding_tokens=padding,
            schedule_s=control if measured else None,
            carry=s.state.carry(),
        )
        self._note(record)
        return record

    def _note(self, record: StepRecord) -> None:
        """Counts the steps that brought nobody further although somebody ran.

        Follows from the record alone, so a replay counts the same.
        """
        if got_further(record):
            self._stalled = self._stalled_computing = self._patience = 0
        elif record.chunks or record.gauges.num_running:
            self._stalled += 1
            self._stalled_computing += any(not c.padding for c in record.chunks)

    def apply(self, record: StepRecord) -> None:
        """Does a recorded step again from its record alone: asks no policy, runner or clock.

        Leaves the KV to `sync`. Raises ReplayError.
        """
        self._forget_pending(
            {x.request_id for x in record.arrivals}
            - {i["request_id"] for i in record.inputs if i["op"] == "add"}
        )
        self._known.update(i for x in record.arrivals for i in sequence_ids(x))
        changes: dict[str, Any] = {}
        for i in record.inputs:
            if i["op"] == "configure":
                changes.update(i["changes"])
        replay.apply(self.scheduler.state, record, changes)
        self.inputs, self._done = [], []
        self.now_s = record.t1_s
        self._idle = not record.chunks and not record.arrivals and not record.inputs
        self._note(record)

    def _forget_pending(self, arrived: set[str]) -> None:
        """These are no longer to arrive.

        Nearly always they are the next ones; else all are looked through.
        """
        for pending in (self._by_time, self._by_step):
            while pending and pending[-1][2].request_id in arrived:
                arrived.discard(pending.pop()[2].request_id)
        if arrived:
            self._by_time = [x for x in self._by_time if x[2].request_id not in arrived]
            self._by_step = [x for x in self._by_step if x[2].request_id not in arrived]

    def _distrust(self, damaged: set[int]) -> None:
        """Notes blocks that a failed step may have written, whether its pass failed or what came after.

        One may be held: by a request that was preempted in the step which has been taken back.
        """
        if damaged:
            self._kv_doubtful = True
            self._kv_stale = self._kv_stale or any(self.scheduler.state.pool.ref_count[b] for b in damaged)

    def _confirm_hits(self) -> None:
        """Has the runner look at the blocks that this step's admissions hit, other than those that the step
        itself computes.
        """
        s = self.scheduler
        planned = {e.block_id for e in s.state.journal if isinstance(e, ev.BlockCached)}
        tables, tokens = {}, {}
        for e in s.state.journal:
            if isinstance(e, ev.PrefixHit):
                n = next((i for i, b in enumerate(e.block_ids) if b in planned), len(e.block_ids))
                tables[e.request_id] = e.block_ids[:n]
                tokens[e.request_id] = s.state.requests[e.request_id].token_ids[: n * s.state.kv.block_size]
        if tables:
            self.runner.sync(tables, tokens)

    def _deliver(self) -> tuple[float, list[RequestSpec], list[dict[str, Any]]]:
        """Takes the user's inputs and the arrivals that are due.

        An engine with nothing to do jumps to the next arrival. Returns (t0, arrivals, inputs).

        Configuration comes first, then aborts, then arrivals: those that the user added, then the workload's.
        So an arrival that cannot be ranked never keeps another policy, or the end of the request that the
        policy fails on, from getting through.
        """
        s, step = self.scheduler, self.scheduler.step + 1
        t0 = self.now_s
        inputs = self._under_way = self.inputs
        self.inputs = []
        self._reconfigure([i["changes"] for i in inputs if i["op"] == "configure"])
        added = {i["spec"].request_id: i["spec"] for i in inputs if i["op"] == "add"}
        waits = s.has_unfinished and not self._idle
        if not (waits or self._by_step or added) and self._by_time:
            t0 = max(t0, self._by_time[-1][0])
        _take_due(self._by_time, t0, self._arriving[0])
        _take_due(self._by_step, step, self._arriving[1])
        due = [x[2] for x in (*self._arriving[0], *self._arriving[1])]
        aborted = {i["request_id"]: None for i in inputs if i["op"] == "abort"}
        dropped = self._drop(aborted, due)
        taken = [*added.values(), *dropped.values()]
        for spec in added.values():
            s.add(spec, t0, leaving=spec.request_id in aborted)
        for spec in due:
            if spec.request_id in dropped:
                continue
            try:
                self.check_request(spec)
            except RequestError as e:
                s.state.journal.append(ev.Refused(spec.request_id, str(e)))
            else:
                s.add(spec, t0)
            taken.append(spec)
        return t0, taken, [_plain_input(i) for i in inputs]

    def _drop(self, aborted: Iterable[str], due: list[RequestSpec]) -> dict[str, RequestSpec]:
        """Ends the aborted requests.

        Returns those of the workload that have not arrived yet, in this step or a later one: they never will.
        """
        s = self.scheduler
        unknown = [rid for rid in aborted if not s.abort(rid)]
        if not unknown:
            return {}
        pending = {x.request_id: x for x in (*due, *(x[2] for x in (*self._by_time, *self._by_step)))}
        dropped = {rid: pending[rid] for rid in unknown if rid in pending}
        self._by_time = [x for x in self._by_time if x[2].request_id not in dropped]
        self._by_step = [x for x in self._by_step if x[2].request_id not in dropped]
        s.state.journal.extend(ev.Refused(rid, "aborted before it arrived") for rid in dropped)
        return dropped

    def _reconfigure(self, changes: list[dict[str, Any]]) -> None:
        """Turns the knobs, all at once: a setting that fails can be replaced by a later input."""
        s = self.scheduler
        config = s.config
        for some in changes:
            for name, new in some.items():
                old = getattr(config, name)
                if old != new:
                    s.state.journal.append(
                        ev.Configured(name, "" if old is None else str(old), "" if new is None else str(new))
                    )
            config = config.replace(**some)
        if changes:
            s.configure(config)

    # plain data ---------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything that decides the engine's future, as primitives (specs by id)."""
        return {
            "now_s": self.now_s,
            "scheduler": self.scheduler.state.snapshot(),
            "pending": self.pending_ids,
            "known": sorted(self._known),
            "idle": self._idle,
        } | (
            {"stalled": self._stalled, "stalled_computing": self._stalled_computing} if self._stalled else {}
        )

    def restore(self, data: dict[str, Any], specs: dict[str, RequestSpec], sync: bool = True) -> int:
        """Makes the engine equal a snapshot; `specs` must hold every request it names.

        Returns how many KV blocks the runner had to compute again.

        `sync` False leaves the KV as it is: the caller replays further steps and calls `sync` itself.
        """
        self.scheduler.restore(data["scheduler"], specs)
        self.now_s = data["now_s"]
        self.inputs, self._done = [], []
        self._by_time, self._by_step, self._order, self._idle, self._known = [], [], 0, data["idle"], set()
        self.enqueue(specs[rid] for rid in data["pending"])
        self._known = set(data["known"])
        self._stalled, self._patience = data.get("stalled", 0), 0
        self._stalled_computing = data.get("stalled_computing", self._stalled)
        return self.sync() if sync else 0

    def _runner_was_elsewhere(self) -> bool:
        """Has another engine used this runner since (a branch that shares it)?

        Then its KV may hold that one's tokens.
        """
        if self.simulated:
            return False
        user = getattr(self.runner, "_used_by", None)
        if user is None:
            self.claim_runner()
        return user is not None and user() is not self

    def claim_runner(self) -> None:
        """From here on the runner's KV is this engine's; another that shares the runner computes its own
        again.
        """
        with suppress(AttributeError):  # a runner with slots: `None` for ever, as if it were never shared
            self.runner._used_by = ref(self)  # type: ignore[attr-defined]

    def sync(self) -> int:
        """Makes the runner's KV hold what the block tables say.

        Returns the number of blocks computed again.
        """
        self.claim_runner()
        holders = [r for r in self.scheduler.state.requests.values() if r.block_ids]
        num = self.runner.sync(
            {r.request_id: list(r.block_ids) for r in holders},
            {r.request_id: r.token_ids[: r.num_computed_tokens] for r in holders},
        )
        self._kv_stale, self._kv_doubtful = False, True  # blocks that nobody holds were not looked at
        return num

    def digest(self, form: int = DIGEST_FORM) -> str:
        """sha256 of the control plane and of what is still to come, times excluded.

        `form`: see DIGEST_FORM.
        """
        return plain_digest(self.snapshot(), form)


def plain_digest(snapshot: dict[str, Any], form: int = DIGEST_FORM) -> str:
    """The digest of an engine's snapshot."""
    rest = msgspec.json.encode([snapshot["pending"], snapshot["idle"]])
    return sha256(control_digest(snapshot["scheduler"], form).encode() + rest).hexdigest()


def without_pending(snapshot: dict[str, Any], spec: RequestSpec) -> dict[str, Any]:
    """The snapshot of an engine to which the request will never arrive: as after `Engine.discard`."""
    gone = set(sequence_ids(spec))
    return {
        **snapshot,
        "pending": [i for i in snapshot["pending"] if i != spec.request_id],
        "known": [i for i in snapshot["known"] if i not in gone],
    }


_Pending = tuple[float, int, RequestSpec]
"""(time or step of arrival, order, request)."""


def _when(x: _Pending) -> tuple[float, int]:
    return x[0], x[1]


def _take_due(pending: list[_Pending], now: float, into: list[_Pending]) -> None:
    while pending and pending[-1][0] <= now:
        into.append(pending[-1])  # first in both lists, then in one: whoever looks meanwhile finds it
        pending.pop()


def _ids(*pending: list[_Pending]) -> list[str]:
    return [x[2].request_id for some in pending for x in some]


def _written_blocks(plan: SchedulerOutput) -> set[int]:
    """The blocks into which the pass of this plan wrote."""
    size = plan.block_size
    blocks = {
        b for c in plan.chunks for b in c.block_table[c.start // size : -(-(c.start + c.num_tokens) // size)]
    }
    return blocks.union((dst for _, dst in plan.copies), (device for device, _ in plan.swaps_in))


def _saved_blocks(s: Scheduler) -> int:
    """Places in block tables less blocks in use: what sharing saves now."""
    return sum(map(s.state.kv.num_held, s.state.running)) - (
        s.state.pool.num_blocks - 1 - s.state.pool.num_free
    )


def _modelled_spans(plan: SchedulerOutput, cost: StepCost) -> list[Span]:
    """The copies of a step under the modelled clock: first those from the host, then the pass with those to
    the host beside it.
    """
    if not (plan.swaps_in or plan.swaps_out):
        return []
    start = cost.swap_in_s
    out = [Span("swap-in", 0.0, start, len(plan.swaps_in))] if plan.swaps_in else []
    out += [Span("swap-out", start, start + cost.swap_out_s, len(plan.swaps_out))] if plan.swaps_out else []
    return [*out, Span("pass", start, start + max(cost.compute_s, cost.memory_s) + cost.overhead_s)]


def _plain_input(i: dict[str, Any]) -> dict[str, Any]:
    """A user's input as it stands in a record: an added request is named there, its spec stands under
    `arrivals`.
    """
    if i["op"] == "add":
        return {"op": "add", "request_id": i["spec"].request_id}
    return i
