"""Five students on one server, each with the real model: nobody's steps move anybody else's run, and what
each costs in memory.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cbviz.app import serve
from cbviz.trace import load
from tests.browser.conftest import Address, Tab, a_port, assert_drawn, kernels, run_of, saved_file, serving

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.timeout(480),
    pytest.mark.xdist_group("heavy"),
]
Open = Callable[..., Tab]
SEEDS = (1, 2, 3, 4, 1)
"""The first and the last student open the same link."""
MB = 10**6


@pytest.fixture
def server(cache: Path, tmp_path: Path) -> Iterator[Address]:
    """As `cbviz explore` serves it."""
    port, notebook = a_port(), tmp_path / "explorer.ipynb"
    shutil.copyfile(serve.notebooks() / "explorer.ipynb", notebook)
    url = f"http://127.0.0.1:{port}/"
    env = serve.environment(CBVIZ_CACHE=str(cache))
    env.pop("CBVIZ_MODEL", None)
    with serving(serve.explore_command(notebook, "127.0.0.1", port), env, url, tmp_path / "log") as pid:
        address = Address(url)
        address.pid = pid
        yield address


def settled(tab: Tab, run: Path) -> int:
    """The step at which a paused page stands once the step that was under way is done and drawn: the last one
    of its run, twice in a row.
    """
    last, end = -1, time.monotonic() + 120
    while time.monotonic() < end:
        drawn, kept = tab.state()["step"], len(load(run))
        if drawn == kept == last:
            return int(drawn)
        last = kept
        tab.page.wait_for_timeout(1000)
    raise AssertionError(f"paused, the page stands at step {drawn}, its run has {kept}")


def test_five_step_the_real_model(
    server: Address, cache: Path, open_tab: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    tabs = []
    for seed in SEEDS:
        tab = open_tab(f"{server}?scenario=chat&model=smollm2&seed={seed}")
        tab.page.set_default_timeout(120_000)  # five kernels load, on few cores
        tabs.append(tab)
    for tab in tabs:
        tab.ready()
    # In turn, and each to a step of its own.
    for turn in range(1, 4):
        for i, tab in enumerate(tabs):
            tab.step(turn * (2 + i))
    assert [t.state()["step"] for t in tabs] == [6, 9, 12, 15, 18]
    # All play at once.
    for tab in tabs:
        tab.page.select_option(".cb-speed", "10")
        tab.page.click(".cb-play")
    for tab in tabs:
        tab.page.wait_for_function("cbviz.state().step >= 30")
        tab.page.click(".cb-pause")
        tab.page.wait_for_function("!cbviz.state().playing")
    # One goes on; then everybody's page is held against their own run.
    runs = [saved_file(cache, run_of(t)) for t in tabs]
    assert len(set(runs)) == len(SEEDS)
    ends = [settled(t, run) for t, run in zip(tabs, runs, strict=True)]
    tabs[2].step(ends[2] + 3)
    ends[2] += 3
    assert [settled(t, run) for t, run in zip(tabs, runs, strict=True)] == ends
    traces = [load(run) for run in runs]
    for tab, trace, seed in zip(tabs, traces, SEEDS):
        assert (trace.header.runner, trace.header.config["seed"]) == ("torch", seed)
        assert_drawn(tab.state(), trace)
        assert tab.page.evaluate("cbviz.text('r1')") == "".join(trace.state().requests["r1"].output_texts)
    # The same link gives the same words, whatever the four others do at the time; another link gives others.
    said = [{rid: q.output_token_ids for rid, q in t.state(30).requests.items()} for t in traces]
    assert said[0] == said[4]
    assert sum(map(len, said[0].values())) > 30
    assert len({json.dumps(s) for s in said}) == len(set(SEEDS))
    # Processes of their own, and the weights in memory once.
    students = list(kernels(server))
    assert len(students) == len(SEEDS)
    memory = [p.memory_full_info() for p in students]
    told = {
        "pss_mb": [round(m.pss / MB) for m in memory],
        "uss_mb": [round(m.uss / MB) for m in memory],
        "rss_mb": [round(m.rss / MB) for m in memory],
        "server_uss_mb": round(psutil.Process(server.pid).memory_full_info().uss / MB),
        "steps": ends,
    }
    with capsys.disabled():
        print(f"\nmemory of {len(students)} kernels with the real model: {json.dumps(told)}")
    shared = [m.rss - m.uss for m in memory]
    assert min(shared) > 200 * MB  # the weights' pages are common to all,
    assert max(m.pss - m.uss for m in memory) < min(shared) / 3  # each pays for a share of them,
    assert (
        max(m.uss for m in memory) < 500 * MB
    )  # and less for itself than a copy of them would take (one kernel alone has 672)
