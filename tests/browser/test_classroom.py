"""A class: several browsers on one server, links that open a lesson, the projector's layout, and code only
where the server allows it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cbviz.app import serve
from cbviz.trace import load
from tests.browser.conftest import Address, Tab, a_port, assert_drawn, run_of, saved_file, serving

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("heavy"),
]
Open = Callable[..., Tab]
LINKS = (
    "scenario=chat&seed=1",
    "scenario=chat&seed=2",
    "scenario=preemption&num_blocks=40&discipline=vllm",
    "scenario=burst&max_num_seqs=3",
)


def test_students_do_not_see_each_other(classroom: str, cache: Path, open_tab: Open) -> None:
    """Four browsers at once, each with its own link: runs of their own under names nobody guesses, stepped
    independently, settings as the links say.
    """
    tabs = [open_tab(f"{classroom}?{link}") for link in LINKS]
    for i, tab in enumerate(tabs):
        tab.ready()
        tab.step(2 + i)
    tabs[0].step(6)  # the others stay where they are
    tabs[2].page.select_option("#cb-f-policy", "sjf")
    tabs[2].page.wait_for_function("document.querySelector('.cb-what').textContent.includes('sjf')")
    assert [t.state()["step"] for t in tabs] == [6, 3, 4, 5]
    runs = [run_of(t) for t in tabs]
    assert len(set(runs)) == len(tabs)
    assert all(len(r) >= 16 for r in runs)
    traces = [load(saved_file(cache, r)) for r in runs]
    for tab, trace in zip(tabs, traces):
        assert_drawn(tab.state(), trace)
    configs = [t.header.config for t in traces]
    assert [c["seed"] for c in configs] == [1, 2, 0, 0]
    assert (configs[2]["num_blocks"], configs[2]["discipline"], configs[3]["max_num_seqs"]) == (40, "vllm", 3)
    assert "sjf" not in "".join(t.page.inner_text(".cb-what") for t in tabs if t is not tabs[2])
    assert (
        traces[0].records[0].arrivals[0].prompt != traces[1].records[0].arrivals[0].prompt
    )  # another seed, other questions


def test_presenter_and_back_to_the_links_start(voila: Address, open_tab: Open) -> None:
    tab = open_tab(f"{voila}?scenario=preemption&seed=3&max_num_seqs=5&layout=presenter")
    tab.ready()
    page = tab.page
    height = "document.querySelector('.cb-timeline .cb-phead h2').getBoundingClientRect().height"
    tick = "parseFloat(getComputedStyle(document.querySelector('.cb-timeline .xtick text')).fontSize)"
    large = page.evaluate(f"[{height}, {tick}]")
    assert not page.is_visible(".cb-controls")
    assert page.evaluate("document.querySelector('.cb-mid').getBoundingClientRect().width > 0.6 * innerWidth")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.keyboard.press("p")
    page.wait_for_selector(".cb-controls:visible")
    assert "layout" not in page.url
    page.wait_for_function(f"{tick} === 11")
    small = page.evaluate(f"[{height}, {tick}]")
    assert large[0] > 1.3 * small[0]
    assert large[1] > 1.3 * small[1]
    page.click(".cb-present")
    assert page.get_attribute(".cb-present", "aria-pressed") == "true"
    assert "layout=presenter" in page.url
    # A click on the large picture still means the cell under the pointer.
    tab.step(4)
    at = (
        "const frame = cbviz.app.views.timeline.frame, g = frame.geometry(), box = frame.plot.getBoundingClientRect();"
        "return [box.left + g.left + (3 - g.x0) * g.perX, box.top + g.top + (1 - g.y0) * g.perY];"
    )
    box = page.evaluate(f"(() => {{ {at} }})()")
    page.mouse.click(*box)
    tab.at(3)
    assert tab.state()["selected"] == "r2"
    page.keyboard.press("Escape")
    page.keyboard.press("P")
    # The student changes things, then goes back to what the link says.
    page.fill("#cb-f-max_num_seqs", "2")
    page.press("#cb-f-max_num_seqs", "Enter")
    page.select_option("#cb-f-policy", "sjf")
    page.fill("#cb-f-num_blocks", "64")
    page.press("#cb-f-num_blocks", "Enter")
    page.click(".cb-apply")
    page.wait_for_function("cbviz.state().steps === 0 && cbviz.state().owners.length === 64")
    tab.ready()
    tab.step(1)
    page.click(".cb-lesson")
    page.wait_for_function("cbviz.state().steps === 0 && cbviz.state().owners.length === 33")
    tab.ready()
    assert page.input_value("#cb-f-policy") == "fcfs"
    assert page.input_value("#cb-f-max_num_seqs") == "5"
    assert page.input_value("#cb-f-seed") == "3"
    tab.step(2)


@contextmanager
def explorer_server(cache: Path, tmp_path_factory: pytest.TempPathFactory, **env: str) -> Iterator[str]:
    """As `cbviz explore` serves it; with its own time after which a kernel without a page ends, since here
    four pages load at once.
    """
    folder, port = tmp_path_factory.mktemp("voila"), a_port()
    notebook = folder / "explorer.ipynb"
    shutil.copyfile(serve.notebooks() / "explorer.ipynb", notebook)
    url = f"http://127.0.0.1:{port}/"
    with serving(
        serve.explore_command(notebook, "127.0.0.1", port),
        serve.environment(CBVIZ_CACHE=str(cache), CBVIZ_MODEL="sim", **env),
        url,
        folder / "log",
    ):
        yield url


@pytest.fixture(scope="module")
def classroom(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server for several pages at once."""
    with explorer_server(cache, tmp_path_factory) as url:
        yield url


@pytest.fixture(scope="module")
def open_server(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that was started with --allow-code."""
    with explorer_server(cache, tmp_path_factory, CBVIZ_ALLOW_CODE="1") as url:
        yield url


def test_code_where_it_is_allowed(open_server: str, open_tab: Open) -> None:
    tab = open_tab(f"{open_server}?scenario=burst")
    tab.ready()
    page = tab.page
    page.fill(".cb-code", "@cb.policy\ndef mine(r, now):\n    return oops\n")
    page.click(".cb-runpolicy")
    page.wait_for_selector("#cb-policy-e:visible")
    assert "oops" in page.inner_text("#cb-policy-e")
    page.fill(".cb-code", "@cb.policy\ndef mine(r, now):\n    return -r.num_prompt_tokens\n")
    page.click(".cb-runpolicy")
    page.wait_for_function("document.querySelector('.cb-what').textContent.includes('mine')")
    tab.step(2)
    assert not page.is_visible("#cb-policy-e")


def test_no_code_elsewhere(voila: Address, open_tab: Open) -> None:
    """The box is absent, and the message that it would send is refused."""
    tab = open_tab(f"{voila}?scenario=chat")
    tab.ready()
    assert tab.page.query_selector(".cb-code") is None
    tab.page.evaluate("cbviz.app.send('policy', {source: 'import os'})")
    tab.page.wait_for_selector(".cb-banner:visible")
    assert "takes no code" in tab.page.inner_text(".cb-banner")
