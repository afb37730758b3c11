"""Two runs side by side: are they the same, and where do they part? Knows traces alone; times never decide equality.

Schedules are compared step by step and key by key, tokens request by request. Where a run recorded the gap between its best
and second-best token, a first difference below `TIE_NATS` is reported as a tie: two correct engines may part there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from cbviz import events as ev
from cbviz.messages import StepRecord
from cbviz.trace.metrics import METRICS, format_value, metrics, whose_time
from cbviz.trace.state import RequestState
from cbviz.trace.trace import Trace

TIE_NATS = 0.001

KEYS = ("arrived", "refused", "configured", "admitted", "preempted", "scheduled", "blocks", "evicted", "sampled", "finished", "freed")
"""What is compared of a step, in this order: the first key that differs is reported."""
_BLOCK_KEYS = ("blocks", "evicted", "freed")
_TOKEN_KEYS = ("sampled",)


@dataclass(frozen=True)
class Difference:
    """The first place where two schedules part. `ours` and `theirs` are plain values of `key` at `step`, None where a run has no such step."""

    step: int
    key: str
    ours: Any
    theirs: Any
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class TokenDifference:
    """First differing output position (from 0) of one request. A token is None where that run has no such output.

    `gap_nats`: log-probability of the best token less that of its best rival there, in a run that recorded it (the smaller of two). `tie`: below TIE_NATS.
    """

    request_id: str
    position: int
    ours: int | None
    theirs: int | None
    gap_nats: float | None
    tie: bool

    def __str__(self) -> str:
        gap = "" if self.gap_nats is None else f" (the two best were {self.gap_nats:.6f} nats apart{': a tie' if self.tie else ''})"
        if self.ours is None or self.theirs is None:
            longer = "theirs" if self.ours is None else "ours"
            return f"{self.request_id}: equal for {self.position} tokens, then only {longer} goes on"
        return f"{self.request_id}, output {self.position}: token {self.ours} against {self.theirs}{gap}"


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. `metrics` maps a name to (ours, theirs, theirs / ours or None)."""

    schedules_equal: bool
    blocks_equal: bool
    tokens_equal: bool
    first_difference: Difference | None
    token_differences: list[TokenDifference] = field(default_factory=list)
    metrics: dict[str, tuple[Any, Any, float | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What could not be compared, and why; whose times these are."""
    names: tuple[str, str] = ("ours", "theirs")

    @property
    def equal(self) -> bool:
        """Schedules, blocks and tokens are the same (times aside)."""
        return self.schedules_equal and self.blocks_equal and self.tokens_equal

    @property
    def first_token_difference(self) -> TokenDifference | None:
        return self.token_differences[0] if self.token_differences else None

    @property
    def ties(self) -> list[TokenDifference]:
        return [d for d in self.token_differences if d.tie]

    @property
    def tokens_equal_up_to_ties(self) -> bool:
        """Every request's tokens are equal, or part first at a tie."""
        return all(d.tie for d in self.token_differences)

    def __str__(self) -> str:
        return format_comparison(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        d, t = self.first_difference, self.token_differences
        return {
            "equal": self.equal,
            "schedules_equal": self.schedules_equal,
            "blocks_equal": self.blocks_equal,
            "tokens_equal": self.tokens_equal,
            "tokens_equal_up_to_ties": self.tokens_equal_up_to_ties,
            "first_difference": None if d is None else {"step": d.step, "key": d.key, "ours": d.ours, "theirs": d.theirs, "text": d.text},
            "token_differences": [{"request_id": x.request_id, "position": x.position, "ours": x.ours, "theirs": x.theirs, "gap_nats": x.gap_nats, "tie": x.tie} for x in t],
            "metrics": {k: {"ours": a, "theirs": b, "ratio": q} for k, (a, b, q) in self.metrics.items()},
            "names": list(self.names),
            "notes": self.notes,
        }


def step_values(record: StepRecord) -> dict[str, list[Any]]:
    """What a step did, without times and reasons, as plain values under KEYS."""
    out: dict[str, list[Any]] = {key: [] for key in KEYS}
    for e in record.events:
        if isinstance(e, ev.Arrived):
            out["arrived"].append(e.request_id)
        elif isinstance(e, ev.Refused):
            out["refused"].append(e.request_id)
        elif isinstance(e, ev.Configured):
            out["configured"].append([e.field, e.new])
        elif isinstance(e, ev.Admitted):
            out["admitted"].append([e.request_id, e.num_cached_tokens])
        elif isinstance(e, ev.Preempted):
            out["preempted"].append(e.request_id)
        elif isinstance(e, (ev.Allocated, ev.Shared)):
            out["blocks"].append([e.request_id, e.block_ids])
        elif isinstance(e, ev.OutOfWindow):
            out["freed"].append([e.request_id, e.block_ids])
        elif isinstance(e, ev.Evicted):
            out["evicted"].append(e.block_id)
        elif isinstance(e, ev.Sampled):
            out["sampled"].append([e.request_id, e.token_ids])
        elif isinstance(e, ev.Finished):
            out["finished"].append([e.request_id, e.reason])
        elif isinstance(e, ev.Freed):
            out["freed"].append([e.request_id, e.block_ids])
    # The chunks are what ran; a Scheduled event may have been taken back.
    out["scheduled"] = [[c.request_id, c.start, c.num_tokens] + (["padding"] if c.padding else []) for c in record.chunks]
    if record.num_padding_tokens:
        out["scheduled"].append(["padding", -1, record.num_padding_tokens])
    return out


def compare(a: Trace, b: Trace, names: tuple[str, str] = ("ours", "theirs"), *, with_metrics: bool = True) -> Comparison:
    """Compares two traces step by step (schedules, blocks), request by request (tokens) and in their metrics."""
    notes = []
    keys = list(KEYS)
    for capability, part in (("blocks", _BLOCK_KEYS), ("tokens", _TOKEN_KEYS)):
        without = [name for name, t in zip(names, (a, b)) if not t.has(capability)]
        if without:
            keys = [k for k in keys if k not in part]
            notes.append(f"{capability} were not compared: {' and '.join(without)} {'has' if len(without) == 1 else 'have'} none")
    schedules = blocks = True
    first: Difference | None = None
    for n, (x, y) in enumerate(zip_longest(a, b), 1):
        if x is None or y is None:
            ends, goes = (names[0], names[1]) if x is None else (names[1], names[0])
            schedules = False
            first = first or Difference(n, "steps", None if x is None else len(a), None if y is None else len(b), f"step {n}: {ends} has ended, {goes} goes on")
            break
        left, right = step_values(x), step_values(y)
        for key in keys:
            if left[key] == right[key]:
                continue
            if key in _BLOCK_KEYS:
                blocks = False
            elif key not in _TOKEN_KEYS:
                schedules = False
            elif {rid: len(ids) for rid, ids in left[key]} != {rid: len(ids) for rid, ids in right[key]}:
                schedules = False  # how many tokens a step brings is part of the schedule; which ones is not
            first = first or Difference(n, key, left[key], right[key], _sentence(n, key, left[key], right[key], names))
        if not schedules and not blocks and first is not None:
            break
    tokens = token_differences(a, b) if a.has("tokens") and b.has("tokens") else []
    figures: dict[str, tuple[Any, Any, float | None]] = {}
    if with_metrics:
        ma, mb = metrics(a), metrics(b)
        figures = {name: (ma[name], mb[name], _ratio(ma[name], mb[name])) for name in METRICS}
        if ma["clock"] != mb["clock"]:
            notes.append(f"times are not comparable: those of {names[0]} are {ma['clock']}, those of {names[1]} {mb['clock']}")
        else:
            notes.append(whose_time(ma) if ma["device"] == mb["device"] else f"{names[0]}: {whose_time(ma)}; {names[1]}: {whose_time(mb)}")
    return Comparison(schedules, blocks, not tokens, first, tokens, figures, notes, names)


def _ratio(x: Any, y: Any) -> float | None:
    return y / x if isinstance(x, (int, float)) and isinstance(y, (int, float)) and x else None


def _sentence(step: int, key: str, ours: list[Any], theirs: list[Any], names: tuple[str, str]) -> str:
    """Names the first entry of the two lists that differs."""
    for x, y in zip_longest(ours, theirs):
        if x != y:
            return f"step {step}, {key}: {names[0]} has {_show(x)}, {names[1]} has {_show(y)}"
    raise AssertionError("the lists are equal")


def _show(x: Any) -> str:
    return "nothing more" if x is None else " ".join(map(str, x)) if isinstance(x, list) else str(x)


def token_differences(a: Trace, b: Trace) -> list[TokenDifference]:
    """For each request whose outputs differ (or that only one run knows), the first differing position; in order of arrival in `a`, then `b`."""
    left, right = a.state().requests, b.state().requests
    out = []
    for rid in [*left, *(r for r in right if r not in left)]:
        x, y = left.get(rid), right.get(rid)
        ours, theirs = (x.output_token_ids if x else []), (y.output_token_ids if y else [])
        if ours == theirs and x is not None and y is not None:
            continue
        at = next((i for i, (p, q) in enumerate(zip(ours, theirs)) if p != q), min(len(ours), len(theirs)))
        gaps = [g for g in (_gap(a, x, at), _gap(b, y, at)) if g is not None]
        gap = min(gaps, default=None)
        here, there = (ours[at] if at < len(ours) else None), (theirs[at] if at < len(theirs) else None)
        out.append(TokenDifference(rid, at, here, there, gap, gap is not None and gap < TIE_NATS and here is not None and there is not None))
    return out


def _gap(trace: Trace, r: RequestState | None, position: int) -> float | None:
    """The recorded gap of output `position` of a request, None if there is none."""
    if r is None or position >= len(r.output_steps):
        return None
    step = r.output_steps[position]
    gaps = (trace.record(step).gaps or {}).get(r.request_id)
    place = position - r.output_steps.index(step)
    return gaps[place] if gaps is not None and place < len(gaps) else None


@dataclass(frozen=True)
class TokenComparison:
    """Tokens of several runs. `differences[name]`: the requests in which that run departs from the first one."""

    base: str
    num_requests: int
    differences: dict[str, list[TokenDifference]]

    @property
    def equal(self) -> bool:
        return not any(self.differences.values())

    @property
    def equal_up_to_ties(self) -> bool:
        return all(d.tie for ds in self.differences.values() for d in ds)

    def __str__(self) -> str:
        lines = []
        for name, ds in self.differences.items():
            if not ds:
                lines.append(f"{name}: all {self.num_requests} requests have the same tokens as under {self.base}")
                continue
            ties = sum(d.tie for d in ds)
            lines.append(f"{name}: {len(ds)} of {self.num_requests} requests differ from {self.base}, {ties} of them first at a tie (below {TIE_NATS} nats)")
            lines.extend(f"  {d}" for d in ds)
        return "\n".join(lines)


def compare_tokens(traces: Mapping[str, Trace] | Sequence[Trace]) -> TokenComparison:
    """Holds the outputs of several runs against the first one's. Raises ValueError for fewer than two."""
    named = dict(traces) if isinstance(traces, Mapping) else {f"run {i}": t for i, t in enumerate(traces, 1)}
    if len(named) < 2:
        raise ValueError(f"compare_tokens got {len(named)} traces, it needs at least 2")
    base, *rest = named
    known = {rid for t in named.values() for rid in t.state().requests}
    return TokenComparison(base, len(known), {name: token_differences(named[base], named[name]) for name in rest})


SHOWN = (
    "makespan_s",
    "num_steps",
    "num_finished",
    "num_aborted",
    "output_tokens",
    "output_throughput",
    "total_throughput",
    "mean_ttft_s",
    "p99_ttft_s",
    "mean_tpot_s",
    "mean_itl_s",
    "p99_itl_s",
    "mean_e2e_s",
    "mean_queue_time_s",
    "num_preemptions",
    "recomputed_tokens",
    "padded_tokens",
    "prefix_hit_tokens",
    "batch_utilisation",
    "kv_usage_mean",
    "kv_usage_peak",
    "goodput",
)
"""The figures of a table that compares runs."""


def metrics_table(runs: Mapping[str, Mapping[str, Any]], names: Sequence[str] = SHOWN) -> str:
    """Metrics of several runs (name -> `metrics`), a column each, with the ratio to the first. A figure that no run has is left out; the last lines say whose times these are."""
    columns = list(runs)
    rows = []
    for name in names:
        values = [runs[c].get(name) for c in columns]
        if all(v is None for v in values):
            continue
        ratios = [_ratio(values[0], v) for v in values[1:]]
        cells = [format_value(name, values[0])]
        for v, q in zip(values[1:], ratios):
            cells.append(format_value(name, v) + (f"  {q:.2f}x" if q is not None else ""))
        rows.append([name, *cells])
    table = text_table(["", *columns], rows)
    clocks = {c: whose_time(dict(runs[c])) for c in columns}
    if len(set(clocks.values())) == 1:
        return table + "\n" + next(iter(clocks.values()))
    return table + "\n" + "\n".join(f"{c}: {text}" for c, text in clocks.items())


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain columns: the first to the left, the others to the right."""
    widths = [max(len(str(line[i])) for line in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, widths))).rstrip()

    return "\n".join([line(head), "  ".join("-" * w for w in widths), *map(line, rows)])


def format_comparison(c: Comparison) -> str:
    """What `cbviz compare` prints: what is equal, where the runs part, and the metrics side by side."""
    lines = [f"schedules {_word(c.schedules_equal)}, blocks {_word(c.blocks_equal)}, tokens {_word(c.tokens_equal)}"]
    if c.first_difference is not None:
        lines.append(f"first difference: {c.first_difference}")
    if c.token_differences:
        lines.append(f"first differing token: {c.first_token_difference} ({len(c.token_differences)} requests differ, {len(c.ties)} of them first at a tie)")
    if c.metrics:
        rows = [
            [name, format_value(name, x), format_value(name, y), "" if q is None else f"{q:.2f}x"]
            for name in SHOWN
            for x, y, q in [c.metrics[name]]
            if x is not None or y is not None
        ]
        lines += ["", text_table(["", *c.names, "ratio"], rows)]
    return "\n".join([*lines, *c.notes])


def _word(equal: bool) -> str:
    return "equal" if equal else "differ"
