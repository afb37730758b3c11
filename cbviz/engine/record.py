"""What a step leaves behind: its record, made of plain values alone."""

from __future__ import annotations

from typing import Any

from cbviz.core.scheduler import Scheduler
from cbviz.core.state import ControlState
from cbviz.engine.under_way import StepUnderWay
from cbviz.messages import Gauges, SchedulerOutput, Span, StepCost, StepRecord


def make(now: StepUnderWay, scheduler: Scheduler, inputs: list[dict[str, Any]], measured: bool) -> StepRecord:
    """The record of a step that has been made. Drains the journal.

    `inputs`: what the user asked for, as plain data. `measured`: the clock is.
    """
    plan, out = now.plan, now.out
    return StepRecord(
        step=plan.step,
        t0_s=now.t0_s,
        t1_s=end_s(now, measured),
        clock="measured" if measured else "modelled",
        chunks=scheduler.it.records,
        events=scheduler.drain(),
        tokens=scheduler.it.tokens,
        slots=scheduler.it.slots,
        gauges=gauges(scheduler.state),
        cost=now.cost,
        spans=out.spans if measured else modelled_spans(plan, now.cost),
        measured_s=out.measured_s,
        counted=out.counted,
        expert_load=out.expert_load,
        routed=out.routed,
        device=out.device,
        profile=out.profile,
        logprobs=out.logprobs,
        gaps=out.gaps,
        arrivals=now.arrivals,
        inputs=inputs,
        num_padding_tokens=plan.num_padding_tokens,
        schedule_s=now.control_s if measured else None,
        carry=scheduler.state.carry(),
    )


def end_s(now: StepUnderWay, measured: bool) -> float:
    """When the step ends on the run's clock. A modelled step without tokens takes no time."""
    if measured:
        return now.t0_s + (now.out.measured_s or 0.0)
    return now.t0_s + (now.cost.total_s if now.plan.chunks else 0.0)


def gauges(state: ControlState) -> Gauges:
    """What an exporter would show after the step."""
    pool = state.pool
    return Gauges(
        sum(1 for r in state.running if not r.seat_held),
        len(state.waiting),
        state.num_finished,
        pool.num_free,
        pool.num_cached_free,
        saved_blocks(state) if state.has_groups or pool.enable_caching else 0,
        state.host.num_blocks - len(state.host.free),
    )


def saved_blocks(state: ControlState) -> int:
    """Places in block tables less blocks in use: what sharing saves now."""
    in_use = state.pool.num_blocks - 1 - state.pool.num_free
    return sum(map(state.kv.num_held, state.running)) - in_use


def modelled_spans(plan: SchedulerOutput, cost: StepCost) -> list[Span]:
    """The copies of a step under the modelled clock: first those from the host, then the pass with those to
    the host beside it.
    """
    if not (plan.swaps_in or plan.swaps_out):
        return []
    start = cost.swap_in_s
    out = [Span("swap-in", 0.0, start, len(plan.swaps_in))] if plan.swaps_in else []
    out += [Span("swap-out", start, start + cost.swap_out_s, len(plan.swaps_out))] if plan.swaps_out else []
    return [*out, Span("pass", start, start + max(cost.compute_s, cost.memory_s) + cost.overhead_s)]


def plain_input(i: dict[str, Any]) -> dict[str, Any]:
    """A user's input as it stands in a record: an added request is named there, its spec stands under
    `arrivals`.
    """
    if i["op"] == "add":
        return {"op": "add", "request_id": i["spec"].request_id}
    return i
