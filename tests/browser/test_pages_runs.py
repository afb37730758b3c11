"""Whose run it is, in a real browser: two tabs, two browsers, a copied address, a guessed name, a kernel that
is killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cbviz.session import Session
from cbviz.trace import load
from tests.browser.conftest import Address, Tab, assert_drawn, kernels, run_of, saved_file

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("heavy"),
]
Open = Callable[..., Tab]


def test_each_tab_keeps_its_own_run(voila: Address, cache: Path, open_tab: Open) -> None:
    """Two tabs of one address, stepped to different places, then loaded again: each comes back where it was."""
    first = open_tab(f"{voila}?scenario=preemption")
    first.ready()
    first.step(5)
    run = run_of(first)
    second = open_tab(first.page.url, beside=first)  # what "Duplicate tab" does
    second.notice("This page is a copy")
    second.ready(5)
    second.page.wait_for_function("run => new URL(location.href).searchParams.get('run') !== run", arg=run)
    copy = run_of(second)
    first.step(12)
    second.step(8)
    assert first.page.locator(".cb-notice").count() == 0
    second.page.click(".cb-notice button")
    second.page.wait_for_function("!document.querySelector('.cb-notice')")
    for tab, end, name in ((first, 12, run), (second, 8, copy)):
        tab.page.wait_for_timeout(600)  # the address follows the cursor a moment later
        tab.page.reload(wait_until="commit")
        tab.ready(end)
        assert tab.state()["steps"] == end
        assert run_of(tab) == name
        assert tab.page.locator(".cb-notice").count() == 0
        assert_drawn(tab.state(), load(saved_file(cache, name)))
    # Away to another page and back in the history: still its own.
    first.page.goto("about:blank")
    first.page.go_back(wait_until="commit")
    first.ready(12)
    assert run_of(first) == run
    assert first.page.locator(".cb-notice").count() == 0


def test_a_copied_address_and_a_guessed_name_touch_nobodys_run(
    voila: Address, cache: Path, open_tab: Open
) -> None:
    made = cache / "runs" / "run-20260101-000000-burst-chunked-77.jsonl"
    s = Session("burst", runner="sim")
    s.step(5)
    made.parent.mkdir(exist_ok=True)
    s.save(made)
    before = made.read_bytes()
    first = open_tab(f"{voila}?scenario=preemption")
    first.ready()
    first.step(4)
    run = run_of(first)
    other = open_tab(first.page.url)  # another browser
    other.page.wait_for_selector(".cb-notice")
    other.ready()
    assert run_of(other) != run
    other.step(other.state()["step"] + 2)
    guess = open_tab(f"{voila}?scenario=chat&run={made.stem}&step=3")
    guess.notice("names a run that this browser does not have here")
    guess.ready()
    assert guess.state()["steps"] == 0
    guess.step(2)
    assert run_of(guess) not in (made.stem, run)
    first.step(6)
    assert len(load(saved_file(cache, run))) == 6
    assert made.read_bytes() == before


def test_a_killed_kernel_loses_no_whole_step(voila: Address, cache: Path, open_tab: Open) -> None:
    """Killed while it plays at full speed, with the last line of its file cut short."""
    strangers = kernels(voila)
    tab = open_tab(f"{voila}?scenario=preemption")
    tab.forgiven = (
        "Kernel",
        "kernel",
        "WebSocket",
        "Failed to load resource",
    )  # the page complains that its kernel is gone, as it should
    tab.ready()
    run = run_of(tab)
    mine: set[psutil.Process] = kernels(voila) - strangers
    tab.page.select_option(".cb-speed", "30")
    tab.page.click(".cb-play")
    tab.page.wait_for_function("cbviz.state().step >= 15")
    for p in mine:
        os.kill(p.pid, signal.SIGKILL)
    for p in mine:
        p.wait(10)
    file = saved_file(cache, run)
    steps = len(load(file))
    assert steps >= 15
    whole = file.read_bytes()
    file.write_bytes(whole[: whole.rstrip(b"\n").rfind(b"\n") + 200])
    tab.page.goto(f"{voila}?run={run}", wait_until="commit")
    tab.notice("was not saved whole and is missing")
    tab.ready(steps - 1)
    assert tab.state()["steps"] == steps - 1
    assert run_of(tab) == run
    tab.step(steps + 1)
    assert_drawn(tab.state(), load(file))
