"""JSON as a stream: the entries of one big array, each as soon as it is complete. Knows no format.

The standard parser finds where an entry ends; text is read until it can. (ijson was weighed: it tells no
line, and turns half a surrogate pair into another character.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from cbviz.messages import RequestError

CHUNK = 1 << 16
MOST_ENTRY = 64 << 20
"""Characters of one entry."""
_CUT = 16
"""A mistake so close to the end of the text read so far may only be a word or an escape that goes on."""
_SPACE = " \t\r\n"
_decode = json.JSONDecoder().raw_decode


def parse(text: str, where: str) -> Any:
    """One JSON value. Raises RequestError that begins with `where`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        raise RequestError(f"{where}: not valid JSON: {e.msg} at column {e.colno}") from None
    except RecursionError:
        raise RequestError(f"{where}: it is nested too deeply to be read") from None
    except ValueError:  # Python reads no number of more than 4,300 digits
        raise RequestError(f"{where}: holds a number of thousands of digits") from None


def array_entries(more: Callable[[int], str], name: str) -> Iterator[tuple[int, Any]]:
    """(number from 1, value) of each entry of the array that `more` gives piece by piece.

    Raises RequestError naming file and line.
    """
    text = _Text(more, name)
    text.skip("[")
    number = 0
    if text.next() == "]":
        text.skip("]")
    else:
        while True:
            number += 1
            yield number, text.value(number)
            sign = text.next()
            if sign == "]":
                text.skip("]")
                break
            if sign != ",":
                raise (
                    text.cut(number) if not sign else text.wrong(f"Expecting ',' or ']' after entry {number}")
                )
            text.skip(",")
    if text.next():
        raise text.wrong("Extra text after the list")


class _Text:
    """The text that was read and not yet used."""

    def __init__(self, more: Callable[[int], str], name: str) -> None:
        self._more = more
        self._name = name
        self._text = ""
        self._at = 0
        self._line = 1
        """Line of the beginning of `_text`."""
        self._column = 1
        """Column of the beginning of `_text`."""
        self._ended = False

    def _read(self) -> None:
        """At least doubles the unused text, so that a long entry is not parsed again too often."""
        self._line, self._column = self._place(self._at)
        rest = self._text[self._at :]
        new = self._more(max(CHUNK, len(rest)))
        self._ended = not new
        self._text, self._at = rest + new, 0

    def next(self) -> str:
        """The next sign that is no space, '' at the end. It stays unused."""
        while True:
            text, at = self._text, self._at
            while at < len(text) and text[at] in _SPACE:
                at += 1
            self._at = at
            if at < len(text):
                return text[at]
            if self._ended:
                return ""
            self._read()

    def skip(self, sign: str) -> None:
        assert self.next() == sign
        self._at += 1

    def value(self, number: int) -> Any:
        """The next value, entry `number`."""
        if not self.next():
            raise self.cut(number)
        while True:
            try:
                value, end = _decode(self._text, self._at)
            except json.JSONDecodeError as e:
                goes_on = e.msg.startswith("Unterminated string") or len(self._text[e.pos :].strip()) < _CUT
                if not goes_on or (
                    self._ended and e.pos < len(self._text) and not e.msg.startswith("Unterminated")
                ):
                    raise self.wrong(e.msg, e.pos) from None
                if self._ended:
                    raise self.cut(number) from None
            except RecursionError:
                raise RequestError(
                    f"{self._name} entry {number}: it is nested too deeply to be read"
                ) from None
            except ValueError:
                raise RequestError(
                    f"{self._name} entry {number}: holds a number of thousands of digits"
                ) from None
            else:
                if end < len(self._text) or self._ended:  # a number may go on
                    self._at = end
                    return value
            if len(self._text) - self._at > MOST_ENTRY:
                raise RequestError(
                    f"{self._name} entry {number}: has more than {MOST_ENTRY:,} characters, the most of "
                    "one entry"
                )
            self._read()

    def _place(self, at: int) -> tuple[int, int]:
        """(line, column) of a place in the text."""
        ends = self._text.count("\n", 0, at)
        return self._line + ends, at - self._text.rfind("\n", 0, at) if ends else self._column + at

    def wrong(self, message: str, at: int | None = None) -> RequestError:
        line, column = self._place(self._at if at is None else at)
        return RequestError(f"{self._name} line {line}: not valid JSON: {message} at column {column}")

    def cut(self, number: int) -> RequestError:
        return RequestError(
            f"{self._name} line {self._place(len(self._text))[0]}: the file ends in the middle of entry "
            f"{number}; fetch it again, "
            f"or read the {number - 1} entries before it with limit"
        )


__all__ = ["array_entries", "parse"]
