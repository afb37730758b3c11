"""A mixture's experts: how many tokens each got, layer by layer, in a step and over the run, and how uneven
that was.

The imbalance of a layer is the busiest expert's tokens over the mean: 1 is even, and it is what the slowest
of several devices would wait for. Load is counted in the real pass, padding included. Records of dense models
hold none, and the view says so.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cbviz.trace.experts import imbalance, layers_of
from cbviz.trace.trace import Cursor, Trace
from cbviz.views.figure import Figure, cursor_line, done_steps, layout, place
from cbviz.views.theme import theme


class ExpertRows(NamedTuple):
    """Steps that computed something.

    `layers`: the sparse layers' numbers; `load` [steps, layers, experts] tokens.
    """

    step: np.ndarray
    layers: list[int]
    load: np.ndarray

    @property
    def touched(self) -> np.ndarray:
        """Share of all experts that some token took, [steps]."""
        return (self.load > 0).mean(axis=(1, 2)) if len(self.load) else np.empty(0)

    @property
    def uneven(self) -> np.ndarray:
        """Mean over the layers of busiest expert over mean, [steps]."""
        return np.array([np.mean([imbalance(row) for row in step]) for step in self.load.tolist()])


def experts_rows(trace: Trace, cursor: Cursor | int | None = None) -> ExpertRows:
    """Load of each step up to the cursor. Empty for a dense model."""
    records = [r for r in trace.records[: done_steps(place(trace, cursor))] if r.expert_load]
    if not records:
        return ExpertRows(np.empty(0, np.int64), [], np.zeros((0, 0, 0), np.int64))
    layers = layers_of(records[0].expert_load or [])
    return ExpertRows(
        np.array([r.step for r in records]),
        layers,
        np.array([[(r.expert_load or [])[i] for i in layers] for r in records], dtype=np.int64),
    )


def experts(trace: Trace, cursor: Cursor | int | None = None, *, dark: bool = False) -> Figure:
    """Traces: load of the step (layers x experts), of the run up to it, imbalance over the steps, share of
    experts touched over the steps.
    """
    t, at = theme(dark), place(trace, cursor)
    rows = experts_rows(trace, at)
    note = (
        ""
        if rows.layers
        else "no step has run yet"
        if not done_steps(at)
        else "this run's model has no experts"
    )
    now = (
        rows.load[-1]
        if len(rows.load) and rows.step[-1] == done_steps(at)
        else np.zeros(rows.load.shape[1:], np.int64)
    )
    total = rows.load.sum(axis=0)
    names = [f"layer {i}" for i in rows.layers]
    x = [f"e{e}" for e in range(rows.load.shape[2])]
    few = len(x) <= 16
    scale = [[0, t.bg], [1, t.state("decode").color]]
    heat = {
        "type": "heatmap",
        "x": x,
        "y": names,
        "colorscale": scale,
        "showscale": False,
        "zmin": 0,
        "xgap": 1,
        "ygap": 1,
    }
    data = [
        {
            **heat,
            "name": "this step",
            "z": now.tolist(),
            "texttemplate": "%{z}" if few else "",
            "hovertemplate": "%{y}, expert %{x}: %{z} tokens in this step<extra></extra>",
        },
        {
            **heat,
            "name": "the run so far",
            "z": total.tolist(),
            "xaxis": "x2",
            "yaxis": "y2",
            "texttemplate": "%{z}" if few else "",
            "hovertemplate": "%{y}, expert %{x}: %{z} tokens so far<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": "busiest expert / mean",
            "x": rows.step.tolist(),
            "y": rows.uneven.tolist(),
            "xaxis": "x3",
            "yaxis": "y3",
            "line": {"color": t.state("preempted").color, "width": 2},
            "hovertemplate": "step %{x}: the busiest got %{y:.2f} times the mean<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": "experts touched",
            "x": rows.step.tolist(),
            "y": rows.touched.tolist(),
            "xaxis": "x3",
            "yaxis": "y4",
            "line": {"color": t.state("decode").color, "width": 2, "dash": "dot"},
            "hovertemplate": "step %{x}: %{y:.0%} of all experts<extra></extra>",
        },
    ]
    axis = {"gridcolor": t.line, "linecolor": t.line, "color": t.mute, "automargin": True}
    title = (
        f"Experts in step {at.step}: tokens of each (left), of the run so far (right); below, how uneven "
        "and how many (counted)"
    )
    return {
        "data": data,
        "layout": layout(
            t,
            title,
            note=note,
            xaxis={"domain": [0, 0.47], "anchor": "y"},
            yaxis={"domain": [0.5, 1], "autorange": "reversed"},
            xaxis2={**axis, "domain": [0.53, 1], "anchor": "y2"},
            yaxis2={
                **axis,
                "domain": [0.5, 1],
                "anchor": "x2",
                "autorange": "reversed",
                "showticklabels": False,
            },
            xaxis3={**axis, "domain": [0, 1], "anchor": "y3", "title": {"text": "step"}},
            yaxis3={**axis, "domain": [0, 0.36], "anchor": "x3", "title": {"text": "busiest / mean"}},
            yaxis4={
                **axis,
                "overlaying": "y3",
                "side": "right",
                "anchor": "x3",
                "range": [0, 1.02],
                "tickformat": ".0%",
                "showgrid": False,
                "title": {"text": "touched"},
            },
            shapes=[{**cursor_line(t, done_steps(at)), "xref": "x3", "yref": "y3 domain"}]
            if len(rows.step)
            else [],
        ),
    }
