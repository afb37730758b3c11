"""The view "alone" through the player: what the page is sent, and what it is told where there is nothing to
compute.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from cbviz.app.alone import alone_message
from cbviz.model.loader import LoadedModel
from cbviz.session import Session
from tests.app.test_player import opened
from tests.model.test_invariance import company
from tests.model.test_precision import SHAPES, model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def smol() -> LoadedModel:
    return model(**SHAPES["as SmolLM2"])


def test_the_page_is_sent_the_map(smol: LoadedModel) -> None:
    s = company(smol, kernels="reference")

    async def go() -> None:
        async with opened(s) as (page, _):
            assert page.live["alone"] is True
            page.do("seek", step=4)
            await page.at(4)
            page.do("alone", id="r1")
            await page.until(lambda: "alone" in page.last, "the answer")
            m = page.last["alone"]
            assert json.loads(json.dumps(m, allow_nan=False)) == m
            assert (
                m["id"] == "r1"
                and not m["equal"]
                and not m["promised"]
                and m["step"] <= 4
                and m["rows"][0] > m["rows"][1]
            )
            assert len(m["apart"]) == len(m["ulps"]) == 2 and {len(x) for x in m["apart"]} == {
                s.trace.state().request("r1").num_computed_tokens
            }
            assert (
                max(x or 0 for row in m["apart"] for x in row) > 0
                and [o[1] for o in m["ops"]][-1] == "logits"
                and len(m["ops"]) == 21
            )
            assert (
                m["chunks"][0][0] == 0
                and len(m["tokens"]) == 6
                and "says the same 6 tokens" in m["sentences"][0]
            )
            assert page.live["loading"] is None and page.page.step == 4 and not page.said
            page.do("alone", id="nobody")
            await page.until(lambda: page.said, "the refusal")
            assert (
                page.said[-1]["cmd"] == "alone"
                and "nobody" in page.said[-1]["error"]
                and page.live["loading"] is None
            )

    asyncio.run(go())


def test_positions_that_are_gone_are_null_and_said(smol: LoadedModel) -> None:
    s = company(model(), kernels="reference", num_blocks=12, discipline="vllm", batch_invariant=True)
    messages = [alone_message(s.alone(rid)) for rid in s.request_ids]
    assert all(m["equal"] and m["promised"] for m in messages)
    gone = [m for m in messages if any(x is None for x in m["apart"][0])]
    assert gone and all("The cache no longer holds" in m["sentences"][-1] for m in gone)
    assert [[x is None for x in row] for row in gone[0]["apart"]] == [
        [x is None for x in row] for row in gone[0]["ulps"]
    ]


def test_the_simulator_has_nothing_to_show() -> None:
    async def go() -> None:
        async with opened(Session("article", runner="sim")) as (page, _):
            assert page.live["alone"] is False
            page.do("step")
            await page.at(1)
            page.do("alone", id="r0")
            await page.until(lambda: page.said, "the refusal")
            assert "computes no numbers that could differ" in page.said[-1]["error"]

    asyncio.run(go())
