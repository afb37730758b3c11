"""What the comparison panel is given: figures side by side, where schedules part and why, whether outputs are
equal, and cursors that stand beside each other.

Pure functions of traces. Knows no session and no page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbviz.app.wire import Wire
from cbviz.trace import Cursor, Trace, align, compare_all
from cbviz.trace.compare import SHOWN, Comparison
from cbviz.trace.explain import Sentence, count
from cbviz.trace.metrics import METRICS, format_value, metrics, whose_time

MOST_RUNS = 4


def compared(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """Two to four runs, each held against the first.

    Plain JSON. Raises ValueError for another number of them.

    `runs`: name, steps, clock. `rows`: a metric each, with a cell a run: its figure, and what it is of the
    first run's (`ratio`, None where it can't be told). `pairs`: for each run but the first what `compare`
    found. `by_time`: for each run but the first, which of its steps stands beside each step of the first, and
    the other way; None where the clocks differ.
    """
    if not 2 <= len(traces) <= MOST_RUNS:
        raise ValueError(f"{len(traces)} runs are picked: pick 2 to {MOST_RUNS}")
    figures = {name: metrics(t) for name, t in traces.items()}
    base, *others = traces
    timed = (
        all(t.has("time") for t in traces.values())
        and len({(m["clock"], m["device"]) for m in figures.values()}) == 1
    )
    pairs = compare_all(traces, with_metrics=False)
    rows = []
    for key in SHOWN:
        values = [m.get(key) for m in figures.values()]
        if all(v is None or v == 0 for v in values):
            continue
        known = METRICS[key]
        ratios = [None if known.timed and not timed else _ratio(values[0], v) for v in values[1:]]
        rows.append(
            {
                "key": key,
                "title": known.title,
                "timed": known.timed,
                "cells": [format_value(key, v) for v in values],
                "ratios": ratios,
            }
        )
    told = {name: whose_time(m) for name, m in figures.items()}
    one = set(told.values())
    notes = list(one) if len(one) == 1 else [f"{name}: {text}" for name, text in told.items()]
    notes += [
        f"{name} has not ended: its figures are of {count(len(t), 'step')}"
        for name, t in traces.items()
        if not _ended(t)
    ]
    if not timed:
        notes.append("the clocks differ: times stand beside each other and are not compared")
    return {
        "runs": [{"name": name, "steps": len(t), "clock": t.header.clock} for name, t in traces.items()],
        "rows": rows,
        "notes": notes,
        "timed": timed,
        "pairs": [
            {"name": name, **_pair(c, traces[base], traces[name]), **_as_far(c, traces[base], traces[name])}
            for name, c in pairs.items()
        ],
        "by_time": [_aligned(traces[base], traces[name]) for name in others] if timed else None,
    }


def pictures(traces: Mapping[str, Trace]) -> list[tuple[dict[str, Any], list[bytes]]]:
    """Each run at its end, as the page reads pictures."""
    out = []
    for t in traces.values():
        made = Wire().message(t, t.last)
        assert made is not None
        out.append(made)
    return out


def _ratio(x: Any, y: Any) -> float | None:
    return y / x if isinstance(x, (int, float)) and isinstance(y, (int, float)) and x else None


def _aligned(a: Trace, b: Trace) -> dict[str, list[int]]:
    return {
        "there": [align(a, b, Cursor(n), "time").step for n in range(len(a) + 1)],
        "back": [align(b, a, Cursor(n), "time").step for n in range(len(b) + 1)],
    }


def _pair(c: Comparison, a: Trace, b: Trace) -> dict[str, Any]:
    """What was found of two runs.

    `so_far`: they are equal up to this step, where one of them stands and can go on.
    """
    shorter = min(len(a), len(b))
    ended = all(_ended(t) for t in (a, b) if len(t) == shorter)
    p, so_far = c.parting, None
    if p is not None and not ended and p.step > shorter:
        p, so_far = None, shorter
    return {
        "so_far": so_far,
        "equal": c.equal,
        "schedules_equal": c.schedules_equal,
        "blocks_equal": c.blocks_equal,
        "tokens_equal": c.tokens_equal,
        "proof": c.proof,
        "differing": len(c.token_differences),
        "parting": None
        if p is None
        else {
            "step": p.step,
            "ours": list(map(_told, p.ours)),
            "theirs": list(map(_told, p.theirs)),
            "changed": list(p.changed),
        },
        "causes": list(map(_told, c.causes)) if so_far is None else [],
        "notes": c.notes,
    }


def _ended(t: Trace) -> bool:
    return all(r.finished for r in t.state().by_index)


def _as_far(c: Comparison, a: Trace, b: Trace) -> dict[str, Any]:
    """Where one run has only not come as far as the other, that is no difference: says how far they are
    equal.
    """
    if not c.token_differences or not all(d.ours is None or d.theirs is None for d in c.token_differences):
        return {}
    if _ended(a) and _ended(b):
        return {}  # one said more
    x, y = a.state(), b.state()
    n = sum(
        min(len(r.output_token_ids), len(y.requests[r.request_id].output_token_ids))
        for r in x.by_index
        if r.request_id in y.requests
    )
    return {
        "proof": (
            f"outputs are equal as far as both have come: {count(n, 'token')}, compared one by one; let "
            "both run to their end"
        ),
        "partial": True,
    }


def _told(s: Sentence) -> dict[str, Any]:
    return {"kind": s.kind, "text": str(s), "ids": list(s.request_ids)}
