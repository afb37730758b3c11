"""KV memory: the pool block by block, one request's block table, and the slots of the pool over the steps."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cbviz import events as ev
from cbviz.trace.accounting import SLOT_PARTS
from cbviz.trace.state import State
from cbviz.trace.trace import Cursor, Trace
from cbviz.views.figure import MONO, Figure, cursor_line, done_steps, label, lacking, layout, place, plain
from cbviz.views.theme import Theme, theme

KINDS = ("null", "free", "cached", "reserved", "used", "shared")
"""What a block is (`State.block_kind`); `BlockRows.kind` is the place in this list."""
MOST_LABELS = 512
"""Pools up to this size have the owner's row written into each block."""


class BlockRows(NamedTuple):
    """The pool, all arrays [num_blocks], index = physical block id."""

    kind: np.ndarray
    owner: np.ndarray
    """Row of the request that holds the block, or held it last; -1: none."""
    refs: np.ndarray
    fill: np.ndarray
    """Slots that hold a token, 0..block_size."""
    changed: np.ndarray
    """True where the last step changed something: taken, shared, written, cached, evicted or freed."""


def changed_blocks(trace: Trace, cursor: Cursor | int | None = None) -> set[int]:
    """Blocks that the step at the cursor touched; none inside a step."""
    at = place(trace, cursor)
    if not at.step or at.event is not None:
        return set()
    state = trace.state(Cursor(at.step - 1)).clone()
    state.touched.clear()
    state.apply(trace.record(at.step))
    return {b for b in state.touched if 0 < b < state.num_blocks}


def block_map_rows(trace: Trace, cursor: Cursor | int | None = None) -> BlockRows:
    """The pool at the cursor."""
    at = place(trace, cursor)
    state = trace.state(at)
    n = state.num_blocks
    kind = np.array([KINDS.index(state.block_kind(b)) for b in range(n)], dtype=np.int8)
    owner = np.array([state.owner(b) for b in range(n)], dtype=np.int64)
    refs = np.array([state.ref_count(b) for b in range(n)], dtype=np.int64)
    fill = np.array([state.fill(b) if b else 0 for b in range(n)], dtype=np.int64)
    changed = np.zeros(n, dtype=bool)
    changed[list(changed_blocks(trace, at))] = True
    return BlockRows(kind, owner, refs, fill, changed)


def block_map(
    trace: Trace,
    cursor: Cursor | int | None = None,
    *,
    columns: int | None = None,
    selected: str | None = None,
    dark: bool = False,
) -> Figure:
    """Every block of the pool: coloured by owner (thin: not full), free ones empty.

    Traces: blocks, shared, cached, reserved, changed, selected, fragmented.

    `selected`: a request whose blocks are framed. A block's sign: a square inside for shared, a dot in its
    last owner's colour for cached, a dash for reserved, a cross for a free block in a run too short for the
    request that waits (contiguous reservation).
    """
    t, at = theme(dark), place(trace, cursor)
    note = lacking(trace, "blocks")
    state = trace.state(at)
    none = np.empty(0, np.int64)
    empty = BlockRows(none, none, none, none, none)
    rows = empty if note else block_map_rows(trace, at)
    n = len(rows.kind)
    cols = columns or _columns(n)
    height = max(1, -(-n // cols))
    palette = max(1, min(256, len(state.by_index)))
    full, thin = 2, 2 + palette
    z: list[list[int | None]] = [[None] * cols for _ in range(height)]
    words = [[""] * cols for _ in range(height)]
    hover = [[""] * cols for _ in range(height)]
    for b in range(n):
        y, x = divmod(b, cols)
        kind, own = KINDS[rows.kind[b]], int(rows.owner[b])
        if kind in ("free", "cached"):
            z[y][x] = 0
        elif kind == "null":
            z[y][x] = 1
        else:
            z[y][x] = (full if rows.fill[b] >= state.block_size else thin) + own % palette
            words[y][x] = label(state, own) if n <= MOST_LABELS else ""
        hover[y][x] = describe_block(state, b)
    colors = [t.free, t.line, *(t.owner(k) for k in range(palette)), *(t.tint(k) for k in range(palette))]
    top = len(colors)
    scale: list[list[Any]] = []
    for i, c in enumerate(colors):
        scale += [[i / top, c], [(i + 1) / top, c]]
    mine = set(state.requests[selected].block_ids) - {0} if selected in state.requests and not note else set()

    def marks(name: str, blocks: list[int], marker: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [b % cols for b in blocks],
            "y": [b // cols for b in blocks],
            "marker": marker,
            "hoverinfo": "skip",
            "showlegend": bool(blocks),
        }

    def of(kind: str) -> list[int]:
        return np.flatnonzero(rows.kind == KINDS.index(kind)).tolist()

    cached = of("cached")
    short = of("free") if not note and state.fragmented else []
    data = [
        {
            "type": "heatmap",
            "name": "blocks",
            "z": z,
            "text": words,
            "texttemplate": "%{text}",
            "hovertext": hover,
            "hoverinfo": "text",
            "colorscale": scale,
            "zmin": -0.5,
            "zmax": top - 0.5,
            "showscale": False,
            "xgap": 2,
            "ygap": 2,
            "textfont": {"size": 10},
        },
        marks(
            "shared",
            of("shared"),
            {"symbol": "square-open", "size": 13, "color": t.fg, "line": {"width": 1.5}},
        ),
        marks(
            "cached, free",
            cached,
            {
                "symbol": "circle",
                "size": 6,
                "color": [t.owner(int(rows.owner[b])) if rows.owner[b] >= 0 else t.mute for b in cached],
            },
        ),
        marks(
            "reserved, empty",
            of("reserved"),
            {"symbol": "line-ew-open", "size": 9, "color": t.fg, "line": {"width": 1.5}},
        ),
        marks(
            "changed in this step",
            np.flatnonzero(rows.changed).tolist(),
            {"symbol": "square-open", "size": 18, "color": t.accent, "line": {"width": 1.5}},
        ),
        marks(
            "of the picked request",
            sorted(mine),
            {"symbol": "square-open", "size": 22, "color": t.fg, "line": {"width": 2.5}},
        ),
        marks(
            "free, in too short a run",
            short,
            {"symbol": "x-thin-open", "size": 8, "color": t.state("preempted").color, "line": {"width": 1.5}},
        ),
    ]
    copies = (
        [e for e in trace.record(at.step).events if isinstance(e, ev.Copied)]
        if at.step and at.event is None and not note
        else []
    )
    arrows = [
        {
            "x": e.dst % cols,
            "y": e.dst // cols,
            "ax": e.src % cols,
            "ay": e.src // cols,
            "xref": "x",
            "yref": "y",
            "axref": "x",
            "ayref": "y",
            "showarrow": True,
            "arrowhead": 2,
            "arrowwidth": 1.5,
            "arrowcolor": t.accent,
            "text": "",
            "hovertext": f"{plain(e.request_id)} copied block {e.src} to {e.dst} before writing",
        }
        for e in copies
    ]
    bare = {"showgrid": False, "zeroline": False}
    every = max(1, height // 20)
    figure: Figure = {
        "data": data,
        "layout": layout(
            t,
            "KV blocks, physical",
            note=note,
            xaxis={**bare, "range": [-0.5, cols - 0.5], "dtick": 8, "tickprefix": "+", "title": {"text": ""}},
            yaxis={
                **bare,
                "range": [height - 0.5, -0.5],
                "scaleanchor": "x",
                "tickmode": "array",
                "tickvals": list(range(0, height, every)),
                "ticktext": [str(y * cols) for y in range(0, height, every)],
            },
        ),
    }
    figure["layout"]["annotations"] = [*figure["layout"]["annotations"], *arrows]
    return figure


def _columns(n: int) -> int:
    """A multiple of 8 that makes the map about twice as wide as high."""
    return max(8, 8 * round(math.sqrt(2 * n) / 8))


def describe_block(state: State, block: int) -> str:
    """What stands in a block, in words (harmless text)."""
    kind = state.block_kind(block)
    if kind == "null":
        return "block 0: vLLM's null block, never given out"
    holders = [label(state, i) for i in state.holders.get(block, ())]
    if holders:
        who = (
            f"shared by {len(holders)}: {', '.join(holders[:6])}{', ...' if len(holders) > 6 else ''}"
            if len(holders) > 1
            else f"held by {holders[0]}"
        )
        return (
            f"block {block}, {who}, place {state.place(block)} in the table<br>{state.fill(block)} of "
            f"{state.block_size} slots hold a token"
        ) + (", can be found by its hash" if state.is_cached(block) else "")
    last = label(state, state.held_last(block))
    if kind == "cached":
        return f"block {block}, free, but still cached" + (f": {last} used it last" if last else "")
    if state.fragmented:
        run = next(r for r in state.free_runs() if block in r)
        head = state.requests[state.waiting[0]]
        return (
            f"block {block}, free in a run of {len(run)}: {plain(head.request_id)} needs {head.wait_need} "
            "side by side"
        )
    return f"block {block}, free" + (f": {last} had it last" if last else "")


class TableRows(NamedTuple):
    """One request's block table, one entry a place; arrays [blocks of the request]."""

    place: np.ndarray
    block_id: np.ndarray
    kind: list[str]
    refs: np.ndarray
    fill: np.ndarray
    cached: np.ndarray
    holders: list[list[str]]


def block_table_rows(trace: Trace, request: str, cursor: Cursor | int | None = None) -> TableRows:
    """The request's logical blocks in order, with the physical block behind each (0: the null block, left of
    the window). KeyError if it is not there yet.
    """
    state = trace.state(place(trace, cursor))
    ids = state.request(request).block_ids
    return TableRows(
        np.arange(len(ids)),
        np.array(ids, dtype=np.int64),
        [state.block_kind(b) for b in ids],
        np.array([state.ref_count(b) for b in ids], dtype=np.int64),
        np.array([state.fill(b) if b else 0 for b in ids], dtype=np.int64),
        np.array([state.is_cached(b) for b in ids], dtype=bool),
        [[state.by_index[i].request_id for i in state.holders.get(b, ())] for b in ids],
    )


def block_table(
    trace: Trace, request: str, cursor: Cursor | int | None = None, *, dark: bool = False
) -> Figure:
    """The block table of one request: place, physical block, what it is, slots filled, who else holds it.

    One table trace.
    """
    t, at = theme(dark), place(trace, cursor)
    note = lacking(trace, "blocks")
    state = trace.state(at)
    known = request in state.requests
    if not note and not known:
        note = f"{plain(request)} has not arrived yet"
    none = np.empty(0, np.int64)
    rows = (
        block_table_rows(trace, request, at) if not note else TableRows(none, none, [], none, none, none, [])
    )
    size = state.block_size
    positions = [f"{p * size}..{p * size + size - 1}" for p in rows.place.tolist()]
    others = [", ".join(plain(h) for h in hs if h != request) for hs in rows.holders]
    cells = [
        rows.place.tolist(),
        positions,
        rows.block_id.tolist(),
        rows.kind,
        [f"{f}/{size}" for f in rows.fill.tolist()],
        ["yes" if c else "" for c in rows.cached.tolist()],
        others,
    ]
    return {
        "data": [
            data_table(t, ["place", "tokens", "block", "is", "filled", "has a hash", "shared with"], cells)
        ],
        "layout": layout(t, f"Block table of {plain(request)}", note=note, margin={"l": 8, "r": 8}),
    }


def data_table(
    t: Theme, head: list[str], cells: list[list[Any]], widths: list[float] | None = None, mono: bool = False
) -> dict[str, Any]:
    """A table trace in the theme's colours. The cells must be harmless text already."""
    out: dict[str, Any] = {
        "type": "table",
        "header": {
            "values": head,
            "align": "left",
            "fill": {"color": t.track},
            "line": {"color": t.line},
            "font": {"color": t.mute, "size": 12},
        },
        "cells": {
            "values": cells,
            "align": "left",
            "fill": {"color": t.bg},
            "line": {"color": t.line},
            "font": {"color": t.fg, "size": 12, **({"family": MONO} if mono else {})},
            "height": 22,
        },
    }
    if widths:
        out["columnwidth"] = widths
    return out


def slots_rows(trace: Trace, cursor: Cursor | int | None = None) -> dict[str, np.ndarray]:
    """Slots of the pool while each step ran: `step` and the parts of the account, arrays [steps up to the
    cursor]; the parts sum to `total` at every step.
    """
    records = trace.records[: done_steps(place(trace, cursor))]
    out = {"step": np.array([r.step for r in records], dtype=np.int64)}
    for part in ("total", *SLOT_PARTS):
        out[part] = np.array([getattr(r.slots, part) for r in records], dtype=np.int64)
    return out


def slots(trace: Trace, cursor: Cursor | int | None = None, *, dark: bool = False) -> Figure:
    """Where the pool's slots went, stacked over the steps: used, partly empty, reserved, cached, free (five
    traces, in this order).
    """
    t, at = theme(dark), place(trace, cursor)
    note = lacking(trace, "accounting")
    rows = slots_rows(trace, at if not note else 0)
    data = []
    for part in SLOT_PARTS:
        look = t.slot(part)
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "stackgroup": "slots",
                "name": look.title,
                "x": rows["step"].tolist(),
                "y": rows[part].tolist(),
                "line": {"width": 0.5, "color": look.color, "shape": "hvh"},
                "fillpattern": {
                    "shape": look.pattern,
                    "fgcolor": look.ink,
                    "bgcolor": look.color,
                    "size": 6,
                    "solidity": 0.3,
                },
                "fillcolor": look.color,
                "hovertemplate": "step %{x}: %{y:,} slots " + part.replace("_", " ") + "<extra></extra>",
            }
        )
    end = done_steps(at)
    return {
        "data": data,
        "layout": layout(
            t,
            "Token slots of the pool (counted)",
            x="step",
            y="slots",
            note=note,
            shapes=[cursor_line(t, end)] if end and not note else [],
        ),
    }
