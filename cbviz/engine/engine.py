"""One step for every mode: deliver arrivals, schedule, execute, update, return a record.

Owns the clock, the requests still to arrive and the user's inputs; the scheduler owns everything else.
Returns records and forgets them: it knows no trace, session or widget. A step that raises, or is interrupted,
leaves the state as it was before the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from weakref import ref

import msgspec

from cbviz import events as ev
from cbviz.config import CONFIG_FIELDS, ConfigError, EngineConfig, check_names
from cbviz.core import replay
from cbviz.core.plain import DIGEST_FORM
from cbviz.core.policy import check_victim, get_policy
from cbviz.core.scheduler import Scheduler
from cbviz.core.speculative import get_proposer
from cbviz.cost.base import CostModel
from cbviz.engine import interrupts, requests
from cbviz.engine.arrivals import Arrivals, ids_of
from cbviz.engine.plain import plain_digest
from cbviz.engine.progress import PATIENCE_STEPS, got_further, patience, why_never_admitted, why_stuck
from cbviz.engine.record import make as make_record
from cbviz.engine.record import plain_input
from cbviz.engine.under_way import StepUnderWay, timed
from cbviz.messages import (
    RequestError,
    RequestSpec,
    RunnerOutput,
    SchedulerOutput,
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
        self.arrivals = Arrivals()
        """The requests still to arrive."""
        self._done: list[dict[str, Any]] = []
        """Inputs that took effect at once, to stand in the next record before the others."""
        self._under_way: list[dict[str, Any]] = []
        """Inputs that the step under way has taken."""
        self.num_taken_back = 0
        """How many steps failed."""
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
        return len(self.arrivals)

    @property
    def pending_ids(self) -> list[str]:
        """Ids of the requests that have not arrived yet, in order of arrival."""
        return self.arrivals.ids

    @property
    def coming_ids(self) -> list[str]:
        """Ids of the requests that stand in no kept record yet: added ones, those of the step under way, and
        those still to arrive. Any thread may ask.
        """
        arrivals = self.arrivals
        while True:
            seen = self.num_taken_back
            # A request moves from the first three to the next two, so none is missed in this order, unless a
            # failed step moves it back meanwhile.
            inputs, by_time, by_step = self.inputs[:], arrivals.by_time[::-1], arrivals.by_step[::-1]
            under_way, taken = self._under_way[:], [x[:] for x in arrivals.taken]
            if seen == self.num_taken_back:
                aborted = [i["request_id"] for i in under_way if i["op"] == "abort"]
                ended = [rid for rid in aborted if rid in arrivals.known]  # it may not have arrived yet
                added = [i["spec"].request_id for i in (*under_way, *inputs) if i["op"] == "add"]
                return list(dict.fromkeys([*ended, *added, *ids_of(*taken), *ids_of(by_time, by_step)]))

    def settle(self) -> None:
        """The last step's record is kept: its requests are found there from here on."""
        self._under_way = []
        self.arrivals.settle()

    @property
    def has_work(self) -> bool:
        return bool(self.inputs or self.arrivals) or self.scheduler.has_unfinished

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
        return why_never_admitted(s.state) if self._idle and not self.num_pending else ""

    # inputs -------------------------------------------------------------------------------------------------

    def check_request(self, spec: RequestSpec) -> None:
        """Raises RequestError, with the figures, if the request can't be served by this engine at all."""
        requests.check(spec, self._planned(), self.runner)

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

    def enqueue(self, specs: Iterable[RequestSpec]) -> None:
        """Requests of a workload, to be delivered at their arrival time or step.

        Ones that can't be served are refused on arrival. Raises RequestError for an id that was used before.
        """
        self.arrivals.enqueue(specs)

    def discard(self, request_id: str) -> None:
        """A request that has not arrived never will; its ids may be used again.

        Raises KeyError if it is not among them.
        """
        self.arrivals.discard(request_id)

    def revise(self, spec: RequestSpec) -> None:
        """Another spec for a request that has not arrived; its place in the order of arrival stays.

        Raises KeyError if it is not among them.
        """
        self.arrivals.revise(spec)

    def add(self, spec: RequestSpec) -> None:
        """A user's request; it joins the next step. Raises RequestError."""
        self.check_request(spec)
        self.arrivals.take_ids(spec)
        self.inputs.append({"op": "add", "spec": spec})

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
            plain_input(i) | ({"spec": msgspec.to_builtins(i["spec"])} if i["op"] == "add" else {})
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
        requests.check_change(new, planned, list(self.scheduler.state.requests.values()), queued, self.runner)
        self.inputs.append({"op": "configure", "changes": changes})

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
        """The recipe of a step; see CONTRIBUTING.md."""
        self._mend_kv()
        with StepUnderWay(self, duration_s) as now:
            now.t0_s = self._deliver_arrivals(now)  # 1. requests whose time has come join the queue
            now.plan = self._schedule(now)  # 2. who gets how many tokens, in which blocks
            now.out = self._execute(now)  # 3. the model computes them: the new token ids
            self._update(now)  # 4. the requests grow, finish and give blocks back
        return self._record(now)  # 5. what happened becomes a StepRecord

    def _mend_kv(self) -> None:
        """Computes again what a failed pass or another engine's may have written over."""
        if self._kv_stale or self._runner_was_elsewhere():
            with interrupts.let_in():
                self.sync()

    def _schedule(self, now: StepUnderWay) -> SchedulerOutput:
        with timed(now):
            plan = self.scheduler.schedule(now.t0_s)
        if self._kv_doubtful:
            with interrupts.let_in():
                self._confirm_hits()
        return plan

    def _execute(self, now: StepUnderWay) -> RunnerOutput:
        now.runs = True
        if self.simulated:
            out = self.runner.execute(now.plan)
        else:
            with interrupts.let_in():
                out = self.runner.execute(now.plan)
        if now.duration_s is not None and out.measured_s is not None:
            out.measured_s = now.duration_s
        return out

    def _update(self, now: StepUnderWay) -> None:
        now.cost = self.cost.price(now.plan)
        with timed(now):
            self.scheduler.update(now.plan, now.out)

    def _record(self, now: StepUnderWay) -> StepRecord:
        inputs, self._done = self._done + now.inputs, []
        record = make_record(now, self.scheduler, inputs, self.config.clock == "measured")
        self.now_s = record.t1_s
        self._idle = not record.chunks and not record.arrivals and not record.inputs
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
        self.arrivals.forget(
            {x.request_id for x in record.arrivals}
            - {i["request_id"] for i in record.inputs if i["op"] == "add"}
        )
        self.arrivals.known.update(i for x in record.arrivals for i in sequence_ids(x))
        changes: dict[str, Any] = {}
        for i in record.inputs:
            if i["op"] == "configure":
                changes.update(i["changes"])
        replay.apply(self.scheduler.state, record, changes)
        self.inputs, self._done = [], []
        self.now_s = record.t1_s
        self._idle = not record.chunks and not record.arrivals and not record.inputs
        self._note(record)

    def distrust(self, written: set[int]) -> None:
        """Notes blocks that a failed step may have written, whether its pass failed or what came after.

        One may be held: by a request that was preempted in the step which has been taken back.
        """
        try:
            damaged = self.runner.damaged_blocks() | written
        except BaseException:
            self._kv_stale = self._kv_doubtful = True
            raise
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

    def _deliver_arrivals(self, now: StepUnderWay) -> float:
        """Takes the user's inputs and the requests that are due. Returns when the step begins, in seconds.

        An engine with nothing to do jumps to the next arrival. Configuration comes first, then aborts, then
        arrivals: those that the user added, then the workload's. So an arrival that cannot be ranked never
        keeps another policy, or the end of the request that the policy fails on, from getting through.
        """
        s, arrivals = self.scheduler, self.arrivals
        inputs = self._under_way = self.inputs
        self.inputs = []
        self._reconfigure([i["changes"] for i in inputs if i["op"] == "configure"])
        added = {i["spec"].request_id: i["spec"] for i in inputs if i["op"] == "add"}
        aborted = {i["request_id"]: None for i in inputs if i["op"] == "abort"}
        t0 = self.now_s
        waits = s.has_unfinished and not self._idle
        if not (waits or arrivals.by_step or added) and arrivals.by_time:
            t0 = max(t0, arrivals.by_time[-1][0])
        due = arrivals.take_due(t0, s.step + 1)
        dropped = self._drop(aborted, due)
        for spec in added.values():
            s.add(spec, t0, leaving=spec.request_id in aborted)
        due = [spec for spec in due if spec.request_id not in dropped]
        for spec in due:
            self._admit_to_queue(spec, t0)
        now.arrivals = [*added.values(), *dropped.values(), *due]
        now.inputs = [plain_input(i) for i in inputs]
        return t0

    def _admit_to_queue(self, spec: RequestSpec, t0: float) -> None:
        """A request of the workload joins the queue, or is refused with the reason."""
        try:
            self.check_request(spec)
        except RequestError as e:
            self.scheduler.state.journal.append(ev.Refused(spec.request_id, str(e)))
        else:
            self.scheduler.add(spec, t0)

    def _drop(self, aborted: Iterable[str], due: list[RequestSpec]) -> dict[str, RequestSpec]:
        """Ends the aborted requests.

        Returns those of the workload that have not arrived yet, in this step or a later one: they never will.
        """
        unknown = [rid for rid in aborted if not self.scheduler.abort(rid)]
        if not unknown:
            return {}
        arrivals = self.arrivals
        pending = {x.request_id: x for x in (*due, *(x[2] for x in (*arrivals.by_time, *arrivals.by_step)))}
        dropped = {rid: pending[rid] for rid in unknown if rid in pending}
        arrivals.drop(dropped)
        self.scheduler.state.journal.extend(ev.Refused(rid, "aborted before it arrived") for rid in dropped)
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
            "known": sorted(self.arrivals.known),
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
        self._idle = data["idle"]
        self.arrivals = Arrivals()
        self.enqueue(specs[rid] for rid in data["pending"])
        self.arrivals.known = set(data["known"])
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
