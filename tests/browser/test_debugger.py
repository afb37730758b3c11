"""The debugger in a real browser: fork, rewind and undo, breakpoints, comparison, events, accounts,
questions. Each is read back out of the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cbviz.trace import Cursor, compare, explain, load, why_block, why_waiting
from cbviz.trace.explain import explain_event
from tests.browser.conftest import Tab, assert_drawn, run_of, saved_file
from tests.browser.test_voila import own_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("heavy"),
]
Open = Callable[..., Tab]


def fork(tab: Tab, name: str, **changes: str) -> None:
    """Forks at the cursor through the form; the new branch is shown."""
    page = tab.page
    page.click(".cb-fork")
    page.wait_for_selector(".cb-fork-policy")
    for field, value in changes.items():
        control = page.locator(f".cb-fork-{field}")
        control.select_option(value) if control.evaluate("e => e.tagName") == "SELECT" else control.fill(
            value
        )
    if name:
        page.fill(".cb-fork-name", name)
    page.click(".cb-fork-create")
    page.wait_for_function(
        "n => cbviz.state().branch === n", arg=name or ", ".join(f"{k}={v}" for k, v in changes.items())
    )
    page.wait_for_selector(".cb-forkpop", state="hidden")


def finish_all(tab: Tab) -> None:
    """In the comparison: runs every branch to its end."""
    page = tab.page
    while page.locator(".cb-finish").count():
        n = page.locator(".cb-finish").count()
        page.locator(".cb-finish").first.click()
        page.wait_for_function(
            "n => !cbviz.app.live.loading && document.querySelectorAll('.cb-finish').length < n", arg=n
        )


def show(tab: Tab, name: str) -> None:
    tab.page.click(".cb-branch")
    tab.page.click(f"[data-branch='{name}'] .cb-branch-show")
    tab.page.wait_for_function("n => cbviz.state().branch === n", arg=name)


def lane(tab: Tab, name: str) -> int:
    return int(tab.page.get_attribute(f".cb-lane[data-run='{name}']", "data-step") or -1)


def test_fork_compare_rewind_and_undo(voila: str, cache: Path, open_tab: Open) -> None:
    tab = open_tab(f"{voila}?scenario=preemption")
    tab.ready()
    page = tab.page
    tab.step(12)
    parent = saved_file(cache, run_of(tab))
    page.click(".cb-fork")
    page.wait_for_selector(".cb-fork-num_blocks")
    assert page.locator(".cb-fork-num_blocks").is_enabled()
    assert page.locator(".cb-fork-modelled_device").is_enabled()
    page.fill(".cb-fork-max_num_seqs", "0")
    page.click(".cb-fork-create")
    page.wait_for_selector(".cb-fork-error:visible")
    assert "the least is 1" in page.inner_text(".cb-fork-error")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className").find("cb-fork") >= 0
    fork(tab, "", policy="sjf")
    assert tab.state()["step"] == 12
    tab.step(14)
    page.wait_for_function(
        "path => !location.href.includes(path)", arg=parent.stem
    )  # the address follows the branch
    assert len(load(parent)) == 12
    page.keyboard.press("Shift+C")
    page.wait_for_selector(".cb-lane")
    assert "equal as far as both have come" in page.inner_text(".cb-pairs")
    finish_all(tab)
    a, b = load(parent), own_run(tab, cache)
    truth = compare(a, b, ("main", "policy=sjf"))
    page.wait_for_selector(".cb-goparting")
    told = page.inner_text(".cb-pairs")
    assert truth.proof in told
    assert truth.parting is not None
    assert f"Schedules part at step {truth.parting.step}" in told
    for cause in truth.causes:
        assert str(cause) in told
    page.click(".cb-goparting")
    tab.at(truth.parting.step)
    assert lane(tab, "main") == lane(tab, "policy=sjf") == truth.parting.step
    page.locator(".cb-scrub").fill("20")  # the page's cursor takes them along
    page.wait_for_function("document.querySelector('.cb-lane').dataset.step === '20'")
    page.locator(".cb-cmp-scrub").fill("50")  # and theirs the page's
    tab.at(50)
    page.select_option(".cb-cmp-align", "time")
    page.locator(".cb-cmp-scrub").fill("150")
    there = page.evaluate("JSON.stringify(cbviz.app.run.step)")
    assert lane(tab, "main") == 150
    tab.at(lane(tab, "policy=sjf"))
    assert int(there) <= len(b)
    page.keyboard.press("Escape")
    page.wait_for_selector(".cb-compare", state="hidden")
    # Rewind the branch, go on otherwise, and undo.
    before = b.records
    page.locator(".cb-scrub").fill("30")
    tab.at(30)
    page.click(".cb-rewind")
    page.wait_for_function("cbviz.state().steps === 30")
    assert_drawn(tab.state(), own_run(tab, cache))
    page.wait_for_selector(".cb-banner:visible")
    assert "0 KV blocks computed again" in page.inner_text(".cb-banner")
    page.click(".cb-banner .cb-btn:has-text('Undo')")
    page.wait_for_function(f"cbviz.state().steps === {len(before)}")
    tab.at(len(before))
    assert_drawn(tab.state(), b)
    # Branches: renamed and dropped.
    page.click(".cb-branch")
    page.click("[data-branch='policy=sjf'] .cb-branch-rename")
    page.fill("[data-branch='policy=sjf'] .cb-branch-new", "rewound")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-branch='rewound']")
    page.click("[data-branch='rewound'] .cb-branch-drop")
    page.click("[data-branch='rewound'] .cb-branch-drop")
    page.wait_for_selector("[data-branch='rewound']", state="detached")
    page.keyboard.press("Escape")
    show(tab, "main")
    page.wait_for_function(f"cbviz.state().steps === {len(a)}")


@pytest.mark.parametrize("model", ["sim", pytest.param("smollm2", marks=pytest.mark.model)])
def test_breakpoints_watches_and_why(voila: str, cache: Path, open_tab: Open, model: str) -> None:
    tab = open_tab(f"{voila}?scenario=preemption&model={model}", color_scheme="dark")
    tab.ready()
    page = tab.page
    page.keyboard.press("Shift+B")
    page.wait_for_selector(".cb-breakpop:visible")
    page.select_option(".cb-break-event", "preempted")
    page.click(".cb-break-add")
    page.wait_for_selector("[data-break='preempted']")
    page.fill(".cb-break-when", "nobody > 3")
    page.click(".cb-break-addwhen")
    page.wait_for_selector(".cb-break-error:visible")
    assert "nobody is not known" in page.inner_text(".cb-break-error")
    page.fill(".cb-break-when", "num_waiting + num_running")
    page.click(".cb-watch-add")
    page.wait_for_selector(".cb-breakpop [data-watch]")
    page.fill(".cb-break-kv", "50")
    page.click(".cb-break-addkv")
    page.wait_for_selector("[data-break='KV above 50 %']")
    page.locator("[data-break='KV above 50 %'] input").uncheck()
    page.click(".cb-run-on")
    page.wait_for_function(
        "cbviz.app.stop && !cbviz.state().playing && cbviz.state().step === cbviz.app.stop.step"
    )
    first = tab.state()["step"]
    trace = own_run(tab, cache)
    assert len(trace) == first
    why = page.inner_text(".cb-why")
    assert "Stopped: preempted" in why
    assert str(explain(trace, first)[0]) in why
    assert f"step {first}" in page.inner_text(".cb-status")
    assert "stopped: preempted" in page.inner_text(".cb-status")
    state = trace.state()
    page.wait_for_function(
        "n => document.querySelector('.cb-watched').textContent.includes(n)",
        arg=str(len(state.waiting) + len(state.running)),
    )
    # A waiting request and a block are asked about; the answer follows the cursor.
    rid = state.waiting[0]
    page.click(f".cb-queue [data-request='{rid}']")
    page.wait_for_selector(".cb-about:visible")
    for s in why_waiting(trace, first, rid).sentences:
        assert str(s) in page.inner_text(".cb-about")
    spot = page.evaluate("""() => {
      const { frame, columns } = cbviz.app.views.blocks;
      const { _size: area, xaxis, yaxis } = frame.plotted;
      const box = frame.plot.getBoundingClientRect();
      return [box.left + area.l + xaxis.d2p(5 % columns), box.top + area.t + yaxis.d2p(Math.floor(5 / columns))];
    }""")
    page.mouse.click(*spot)
    page.wait_for_function("document.querySelector('.cb-about').textContent.includes('Block 5')")
    for s in why_block(trace, first, 5).sentences:
        assert str(s) in page.inner_text(".cb-about")
    # Events of the step, one by one, with the block map.
    record = trace.record(first)
    for k in (len(record.events) - 1, len(record.events) - 2):
        page.click(".cb-event-back")
        page.wait_for_function(f"cbviz.state().event === {k}")
        page.wait_for_function(
            "t => document.querySelector('.cb-moment').textContent === t",
            arg=f"Event {k} of {len(record.events)}: {explain_event(trace, record, k - 1)}",
        )
        assert_drawn(tab.state(), trace)
    page.click(".cb-event-on")
    page.keyboard.press(".")
    page.wait_for_function("cbviz.state().event === null")
    # On to the next, and back to the last; Play over recorded steps stops there too.
    page.keyboard.press("Shift+N")
    page.wait_for_function(f"cbviz.app.stop && cbviz.app.stop.step > {first} && !cbviz.state().playing")
    page.keyboard.press("Shift+L")
    tab.at(first)
    page.keyboard.press("Home")
    tab.at(0)
    page.select_option(".cb-speed", "0")
    page.click(".cb-play")
    page.wait_for_function(f"cbviz.state().step === {first} && !cbviz.state().playing")
    # A reload keeps them.
    page.wait_for_timeout(600)
    page.reload(wait_until="commit")
    tab.ready(first)
    page.wait_for_function("document.querySelector('.cb-break .cb-count').textContent === '1'")
    page.click(".cb-break")
    assert not page.locator("[data-break='KV above 50 %'] input").is_checked()


def test_accounts_are_drawn_to_the_last_token(voila: str, cache: Path, open_tab: Open) -> None:
    tab = open_tab(f"{voila}?scenario=preemption&discipline=static-padded", color_scheme="light")
    tab.ready()
    page = tab.page
    tab.step(10)
    page.click(".cb-accounts")
    page.wait_for_selector("[data-account='slots']")
    trace = own_run(tab, cache)

    def shown(name: str) -> dict[str, int]:
        pairs = page.evaluate(
            f"[...document.querySelectorAll(\"[data-account='{name}'] [data-part]\")].map(e => "
            "[e.dataset.part, e.querySelector('b').textContent])"
        )
        return {k: int(v.replace(",", "")) for k, v in pairs}

    for step in (10, 4):
        page.locator(".cb-scrub").fill(str(step))
        tab.at(step)
        page.wait_for_function(f"cbviz.app.account.step === {step} && cbviz.app.account.run")
        r = trace.record(step)
        assert shown("tokens") == {
            p: getattr(r.tokens, p) for p in ("total", "useful", "recomputed", "padded", "rejected")
        }
        assert shown("slots") == {
            p: getattr(r.slots, p)
            for p in ("total", "used", "partly_empty", "reserved", "cached", "free", "fragmented")
        }
        assert shown("run-tokens")["total"] == sum(x.tokens.total for x in trace.records[:step])
    assert page.locator("[data-scheme]").count() >= 3
    page.click(".cb-util .cb-max")
    assert page.locator("[data-scheme='exact']").is_visible()
    page.keyboard.press("Escape")
    page.click(".cb-accounts")
    page.wait_for_selector(".cb-account", state="hidden")


def test_everything_new_is_reached_by_keyboard_and_named(voila: str, open_tab: Open) -> None:
    tab = open_tab(f"{voila}?scenario=burst", color_scheme="light")
    tab.ready()
    page = tab.page
    tab.step(6)
    page.keyboard.press("ArrowLeft")
    tab.at(5)
    nameless = """() => [...document.querySelectorAll('.cb-root :is(button, input, select, textarea, summary)')]
      .filter(e => e.checkVisibility() && !(e.ariaLabel || e.textContent.trim() || e.labels?.length || e.title)).map(e => e.className)"""
    page.keyboard.press("Shift+F")
    page.wait_for_selector(".cb-fork-policy")
    assert page.evaluate("document.querySelector('.cb-forkpop').contains(document.activeElement)")
    assert page.evaluate(nameless) == []
    for _ in range(14):  # by Tab to the button that creates
        if page.evaluate("document.activeElement.classList.contains('cb-fork-create')"):
            break
        page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_function("cbviz.state().branch === 'fork'")
    page.wait_for_selector(".cb-forkpop", state="hidden")
    page.keyboard.press("Shift+B")
    page.wait_for_selector(".cb-breakpop:visible")
    assert page.evaluate(nameless) == []
    page.keyboard.press("Escape")
    page.focus(".cb-branch")
    page.keyboard.press("Enter")
    page.wait_for_selector(".cb-branchpop:visible")
    assert page.evaluate(nameless) == []
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.classList.contains('cb-branch')")
    page.keyboard.press("Shift+C")
    page.wait_for_selector(".cb-lane")
    assert page.evaluate(nameless) == []
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    keys = page.inner_text(".cb-keys")
    for word in ("fork here, breakpoints, compare", "next stop", "rewind", "accounts", "event"):
        assert word in keys
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 420, "height": 900})
    page.wait_for_selector(".cb-root.cb-narrow")
    page.wait_for_function("document.querySelector('.cb-root').scrollWidth <= 420")


@pytest.mark.model
def test_a_fork_of_the_real_model_that_changes_nothing_is_equal(
    voila: str, cache: Path, open_tab: Open
) -> None:
    tab = open_tab(f"{voila}?scenario=burst&model=smollm2")
    tab.ready()
    page = tab.page
    tab.step(10)
    # Rewind: the live engine goes back, its KV with it; the old run is kept and equal where it was.
    page.locator(".cb-scrub").fill("6")
    tab.at(6)
    page.click(".cb-rewind")
    page.wait_for_function("cbviz.state().steps === 6 && !cbviz.app.live.loading")
    assert re.search(r"\d+ KV blocks? computed again", page.inner_text(".cb-banner"))
    tab.step(16)
    parent = own_run(tab, cache)
    assert parent.header.runner == "torch"
    page.locator(".cb-scrub").fill("8")
    tab.at(8)
    fork(tab, "again")
    assert re.search(r"[1-9]\d* KV blocks? computed again", page.inner_text(".cb-banner"))
    tab.step(16)
    branch = own_run(tab, cache)
    assert compare(parent, branch).equal
    assert [r.measured_s for r in branch] == [r.measured_s for r in parent]  # the parent's own times
    assert_drawn(tab.state(), branch)
    page.click(".cb-compare-open")
    page.wait_for_selector(".cb-lane")
    page.click("[data-pick='branch:main to step 10']")
    page.wait_for_selector("[data-pair='main to step 10']")
    told = page.inner_text("[data-pair='again']")
    n = sum(len(r.output_token_ids) for r in parent.state(Cursor(16)).by_index)
    assert "✓ outputs are equal" in told
    assert f"{n:,} tokens" in told
    assert "schedules and block tables are equal, step by step" in told
