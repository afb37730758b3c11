"""Ctrl-C beside an explorer: in a cell that changes the run which a page shows, and in what the page itself
has asked for. Run, file and page go together afterwards.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cbviz.app.opening import Settings
from cbviz.app.player import Player
from cbviz.session import Session
from tests.app.page import assert_equal, assert_history
from tests.app.test_player import FakePage
from tests.session.test_interrupts import ALL_LINES, OPERATIONS, Interrupt, consistent, made, spread


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()


class Explorer:
    """A page and its player on a loop that goes on after an interrupt, as a notebook's does."""

    def __init__(self, loop: asyncio.AbstractEventLoop, session: Session | None) -> None:
        self.loop, self.page = loop, FakePage()
        self.loop.run_until_complete(self._begin(session))

    async def _begin(self, session: Session | None) -> None:
        self.player = self.page.player = Player(self.page.send, Settings("article", "sim"), session=session)
        self.player.receive({"type": "ready"})
        await self.page.until(lambda: hasattr(self.page.page, "step"), "the first picture")

    @property
    def session(self) -> Session:
        s = self.player.session
        assert isinstance(s, Session)
        return s

    def drive(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(coroutine)

    async def rest(self) -> None:
        """Until nothing is under way and the page has what there is."""
        await asyncio.sleep(0.02)
        await self.page.until(
            lambda: (
                not self.player.busy and all(t.done() for t in self.player._tasks) and not self.player.playing
            ),
            "rest",
        )

    async def show_end(self) -> None:
        self.page.do("step")
        await self.rest()
        self.page.do("end")
        await self.page.until(
            lambda: self.page.page.step == len(self.session.trace) == self.session.cursor.step, "the end"
        )

    def judge(self) -> None:
        """The page still answers, and shows the run."""
        self.page.do("pause")  # the interrupt may have hit the one that was asked for
        self.drive(self.rest())
        self.drive(self.show_end())
        assert_equal(self.page.page, self.session.trace, self.session.cursor)
        assert_history(self.page.page, self.session.trace)

    def close(self) -> None:
        async def end() -> None:
            self.player.close()

        self.drive(end())


FEW_OR_ALL = pytest.mark.parametrize("which", [pytest.param(spread, id="some lines"), ALL_LINES])


@FEW_OR_ALL
@pytest.mark.parametrize("name", ["step", "run", "add", "configure", "seek", "rewind", "reset", "fork"])
def test_a_cell_that_is_interrupted_leaves_the_page_with_the_run_as_it_is(
    name: str, which: Callable[[int], Iterable[int]], tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    """Given a page that shows a run, when a cell changes the run and is interrupted at any line, the page's
    own included, then the page shows what there is.
    """

    async def cell(told: Interrupt, s: Session) -> None:
        told.run(lambda: OPERATIONS[name](s))

    probe, s = Interrupt(), made(tmp_path / "probe.jsonl")
    x = Explorer(loop, s)
    x.drive(cell(probe, s))
    x.close()
    for at in which(probe.lines):
        path = tmp_path / f"{at}.jsonl"
        s = made(path)
        x = Explorer(loop, s)
        x.drive(cell(Interrupt(at), s))
        consistent(s, path)
        x.judge()
        consistent(s, path)
        x.close()
        s.close()


COMMANDS: dict[str, Callable[[FakePage], None]] = {
    "step": lambda page: page.do("step"),
    "play": lambda page: page.do("play"),
    "rewind": lambda page: page.do("rewind", step=3),
    "reset": lambda page: page.do("reset"),
    "restart": lambda page: page.do("restart", changes={"policy": "sjf"}),
    "fork": lambda page: page.do("fork", at=4, changes={"policy": "sjf"}),
    "add": lambda page: page.do("add", prompt="one two three", max_tokens=3),
}


def interrupted(
    loop: asyncio.AbstractEventLoop, told: Interrupt, x: Explorer, ask: Callable[[FakePage], None]
) -> None:
    """Has the page ask for something; the loop is interrupted, and whoever runs it runs it again."""

    async def command() -> None:
        ask(x.page)
        for _ in range(10):
            await asyncio.sleep(0.005)
        x.page.do("pause")
        await x.rest()

    before = sys.gettrace()
    told.run(lambda: x.drive(command()))
    assert sys.gettrace() is before


@FEW_OR_ALL
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_the_page_that_is_interrupted_leaves_run_and_page_together(
    name: str, which: Callable[[int], Iterable[int]], loop: asyncio.AbstractEventLoop
) -> None:
    """Given what a page can ask for, when the loop's thread is interrupted at any line of it, then the
    command was done or not, and the page goes on.
    """

    def begin() -> Explorer:
        x = Explorer(loop, None)
        x.session.step(8)
        x.judge()
        return x

    x, probe = begin(), Interrupt()
    interrupted(loop, probe, x, COMMANDS[name])
    x.close()
    came = 0
    for at in which(probe.lines):
        x = begin()
        told = Interrupt(at)
        interrupted(loop, told, x, COMMANDS[name])
        came += told.sent
        x.judge()
        consistent(x.session, None)
        x.close()
    assert came
