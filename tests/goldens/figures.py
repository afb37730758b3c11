"""Figures and sentences of twelve fixed runs: every view, `explain`, every `why_*` and the metrics."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import cbviz as cb
from cbviz.trace.metrics import request_metrics
from cbviz.views import VIEWS
from tests.golden import golden
from tests.goldens.canonical import split_prose
from tests.runs import specs
from tests.strategies import Drawn

BASE: dict[str, Any] = {
    "discipline": "vllm",
    "max_num_seqs": 4,
    "num_blocks": 25,
    "block_size": 4,
    "max_model_len": 80,
    "seed": 1,
}
RUNS: dict[str, dict[str, Any]] = {
    "tight-pool": {"num_blocks": 21},
    "static": {"discipline": "static"},
    "static-padded": {"discipline": "static-padded"},
    "orca": {"discipline": "orca", "enable_prefix_caching": True},
    "chunked-small-budget": {"discipline": "chunked", "max_num_batched_tokens": 9},
    "caching-priority": {"enable_prefix_caching": True, "policy": "priority", "victim": "lowest-priority"},
    "contiguous": {"kv_allocation": "contiguous"},
    "swap": {"num_blocks": 21, "preemption_mode": "swap", "swap_blocks": 16},
    "window-and-sinks": {"sliding_window": 12, "attention_sinks": 4},
    "drafts": {"speculative": "self-draft", "num_speculative_tokens": 3, "draft_acceptance": 0.6},
    "sequences-and-beams": {"num_blocks": 60},
}
"""Knobs of each run beside BASE. The twelfth, `by-hand`, is the trace that tests/golden.py writes."""
LOOKS = re.compile(
    r"color|text|name|title|hover|font|label|annotation|legend|template|dash|opacity|symbol|margin|width|size"
    r"|height|pattern|gap|autorange|align|pad$|domain",
    re.IGNORECASE,
)
"""Keys of a plotly figure that say how it looks. What stands below any other key is its data."""


def names() -> list[str]:
    return [f"figures-{name}" for name in (*RUNS, "by-hand")]


def parts(name: str) -> dict[str, Any]:
    """The run's figures and sentences, what they say apart from how they say it."""
    trace = _trace(name.removeprefix("figures-"))
    out: dict[str, Any] = {
        "figures": {},
        "looks": {},
        "sentences": {},
        "texts": {},
        "metrics": {},
        "metrics-by-request": {},
    }
    for at in _moments(trace):
        _figures(trace, at, out)
        _answers(trace, at, out)
        key = _key(at)
        out["metrics"][key] = cb.metrics(trace, at)
        out["metrics-by-request"][key], out["texts"][f"{key} requests"] = split_prose(
            request_metrics(trace, at)
        )
    for step in range(1, len(trace) + 1):
        _said(out, f"explain {step}", [s.to_dict() for s in cb.explain(trace, step)])
    return out


def about(name: str) -> str:
    knobs = RUNS.get(name.removeprefix("figures-"), {})
    return " ".join(f"{k}={v}" for k, v in knobs.items()) or "tests/golden.py"


def _trace(name: str) -> cb.Trace:
    if name == "by-hand":
        return golden()
    drawn = Drawn(specs(), {**BASE, **RUNS[name]})
    if name == "sequences-and-beams":
        drawn.specs[1] = cb.RequestSpec("three", tuple(range(50, 61)), 9, sampling=cb.Sampling(n=3))
        drawn.specs[3] = cb.RequestSpec("search", tuple(range(70, 83)), 8, sampling=cb.Sampling(beam_width=3))
    s = drawn.session()
    drawn.at = {6: [("abort", "r5")], 9: [("configure", {"max_num_seqs": 3})]}
    for _ in range(400):
        drawn.ask(s, len(s.trace) + 1)
        if s.step() is None:
            return s.trace
    raise AssertionError(f"{name} did not end")


def _moments(trace: cb.Trace) -> list[cb.Cursor]:
    """Near the start, in the middle, inside a step, and the end."""
    n = len(trace)
    inside = next(
        (
            cb.Cursor(r.step, len(r.events) // 2)
            for r in trace
            if any(type(e).__name__ in ("Preempted", "PrefixHit") for e in r.events)
        ),
        cb.Cursor(n // 3, 1),
    )
    return [cb.Cursor(min(3, n)), cb.Cursor(n // 2), inside, cb.Cursor(n)]


def _key(at: cb.Cursor) -> str:
    return f"{at.step}" if at.event is None else f"{at.step}.{at.event}"


def _figures(trace: cb.Trace, at: cb.Cursor, out: dict[str, Any]) -> None:
    first = trace.state().by_index[0].request_id
    views: dict[str, Callable[[], Any]] = {n: lambda f=f: f(trace, at) for n, f in VIEWS.items()}  # type: ignore[misc]
    views["timeline-time"] = lambda: cb.views.timeline(trace, at, axis="time")
    views["block_table"] = lambda: cb.views.block_table(trace, first, at)
    views["compare"] = lambda: cb.views.compare(trace, golden(), at)
    for view, make in views.items():
        key = f"{view} {_key(at)}"
        try:
            figure = make()
        except (LookupError, ValueError) as e:
            out["figures"][key], out["looks"][key] = type(e).__name__, str(e)
            continue
        looks: list[Any] = []
        out["figures"][key] = _data_of(figure, looks)
        out["looks"][key] = looks


def _data_of(value: Any, looks: list[Any], path: str = "") -> Any:
    """`value` without what is only its look, which goes to `looks` as [path, value]."""
    if isinstance(value, dict):
        kept = {}
        for k in sorted(value):
            if LOOKS.search(k) and not (k == "width" and value.get("type") == "bar"):
                looks.append([f"{path}.{k}", value[k]])
            else:
                kept[k] = _data_of(value[k], looks, f"{path}.{k}")
        return kept
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_data_of(v, looks, f"{path}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, str) and (" " in value or "<" in value):
        looks.append([path, value])
        return "…"
    return value


def _answers(trace: cb.Trace, at: cb.Cursor, out: dict[str, Any]) -> None:
    key, state = _key(at), trace.state(at)
    blocks = sorted({b for r in state.by_index for b in r.block_ids})[:4] + [1]
    for rid in [r.request_id for r in state.by_index]:
        for ask in (cb.why_waiting, cb.why_preempted, cb.why_missed):
            _asked(out, f"{ask.__name__} {rid} {key}", lambda ask=ask, rid=rid: ask(trace, at, rid))  # type: ignore[misc]
        _asked(out, f"why_chunk {rid} {key}", lambda rid=rid: cb.why_chunk(trace, at.step, rid))  # type: ignore[misc]
    for block in blocks:
        _asked(out, f"why_block {block} {key}", lambda block=block: cb.why_block(trace, at, block))  # type: ignore[misc]


def _asked(out: dict[str, Any], key: str, ask: Callable[[], Any]) -> None:
    try:
        _said(out, key, ask().to_dict())
    except (LookupError, ValueError) as e:
        _said(out, key, [type(e).__name__, f"error: {e}"])


def _said(out: dict[str, Any], key: str, value: Any) -> None:
    out["sentences"][key], out["texts"][key] = split_prose(value)
