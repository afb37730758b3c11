"""Every lesson as a page: Voilà runs it to its end with our template, all it tells and draws is seen, and no
other host is asked.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest

from cbviz.app import serve
from tests.browser.conftest import Tab, a_port, serving
from tests.notebooks.test_notebooks import LESSONS, REAL, TELLS

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("heavy"),
]
WITH_EXPLORER = ("00", "07", "08")
BAD = (
    ":is([data-mime-type='application/vnd.jupyter.stderr'], [data-mime-type='application/vnd.jupyter.error'])"
)


@pytest.fixture(scope="module")
def pages(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Voilà on a copy of the notebooks' folder, as `cbviz explore` serves its one; kernels without a page go
    after fifteen seconds.
    """
    folder, port = tmp_path_factory.mktemp("pages"), a_port()
    root = folder / "root"
    shutil.copytree(serve.notebooks(), root)
    command = serve.explore_command(
        root,
        "127.0.0.1",
        port,
        ["--MappingKernelManager.cull_idle_timeout=15", "--MappingKernelManager.cull_interval=1"],
    )
    url = f"http://127.0.0.1:{port}/"
    with serving(command, serve.environment(CBVIZ_CACHE=str(cache)), url, folder / "log"):
        yield url


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.model] * (n[:2] in REAL)) for n in LESSONS]
)
def test_it_runs_in_voila(pages: str, open_tab: Callable[..., Tab], name: str) -> None:
    tab = open_tab(f"{pages}voila/render/{name}")
    tab.forgiven = (
        "setData is not a function",
        # Plotly's renderer wants to keep a picture in the notebook's model; in Voilà there is none to keep it
        # in
    )
    page = tab.page
    page.set_default_timeout(120_000)  # it runs whole before there is a page
    page.wait_for_selector("#rendered_cells .jp-RenderedText")
    page.wait_for_function("!document.querySelector('#loading')?.checkVisibility()")
    assert page.locator(BAD).all_inner_texts() == []
    said = page.inner_text("#rendered_cells").replace("\xa0", " ")
    assert [t for t in TELLS[name[:2]] if t not in said] == [], said
    drawn = sum(
        c.source.count("\ngo.Figure(") + c.source.startswith("go.Figure(")
        for c in nbformat.read(serve.notebooks() / name, as_version=4).cells
    )
    assert drawn > 0
    page.wait_for_function(
        "(n) => document.querySelectorAll('.js-plotly-plot .main-svg:first-of-type').length >= n", arg=drawn
    )
    if name[:2] in WITH_EXPLORER:
        tab.ready()
    if name[:2] == "02":  # its menus are live: another context, another figure
        page.wait_for_function(
            "document.querySelector('.widget-interact .jp-OutputArea')?.innerText.includes('requests of "
            "1,000 tokens fit')"
        )
        page.locator(".widget-interact select").nth(2).select_option(index=2)
        page.wait_for_function(
            "document.querySelector('.widget-interact .jp-OutputArea')?.innerText.includes('requests of "
            "8,000 tokens fit')"
        )
