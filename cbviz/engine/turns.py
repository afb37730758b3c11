"""Whose turn it is to change a run: one thread at a time, in the order in which they came.

Knows nothing of runs.

A lock of the standard library lets the thread that gave it back take it again at once, so a cell would starve
beside a page that plays. Here a waiting thread is handed the turn. Ctrl-C does not cut a turn in half
(`interrupts.held`), and it still ends the waiting for one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock, current_thread, get_ident, main_thread
from types import TracebackType

from cbviz.engine import interrupts

_POLL_S = 0.05
"""How often a waiting main thread looks for Ctrl-C."""


def _call_each(calls: list[Callable[[], None]]) -> None:
    """Calls one after the other, also if one of them raises or is interrupted; its error is raised at the
    end.
    """
    for n, f in enumerate(calls, 1):
        try:
            f()
        except BaseException:
            _call_each(calls[n:])
            raise


class _Waiter:
    def __init__(self) -> None:
        self.thread = get_ident()
        self.ready = Lock()
        self.ready.acquire()


class Turn:
    """`with turn:` nobody else has a turn, and interrupts wait. May be nested.

    What `after` is given is called when the outermost block of this thread has ended, when others may have
    their turn again.
    """

    def __init__(self) -> None:
        self._gate = Lock()
        """Held for a few instructions, around what follows."""
        self._owner: int | None = None
        self._waiters: deque[_Waiter] = deque()
        self._blocks: list[interrupts.held] = []
        """The owner's nested blocks."""
        self._after: list[Callable[[], None]] = []

    @property
    def mine(self) -> bool:
        """This thread has the turn."""
        return self._owner == get_ident()

    def after(self, f: Callable[[], None]) -> None:
        """Calls `f` once this thread's turn is over; at once if it has none."""
        if self.mine:
            self._after.append(f)
        else:
            f()

    def __enter__(self) -> Turn:
        block = interrupts.held()
        block.__enter__()
        try:
            if not self.mine:
                self._wait()
            self._blocks.append(block)
        except BaseException:
            block.__exit__()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        block = self._blocks.pop()
        calls: list[Callable[[], None]] = []
        if not self._blocks:
            calls, self._after = self._after, []
            self._pass_on()
        try:
            block.__exit__()  # an interrupt that waited is raised here
        finally:
            _call_each(calls)

    def _wait(self) -> None:
        with self._gate:
            if self._owner is None:
                self._owner = get_ident()
                return
            mine = _Waiter()
            self._waiters.append(mine)
        if current_thread() is not main_thread():
            mine.ready.acquire()
            return
        while not mine.ready.acquire(timeout=_POLL_S):
            try:
                interrupts.deliver()
            except BaseException:
                self._leave(mine)
                raise

    def _leave(self, waiter: _Waiter) -> None:
        """It waits no longer; the turn may have come in this very moment."""
        with self._gate:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                return
        self._pass_on()

    def _pass_on(self) -> None:
        with self._gate:
            if not self._waiters:
                self._owner = None
                return
            following = self._waiters.popleft()
            self._owner = following.thread
        following.ready.release()
