"""The trace: what a run did, step by step, and what can be read out of it."""

from cbviz.trace.compare import Comparison, compare, compare_tokens
from cbviz.trace.explain import Sentence, explain
from cbviz.trace.metrics import format_metrics, metrics, request_metrics
from cbviz.trace.trace import Cursor, Segment, Trace, load

__all__ = ["Comparison", "Cursor", "Segment", "Sentence", "Trace", "compare", "compare_tokens", "explain", "format_metrics", "load", "metrics", "request_metrics"]
