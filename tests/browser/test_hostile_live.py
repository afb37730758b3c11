"""Hostile texts in the live explorer: its own page, a lesson's page and JupyterLab show them as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from cbviz.app import serve
from tests.browser.conftest import Address, Tab, a_port, lab_server, serving
from tests.browser.hostile import TEXTS, WATCH, assert_harmless
from tests.browser.test_nbconvert import notebook

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.xdist_group("heavy"),
]
Open = Callable[..., Tab]
CELL = f"""
import cbviz as cb
texts = {list(TEXTS.values())!r}
s = cb.Session("preemption", runner="sim", num_blocks=33)
for text in texts:
    s.add(text + " " + text, max_tokens=6, request_id=text)
s.run(max_steps=30)
cb.explorer(s)
"""


def opened(open_tab: Open, address: str) -> Tab:
    """A tab at the address that notes from the start what its policy forbids."""
    tab = open_tab("about:blank")
    tab.page.add_init_script(WATCH)
    tab.page.on("dialog", lambda d: (tab.errors.append(f"dialog: {d.message}"), d.dismiss()))
    tab.page.goto(address, wait_until="commit")
    return tab


def look_at_every_request(tab: Tab) -> None:
    """Picks each request with a hostile id, at a step at which all have come."""
    page = tab.page
    tab.ready(30)
    assert set(TEXTS.values()) <= set(page.evaluate("cbviz.app.run.ids"))
    for hostile in TEXTS.values():
        page.evaluate("(id) => cbviz.app.select(cbviz.app.run.index.get(id))", hostile)
        page.evaluate("cbviz.idle()")
        assert_harmless(page)
    box = page.locator(".cb-timeline .cb-frame").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
    assert_harmless(page)
    assert page.evaluate("getComputedStyle(document.querySelector('.cb-root')).direction") == "ltr"


@pytest.mark.parametrize("name", list(TEXTS))
def test_a_hostile_link_is_said_and_runs_nothing(voila: Address, open_tab: Open, name: str) -> None:
    text = TEXTS[name]
    wrong = {"scenario": text, "policy": text, "run": text, "max_num_seqs": text, text: "1"}
    tab = opened(open_tab, f"{voila}?{urlencode(wrong)}")
    tab.notice("wrong and were ignored")
    tab.ready()
    assert_harmless(tab.page)


def test_hostile_prompts_branches_watches_and_breakpoints_are_words(
    voila: Address, open_tab: Open, tmp_path: Path
) -> None:
    tab = opened(open_tab, f"{voila}?scenario=preemption")
    page = tab.page
    tab.ready()
    for text in TEXTS.values():
        page.fill(".cb-prompt", text)
        page.fill(".cb-maxtokens", "4")
        page.click(".cb-add")
        page.wait_for_function("document.querySelector('.cb-prompt').value === ''")
        assert_harmless(page)
    tab.step(12)
    for name, text in TEXTS.items():
        page.click(".cb-break")
        page.wait_for_selector(".cb-break-when:visible")
        for button in (".cb-watch-add", ".cb-break-addwhen"):
            page.fill(".cb-break-when", text)
            page.click(button)
            page.wait_for_function("document.querySelector('.cb-break-error').textContent !== ''")
        assert_harmless(page)
        page.keyboard.press("Escape")
        page.click(".cb-fork")
        page.wait_for_selector(".cb-fork-create:visible")
        page.fill(".cb-fork-name", text)
        page.click(".cb-fork-create")
        page.wait_for_function(
            "document.querySelector('.cb-fork-error').textContent !== '' || "
            "!document.querySelector('.cb-fork-create').checkVisibility()"
        )
        page.keyboard.press("Escape")
        assert_harmless(page)
        if name == "turned":
            page.screenshot(path=str(tmp_path / "branch.png"))
    page.click(".cb-branch")
    assert_harmless(page)
    page.screenshot(path=str(tmp_path / "branches.png"))


@pytest.fixture
def lesson(cache: Path, tmp_path: Path) -> Iterator[Address]:
    """Voilà on a folder whose lesson shows a run full of hostile texts."""
    root, port = tmp_path / "root", a_port()
    root.mkdir()
    (root / "lesson.ipynb").write_text(notebook(CELL), "utf-8")
    url = Address(f"http://127.0.0.1:{port}/")
    command = serve.explore_command(root, "127.0.0.1", port, [])
    with serving(command, serve.environment(CBVIZ_CACHE=str(cache)), url, tmp_path / "log") as url.pid:
        yield url


@pytest.mark.parametrize("direction", ["ltr", "rtl"])
def test_a_lesson_in_voila_shows_hostile_texts_as_they_are(
    lesson: Address, open_tab: Open, tmp_path: Path, direction: str
) -> None:
    tab = opened(open_tab, f"{lesson}voila/render/lesson.ipynb")
    tab.ready(30)
    tab.page.evaluate("(d) => { document.documentElement.dir = d; }", direction)
    look_at_every_request(tab)
    tab.page.screenshot(path=str(tmp_path / f"lesson-{direction}.png"))


def test_jupyterlab_shows_hostile_texts_as_they_are(cache: Path, open_tab: Open, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "run.ipynb").write_text(notebook(CELL), "utf-8")
    with lab_server(root, cache, tmp_path) as url:
        tab = opened(open_tab, f"{url}lab/tree/run.ipynb")
        page = tab.page
        page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
        page.wait_for_function(
            "window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
        )
        page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
        look_at_every_request(tab)
        page.screenshot(path=str(tmp_path / "lab.png"))
