"""A page that plays a session which other threads change: it follows, and page, state and trace go together."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path

import pytest

from cbviz.session import Session
from tests.app.page import assert_equal
from tests.app.test_player import opened
from tests.core.fuzz import same
from tests.session.test_threads import change


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("seed", range(3))
def test_random_changes_beside_a_playing_page_corrupt_nothing(seed: int) -> None:
    async def go() -> None:
        s = Session("preemption", runner="sim", max_num_seqs=4)
        failed: list[BaseException] = []

        def work() -> None:
            draw = random.Random(seed)
            try:
                for _ in range(30):
                    change(s, draw)
            except BaseException as e:
                failed.append(e)

        async with opened(s) as (page, player):
            page.do("speed", value=0)
            cell = threading.Thread(target=work)
            cell.start()
            while cell.is_alive():
                page.do("play")
                await asyncio.sleep(0.01)
            cell.join(20)
            page.do("pause")
            await player.stop()
            assert not failed
            page.do("end")
            await page.until(lambda: page.page.step == len(s.trace) == s.cursor.step, "the end")
            assert_equal(page.page, s.trace, s.cursor)
            assert not [x for x in page.said if "cannot follow" in str(x)]
            assert "cannot follow" not in str(page.live.get("banner"))
            same(s.trace.state(), s.engine.scheduler.state)
            assert s.engine.step_count == len(s.trace)

    asyncio.run(go())


def test_a_page_says_that_its_run_was_taken_back_outside_and_goes_on_from_there() -> None:
    async def go() -> None:
        s = Session("article", runner="sim")
        async with opened(s) as (page, _):
            for n in range(1, 6):
                page.do("step")
                await page.at(n)
            await asyncio.to_thread(s.rewind, 2)
            await page.until(lambda: "taken back to step 2 outside this page" in str(page.live.get("banner")))
            await page.at(2)
            page.do("step")
            await page.at(3)
            assert_equal(page.page, s.trace, s.cursor)

    asyncio.run(go())
