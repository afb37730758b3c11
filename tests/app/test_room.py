"""A run that plays for ever stops before it takes the machine's memory, and says why."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cbviz.app.opening import Settings
from cbviz.app.room import EVERY_S, LEAST_FREE_BYTES, MOST_GROWTH_BYTES, Room
from tests.app.test_player import opened


def test_memory_is_counted_from_where_the_page_began() -> None:
    now, taken, free = [0.0], [5e9], [9e9]
    room = Room(lambda: taken[0], lambda: free[0], lambda: now[0])
    assert room.problem() is None
    taken[0] += MOST_GROWTH_BYTES + 1e6
    assert room.problem() is None  # not looked at again within the second
    now[0] += EVERY_S
    assert "1,001 MB" in str(room.problem())
    taken[0], free[0], now[0] = 5e9, LEAST_FREE_BYTES - 1e6, now[0] + EVERY_S
    assert "99 MB" in str(room.problem())
    free[0], now[0] = 9e9, now[0] + EVERY_S
    assert room.problem() is None


def test_a_run_without_room_pauses_says_why_and_can_still_be_stepped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "cache"))

    async def go() -> None:
        async with opened(settings=Settings("chat", "sim"), address=True) as (page, player):
            await page.until(lambda: page.live.get("open") and not page.live.get("loading"))
            player.room = Room(lambda: 0.0, lambda: LEAST_FREE_BYTES / 2)
            page.do("play")
            await page.until(
                lambda: "memory are free" in str(page.live.get("banner")) and not page.live.get("playing")
            )
            at = len(player.session.trace) if player.session is not None else -1
            page.do("step")
            await page.at(at + 1)

    asyncio.run(go())
