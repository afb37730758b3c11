"""The explorer under Voilà, driven by hand: what is drawn is the session's state, and every control does what
it says.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cbviz.trace import Trace, load
from tests.browser.conftest import Address, Tab, assert_drawn, kernels, run_of, saved_file

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("heavy"),
]
Open = Callable[..., Tab]


def own_run(tab: Tab, cache: Path) -> Trace:
    """The trace that this page's session writes: the page's address names it."""
    return load(saved_file(cache, run_of(tab)))


def type_prompt(tab: Tab, text: str, max_tokens: int) -> str:
    """Adds a request through the prompt box; returns its id."""
    tab.page.fill(".cb-prompt", text)
    tab.page.fill(".cb-maxtokens", str(max_tokens))
    tab.page.click(".cb-add")
    tab.page.wait_for_function("document.querySelector('.cb-prompt').value === ''")  # it was taken
    return str(tab.page.evaluate("cbviz.app.added"))


def join_and_abort(tab: Tab, cache: Path) -> None:
    """A prompt typed while playing joins; aborted, it gives its blocks back."""
    page = tab.page
    page.select_option(".cb-speed", "10")
    page.click(".cb-play")
    page.wait_for_function("cbviz.state().playing")
    rid = type_prompt(tab, "Name three rivers, please, and say where each of them begins.", 400)
    page.wait_for_function(
        "id => cbviz.state().running.includes(id) && cbviz.state().requests[id].blocks.length > 0", arg=rid
    )
    page.click(".cb-pause")
    page.wait_for_function("!cbviz.state().playing")
    held = tab.state()["requests"][rid]["blocks"]
    assert held
    page.click(f".cb-queue [data-request='{rid}']")
    page.wait_for_selector(".cb-abort:not([disabled]):visible")
    page.click(".cb-abort")
    now = tab.state()["step"]
    page.click(".cb-step")
    page.wait_for_function(f"cbviz.state().step > {now}")
    drawn = tab.state()
    assert drawn["requests"][rid]["state"] == "aborted"
    assert drawn["requests"][rid]["blocks"] == []
    assert rid not in [drawn["owners"][b] for b in held]
    assert_drawn(drawn, own_run(tab, cache))


def reload_shows_the_same(tab: Tab) -> None:
    before = tab.state()
    tab.page.wait_for_timeout(600)  # the address follows the cursor a moment later
    tab.page.reload(wait_until="commit")
    tab.ready(before["step"])
    after = tab.state()
    for key in ("step", "steps", "requests", "owners", "refs", "cached", "waiting", "running"):
        assert after[key] == before[key], key


def test_thirty_steps_and_back(voila: str, cache: Path, open_tab: Open) -> None:
    tab = open_tab(f"{voila}?scenario=preemption")
    tab.ready()
    assert tab.page.locator(".cb-hint").is_visible()
    tab.step(30)
    assert not tab.page.locator(".cb-hint").is_visible()
    trace = own_run(tab, cache)
    assert len(trace) == 30
    assert_drawn(tab.state(), trace)
    status = tab.page.inner_text(".cb-status")
    assert re.search(r"step 30\b", status)
    assert re.search(r"requests \d+/10\b", status)
    for _ in range(7):
        tab.page.click(".cb-back")
    tab.at(23)
    assert_drawn(tab.state(), trace)
    tab.page.locator(".cb-scrub").fill("11")
    tab.at(11)
    assert_drawn(tab.state(), trace)
    reload_shows_the_same(tab)
    tab.page.click(".cb-end")
    tab.at(30)
    tab.step(70)  # on, past the first preemption
    trace = own_run(tab, cache)
    assert_drawn(tab.state(), trace)
    assert any(q["num_preemptions"] for q in tab.state()["requests"].values())
    assert "preempted" in tab.page.inner_text(".cb-timeline .cb-legend")


def test_a_prompt_joins_while_playing_and_is_aborted(voila: str, cache: Path, open_tab: Open) -> None:
    tab = open_tab(f"{voila}?scenario=burst&max_num_seqs=20")
    tab.ready()
    join_and_abort(tab, cache)
    reload_shows_the_same(tab)


@pytest.mark.model
def test_the_real_model(voila: str, cache: Path, open_tab: Open) -> None:
    tab = open_tab(f"{voila}?scenario=chat&model=smollm2")
    tab.ready()
    tab.step(30)
    trace = own_run(tab, cache)
    assert trace.header.runner == "torch"
    assert_drawn(tab.state(), trace)
    said = tab.page.evaluate("cbviz.text('r1')")
    assert said == "".join(trace.state().requests["r1"].output_texts)
    assert re.search(r"[a-z]{3}", said)
    assert "measured" in tab.page.inner_text(".cb-status")
    join_and_abort(tab, cache)
    reload_shows_the_same(tab)


def test_words_that_look_like_markup_are_words(voila: str, open_tab: Open) -> None:
    tab = open_tab(f"{voila}?scenario=")
    tab.ready()
    text = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"
    rid = type_prompt(tab, text, 5)
    tab.step(2)
    tab.page.click(f".cb-queue [data-request='{rid}']")
    assert text in tab.page.inner_text(".cb-prompttext")
    assert tab.page.evaluate("document.querySelectorAll('.cb-root img, .cb-texts b').length") == 0
    assert tab.page.title() != "owned"


def test_mistakes_are_said_at_their_field(voila: str, open_tab: Open) -> None:
    tab = open_tab(f"{voila}?scenario=burst")
    tab.ready()
    tab.step(3)
    page = tab.page
    page.click(".cb-add")
    page.wait_for_selector("#cb-prompt-e:visible")
    assert "empty" in page.inner_text("#cb-prompt-e")
    page.fill("#cb-f-max_num_seqs", "0")
    page.press("#cb-f-max_num_seqs", "Tab")
    page.wait_for_selector("#cb-f-max_num_seqs-e:visible")
    assert "the least is 1" in page.inner_text("#cb-f-max_num_seqs-e")
    page.fill("#cb-f-num_blocks", "1")
    page.press("#cb-f-num_blocks", "Tab")
    page.click(".cb-apply")
    page.wait_for_selector("#cb-f-num_blocks-e:visible")
    assert "the least is 2" in page.inner_text("#cb-f-num_blocks-e")
    assert tab.state()["step"] == 3
    page.fill("#cb-f-max_num_seqs", "2")
    page.fill("#cb-f-num_blocks", "40")
    page.press("#cb-f-num_blocks", "Tab")
    page.click(".cb-apply")
    page.wait_for_function("cbviz.state().owners.length === 40 && cbviz.state().step === 0")
    tab.step(2)
    page.fill(".cb-prompt", "word " * 2000)
    page.click(".cb-add")
    page.wait_for_function(
        "document.querySelector('#cb-prompt-e').textContent !== '' || cbviz.app.live.num_requests > 15"
    )
    tab.step(4)
    assert page.locator(".cb-scenario").input_value() == "burst"


def test_keyboard_theme_and_panels(voila: str, open_tab: Open) -> None:
    tab = open_tab(f"{voila}?scenario=chat", color_scheme="light", reduced_motion="reduce")
    tab.ready()
    page = tab.page
    page.keyboard.press("ArrowRight")
    tab.at(1)
    page.keyboard.press("ArrowRight")
    tab.at(2)
    page.keyboard.press("ArrowLeft")
    tab.at(1)
    page.keyboard.press("End")
    tab.at(2)
    page.keyboard.press("Home")
    tab.at(0)
    page.keyboard.press("End")
    page.keyboard.press(" ")
    page.wait_for_function("cbviz.state().step > 6")
    page.keyboard.press(" ")
    page.wait_for_function("!cbviz.state().playing")
    page.keyboard.press(",")
    page.wait_for_function("cbviz.state().event !== null")
    page.keyboard.press(".")
    page.wait_for_function("cbviz.state().event === null")
    page.keyboard.press("?")
    assert page.locator(".cb-keys").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator(".cb-keys").is_visible()
    page.keyboard.press("/")
    step = tab.state()["step"]
    page.keyboard.type("a b ? /")  # letters in the box are letters
    assert page.locator(".cb-prompt").input_value() == "a b ? /"
    assert tab.state()["step"] == step
    page.keyboard.press("Escape")
    page.click(".cb-blocks .cb-max")
    page.wait_for_function("document.querySelector('.cb-blocks').getBoundingClientRect().width > 1000")
    page.keyboard.press("Escape")
    assert page.get_attribute(".cb-root", "data-theme") == "light"
    page.click(".cb-theme")
    assert page.get_attribute(".cb-root", "data-theme") == "dark"
    page.focus(".cb-timeline .cb-frame")
    page.keyboard.press("ArrowDown")
    page.wait_for_function("cbviz.state().selected !== null")
    page.set_viewport_size({"width": 420, "height": 900})
    page.wait_for_selector(".cb-root.cb-narrow")
    page.wait_for_function("document.querySelector('.cb-root').scrollWidth <= 420")
    nameless = page.evaluate("""() => [...document.querySelectorAll('.cb-root :is(button, input, select, textarea)')]
      .filter(e => e.checkVisibility() && !(e.ariaLabel || e.textContent.trim() || e.labels?.length || e.title)).map(e => e.className)""")
    assert nameless == []


def test_every_cell_is_painted_where_the_axes_say(voila: str, open_tab: Open) -> None:
    """Reads pixels back: for each request and step on screen, the canvas holds the state's colour at Plotly's
    own position.
    """
    tab = open_tab(f"{voila}?scenario=preemption", device_scale_factor=1.25)
    tab.ready()
    tab.step(55)
    wrong = tab.page.evaluate("""() => {
      const { run, theme, views } = cbviz.app;
      const { frame } = views.timeline;
      const { xaxis, yaxis } = frame.plotted;
      const { deviceWidth, deviceHeight } = frame.geometry();
      const image = frame.underContext.getImageData(0, 0, frame.under.width, frame.under.height);
      const pixels = new Uint32Array(image.data.buffer);
      const RANK = [0, 3, 10, 6, 14, 13, 1, 4, 5, 11, 12, 2, 9, 7, 8];
      let seen = 0, wrong = 0;
      for (let row = 0; row < run.ids.length; row++) for (let step = 1; step <= run.steps; step++) {
        const x = Math.floor(xaxis.d2p(step) * devicePixelRatio);
        const y = Math.floor(yaxis.d2p(row) * devicePixelRatio);
        if (x < 0 || y < 0 || x >= deviceWidth || y >= deviceHeight) continue;
        seen++;
        const rank = RANK[run.timeline.at(row, step).state], pixel = pixels[y * deviceWidth + x];
        if (pixel !== theme.states.plain[rank] && pixel !== theme.states.texture[rank]) wrong++;
      }
      return [seen, wrong];
    }""")
    assert wrong[0] > 300
    assert wrong[1] == 0


def test_a_closed_page_gives_its_kernel_back(voila: Address, open_tab: Open) -> None:
    before = kernels(voila)
    tab = open_tab(f"{voila}?scenario=chat")
    tab.ready()
    mine = kernels(voila) - before
    assert len(mine) == 1
    time.sleep(5)
    assert mine <= kernels(voila)  # an open page keeps its kernel
    tab.page.goto("about:blank")
    for _ in range(150):
        if not mine & kernels(voila):
            return
        time.sleep(0.2)
    raise AssertionError("30 s after its page was closed the kernel is still there")


def test_a_page_whose_kernel_ended_says_so_and_comes_back(voila: Address, open_tab: Open) -> None:
    before = kernels(voila)
    tab = open_tab(f"{voila}?scenario=chat")
    tab.ready()
    tab.step(4)
    tab.page.wait_for_timeout(600)  # the address follows the cursor a moment later
    assert tab.page.locator("#cb-ended").count() == 0
    (mine,) = kernels(voila) - before
    mine.kill()
    tab.page.wait_for_selector("#cb-ended:visible")
    tab.page.wait_for_function("document.querySelector('#cb-ended').innerText.includes('has ended')")
    tab.page.click("#cb-ended button")
    tab.page.wait_for_function("!document.querySelector('#cb-ended')")
    tab.ready(4)
    assert tab.state()["step"] == 4


def test_a_widget_that_comes_in_the_last_moment_is_drawn(voila: Address, open_tab: Open) -> None:
    """The page looks for its widget for two seconds, with a nap between two looks; here it sleeps through the
    widget's arrival and the end of its time.
    """
    tab = open_tab("about:blank")
    tab.page.add_init_script("""(() => {
      const later = setTimeout, now = Date.now, there = () => jupyterapp.widgetManager.restoredStatus;
      let late = 0;
      Date.now = () => now() + late;
      window.setTimeout = (f, ms, ...more) => {
        if (ms !== 100 || !globalThis.jupyterapp || there()) return later(f, ms, ...more);
        const wake = () => there() ? (late = 3000, f(...more)) : later(wake, 5);
        return later(wake, 5);
      };
    })()""")
    tab.page.goto(f"{voila}?scenario=chat", wait_until="commit")
    tab.ready()
