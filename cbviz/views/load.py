"""What a step did and how hard the device worked: the batch, the queues, bytes and operations a second, the
roofline, the latencies.

A title says whether work was counted or modelled and whether time was measured or modelled; the two never
share an axis unsaid.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cbviz import events as ev
from cbviz.messages import StepRecord
from cbviz.trace.metrics import clock, latencies, num_seats, token_budget, work
from cbviz.trace.trace import Cursor, Trace
from cbviz.trace.utilisation import PHASES, phases, profiled_steps
from cbviz.views.figure import Figure, cursor_line, done_steps, lacking, layout, place, plain
from cbviz.views.theme import theme

PARTS = ("decode", "prefill", "recomputed", "draft", "padded")
"""Parts of a row's tokens, in the order of the batch's traces."""
STEP_KINDS = ("decode", "prefill", "mixed", "nothing")


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


class WorkRows(NamedTuple):
    """Steps that computed something; arrays [steps].

    `flops`, `moved` (bytes) and `seconds` are of the step, `kind` is the place in STEP_KINDS.
    """

    step: np.ndarray
    flops: np.ndarray
    moved: np.ndarray
    seconds: np.ndarray
    kind: np.ndarray
    source: str
    """`counted` (in the real pass), `modelled`, `mixed` or ''."""
    clock: str
    """`measured`, `modelled`, `mixed` or ''."""

    @property
    def bytes_s(self) -> np.ndarray:
        return self.moved / self.seconds

    @property
    def flops_s(self) -> np.ndarray:
        return self.flops / self.seconds

    @property
    def intensity(self) -> np.ndarray:
        """Operations a byte."""
        return self.flops / self.moved


def step_kind(record: StepRecord) -> str:
    """`decode`, `prefill`, `mixed` or `nothing`."""
    kinds = {c.kind for c in record.chunks}
    return "nothing" if not kinds else kinds.pop() if len(kinds) == 1 else "mixed"


def work_rows(trace: Trace, cursor: Cursor | int | None = None) -> WorkRows:
    """Work and time of each step up to the cursor that computed something and took time.

    The forward pass' own wall time where it was measured, else t1 - t0.
    """
    rows, sources, records = [], set(), []
    for r in trace.records[: done_steps(place(trace, cursor))]:
        done = work(r)
        took = r.measured_s if r.measured_s is not None and r.clock == "measured" else r.t1_s - r.t0_s
        if done is None or not r.chunks or took <= 0 or not done[1]:
            continue
        rows.append((r.step, done[0], done[1], took, STEP_KINDS.index(step_kind(r))))
        sources.add(done[2])
        records.append(r)
    table = np.array(rows, dtype=float).reshape(-1, 5).T
    return WorkRows(
        table[0].astype(np.int64),
        table[1],
        table[2],
        table[3],
        table[4].astype(np.int64),
        "mixed" if len(sources) > 1 else "".join(sources),
        clock(records),
    )


def _basis(trace: Trace, rows: WorkRows) -> str:
    """What the figures rest on, in words."""
    device = f" of {plain(trace.header.device)}" if trace.header.device else ""
    return f"{rows.source or 'no'} work, {rows.clock or 'no'} time{device}"


def _peaks(trace: Trace) -> str:
    h = trace.header
    return (
        ""
        if not (h.peak_bytes_s or h.peak_flops_s)
        else "measured peaks"
        if h.peaks_measured
        else "data-sheet peaks"
    )


def utilisation(trace: Trace, cursor: Cursor | int | None = None, *, dark: bool = False) -> Figure:
    """Achieved bytes/s (above) and FLOP/s (below) of each step against the device's peaks; on an accelerator
    also the share of each step in which kernels ran.

    Traces: bytes/s, its peak, FLOP/s, its peak, kernels busy.
    """
    t, at = theme(dark), place(trace, cursor)
    note = lacking(trace, "cost", "time")
    rows = work_rows(trace, at if not note else 0)
    x = rows.step.tolist()
    ends = [x[0], x[-1]] if x else []
    data: list[dict[str, Any]] = []
    for y, values, peak, unit, name, color in (
        ("y", rows.bytes_s, trace.header.peak_bytes_s, "B/s", "bytes/s", t.state("decode").color),
        ("y2", rows.flops_s, trace.header.peak_flops_s, "FLOP/s", "FLOP/s", t.state("prefill").color),
    ):
        known = peak > 0 and bool(x)
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": x,
                "y": values.tolist(),
                "yaxis": y,
                "line": {"color": color, "width": 1.5, "shape": "hvh"},
                "marker": {"size": 3},
                "customdata": [
                    [f"{v / peak:.1%} of the peak" if known else "peak unknown"] for v in values.tolist()
                ],
                "hovertemplate": "step %{x}: %{y:.3s}" + unit + ", %{customdata[0]}<extra></extra>",
            }
        )
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"peak {name}",
                "x": ends if known else [],
                "y": [peak, peak] if known else [],
                "yaxis": y,
                "showlegend": known,
                "line": {"color": t.mute, "width": 1, "dash": "dash"},
                "hovertemplate": f"peak: %{{y:.3s}}{unit}<extra></extra>",
            }
        )
    peaks = _peaks(trace)
    title = f"Utilisation: {_basis(trace, rows)}" + (f", {peaks}" if peaks else "")
    frame = layout(
        t,
        title,
        x="step",
        note=note,
        shapes=[cursor_line(t, done_steps(at))] if x else [],
        xaxis={"anchor": "y2"},
        yaxis={
            "domain": [0.54, 1.0],
            "title": {"text": "bytes/s"},
            "rangemode": "tozero",
            "tickformat": ".2s",
        },
    )
    frame["yaxis2"] = {**frame["yaxis"], "domain": [0.0, 0.46], "title": {"text": "FLOP/s"}}
    busy = busy_rows(trace, at if not note else 0)
    data.append(
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "kernels busy",
            "x": busy[0].tolist(),
            "y": busy[1].tolist(),
            "yaxis": "y3",
            "showlegend": bool(len(busy[0])),
            "line": {"color": t.accent, "width": 1.5, "shape": "hvh"},
            "marker": {"size": 3, "symbol": "diamond"},
            "hovertemplate": "step %{x}: kernels ran %{y:.0%} of the time<extra></extra>",
        }
    )
    if len(busy[0]):
        frame["yaxis"]["domain"], frame["yaxis2"]["domain"] = [0.7, 1.0], [0.35, 0.65]
        frame["yaxis3"] = {
            **frame["yaxis"],
            "domain": [0.0, 0.3],
            "title": {"text": "kernels busy"},
            "range": [0, 1.02],
            "tickformat": ".0%",
        }
        frame["xaxis"]["anchor"] = "y3"
    return {"data": data, "layout": frame}


def busy_rows(trace: Trace, cursor: Cursor | int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(steps, share of the step in which an accelerator's kernels ran); empty where none was measured."""
    rows = [
        (r.step, r.device["busy_s"] / (r.device["busy_s"] + r.device.get("gap_s", 0.0)))
        for r in trace.records[: done_steps(place(trace, cursor))]
        if r.device and r.device.get("busy_s", 0) > 0
    ]
    table = np.array(rows, dtype=float).reshape(-1, 2).T
    return table[0].astype(np.int64), table[1]


class PhaseRows(NamedTuple):
    """Points under the roof, up to two a step; arrays [points].

    `kind`: place in PHASES; `alone`: the step did nothing else.
    """

    step: np.ndarray
    kind: np.ndarray
    flops: np.ndarray
    moved: np.ndarray
    seconds: np.ndarray
    alone: np.ndarray
    requests: list[list[str]]
    """Who was computed in it."""

    @property
    def intensity(self) -> np.ndarray:
        return self.flops / self.moved

    @property
    def flops_s(self) -> np.ndarray:
        return self.flops / self.seconds


def phase_rows(trace: Trace, cursor: Cursor | int | None = None) -> PhaseRows:
    """Decode and prefill of each step up to the cursor whose work and time are known
    (`trace.utilisation.phases`).
    """
    rows, who = [], []
    for r in trace.records[: done_steps(place(trace, cursor))]:
        for p in phases(r):
            if p.flops > 0:
                rows.append((r.step, PHASES.index(p.kind), p.flops, p.moved, p.took, p.alone))
                who.append(
                    [c.request_id for c in r.chunks if p.kind == "mixed" or (c.kind == p.kind) or p.alone]
                )
    table = np.array(rows, dtype=float).reshape(-1, 6).T
    return PhaseRows(
        table[0].astype(np.int64),
        table[1].astype(np.int64),
        table[2],
        table[3],
        table[4],
        table[5].astype(bool),
        who,
    )


def _some(ids: list[str], most: int = 6) -> str:
    return ", ".join(plain(i) for i in ids[:most]) + (
        f" and {len(ids) - most} more" if len(ids) > most else ""
    )


def roofline(trace: Trace, cursor: Cursor | int | None = None, *, dark: bool = False) -> Figure:
    """Decode and prefill of each step as points: operations a byte against FLOP/s, under the device's roof
    (Williams et al. 2009).

    Left of the bend reading memory is the limit, right of it arithmetic. Traces: roof, decode, prefill, steps
    of both, the step at the cursor.
    """
    t, at = theme(dark), place(trace, cursor)
    note = lacking(trace, "cost", "time")
    rows = phase_rows(trace, at if not note else 0)
    if not note and done_steps(at) and not len(rows.step):
        note = "the work of these steps is not known: this cost model prices time alone"
    h = trace.header
    x, y = rows.intensity, rows.flops_s
    roof_x: list[float] = []
    roof_y: list[float] = []
    signs: list[dict[str, Any]] = []
    known = h.peak_bytes_s > 0 and h.peak_flops_s > 0 and not note
    if known:
        ridge = h.peak_flops_s / h.peak_bytes_s
        low, high = min([ridge / 100, *(x / 2).tolist()]), max([ridge * 10, *(x * 2).tolist()])
        roof_x = [low, ridge, high]
        roof_y = [low * h.peak_bytes_s, h.peak_flops_s, h.peak_flops_s]
        sign = {
            "showarrow": False,
            "font": {"size": 11, "color": t.mute},
            "yanchor": "bottom",
            "y": np.log10(h.peak_flops_s).item(),
            "yshift": 2,
        }
        signs = [
            {**sign, "text": "reading memory is the limit", "x": np.log10(low).item(), "xanchor": "left"},
            {**sign, "text": "arithmetic is the limit", "x": np.log10(high).item(), "xanchor": "right"},
        ]
    top = np.minimum(h.peak_flops_s, x * h.peak_bytes_s) if known else np.full(len(x), np.nan)
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"roof: {_peaks(trace)}" if known else "peaks unknown",
            "x": roof_x,
            "y": roof_y,
            "line": {"color": t.mute, "width": 2},
            "hoverinfo": "skip",
        }
    ]
    for k, (kind, look, symbol) in enumerate(
        (
            ("decode", t.state("decode"), "circle"),
            ("prefill", t.state("prefill"), "diamond"),
            ("mixed", t.state("transferring"), "square"),
        )
    ):
        pick = np.flatnonzero(rows.kind == k)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": kind if k < 2 else "steps of both",
                "x": x[pick].tolist(),
                "y": y[pick].tolist(),
                "customdata": [
                    [
                        int(rows.step[i]),
                        f"{y[i] / top[i]:.0%} of the roof" if known else "roof unknown",
                        _some(rows.requests[i]),
                        "" if rows.alone[i] else ", beside the other kind",
                    ]
                    for i in pick.tolist()
                ],
                "showlegend": bool(len(pick)),
                "marker": {"color": look.color, "symbol": symbol, "size": 7, "opacity": 0.7},
                "hovertemplate": "step %{customdata[0]}, "
                + kind
                + "%{customdata[3]}: %{x:.3g} operations a byte, %{y:.3s}FLOP/s, %{customdata[1]}<br>"
                "%{customdata[2]}<extra></extra>",
            }
        )
    last = np.flatnonzero(rows.step == done_steps(at))
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"step {done_steps(at)}",
            "x": x[last].tolist(),
            "y": y[last].tolist(),
            "showlegend": bool(len(last)),
            "marker": {
                "color": "rgba(0,0,0,0)",
                "symbol": "circle-open",
                "size": 15,
                "line": {"color": t.accent, "width": 2.5},
            },
            "hoverinfo": "skip",
        }
    )
    all_rows = work_rows(trace, at if not note else 0)
    frame = layout(
        t,
        f"Roofline: {_basis(trace, all_rows)}",
        x="operations a byte moved",
        y="FLOP/s",
        note=note,
        xaxis={"type": "log"},
        yaxis={"type": "log", "tickformat": ".1s"},
    )
    frame["annotations"] = [*frame.get("annotations", []), *signs]
    return {"data": data, "layout": frame}


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


def queues_rows(trace: Trace, cursor: Cursor | int | None = None) -> dict[str, np.ndarray]:
    """Counts at the end of each step: `step`, `running`, `waiting`, `seats` (max_num_seqs in force, 0 if
    unknown), `preempted` (in that step); arrays [steps].
    """
    records = trace.records[: done_steps(place(trace, cursor))]
    seats, in_force = num_seats(trace.header.config), []
    for r in records:
        for e in r.events:
            if isinstance(e, ev.Configured) and e.field == "max_num_seqs":
                seats = num_seats({"max_num_seqs": e.new})
        in_force.append(seats)
    return {
        "step": np.array([r.step for r in records], dtype=np.int64),
        "running": np.array([r.gauges.num_running for r in records], dtype=np.int64),
        "waiting": np.array([r.gauges.num_waiting for r in records], dtype=np.int64),
        "seats": np.array(in_force, dtype=np.int64),
        "preempted": np.array(
            [sum(isinstance(e, ev.Preempted) for e in r.events) for r in records], dtype=np.int64
        ),
    }


def queues(trace: Trace, cursor: Cursor | int | None = None, *, dark: bool = False) -> Figure:
    """Requests running and waiting over the steps. Traces: running, waiting, seats, preemptions."""
    t, at = theme(dark), place(trace, cursor)
    note = lacking(trace, "queue")
    rows = queues_rows(trace, at if not note else 0)
    x = rows["step"].tolist()
    hit = np.flatnonzero(rows["preempted"])
    line = {"type": "scatter", "mode": "lines"}
    data = [
        {
            **line,
            "name": "running",
            "x": x,
            "y": rows["running"].tolist(),
            "line": {"color": t.state("decode").color, "width": 2, "shape": "hvh"},
        },
        {
            **line,
            "name": "waiting",
            "x": x,
            "y": rows["waiting"].tolist(),
            "line": {"color": t.state("prefill").color, "width": 2, "shape": "hvh", "dash": "dot"},
        },
        {
            **line,
            "name": "seats",
            "x": x,
            "y": rows["seats"].tolist(),
            "line": {"color": t.mute, "width": 1, "shape": "hvh", "dash": "dash"},
            "showlegend": bool(rows["seats"].any()),
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "preempted in this step",
            "x": rows["step"][hit].tolist(),
            "y": rows["running"][hit].tolist(),
            "customdata": rows["preempted"][hit].tolist(),
            "showlegend": bool(len(hit)),
            "marker": {"color": t.state("preempted").color, "symbol": "x", "size": 9},
            "hovertemplate": "step %{x}: %{customdata} preempted<extra></extra>",
        },
    ]
    return {
        "data": data,
        "layout": layout(
            t,
            "Queues",
            x="step",
            y="requests",
            note=note,
            yaxis={"rangemode": "tozero"},
            shapes=[cursor_line(t, done_steps(at))] if x else [],
        ),
    }


LATENCIES = (
    ("ttft_s", "time to first token", "solid"),
    ("itl_s", "between tokens", "dot"),
    ("e2e_s", "end to end", "dash"),
)


def latency_rows(
    trace: Trace, cursor: Cursor | int | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For `ttft_s`, `itl_s`, `e2e_s`: (values in seconds ascending, share of values up to there), arrays
    [values].
    """
    values = latencies(trace, place(trace, cursor)) if trace.has("time") else {}
    out = {}
    for name, _, _ in LATENCIES:
        v = np.sort(np.array(values.get(name, []), dtype=float))
        out[name] = (v, np.arange(1, len(v) + 1) / max(len(v), 1))
    return out


def latency(trace: Trace, cursor: Cursor | int | None = None, *, dark: bool = False) -> Figure:
    """Distributions of TTFT, ITL and E2E as cumulative shares over a logarithmic time axis (three traces)."""
    t, at = theme(dark), place(trace, cursor)
    note = lacking(trace, "time")
    rows = latency_rows(trace, at)
    if not note and not any(len(v) for v, _ in rows.values()):
        note = "no request has its first token yet"
    data = []
    for (name, title, dash), color in zip(
        LATENCIES, (t.state("prefill").color, t.state("decode").color, t.state("transferring").color)
    ):
        v, share = rows[name]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": title,
                "x": v.tolist(),
                "y": share.tolist(),
                "line": {"color": color, "width": 2, "shape": "hv", "dash": dash},
                "marker": {"size": 4},
                "hovertemplate": "%{y:.0%} within %{x:.3s}s<extra>" + title + "</extra>",
            }
        )
    whose = clock(trace.records[: done_steps(at)]) or trace.header.clock
    device = f" ({plain(trace.header.device)})" if trace.header.device else ""
    return {
        "data": data,
        "layout": layout(
            t,
            f"Latencies, {whose} time{device}",
            x="seconds",
            y="share of values",
            note=note,
            xaxis={"type": "log"},
            yaxis={"range": [0, 1.02], "tickformat": ".0%"},
        ),
    }
