"""A run's last frame as a PNG picture: the timeline and the map of KV blocks, drawn without a browser.

Knows a trace's rows and colours, no widget. GitHub, PDF and Markdown show this picture where no script runs.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from cbviz.trace import Trace
from cbviz.trace.state import STATES, State
from cbviz.views.blocks import KINDS, block_map_rows
from cbviz.views.theme import Theme, rgb, theme
from cbviz.views.timeline import timeline_rows

WIDTH = 1200
LEFT = 110
"""Room for the requests' names."""
PAD = 16
FONT = 15
TIMELINE_HEIGHT = 300
BLOCKS_HEIGHT = 240
MOST_NAMES = 16
"""Characters of a request's name beside its row."""
TICKS = 10
BLOCK_SIGNS = (
    "Number: the request's row. Pale: not full. Framed: shared. Small square: free, but still cached. "
    "Grey: free."
)
SHOWN_STATES = [s for s in STATES if s not in ("none", "finished")]

Box = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels; right and bottom lie outside."""


def png(trace: Trace, title: str = "") -> bytes:
    """Return the picture of `trace` at its end. `title`: what the run is called, by default its workload."""
    t = theme(False)
    state = trace.state()
    canvas = _Canvas(t, FONT * 2 + TIMELINE_HEIGHT + BLOCKS_HEIGHT + FONT * 8)
    total = state.num_blocks - 1
    used = sum(bool(state.ref_count(b)) for b in range(1, state.num_blocks))
    name = title or trace.header.workload or "a run"
    canvas.write(
        (PAD, PAD),
        f"{ascii_only(name, 60)}: step {len(trace):,}, {used:,} of {total:,} KV blocks in use",
        t.fg,
        FONT + 3,
    )
    top = PAD + FONT * 2 + 8
    right = WIDTH - 2 * PAD
    top, legend = _timeline(canvas, trace, (LEFT, top, right, top + TIMELINE_HEIGHT))
    top += FONT * 2
    canvas.legend((LEFT, top), legend)
    top += FONT * 2
    top = _blocks(canvas, trace, (LEFT, top, right, top + BLOCKS_HEIGHT)) + 6
    canvas.write((LEFT, top), BLOCK_SIGNS, t.mute, FONT - 2)
    return canvas.png(top + 2 * FONT)


def ascii_only(text: str, most: int) -> str:
    """The text as the picture's font can show it: other letters become `?`; cut to `most` characters."""
    shown = "".join(c if " " <= c <= "~" else "?" for c in text)
    return shown if len(shown) <= most else shown[: most - 3] + "..."


class _Canvas:
    """Pixels, with text on top of them."""

    def __init__(self, t: Theme, height: int) -> None:
        self.theme = t
        self.pixels = np.full((height, WIDTH, 3), rgb(t.bg), dtype=np.uint8)
        self._texts: list[tuple[tuple[int, int], str, str, int, str]] = []

    def fill(self, box: Box, color: str) -> None:
        left, top, right, bottom = box
        self.pixels[top:bottom, left:right] = rgb(color)

    def hatch(self, box: Box, pattern: str, ink: str) -> None:
        """Draws a texture over a box: a state's colour is never its only sign."""
        left, top, right, bottom = box
        y, x = np.mgrid[top:bottom, left:right]
        on = {
            "/": (x + y) % 6 < 2,
            "\\": (x - y) % 6 < 2,
            "-": y % 4 < 1,
            "|": x % 4 < 1,
            ".": (x % 5 < 2) & (y % 5 < 2),
            "+": (x % 6 < 1) | (y % 6 < 1),
            "x": ((x + y) % 6 < 1) | ((x - y) % 6 < 1),
        }.get(pattern)
        if on is not None:
            self.pixels[top:bottom, left:right][on] = rgb(ink)

    def frame(self, box: Box, color: str, wide: int = 1) -> None:
        left, top, right, bottom = box
        self.fill((left, top, right, top + wide), color)
        self.fill((left, bottom - wide, right, bottom), color)
        self.fill((left, top, left + wide, bottom), color)
        self.fill((right - wide, top, right, bottom), color)

    def write(self, at: tuple[int, int], text: str, color: str, size: int = FONT, anchor: str = "la") -> None:
        self._texts.append((at, text, color, size, anchor))

    def legend(self, at: tuple[int, int], rows: list[tuple[str, str, str, str]]) -> None:
        """Swatches with names; a row is fill, pattern, ink, name. What does not fit in a line is left out."""
        x, y = at
        for color, pattern, ink, name in rows:
            wide = 30 + int(ImageFont.load_default(FONT).getlength(name)) + 22
            if x + wide > WIDTH:
                return
            box = (x, y, x + 22, y + FONT)
            self.fill(box, color)
            self.hatch(box, pattern, ink)
            self.write((x + 30, y), name, self.theme.mute)
            x += wide

    def png(self, height: int) -> bytes:
        """The picture's upper `height` pixels."""
        image = Image.fromarray(self.pixels[:height])
        pen = ImageDraw.Draw(image)
        for at, text, color, size, anchor in self._texts:
            pen.text(at, text, fill=color, font=ImageFont.load_default(size), anchor=anchor)
        out = io.BytesIO()
        image.quantize(128, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
        return out.getvalue()


def _timeline(canvas: _Canvas, trace: Trace, box: Box) -> tuple[int, list[tuple[str, str, str, str]]]:
    """Draws requests by step; returns where it ends, and the legend of the states that occur."""
    t = canvas.theme
    state = trace.state()
    rows = timeline_rows(trace)
    left, top, right, bottom = box
    steps, count = max(1, len(trace)), max(1, len(rows.requests))
    row_height = min(26.0, (bottom - top) / count)
    gap = 1 if row_height < 8 else 3

    def x_of(step: float) -> int:
        return left + round((step - 0.5) / steps * (right - left))

    seen = set()
    for row, code, x0, x1 in zip(rows.row.tolist(), rows.code.tolist(), rows.x0, rows.x1):
        name = STATES[code]
        if name not in SHOWN_STATES:
            continue
        seen.add(name)
        look = t.state(code)
        y0 = top + round(row * row_height)
        y1 = max(y0 + 1, top + round((row + 1) * row_height) - gap)
        bar = (x_of(x0), y0, max(x_of(x0) + 1, x_of(x1)), y1)
        canvas.fill(bar, look.color)
        canvas.hatch(bar, look.pattern, look.ink)
    every = max(1, -(-FONT // max(1, int(row_height))))
    for row in range(0, len(rows.requests), every):
        name = ascii_only(state.by_index[rows.requests[row]].request_id, MOST_NAMES)
        middle = top + round((row + 0.5) * row_height) - gap // 2
        canvas.write((left - 8, middle), name, t.mute, FONT - 2, "rm")
    end = top + round(count * row_height) + 2
    canvas.fill((left, end, right, end + 1), t.line)
    for step in range(0, len(trace) + 1, _tick(len(trace))):
        if step:
            canvas.write((x_of(step), end + 5), f"{step:,}", t.mute, FONT - 2, "ma")
    canvas.write((left - 8, end + 5), "step", t.mute, FONT - 2, "ra")
    looks = [t.state(s) for s in SHOWN_STATES if s in seen]
    return end, [(look.color, look.pattern, look.ink, look.title) for look in looks]


def _tick(most: int) -> int:
    """The distance of ticks on an axis of `most` steps: 1, 2 or 5 times a power of ten."""
    ten = 1
    while True:
        for k in (1, 2, 5):
            if most / (k * ten) <= TICKS:
                return k * ten
        ten *= 10


def _blocks(canvas: _Canvas, trace: Trace, box: Box) -> int:
    """Draws the pool block by block: the owner's colour, paler where a block is not full.

    Returns where it ends. Of a pool too large for the picture, the first blocks are drawn.
    """
    t = canvas.theme
    left, top, right, bottom = box
    if not trace.has("blocks"):
        canvas.write((left, top), "This trace holds no blocks.", t.mute)
        return top + FONT
    state: State = trace.state()
    rows = block_map_rows(trace)
    n = len(rows.kind)
    size = max(1, int(((right - left) * (bottom - top) / max(1, n)) ** 0.5))
    while size > 1 and -(-n // ((right - left) // size)) * size > bottom - top:
        size -= 1
    size = min(size, 26)
    columns = (right - left) // size
    gap = 2 if size >= 8 else 0
    for b in range(n):
        y, x = divmod(b, columns)
        if top + (y + 1) * size > bottom:
            break
        cell = (
            left + x * size,
            top + y * size,
            left + (x + 1) * size - gap,
            top + (y + 1) * size - gap,
        )
        kind, owner = KINDS[rows.kind[b]], int(rows.owner[b])
        _block(canvas, cell, kind, owner, full=rows.fill[b] >= state.block_size)
    canvas.write((left - 8, top + 4), "KV blocks", t.mute, FONT - 2, "ra")
    return min(bottom, top + -(-n // columns) * size)


def _block(canvas: _Canvas, cell: Box, kind: str, owner: int, full: bool) -> None:
    t = canvas.theme
    left, top, right, bottom = cell
    size = bottom - top
    if kind in ("free", "cached"):
        canvas.fill(cell, t.free)
    elif kind == "null":
        canvas.fill(cell, t.line)
    else:
        canvas.fill(cell, t.owner(owner) if full else t.tint(owner))
    if kind == "cached" and size >= 6:
        third = size // 3
        color = t.owner(owner) if owner >= 0 else t.mute
        canvas.fill((left + third, top + third, right - third, bottom - third), color)
    if kind == "shared" and size >= 6:
        canvas.frame((left + 2, top + 2, right - 2, bottom - 2), t.fg)
    if kind not in ("free", "cached", "null") and size >= 16:
        middle = ((left + right) // 2, (top + bottom) // 2)
        canvas.write(middle, str(owner + 1), t.fg, FONT - 4, "mm")
