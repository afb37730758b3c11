"""Lessons in JupyterLab as a student has them: run all, get the exercise wrong, read what the page says, get
it right.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cbviz.app import serve
from tests.browser.conftest import Tab, lab_server

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("heavy"),
]
Open = Callable[..., Tab]

BLOCKS_HALF = """def answer(case):
    held = -(-(case["prompt"] + case["output"]) // case["block_size"])
    return {"paged": held, "empty": -1, "reserved": -(-(case["prompt"] + case["max_tokens"]) // case["block_size"])}"""
BLOCKS_RIGHT = """def answer(case):
    with_kv, size = case["prompt"] + case["output"] - 1, case["block_size"]
    held = -(-with_kv // size)
    return {"paged": held, "empty": held * size - with_kv, "reserved": -(-(case["prompt"] + case["max_tokens"]) // size)}"""
VICTIM_HALF = """def answer(case):
    return case["running"][-1]["request_id"]"""
VICTIM_RIGHT = """def answer(case):
    ranks = {
        "last": lambda r: case["running"].index(r),
        "lowest-priority": lambda r: (r["priority"], r["arrived"]),
        "least-work-lost": lambda r: (-r["num_computed_tokens"], r["arrived"]),
        "fewest-outputs": lambda r: (-r["num_output_tokens"], r["num_prompt_tokens"], r["arrived"]),
    }
    return max(case["running"], key=ranks[case["rule"]])["request_id"]"""
POLICY_HALF = """def answer(r, now):
    return r.num_remaining"""
POLICY_RIGHT = """def answer(r, now):
    return r.num_remaining - r.num_waiting_steps"""

LESSONS = {
    "03_paged_kv_cache": (
        "count-the-blocks",
        "How many KV blocks does it hold?",
        BLOCKS_HALF,
        BLOCKS_RIGHT,
        ("reserved 30.0 of 30", "empty 0.0 of 30"),
    ),
    "05_preemption": (
        "name-the-victim",
        "Who loses its blocks?",
        VICTIM_HALF,
        VICTIM_RIGHT,
        ("last 15.0 of 15",),
    ),
    "07_policies": (
        "beat-fcfs",
        "Beat first come, first served",
        POLICY_HALF,
        POLICY_RIGHT,
        ("faster 60.0 of 60",),
    ),
}


@pytest.fixture(scope="module")
def lessons(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A JupyterLab on a copy of the notebooks, and that folder."""
    folder = tmp_path_factory.mktemp("lessons")
    root = folder / "root"
    shutil.copytree(serve.notebooks(), root)
    with lab_server(root, cache, folder) as url:
        yield url, root


class Notebook:
    """A notebook that is open in JupyterLab. Cells are found by the id that they have in the file."""

    PANEL = "window.jupyterapp.shell.currentWidget.content"

    def __init__(self, tab: Tab, ids: list[str]) -> None:
        self.tab, self.page, self.ids = tab, tab.page, ids

    def show(self, cell: str) -> Any:
        """Scrolls to a cell (those out of sight are not in the page) and returns it."""
        self.page.evaluate(
            (
                f"async (i) => {{ const n = {self.PANEL}; n.activeCellIndex = i; await n.scrollToItem(i, "
                f"'center'); }}"
            ),
            self.ids.index(cell),
        )
        found = self.page.locator(".jp-Notebook .jp-Cell.jp-mod-active")
        found.wait_for()
        return found

    def idle(self) -> None:
        """Waits until nothing runs or is queued."""
        self.page.wait_for_function(
            "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'idle'"
            " && ![...document.querySelectorAll('.jp-InputPrompt')].some((p) => "
            "p.textContent.includes('[*]'))"
        )

    def run_all(self) -> None:
        """By the menu."""
        self.page.click(".lm-MenuBar-itemLabel:text-is('Run')")
        self.page.click(".lm-Menu-item[data-command='runmenu:run-all']")
        last = f"{self.PANEL}.widgets.filter((c) => c.model.type === 'code').at(-1).model"
        self.page.wait_for_function(f"{last}.executionCount > 0")
        self.idle()

    def said(self, cell: str) -> str:
        """A cell's output, as the page shows it."""
        return str(self.show(cell).locator(".jp-Cell-outputArea").inner_text()).replace("\xa0", " ")

    def type_and_run(self, cell: str, source: str) -> str:
        """Types over what stands in a cell, runs it with Ctrl-Enter and returns what is shown then."""
        count = self.page.evaluate(
            f"(i) => {self.PANEL}.widgets[i].model.executionCount", self.ids.index(cell)
        )
        self.show(cell).locator(".cm-content").click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(source)
        self.page.keyboard.press("Control+Enter")
        self.page.wait_for_function(
            f"([i, n]) => {self.PANEL}.widgets[i].model.executionCount > n", arg=[self.ids.index(cell), count]
        )
        self.idle()
        return self.said(cell)


@pytest.mark.parametrize("name", LESSONS)
def test_failed_then_solved(lessons: tuple[str, Path], open_tab: Open, name: str) -> None:
    url, root = lessons
    exercise, title, half, right, partly = LESSONS[name]
    ids = [c["id"] for c in json.loads((root / f"{name}.ipynb").read_text("utf-8"))["cells"]]
    tab = open_tab(f"{url}lab/workspaces/w{time.time_ns()}/tree/{name}.ipynb")
    tab.page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
    tab.page.wait_for_function(
        "window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
    )
    nb = Notebook(tab, ids)
    nb.run_all()
    failed = tab.page.evaluate(
        f"{nb.PANEL}.widgets.flatMap((c) => c.model.toJSON().outputs ?? []).filter((o) => o.output_type "
        "=== 'error' || o.name === 'stderr')"
    )
    assert failed == []
    assert title in nb.said("exercise")
    assert f"{exercise}: " in nb.said("exercise-answer")  # the first attempt that the lesson brings
    # A figure of the lesson is drawn in the page, not merely put into the notebook.
    figure = tab.page.evaluate(
        f"{nb.PANEL}.widgets.findIndex((c) => (c.model.toJSON().outputs ?? []).some((o) => "
        "o.data?.['application/vnd.plotly.v1+json']))"
    )
    nb.show(ids[figure]).locator(".js-plotly-plot .main-svg").first.wait_for()
    # No function at all, then one that fails, then an answer that is half right, then the right one.
    assert "LessonError: the answer is a function of" in nb.type_and_run("exercise-answer", "ex.check(42)")
    said = nb.type_and_run(
        "exercise-answer", half.replace("return", "return oops or", 1) + "\n\n\nex.check(answer)"
    )
    assert "oops" in said
    assert f"{exercise}: 0 of 100 points" in said
    said = nb.type_and_run("exercise-answer", half + "\n\n\nex.hint()\nex.check(answer)")
    assert "Hint 1 of 3: " in said
    assert f"{exercise}: " in said
    assert "solved" not in said
    assert [p for p in partly if p not in " ".join(said.split())] == [], said
    said = nb.type_and_run("exercise-answer", right + "\n\n\nex.check(answer)")
    assert f"{exercise}: 100 of 100 points, solved" in said
    # And the report that the teacher collects.
    nb.type_and_run("report", "lessons.report('a student').name")
    report = json.loads((root / "cbviz-lessons-a-student.json").read_text("utf-8"))
    row = report["exercises"][exercise]
    assert (row["score"], row["solved"], row["hints"]) == (100, True, 1)
    assert right in row["answer"]
    tab.page.evaluate("void window.jupyterapp.commands.execute('docmanager:save')")
    tab.page.wait_for_function("!window.jupyterapp.shell.currentWidget.context.model.dirty")
    tab.page.evaluate(
        "window.jupyterapp.shell.currentWidget.sessionContext.shutdown()"
    )  # its memory goes back before the next lesson begins
