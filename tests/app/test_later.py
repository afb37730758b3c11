"""A worker that ends after its page has gone calls into a closed loop: nothing is printed, nothing raised."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from cbviz.app.later import later
from cbviz.session import Session
from tests.app.test_player import opened


def test_a_job_that_ends_after_its_page_and_loop_are_gone_is_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    async def go() -> None:
        async with opened(Session("article", runner="sim")) as (_, player):

            def job() -> None:
                begun.set()
                may_end.wait(10)

            def done(_: object) -> None:
                player.progress(0.5, "loading")
                ended.set()

            player._pool.submit(job).add_done_callback(done)
            while not begun.is_set():
                await asyncio.sleep(0.01)

    asyncio.run(go())
    may_end.set()

    assert ended.wait(10)
    assert [r.getMessage() for r in caplog.records] == []


def test_an_error_of_a_loop_that_is_open_is_not_swallowed() -> None:
    class Broken(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *args: object, **kwargs: object) -> asyncio.Handle:
            raise RuntimeError("no room")

    loop = Broken()
    try:
        with pytest.raises(RuntimeError, match="no room"):
            later(loop, print)
    finally:
        loop.close()

    later(loop, print)  # closed: nobody looks any more
