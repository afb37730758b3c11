"""A beam search in the explorer: its words stand there while it goes on, marked as not final, and its outcome
when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbviz import events as ev
from cbviz.trace import Cursor, Trace
from tests.browser.conftest import newest_run

pytestmark = pytest.mark.browser
ROWS = """rows => rows.map(r => [r.querySelector('.cb-chip').textContent.trim(), [...r.querySelectorAll('.cb-words span')].map(s => s.textContent).join(''),
 r.querySelector('.cb-said .cb-note:last-child').textContent])"""


def told(trace: Trace, step: int) -> dict[str, str]:
    return {r.request_id: "".join(r.output_texts) for r in trace.state(Cursor(step)).by_index}


def test_words_of_beams(voila: str, cache: Path, open_tab: Callable[..., Any]) -> None:
    tab = open_tab(f"{voila}?scenario=&model=tiny-moe")
    tab.ready()
    page = tab.page
    page.fill(".cb-prompt", "Once upon a time")
    page.select_option(".cb-answerway", "beams")
    assert page.input_value(".cb-answers") == "4"  # a beam alone is no search
    page.fill(".cb-maxtokens", "6")
    page.click(".cb-add")
    page.wait_for_function(
        "document.querySelector('.cb-promptbox').textContent.includes('joins the next step')"
    )
    tab.step(3)

    def rows() -> list[tuple[str, str, str]]:
        return [(i, words, note) for i, words, note in page.eval_on_selector_all(".cb-textrow", ROWS)]

    page.wait_for_function(
        "document.querySelectorAll('.cb-textrow').length === 4 && "
        "document.querySelector('.cb-texts').textContent.includes('not final')"
    )
    trace = newest_run(cache)
    early = rows()
    assert {i: words for i, words, _ in early} == told(trace, 3)
    best = max(trace.state(Cursor(3)).by_index, key=lambda r: r.beam_score or 0.0).request_id
    assert [i for i, _, note in early if "the best of 4 so far, not final" in note] == [best]
    assert all("of 4 so far, not final" in note for _, _, note in early)
    tab.step(6)
    page.wait_for_function("!document.querySelector('.cb-texts').textContent.includes('not final')")
    trace = newest_run(cache)
    assert any(isinstance(e, ev.BeamsEnded) for e in trace.record(6).events)
    late = rows()
    assert {i: words for i, words, _ in late} == told(trace, 6)
    assert (late[0][0], late[0][2]) == (trace.state().by_index[0].request_id, " – the best of 4")
    page.evaluate("cbviz.app.seek(3)")
    page.wait_for_function("document.querySelector('.cb-texts').textContent.includes('not final')")
    assert sorted(rows()) == sorted(early)
