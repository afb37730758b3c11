"""The explorer in JupyterLab: the same page in a notebook's output, where keys belong to the notebook and a
reload keeps the kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.conftest import Address, Tab, assert_drawn, kernels, newest_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("heavy"),
]
Open = Callable[..., Tab]
CELLS = "window.jupyterapp.shell.currentWidget.content.widgets.length"


def run_notebook(open_tab: Open, lab: str, name: str) -> Tab:
    """Opens a notebook in a workspace of its own and runs its cell."""
    tab = open_tab(f"{lab}lab/workspaces/w{time.time_ns()}/tree/{name}")
    page = tab.page
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
    page.wait_for_function(
        "window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
    )
    page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
    tab.ready()
    return tab


def test_thirty_steps_keys_prompt_and_reload(lab: str, cache: Path, open_tab: Open) -> None:
    tab = run_notebook(open_tab, lab, "explorer.ipynb")
    page = tab.page
    tab.step(30)
    assert_drawn(tab.state(), newest_run(cache))
    # Letters that JupyterLab takes for commands (b: a new cell, d d: delete it) do nothing to the notebook
    # while the widget has the focus.
    cells = page.evaluate(CELLS)
    page.locator(".cb-timeline .cb-frame").focus()
    for key in ("b", "d", "d", "a", "x"):
        page.keyboard.press(key)
    page.keyboard.press("ArrowRight")
    tab.at(31)
    page.keyboard.press("ArrowLeft")
    tab.at(30)
    assert page.evaluate(CELLS) == cells
    # A prompt while it plays, and its end.
    page.select_option(".cb-speed", "10")
    page.click(".cb-play")
    page.wait_for_function("cbviz.state().playing")
    page.fill(".cb-prompt", "b d d a: a prompt typed into the notebook")
    page.fill(".cb-maxtokens", "100")
    page.click(".cb-add")
    page.wait_for_function("cbviz.app.added && cbviz.state().requests[cbviz.app.added]")
    rid = page.evaluate("cbviz.app.added")
    page.click(".cb-pause")
    page.wait_for_function("!cbviz.state().playing")
    assert page.evaluate(CELLS) == cells
    page.click(f".cb-queue [data-request='{rid}']")
    page.click(".cb-abort")
    now = tab.state()["step"]
    page.click(".cb-step")
    page.wait_for_function(f"cbviz.state().step > {now}")
    assert tab.state()["requests"][rid]["state"] == "aborted"
    assert tab.state()["requests"][rid]["blocks"] == []
    before = tab.state()
    assert_drawn(before, newest_run(cache))
    # The kernel lives on through a reload: the same state, drawn afresh.
    page.evaluate("void window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("!window.jupyterapp.shell.currentWidget.context.model.dirty")
    page.on("dialog", lambda d: d.accept())
    page.reload(wait_until="commit")
    tab.ready(before["step"])
    after = tab.state()
    for key in ("step", "requests", "owners", "refs", "cached", "waiting", "running"):
        assert after[key] == before[key], key
    tab.step(before["step"] + 1)


def test_it_follows_the_notebooks_theme(lab: str, open_tab: Open) -> None:
    tab = run_notebook(open_tab, lab, "explorer.ipynb")
    assert tab.page.get_attribute(".cb-root", "data-theme") == "light"
    tab.page.evaluate(
        "void window.jupyterapp.commands.execute('apputils:change-theme', { theme: 'JupyterLab Dark' })"
    )
    tab.page.wait_for_selector(".cb-root[data-theme=dark]")
    tab.page.evaluate(
        "void window.jupyterapp.commands.execute('apputils:change-theme', { theme: 'JupyterLab Light' })"
    )
    tab.page.wait_for_selector(".cb-root[data-theme=light]")


@pytest.mark.model
def test_the_real_model(lab: str, cache: Path, open_tab: Open) -> None:
    tab = run_notebook(open_tab, lab, "real.ipynb")
    tab.step(30)
    trace = newest_run(cache)
    assert trace.header.runner == "torch"
    assert_drawn(tab.state(), trace)
    assert tab.page.evaluate("cbviz.text('r1')") == "".join(trace.state(30).requests["r1"].output_texts)


@pytest.mark.parametrize("how", ["restarted", "killed"])
def test_a_widget_whose_kernel_is_gone_says_so_and_is_off_until_its_cell_runs_again(
    lab: Address, open_tab: Open, how: str
) -> None:
    tab = run_notebook(open_tab, lab, "explorer.ipynb")
    tab.forgiven = (
        "widget model not found",
    )  # JupyterLab's own: it may look once more for the models of the kernel that has ended
    page = tab.page
    tab.step(5)
    assert not page.locator(".cb-kernelbar").is_visible()
    page.select_option(".cb-speed", "10")
    page.click(".cb-play")
    page.wait_for_function("cbviz.state().step > 7")
    if how == "restarted":
        page.evaluate("void window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    else:
        kernel = page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.id")
        (mine,) = (p for p in kernels(lab) if kernel in " ".join(p.cmdline()))
        mine.kill()
    page.wait_for_selector(".cb-kernelbar:visible")
    assert "has ended" in page.inner_text(".cb-kernelbar")
    assert "Run the cell again" in page.inner_text(".cb-kernelbar")
    for name in (
        "step",
        "play",
        "pause",
        "back",
        "reset",
        "end",
        "save",
        "add",
        "apply",
        "fork",
        "break",
        "scrub",
        "speed",
    ):
        assert page.locator(f".cb-{name}").first.is_disabled(), name
    assert page.locator(".cb-root.cb-playing").count() == 0
    stood = tab.state()["step"]
    page.locator(".cb-timeline .cb-frame").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press(" ")
    page.locator(
        ".cb-queue .cb-chip, .cb-tokens .cb-chip"
    ).first.click()  # the last picture can still be looked at
    assert tab.state()["selected"]
    assert tab.state()["step"] == stood
    page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_function(
        "!document.querySelector('.cb-kernelbar:not([hidden])') && cbviz.state() && cbviz.state().step === 0"
    )
    tab.step(2)
