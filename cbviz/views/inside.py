"""What ran inside one step: operators, kernels and copies over its time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cbviz.trace.trace import Cursor, Trace
from cbviz.trace.utilisation import profiled_steps
from cbviz.views.figure import Figure, done_steps, layout, place, plain
from cbviz.views.theme import theme


class InsideRows(NamedTuple):
    """Spans of one watched step, in the order of their start; arrays [spans].

    `name` and `lane`: places in `names` and `lanes`.
    """

    step: int
    start_s: np.ndarray
    duration_s: np.ndarray
    name: np.ndarray
    lane: np.ndarray
    names: list[str]
    lanes: list[str]
    source: str


def inside_rows(trace: Trace, cursor: Cursor | int | None = None) -> InsideRows | None:
    """What ran inside the step at the cursor, None if it was not watched."""
    step = done_steps(place(trace, cursor))
    p = trace.record(step).profile if step else None
    if p is None:
        return None
    return InsideRows(
        step,
        np.array(p.start_s),
        np.array(p.duration_s),
        np.array(p.name, dtype=np.int64),
        np.array(p.lane, dtype=np.int64),
        p.names,
        p.lanes,
        p.source,
    )


LANES = {
    "pass": "the pass",
    "swap-out": "swap-out: device to host",
    "swap-in": "swap-in: host to device",
    "copy": "copy on the device",
}
"""Kinds of a step's spans, from the top lane down."""


def moved_rows(trace: Trace, cursor: Cursor | int | None = None) -> InsideRows | None:
    """The copies of blocks in the step at the cursor and the pass they lie beside, a lane a kind, None if it
    copied nothing. Watched or not; `source` says measured or modelled.
    """
    step = done_steps(place(trace, cursor))
    record = trace.record(step) if step else None
    if record is None or not record.spans or not trace.has("time"):
        return None
    kinds = [k for k in LANES if any(s.what == k for s in record.spans)]
    which = np.array([kinds.index(s.what) for s in record.spans], dtype=np.int64)
    starts, ends = np.array([s.start_s for s in record.spans]), np.array([s.end_s for s in record.spans])
    names = [
        LANES[k]
        + (f", {n:,} blocks" if (n := sum(s.num_blocks for s in record.spans if s.what == k)) else "")
        for k in kinds
    ]
    return InsideRows(
        step, starts, ends - starts, which, which, names, [LANES[k] for k in kinds], record.clock
    )


def inside(trace: Trace, cursor: Cursor | int | None = None, *, dark: bool = False) -> Figure:
    """What went on inside one step, as lanes over its time: the pass and the copies of blocks beside it (any
    step that has some), below them the operators or kernels of a watched step (measured). One trace; a colour
    a name, the name in the hover.
    """
    t, at = theme(dark), place(trace, cursor)
    watched, moved = inside_rows(trace, at), moved_rows(trace, at)
    rows = watched or moved
    if watched is not None and moved is not None:
        n, k = len(moved.names), len(moved.lanes)
        rows = InsideRows(
            at.step,
            np.concatenate((moved.start_s, watched.start_s)),
            np.concatenate((moved.duration_s, watched.duration_s)),
            np.concatenate((moved.name, watched.name + n)),
            np.concatenate((moved.lane, watched.lane + k)),
            [*moved.names, *watched.names],
            [*moved.lanes, *watched.lanes],
            f"copies {moved.source}; {watched.source}",
        )
    note = ""
    if rows is None:
        others = [n for n in profiled_steps(trace) if n != at.step]
        where = f"; watched: step {', '.join(map(str, others[:8]))}" if others else ""
        note = (
            f"this step was not watched from inside{where}: s.profile_step() watches the next one, cbviz "
            "run --profile-step N step N"
        )
    colours = [t.owner(i) for i in range(len(rows.names))] if rows else []
    lanes = rows.lanes if rows else []
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": "ran",
            "base": (rows.start_s * 1e3).tolist() if rows else [],
            "x": (rows.duration_s * 1e3).tolist() if rows else [],
            "y": rows.lane.tolist() if rows else [],
            "customdata": [plain(rows.names[i]) for i in rows.name.tolist()] if rows else [],
            "marker": {
                "color": [colours[i] for i in rows.name.tolist()] if rows else [],
                "line": {"width": 0},
            },
            "width": 0.8,
            "showlegend": False,
            "hovertemplate": "%{customdata}: %{x:.3f} ms, from %{base:.3f} ms<extra></extra>",
        }
    ]
    title = f"Inside step {at.step}"
    if rows is not None:
        title += (
            f" (measured): {rows.source}"
            if watched is not None
            else f": blocks copied beside the pass ({rows.source})"
        )
    frame = layout(
        t,
        title,
        x="milliseconds from the start of the pass",
        note=note,
        barmode="overlay",
        bargap=0,
        yaxis={
            "tickmode": "array",
            "tickvals": list(range(len(lanes))),
            "ticktext": [plain(x) for x in lanes],
            "range": [max(len(lanes), 1) - 0.5, -0.5],
            "showgrid": False,
        },
    )
    return {"data": data, "layout": frame}
