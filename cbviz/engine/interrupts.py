"""Ctrl-C between two changes, never inside one.

Owns the process's interrupt handler while a step is being made; knows nothing of steps.

Python raises KeyboardInterrupt between any two bytecodes, so code that changes two things which belong
together can be cut in half. Inside `held()` an interrupt waits until the outermost block ends, or until
`let_in()` opens a place where it does no harm (the forward pass). Code of the user that is called there (a
policy, a runner) may never come back. So a second interrupt while one waits is raised at once in such code,
whose errors undo the step. Our own code always comes back: there the second one waits too, and no change is
cut in half. Elsewhere than in the main thread Python delivers none.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps: its wrappers make enums of handlers, which costs 40 times as much, twice a step
import signal
import sysconfig
from collections.abc import Callable
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

SIGINT = int(signal.SIGINT)
Handler = Callable[[int, FrameType | None], Any]

_OURS = __name__.partition(".")[0]
_LIBRARIES = (
    "<frozen",
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)


def users_code_runs(frame: FrameType | None) -> bool:
    """Whether the interrupted code is the user's, or a library that the user's code has called."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == _OURS:
            return False
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return True
        frame = frame.f_back
    return True


class _Waiting:
    """`handler` is what an interrupt calls outside `held()`; `one`: one waits."""

    def __init__(self) -> None:
        self.handler: Handler = signal.default_int_handler
        self.one = False

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.one and users_code_runs(frame):
            self.one = False
            self.handler(number, frame)
        else:
            self.one = True

    def deliver(self) -> None:
        if self.one:
            self.one = False
            self.handler(SIGINT, None)


_waiting = _Waiting()


# Classes and not generators: an interrupt inside contextlib would leave a generator half run, to be finished
# whenever it is collected.


class held:
    """Interrupts wait until the outermost such block ends."""

    def __enter__(self) -> None:
        now = _signal.getsignal(SIGINT) if current_thread() is main_thread() else None
        # Nothing to do in another thread, where interrupts are switched off, and inside such a block.
        self._outermost = callable(now) and now != _waiting.note
        if self._outermost and callable(now):
            _waiting.handler, _waiting.one = now, False
            _signal.signal(SIGINT, _waiting.note)

    def __exit__(self, *_: object) -> None:
        if self._outermost:
            _signal.signal(SIGINT, _waiting.handler)
            _waiting.deliver()


def deliver() -> None:
    """Inside `held()`: raises the interrupt that waits, if one does."""
    if current_thread() is main_thread() and _signal.getsignal(SIGINT) == _waiting.note:
        _waiting.deliver()


class let_in:
    """Inside `held()`: interrupts are raised again, the one that waits at once."""

    def __enter__(self) -> None:
        self._inside = current_thread() is main_thread() and _signal.getsignal(SIGINT) == _waiting.note
        if self._inside:
            _waiting.deliver()
            _signal.signal(SIGINT, _waiting.handler)

    def __exit__(self, *_: object) -> None:
        if self._inside:
            _signal.signal(SIGINT, _waiting.note)
