"""The exported page in Chromium, opened from a file with no network: drawn, scrubbed, played and read back."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cbviz as cb
from cbviz.app.export import export_html
from cbviz.trace import Cursor, Trace
from cbviz.trace.explain import explain_event
from tests.browser.conftest import Tab, assert_drawn

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.xdist_group("heavy"),
]
Open = Callable[..., Tab]
WAIT_S = 60.0
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>bold</b>"


@pytest.fixture(scope="module")
def trace() -> Trace:
    s = cb.Session("preemption", runner="sim", num_blocks=33)
    s.add(HOSTILE, max_tokens=6, request_id="hostile")
    s.run()
    return s.trace


@pytest.fixture(scope="module")
def file(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_html(trace, tmp_path_factory.mktemp("export") / "run.html", title=HOSTILE)


@pytest.fixture
def offline(open_tab: Open, file: Path) -> Iterator[Callable[..., Tab]]:
    """Opens the file in a browser without network; at the end it must have asked for nothing but itself."""
    tabs: list[Tab] = []

    def make(place: str = "", **context: Any) -> Tab:
        tab = open_tab(file.as_uri() + place, offline=True, **context)
        tabs.append(tab)
        until(tab, "!!(globalThis.cbviz && cbviz.state() && cbviz.frames())")
        return tab

    yield make
    for tab in tabs:
        asked = [u for u in tab.asked if not u.startswith("blob:")]
        assert all(u.split("#")[0] == file.as_uri() for u in asked), asked
        tab.asked = [u for u in tab.asked if u not in asked]


def until(tab: Tab, expression: str) -> None:
    """Waits from outside: the page's policy forbids what Playwright would run inside it again and again."""
    end = time.monotonic() + WAIT_S
    while not tab.page.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.05)


def at(tab: Tab, step: int) -> None:
    until(tab, f"cbviz.state().step === {step}")


def why(tab: Tab) -> list[str]:
    return tab.page.evaluate(
        "[...document.querySelectorAll('.cb-why .cb-sentences > li')].map(e => e.textContent)"
    )


def assert_shown(tab: Tab, trace: Trace) -> None:
    tab.page.evaluate("cbviz.idle()")
    drawn = tab.state()
    assert_drawn(drawn, trace)
    assert why(tab) == [str(x) for x in cb.explain(trace, drawn["step"])]


def test_scrubbed_from_a_file(offline: Open, trace: Trace) -> None:
    tab = offline()
    page = tab.page
    opened = tab.state()["step"]
    assert opened == min(trace, key=lambda r: r.gauges.num_free_blocks).step
    assert_shown(tab, trace)
    for name in ("timeline", "blocks", "batch", "util", "tokens", "why", "queue", "table", "metrics"):
        assert page.locator(f".cb-{name} .cb-body").is_visible(), name
    preempted = next(r.step for r in trace if any(type(e).__name__ == "Preempted" for e in r.events))
    for step in (1, preempted, len(trace) - 1, 70, 64, 63, 0, len(trace)):
        page.locator(".cb-scrub").fill(str(step))
        at(tab, step)
        assert_shown(tab, trace)
        if step == preempted:
            assert any("preempted" in s for s in why(tab))
    shown = page.evaluate("cbviz.app.metrics.values")
    assert shown == {k: v for k, v in cb.metrics(trace).items() if isinstance(v, (int, float))}
    assert page.locator(".cb-metrics [data-metric]").count() > 8
    assert page.evaluate("cbviz.text('r1')") == "".join(
        f" {t}" for t in trace.state().requests["r1"].output_token_ids
    )


def test_keys_and_play(offline: Open, trace: Trace) -> None:
    tab = offline("#step=20", color_scheme="dark")
    page = tab.page
    at(tab, 20)
    page.keyboard.press("ArrowRight")
    at(tab, 21)
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    at(tab, 19)
    page.keyboard.press(".")
    until(tab, "cbviz.state().event === 1")
    tab.page.evaluate("cbviz.idle()")
    drawn = tab.state()
    assert_drawn(drawn, trace)
    assert (drawn["step"], drawn["event"]) == (20, 1)
    moment = str(explain_event(trace, trace.record(20), 0))
    assert page.inner_text(".cb-moment") == f"Event 1 of {len(trace.record(20).events)}: {moment}"
    page.keyboard.press(",")
    at(tab, 19)
    page.keyboard.press("Home")
    at(tab, 0)
    page.select_option(".cb-speed", "0")
    page.keyboard.press("Escape")
    page.keyboard.press(" ")
    until(tab, "cbviz.state().playing && cbviz.state().step > 8")
    page.keyboard.press(" ")
    until(tab, "!cbviz.state().playing")
    assert_shown(tab, trace)
    page.keyboard.press("End")
    at(tab, len(trace))
    page.click(".cb-step")
    assert "its last step" in page.inner_text(".cb-banner")
    page.click(".cb-play")  # from the start again
    until(tab, f"cbviz.state().step === {len(trace)} && !cbviz.state().playing && cbviz.frames() > 30")
    page.click(".cb-reset")
    at(tab, 0)
    page.keyboard.press("?")
    keys = page.inner_text(".cb-keys")
    assert "play or pause" in keys
    assert "accounts" in keys
    assert not re.search("prompt|fork|rewind|new one", keys)
    page.keyboard.press("Escape")
    assert page.get_attribute(".cb-root", "data-theme") == "dark"
    page.set_viewport_size({"width": 420, "height": 900})
    page.wait_for_selector(".cb-root.cb-narrow")
    until(tab, "document.querySelector('.cb-root').scrollWidth <= 420")


def test_words_are_words_and_controls_of_an_engine_are_gone(offline: Open, trace: Trace) -> None:
    tab = offline()
    page = tab.page
    assert page.title().startswith(HOSTILE)
    page.locator(".cb-scrub").fill(str(trace.state().requests["hostile"].first_scheduled_step))
    page.wait_for_selector(".cb-queue [data-request='hostile']")
    page.click(".cb-queue [data-request='hostile']")
    assert HOSTILE in page.inner_text(".cb-prompttext")
    assert page.evaluate("document.querySelectorAll('img, .cb-root b b, .cb-texts b').length") == 0
    page.click(".cb-accounts")
    page.wait_for_selector(".cb-account [data-account='run-tokens']")
    for gone in (
        ".cb-controls",
        ".cb-promptbox",
        ".cb-abort",
        ".cb-save",
        ".cb-fork",
        ".cb-break",
        ".cb-rewind",
        ".cb-compare-open",
    ):
        assert not page.locator(gone).first.is_visible(), gone
    about = page.inner_text(".cb-foot")
    assert re.search(r"steps, recorded by cbviz, 20\d\d-", about)
    assert "times are modelled" in about
    page.click(".cb-foot summary")
    assert "max_num_batched_tokens" in page.inner_text(".cb-foot-more")
    assert tab.errors == []
    own = (
        "new Promise(done => setTimeout(() => { try { new Function('return 1')(); done('allowed'); } catch "
        "(e) { done(e.name); } }, 0))"
    )
    assert page.evaluate(own) == "EvalError"  # the page's own policy holds
    assert all("Content Security Policy" in e for e in tab.errors)
    tab.errors.clear()


def test_the_page_shows_the_cursor_of_its_address(offline: Open, trace: Trace) -> None:
    tab = offline(f"#step={len(trace) + 50}")
    at(tab, len(trace))
    assert tab.state()["requests"].keys() == trace.state(Cursor(len(trace))).requests.keys()
