"""What a step computed, row by row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cbviz.trace.metrics import token_budget
from cbviz.trace.trace import Cursor, Trace
from cbviz.views.figure import Figure, lacking, layout, place, plain
from cbviz.views.theme import theme

PARTS = ("decode", "prefill", "recomputed", "draft", "padded")
"""Parts of a row's tokens, in the order of the batch's traces."""


class BatchRows(NamedTuple):
    """One step's batch, one entry a chunk, in the scheduler's order; `tokens` [chunks, len(PARTS)].

    The last entry may be the padding of all prompts to one length ('').
    """

    request_ids: list[str]
    start: np.ndarray
    tokens: np.ndarray
    budget: int


def batch_rows(trace: Trace, cursor: Cursor | int | None = None) -> BatchRows:
    """The batch of the step that the cursor stands behind; none at step 0."""
    at = place(trace, cursor)
    record = trace.record(at.step) if at.step else None
    budget = token_budget(trace.state(at).config)
    if record is None:
        return BatchRows([], np.empty(0, np.int64), np.zeros((0, len(PARTS)), np.int64), budget)
    ids, starts, rows = [], [], []
    for c in record.chunks:
        fresh = c.num_tokens - c.num_recomputed - c.num_draft
        row = dict.fromkeys(PARTS, 0)
        if c.padding:
            row["padded"] = c.num_tokens
        else:
            row["recomputed"], row["draft"], row["decode" if c.kind == "decode" else "prefill"] = (
                c.num_recomputed,
                c.num_draft,
                fresh,
            )
        ids.append(c.request_id)
        starts.append(c.start)
        rows.append([row[p] for p in PARTS])
    if record.num_padding_tokens:
        ids.append("")
        starts.append(-1)
        rows.append([record.num_padding_tokens if p == "padded" else 0 for p in PARTS])
    return BatchRows(
        ids, np.array(starts, dtype=np.int64), np.array(rows, dtype=np.int64).reshape(-1, len(PARTS)), budget
    )


def batch(trace: Trace, cursor: Cursor | int | None = None, *, dark: bool = False) -> Figure:
    """Whose tokens the step computed: a bar a request, split into PARTS (five traces).

    The title has the step's sum and its budget.
    """
    t, at = theme(dark), place(trace, cursor)
    note = lacking(trace, "schedule")
    rows = batch_rows(trace, at if not note else 0)
    if not note and not rows.request_ids:
        note = "nothing was computed in this step" if at.step else "no step has run yet"
    names = [plain(r) or "padding" for r in rows.request_ids]
    y = list(range(len(names)))
    data = []
    for j, part in enumerate(PARTS):
        look = t.batch(part)
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": look.title,
                "x": rows.tokens[:, j].tolist(),
                "y": y,
                "customdata": [[n, int(s)] for n, s in zip(names, rows.start)],
                "marker": {
                    "color": look.color,
                    "pattern": {
                        "shape": look.pattern,
                        "fgcolor": look.ink,
                        "bgcolor": look.color,
                        "size": 5,
                        "solidity": 0.35,
                    },
                },
                "showlegend": bool(rows.tokens[:, j].any()),
                "hovertemplate": "%{customdata[0]}: %{x} tokens "
                + look.title
                + ", from position %{customdata[1]}<extra></extra>",
            }
        )
    total = int(rows.tokens.sum())
    title = f"Batch of step {at.step}: {total:,}" + (
        f" of {rows.budget:,} tokens" if rows.budget else " tokens"
    )
    every = max(1, -(-len(names) // 40))
    return {
        "data": data,
        "layout": layout(
            t,
            title,
            x="tokens",
            note=note,
            barmode="stack",
            bargap=0.15,
            yaxis={
                "tickmode": "array",
                "tickvals": y[::every],
                "ticktext": names[::every],
                "range": [max(len(names), 1) - 0.5, -0.5],
                "showgrid": False,
                "zeroline": False,
            },
        ),
    }
