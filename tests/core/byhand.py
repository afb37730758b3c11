"""Workloads small enough to work out by hand, and what to read off their runs: shared by the tests of
disciplines of other engines, orders, victims and limits.
"""

from __future__ import annotations

from typing import Any

from cbviz import events as ev
from cbviz.messages import RequestSpec
from cbviz.trace.trace import Trace
from tests.core.fuzz import Case, case, play

PLAIN: dict[str, Any] = {
    "discipline": "chunked",
    "policy": "fcfs",
    "block_size": 4,
    "num_blocks": 33,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "sliding_window": 0,
    "enable_prefix_caching": False,
    "watermark": 0.0,
    "long_prefill_token_threshold": 0,
    "scheduler_reserve_full_isl": None,
    "victim": None,
}
"""A case in which nothing is drawn."""


def byhand(
    specs: list[RequestSpec], at: dict[int, list[tuple[str, Any]]] | None = None, **fields: Any
) -> Case:
    c = case(0, inputs=False, **(PLAIN | fields))
    c.specs, c.at = specs, at or {}
    return c


def run(specs: list[RequestSpec], at: dict[int, list[tuple[str, Any]]] | None = None, **fields: Any) -> Trace:
    """The run under the judge's eyes: invariants after each step, all blocks back, tokens as alone."""
    return play(byhand(specs, at, **fields))[1]


def spec(rid: str, prompt: int, outputs: int, step: int = 1, first: int = 0, **more: Any) -> RequestSpec:
    """A request of `prompt` tokens, which are `first`, `first` + 1, ..."""
    return RequestSpec(rid, tuple(range(first, first + prompt)), outputs, arrival_step=step, **more)


def plan(trace: Trace, step: int) -> str:
    """The step's chunks: `a0+4 b7+1` is a's positions 0 to 3 and b's position 7."""
    return " ".join(f"{c.request_id}{c.start}+{c.num_tokens}" for c in trace.record(step).chunks)


def found(trace: Trace, kind: type, step: int | None = None) -> list[Any]:
    records = trace.records if step is None else [trace.record(step)]
    return [e for r in records for e in r.events if isinstance(e, kind)]


def admitted(trace: Trace) -> str:
    """Ids in order of admission, `*` behind those that came back."""
    return " ".join(e.request_id + "*" * e.resumed for e in found(trace, ev.Admitted))


def waits(trace: Trace, rid: str) -> list[str]:
    """Reasons for which the request waited, each once, in order."""
    return list(dict.fromkeys(e.reason for e in found(trace, ev.NotAdmitted) if e.request_id == rid))


def finish_steps(trace: Trace) -> dict[str, int]:
    return {r.request_id: r.finish_step for r in trace.state().by_index}
