"""One table of colours: complete, legible, and told apart without colour too."""

from __future__ import annotations

import json

import pytest

from cbviz.trace.state import STATES
from cbviz.views.theme import DARK, LIGHT, Theme, contrast, luminance, mix, oklch, rgb, table

# What plotly accepts in marker.pattern.shape.
PATTERNS = {"", "/", "\\", "x", "-", "|", "+", "."}


@pytest.mark.parametrize("t", [LIGHT, DARK])
def test_every_state_has_a_look(t: Theme) -> None:
    for code, name in enumerate(STATES):
        look = t.state(code)
        assert look == t.state(name) and look.pattern in PATTERNS and len(look.letter) == 1 and look.title
        rgb(look.color)
    letters = [t.state(s).letter for s in STATES if s not in ("none", "finished")]
    assert len(set(letters)) == len(letters) and " " not in letters


@pytest.mark.parametrize("t", [LIGHT, DARK])
def test_states_differ_in_more_than_hue(t: Theme) -> None:
    """Two states that are drawn differ in texture, or in lightness as a person without colour vision sees it."""
    drawn = [t.state(s) for s in STATES if s not in ("none", "finished")]
    for i, a in enumerate(drawn):
        for b in drawn[i + 1 :]:
            assert a.pattern != b.pattern or contrast(a.color, b.color) > 1.3, (a.title, b.title)


@pytest.mark.parametrize("t", [LIGHT, DARK])
def test_text_is_legible(t: Theme) -> None:
    assert contrast(t.fg, t.bg) > 10 and contrast(t.mute, t.bg) > 4.5 and contrast(t.accent, t.bg) > 3


@pytest.mark.parametrize("t", [LIGHT, DARK])
def test_owners_next_to_each_other_differ_in_grey(t: Theme) -> None:
    for k in range(255):
        assert abs(luminance(t.owner(k)) - luminance(t.owner(k + 1))) > 0.02
    assert t.owner(256) == t.owner(0) != t.tint(0)


def test_colour_arithmetic() -> None:
    assert mix("#000000", "#ffffff", 0.5) == "#808080" and contrast("#000000", "#ffffff") == pytest.approx(21)
    assert oklch(1, 0, 0) == "#ffffff" and oklch(0, 0, 0) == "#000000"
    assert oklch(0.62796, 0.25768, 29.234) == "#ff0000"  # sRGB red, as CSS Color 4 gives it


def test_the_table_is_plain_data() -> None:
    out = json.loads(json.dumps(table()))
    assert set(out) == {"light", "dark"} and set(out["light"]["state"]) == set(STATES)
