"""Pictures of a trace.

Each view is a pure function (trace, cursor) -> a Plotly figure as plain data, with a fixed number and order
of traces.

`cb.views.timeline(trace, cb.Cursor(12))`. Beside each picture stands the function of its rows
(`timeline_rows`, ...): arrays without colours. No view knows plotly, a widget or the engine; a view whose
table the trace lacks returns the same traces, empty, and a note that says so.
"""

from cbviz.views.alone import alone, alone_rows
from cbviz.views.batch import batch, batch_rows
from cbviz.views.blocks import block_map, block_map_rows, block_table, block_table_rows, slots, slots_rows
from cbviz.views.experts import experts, experts_rows
from cbviz.views.inside import inside, inside_rows, moved_rows
from cbviz.views.queues import latency, latency_rows, queues, queues_rows
from cbviz.views.theme import table as theme_table
from cbviz.views.timeline import compare, timeline, timeline_rows
from cbviz.views.tokens import tokens, tokens_rows
from cbviz.views.utilisation import busy_rows, phase_rows, roofline, utilisation, work_rows

VIEWS = {
    "timeline": timeline,
    "block_map": block_map,
    "batch": batch,
    "utilisation": utilisation,
    "roofline": roofline,
    "inside": inside,
    "queues": queues,
    "latency": latency,
    "tokens": tokens,
    "slots": slots,
    "experts": experts,
}
"""The views that need a trace and a cursor alone, by name."""

__all__ = [
    "VIEWS",
    "alone",
    "alone_rows",
    "batch",
    "batch_rows",
    "block_map",
    "block_map_rows",
    "block_table",
    "block_table_rows",
    "busy_rows",
    "compare",
    "experts",
    "experts_rows",
    "inside",
    "inside_rows",
    "moved_rows",
    "latency",
    "latency_rows",
    "phase_rows",
    "queues",
    "queues_rows",
    "roofline",
    "slots",
    "slots_rows",
    "theme_table",
    "timeline",
    "timeline_rows",
    "tokens",
    "tokens_rows",
    "utilisation",
    "work_rows",
]
