"""Ctrl-C between two changes, never inside one. Owns the process's interrupt handler while a step is being made; knows nothing of steps.

Python raises KeyboardInterrupt between any two bytecodes, so code that changes two things which belong together can be cut in half. Inside
`held()` an interrupt waits until the outermost block ends, or until `let_in()` opens a place where it does no harm (the forward pass).
A second interrupt while one waits is raised at once: whoever presses twice means it. Elsewhere than in the main thread Python delivers none.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class _Held:
    """`handler` is what an interrupt calls outside `held()`."""

    handler: Handler = staticmethod(signal.default_int_handler)
    waits = False

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.waits:
            self.handler(number, frame)
        self.waits = True

    def deliver(self) -> None:
        if self.waits:
            self.waits = False
            self.handler(signal.SIGINT, None)


_held = _Held()


@contextmanager
def held() -> Iterator[None]:
    """Interrupts wait until the outermost such block ends."""
    now = signal.getsignal(signal.SIGINT) if current_thread() is main_thread() else None
    if not callable(now) or now == _held.note:  # another thread, or interrupts are switched off; or inside such a block
        yield
        return
    _held.handler, _held.waits = now, False
    try:
        signal.signal(signal.SIGINT, _held.note)
        yield
    finally:
        signal.signal(signal.SIGINT, now)
        _held.deliver()


@contextmanager
def let_in() -> Iterator[None]:
    """Inside `held()`: interrupts are raised again, the one that waits at once."""
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) != _held.note:
        yield
        return
    _held.deliver()
    try:
        signal.signal(signal.SIGINT, _held.handler)
        yield
    finally:
        try:
            signal.signal(signal.SIGINT, _held.note)
        except KeyboardInterrupt:  # at the last moment
            signal.signal(signal.SIGINT, _held.note)
            raise
