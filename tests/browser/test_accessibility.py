"""Everything by keyboard with a focus that is seen, names for every control and canvas, contrast of 4.5, and
no motion for those who want none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.conftest import Address, Tab

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("heavy"),
]
Open = Callable[..., Tab]

NAMELESS = """() => [...document.querySelectorAll('.cb-root :is(button, input, select, textarea, canvas, [role=img], [role=application], dialog)')]
  .filter((e) => e.getAttribute('aria-hidden') !== 'true' && e.checkVisibility()
  && !(e.getAttribute('aria-label') || (e.labels && e.labels.length && e.labels[0].textContent.trim()) || e.textContent.trim())).map((e) => e.outerHTML.slice(0, 120))"""

# Text on what is painted behind it: the nearest ancestors' backgrounds, blended. Disabled controls are
# exempt, as in WCAG 1.4.3; so is what is drawn over pictures.
PALE = """() => {
  const parse = (c) => { const m = /rgba?\\(([\\d.]+), ([\\d.]+), ([\\d.]+)(?:, ([\\d.]+))?\\)/.exec(c); return m ? [+m[1], +m[2], +m[3], m[4] === undefined ? 1 : +m[4]] : null; };
  const over = (a, b) => [0, 1, 2].map((i) => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const lum = (c) => { const f = (v) => (v <= 10.31 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * f(c[0]) + 0.7152 * f(c[1]) + 0.0722 * f(c[2]); };
  const bad = [], walk = document.createTreeWalker(document.querySelector('.cb-root'), NodeFilter.SHOW_TEXT);
  let seen = 0;
  for (let n = walk.nextNode(); n; n = walk.nextNode()) {
    const e = n.parentElement;
    if (!n.textContent.trim() || !e.checkVisibility({ opacityProperty: true, visibilityProperty: true })
      || e.closest('svg, option, .cb-sr, :disabled, [aria-hidden=true]')) continue;
    let chain = [], opacity = 1;
    for (let p = e; p; p = p.parentElement) { const s = getComputedStyle(p), c = parse(s.backgroundColor); opacity *= +s.opacity; if (c && c[3] > 0) { chain.push(c);
      if (c[3] === 1) break; } }
    let back = [255, 255, 255, 1]; for (const c of chain.reverse()) back = over(c, back);
    const ink = parse(getComputedStyle(e).color);
    if (!ink) { bad.push(['no colour', e.outerHTML.slice(0, 80)]); continue; }
    ink[3] *= opacity;
    const a = lum(over(ink, back)), b = lum(back), k = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    seen++;
    if (k < 4.5) bad.push([k.toFixed(2), n.textContent.trim().slice(0, 40), e.className]);
  }
  return [seen, bad];
}"""

# What has the focus: a mark that the same element lacks without it, and where it is.
FOCUS = """() => { const e = document.activeElement, s = getComputedStyle(e), r = e.getBoundingClientRect();
  const inside = !!e.closest('.cb-root') && !e.matches('.cb-root'), marked = s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2;
  return { name: e.className + '#' + e.id, inside, marked, size: r.width * r.height, panel: (e.closest('.cb-panel') || { className: '' }).className }; }"""


def busy(tab: Tab) -> None:
    """Twelve steps with a request picked, so that all panels hold something."""
    tab.ready()
    tab.step(12)
    tab.page.click(".cb-texts .cb-chip")
    tab.page.wait_for_selector(".cb-cell")
    tab.page.wait_for_selector(".cb-sentences li")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_contrast_and_alternatives(voila: Address, open_tab: Open, scheme: str) -> None:
    tab = open_tab(f"{voila}?scenario=preemption", color_scheme=scheme)
    busy(tab)
    page = tab.page
    assert page.get_attribute(".cb-root", "data-theme") == scheme
    assert page.evaluate(NAMELESS) == []
    for what in ("page", "presenter", "shortcuts"):
        if what == "presenter":
            page.keyboard.press("p")
        elif what == "shortcuts":
            page.keyboard.press("p")
            page.keyboard.press("?")
            page.wait_for_selector(".cb-keys[open]")
        page.wait_for_timeout(300)  # colours that fade in
        seen, pale = page.evaluate(PALE)
        assert seen > 40
        assert pale == [], what
    page.keyboard.press("Escape")
    # The canvases say in words what they show.
    page.wait_for_function(
        "document.querySelector('.cb-timeline "
        "canvas[role=img]').getAttribute('aria-label').includes('requests, ')"
    )
    page.wait_for_function(
        "document.querySelector('.cb-blocks canvas[role=img]').getAttribute('aria-label').includes('in use')"
    )
    page.wait_for_function(
        "document.querySelector('.cb-batchbar').getAttribute('aria-label').includes('Batch of step 12: ')"
    )
    # A picked request, a kind of token, a state: never by colour alone.
    assert page.get_attribute(".cb-texts .cb-chip", "aria-pressed") == "true"
    assert all(
        page.evaluate(
            "[...document.querySelectorAll('.cb-batchrow')].map((e) => "
            "/prefill|decode|recompute/.test(e.textContent))"
        )
    )
    assert all(page.evaluate("[...document.querySelectorAll('.cb-key')].map((e) => !!e.textContent.trim())"))


def test_all_by_keyboard_with_a_focus_that_is_seen(voila: Address, open_tab: Open) -> None:
    tab = open_tab(f"{voila}?scenario=preemption")
    busy(tab)
    page = tab.page
    page.focus(".cb-head button")
    met: list[dict[str, Any]] = [page.evaluate(FOCUS)]
    met[0]["marked"] = True  # put there by the test: whether it is marked depends on what was pressed before
    for _ in range(160):
        page.keyboard.press("Tab")
        at = page.evaluate(FOCUS)
        if not at["inside"]:
            break
        met.append(at)
    assert len(met) > 25
    assert [m["name"] for m in met if not m["marked"]] == []
    assert [m["name"] for m in met if not m["size"]] == []
    panels = " ".join(m["panel"] for m in met)
    assert [
        p
        for p in (
            "controls",
            "promptbox",
            "timeline",
            "blocks",
            "batch",
            "util",
            "tokens",
            "why",
            "queue",
            "table",
            "metrics",
        )
        if f"cb-{p} " not in panels + " "
    ] == []
    # Every control of the transport and of the setup was met.
    controls = (
        "[...document.querySelectorAll('.cb-transport :is(button, input, select), .cb-controls :is(input, "
        "select, button)')]"
    )
    wanted = page.evaluate(
        f"{controls}.filter((e) => !e.disabled && e.checkVisibility()).map((e) => e.className + '#' + e.id)"
    )
    assert sorted(set(wanted) - {m["name"] for m in met}) == []


def test_no_motion_for_those_who_want_none(voila: Address, open_tab: Open) -> None:
    tab = open_tab(f"{voila}?scenario=chat", reduced_motion="reduce")
    tab.ready()
    moving = "[...document.querySelectorAll('.cb-root *')].map((e) => getComputedStyle(e))"
    moving += (
        ".filter((s) => s.transitionDuration.split(',').some((d) => parseFloat(d) > 0) || s.animationName "
        "!== 'none').length"
    )
    assert tab.page.evaluate(moving) == 0
    tab.page.emulate_media(reduced_motion="no-preference")
    assert tab.page.evaluate(moving) > 0  # the test sees motion where there is some
