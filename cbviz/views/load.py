"""What a step did and how hard the device worked: the batch, the queues, bytes and operations a second, the roofline, the latencies.

A title says whether work was counted or modelled and whether time was measured or modelled; the two never share an axis unsaid.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cbviz import events as ev
from cbviz.messages import StepRecord
from cbviz.trace.metrics import clock, latencies, num_seats, token_budget, work
from cbviz.trace.trace import Cursor, Trace
from cbviz.views.figure import Figure, cursor_line, done_steps, lacking, layout, place, plain
from cbviz.views.theme import theme

PARTS = ("decode", "prefill", "recomputed", "draft", "padded")
"""Parts of a row's tokens, in the order of the batch's traces."""
STEP_KINDS = ("decode", "prefill", "mixed", "nothing")


class BatchRows(NamedTuple):
    """One step's batch, one entry a chunk, in the scheduler's order; `tokens` [chunks, len(PARTS)]. The last entry may be the padding of all prompts to one length ('')."""

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
            row["recomputed"], row["draft"], row["decode" if c.kind == "decode" else "prefill"] = c.num_recomputed, c.num_draft, fresh
        ids.append(c.request_id)
        starts.append(c.start)
        rows.append([row[p] for p in PARTS])
    if record.num_padding_tokens:
        ids.append("")
        starts.append(-1)
        rows.append([record.num_padding_tokens if p == "padded" else 0 for p in PARTS])
    return BatchRows(ids, np.array(starts, dtype=np.int64), np.array(rows, dtype=np.int64).reshape(-1, len(PARTS)), budget)


def batch(trace: Trace, cursor: Cursor | int | None = None, *, dark: bool = False) -> Figure:
    """Whose tokens the step computed: a bar a request, split into PARTS (five traces). The title has the step's sum and its budget."""
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
                "marker": {"color": look.color, "pattern": {"shape": look.pattern, "fgcolor": look.ink, "bgcolor": look.color, "size": 5, "solidity": 0.35}},
                "showlegend": bool(rows.tokens[:, j].any()),
                "hovertemplate": "%{customdata[0]}: %{x} tokens " + look.title + ", from position %{customdata[1]}<extra></extra>",
            }
        )
    total = int(rows.tokens.sum())
    title = f"Batch of step {at.step}: {total:,}" + (f" of {rows.budget:,} tokens" if rows.budget else " tokens")
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
            yaxis={"tickmode": "array", "tickvals": y[::every], "ticktext": names[::every], "range": [max(len(names), 1) - 0.5, -0.5], "showgrid": False, "zeroline": False},
        ),
    }


class WorkRows(NamedTuple):
    """Steps that computed something; arrays [steps]. `flops`, `moved` (bytes) and `seconds` are of the step, `kind` is the place in STEP_KINDS."""

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
    """Work and time of each step up to the cursor that computed something and took time. The forward pass' own wall time where it was measured, else t1 - t0."""
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
    return WorkRows(table[0].astype(np.int64), table[1], table[2], table[3], table[4].astype(np.int64), "mixed" if len(sources) > 1 else "".join(sources), clock(records))


def _basis(trace: Trace, rows: WorkRows) -> str:
    """What the figures rest on, in words."""
    device = f" of {plain(trace.header.device)}" if trace.header.device else ""
    return f"{rows.source or 'no'} work, {rows.clock or 'no'} time{device}"


def _peaks(trace: Trace) -> str:
    h = trace.header
    return "" if not (h.peak_bytes_s or h.peak_flops_s) else "measured peaks" if h.peaks_measured else "data-sheet peaks"


def utilisation(trace: Trace, cursor: Cursor | int | None = None, *, dark: bool = False) -> Figure:
    """Achieved bytes/s (above) and FLOP/s (below) of each step against the device's peaks. Traces: bytes/s, its peak, FLOP/s, its peak."""
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
                "customdata": [[f"{v / peak:.1%} of the peak" if known else "peak unknown"] for v in values.tolist()],
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
        yaxis={"domain": [0.54, 1.0], "title": {"text": "bytes/s"}, "rangemode": "tozero", "tickformat": ".2s"},
    )
    frame["yaxis2"] = {**frame["yaxis"], "domain": [0.0, 0.46], "title": {"text": "FLOP/s"}}
    return {"data": data, "layout": frame}


def roofline(trace: Trace, cursor: Cursor | int | None = None, *, dark: bool = False) -> Figure:
    """Each step as a point: operations a byte against FLOP/s, under the device's roof (Williams et al. 2009). Traces: roof, decode, prefill, mixed steps, the last step."""
    t, at = theme(dark), place(trace, cursor)
    note = lacking(trace, "cost", "time")
    rows = work_rows(trace, at if not note else 0)
    use = rows.flops > 0
    x, y = rows.intensity[use], rows.flops_s[use]
    roof_x: list[float] = []
    roof_y: list[float] = []
    h = trace.header
    if h.peak_bytes_s > 0 and h.peak_flops_s > 0 and not note:
        ridge = h.peak_flops_s / h.peak_bytes_s
        low, high = min([ridge / 100, *x.tolist()]), max([ridge * 10, *x.tolist()])
        roof_x = [low, ridge, high]
        roof_y = [low * h.peak_bytes_s, h.peak_flops_s, h.peak_flops_s]
    data: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "lines", "name": _peaks(trace) or "peaks unknown", "x": roof_x, "y": roof_y, "line": {"color": t.mute, "width": 2}, "hoverinfo": "skip"}
    ]
    for kind, look, symbol in (("decode", t.state("decode"), "circle"), ("prefill", t.state("prefill"), "diamond"), ("mixed", t.state("transferring"), "square")):
        pick = rows.kind[use] == STEP_KINDS.index(kind)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"{kind} steps",
                "x": x[pick].tolist(),
                "y": y[pick].tolist(),
                "customdata": rows.step[use][pick].tolist(),
                "showlegend": bool(pick.any()),
                "marker": {"color": look.color, "symbol": symbol, "size": 7, "opacity": 0.7},
                "hovertemplate": "step %{customdata}: %{x:.3g} FLOP/byte, %{y:.3s}FLOP/s<extra></extra>",
            }
        )
    last = np.flatnonzero(rows.step[use] == done_steps(at))
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "this step",
            "x": x[last].tolist(),
            "y": y[last].tolist(),
            "showlegend": bool(len(last)),
            "marker": {"color": "rgba(0,0,0,0)", "symbol": "circle-open", "size": 15, "line": {"color": t.accent, "width": 2.5}},
            "hoverinfo": "skip",
        }
    )
    return {
        "data": data,
        "layout": layout(t, f"Roofline: {_basis(trace, rows)}", x="FLOP a byte", y="FLOP/s", note=note, xaxis={"type": "log"}, yaxis={"type": "log", "tickformat": ".1s"}),
    }


def queues_rows(trace: Trace, cursor: Cursor | int | None = None) -> dict[str, np.ndarray]:
    """Counts at the end of each step: `step`, `running`, `waiting`, `seats` (max_num_seqs in force, 0 if unknown), `preempted` (in that step); arrays [steps]."""
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
        "preempted": np.array([sum(isinstance(e, ev.Preempted) for e in r.events) for r in records], dtype=np.int64),
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
        {**line, "name": "running", "x": x, "y": rows["running"].tolist(), "line": {"color": t.state("decode").color, "width": 2, "shape": "hvh"}},
        {**line, "name": "waiting", "x": x, "y": rows["waiting"].tolist(), "line": {"color": t.state("prefill").color, "width": 2, "shape": "hvh", "dash": "dot"}},
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
    return {"data": data, "layout": layout(t, "Queues", x="step", y="requests", note=note, yaxis={"rangemode": "tozero"}, shapes=[cursor_line(t, done_steps(at))] if x else [])}


LATENCIES = (("ttft_s", "time to first token", "solid"), ("itl_s", "between tokens", "dot"), ("e2e_s", "end to end", "dash"))


def latency_rows(trace: Trace, cursor: Cursor | int | None = None) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For `ttft_s`, `itl_s`, `e2e_s`: (values in seconds ascending, share of values up to there), arrays [values]."""
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
    for (name, title, dash), color in zip(LATENCIES, (t.state("prefill").color, t.state("decode").color, t.state("transferring").color)):
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
            t, f"Latencies, {whose} time{device}", x="seconds", y="share of values", note=note, xaxis={"type": "log"}, yaxis={"range": [0, 1.02], "tickformat": ".0%"}
        ),
    }
