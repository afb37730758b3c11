"""The view "Alone?" in the browser, with the real model: one press, and a request's numbers among others
stand against those it has alone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.conftest import Address, Tab

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.timeout(240)]


def test_a_request_alone_and_among_others(voila: Address, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(f"{voila}?scenario=chat&model=smollm2&seed=1")
    page = tab.page
    tab.ready()
    assert page.locator(".cb-alone-open:visible").count() == 0  # nobody is picked
    tab.step(6)
    page.evaluate("cbviz.app.select(0)")
    rid = tab.state()["selected"]
    page.click(".cb-alone-open:visible")
    page.wait_for_selector("dialog.cb-alone[open]")
    said = page.inner_text("dialog.cb-alone")
    assert (
        f"{rid} among others and alone" in said and "units in the last place" in said and "Operators:" in said
    )
    assert (f"{rid} alone is bit for bit {rid} among others" in said) == ("they promise that nothing" in said)
    box = page.locator(".cb-alonemap").bounding_box()
    assert box is not None and box["width"] > 300 and box["height"] > 60
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_function("document.querySelector('dialog.cb-alone').innerText.includes('layer ')")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.cb-alone", state="hidden")
    tab.step(7)  # the run goes on as if nothing had been
