"""Calls from a worker's thread into the loop of a page."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import Any


def later(loop: AbstractEventLoop, f: Callable[..., object], *args: Any) -> None:
    """Ask the loop to call `f` soon. A closed loop is not asked: its page is gone, and nobody waits."""
    try:
        loop.call_soon_threadsafe(f, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
