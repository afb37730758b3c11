"""Figures in notebooks: drawn live by JupyterLab, and without a network in the page that nbconvert makes.

Knows plotly, no trace.

JupyterLab draws a figure from its data. nbconvert's HTML page can only show what stands in it as HTML, so
each figure carries both. plotly.js (1.5 MB packed) comes with the first figure of a kernel alone; the later
ones in the page find it there.
"""

from __future__ import annotations

import base64
import gzip
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import uuid
from collections.abc import Sequence
from types import ModuleType
from typing import Any

NAME = "cbviz"
"""Of our renderer, in plotly's table of renderers."""

_SCRIPT = """
(() => {
  const host = document.getElementById("%(id)s");
  const unpack = async (text) => {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const load = async () => {
    const source = await unpack(document.querySelector("script.cbviz-plotly").textContent);
    const parts = ["const m={exports:{}};(function(module,exports,define){", source, "\\n}).call(globalThis,m,m.exports,undefined);export default m.exports;"];
    const url = URL.createObjectURL(new Blob(parts, { type: "text/javascript" }));
    return (await import(url)).default;
  };
  const draw = async () => {
    const figure = JSON.parse(await unpack(host.nextElementSibling.textContent));
    const Plotly = await (globalThis.cbvizPlotlyOfNotebook ??= load());
    host.replaceChildren();
    await Plotly.newPlot(host, figure.data, figure.layout, { responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "" });
  };
  const fail = (e) => { host.textContent = "This figure could not be drawn. Run the notebook again and convert it again. " + e; };
  const start = () => draw().catch(fail);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
"""
_WAITING = "A figure: it is drawn where scripts run, as in JupyterLab and in the page that nbconvert makes."


def packed(text: str) -> str:
    """Gzip and base64: smaller, and nothing in it can be read as markup."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode()


def html_of(figure: dict[str, Any], library: bool) -> str:
    """HTML that draws the figure; with `library`, plotly.js too, for this figure and all others of the page."""
    from plotly.io import to_json

    name = f"cbviz-figure-{uuid.uuid4().hex}"
    height = figure.get("layout", {}).get("height") or 450
    shared = ""
    if library:
        from cbviz.app import assets

        shared = (
            '<script type="text/plain" '
            f'class="cbviz-plotly">{base64.b64encode(assets.plotly_gz()).decode()}</script>'
        )
    return (
        f'<div>{shared}<div id="{name}" style="height:{float(height):g}px;width:100%">{_WAITING}</div>'
        "<script "
        f'type="text/plain">{packed(to_json(figure, validate=False))}</script><script>{_SCRIPT % {"id": name}}</script></div>'
    )


class Carrier:
    """Which cell's output carries plotly.js: the first that showed a figure, and again when that cell runs
    again.
    """

    def __init__(self) -> None:
        self.cell: str | None = None
        self.run = 0

    def wants_library(self, cell: str, run: int) -> bool:
        """Say whether the next figure has to bring plotly.js.

        `cell`: its cell's id, '' if unknown; `run`: the number of this execution.
        """
        first = self.cell is None
        again = bool(cell) and cell == self.cell and run != self.run
        if first or again:
            self.cell, self.run = cell, run
        return first or again


def running_cell() -> tuple[str, int]:
    """The id of the cell that runs ('' where the front end does not tell it), and the number of its
    execution.
    """
    from IPython import get_ipython

    shell = get_ipython()
    header = getattr(shell, "parent_header", None) or {}
    return str(header.get("metadata", {}).get("cellId", "")), getattr(shell, "execution_count", 0)


def add_renderer(io: ModuleType) -> None:
    """Puts our renderer beside JupyterLab's, if that is what plotly has chosen: a choice of the user's own
    stays.
    """
    from plotly.io.base_renderers import MimetypeRenderer

    carrier = Carrier()

    class Renderer(MimetypeRenderer):
        def to_mimebundle(self, fig_dict: dict[str, Any]) -> dict[str, Any]:
            return {"text/html": html_of(fig_dict, carrier.wants_library(*running_cell()))}

    if io.renderers.default == "plotly_mimetype":
        io.renderers[NAME] = Renderer()
        io.renderers.default = f"plotly_mimetype+{NAME}"


class _WhenPlotlyComes(importlib.abc.MetaPathFinder):
    """Adds the renderer as soon as somebody imports plotly: cbviz itself need not load it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "plotly.io":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_add(module: ModuleType) -> None:
            load(module)
            add_renderer(module)

        setattr(spec.loader, "exec_module", load_and_add)  # noqa: B010  # of this one loader
        return spec


def install() -> None:
    """Have figures in this kernel drawn in nbconvert's pages too. Called when cbviz is imported in a kernel.

    Not under Voilà: its pages draw the data themselves, and forbid scripts in HTML.
    """
    if os.environ.get("SERVER_SOFTWARE", "").startswith("voila/"):
        return
    io = sys.modules.get("plotly.io")
    if io is not None:
        add_renderer(io)
    elif not any(isinstance(f, _WhenPlotlyComes) for f in sys.meta_path):
        sys.meta_path.insert(0, _WhenPlotlyComes())
