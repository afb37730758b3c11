"""The trace: what a run did, step by step, and what can be read out of it."""

from cbviz.trace.trace import Cursor, Segment, Trace, load

__all__ = ["Cursor", "Segment", "Trace", "load"]
