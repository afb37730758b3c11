"""The scheduler: who computes what in the next step, and why.

Knows no clock (times are given), no tensors, no costs, no trace: it appends events to its journal and whoever
steps it drains them. The state is a thing of its own (`core.state`); disciplines (`config.Discipline`) are
rows of a table: `schedule` reads the row, it has no modes of its own. The `vllm` row does step for step what
vLLM 0.32's v1 scheduler does.

`schedule` and `update` note how to undo what they did; `rollback` leaves the state as it was before the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cbviz import events as ev
from cbviz.config import ConfigError, EngineConfig
from cbviz.core import accounts, beam, endings, estimate, outputs, queue
from cbviz.core.admission import admit
from cbviz.core.iteration import Iteration
from cbviz.core.preemption import preempt, retract
from cbviz.core.request import Request, is_prefill
from cbviz.core.running import pad, run
from cbviz.core.state import ControlState
from cbviz.events import AnyEvent
from cbviz.messages import RequestSpec, RunnerOutput, SchedulerOutput


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
        fault of vLLM's, for replaying its recordings, never for running a model. It also keeps vLLM's endless
        wait when padding drafts exceed the budget.
        """
        self.state = ControlState(config, eos_token_ids, use_output_len, keep_planned_hashes)
        self.it = Iteration(0, config, 0.0)
        """The step that was planned last."""

    # the recipe ---------------------------------------------------------------------------------------------

    def schedule(self, now_s: float = 0.0) -> SchedulerOutput:
        """Decides the next step. Raises PolicyError (the state is then as `rollback` leaves it)."""
        state = self.state
        state.step += 1
        state.pool.step = state.step
        self.it = it = Iteration(state.step, state.config, now_s)
        plan = it.plan
        plan.drafting = state.drafting
        plan.finished_ids, state.finished_ids = state.finished_ids, []
        state.kv.copies = []
        endings.close_batch(state, force=not state.rules.hold_seat)
        endings.expire(state, now_s)
        queue.sort(state, now_s)
        if state.rules.mix == "prefill-first":
            self._prefill_or_decode(it)
        else:
            run(state, it, self._running_order())
            admit(state, it)
        if state.has_groups and not plan.chunks and not it.num_preempted:
            self._let_beams_give_way(it)
        plan.copies = tuple(state.kv.copies)
        accounts.close(state, it)
        return plan

    def update(self, plan: SchedulerOutput, out: RunnerOutput) -> None:
        """Takes the step's tokens: appends them, ends what is finished, frees its blocks.

        Raises RunnerOutputError or ProposerError before any change.
        """
        outputs.take(self.state, self.it, out)
        self.it.shares = []
        self.state.undo.clear()

    def _running_order(self) -> list[Request]:
        """Who of the running gets tokens first: as they came, or those that decode."""
        running = self.state.running
        if self.state.rules.mix == "decode-first" and any(is_prefill(r) for r in running):
            return sorted(running, key=is_prefill)
        return running

    def _prefill_or_decode(self, it: Iteration) -> None:
        """A step holds prefills or decodes; prefills win."""
        state = self.state
        if half_done := [r for r in state.running if is_prefill(r) and not r.seat_held]:
            run(state, it, half_done)
        admit(state, it)
        if it.plan.chunks:
            left_out = [r for r in state.running if not r.seat_held and r not in it.shares]
            state.journal.extend(ev.Skipped(r.request_id, "prefill-step") for r in left_out)
            return
        # Also where every half-done prefill has just lost its blocks: somebody must get on.
        if state.rules.when_full == "retract":
            retract(state, it)
        run(state, it, state.running)
        if state.rules.pad:
            pad(state, it)
        estimate.adapt(state, it)

    def _let_beams_give_way(self, it: Iteration) -> None:
        """If nothing runs and the head of the queue lacks only what idle beams hold, preempt those beams.

        A beam is idle while it waits for a sibling.
        """
        state = self.state
        while state.waiting and not it.plan.chunks:
            head = state.waiting[0]
            reason, need, have = head.last_wait or ("", 0, 0)
            idle = [r for r in state.running if r.candidates is not None and _are_others(state, r, head)]
            if not idle or reason not in ("seats", "blocks", "watermark"):
                return
            preempt(state, it, idle[-1], head, (need, have), "idle-beam")
            it.num_preempted = 0
            admit(state, it)

    # inputs between steps -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts a step: what follows, up to `update`, can be taken back by `rollback`."""
        self.state.begin()

    def rollback(self) -> None:
        """Takes back everything since `begin`."""
        self.state.rollback()
        self.it.shares = []

    def configure(self, config: EngineConfig) -> None:
        """Takes a changed config; it holds from the next admission on, running requests keep their blocks and
        seats.
        """
        self.state.configure(config)

    def add(self, spec: RequestSpec, now_s: float = 0.0, leaving: bool = False) -> Request | None:
        """Puts a request into the waiting queue; None if the queue is full.

        The caller has checked that it can be served at all.

        `leaving`: the request is already aborted. It ends at once, and the policy is not called.
        """
        state = self.state
        if spec.request_id in state.requests:
            raise ValueError(f"request id {spec.request_id!r} is in use")
        if full := queue.why_full(state, spec):
            state.journal.append(ev.Refused(spec.request_id, full))
            return None
        if not (state.ranked_now or leaving):
            # So that its place follows from the queue as it is now, not from ranks of another step.
            queue.sort(state, now_s)
        r = state.arrive(spec, spec.arrival_s if spec.arrival_step is None else now_s)
        if leaving:
            place = len(state.waiting)
            state.enqueue(r, place)
        else:
            place = queue.join(state, r, now_s)
        if state.tokens_waiting is not None:
            state.tokens_waiting += r.num_tokens
        if state.next_end_s is not None:
            state.next_end_s = min(state.next_end_s, endings.end_of(state, r)[0])
        state.journal.append(
            ev.Arrived(r.request_id, place, r.num_prompt_tokens, r.max_tokens, r.arrival_s, r.priority)
        )
        if leaving:
            self.abort(r.request_id)
        return r

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """Ends an unfinished request in any state, and the sequences forked from it; blocks come back at
        once. False if there is nothing to end.
        """
        return endings.abort(self.state, request_id, reason)

    def resize(self, num_blocks: int) -> None:
        """Another pool size, between steps.

        Raises ConfigError, with the figures, if what is under way does not fit.
        """
        state = self.state
        new = state.config.replace(num_blocks=num_blocks)
        _check_size(state, new)
        state.pool.step = state.step + 1  # it belongs to the step that comes
        moved, dropped = state.resize(num_blocks)
        state.journal.append(ev.Configured("num_blocks", str(state.config.num_blocks), str(num_blocks)))
        state.journal.append(ev.Resized(num_blocks, moved, dropped))
        state.configure(new)

    def restore(self, data: dict[str, Any], specs: dict[str, RequestSpec]) -> None:
        """Makes the state equal a snapshot's. `specs` must hold every request that the snapshot names."""
        self.state.restore(data, specs)
        queue.rank_as_restored(self.state)
        self.it.shares = []

    # asking -------------------------------------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig:
        return self.state.config

    @property
    def step(self) -> int:
        """Steps scheduled so far."""
        return self.state.step

    @property
    def has_unfinished(self) -> bool:
        return bool(self.state.waiting) or any(not r.seat_held for r in self.state.running)

    @property
    def drafts_in_flight(self) -> dict[str, int]:
        """Between `schedule` and `update`: how many drafts each request has in the step."""
        pairs = zip(self.it.shares, self.it.records, strict=True) if self.it.shares else ()
        return {r.request_id: c.num_draft for r, c in pairs}

    def drain(self) -> list[AnyEvent]:
        """The events since the last call, in order."""
        out = self.state.journal.copy()
        self.state.journal.clear()
        return out


def _are_others(state: ControlState, r: Request, head: Request) -> bool:
    """Is the beam `r` one of another request's than `head`?"""
    return beam.root_of(state, r) is not beam.root_of(state, head)


def _check_size(state: ControlState, new: EngineConfig) -> None:
    """Raises ConfigError, with the figures, if what is under way does not fit into `new.num_blocks`."""
    num_blocks, pool = new.num_blocks, state.pool
    requests = state.requests.values()
    if beams := [beam.blocks_at_most(r.spec, new) for r in requests if r.is_beam]:
        if num_blocks - 1 < max(beams):
            raise ConfigError(
                f"num_blocks is {num_blocks}, but the beams of a request may need {max(beams)} after "
                f"step {state.step}: the least is {max(beams) + 1}"
            )
    largest = max(requests, key=lambda r: r.num_prompt_tokens + r.max_tokens, default=None)
    if largest is not None:
        most = largest.num_prompt_tokens + largest.max_tokens + state.config.num_draft_slots
        need = state.kv.blocks_for(most)
        used = pool.num_blocks - 1 - pool.num_free
        if num_blocks - 1 < max(need, used):
            why = f"{largest.request_id} may need {need}" if need >= used else f"{used} are in use"
            raise ConfigError(
                f"num_blocks is {num_blocks}, which leaves {num_blocks - 1} to give out after step "
                f"{state.step}, but {why}: the least is {max(need, used) + 1}"
            )
    beyond = [b for b in range(num_blocks, pool.num_blocks) if pool.ref_count[b]]
    if state.kv.contiguous and beyond:
        raise ConfigError(
            f"num_blocks is {num_blocks}, but block {beyond[-1]} is in use after step {state.step} and "
            f"a contiguous run can't move: the least is {beyond[-1] + 1}"
        )
