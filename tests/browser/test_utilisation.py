"""The utilisation panel in a real browser: lines, roofline and the inside of a step are drawn, and say what
the record holds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cbviz.trace.utilisation import phases
from tests.browser.conftest import Tab
from tests.browser.test_voila import own_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("heavy"),
]
Open = Callable[..., Tab]


def points(tab: Tab) -> list[dict[str, float]]:
    """What the roofline's traces hold, read from the plot itself."""
    return tab.page.evaluate(
        """() => document.querySelector('.cb-roof .js-plotly-plot').data.flatMap((d, i) => i ? d.x.map((x, j) => ({ kind: i - 1, x, y: d.y[j] })) : [])"""
    )


def test_the_roofline_draws_every_step_and_leads_back_to_it(voila: str, cache: Path, open_tab: Open) -> None:
    tab = open_tab(f"{voila}?scenario=burst", color_scheme="light")
    tab.ready()
    page = tab.page
    tab.step(12)
    page.click(".cb-rooftab")
    page.wait_for_function(
        "cbviz.app.views?.roofline.points.length > 0 && document.querySelector('.cb-roof "
        ".js-plotly-plot').data[0].x.length === 3"
    )
    trace = own_run(tab, cache)
    wanted = sorted(
        (("decode", "prefill").index(p.kind), p.intensity, p.flops_s) for r in trace for p in phases(r)
    )
    page.wait_for_function(f"cbviz.app.views?.roofline.points.length === {len(wanted)}")
    drawn = sorted((p["kind"], p["x"], p["y"]) for p in points(tab))
    assert len(drawn) == len(wanted)
    for a, b in zip(drawn, wanted):
        assert a == pytest.approx(b, rel=1e-9)
    assert page.inner_text(".cb-utiltext").startswith(
        trace.records[11].chunks and phases(trace.record(12))[0].kind
    )
    assert "limit" in page.get_attribute(".cb-utiltext", "title")
    # The pointer on a point says which step and who; a click shows that step.
    where = page.evaluate(
        "() => { const view = cbviz.app.views.roofline, box = view.frame.plot.getBoundingClientRect();"
        "const [x, y] = view.placeOf(view.frame.geometry(), view.points[0]); return [box.x + x, box.y + y]; }"
    )
    page.mouse.move(*where)
    tip = page.locator(".cb-roof .cb-tip")
    tip.wait_for(state="visible")
    assert "modelled" in tip.inner_text()
    assert any(c.request_id in tip.inner_text() for r in trace for c in r.chunks)
    page.mouse.click(*where)
    page.wait_for_function("cbviz.state().step < 12")
    page.click(".cb-rooftab")
    page.wait_for_selector(".cb-roof", state="hidden")
    page.keyboard.press("Shift+I")
    page.wait_for_selector(".cb-inside")
    assert "choose the real model" in page.inner_text(".cb-inside-note")
    assert page.locator(".cb-watch-inside").is_hidden()


@pytest.mark.model
def test_a_step_of_the_real_model_is_watched_from_inside(voila: str, cache: Path, open_tab: Open) -> None:
    tab = open_tab(f"{voila}?scenario=burst&model=smollm2", color_scheme="light")
    tab.ready()
    page = tab.page
    tab.step(2)
    page.click(".cb-insidetab")
    page.click(".cb-watch-inside")
    page.wait_for_function("cbviz.app.inside && cbviz.app.inside.profile && cbviz.app.inside.step === 3")
    page.wait_for_selector(".cb-inside-row")
    record = own_run(tab, cache).record(3)
    assert record.profile is not None
    names = page.evaluate("[...document.querySelectorAll('.cb-inside-row span')].map(e => e.textContent)")
    assert set(names) <= set(record.profile.names) and len(names) > 3
    painted = page.evaluate(
        "() => { const c = document.querySelector('.cb-lanes'), d = c.getContext('2d').getImageData(0, 0, "
        "c.width, c.height).data, s = new Set(); "
        "for (let i = 0; i < d.length; i += 4) s.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return s.size; }"
    )
    assert painted > 4
    tab.step(4)
    page.wait_for_function("/was not watched/.test(document.querySelector('.cb-inside-note').textContent)")
    page.click(".cb-inside-steps button")
    page.wait_for_function("cbviz.state().step === 3")
    page.click(".cb-insidetab")
    page.click(".cb-util .cb-max")
    page.click(".cb-calibrate")
    page.wait_for_function("!cbviz.app.live.loading && /^Peaks of/.test(cbviz.app.live.banner || '')")
    assert page.evaluate("cbviz.app.run.meta.peaks_measured && cbviz.app.run.meta.peak_bytes_s > 0")
