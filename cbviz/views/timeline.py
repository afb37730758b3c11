"""Requests x steps (or time): what each request was in each step.

Two runs can stand below one another (`compare`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cbviz.trace.compare import compare as compare_traces
from cbviz.trace.state import CODE, STATES
from cbviz.trace.trace import Cursor, Trace
from cbviz.views.figure import (
    Figure,
    cursor_line,
    done_steps,
    label,
    lacking,
    layout,
    place,
    plain,
    rows_axis,
)
from cbviz.views.theme import Theme, theme

_HIDDEN = (CODE["none"], CODE["finished"])
"""States that the picture leaves empty."""


class TimelineRows(NamedTuple):
    """Segments, one an entry; all arrays [S].

    A segment covers the steps `first`..`last`, on the axis `x0`..`x1` (steps: first - 0.5 .. last + 0.5).
    """

    row: np.ndarray
    code: np.ndarray
    first: np.ndarray
    last: np.ndarray
    x0: np.ndarray
    x1: np.ndarray
    requests: list[int]
    """For each row the request's index, in order of arrival."""

    @classmethod
    def empty(cls) -> TimelineRows:
        none = np.empty(0, np.int64)
        return cls(none, none, none, none, none, none, [])


def timeline_rows(
    trace: Trace, cursor: Cursor | int | None = None, *, axis: str = "step", requests: list[str] | None = None
) -> TimelineRows:
    """Segments up to the cursor.

    `axis`: `step`, or `time` in seconds (needs times). `requests`: only these, default all that have arrived.

    Raises ValueError for another axis, KeyError for an unknown request.
    """
    if axis not in ("step", "time"):
        raise ValueError(f"axis is {axis!r}, it must be 'step' or 'time'")
    at = place(trace, cursor)
    end = done_steps(at)
    state = trace.state(at)
    shown = (
        [r.index for r in state.by_index]
        if requests is None
        else [state.request(rid).index for rid in requests]
    )
    segments: list[tuple[int, int, int, int]] = []
    for row, index in enumerate(shown):
        mine = trace.segments_until(index, end) if index < len(trace.segments) else []
        for i, s in enumerate(mine):
            last = mine[i + 1].step - 1 if i + 1 < len(mine) else end
            if last >= s.step:
                segments.append((row, s.code, s.step, last))
    table = np.array(segments, dtype=np.int64).reshape(-1, 4)
    firsts, lasts = table[:, 2], table[:, 3]
    if axis == "step" or not len(table):
        x0, x1 = firsts - 0.5, lasts + 0.5
    else:
        x0 = np.array([r.t0_s for r in trace.records[:end]])[firsts - 1]
        x1 = np.array([r.t1_s for r in trace.records[:end]])[lasts - 1]
    return TimelineRows(table[:, 0], table[:, 1], firsts, lasts, x0, x1, shown)


def _bars(
    trace: Trace, rows: TimelineRows, t: Theme, at: Cursor, yaxis: str, legend: bool
) -> list[dict[str, Any]]:
    """One bar trace a state, in the order of STATES."""
    state = trace.state(at)
    out = []
    for code, name in enumerate(STATES):
        look = t.state(code)
        pick = np.flatnonzero(rows.code == code) if code not in _HIDDEN else np.empty(0, np.int64)
        out.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": look.title,
                "yaxis": yaxis,
                "width": 0.82,
                "legendgroup": name,
                "showlegend": legend and bool(len(pick)),
                "base": rows.x0[pick].tolist(),
                "x": (rows.x1[pick] - rows.x0[pick]).tolist(),
                "y": rows.row[pick].tolist(),
                "marker": {
                    "color": look.color,
                    "line": {"width": 0},
                    "pattern": {
                        "shape": look.pattern,
                        "fgcolor": look.ink,
                        "bgcolor": look.color,
                        "size": 5,
                        "solidity": 0.35,
                    },
                },
                "customdata": [
                    [label(state, rows.requests[rows.row[i]]), int(rows.first[i]), int(rows.last[i])]
                    for i in pick
                ],
                "hovertemplate": "%{customdata[0]}: "
                + look.title
                + ", steps %{customdata[1]} to %{customdata[2]}<extra></extra>",
            }
        )
    return out


def _x_end(trace: Trace, at: Cursor, axis: str) -> float:
    end = done_steps(at)
    if axis == "step":
        return end + 0.5
    return trace.record(end).t1_s if end else 0.0


def _x_title(trace: Trace, axis: str) -> str:
    return (
        "step"
        if axis == "step"
        else (
            "time in s "
            f"({trace.header.clock}{', ' + plain(trace.header.device) if trace.header.device else ''})"
        )
    )


def timeline(
    trace: Trace,
    cursor: Cursor | int | None = None,
    *,
    axis: str = "step",
    requests: list[str] | None = None,
    selected: str | None = None,
    dark: bool = False,
) -> Figure:
    """One row a request, one bar a stretch of steps in one state.

    Always one trace a state, in the order of `trace.state.STATES`.
    """
    t, at = theme(dark), place(trace, cursor)
    note = lacking(trace, "schedule", *(["time"] if axis == "time" else []))
    if note:
        rows = TimelineRows.empty()
    else:
        rows = timeline_rows(trace, at, axis=axis, requests=requests)
    state = trace.state(at)
    shapes = [] if note else [cursor_line(t, _x_end(trace, at, axis))]
    if (
        selected is not None
        and selected in state.requests
        and state.requests[selected].index in rows.requests
    ):
        y = rows.requests.index(state.requests[selected].index)
        shapes.append(
            {
                "type": "rect",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "yref": "y",
                "y0": y - 0.5,
                "y1": y + 0.5,
                "line": {"color": t.accent, "width": 2},
                "fillcolor": "rgba(0,0,0,0)",
            }
        )
    return {
        "data": _bars(trace, rows, t, at, "y", True),
        "layout": layout(
            t,
            "Timeline",
            x=_x_title(trace, axis),
            note=note,
            barmode="overlay",
            bargap=0.1,
            yaxis=rows_axis(state, rows.requests),
            shapes=shapes,
            xaxis={
                "range": [
                    0.5 if axis == "step" else 0.0,
                    max(_x_end(trace, at, axis), 1.0 if axis == "step" else 1e-9),
                ],
                "showgrid": False,
                "zeroline": False,
            },
        ),
    }


def compare(
    a: Trace,
    b: Trace,
    cursor: Cursor | int | None = None,
    *,
    names: tuple[str, str] = ("ours", "theirs"),
    axis: str = "step",
    dark: bool = False,
) -> Figure:
    """Two timelines with a common x axis, and a dashed line at the first step that differs.

    Traces: the states of `a`, then those of `b`.

    The cursor holds for both, as far as each run goes. Measured and modelled times are not drawn on one axis:
    the picture falls back to steps and says so.
    """
    t = theme(dark)
    notes = []
    if axis == "time" and a.header.clock != b.header.clock:
        axis = "step"
        notes.append("one run's times are measured, the other's modelled: drawn over steps")
    missing = "; ".join(
        filter(None, (lacking(x, "schedule", *(["time"] if axis == "time" else [])) for x in (a, b)))
    )
    data: list[dict[str, Any]] = []
    ends, axes = [], []
    for trace, y in ((a, "y"), (b, "y2")):
        whole = place(trace, None)
        at = (
            whole
            if cursor is None
            else Cursor(min(cursor if isinstance(cursor, int) else cursor.step, whole.step))
        )
        rows = timeline_rows(trace, at, axis=axis) if not missing else TimelineRows.empty()
        data += _bars(trace, rows, t, at, y, y == "y")
        ends.append(_x_end(trace, at, axis) if not missing else 0.0)
        axes.append(rows_axis(trace.state(at), rows.requests))
    first = compare_traces(a, b, names, with_metrics=False).first_difference if not missing else None
    shapes = []
    if first is not None and (
        cursor is None or first.step <= (cursor if isinstance(cursor, int) else cursor.step)
    ):
        x = (
            first.step - 0.5
            if axis == "step"
            else min(r.record(first.step).t0_s for r in (a, b) if first.step <= len(r))
        )
        shapes.append(
            {**cursor_line(t, x), "line": {"color": t.state("preempted").color, "width": 1.5, "dash": "dash"}}
        )
        notes.append(f"step {first.step} is the first that differs ({first.key})")
    frame = layout(
        t,
        "; ".join(notes),
        x=_x_title(a, axis),
        note=missing,
        barmode="overlay",
        bargap=0.1,
        shapes=shapes,
        xaxis={
            "range": [0.5 if axis == "step" else 0.0, max(*ends, 1.0 if axis == "step" else 1e-9)],
            "anchor": "y2",
            "showgrid": False,
            "zeroline": False,
        },
        yaxis={**axes[0], "domain": [0.52, 1.0], "title": {"text": plain(names[0])}},
    )
    frame["yaxis2"] = {**frame["yaxis"], **axes[1], "domain": [0.0, 0.48], "title": {"text": plain(names[1])}}
    return {"data": data, "layout": frame}
