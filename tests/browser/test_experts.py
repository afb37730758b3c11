"""The mixture that ships, in the explorer: its experts are a tab that a dense run does not have, and the tab
shows what the trace holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import newest_run

pytestmark = pytest.mark.browser
ROWS = ".cb-expertrow:not(.cb-expertnames)"
CELLS = (
    "r => [...r.querySelectorAll('.cb-expertcells span')].map(s => Number(s.textContent.replace(/,/g, '')))"
)


def test_experts_of_a_mixture(voila: str, cache: Path, open_tab: Callable[..., Any]) -> None:
    tab = open_tab(f"{voila}?scenario=chat&model=tiny-moe&num_blocks=400")
    tab.ready()
    page = tab.page
    assert page.is_hidden(".cb-expertstab")
    tab.step(4)
    page.click(".cb-expertstab")
    page.wait_for_selector(".cb-expertcells span")
    trace = newest_run(cache)
    load = [row for row in trace.record(4).expert_load or [] if row]
    cells = page.eval_on_selector_all(ROWS, f"rows => rows.map({CELLS})")
    assert cells == load and len(load) == 4 and len(load[0]) == 8
    assert "of 32 touched" in page.inner_text(".cb-experts .cb-sub")
    assert "Its tokens took" in page.inner_text(".cb-why")
    page.click(".cb-experts .cb-chip:nth-child(2)")
    total = [
        [sum((r.expert_load or [[0] * 8] * 4)[i][e] for r in list(trace)[:4]) for e in range(8)]
        for i in range(4)
    ]
    page.wait_for_function(
        f"want => JSON.stringify([...document.querySelectorAll('{ROWS}')].map({CELLS})) === want",
        arg=str(total).replace(" ", ""),
    )
    if folder := os.environ.get("CBVIZ_SHOTS"):
        page.screenshot(path=f"{folder}/experts.png")
    page.keyboard.press("Shift+X")
    assert page.is_hidden(".cb-experts") and page.is_visible(".cb-util .cb-plot")
