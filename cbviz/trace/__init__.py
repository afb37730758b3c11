"""The trace: what a run did, step by step, and what can be read out of it."""

from cbviz.trace.compare import Comparison, align, compare, compare_all, compare_tokens
from cbviz.trace.explain import Sentence, explain
from cbviz.trace.metrics import format_metrics, metrics, request_metrics
from cbviz.trace.reservation import reservation
from cbviz.trace.trace import Cursor, Segment, Trace, load
from cbviz.trace.why import why_block, why_chunk, why_missed, why_preempted, why_waiting

__all__ = [
    "Comparison",
    "Cursor",
    "Segment",
    "Sentence",
    "Trace",
    "align",
    "compare",
    "compare_all",
    "compare_tokens",
    "explain",
    "format_metrics",
    "load",
    "metrics",
    "request_metrics",
    "reservation",
    "why_block",
    "why_chunk",
    "why_missed",
    "why_preempted",
    "why_waiting",
]
