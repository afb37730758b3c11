"""A recorded run as one page that opens from disk: the explorer without a kernel.

Owns the page and what is packed into it; knows no session.

The page is drawn by the explorer's own modules. `static/recorded.js` stands in for the kernel: it sends them
the messages that `wire` and `player` would send, made from a strip of changes, one entry an event of every
step, and from the sentences and figures of each step, which are computed here. Everything packed is gzip and
base64, so no prompt can be read as markup; what stands in the page as text is escaped.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cbviz import __version__
from cbviz.app import assets
from cbviz.app.wire import (
    NULL,
    ROW_WORDS,
    Wire,
    block_words,
    config_head,
    copies,
    event_sentence,
    inside_message,
    metrics_message,
    reserved,
    step_account,
    why_message,
)
from cbviz.messages import StepRecord
from cbviz.trace import Cursor, Trace
from cbviz.trace.autosave import write_text
from cbviz.trace.experts import layers_of
from cbviz.trace.metrics import clock, whose_time
from cbviz.trace.schema import TraceError
from cbviz.trace.state import State
from cbviz.trace.utilisation import profiled_steps

FIGURES_EVERY_STEP = 1000
"""A run of up to so many steps has its figures at each of them.

They cost time in proportion to the step: a longer run has them less often, and the page says up to which
step.
"""
SMALL_FIGURES = 200
"""The same for a page inside a notebook, which is made again and again while the run goes on."""
FIELDS = ROW_WORDS - 2
"""A row's fields between its index and its blocks."""


def export_html(trace: Trace, path: str | Path, *, title: str | None = None, step: int | None = None) -> Path:
    """Writes the page of `trace` (see `page`) to `path`; the file appears complete or not at all.

    Returns its path.
    """
    text = page(trace, title=title, step=step)
    target = Path(path)
    write_text(target, text)
    return target


def _fullest(trace: Trace) -> int:
    """The first step that left the fewest free blocks."""
    return min(trace, key=lambda r: r.gauges.num_free_blocks).step


# what is packed ---------------------------------------------------------------------------------------------


def pack(trace: Trace, title: str = "", step: int = 0, figures_until: int = FIGURES_EVERY_STEP) -> bytes:
    """Everything that the page shows: a JSON head (its length first, uint32) and binary buffers, each from a
    multiple of 8 bytes on. Little-endian.

    `figures_until`: a run of up to so many steps has its figures at each of them.
    """
    wire = _Strip()
    made = wire.message(trace, Cursor(0))
    assert made is not None
    first, buffers = made
    # the map has room for the largest pool of the run; what is not there yet, or no more, is drawn as the
    # null block is
    if trace.resizes:
        most, place = (
            max(trace.header.num_blocks, *(n for _, _, n in trace.resizes)),
            first["b"].index("words"),
        )
        buffers[place] += array("I", [0, NULL] * (most - trace.header.num_blocks)).tobytes()
        first["num_blocks"] = most
    ticks, offsets = wire.strip(trace)
    first["words"] = wire.all_words
    first["meta"]["workload"] = Path(
        trace.header.workload
    ).name  # a page is passed on; where a file lay on this machine is nobody's business
    figures, names, at = _figures(trace, figures_until)
    said = _Sentences()
    for n in range(len(trace) + 1):
        said.step(
            why_message(trace, n)["items"],
            [event_sentence(trace, n, i) for i in range(len(trace.record(n).events))] if n else (),
        )
    watched = profiled_steps(trace)
    h = trace.header
    model = "simulator" if h.runner == "sim" else h.model or h.runner
    own = {
        "strip": ticks,
        "offsets": array("I", offsets).tobytes(),
        "figures": figures,
        "said": bytes(said.out),
        "saidat": array("I", said.offsets).tobytes(),
    }
    head = {
        "first": first,
        "configs": wire.configs,
        "said": {"frames": list(said.frames), "ids": list(said.ids)},
        "accounts": _accounts(trace),
        "inside": {
            r.step: m
            for r in trace
            if (m := inside_message(trace, r.step, watched))["profile"] or m["device"] or m["moved"]
        },
        "watched": watched,
        "experts": _experts(trace),
        "copies": {r.step: pairs for r in trace if (pairs := copies(r))},
        "figures": {"names": names, "at": at, "clock": h.clock},
        "step": step,
        "title": [
            title,
            model,
            f"{h.device}, {h.clock}",
            str(h.config.get("discipline", "")),
            str(h.config.get("policy", "")),
        ],
        "num_requests": trace.state().num_requests,
        "buffers": [[name, len(b)] for name, b in zip([*first["b"], *own], [*buffers, *own.values()])],
    }
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "replace"
    )
    out = bytearray(len(text).to_bytes(4, "little") + text)
    for b in (*buffers, *own.values()):
        out += bytes(-len(out) % 8) + b
    return bytes(out)


class _Strip(Wire):
    """What each event changes in the page's picture, as varints (seven bits a byte, the lowest first), after
    the pattern of `Wire`'s rows and words.

    step   n x events + 1, padding tokens, n x chunk (request, start, tokens, kind), a tick for each event, and one for the end of the step
    tick   rows * 8 + 4 (settings) + 2 (queues) + 1 (blocks), then each of these:
      row     request, which fields, their changes (zigzag), the table's splice
      blocks  n x (id, zigzag against the one before; owner + 1; sharers; slots filled * 16 + flags)
      queues  splice of the waiting, splice of the running
      settings  index into `configs`
    splice kept in front, kept at the back, n x new
    """

    def strip(self, trace: Trace) -> tuple[bytes, list[int]]:
        """The strip, and where each step begins in it."""
        self.configs: list[dict[str, Any]] = []
        self._rows: dict[int, list[int]] = {}
        self._waits: list[int] = []
        self._runs: list[int] = []
        state = State(trace.header.num_blocks, trace.header.block_size, trace.header.config)
        out, offsets = bytearray(), []
        for record in trace:
            offsets.append(len(out))
            self._step(out, state, record)
        return bytes(out), offsets

    @property
    def all_words(self) -> list[str]:
        """The text that rows refer to by number, from 1."""
        return list(self._words)[1:]

    def _step(self, out: bytearray, state: State, record: StepRecord) -> None:
        chunks = self._chunks(record)
        for n in (len(record.events) + 1, record.num_padding_tokens, len(chunks) // 4, *chunks):
            varint(out, n)
        for _ in state.apply_each(record):
            self._tick(out, state)
            state.changed.clear()
            state.touched.clear()

    def _tick(self, out: bytearray, state: State) -> None:
        waits, runs = [self._index[r] for r in state.waiting], [self._index[r] for r in state.running]
        queues = (waits, runs) != (self._waits, self._runs)
        config = config_head(state.config)
        settings = not self.configs or config != self.configs[-1]
        varint(out, len(state.changed) * 8 + settings * 4 + queues * 2 + bool(state.touched))
        for i in sorted(state.changed):
            now = self._row(state.by_index[i], True)
            old = self._rows.get(i, [0] * ROW_WORDS)
            varint(out, i)
            varint(out, sum(1 << k for k in range(FIELDS) if now[k + 1] != old[k + 1]))
            for a, b in zip(old[1 : FIELDS + 1], now[1:]):
                if a != b:
                    varint(out, zigzag(b - a))
            splice(out, old[ROW_WORDS:], now[ROW_WORDS:])
            self._rows[i] = now
        if state.touched:
            varint(out, len(state.touched))
            last = 0
            for b in sorted(state.touched):
                owner, word = block_words(state, b)
                for n in (zigzag(b - last), owner, word >> 16, word & 0xFFFF):
                    varint(out, n)
                last = b
        if queues:
            splice(out, self._waits, waits)
            splice(out, self._runs, runs)
            self._waits, self._runs = waits, runs
        if settings:
            self.configs.append(config)
            varint(out, len(self.configs) - 1)


class _Sentences:
    """The sentences of each step and of its events, as varints.

    What is said over and over differs in its numbers and requests only.

    step      n, n x sentence, m, m x sentence (one an event)
    sentence  frame (its kind and the text around its numbers), their changes since the frame came last in
    this step (zigzag), n x request (zigzag against the one before)
    """

    def __init__(self) -> None:
        self.frames: dict[tuple[str, ...], int] = {}
        self.ids: dict[str, int] = {}
        self.out = bytearray()
        self.offsets: list[int] = []

    def step(self, *lists: Iterable[dict[str, Any]]) -> None:
        """The next step's sentences, as messages have them."""
        self.offsets.append(len(self.out))
        last: dict[int, list[int]] = {}
        before = 0
        for sentences in map(list, lists):
            varint(self.out, len(sentences))
            for s in sentences:
                numbers = [int(n) for n in _NUMBER.findall(s["text"])]
                frame = self.frames.setdefault((s["kind"], *_NUMBER.split(s["text"])), len(self.frames))
                varint(self.out, frame)
                for old, new in zip(last.get(frame, [0] * len(numbers)), numbers):
                    varint(self.out, zigzag(new - old))
                last[frame] = numbers
                varint(self.out, len(s["ids"]))
                for rid in s["ids"]:
                    i = self.ids.setdefault(rid, len(self.ids))
                    varint(self.out, zigzag(i - before))
                    before = i


_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,14})(?![0-9])")
"""A number that comes out again as it was written: no leading zero, and exact in a double."""


def _accounts(trace: Trace) -> dict[str, Any]:
    """Where tokens and slots were at each step (a row a step, of the parts that are named), and the whole run
    beside contiguous reservation.
    """
    if not trace.has("accounting"):
        return {"missing": "this trace holds no accounts"}
    made = [step_account(record) for record in trace]
    rows = [[*(v for _, v in a["tokens"]), *(v for _, v in a["slots"]), a["at_event"]] for a in made]
    return {
        "tokens": [name for name, _ in made[0]["tokens"]],
        "slots": [name for name, _ in made[0]["slots"]],
        "rows": rows,
        "reservation": reserved(trace),
    }


def _experts(trace: Trace) -> dict[str, Any] | None:
    """A mixture's load, a row a step (null: nothing was computed): tokens of every expert, layer after layer.

    None for a dense model.
    """
    first = next((r.expert_load for r in trace if r.expert_load), None)
    if first is None:
        return None
    layers = layers_of(first)
    return {
        "layers": layers,
        "num": len(first[layers[0]]),
        "rows": [[n for i in layers for n in r.expert_load[i]] if r.expert_load else None for r in trace],
    }


def varint(out: bytearray, n: int) -> None:
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)


def zigzag(n: int) -> int:
    return 2 * n if n >= 0 else -2 * n - 1


def splice(out: bytearray, old: Sequence[int], new: Sequence[int]) -> None:
    """How `new` comes of `old`: what stays in front, what stays at the back, and what stands between."""
    most = min(len(old), len(new))
    front = 0
    while front < most and old[front] == new[front]:
        front += 1
    back = 0
    while back < most - front and old[-1 - back] == new[-1 - back]:
        back += 1
    middle = new[front : len(new) - back]
    for n in (front, back, len(middle), *middle):
        varint(out, n)


def _figures(trace: Trace, until: int) -> tuple[bytes, list[str], list[int]]:
    """The run's figures up to some of its steps: float64, a column a figure (NaN where there is none), their
    names, and the steps.
    """
    n = len(trace)
    at = list(range(n, 0, -max(1, -(-n * n // until**2))))[::-1]
    rows = [metrics_message(trace, Cursor(step))["values"] for step in at]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return array("d", [row.get(name, float("nan")) for name in names for row in rows]).tobytes(), names, at


# the page ---------------------------------------------------------------------------------------------------


def page(trace: Trace, *, title: str | None = None, step: int | None = None, small: bool = False) -> str:
    """The whole of `trace` as one HTML page, which needs no network and no kernel.

    `small`: a page for a notebook. It draws its axes itself (`static/axes.js`) in place of plotly.js (2 MB),
    and a run of over `SMALL_FIGURES` steps has figures at some of its steps only.
    `title`: what the page is called, by default its workload. `step`: where it opens, by default where the
    most blocks are in use (`#step=12` after its address opens it at step 12). Raises TraceError for a trace
    without steps, IndexError for a step that it lacks.
    """
    if not len(trace):
        raise TraceError("this trace has no steps: there is nothing to show")
    if step is not None and not 0 <= step <= len(trace):
        raise IndexError(f"step {step} is not in this trace: it has steps 0..{len(trace)}")
    title = title or Path(trace.header.workload).name or "a run"
    step = _fullest(trace) if step is None else step
    script = "\n" + assets.export_js().replace("</script", "<\\/script") + "boot();\n"
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{allowed}' blob:; style-src 'unsafe-inline'; img-src "
        "data: blob:; base-uri 'none'; form-action 'none'"
    )
    run = pack(trace, title, step, SMALL_FIGURES if small else FIGURES_EVERY_STEP)
    library = (
        ""
        if small
        else '<script id="cbviz-plotly" type="text/plain">'
        f"{base64.b64encode(assets.plotly_gz()).decode()}</script>\n"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="cbviz {__version__}">
<title>{html.escape(title)}: a recorded run, cbviz</title>
<style>
{assets.css()}
{assets.export_css()}
</style>
</head>
<body data-cbviz="recording">
<div id="cbviz-page" class="cb-recorded"></div>
{_about(trace, title)}
<noscript>This page draws a recorded run with JavaScript, which is switched off here.</noscript>
{library}<script id="cbviz-run" type="text/plain">{base64.b64encode(gzip.compress(run, 9, mtime=0)).decode()}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def _about(trace: Trace, title: str) -> str:
    """What the page is, in a line; the settings, notes and what the trace lacks behind it."""
    h = trace.header
    e = html.escape
    made = f"recorded by {h.producer}" + (f", {h.created.replace('T', ' ')[:16]}" if h.created else "")
    times = (
        whose_time({"clock": clock(trace) or h.clock, "device": h.device})
        if trace.has("time")
        else "this trace holds no times"
    )
    line = " · ".join(
        [
            f"<b>{e(title)}</b>",
            f"{len(trace):,} steps, {e(made)}",
            e(times),
            "a recording: nothing in this page computes",
        ]
    )
    settings = [(k, str(v)) for k, v in h.config.items() if v is not None]
    facts = [
        ("model", h.model),
        ("runner", h.runner),
        ("workload", Path(h.workload).name),
        *settings,
        *((f"no {k}", why) for k, why in h.missing.items()),
    ]
    rows = "".join(f"<div><dt>{e(k)}</dt><dd>{e(v)}</dd></div>" for k, v in facts if v)
    notes = "".join(f"<p>{e(n)}</p>" for n in h.notes)
    more = (
        f'<details><summary>Settings</summary><div class="cb-foot-more">{notes}<dl '
        f'class="cb-facts">{rows}</dl></div></details>'
    )
    return (
        '<footer id="cbviz-about" class="cb-foot"><span '
        f'title="{e(f"{title}: {times}")}">{line}</span>{more}</footer>'
    )
