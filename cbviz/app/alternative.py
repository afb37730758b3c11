"""What a notebook shows of the explorer where no kernel runs: a picture of the run, and a player without a kernel.

Owns two outputs beside the widget's and when they are written again; makes no step.

A notebook keeps the outputs of its cells. The widget's own output is nothing without its kernel, so the cell
shows two more before it: a PNG picture for places without scripts (GitHub, PDF, Markdown), and HTML that
plays the run (nbconvert's page, JupyterLab without the kernel). The live widget hides both
(`static/widget.js`); the player hides the picture.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import html
import os
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from cbviz.app import export, snapshot
from cbviz.trace import Trace

Bundle = dict[str, Any]
MOST_STEPS = 1000
"""A longer run has a picture and no player: packing it would hold up the notebook for seconds."""
MOST_BYTES = 1_000_000
"""The largest player, in bytes of HTML."""
LOOK_S = 2.0
"""How often a run that stands still is compared with what was written of it."""
COST_SHARE = 20
"""After a write of T seconds the next one waits for this many times T."""
LIVE = "Run this cell again for the live explorer."
NO_STEPS = "This explorer's run has no step yet. Run this cell, and press Step."

_SCRIPT = """
(() => {
  const mine = '[data-cbviz-run="%(id)s"]';
  const host = document.currentScript?.closest(mine) ?? document.querySelector(mine);
  const child = host.closest(".jp-OutputArea-child");
  const picture = child?.previousElementSibling?.querySelector("img") ? child.previousElementSibling : null;
  const live = () => !!globalThis.cbvizLive?.get("%(id)s");
  const lab = !!document.querySelector(".jp-NotebookPanel");
  const show = (on) => { for (const e of [host, picture]) if (e) e.style.display = on ? "" : "none"; };
  const lost = /^(Error displaying widget: model not found|Loading widget\\.\\.\\.)$/;
  const hideLostWidgets = () => {
    for (let e = child?.nextElementSibling; e; e = e.nextElementSibling) {
      const words = e.querySelector(".jp-OutputArea-output")?.textContent.trim();
      const hide = lost.test(words) && !live();
      if (hide) e.dataset.cbvizLost = "1";
      if (e.dataset.cbvizLost) e.style.display = hide ? "none" : "";
    }
  };
  const play = async () => {
    if (live() || !host.isConnected) return;
    show(true);
    // JupyterLab looks for a lost widget for a while before it gives up.
    for (let s = 0; s < 30; s++) setTimeout(hideLostWidgets, 1000 * s);
    const packed = host.querySelector("[data-cbviz-page]");
    if (!packed || host.querySelector("iframe")) return;
    const bytes = Uint8Array.from(atob(packed.dataset.cbvizPage), (c) => c.charCodeAt(0));
    const page = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    const frame = document.createElement("iframe");
    frame.title = "Recorded run, cbviz";
    frame.sandbox = "allow-scripts";
    frame.style.cssText = "width:100%%;height:812px;border:0;display:block";
    frame.srcdoc = page;
    host.append(frame);
    if (picture) picture.style.display = "none";
  };
  const fail = (e) => host.append("The player could not be opened: " + e);
  const start = () => {
    if (!lab) return play().catch(fail);
    show(false);
    setTimeout(() => play().catch(fail), %(wait_ms)d);
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
"""
WAIT_MS = 3000
"""JupyterLab shows outputs in their order: the live widget, which comes last, has this time to appear."""


class Alternative:
    """The two outputs of one explorer.

    `trace()` is its run now, None while it is being opened; in `still()` no step is made.
    """

    def __init__(
        self, trace: Callable[[], Trace | None], still: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.id = uuid.uuid4().hex
        self._trace = trace
        self._still = still
        self._shown = False
        self._written: tuple[int, int] | None = None
        self._cost = 0.0
        self._written_at = 0.0

    def show(self) -> None:
        """Puts the two outputs into the cell that runs, before the widget's; written when the cell ends."""
        from IPython import get_ipython

        shell = get_ipython()
        if shell is None:
            return
        self._written = None
        for part, bundle in self._bundles(None).items():
            self._display(part, bundle)
        if not self._shown:
            self._shown = True
            shell.events.register("post_run_cell", self._after_cell)

    def hide(self) -> None:
        """Writes no more: the explorer is closed."""
        from IPython import get_ipython

        shell = get_ipython()
        if self._shown and shell is not None:
            self._shown = False
            shell.events.unregister("post_run_cell", self._after_cell)

    def _after_cell(self, *_: object) -> None:
        if (due := self._due()) is not None:
            self._put(due, *self._made())

    async def watch(self, resting: Callable[[], bool]) -> None:
        """Writes the outputs again whenever the run has moved on and rests."""
        before = None
        while True:
            await asyncio.sleep(LOOK_S)
            now = self._due()
            rested = time.monotonic() - self._written_at > COST_SHARE * self._cost
            if now is not None and now == before and rested and resting():
                self._put(now, *await asyncio.to_thread(self._made))
            before = now

    def _due(self) -> tuple[int, int] | None:
        """What the run is now, if that is not what the outputs show."""
        trace = self._trace()
        if not self._shown or trace is None or not len(trace):
            return None
        key = (id(trace), len(trace))
        return key if key != self._written else None

    def _made(self) -> tuple[dict[str, Bundle], float]:
        """The outputs of the run now, and the seconds that they took."""
        start = time.monotonic()
        with self._still():
            made = self._bundles(self._trace())
        return made, time.monotonic() - start

    def _display(self, part: str, bundle: Bundle, update: bool = False) -> None:
        from IPython.display import display

        about = {"image/png": {"alt": bundle["text/plain"]}} if "image/png" in bundle else {}
        display(bundle, metadata=about, raw=True, display_id=f"{self.id}-{part}", update=update)

    def _put(self, key: tuple[int, int], made: dict[str, Bundle], cost: float) -> None:
        for part, bundle in made.items():
            self._display(part, bundle, update=True)
        self._written, self._written_at, self._cost = key, time.monotonic(), cost

    def _bundles(self, trace: Trace | None) -> dict[str, Bundle]:
        """The outputs by name, in their order in the cell."""
        if trace is None or not len(trace):
            return {
                "picture": {"text/plain": ""},
                "player": {"text/plain": NO_STEPS, "text/html": said(self.id, NO_STEPS)},
            }
        return {"picture": picture(trace), "player": player(trace, self.id)}


def picture(trace: Trace) -> Bundle:
    """The last frame: a PNG picture."""
    return {
        "text/plain": f"Picture of the run at step {len(trace):,}",
        "image/png": base64.b64encode(snapshot.png(trace)).decode(),
    }


def player(trace: Trace, name: str) -> Bundle:
    """The run as HTML that plays without a kernel, or words that say why there is none."""
    at = f"The explorer's run, recorded at step {len(trace):,}."
    whole = 'cbviz.export_html(session.trace, "run.html") writes the whole run as a page.'
    if len(trace) > MOST_STEPS:
        return _words(name, f"{at} A run of over {MOST_STEPS:,} steps has no player here: {whole} {LIVE}")
    page = export.page(trace, small=True)
    packed = base64.b64encode(gzip.compress(page.encode("utf-8", "replace"), 9, mtime=0)).decode()
    if len(packed) > MOST_BYTES - 5000:
        return _words(name, f"{at} It is too large for a player here: {whole} {LIVE}")
    script = _SCRIPT % {"id": name, "wait_ms": WAIT_MS}
    body = f'<div hidden data-cbviz-page="{packed}"></div><script>{script}</script>'
    return {"text/plain": f"{at} {LIVE}", "text/html": said(name, f"{at} {LIVE}", body)}


def _words(name: str, text: str) -> Bundle:
    return {"text/plain": text, "text/html": said(name, text)}


def said(name: str, text: str, more: str = "") -> str:
    """The player's place in the output, with a sentence on top."""
    return f'<div data-cbviz-run="{name}"><p>{html.escape(text)}</p>{more}</div>'


def wanted() -> bool:
    """Whether the outputs are kept at all: a Voilà page is no notebook, and its kernel ends with it."""
    return not os.environ.get("SERVER_SOFTWARE", "").lower().startswith("voila")
