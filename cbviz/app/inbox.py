"""What a page may send to its run loop: the shape, size and rate of messages.

Knows nothing of what the commands do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

MOST_CHARACTERS = 100_000
"""Characters of one text in a message, such as a prompt."""
MOST_ADDS = 20
"""Requests that a page may add in one second."""
MOST_SEQ = 2**53
"""The greatest whole number that a page can count to."""


class Inbox:
    """Looks at each message of one page before anything is done for it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._added: deque[float] = deque()

    def problem(self, message: Any) -> str | None:
        """Why `message` is not taken, in a sentence for the page; None if it is."""
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            return "The page sent a message without a type."
        if message["type"] == "ack" and not _is_count(message.get("seq")):
            return "The page acknowledged a picture without a number."
        if message["type"] == "cmd" and not isinstance(message.get("cmd"), str):
            return "The page sent a command without a name."
        if (longest := longest_text(message)) > MOST_CHARACTERS:
            return f"The text has {longest:,} characters, the limit is {MOST_CHARACTERS:,}."
        if message["type"] == "cmd" and message["cmd"] == "add":
            return self._too_fast()
        return None

    def _too_fast(self) -> str | None:
        now = self._clock()
        while self._added and now - self._added[0] >= 1.0:
            self._added.popleft()
        if len(self._added) >= MOST_ADDS:
            return (
                f"More than {MOST_ADDS} requests were added in one second. Wait a moment, then add the next."
            )
        self._added.append(now)
        return None


def longest_text(value: Any) -> int:
    """Characters of the longest text anywhere in a message."""
    longest = 0
    stack = [value]
    while stack:
        v = stack.pop()
        if isinstance(v, str):
            longest = max(longest, len(v))
        elif isinstance(v, dict):
            stack += [*v.keys(), *v.values()]
        elif isinstance(v, list):
            stack += v
    return longest


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_SEQ
