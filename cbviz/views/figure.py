"""What all views share: the frame of a figure as plain data, text made harmless, and the note for a table
that a trace lacks.

A figure is `{"data": [...], "layout": {...}}`, plain JSON. plotly draws a small markup in texts (<b>, <a
href>, $math$), so every word that came from a user, a prompt or a model goes through `plain`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from cbviz.trace.state import State
from cbviz.trace.trace import Cursor, Trace
from cbviz.views.theme import Theme

Figure = dict[str, Any]
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def plain(text: object) -> str:
    """Text that plotly shows as it is: no tag, entity or formula in it works; line breaks and tabs become
    visible signs.
    """
    return (
        html.escape(str(text), quote=False)
        .replace("$", "&#36;")
        .replace("\r\n", "⏎")
        .replace("\n", "⏎")
        .replace("\r", "⏎")
        .replace("\t", "⇥")
    )


def place(trace: Trace, cursor: Cursor | int | None) -> Cursor:
    """The cursor, by default the end. Raises IndexError if the trace has no such step."""
    at = trace.last if cursor is None else Cursor(cursor) if isinstance(cursor, int) else cursor
    if not 0 <= at.step <= len(trace):
        raise IndexError(f"step {at.step} is not in this trace: it has steps 0..{len(trace)}")
    return at


def done_steps(at: Cursor) -> int:
    """Steps that are complete at the cursor: inside a step, those before it."""
    return at.step if at.event is None else at.step - 1


def lacking(trace: Trace, *capabilities: str) -> str:
    """'' if the trace has them all, else a sentence that says which it lacks, and why if the producer said
    so.
    """
    gone = [c for c in capabilities if not trace.has(c)]
    if not gone:
        return ""
    why = [plain(trace.header.missing[c]) for c in gone if c in trace.header.missing]
    return f"This trace has no {' and no '.join(gone)}" + (
        f": {'; '.join(why)}" if why else f" (from {plain(trace.header.producer)})"
    )


def label(state: State, index: int) -> str:
    """A request's id, harmless, by its row."""
    return plain(state.by_index[index].request_id) if 0 <= index < len(state.by_index) else ""


def layout(
    t: Theme, title: str = "", *, x: str = "", y: str = "", note: str = "", **more: Any
) -> dict[str, Any]:
    """The common frame: fonts, colours, one x and one y axis.

    `note` stands in the middle of an empty picture.
    """
    axis = {
        "gridcolor": t.line,
        "linecolor": t.line,
        "zerolinecolor": t.line,
        "color": t.mute,
        "automargin": True,
    }
    out: dict[str, Any] = {
        "title": {"text": title, "font": {"size": 14, "color": t.fg}, "x": 0.01, "xanchor": "left"},
        "paper_bgcolor": t.bg,
        "plot_bgcolor": t.bg,
        "font": {"family": FONT, "size": 12, "color": t.fg},
        "margin": {"l": 64, "r": 16, "t": 40 if title else 12, "b": 40},
        "hoverlabel": {"bgcolor": t.fg, "font": {"color": t.bg, "family": FONT}, "align": "left"},
        "legend": {
            "orientation": "h",
            "yref": "container",
            "yanchor": "bottom",
            "y": 0.0,
            "x": 0,
            "xanchor": "left",
            "font": {"size": 11},
            "traceorder": "normal",
        },
        "xaxis": {**axis, "title": {"text": x}},
        "yaxis": {**axis, "title": {"text": y}},
        "shapes": [],
        "annotations": [],
    }
    for key, value in more.items():
        out[key] = {**out[key], **value} if key in out and isinstance(value, dict) else value
    if note:
        out["annotations"] = [
            *out["annotations"],
            {
                "text": note,
                "xref": "paper",
                "yref": "paper",
                "x": 0.5,
                "y": 0.5,
                "showarrow": False,
                "font": {"size": 13, "color": t.mute},
            },
        ]
    return out


def rows_axis(state: State, rows: Sequence[int], most: int = 40) -> dict[str, Any]:
    """A y axis with one row a request, the first on top; at most `most` of them are named."""
    every = max(1, -(-len(rows) // most))
    shown = list(range(0, len(rows), every))
    return {
        "tickmode": "array",
        "tickvals": shown,
        "ticktext": [label(state, rows[i]) for i in shown],
        "range": [max(len(rows), 1) - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
    }


def cursor_line(t: Theme, x: float, yref: str = "paper") -> dict[str, Any]:
    """The vertical line that marks the cursor."""
    return {
        "type": "line",
        "xref": "x",
        "yref": yref,
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "line": {"color": t.accent, "width": 1.5},
    }
