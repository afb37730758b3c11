"""`cbviz explore` as a user starts it: a link with a token, nothing to type, and pages that load no script
but the server's own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.app.hostile import TOKEN, command_line
from tests.browser.conftest import Tab

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("heavy"),
]
READY = (
    "!!(globalThis.cbviz && cbviz.state() && cbviz.frames() > 0 && "
    "document.querySelector('.cb-step:not([disabled])'))"
)


def until(tab: Tab, condition: str) -> None:
    """Waits without Playwright's own waits, which evaluate text inside the page: the policy that is tested
    here forbids that.
    """
    end = time.monotonic() + 60
    while not tab.page.evaluate(condition):
        assert time.monotonic() < end, (condition, tab.errors, tab.page.inner_text("body")[:500])
        time.sleep(0.1)


def test_the_link_opens_the_explorer_under_a_strict_policy(
    tmp_path: Path, open_tab: Callable[..., Tab]
) -> None:
    with command_line(tmp_path) as server:
        link = re.search(r"http://127\.0\.0\.1:\d+/\S*", server.log.read_text("utf-8"))
        assert link is not None
        tab = open_tab(f"{link.group(0)}&scenario=chat")
        until(tab, READY)
        # The token has left the address; the browser has a cookie that no script can read.
        assert TOKEN not in tab.page.url
        cookies: list[dict[str, Any]] = tab.context.cookies()
        mine = next(c for c in cookies if c["name"] == f"cbviz-{server.port}")
        assert (mine["httpOnly"], mine["sameSite"]) == (True, "Lax")
        assert "cbviz-" not in tab.page.evaluate("document.cookie")
        # The page works.
        tab.page.click(".cb-step:visible")
        until(tab, "cbviz.state().step === 1")
        # A script that comes with data does not run, nor does text as code.
        before = list(tab.errors)
        tab.page.evaluate("""() => {
          const add = (html) => document.body.append(document.createRange().createContextualFragment(html));
          add("<script>globalThis.owned = 1</scr" + "ipt>");
          add("<img src=x onerror='globalThis.owned = 2'>");
          add("<iframe srcdoc='<script>parent.owned = 3</scr" + "ipt>'></iframe>");
          add("<a id=js href='javascript:globalThis.owned = 4'>x</a>");
          document.getElementById("js").click();
        }""")
        until(tab, "document.readyState === 'complete'")
        time.sleep(1)
        assert tab.page.evaluate("globalThis.owned ?? null") is None
        assert before == []
        assert any("Content Security Policy" in e for e in tab.errors)
        tab.forgiven = ("Content Security Policy", "Failed to load resource")
        # A reload, and a link without the token, are let in; neither leaves a kernel behind.
        for address in (tab.page.url, f"http://127.0.0.1:{server.port}/?scenario=burst"):
            tab.page.goto(address)
            until(tab, READY)
            server.until_kernels(1)
        # Another browser, without the token, is told what to do.
        other = open_tab(f"http://127.0.0.1:{server.port}/?scenario=burst")
        other.forgiven = ("403",)
        other.page.wait_for_selector("h1")
        assert "cbviz explore" in other.page.inner_text("body")
        assert server.kernels == 1
