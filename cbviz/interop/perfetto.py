"""A trace as Chrome's trace-event JSON, which Perfetto opens (ui.perfetto.dev).

Knows the trace and that format alone.

Process "engine": one track of steps, counters of queues, blocks and tokens. Process "requests": one track a
request, whose slices (waiting, prefill, decode, ...) never overlap; a preemption is an instant, and an arrow
leads from the one who lost its blocks to the one who needed them. Times are those of the trace, in
microseconds with three decimals; whether they are measured or modelled stands in `otherData`.
"""

from __future__ import annotations

from typing import Any

from cbviz import events as ev
from cbviz.trace.explain import explain
from cbviz.trace.metrics import arrival_s, clock
from cbviz.trace.state import STATES
from cbviz.trace.trace import Trace

ENGINE, REQUESTS = 1, 2
"""Process ids."""
SPANS = ("pass", "copy", "swap-in", "swap-out")
SPAN_TITLES = {
    "pass": "pass, in steps that copy",
    "copy": "copies on the device",
    "swap-in": "copies from the host",
    "swap-out": "copies to the host",
}
"""Lanes of what a step's time is made of, where blocks are copied: what lies beside what can be seen."""
_EMPTY = ("none", "finished", "aborted")


def to_perfetto(trace: Trace, *, sentences: bool = True) -> dict[str, Any]:
    """The whole trace as `{"traceEvents": [...]}`, plain JSON.

    `sentences`: each step carries its explanation as arguments.

    Raises ValueError for a trace without times.
    """
    if not trace.has("time"):
        raise ValueError(
            "this trace has no times, and Perfetto's axis is time"
            + (f": {trace.header.missing['time']}" if "time" in trace.header.missing else "")
        )
    out: list[dict[str, Any]] = []
    _name(out, ENGINE, None, f"engine ({trace.header.model} on {trace.header.device}, {trace.header.clock})")
    _name(out, REQUESTS, None, "requests")
    _name(out, ENGINE, 1, "steps")
    lanes = sorted({s.what for record in trace for s in record.spans}, key=SPANS.index)
    for what in lanes:
        _name(out, ENGINE, 2 + SPANS.index(what), SPAN_TITLES[what])
    state = trace.state()
    for r in state.by_index:
        _name(out, REQUESTS, r.index + 1, r.request_id)
    for record in trace:
        args: dict[str, Any] = {
            "tokens": record.tokens.total,
            "requests": len(record.chunks),
            "clock": record.clock,
        }
        if sentences:
            args["why"] = list(map(str, explain(trace, record.step)))
        out.append(
            {
                "ph": "X",
                "pid": ENGINE,
                "tid": 1,
                "name": f"step {record.step}",
                "cat": "step",
                **_span(record.t0_s, record.t1_s),
                "args": args,
            }
        )
        for s in record.spans:
            span = {
                "ph": "X",
                "pid": ENGINE,
                "tid": 2 + SPANS.index(s.what),
                "name": f"{s.what} {s.num_blocks} blocks" if s.num_blocks else s.what,
                "cat": "copies",
            }
            out.append(
                {
                    **span,
                    **_span(record.t0_s + s.start_s, record.t0_s + s.end_s),
                    "args": {"bytes": s.bytes, "clock": record.clock},
                }
            )
        g, at = record.gauges, _us(record.t1_s)
        out.append(
            {
                "ph": "C",
                "pid": ENGINE,
                "name": "requests",
                "ts": at,
                "args": {"running": g.num_running, "waiting": g.num_waiting},
            }
        )
        if trace.has("blocks"):
            out.append(
                {
                    "ph": "C",
                    "pid": ENGINE,
                    "name": "free blocks",
                    "ts": at,
                    "args": {"cached": g.num_cached_blocks, "free": g.num_free_blocks - g.num_cached_blocks},
                }
            )
        if trace.has("accounting"):
            t = record.tokens
            out.append(
                {
                    "ph": "C",
                    "pid": ENGINE,
                    "name": "tokens a step",
                    "ts": _us(record.t0_s),
                    "args": {
                        "useful": t.useful,
                        "recomputed": t.recomputed,
                        "padded": t.padded,
                        "rejected": t.rejected,
                    },
                }
            )
        for i, e in enumerate(record.events):
            if isinstance(e, ev.Preempted):
                loser, winner = state.requests[e.request_id].index + 1, state.requests[e.for_id].index + 1
                at = _us(record.t0_s)
                out.append(
                    {
                        "ph": "i",
                        "s": "t",
                        "pid": REQUESTS,
                        "tid": loser,
                        "name": f"preempted for {e.for_id}",
                        "cat": "preemption",
                        "ts": at,
                        "args": {
                            "tokens lost": e.num_tokens_lost,
                            "rule": e.rule,
                            "blocks": list(e.block_ids),
                        },
                    }
                )
                if loser != winner:
                    flow = {
                        "cat": "preemption",
                        "name": "gives its blocks to",
                        "id": f"{record.step}.{i}",
                        "pid": REQUESTS,
                    }
                    out.append({"ph": "s", "tid": loser, "ts": at, **flow})
                    out.append({"ph": "f", "bp": "e", "tid": winner, "ts": at, **flow})
            elif isinstance(e, (ev.Refused, ev.Finished)):
                reason = e.reason
                at = _us(record.t0_s if isinstance(e, ev.Refused) else record.t1_s)
                out.append(
                    {
                        "ph": "i",
                        "s": "t",
                        "pid": REQUESTS,
                        "tid": state.requests[e.request_id].index + 1,
                        "name": "refused" if isinstance(e, ev.Refused) else f"finished: {reason}",
                        "cat": "end",
                        "ts": at,
                        "args": {"reason": reason},
                    }
                )
    for r in state.by_index:
        begin = (
            trace.record(r.fork_step).t0_s if r.parent else arrival_s(trace, r)
        )  # a forked sequence did not wait by itself
        out += _slices(trace, r.index, begin)
    return {
        "traceEvents": out,
        "displayTimeUnit": "ms",
        "otherData": {
            "producer": trace.header.producer,
            "clock": clock(trace.records) or trace.header.clock,
            "device": trace.header.device,
            "model": trace.header.model,
            "workload": trace.header.workload,
        },
    }


def _slices(trace: Trace, index: int, arrived_s: float) -> list[dict[str, Any]]:
    """The request's states as slices that touch but never overlap."""
    segments = trace.segments[index] if index < len(trace.segments) else []
    out: list[dict[str, Any]] = []
    for i, s in enumerate(segments):
        last = segments[i + 1].step - 1 if i + 1 < len(segments) else len(trace)
        if s.step > len(trace) or STATES[s.code] in _EMPTY:
            continue
        begin = trace.record(s.step).t0_s
        if i == 0 and arrived_s < begin:
            if STATES[s.code] == "waiting":
                begin = arrived_s  # it came while the step before was running
            else:
                out.append(
                    {
                        "ph": "X",
                        "pid": REQUESTS,
                        "tid": index + 1,
                        "name": "waiting",
                        "cat": "state",
                        **_span(arrived_s, begin),
                        "args": {},
                    }
                )
        out.append(
            {
                "ph": "X",
                "pid": REQUESTS,
                "tid": index + 1,
                "name": STATES[s.code],
                "cat": "state",
                **_span(begin, trace.record(last).t1_s),
                "args": {"first step": s.step, "last step": last},
            }
        )
    return out


def _name(out: list[dict[str, Any]], pid: int, tid: int | None, name: str) -> None:
    """Names a process, or a thread of it, and puts it in its place."""
    kind = "process" if tid is None else "thread"
    where = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
    out.append({"ph": "M", **where, "name": f"{kind}_name", "args": {"name": name}})
    out.append(
        {
            "ph": "M",
            **where,
            "name": f"{kind}_sort_index",
            "args": {"sort_index": pid if tid is None else tid},
        }
    )


def _us(t: float) -> float:
    """Seconds as microseconds, to the nanosecond."""
    return round(t * 1e6, 3)


def _span(begin_s: float, end_s: float) -> dict[str, float]:
    begin, end = _us(begin_s), _us(end_s)
    return {"ts": begin, "dur": round(end - begin, 3)}
