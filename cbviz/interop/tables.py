"""A trace as CSV: a table of requests, and one of steps.

Times in seconds, a header line with units in the names.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from cbviz.trace import experts
from cbviz.trace.accounting import SLOT_PARTS, TOKEN_PARTS
from cbviz.trace.metrics import request_metrics, work
from cbviz.trace.trace import Trace


def requests_csv(trace: Trace) -> str:
    """One line a sequence, in order of arrival: what was asked, how it ended, its latencies.

    `mean_itl_s` stands for the single gaps, `parent` names its request.
    """
    rows = []
    for r in request_metrics(trace):
        gaps = r.pop("itl_s")
        rows.append({**r, "mean_itl_s": sum(gaps) / len(gaps) if gaps else None})
    return _csv(rows)


def steps_csv(trace: Trace) -> str:
    """One line a step: times, batch, tokens, slots, gauges, and its work with the source (`counted` or
    `modelled`); of a mixture also the experts touched in all layers, and the busiest over the mean.
    """
    rows = []
    mixture = any(r.expert_load for r in trace)
    for r in trace:
        done, load = work(r), experts.summary(r)
        rows.append(
            {
                "step": r.step,
                "t0_s": r.t0_s,
                "t1_s": r.t1_s,
                "clock": r.clock,
                "num_chunks": len(r.chunks),
                "num_prefills": sum(c.kind == "prefill" for c in r.chunks),
                "num_decodes": sum(c.kind == "decode" for c in r.chunks),
                **{f"tokens_{p}": getattr(r.tokens, p) for p in ("total", *TOKEN_PARTS)},
                **{f"slots_{p}": getattr(r.slots, p) for p in ("total", *SLOT_PARTS)},
                "num_running": r.gauges.num_running,
                "num_waiting": r.gauges.num_waiting,
                "num_free_blocks": r.gauges.num_free_blocks,
                "num_cached_blocks": r.gauges.num_cached_blocks,
                "flops": done[0] if done else None,
                "moved_bytes": done[1] if done else None,
                "work": done[2] if done else None,
            }
            | (
                {
                    "experts_touched": load.touched if load else 0,
                    "expert_imbalance": load.uneven if load else None,
                }
                if mixture
                else {}
            )
        )
    return _csv(rows)


def _csv(rows: Iterable[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(out, list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow({k: _safe(v) for k, v in row.items()})
    return out.getvalue()


def _safe(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula gets an apostrophe before it."""
    return "'" + value if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
