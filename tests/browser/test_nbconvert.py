"""A notebook that nbconvert has made into a page shows its figures without a network and without a kernel."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.conftest import Tab

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("heavy"),
]
Open = Callable[..., Tab]
WAIT_S = 60.0


def notebook(*cells: str) -> str:
    """A notebook of code cells, not yet run."""
    made = [
        {
            "cell_type": "code",
            "execution_count": None,
            "id": f"c{i}",
            "metadata": {},
            "outputs": [],
            "source": text,
        }
        for i, text in enumerate(cells)
    ]
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    return json.dumps({"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})


def converted(folder: Path, *cells: str) -> Path:
    """The page that `jupyter nbconvert` makes of the cells, without a warning."""
    source = folder / "figures.ipynb"
    source.write_text(notebook(*cells), "utf-8")
    command = [sys.executable, "-m", "nbconvert", "--execute", "--to", "html", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "UserWarning" not in done.stderr
    return source.with_suffix(".html")


def until(tab: Tab, expression: str) -> None:
    end = time.monotonic() + WAIT_S
    while not tab.page.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.1)


@pytest.mark.parametrize(
    "imports",
    [
        ("import plotly.graph_objects as go", "import cbviz as cb"),
        ("import cbviz as cb", "import plotly.graph_objects as go"),
    ],
)
def test_figures_are_drawn_offline_and_plotly_comes_once(
    open_tab: Open, tmp_path: Path, imports: tuple[str, str]
) -> None:
    setup = "\n".join(
        [
            *imports,
            "s = cb.Session('preemption', runner='sim')",
            "s.run()",
            "go.Figure(cb.views.timeline(s.trace))",
        ]
    )
    page = converted(
        tmp_path,
        setup,
        "go.Figure(cb.views.block_map(s.trace, 12)).show()\ngo.Figure(cb.views.batch(s.trace, 12))",
    )
    text = page.read_text("utf-8")
    assert text.count('class="cbviz-plotly"') == 1
    assert len(text) < 4_000_000
    tab = open_tab(page.as_uri(), offline=True)
    tab.forgiven = (
        "net::ERR_INTERNET_DISCONNECTED",
        "mermaid",
        "require",
    )  # nbconvert's own template asks a CDN for scripts that no figure needs
    until(
        tab,
        (
            "document.querySelectorAll('.js-plotly-plot .main-svg').length >= 3 && "
            "document.querySelectorAll('.js-plotly-plot').length === 3"
        ),
    )
    marks = "p.querySelectorAll('.cartesianlayer path, .cartesianlayer image').length"
    shown = tab.page.evaluate(
        f"[...document.querySelectorAll('.js-plotly-plot')].map(p => [p.data.length, {marks}])"
    )
    assert all(traces and drawn for traces, drawn in shown), shown
    tab.asked = [u for u in tab.asked if not u.startswith(("file:", "https://cdnjs.", "https://unpkg."))]
