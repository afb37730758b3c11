"""Two runs side by side: are they the same, and where do they part?

Knows traces alone; times never decide equality.

Schedules are compared step by step and key by key, tokens request by request. Where a run recorded the gap
between its best and second-best token, a first difference below `TIE_NATS` is reported as a tie: two correct
engines may part there. Where schedules part, both runs' reasons are told, and what came of it: who waited
longer and for what (`causes`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import zip_longest
from typing import Any

import msgspec

from cbviz import events as ev
from cbviz.config import ConfigError
from cbviz.messages import StepRecord
from cbviz.trace.explain import Sentence, count, explain, listed
from cbviz.trace.intervals import NOT_RECORDED, Spent, spent, total
from cbviz.trace.metrics import METRICS, format_value, metrics, prefix_hits, seconds, whose_time
from cbviz.trace.state import RequestState, State
from cbviz.trace.trace import Cursor, Trace

TIE_NATS = 0.001

KEYS = (
    "arrived",
    "refused",
    "configured",
    "admitted",
    "preempted",
    "scheduled",
    "blocks",
    "evicted",
    "sampled",
    "finished",
    "freed",
)
"""What is compared of a step, in this order: the first key that differs is reported."""
_BLOCK_KEYS = ("blocks", "evicted", "freed")
_TOKEN_KEYS = ("sampled",)


@dataclass(frozen=True)
class Difference:
    """The first place where two schedules part.

    `ours` and `theirs` are plain values of `key` at `step`, None where a run has no such step.
    """

    step: int
    key: str
    ours: Any
    theirs: Any
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class TokenDifference:
    """First differing output position (from 0) of one request.

    A token is None where that run has no such output.

    `gap_nats`: log-probability of the best token less that of its best rival there, in a run that recorded it
    (the smaller of two). `tie`: below TIE_NATS.
    """

    request_id: str
    position: int
    ours: int | None
    theirs: int | None
    gap_nats: float | None
    tie: bool
    gaps: tuple[float | None, float | None] = (None, None)
    """That gap in each run, None where it was not recorded."""
    logprobs: tuple[float | None, float | None] = (None, None)
    """Natural log-probability of the chosen token in each run."""

    def __str__(self) -> str:
        gap = (
            ""
            if self.gap_nats is None
            else f" (the two best were {self.gap_nats:.6f} nats apart{': a tie' if self.tie else ''})"
        )
        if self.ours is None or self.theirs is None:
            longer = "theirs" if self.ours is None else "ours"
            return f"{self.request_id}: equal for {self.position} tokens, then only {longer} goes on"
        return f"{self.request_id}, output {self.position}: token {self.ours} against {self.theirs}{gap}"


@dataclass(frozen=True)
class Parting:
    """The first step at which the schedules (or blocks) differ, and what each run says about it: its reasons,
    those that both give left out.
    """

    step: int
    text: str
    ours: tuple[Sentence, ...]
    theirs: tuple[Sentence, ...]
    changed: tuple[str, ...] = ()
    """Fields of the two runs' configuration that differ, as `field: ours / theirs`."""

    def __str__(self) -> str:
        return self.text


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
    parting: Parting | None = None
    """Where the schedules part and why; None where they don't."""
    causes: list[Sentence] = field(default_factory=list)
    """What the difference comes from: who waited longer and for what, preemptions, tokens computed again,
    cache hits. Empty where the schedules are equal.
    """
    proof: str = ""
    """A sentence: the outputs are equal, token by token, or the first that differs with the gap of both runs.
    """

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
            "first_difference": None
            if d is None
            else {"step": d.step, "key": d.key, "ours": d.ours, "theirs": d.theirs, "text": d.text},
            "token_differences": [
                {
                    "request_id": x.request_id,
                    "position": x.position,
                    "ours": x.ours,
                    "theirs": x.theirs,
                    "gap_nats": x.gap_nats,
                    "tie": x.tie,
                    "gaps": list(x.gaps),
                    "logprobs": list(x.logprobs),
                }
                for x in t
            ],
            "parting": None
            if self.parting is None
            else {
                "step": self.parting.step,
                "text": self.parting.text,
                "ours": [x.to_dict() for x in self.parting.ours],
                "theirs": [x.to_dict() for x in self.parting.theirs],
                "changed": list(self.parting.changed),
            },
            "causes": [x.to_dict() for x in self.causes],
            "proof": self.proof,
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
    out["scheduled"] = [
        [c.request_id, c.start, c.num_tokens] + (["padding"] if c.padding else []) for c in record.chunks
    ]
    if record.num_padding_tokens:
        out["scheduled"].append(["padding", -1, record.num_padding_tokens])
    return out


def compare(
    a: Trace, b: Trace, names: tuple[str, str] = ("ours", "theirs"), *, with_metrics: bool = True
) -> Comparison:
    """Compares two traces step by step (schedules, blocks), request by request (tokens) and in their metrics.

    >>> import cbviz as cb
    >>> a = cb.Session("article", runner="sim", max_num_seqs=4)
    >>> b = a.fork(max_num_seqs=8)
    >>> a.run().step, b.run().step
    (581, 364)
    >>> c = compare(a.trace, b.trace)
    >>> c.equal, c.tokens_equal, c.first_difference.step
    (False, True, 1)
    """
    notes = []
    keys = list(KEYS)
    for capability, part in (("blocks", _BLOCK_KEYS), ("tokens", _TOKEN_KEYS)):
        without = [name for name, t in zip(names, (a, b)) if not t.has(capability)]
        if without:
            keys = [k for k in keys if k not in part]
            notes.append(
                f"{capability} were not compared: {' and '.join(without)} "
                f"{'has' if len(without) == 1 else 'have'} none"
            )
    schedules = blocks = True
    first: Difference | None = None
    parts: dict[
        str, Difference
    ] = {}  # the first difference of the schedules, of blocks alone, of the configuration alone
    for n, (x, y) in enumerate(zip_longest(a, b), 1):
        if x is None or y is None:
            ends, goes = (names[0], names[1]) if x is None else (names[1], names[0])
            schedules = False
            ended = Difference(
                n,
                "steps",
                None if x is None else len(a),
                None if y is None else len(b),
                f"step {n}: {ends} has ended, {goes} goes on",
            )
            first = first or ended
            parts.setdefault("schedules", ended)
            break
        left, right = step_values(x), step_values(y)
        for key in keys:
            if left[key] == right[key]:
                continue
            lengths_differ = False
            if key in _BLOCK_KEYS:
                blocks = False
            elif key not in _TOKEN_KEYS:
                schedules = False
            elif {rid: len(ids) for rid, ids in left[key]} != {rid: len(ids) for rid, ids in right[key]}:
                schedules, lengths_differ = (
                    False,
                    True,
                )  # how many tokens a step brings is part of the schedule; which ones is not
            here = Difference(n, key, left[key], right[key], _sentence(n, key, left[key], right[key], names))
            first = first or here
            kind = "blocks" if key in _BLOCK_KEYS else "configured" if key == "configured" else "schedules"
            if key not in _TOKEN_KEYS or lengths_differ:
                parts.setdefault(kind, here)
        if "schedules" in parts and not blocks:
            break
    tokens = token_differences(a, b) if a.has("tokens") and b.has("tokens") else []
    figures: dict[str, tuple[Any, Any, float | None]] = {}
    if with_metrics:
        ma, mb = metrics(a), metrics(b)
        figures = {name: (ma[name], mb[name], _ratio(ma[name], mb[name])) for name in METRICS}
        if ma["clock"] != mb["clock"]:
            notes.append(
                f"times are not comparable: those of {names[0]} are {ma['clock']}, those of {names[1]} "
                f"{mb['clock']}"
            )
        else:
            notes.append(
                whose_time(ma)
                if ma["device"] == mb["device"]
                else f"{names[0]}: {whose_time(ma)}; {names[1]}: {whose_time(mb)}"
            )
    where = parts.get("schedules") or parts.get("blocks") or parts.get("configured")
    parting = None if where is None else _parting(a, b, where, names)
    causes = find_causes(a, b, names) if not schedules else []
    return Comparison(
        schedules,
        blocks,
        not tokens,
        first,
        tokens,
        figures,
        notes,
        names,
        parting,
        causes,
        _proof(a, b, tokens, names),
    )


def compare_all(traces: Mapping[str, Trace], *, with_metrics: bool = True) -> dict[str, Comparison]:
    """Each run but the first held against the first. Raises ValueError for fewer than two."""
    if len(traces) < 2:
        raise ValueError(f"compare_all got {len(traces)} traces, it needs at least 2")
    base, *rest = traces
    return {
        name: compare(traces[base], traces[name], (base, name), with_metrics=with_metrics) for name in rest
    }


def align(a: Trace, b: Trace, cursor: Cursor | int, by: str = "step") -> Cursor:
    """The cursor of `b` that stands beside a cursor of `a`, for linked views.

    `by` "step": the same step, or the last that `b` has; inside a step, after as many of its events. "time":
    the last step of `b` that had ended when the moment in `a` was reached, on each run's own clock. Raises
    ConfigError for another `by`, IndexError for a step that `a` does not have.
    """
    at = Cursor(cursor) if isinstance(cursor, int) else cursor
    if at.step:
        a.record(at.step)
    if by == "step":
        if at.step > len(b):
            return b.last
        return Cursor(
            at.step, None if at.event is None or not at.step else min(at.event, len(b.record(at.step).events))
        )
    if by != "time":
        raise ConfigError(f"by is {by!r}, it must be 'step' or 'time'")
    if not at.step:
        return Cursor(0)
    now = a.record(at.step).t1_s if at.event is None else a.record(at.step).t0_s
    if at.event is None and at.step <= len(b) and b.record(at.step).t1_s == now:
        return Cursor(at.step)  # where several steps end at one moment, the same one
    return Cursor(bisect_right(b.records, now + 1e-12, key=_end))


def _end(record: StepRecord) -> float:
    return record.t1_s


_DECISIONS = (
    *(
        "preempted",
        "unscheduled",
        "ranking",
        "refused",
        "configured",
        "starving",
        "waits",
        "admitted",
        "skipped",
        "capped",
        "finished",
        "evicted",
        "hit",
        "miss",
    ),
    *("reordered", "seats"),
)
"""Kinds of sentences that tell a decision and its reason."""


def _parting(a: Trace, b: Trace, d: Difference, names: tuple[str, str]) -> Parting:
    """Both runs' reasons at the step where they part.

    Where a run says nothing that the other does not say too, its work in that step stands instead.
    """
    said = [explain(t, d.step) if d.step <= len(t) else [] for t in (a, b)]
    sides: list[tuple[Sentence, ...]] = []
    for mine, other in (said, said[::-1]):
        own = [x for x in mine if x not in other]
        sides.append(tuple([x for x in own if x.kind in _DECISIONS][:5] or own[:2]))
    configs = [t.state(min(d.step, len(t))).config for t in (a, b)]
    times = ("clock", "seed", "cost", "modelled_device", "precision", "kernels", "device")
    changed = tuple(
        f"{k}: {configs[0][k]} / {configs[1][k]}"
        for k in configs[0]
        if k in configs[1] and k not in times and str(configs[0][k]) != str(configs[1][k])
    )
    words = "; ".join(
        f"{name}: {' / '.join(side)}" if side else f"{name} says nothing more"
        for name, side in zip(names, sides)
    )
    what = (
        "block tables" if d.key in _BLOCK_KEYS else "configurations" if d.key == "configured" else "schedules"
    )
    return Parting(d.step, f"the {what} part at step {d.step}. {words}", sides[0], sides[1], changed)


def _proof(a: Trace, b: Trace, differences: list[TokenDifference], names: tuple[str, str]) -> str:
    if not (a.has("tokens") and b.has("tokens")):
        return ""
    state = a.state()
    outputs = {r.request_id: r.output_token_ids for r in state.by_index}
    if not differences:
        n = sum(map(len, outputs.values()))
        return (
            f"outputs are equal: {count(n, 'token')} of {whose_outputs(state)}, compared one by one "
            f"(sha256 of both: {tokens_digest(a)[:16]})"
        )
    d = differences[0]
    gaps = [f"{x:.4f} nats in {name}" for x, name in zip(d.gaps, names) if x is not None]
    told = (
        f"; its two best tokens were apart by {' and '.join(gaps)}" + (", a tie" if d.tie else "")
        if gaps
        else ""
    )
    return (
        f"outputs differ for {len(differences)} of {whose_outputs(state)}, first "
        f"{str(d).split(' (the two best')[0]}{told}"
    )


def whose_outputs(state: State) -> str:
    """How many outputs there are to compare: `7 requests`, or `21 sequences of 7 requests`."""
    requests = count(state.num_requests, "request")
    return f"{count(len(state.by_index), 'sequence')} of {requests}" if state.num_forked else requests


def tokens_digest(trace: Trace) -> str:
    """sha256 over all outputs, by request id: equal digests, equal outputs."""
    return sha256(
        msgspec.json.encode(sorted((r.request_id, r.output_token_ids) for r in trace.state().by_index))
    ).hexdigest()


# causes -----------------------------------------------------------------------------------------------------

FOR = {
    "seats": "for a seat",
    "blocks": "for blocks",
    "budget": "for the step's token budget",
    "batch": "for the batch to end",
    "preempted": "because the step preempted somebody",
    "decode-step": "because the step only decoded",
    "watermark": "for blocks above the watermark",
    "reserve": "for blocks to be set aside",
    "fragments": "for a long enough run of free blocks",
    "guarantee": "for room for everybody's longest output",
    "estimate": "for room for everybody's expected output",
    "degraded": "because overload demotes the batch class",
    "policy": "because the policy said no",
    "prefill-step": "because prefills went first",
    "beams": "because other beams had no candidates yet",
    "max_model_len": "because max_model_len was reached",
    NOT_RECORDED: "for a reason that was not recorded",
}
"""Reasons to wait or to be skipped, as the end of "waited 12 steps ..."."""


def find_causes(a: Trace, b: Trace, names: tuple[str, str] = ("ours", "theirs")) -> list[Sentence]:
    """What the difference of two runs comes from, as sentences, the greatest first: waiting by reason and
    request, preemptions, skipped rows, cache hits, padding, the length of steps. Only requests that both runs
    know are set against each other.
    """
    if not (a.has("queue") and b.has("queue")):
        return []
    x, y = spent(a), spent(b)
    both = [rid for rid in x if rid in y]
    out = [
        *_waits(x, y, both, names, _same_clock(a, b)),
        *_preemptions(a, b, x, y, both, names),
        *_skips(x, y, both, names),
        *_tokens(a, b, names),
        *_steps(a, b, names),
    ]
    return out


def _by_reason(spents: Sequence[Spent], part: str) -> Counter[str]:
    sums: Counter[str] = Counter()
    for s in spents:
        for reason, (n, _) in getattr(s, part).items():
            sums[reason] += n
    return sums


def _changes(ours: Counter[str], theirs: Counter[str]) -> str:
    """`40 more for blocks, 3 less for a seat`, the greatest first."""
    delta = {r: theirs[r] - ours[r] for r in {*ours, *theirs} if theirs[r] != ours[r]}
    return ", ".join(
        f"{abs(n)} {'more' if n > 0 else 'fewer'} {FOR.get(r, r)}"
        for r, n in sorted(delta.items(), key=_greatest)
    )


def _greatest(item: tuple[str, int]) -> tuple[int, str]:
    return -abs(item[1]), item[0]


def _waits(
    x: dict[str, Spent], y: dict[str, Spent], both: list[str], names: tuple[str, str], timed: bool
) -> list[Sentence]:
    """Waiting for the first seat: all requests together, then those whose waiting changed most."""
    ours, theirs = _by_reason([x[r] for r in both], "waiting"), _by_reason([y[r] for r in both], "waiting")
    if ours == theirs:
        return []
    n, m = sum(ours.values()), sum(theirs.values())
    took = [f" ({seconds(sum(total(s[r].waiting)[1] for r in both))})" if timed else "" for s in (x, y)]
    out = [
        Sentence(
            "waits",
            (
                f"Requests waited {count(n, 'step')}{took[0]} for their first seat under {names[0]}, "
                f"{m}{took[1]} under {names[1]}: {_changes(ours, theirs)}"
            ),
        )
    ]
    changes = {r: total(y[r].waiting)[0] - total(x[r].waiting)[0] for r in both}
    for word, sign in (("longer", 1), ("less", -1)):
        most = sorted(
            (r for r in both if changes[r] * sign > 0), key=lambda r: (-abs(changes[r]), both.index(r))
        )
        if most:
            told = [
                (
                    f"{r} by {count(abs(changes[r]), 'step')} "
                    f"({_changes(_by_reason([x[r]], 'waiting'), _by_reason([y[r]], 'waiting'))})"
                )
                for r in most[:3]
            ]
            rest = (
                f", and {len(most) - 3} others"
                if len(most) > 4
                else ", and one other"
                if len(most) == 4
                else ""
            )
            out.append(
                Sentence(
                    "waits",
                    f"Under {names[1]} {count(len(most), 'request')} waited {word}: {'; '.join(told)}{rest}",
                    most,
                )
            )
    return out


def _preemptions(
    a: Trace, b: Trace, x: dict[str, Spent], y: dict[str, Spent], both: list[str], names: tuple[str, str]
) -> list[Sentence]:
    losers = [
        Counter(e.request_id for record in t for e in record.events if isinstance(e, ev.Preempted))
        for t in (a, b)
    ]
    again = [sum(c.num_recomputed for record in t for c in record.chunks if not c.padding) for t in (a, b)]
    back = [sum(total(s[r].preempted)[0] for r in both) for s in (x, y)]
    if losers[0] == losers[1] and again[0] == again[1]:
        return []
    told = [
        f"{count(sum(n.values()), 'time')} under {name}"
        + (f" ({listed([f'{r} {k}x' if k > 1 else r for r, k in n.most_common()], 5)})" if n else "")
        for n, name in zip(losers, names)
    ]
    rest = f"; {again[0]} and {again[1]} tokens were computed again" + (
        f", and the preempted waited {back[0]} and {back[1]} steps to come back" if any(back) else ""
    )
    return [
        Sentence("preempted", f"Requests were preempted {' and '.join(told)}{rest}", {*losers[0], *losers[1]})
    ]


def _skips(
    x: dict[str, Spent], y: dict[str, Spent], both: list[str], names: tuple[str, str]
) -> list[Sentence]:
    ours, theirs = _by_reason([x[r] for r in both], "skipped"), _by_reason([y[r] for r in both], "skipped")
    if ours == theirs:
        return []
    n, m = sum(ours.values()), sum(theirs.values())
    return [
        Sentence(
            "skipped",
            (
                f"Requests with a seat got no token in {count(n, 'step')} under {names[0]}, {m} under "
                f"{names[1]}: {_changes(ours, theirs)}"
            ),
        )
    ]


def _tokens(a: Trace, b: Trace, names: tuple[str, str]) -> list[Sentence]:
    out = []
    hits = [[prefix_hits(record) for record in t] for t in (a, b)]
    first = [sum(h.first for h in run) for run in hits]
    again = [sum(h.resumed for h in run) for run in hits]
    if first[0] != first[1]:
        out.append(
            Sentence(
                "hit",
                (
                    f"{first[0]} tokens were found in the cache at first admissions under {names[0]}, "
                    f"{first[1]} under {names[1]}"
                ),
            )
        )
    if again[0] != again[1]:
        out.append(
            Sentence(
                "hit",
                (
                    f"Preempted requests that came back found {again[0]} tokens in the cache under "
                    f"{names[0]}, "
                    f"{again[1]} under {names[1]}"
                ),
            )
        )
    padded = [sum(record.tokens.padded for record in t) for t in (a, b)]
    if padded[0] != padded[1]:
        out.append(
            Sentence(
                "padding",
                (
                    f"{padded[0]} tokens were computed only as padding under {names[0]}, {padded[1]} under "
                    f"{names[1]}"
                ),
            )
        )
    return out


def _same_clock(a: Trace, b: Trace) -> bool:
    """May times of the two stand beside each other? Both measured or both modelled, on one device."""
    kinds = [{record.clock for record in t} for t in (a, b)]
    return (
        a.has("time")
        and b.has("time")
        and kinds[0] == kinds[1]
        and len(kinds[0]) == 1
        and a.header.device == b.header.device
    )


def _steps(a: Trace, b: Trace, names: tuple[str, str]) -> list[Sentence]:
    """Steps and how long they took, where both clocks are of one kind."""
    sizes = [sum(1 for record in t if record.chunks) for t in (a, b)]
    if not all(sizes):
        return []
    rows = [sum(len(record.chunks) for record in t) / n for t, n in zip((a, b), sizes)]
    text = (
        f"{names[0]} took {count(sizes[0], 'step')} of {rows[0]:.1f} rows on average, {names[1]} "
        f"{sizes[1]} of {rows[1]:.1f}"
    )
    if _same_clock(a, b):
        took = [
            sum(record.t1_s - record.t0_s for record in t if record.chunks) / n for t, n in zip((a, b), sizes)
        ]
        text += f"; a step took {seconds(took[0])} and {seconds(took[1])} ({a.records[0].clock})"
    return [Sentence("step", text)]


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
    """For each request whose outputs differ (or that only one run knows), the first differing position; in
    order of arrival in `a`, then `b`.
    """
    left, right = a.state().requests, b.state().requests
    out = []
    for rid in [*left, *(r for r in right if r not in left)]:
        x, y = left.get(rid), right.get(rid)
        ours, theirs = (x.output_token_ids if x else []), (y.output_token_ids if y else [])
        if ours == theirs and x is not None and y is not None:
            continue
        at = next((i for i, (p, q) in enumerate(zip(ours, theirs)) if p != q), min(len(ours), len(theirs)))
        gaps = _recorded(a, x, at, "gaps"), _recorded(b, y, at, "gaps")
        gap = min((g for g in gaps if g is not None), default=None)
        here, there = (ours[at] if at < len(ours) else None), (theirs[at] if at < len(theirs) else None)
        tie = gap is not None and gap < TIE_NATS and here is not None and there is not None
        out.append(
            TokenDifference(
                rid,
                at,
                here,
                there,
                gap,
                tie,
                gaps,
                (_recorded(a, x, at, "logprobs"), _recorded(b, y, at, "logprobs")),
            )
        )
    return out


def _recorded(trace: Trace, r: RequestState | None, position: int, what: str) -> float | None:
    """The recorded gap or log-probability of output `position` of a request, None if there is none."""
    if r is None or position >= len(r.output_steps):
        return None
    step = r.output_steps[position]
    values = (getattr(trace.record(step), what) or {}).get(r.request_id)
    place = position - r.output_steps.index(step)
    return values[place] if values is not None and place < len(values) else None


@dataclass(frozen=True)
class TokenComparison:
    """Tokens of several runs.

    `differences[name]`: the sequences in which that run departs from the first one.
    """

    base: str
    num_requests: int
    num_sequences: int
    """As many as `num_requests`, unless some have n > 1 or beams."""
    differences: dict[str, list[TokenDifference]]

    @property
    def equal(self) -> bool:
        return not any(self.differences.values())

    @property
    def equal_up_to_ties(self) -> bool:
        return all(d.tie for ds in self.differences.values() for d in ds)

    def __str__(self) -> str:
        lines = []
        whose = f"{self.num_requests} requests"
        if self.num_sequences > self.num_requests:
            whose = f"{self.num_sequences} sequences of {whose}"
        for name, ds in self.differences.items():
            if not ds:
                lines.append(f"{name}: all {whose} have the same tokens as under {self.base}")
                continue
            ties = sum(d.tie for d in ds)
            lines.append(
                f"{name}: {len(ds)} of {whose} differ from {self.base}, {ties} of them first at a tie "
                f"(below {TIE_NATS} nats)"
            )
            lines.extend(f"  {d}" for d in ds)
        return "\n".join(lines)


def compare_tokens(traces: Mapping[str, Trace] | Sequence[Trace]) -> TokenComparison:
    """Holds the outputs of several runs against the first one's. Raises ValueError for fewer than two."""
    named = dict(traces) if isinstance(traces, Mapping) else {f"run {i}": t for i, t in enumerate(traces, 1)}
    if len(named) < 2:
        raise ValueError(f"compare_tokens got {len(named)} traces, it needs at least 2")
    base, *rest = named
    known = {rid: r.parent for t in named.values() for rid, r in t.state().requests.items()}
    return TokenComparison(
        base,
        sum(not parent for parent in known.values()),
        len(known),
        {name: token_differences(named[base], named[name]) for name in rest},
    )


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
    """Metrics of several runs (name -> `metrics`), a column each, with the ratio to the first.

    A figure that no run has is left out; the last lines say whose times these are.
    """
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
        return "  ".join(
            f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, widths))
        ).rstrip()

    return "\n".join([line(head), "  ".join("-" * w for w in widths), *map(line, rows)])


def format_comparison(c: Comparison) -> str:
    """What `cbviz compare` prints: what is equal, where the runs part, and the metrics side by side."""
    lines = [
        (
            f"schedules {_word(c.schedules_equal)}, blocks {_word(c.blocks_equal)}, tokens "
            f"{_word(c.tokens_equal)}"
        )
    ]
    if c.first_difference is not None:
        lines.append(f"first difference: {c.first_difference}")
    if c.token_differences:
        lines.append(
            f"first differing token: {c.first_token_difference} ({len(c.token_differences)} outputs "
            f"differ, {len(c.ties)} of them first at a tie)"
        )
    elif c.proof:
        lines.append(c.proof)
    if c.parting is not None:
        lines += [c.parting.text, *c.causes]
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
