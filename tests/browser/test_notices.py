"""What a page says when a run cannot be saved, is taken, or comes back with a part missing: plainly, and it goes on.

Each test leaves a picture of the page in its folder, for a person to read.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cbviz.app import kept, serve
from cbviz.trace import load
from tests.browser.conftest import Address, Tab, a_port, kernels, run_of, saved_file, serving

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("heavy"),
]
Open = Callable[..., Tab]
LOST_KERNEL = ("Kernel", "kernel", "WebSocket", "Failed to load resource")
"""What a page's console says when its kernel was killed."""


def picture(tab: Tab, folder: Path, name: str) -> None:
    tab.page.screenshot(path=str(folder / f"{name}.png"))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are of Linux")
def test_a_disk_that_fills_up_while_the_run_plays_is_said_and_the_run_goes_on(
    voila: Address, cache: Path, open_tab: Open, tmp_path: Path
) -> None:
    strangers = kernels(voila)
    tab = open_tab(f"{voila}?scenario=preemption")
    tab.ready()
    tab.step(5)
    file = saved_file(cache, run_of(tab))
    for p in kernels(voila) - strangers:
        p.rlimit(psutil.RLIMIT_FSIZE, (file.stat().st_size + 3000, psutil.RLIM_INFINITY))
    tab.step(30)
    said = tab.notice("Saving stopped")
    kept_steps = len(load(file))
    assert 5 <= kept_steps < 30
    assert f"Steps 1 to {kept_steps} are saved" in said
    assert "button Save" in said
    assert str(cache) not in said
    picture(tab, tmp_path, "full")
    # The whole run can be downloaded all the same.
    with tab.page.expect_download() as download:
        tab.page.click(".cb-save")
    whole = tmp_path / "whole.jsonl.gz"
    download.value.save_as(whole)
    assert len(load(whole)) == 30
    # After a reload the saved part is there, and is written on.
    tab.page.wait_for_timeout(600)
    tab.page.reload(wait_until="commit")
    tab.ready(kept_steps)
    assert tab.state()["steps"] == kept_steps


@pytest.fixture
def no_room(cache: Path, tmp_path: Path) -> Iterator[Address]:
    """The explorer on a cache in which no folder of runs can be made: a file has its name."""
    mine, root, port = tmp_path / "cache", tmp_path / "root", a_port()
    mine.mkdir()
    root.mkdir()
    for entry in cache.iterdir():
        if entry.name not in ("runs", "pages"):
            (mine / entry.name).symlink_to(entry)
    (mine / "pages").write_text("", "utf-8")
    shutil.copyfile(serve.notebooks() / "explorer.ipynb", root / "explorer.ipynb")
    url = Address(f"http://127.0.0.1:{port}/")
    command = serve.explore_command(root / "explorer.ipynb", "127.0.0.1", port, [])
    env = serve.environment(CBVIZ_CACHE=str(mine), CBVIZ_MODEL="sim")
    with serving(command, env, url, tmp_path / "log") as url.pid:
        yield url


def test_a_page_that_can_save_nothing_says_so_and_works(
    no_room: Address, open_tab: Open, tmp_path: Path
) -> None:
    tab = open_tab(f"{no_room}?scenario=preemption")
    tab.ready()
    said = tab.notice("This run is not saved")
    assert "button Save" in said
    tab.step(12)
    assert "run=" not in tab.page.url
    picture(tab, tmp_path, "unsaved")


def test_a_page_that_did_not_answer_is_told_that_another_tab_took_its_run(
    voila: Address, open_tab: Open, tmp_path: Path
) -> None:
    first = open_tab(f"{voila}?scenario=preemption")
    first.ready()
    first.step(4)
    run = run_of(first)
    # The tab hangs: nothing else of it runs for a while.
    first.page.evaluate(
        "void setTimeout(() => { const end = Date.now() + 15000; while (Date.now() < end); }, 0)"
    )
    second = open_tab(first.page.url, beside=first)
    second.ready(4)
    second.step(7)
    assert run_of(second) == run
    first.page.click(".cb-step")
    said = first.notice("Another tab opened this run")
    assert "saved as a run of its own" in said
    picture(first, tmp_path, "taken")
    assert run_of(first) != run


def test_a_run_whose_file_was_cut_short_and_whose_branch_is_gone_says_both(
    voila: Address, cache: Path, open_tab: Open, tmp_path: Path
) -> None:
    strangers = kernels(voila)
    tab = open_tab(f"{voila}?scenario=preemption")
    tab.forgiven = LOST_KERNEL
    tab.ready()
    tab.step(8)
    run = run_of(tab)
    tab.page.click(".cb-fork")
    tab.page.wait_for_selector(".cb-fork-create:visible")
    tab.page.click(".cb-fork-create")
    tab.page.wait_for_function("document.querySelector('.cb-branch').checkVisibility()")
    tab.step(10)
    for p in kernels(voila) - strangers:
        p.kill()
        p.wait(10)
    tab.page.wait_for_selector("#cb-ended:visible")
    picture(tab, tmp_path, "ended")
    folder = cache / "pages" / run
    shown = saved_file(cache, run)
    assert kept.shown_branch(folder) != kept.MAIN
    whole = shown.read_bytes()
    shown.write_bytes(whole[: whole.rstrip(b"\n").rfind(b"\n") + 200])
    kept.branch_path(folder, kept.MAIN).write_bytes(b"not a trace\n")
    tab.page.goto(f"{voila}?run={run}", wait_until="commit")
    said = tab.notice("was not saved whole and is missing")
    tab.ready(9)
    assert "cannot be read and is missing" in said
    picture(tab, tmp_path, "missing")
    tab.step(11)


def test_a_kernel_that_is_gone_is_said_with_a_way_on(voila: Address, open_tab: Open, tmp_path: Path) -> None:
    strangers = kernels(voila)
    tab = open_tab(f"{voila}?scenario=preemption")
    tab.forgiven = LOST_KERNEL
    tab.ready()
    tab.step(3)
    tab.page.wait_for_timeout(600)
    for p in kernels(voila) - strangers:
        os.kill(p.pid, 9)
    tab.page.wait_for_function("document.querySelector('#cb-ended')?.innerText.includes('has ended')")
    time.sleep(0.5)
    picture(tab, tmp_path, "gone")
    assert tab.page.locator("#cb-ended button").is_visible()
