"""How much memory one page's run may take.

A run that plays for ever must not take the machine from the other pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from cbviz.app import light

MOST_GROWTH_BYTES = 1e9
"""What a run may add to its kernel's memory: about 45,000 steps of the simulator with eight requests running.
"""
LEAST_FREE_BYTES = 0.1e9
"""Free memory of the machine below which no run plays on."""
EVERY_S = 1.0


class Room:
    """Looks at the kernel's memory, at most once in `EVERY_S`."""

    def __init__(
        self,
        taken: Callable[[], float] | None = None,
        free: Callable[[], float] = light.free_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._taken = taken or (lambda: float(psutil.Process().memory_info().rss))
        self._free = free
        self._clock = clock
        self._asked = float("-inf")
        self._answer: str | None = None
        self._first: float | None = None

    def problem(self) -> str | None:
        """Why the run should play no further, in words for the page; None if nothing speaks against it."""
        if self._clock() - self._asked >= EVERY_S:
            self._asked = self._clock()
            self._answer = self._look()
        return self._answer

    def _look(self) -> str | None:
        taken, free = self._taken(), self._free()
        self._first = min(taken, self._first) if self._first is not None else taken
        grown = taken - self._first
        if grown > MOST_GROWTH_BYTES:
            return (
                f"Paused: this run has taken {grown / 1e6:,.0f} MB of memory, and a page may take "
                f"{MOST_GROWTH_BYTES / 1e6:,.0f}. "
                "Step goes on, and every step can be looked at. To play on, restart with fewer requests."
            )
        if free < LEAST_FREE_BYTES:
            return (
                f"Paused: only {free / 1e6:,.0f} MB of this machine's memory are free. Close pages that "
                "you don't need, then play on."
            )
        return None
