"""How hard the device worked: bytes and operations a second, and the roofline.

A title says whether work was counted or modelled and whether time was measured or modelled; the two never
share an axis unsaid.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cbviz.messages import StepRecord
from cbviz.trace.metrics import clock, work
from cbviz.trace.trace import Cursor, Trace
from cbviz.trace.utilisation import PHASES, phases
from cbviz.views.figure import Figure, cursor_line, done_steps, lacking, layout, place, plain
from cbviz.views.theme import theme

STEP_KINDS = ("decode", "prefill", "mixed", "nothing")


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
