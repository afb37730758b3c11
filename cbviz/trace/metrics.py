"""What a run achieved, in numbers. Owns the definitions; knows neither engine nor pictures.

In symbols, for a sequence r of a request that arrived at A, was first scheduled in a step that began at S,
got n output tokens, and whose outputs came out of steps that ended at T(1) <= ... <= T(m) (m <= n: a step may
bring several tokens):

    TTFT(r)  = T(1) - A                        time to first token
    queue(r) = S - A                           time until it first got a share of a step
    TPOT(r)  = (T(m) - T(1)) / (n - 1)         time per output token after the first, n > 1
    ITL      = T(i) - T(i - 1), i = 2..m       inter-token latency: every gap of every request, pooled
    E2E(r)   = E - A                           E: end of the step in which it finished

A is `arrival_s`; for a request that arrives by `arrival_step` it is the start of that step, whatever
`arrival_s` says. Most requests are one sequence. One with n > 1, or with beams, is several: each has the
arrival and the S of its request, and latencies of its own. `num_requests`, `num_finished`, `num_aborted`,
`num_refused`, `num_unfinished`, `prompt_tokens`, rates of requests and goodput count a request once;
`num_sequences`, `num_running`, `num_waiting`, `output_tokens` and the latencies count each sequence. A
request is finished when all its sequences are. A sequence that was aborted, timed out, shed or refused is
left out of all latencies; one that still runs counts in TTFT, queue time and ITL, not in TPOT and E2E. Over
the steps k of the trace, with t0 and t1 their start and end:

    makespan            = t1(last) - t0(first)
    output_throughput   = output_tokens / makespan
    total_throughput    = (prompt_tokens + output_tokens) / makespan, prompt_tokens those of requests with a first token
    batch_utilisation   = mean over steps with a chunk of (rows that did useful work / seats); a padded or recomputing-only row does none,
                          an idle seat does none. Seats are max_num_seqs; where it was lowered, as many as
                          still run
    kv_usage            = blocks that requests hold after the last step / blocks of the pool: 0 where nothing runs; cached blocks count as free (vLLM's gauge)
    kv_usage_mean, peak = (used + partly_empty + reserved) / total slots while a step ran
    prefix_hit_rate     = tokens found in the cache at first admissions / tokens known then, as in vLLM; a preempted request that comes back
                          often finds its own blocks, which says nothing about sharing: `resumed_query_tokens`
                          and `resumed_hit_tokens` count that
    recompute_tax       = recomputed / total tokens computed
    goodput             = finished requests whose sequences all met their SLOs / makespan, over requests that have an SLO
    MFU, MBU            = floating-point operations (bytes moved) / (busy time x the device's peak)

Percentiles are interpolated linearly between order statistics (numpy's default). An empty mean is None, never
NaN.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cbviz import events as ev
from cbviz.messages import Gauges, StepRecord
from cbviz.trace.state import NORMAL_ENDS, RequestState, State
from cbviz.trace.trace import Cursor, Trace


class Metric(NamedTuple):
    """How a figure is shown: its unit, and what it is in a few words. `timed`: depends on the clock."""

    unit: str
    title: str
    timed: bool = False


_LATENCIES = {
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "itl_s": "inter-token latency",
    "e2e_s": "end-to-end latency",
    "queue_time_s": "queue time",
}

METRICS: dict[str, Metric] = {
    "makespan_s": Metric("s", "from the first step's start to the last one's end", True),
    "busy_s": Metric("s", "sum of the steps' durations", True),
    "num_steps": Metric("", "steps"),
    "num_requests": Metric("", "requests that arrived"),
    "num_sequences": Metric("", "sequences of these requests so far"),
    "num_finished": Metric("", "requests that ended by themselves"),
    "num_aborted": Metric("", "requests aborted, timed out or shed"),
    "num_refused": Metric("", "requests that never entered the queue"),
    "num_unfinished": Metric("", "requests that have not ended"),
    "num_running": Metric("", "sequences with a seat, at the end"),
    "num_waiting": Metric("", "sequences without one, at the end"),
    "prompt_tokens": Metric("tokens", "prompt tokens of requests with a first token, each prompt once"),
    "output_tokens": Metric("tokens", "tokens sampled"),
    "output_throughput": Metric("tokens/s", "output tokens a second", True),
    "total_throughput": Metric("tokens/s", "prompt and output tokens a second", True),
    "request_throughput": Metric("requests/s", "finished requests a second", True),
    **{
        f"{stat}_{name}": Metric("s", f"{title}, {stat}", True)
        for name, title in _LATENCIES.items()
        for stat in ("mean", "p50", "p99")
    },
    "num_preemptions": Metric("", "preemptions"),
    "recomputed_tokens": Metric("tokens", "tokens computed again after a preemption"),
    "recompute_tax": Metric("share", "recomputed tokens of all computed"),
    "padded_tokens": Metric("tokens", "tokens computed only as padding"),
    "rejected_tokens": Metric("tokens", "drafts computed and thrown away"),
    "draft_tokens": Metric("tokens", "drafts checked (vLLM's num_draft_tokens)"),
    "draft_acceptance_rate": Metric("share", "of these, right and said"),
    "mean_acceptance_length": Metric("tokens", "tokens a request got from a step that checked drafts, mean"),
    "prefix_query_tokens": Metric("tokens", "tokens looked up in the cache at first admissions"),
    "prefix_hit_tokens": Metric("tokens", "of these, found"),
    "prefix_hit_rate": Metric("share", "found of those looked up"),
    "resumed_query_tokens": Metric("tokens", "tokens looked up by preempted requests that came back"),
    "resumed_hit_tokens": Metric("tokens", "of these, found"),
    "num_evictions": Metric("blocks", "cached blocks given to somebody else"),
    "batch_utilisation": Metric("share", "rows with useful work a seat, mean over steps"),
    "kv_usage_mean": Metric("share", "slots that requests hold, mean over steps"),
    "kv_usage_peak": Metric("share", "slots that requests hold, greatest"),
    "kv_usage": Metric("share", "blocks that requests hold, after the last step"),
    "slo_attainment": Metric("share", "finished requests with an SLO that met it"),
    "goodput": Metric("requests/s", "finished requests that met their SLO, a second", True),
    "mfu": Metric("share", "floating-point operations of the device's peak", True),
    "mbu": Metric("share", "bytes moved of the device's peak", True),
    "mean_schedule_s": Metric("s", "control plane a step, wall time", True),
}
"""Every scalar of `metrics`, in the order in which they are shown."""


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` (0..1) of `values` lie, interpolated linearly; None if there are none."""
    if not values:
        return None
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean, None if there are no values."""
    return math.fsum(values) / len(values) if values else None


def arrival_s(trace: Trace, r: RequestState) -> float:
    """When the request came, in seconds of the trace's clock (A above); for a forked sequence, when its
    request came.
    """
    if r.spec is not None and r.spec.arrival_step is not None and 1 <= r.arrival_step <= len(trace):
        return trace.record(r.arrival_step).t0_s
    return r.arrival_s


def request_metrics(trace: Trace, cursor: Cursor | int | None = None) -> list[dict[str, Any]]:
    """One dict a sequence, in order of arrival: what was asked, how it ended, and its latencies in seconds
    (None where there is none yet, or none that counts).

    A request of one sequence is one row. `parent` names the request of a sequence that was forked (`n` > 1,
    beams); '' for the request itself.
    """
    rows = []
    timed = trace.has("time")
    for r in trace.state(cursor).by_index:
        a = arrival_s(trace, r)
        times = _output_times(trace, r)
        counts = timed and (r.finish_reason in NORMAL_ENDS or not r.finished)
        ended = counts and r.finish_reason in NORMAL_ENDS
        n = len(r.output_token_ids)
        ttft = times[0] - a if counts and times else None
        tpot = (times[-1] - times[0]) / (n - 1) if ended and n > 1 else None
        e2e = r.finish_s - a if ended else None
        met = None
        if r.spec is not None and ended and (r.spec.ttft_slo_s is not None or r.spec.tpot_slo_s is not None):
            met = (r.spec.ttft_slo_s is None or (ttft is not None and ttft <= r.spec.ttft_slo_s)) and (
                r.spec.tpot_slo_s is None or tpot is None or tpot <= r.spec.tpot_slo_s
            )
        rows.append(
            {
                "request_id": r.request_id,
                "parent": r.parent,
                "status": r.status,
                "finish_reason": r.finish_reason,
                "priority": r.priority,
                "prompt_tokens": r.num_prompt_tokens,
                "max_tokens": r.max_tokens,
                "output_tokens": n,
                "num_preemptions": r.num_preemptions,
                "arrival_s": a if timed else None,
                "arrival_step": r.arrival_step,
                "first_scheduled_step": _step(r.first_scheduled_step),
                "first_token_step": _step(r.first_token_step),
                "finish_step": _step(r.finish_step),
                "queue_time_s": r.first_scheduled_s - a if counts and r.first_scheduled_step > 0 else None,
                "ttft_s": ttft,
                "tpot_s": tpot,
                "e2e_s": e2e,
                "itl_s": [y - x for x, y in zip(times, times[1:])] if counts else [],
                "slo_met": met,
            }
        )
    return rows


def _step(step: int) -> int | None:
    return step if step > 0 else None


def _output_times(trace: Trace, r: RequestState) -> list[float]:
    """T(1)..T(m): ends of the steps that gave the request tokens."""
    times, last = [], -1
    for step in r.output_steps:
        if step != last:
            times.append(trace.record(step).t1_s)
            last = step
    return times


def latencies(trace: Trace, cursor: Cursor | int | None = None) -> dict[str, list[float]]:
    """All single values behind the latency figures, in seconds: `ttft_s`, `tpot_s`, `itl_s` (pooled over
    requests), `e2e_s`, `queue_time_s`.
    """
    return _pool(request_metrics(trace, cursor))


def _pool(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {
        name: [r[name] for r in rows if r[name] is not None] for name in _LATENCIES if name != "itl_s"
    }
    out["itl_s"] = [gap for r in rows for gap in r["itl_s"]]
    return out


def kv_usage(record: StepRecord, num_blocks: int) -> float | None:
    """Share of the pool that requests held while the step ran (0..1); from the gauges at its end where slots
    were not counted; None if neither is known.
    """
    s = record.slots
    if s.total:
        return (s.used + s.partly_empty + s.reserved) / s.total
    if num_blocks > 1 and record.gauges != Gauges():
        return 1 - record.gauges.num_free_blocks / (num_blocks - 1)
    return None


class Hits(NamedTuple):
    """Tokens that admissions found in the prefix cache: those of `first` admissions, and those of requests
    that `resumed` after a preemption.
    """

    first: int
    resumed: int


def prefix_hits(record: StepRecord) -> Hits:
    """What the step's admissions found in the prefix cache.

    What came back from the host was not found there.
    """
    swapped = {e.request_id for e in record.events if isinstance(e, ev.SwappedIn)}
    first = resumed = 0
    for e in record.events:
        if isinstance(e, ev.Admitted) and not e.resumed:
            first += e.num_cached_tokens
        elif isinstance(e, ev.Admitted) and e.request_id not in swapped:
            resumed += e.num_cached_tokens
        elif isinstance(e, ev.PrefixHit) and e.request_id in swapped:
            resumed += e.num_tokens
    return Hits(first, resumed)


def caches_prefixes(config: dict[str, Any]) -> bool:
    """Whether admissions look for a prefix at all; yes if the trace's config does not say."""
    return (
        str(config.get("enable_prefix_caching", True)) != "False"
        and str(config.get("kv_allocation", "paged")) == "paged"
    )


def _held_share(trace: Trace, state: State) -> float | None:
    """Share of the pool's blocks that requests hold at this moment (0..1), None if unknown."""
    usable = state.num_blocks - 1
    if usable < 1 or not state.step:
        return None
    if trace.has("blocks"):
        return 1 - state.num_free_blocks / usable
    gauges = trace.record(state.step).gauges
    return None if gauges == Gauges() else 1 - gauges.num_free_blocks / usable


def _by_request(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of each request: its own, then those of the sequences forked from it."""
    out: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        out.setdefault(r["parent"] or r["request_id"], []).append(r)
    return list(out.values())


def _end_of(sequences: list[dict[str, Any]]) -> str:
    """How a request ended: `finished`, `aborted`, `refused`, or `unfinished`."""
    statuses = {r["status"] for r in sequences}
    if "refused" in statuses:
        return "refused"
    if statuses != {"finished"}:
        return "unfinished"
    return "finished" if all(r["finish_reason"] in NORMAL_ENDS for r in sequences) else "aborted"


def useful_rows(record: StepRecord) -> int:
    """Rows of the step's batch that computed at least one token that was wanted and had not been computed
    before.
    """
    return sum(1 for c in record.chunks if not c.padding and c.num_tokens > c.num_recomputed)


def work(record: StepRecord) -> tuple[float, float, str] | None:
    """(floating-point operations, bytes moved, source) of the step: `counted` from the real pass where there
    is a count, else `modelled`; None if neither.
    """
    if record.counted and "flops" in record.counted:
        return (
            record.counted["flops"],
            record.counted.get("weight_bytes", 0.0) + record.counted.get("kv_bytes", 0.0),
            "counted",
        )
    if record.cost is not None:
        return record.cost.flops, record.cost.weight_bytes + record.cost.kv_bytes, "modelled"
    return None


def clock(records: Iterable[StepRecord]) -> str:
    """`measured`, `modelled`, `mixed`, or '' for no steps."""
    kinds = {r.clock for r in records}
    return "" if not kinds else kinds.pop() if len(kinds) == 1 else "mixed"


def num_seats(config: dict[str, Any]) -> int:
    """max_num_seqs of a trace's config (where a changed knob stands as text), 0 if unknown."""
    return _int(config.get("max_num_seqs"))


def token_budget(config: dict[str, Any]) -> int:
    """max_num_batched_tokens of a trace's config, 0 if unknown."""
    return _int(config.get("max_num_batched_tokens"))


def _int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0


def metrics(trace: Trace, cursor: Cursor | int | None = None) -> dict[str, Any]:
    """All figures of the run up to `cursor` (default: its end); units and meanings in METRICS, definitions
    above.

    Values are int, float or None, and three more keys: `clock` (whose time: measured, modelled, mixed),
    `device`, and `token_accounts` (the sums of the steps' TokenAccounts). Plain JSON, no NaN.
    """
    state = trace.state(cursor)
    records = trace.records[: state.step if state.event is None else state.step - 1]
    timed = trace.has("time")
    rows = request_metrics(trace, cursor)
    requests = _by_request(rows)
    ends = [_end_of(sequences) for sequences in requests]
    num_finished = ends.count("finished")
    makespan = (records[-1].t1_s - records[0].t0_s if records else 0.0) if timed else None
    busy = math.fsum(r.t1_s - r.t0_s for r in records) if timed else None

    total = useful = recomputed = padded = rejected = preemptions = evictions = 0
    hits = queries = resumed_hits = resumed_queries = 0
    looks_up = caches_prefixes(trace.header.config)
    flops = moved = 0.0
    known_work = True
    seats = num_seats(trace.header.config)
    shares: list[float] = []
    usages: list[float] = []
    scheduling: list[float] = []
    drafts = checks = 0
    for record in records:
        t = record.tokens
        total, useful, recomputed, padded, rejected = (
            total + t.total,
            useful + t.useful,
            recomputed + t.recomputed,
            padded + t.padded,
            rejected + t.rejected,
        )
        found = prefix_hits(record)
        hits, resumed_hits = hits + found.first, resumed_hits + found.resumed
        for c in record.chunks:
            drafts, checks = drafts + c.num_draft, checks + (c.num_draft > 0)
        for e in record.events:
            if isinstance(e, ev.Admitted) and looks_up:
                r = state.requests[e.request_id]
                if e.resumed:
                    resumed_queries += r.num_prompt_tokens + bisect_left(r.output_steps, record.step)
                else:
                    queries += r.num_prompt_tokens
            elif isinstance(e, ev.Preempted):
                preemptions += 1
            elif isinstance(e, ev.Evicted):
                evictions += 1
            elif isinstance(e, ev.Configured) and e.field == "max_num_seqs":
                seats = _int(e.new)
            elif isinstance(e, ev.Configured) and e.field == "enable_prefix_caching":
                looks_up = e.new != "False"
        if record.chunks:
            if seats:
                rows_run = sum(not c.padding for c in record.chunks)
                shares.append(useful_rows(record) / max(seats, rows_run))
            done = work(record)
            if done is None:
                known_work = False
            else:
                flops, moved = flops + done[0], moved + done[1]
        usage = kv_usage(record, trace.header.num_blocks)
        if usage is not None:
            usages.append(usage)
        if record.schedule_s is not None:
            scheduling.append(record.schedule_s)

    prompt_tokens = sum(
        sequences[0]["prompt_tokens"]
        for sequences in requests
        if any(r["first_token_step"] is not None for r in sequences)
    )
    output_tokens = sum(r["output_tokens"] for r in rows)
    judged = [
        all(r["slo_met"] for r in sequences)
        for sequences, end in zip(requests, ends)
        if end == "finished" and sequences[0]["slo_met"] is not None
    ]
    out: dict[str, Any] = {
        "makespan_s": makespan,
        "busy_s": busy,
        "num_steps": len(records),
        "num_requests": len(requests),
        "num_sequences": len(rows),
        "num_finished": num_finished,
        "num_aborted": ends.count("aborted"),
        "num_refused": ends.count("refused"),
        "num_unfinished": ends.count("unfinished"),
        "num_running": sum(1 for rid in state.running if not state.requests[rid].finished),
        "num_waiting": len(state.waiting),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_throughput": _rate(output_tokens, makespan),
        "total_throughput": _rate(prompt_tokens + output_tokens, makespan),
        "request_throughput": _rate(num_finished, makespan),
    }
    for name, values in _pool(rows).items():
        out[f"mean_{name}"], out[f"p50_{name}"], out[f"p99_{name}"] = (
            mean(values),
            percentile(values, 0.5),
            percentile(values, 0.99),
        )
    out |= {
        "num_preemptions": preemptions,
        "recomputed_tokens": recomputed,
        "recompute_tax": _share(recomputed, total),
        "padded_tokens": padded,
        "rejected_tokens": rejected,
        "draft_tokens": drafts,
        "draft_acceptance_rate": _share(drafts - rejected, drafts),
        "mean_acceptance_length": 1 + (drafts - rejected) / checks if checks else None,
        "prefix_query_tokens": queries,
        "prefix_hit_tokens": hits,
        "prefix_hit_rate": _share(hits, queries),
        "resumed_query_tokens": resumed_queries,
        "resumed_hit_tokens": resumed_hits,
        "num_evictions": evictions,
        "batch_utilisation": mean(shares),
        "kv_usage_mean": mean(usages),
        "kv_usage_peak": max(usages, default=None),
        "kv_usage": _held_share(trace, state),
        "slo_attainment": _share(sum(judged), len(judged)),
        "goodput": _rate(sum(judged), makespan) if judged else None,
        "mfu": _share(flops, (busy or 0) * trace.header.peak_flops_s) if known_work else None,
        "mbu": _share(moved, (busy or 0) * trace.header.peak_bytes_s) if known_work else None,
        "mean_schedule_s": mean(scheduling),
    }
    out = {name: out[name] for name in METRICS}
    out["clock"] = clock(records) or trace.header.clock
    out["device"] = trace.header.device
    out["token_accounts"] = {
        "total": total,
        "useful": useful,
        "recomputed": recomputed,
        "padded": padded,
        "rejected": rejected,
    }
    return out


def _rate(count: float, seconds: float | None) -> float | None:
    return count / seconds if seconds else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def format_value(name: str, value: Any) -> str:
    """A figure with its unit, as a person reads it: 12.3 ms, 81.4 %, 1,024 tokens. None is '-'."""
    if value is None:
        return "-"
    unit = METRICS[name].unit if name in METRICS else ""
    if unit == "s":
        return seconds(value)
    if unit == "share":
        return f"{100 * value:.1f} %"
    if isinstance(value, float):
        return f"{value:,.1f} {unit}" if abs(value) >= 10 else f"{value:.3g} {unit}"
    return f"{value:,} {unit}".rstrip() if isinstance(value, int) else str(value)


def seconds(value: float) -> str:
    """1.234 s, 12.3 ms, 4.56 µs."""
    for scale, unit in _SCALES:
        if abs(value) >= scale or unit == "µs":
            n = value / scale
            return f"{n:,.1f} {unit}" if abs(n) >= 100 else f"{n:.3g} {unit}"
    raise AssertionError("unreachable")


def whose_time(m: dict[str, Any]) -> str:
    """One sentence: whether the times of these metrics were measured or modelled, and on what."""
    device = f" ({m['device']})" if m.get("device") else ""
    return {
        "measured": f"times are measured{device}",
        "modelled": f"times are modelled{device}: lower bounds, not a measurement",
        "mixed": "times are partly measured, partly modelled: do not add them up",
    }.get(m.get("clock", ""), "this trace holds no times")


def format_metrics(m: dict[str, Any], names: Iterable[str] | None = None) -> str:
    """A table for people: name, value with unit, meaning; the last line says whether the times are measured
    or modelled. Figures that are None are left out.
    """
    shown = [
        (name, format_value(name, m[name]), METRICS[name].title)
        for name in (names or METRICS)
        if m.get(name) is not None
    ]
    wide = max((len(n) for n, _, _ in shown), default=0)
    figure = max((len(v) for _, v, _ in shown), default=0)
    lines = [f"{n:<{wide}}  {v:>{figure}}  {title}" for n, v, title in shown]
    return "\n".join([*lines, whose_time(m)])
