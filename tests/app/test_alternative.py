"""What a notebook keeps of the explorer: small, harmless, and written again when the run has moved on."""

from __future__ import annotations

import base64
import gzip
import io
import re
from contextlib import nullcontext

import pytest
from PIL import Image

import cbviz as cb
from cbviz.app import alternative, snapshot
from cbviz.app.alternative import Alternative, picture, player, wanted
from cbviz.trace import Trace
from tests.browser.hostile import TEXTS


def run(scenario: str = "preemption", steps: int = 40) -> Trace:
    s = cb.Session(scenario, runner="sim")
    s.run(max_steps=steps)
    return s.trace


def page_in(html: str) -> str:
    """The page that the player's HTML carries."""
    found = re.search(r'data-cbviz-page="([^"]+)"', html)
    assert found is not None
    return gzip.decompress(base64.b64decode(found.group(1))).decode()


def test_the_player_is_one_page_of_less_than_a_megabyte_without_plotly() -> None:
    made = player(run(), "name")
    html = made["text/html"]
    assert len(html) < 300_000
    page = page_in(html)
    assert 'id="cbviz-run"' in page
    assert 'id="cbviz-plotly"' not in page
    assert "recorded at step 40" in html
    assert "recorded at step 40" in made["text/plain"]


def test_a_long_run_has_words_and_a_picture_but_no_player(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternative, "MOST_STEPS", 39)
    html = player(run(), "name")["text/html"]
    assert "data-cbviz-page" not in html
    assert "export_html" in html
    assert len(html) < 1000


def test_a_run_that_packs_too_large_has_words_and_no_player(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternative, "MOST_BYTES", 100_000)
    html = player(run(), "name")["text/html"]
    assert "data-cbviz-page" not in html
    assert "too large" in html


@pytest.mark.parametrize("steps", [1, 40, 148])
def test_the_picture_is_a_small_png_whose_lower_part_is_not_empty(steps: int) -> None:
    data = base64.b64decode(picture(run(steps=steps))["image/png"])
    assert len(data) < 60_000
    with Image.open(io.BytesIO(data)) as image:
        assert image.width == snapshot.WIDTH
        assert 300 < image.height < 900
        assert len(image.convert("RGB").getcolors(256) or []) > 5


def test_the_picture_takes_any_name() -> None:
    s = cb.Session(runner="sim", num_blocks=33)
    for text in TEXTS.values():
        s.add(text, max_tokens=3, request_id=text)
    s.run()
    assert snapshot.png(s.trace, TEXTS["script"]).startswith(b"\x89PNG")


def test_the_picture_of_a_trace_without_blocks_says_so_instead() -> None:
    trace = run()
    trace.header.capabilities = tuple(c for c in trace.header.capabilities if c != "blocks")
    assert snapshot.png(trace).startswith(b"\x89PNG")


def test_texts_of_a_run_are_no_markup_in_the_players_html() -> None:
    s = cb.Session(runner="sim")
    s.add(TEXTS["script"], max_tokens=3, request_id=TEXTS["markup"])
    s.run()
    html = player(s.trace, "name")["text/html"]
    assert html.count("<script") == 1
    assert "<img" not in html


def test_a_voila_page_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wanted()
    monkeypatch.setenv("SERVER_SOFTWARE", "voila/0.5.8")
    assert not wanted()


def test_outputs_are_due_when_the_run_has_moved_on(monkeypatch: pytest.MonkeyPatch) -> None:
    s = cb.Session("preemption", runner="sim")
    kept = Alternative(lambda: s.trace, nullcontext)
    shown: list[tuple[str, bool, list[str]]] = []
    monkeypatch.setattr(
        kept,
        "_display",
        lambda part, bundle, update=False: shown.append((part, update, sorted(bundle))),
    )
    kept._shown = True
    kept._after_cell()
    assert shown == []  # no step yet
    s.step()
    kept._after_cell()
    assert shown == [
        ("picture", True, ["image/png", "text/plain"]),
        ("player", True, ["text/html", "text/plain"]),
    ]
    kept._after_cell()
    assert len(shown) == 2
    s.step()
    kept._after_cell()
    assert len(shown) == 4
