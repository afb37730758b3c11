"""How full the engine was and how long requests waited: queues and latencies over steps."""

from __future__ import annotations

import numpy as np

from cbviz import events as ev
from cbviz.trace.metrics import clock, latencies, num_seats
from cbviz.trace.trace import Cursor, Trace
from cbviz.views.figure import Figure, cursor_line, done_steps, lacking, layout, place, plain
from cbviz.views.theme import theme


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
