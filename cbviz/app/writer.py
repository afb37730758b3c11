"""A page's hold on its saved run: gets it, answers other kernels that want it, lets it go, and moves to a run
of its own. Knows files through `kept`.

One kernel writes a run. Everything here runs on the player's loop, except what is handed to its worker.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbviz.app import kept
from cbviz.app.kept import Held
from cbviz.model import hub
from cbviz.session import Session
from cbviz.trace import Trace, load

if TYPE_CHECKING:
    from cbviz.app.player import Player

LOOK_EVERY_S = 0.25
"""How often a kernel looks whether another one wants its run."""
ANSWER_S = 3.0
"""How long a page has to answer its kernel.

A page that draws its first pictures on a busy machine needs a second or two.
"""
PATIENCE_S = 10.0
"""How long a new page waits for its run before it takes a copy: the kernel before it may have a long step to
finish.
"""

COPY = (
    "This page is a copy. Another tab has this run open and goes on with it. What you do here is saved as "
    "a run of its own."
)
TAKEN = (
    "Another tab opened this run and goes on with it, because this page did not answer. "
    "What you do here from now on is saved as a run of its own."
)
UNKNOWN = (
    "The address names a run that this browser does not have here. It belongs to another browser, or it is "
    "too old: "
    "a run is kept for at least a day. A new run has begun."
)


def stopped_saving(step: int, why: str) -> str:
    """What a page says when its run is not written any more: what is safe, and what the user can do."""
    safe = f"Steps 1 to {step:,} are saved" if step else "No step is saved"
    return (
        f"Saving stopped, because the server cannot write to the run's file ({why}). {safe}. The run goes on, "
        "but a reload of this page loses what comes after. The button Save downloads the whole run."
    )


@dataclass
class Found:
    """What a page's address leads to: the saved run to go on with, if any, and what the user must know.

    `writable`: it is ours to go on with.
    """

    folder: Path | None = None
    notice: str = ""


class Writer:
    """The right of one page to write its run. `held` is None while nothing is saved."""

    def __init__(self, player: Player, browser: str = "") -> None:
        self.p = player
        self.browser = browser
        self.held: Held | None = None
        self.page_left = False
        """The page said that it is being left; any later message of it takes that back."""
        self._pings = 0
        self._answer = asyncio.Event()
        self._apart = False
        """The run was let go; the page, should it speak again, gets another."""

    @property
    def name(self) -> str:
        return self.held.name if self.held is not None else ""

    def without_folder(self, text: str) -> str:
        """`text` without the folder of the run: where files lie on this machine is no business of the page."""
        return text.replace(f"{self.held.folder}{os.sep}", "") if self.held is not None else text

    # getting a run ------------------------------------------------------------------------------------------

    async def claim(self, wanted: str | None) -> Found:
        """Get the run that the address names, a copy of it if another page has it, or a new one."""
        if not wanted:
            self.begin()
            return Found()
        folder = kept.find(wanted, self.browser)
        if folder is None:
            self.begin()
            return Found(notice=UNKNOWN)
        try:
            self.held = await self._take(folder)
            if self.held is None:
                self.held = await self.p.work(lambda: kept.copy(folder, self.browser))
                return Found(self.held.folder, COPY)
        except (OSError, hub.ModelError) as e:
            self.unsaved(e)
        return Found(folder)

    async def _take(self, folder: Path) -> Held | None:
        """The run in `folder`, once the kernel that has it lets go.

        None if its page is still there, or if it does not answer in time.
        """
        if (held := kept.grab(folder)) is not None:
            return held
        # While a page is reloaded the old one may still be there. Once the new one speaks, the old one is
        # gone.
        await self.p.attached.wait()
        question = kept.ask(folder)
        try:
            end = time.monotonic() + PATIENCE_S
            while time.monotonic() < end:
                if (held := kept.grab(folder)) is not None:
                    return held
                if kept.answered(folder, question):
                    return None
                await asyncio.sleep(0.1)
            return None
        finally:
            kept.forget(folder, question)

    def begin(self) -> Held | None:
        """Make a new run ours, and let the one before go. None, and a notice, where nothing can be saved."""
        try:
            new = kept.create(self.browser)
        except (OSError, hub.ModelError) as e:
            self.unsaved(e)
            return None
        self.swap(new)
        return new

    def swap(self, new: Held | None) -> None:
        """Make `new` ours, and let the run before it go."""
        old, self.held = self.held, new
        if old is not None:
            old.release()

    def unsaved(self, e: BaseException) -> None:
        why = getattr(e, "strerror", None) or "no file can be written"
        self.p.notice(
            (
                "This run is not saved, because the server cannot make a file for it "
                f"({why[0].lower()}{why[1:]}). A reload of the page begins anew. The button Save downloads "
                "the run."
            ),
            bad=True,
        )

    # being asked --------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Answer kernels that want this run, for as long as the page lives."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self.held is None or not self.held.questions():
                continue
            if await self._page_answers():
                self.held.answer_here()
            else:
                await self._let_go()

    async def _page_answers(self) -> bool:
        if not self.p.attached.is_set() or self.page_left:
            return False
        self._pings += 1
        self._answer.clear()
        self.p.post({"type": "here", "n": self._pings})
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._answer.wait(), ANSWER_S)
        return self._answer.is_set()

    def heard(self, m: dict[str, Any]) -> None:
        """The page sent `m`, so it is there."""
        if m.get("type") == "leaving":
            self.page_left = True
            return
        self.page_left = False
        if m.get("type") == "here" and m.get("n") == self._pings:
            self._answer.set()
        if self._apart:
            self._apart = False
            self.p.spawn(self._move())

    async def _let_go(self) -> None:
        """The page is gone: stop writing, so that the other kernel can."""
        p = self.p
        p.debugger.pause()
        await p.stop()
        await p.work(self._close_files)
        self.swap(None)
        self._apart = True

    def _close_files(self) -> None:
        s = self.p.session
        for x in s.root.tree() if isinstance(s, Session) else []:
            x.trace.close()

    async def _move(self) -> None:
        """The page was not gone after all: its run goes on under another name, and it is told."""
        p, s = self.p, self.p.session
        held = self.begin()
        if held is None or s is None:
            return
        await p.work(lambda: p.debugger.family.move(s, held))
        p.notice(TAKEN, bad=True)
        p.tell()


def read(folder: Path) -> tuple[Trace | None, str, str]:
    """The branch that was shown last, its name, and what the user must know of it: what is missing, or why
    there is nothing.
    """
    branch = kept.shown_branch(folder)
    path = kept.branch_path(folder, branch)
    try:
        trace = load(path)
    except (OSError, ValueError) as e:
        if not path.exists() or not path.stat().st_size:
            return None, branch, ""  # nothing was saved yet
        why = str(e).replace(str(path), "its file")
        return (
            None,
            branch,
            f"The saved run cannot be read ({why}). It is kept as it is. A new run has begun.",
        )
    lost = ""
    if any("left out" in note for note in trace.header.notes):
        lost = (
            f"What came after step {len(trace)} was not saved whole and is missing. The run goes on from "
            f"step {len(trace)}."
        )
    return trace, branch, lost
