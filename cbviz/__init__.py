"""cbviz, a debugger for LLM serving: the public names, in one place.

Owns the list of what a user types after `import cbviz as cb`, and nothing else. Every name is loaded from its
home when it is first touched (PEP 562), so that `import cbviz` costs a few milliseconds and loads neither
torch nor a widget.
"""

from __future__ import annotations

import importlib
import os
import sys

__version__ = "0.1.0"

# Read by OpenMP when torch is loaded. On a machine that others use too, threads that spin while they wait
# make a step several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

TYPE_CHECKING = (
    False  # as in `typing`, which `python -m cbviz` would take from the working folder: see __main__.py
)

if TYPE_CHECKING:
    from typing import Any

    from cbviz import views
    from cbviz.app.explorer import explorer
    from cbviz.app.export import export_html
    from cbviz.breakpoints import on, watch
    from cbviz.config import ConfigError, EngineConfig
    from cbviz.core.policy import policy
    from cbviz.core.speculative import proposer
    from cbviz.messages import RequestError, RequestSpec, Sampling
    from cbviz.session import Session
    from cbviz.trace.compare import align, compare
    from cbviz.trace.explain import explain
    from cbviz.trace.metrics import metrics
    from cbviz.trace.reservation import reservation
    from cbviz.trace.trace import Cursor, Trace, load
    from cbviz.trace.why import why_block, why_chunk, why_missed, why_preempted, why_waiting

__all__ = [
    "ConfigError",
    "Cursor",
    "EngineConfig",
    "RequestError",
    "RequestSpec",
    "Sampling",
    "Session",
    "Trace",
    "__version__",
    "align",
    "compare",
    "explain",
    "explorer",
    "export_html",
    "load",
    "metrics",
    "on",
    "policy",
    "proposer",
    "reservation",
    "views",
    "watch",
    "why_block",
    "why_chunk",
    "why_missed",
    "why_preempted",
    "why_waiting",
]

_HOMES = {
    "ConfigError": "cbviz.config",
    "Cursor": "cbviz.trace.trace",
    "EngineConfig": "cbviz.config",
    "RequestError": "cbviz.messages",
    "RequestSpec": "cbviz.messages",
    "Sampling": "cbviz.messages",
    "Session": "cbviz.session",
    "Trace": "cbviz.trace.trace",
    "align": "cbviz.trace.compare",
    "compare": "cbviz.trace.compare",
    "explain": "cbviz.trace.explain",
    "explorer": "cbviz.app.explorer",
    "export_html": "cbviz.app.export",
    "load": "cbviz.trace.trace",
    "metrics": "cbviz.trace.metrics",
    "on": "cbviz.breakpoints",
    "policy": "cbviz.core.policy",
    "proposer": "cbviz.core.speculative",
    "reservation": "cbviz.trace.reservation",
    "watch": "cbviz.breakpoints",
    **{f"why_{what}": "cbviz.trace.why" for what in ("block", "chunk", "missed", "preempted", "waiting")},
}
"""Where each public name lives. `views` is a package of its own and not in the table."""


def __getattr__(name: str) -> Any:
    if name == "views":
        return importlib.import_module("cbviz.views")
    if name not in _HOMES:
        raise AttributeError(f"module 'cbviz' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next access is a plain one
    return value


def _in_a_kernel() -> bool:
    """True in a notebook's kernel; asks only what is loaded already."""
    ipykernel = sys.modules.get("ipykernel.kernelapp")
    return ipykernel is not None and ipykernel.IPKernelApp.initialized()


if _in_a_kernel():
    importlib.import_module("cbviz.app.figures").install()


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
