"""Hostile texts in every field of a run, in the exported page: shown as they are, under the page's own
policy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import cbviz as cb
from cbviz.app.export import export_html
from cbviz.trace import Trace, load
from tests.browser.conftest import Tab
from tests.browser.hostile import TEXTS, WATCH, assert_harmless

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.xdist_group("heavy"),
]
Open = Callable[..., Tab]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A run with these texts as prompts, ids and workload, saved, and loaded with more of them in its header."""
    s = cb.Session("preemption", runner="sim", num_blocks=33)
    for text in TEXTS.values():
        s.add(f"{text} {text}", max_tokens=6, request_id=text)
    s.run()
    loaded = load(s.trace.save(tmp_path_factory.mktemp("hostile") / "run.jsonl"))
    every = " ".join(TEXTS.values())
    header = loaded.header
    loaded.header = msgspec.structs.replace(
        header,
        workload=TEXTS["script"],
        model=TEXTS["markup"],
        device=TEXTS["turned"],
        producer=TEXTS["link"],
        notes=(every,),
        config={**header.config, "policy": TEXTS["markup"], "discipline": TEXTS["word"]},
        missing={**header.missing, "texts": every},
    )
    return loaded


def until(tab: Tab, expression: str) -> None:
    end = time.monotonic() + WAIT_S
    while not tab.page.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.05)


@pytest.mark.parametrize("direction", ["ltr", "rtl"])
def test_an_exported_page_shows_hostile_texts_as_they_are(
    open_tab: Open, trace: Trace, tmp_path: Path, direction: str
) -> None:
    file = export_html(trace, tmp_path / "run.html", title=TEXTS["script"])
    text = file.read_text("utf-8")
    file.write_text(text.replace('<html lang="en">', f'<html lang="en" dir="{direction}">'), "utf-8")
    tab = open_tab("about:blank", offline=True)
    page = tab.page
    page.on("request", lambda r: tab.asked.remove(r.url) if r.url == file.as_uri() else None)
    page.add_init_script(WATCH)
    dialogs: list[str] = []
    page.on("dialog", lambda d: (dialogs.append(d.message), d.dismiss()))
    page.goto(file.as_uri())
    until(tab, "!!(globalThis.cbviz && cbviz.state() && cbviz.frames())")
    ids = page.evaluate("cbviz.app.run.ids")
    assert set(TEXTS.values()) <= set(ids)
    middle = trace.state().requests[TEXTS["marks"]].first_scheduled_step
    page.locator(".cb-scrub").fill(str(middle))
    until(tab, f"cbviz.state().step === {middle}")
    for name, hostile in TEXTS.items():
        page.evaluate("(id) => cbviz.app.select(cbviz.app.run.index.get(id))", hostile)
        page.evaluate("cbviz.idle()")
        assert page.inner_text(".cb-table h2") != "", name
        box = page.locator(".cb-timeline .cb-frame").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
        assert_harmless(page)
    page.click(".cb-accounts")
    page.click(".cb-foot summary")
    assert_harmless(page)
    page.screenshot(path=str(tmp_path / f"{direction}.png"))
    assert dialogs == []
    assert page.evaluate("getComputedStyle(document.querySelector('.cb-root')).direction") == "ltr"
    order = page.evaluate(
        "['.cb-brand', '.cb-help'].map((s) => document.querySelector(s).getBoundingClientRect().left)"
    )
    assert order[0] < order[1]
