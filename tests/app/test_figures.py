"""Figures of a kernel carry HTML that draws them; plotly.js comes once, and a choice of the user's stays."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from cbviz.app import figures

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028<!--"


def test_plotly_comes_with_the_first_figure_and_again_when_that_cell_runs_again() -> None:
    carrier = figures.Carrier()
    shown = [("a", 1), ("a", 1), ("b", 2), ("a", 3), ("a", 3), ("b", 4)]
    assert [carrier.wants_library(*x) for x in shown] == [True, False, False, True, False, False]


def test_plotly_comes_once_where_the_front_end_names_no_cells() -> None:
    carrier = figures.Carrier()
    assert [carrier.wants_library("", n) for n in (1, 1, 2, 3)] == [True, False, False, False]


def test_no_text_of_a_figure_stands_in_its_html() -> None:
    figure = {
        "data": [{"type": "scatter", "x": [1], "y": [2], "text": [HOSTILE]}],
        "layout": {"title": {"text": HOSTILE}},
    }
    html = figures.html_of(figure, library=False)
    assert "onerror" not in html
    assert html.count("</script>") == 2


@pytest.mark.parametrize(
    "chosen, then",
    [("plotly_mimetype", "plotly_mimetype+cbviz"), ("browser", "browser"), ("notebook", "notebook")],
)
def test_only_jupyterlabs_own_renderer_is_added_to(chosen: str, then: str) -> None:
    class Renderers(dict):  # type: ignore[type-arg]
        default = chosen

    io = types.ModuleType("io")
    io.renderers = Renderers()  # type: ignore[attr-defined]
    figures.add_renderer(io)
    assert io.renderers.default == then


def test_outside_a_kernel_nothing_is_hooked() -> None:
    code = "import sys, cbviz; assert 'cbviz.app.figures' not in sys.modules and 'plotly' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
