"""A notebook shows the explorer's run where no kernel runs, and only the live explorer where one does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Address, Tab, lab_server
from tests.browser.test_nbconvert import converted, notebook

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("heavy"),
]
Open = Callable[..., Tab]
CELL = "import cbviz as cb\ns = cb.Session('preemption', runner='sim')\ns.run(max_steps=90)\ncb.explorer(s)"
PICTURE = ".jp-OutputArea-output img[src^='data:image/png']"
TEMPLATES_OWN = ("net::ERR_INTERNET_DISCONNECTED", "mermaid", "require")
"""nbconvert's page asks a CDN for scripts that the player does not need."""


def player_in(tab: Tab, timeout_s: float = 60) -> Any:
    """The frame of the static player, once it stands at a step."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        for frame in tab.page.frames[1:]:
            if frame.evaluate("!!(globalThis.cbviz && cbviz.state() && cbviz.frames() > 0)"):
                return frame
        tab.page.wait_for_timeout(100)  # time.sleep would keep Playwright from hearing of new frames
    raise AssertionError("there is no player")


def assert_steps_on(frame: Any) -> None:
    before = frame.evaluate("cbviz.state().step")
    frame.click(".cb-step")
    end = time.monotonic() + 20
    while frame.evaluate("cbviz.state().step") != before + 1:
        assert time.monotonic() < end
        time.sleep(0.05)


def without_widget_state(executed: Path, folder: Path) -> Path:
    """The executed notebook as JupyterLab saves it: with outputs, without the state of its widgets."""
    saved = json.loads(executed.read_text("utf-8"))
    del saved["metadata"]["widgets"]
    file = folder / "saved.ipynb"
    file.write_text(json.dumps(saved), "utf-8")
    return file


def convert(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "nbconvert", *args], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert "UserWarning" not in done.stderr
    return done.stderr


def assert_plays_offline(open_tab: Open, page: Path) -> None:
    tab = open_tab(page.as_uri(), offline=True)
    tab.forgiven = TEMPLATES_OWN
    frame = player_in(tab)
    assert_steps_on(frame)
    assert not tab.page.locator(PICTURE).is_visible()
    assert "recorded at step 90" in tab.page.inner_text("body")
    tab.asked = [
        u for u in tab.asked if not u.startswith(("file:", "about:", "https://cdnjs.", "https://unpkg."))
    ]


def test_an_executed_and_converted_notebook_plays_the_run_offline(open_tab: Open, tmp_path: Path) -> None:
    assert_plays_offline(open_tab, converted(tmp_path, CELL))


def test_a_saved_notebook_is_small_and_plays_in_html_and_shows_a_picture_in_markdown(
    open_tab: Open, tmp_path: Path
) -> None:
    source = tmp_path / "run.ipynb"
    source.write_text(notebook(CELL), "utf-8")
    convert("--execute", "--to", "notebook", "--output", "executed", str(source))
    saved = without_widget_state(tmp_path / "executed.ipynb", tmp_path)
    assert saved.stat().st_size < 300_000
    convert("--to", "html", str(saved))
    assert_plays_offline(open_tab, saved.with_suffix(".html"))
    convert("--to", "markdown", str(saved))
    assert "](saved_files/" in saved.with_suffix(".md").read_text("utf-8")
    (image,) = (tmp_path / "saved_files").glob("*.png")
    assert image.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def own_lab(cache: Path, tmp_path: Path) -> Iterator[Address]:
    """A JupyterLab with one notebook, `run.ipynb`."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "run.ipynb").write_text(notebook(CELL), "utf-8")
    with lab_server(root, cache, tmp_path) as url:
        yield url


IDLE = "window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"


def open_run(open_tab: Open, lab: str) -> Tab:
    tab = open_tab(f"{lab}lab/workspaces/w{time.time_ns()}/tree/run.ipynb")
    # JupyterLab says this of a widget whose kernel has ended.
    tab.forgiven = ("widget model not found", "Error: widget model")
    tab.page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
    tab.page.wait_for_function(IDLE)
    return tab


def test_lab_shows_the_live_explorer_with_its_kernel_and_the_player_without(
    own_lab: Address, open_tab: Open, tmp_path: Path
) -> None:
    tab = open_run(open_tab, own_lab)
    page = tab.page
    page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
    tab.ready(90)
    time.sleep(4)  # longer than the player waits for a live explorer
    assert page.locator(".cb-root").count() == 1
    assert not page.locator(PICTURE).is_visible()
    assert not page.locator("[data-cbviz-run]").is_visible()
    assert page.locator("[data-cbviz-run] iframe").count() == 0
    page.screenshot(path=str(tmp_path / "live.png"))
    # The run goes on by hand; what the notebook keeps follows when it rests.
    tab.step(93)
    page.wait_for_function(
        "JSON.stringify(window.jupyterapp.shell.currentWidget.context.model.toJSON()).includes('recorded at step 93')"
    )
    assert not page.locator("[data-cbviz-run]").is_visible()
    page.evaluate("void window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("!window.jupyterapp.shell.currentWidget.context.model.dirty")
    page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")

    again = open_run(open_tab, own_lab)
    frame = player_in(again)
    assert_steps_on(frame)
    text = again.page.inner_text(".jp-Notebook")
    assert "recorded at step 93" in text
    assert "Error displaying widget" not in text
    assert not again.page.locator(PICTURE).is_visible()
    assert again.page.locator(".cb-root").count() == 0
    again.page.screenshot(path=str(tmp_path / "reopened.png"))
    # A new run of the cell puts the live explorer in its place.
    again.page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
    again.ready(90)
    assert again.page.locator("[data-cbviz-run]:visible").count() == 0
