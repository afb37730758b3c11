"""One table of colours and signs for every picture, light and dark.

Does not import plotly or any view.

The state colours are those of Okabe and Ito's colour-blind safe set, or tints of them; a colour is never the
only sign: each state also has a texture (plotly's pattern names) and a letter. The explorer's canvas draws
with the same table (`table`).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

from cbviz.trace.show import LETTERS
from cbviz.trace.state import STATES


class Look(NamedTuple):
    """How one state or kind is drawn: fill, the texture's ink, the texture (one of plotly's pattern shapes),
    a letter for plain text, and its name for people.
    """

    color: str
    ink: str
    pattern: str
    letter: str
    title: str


# state: (light fill, light ink, dark fill, dark ink, pattern, title)
_STATES: dict[str, tuple[str, str, str, str, str, str]] = {
    "none": ("#f3f5f7", "#f3f5f7", "#191e24", "#191e24", "", "not there yet"),
    "waiting": ("#c3cad3", "#aab3be", "#4d5865", "#65717f", "-", "waiting"),
    "prefill": ("#efa51f", "#efa51f", "#f6c04d", "#f6c04d", "", "prefill"),
    "decode": ("#0b6aa8", "#0b6aa8", "#3f9fdd", "#3f9fdd", "", "decode"),
    "preempted": ("#d55e00", "#ffe3cf", "#d55e00", "#3b1a03", "/", "preempted"),
    "swapped": ("#cc79a7", "#fbe9f3", "#db9fc6", "#3d1730", "\\", "swapped out"),
    "finished": ("#dde3e9", "#dde3e9", "#28303a", "#28303a", "", "finished"),
    "idle": ("#b5d3e8", "#0b6aa8", "#27506f", "#3f9fdd", ".", "has a seat, gets no token"),
    "held": ("#e3e6ea", "#59636e", "#2b323b", "#9aa5b1", "x", "finished, seat still taken"),
    "padded": ("#a8a096", "#f3f5f7", "#6f675e", "#191e24", "|", "computed for nothing (padding)"),
    "recompute": ("#efa51f", "#7a4a00", "#f6c04d", "#5a3600", "+", "prefill again after a preemption"),
    "aborted": ("#59636e", "#d1d9e0", "#9aa5b1", "#28303a", "x", "aborted or refused"),
    "transferring": ("#009e73", "#d5f2e8", "#35c79d", "#0b3a2c", "-", "KV being moved"),
    "accepted": (
        "#0b6aa8",
        "#9be7c4",
        "#3f9fdd",
        "#063a2a",
        "-",
        "decode, drafts accepted: several tokens in a step",
    ),
    "rejected": ("#0b6aa8", "#ffd9a8", "#3f9fdd", "#4a2500", ".", "decode, all drafts thrown away"),
}
# kind of slot: (light, dark, pattern, title)
_SLOTS: dict[str, tuple[str, str, str, str]] = {
    "used": ("#0b6aa8", "#3f9fdd", "", "used: hold a token's KV"),
    "partly_empty": ("#b5d3e8", "#27506f", ".", "partly empty: rest of blocks in use"),
    "reserved": ("#efa51f", "#f6c04d", "/", "reserved: whole blocks taken ahead"),
    "cached": ("#cc79a7", "#db9fc6", "x", "cached: free, can still be hit"),
    "free": ("#eef1f4", "#1b2027", "", "free"),
    "fragmented": ("#d55e00", "#e2691a", "x", "fragmented: free, but in no run long enough"),
}
_BATCH: dict[str, tuple[str, str, str, str]] = {
    "prefill": ("#efa51f", "#f6c04d", "", "prefill"),
    "decode": ("#0b6aa8", "#3f9fdd", "", "decode"),
    "recomputed": ("#efa51f", "#f6c04d", "+", "recomputed after a preemption"),
    "draft": ("#009e73", "#35c79d", "-", "drafts to verify"),
    "padded": ("#a8a096", "#6f675e", "|", "padding"),
}


class Theme(NamedTuple):
    """Colours of one page."""

    dark: bool
    bg: str
    fg: str
    mute: str
    line: str
    track: str
    accent: str
    free: str
    owner_l: tuple[float, float, float]
    owner_c: float

    def state(self, code: int | str) -> Look:
        """Look of a state, by its code or name in `trace.state.STATES`."""
        name = STATES[code] if isinstance(code, int) else code
        light, light_ink, dark, dark_ink, pattern, title = _STATES[name]
        return Look(
            dark if self.dark else light, dark_ink if self.dark else light_ink, pattern, LETTERS[name], title
        )

    def slot(self, kind: str) -> Look:
        """Look of a part of the slot account."""
        light, dark, pattern, title = _SLOTS[kind]
        return Look(dark if self.dark else light, self.bg, pattern, kind[0], title)

    def batch(self, kind: str) -> Look:
        """Look of a part of a step's tokens: prefill, decode, recomputed, draft or padded."""
        light, dark, pattern, title = _BATCH[kind]
        return Look(
            dark if self.dark else light,
            self.bg if kind != "recomputed" else "#7a4a00",
            pattern,
            kind[0],
            title,
        )

    def owner(self, index: int) -> str:
        """Colour of a request's blocks: golden-angle hues at three lightnesses, so that neighbours differ in
        grey too. A cycle of 256.
        """
        return _owner(self.owner_l, self.owner_c, index % 256)

    def tint(self, index: int) -> str:
        """The owner's colour thinned towards the background: blocks that are not full."""
        return mix(self.owner(index), self.bg, 0.62 if self.dark else 0.66)


LIGHT = Theme(
    False,
    "#ffffff",
    "#1b1f24",
    "#59636e",
    "#d1d9e0",
    "#f3f5f7",
    "#0b57d0",
    "#eef1f4",
    (0.75, 0.645, 0.85),
    0.115,
)
DARK = Theme(
    True,
    "#111418",
    "#e6eaef",
    "#9aa5b1",
    "#39424d",
    "#191e24",
    "#7db7ff",
    "#1b2027",
    (0.72, 0.645, 0.80),
    0.115,
)


def theme(dark: bool = False) -> Theme:
    return DARK if dark else LIGHT


def table() -> dict[str, Any]:
    """All colours as plain data, for a drawer that is not Python: `{"light" | "dark": {..., "state": {name:
    {color, ink, pattern, letter, title}}}}`.
    """
    return {
        name: {
            **{
                f: getattr(t, f)
                for f in ("dark", "bg", "fg", "mute", "line", "track", "accent", "free", "owner_c")
            },
            "owner_l": list(t.owner_l),
            "state": {s: t.state(s)._asdict() for s in STATES},
            "slot": {s: t.slot(s)._asdict() for s in _SLOTS},
            "batch": {s: t.batch(s)._asdict() for s in _BATCH},
        }
        for name, t in (("light", LIGHT), ("dark", DARK))
    }


def rgb(color: str) -> tuple[int, int, int]:
    """`#rrggbb` as three numbers 0..255."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def mix(a: str, b: str, share: float) -> str:
    """`a` moved towards `b` by `share` (0..1)."""
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in zip(rgb(a), rgb(b)))


def luminance(color: str) -> float:
    """Relative luminance (WCAG 2), 0..1."""
    r, g, b = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb(color))
    )
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    """Contrast ratio (WCAG 2), 1..21."""
    x, y = luminance(a), luminance(b)
    return (max(x, y) + 0.05) / (min(x, y) + 0.05)


@cache
def _owner(lightness: tuple[float, float, float], chroma: float, k: int) -> str:
    return oklch(lightness[k % 3], chroma, (k * 137.508 + 250) % 360)


def oklch(lightness: float, chroma: float, hue_deg: float) -> str:
    """An OKLCH colour (Ottosson 2020) as `#rrggbb`, clipped to sRGB."""
    hue = math.radians(hue_deg)
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3
    linear = (
        4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
        -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
        -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
    )
    out = "#"
    for v in linear:
        g = 12.92 * v if v <= 0.0031308 else 1.055 * max(v, 0.0) ** (1 / 2.4) - 0.055
        out += f"{max(0, min(255, math.floor(255 * g + 0.5))):02x}"
    return out
