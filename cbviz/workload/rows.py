"""One request of a file: reads its fields, and names the place, the field and the limit of a bad one.

Knows no format.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any

from cbviz.config import clean_text, shown
from cbviz.messages import RequestError

MOST_TOKENS = 10_000_000
"""Greatest prompt_len, output_len and max_tokens of one request."""
MOST_ID = 2**63 - 1
_WHOLE = re.compile(r"[+-]?\d{1,30}")
_DECIMAL = re.compile(r"[+-]?(\d{1,30}\.?\d{0,30}|\.\d{1,30})(e[+-]?\d{1,3})?", re.IGNORECASE)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.0*)?")


class Row:
    """The fields of one request, and where it stands in its file (`where`)."""

    def __init__(self, where: str, data: Any) -> None:
        if not isinstance(data, dict):
            raise RequestError(f"{where}: a request is an object {{...}}, got {short(data)}")
        self.where = where
        self.data: dict[str, Any] = data

    def fail(self, message: str) -> RequestError:
        return RequestError(f"{self.where}: {message}")

    def known(self, fields: Iterable[str]) -> None:
        """Raises RequestError for a field that is not one of `fields`."""
        for name in self.data:
            if name not in fields:
                near = difflib.get_close_matches(name[:100], fields, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(fields)}"
                raise self.fail(f"unknown field {short(name)}; {hint}")

    def whole(self, field: str, low: int, high: int) -> int | None:
        """A whole number, also written as text or with `.0`; None where the field is absent.

        Raises RequestError.
        """
        value = self.data.get(field)
        if value is None:
            return None
        number = as_whole(value)
        if number is None:
            raise self.fail(f"{field} must be a whole number, got {short(value)}")
        if not low <= number <= high:
            raise self.fail(f"{field} is {short(number)}, it must lie in {low}..{high}")
        return number

    def size(self, field: str) -> int | None:
        """A number of tokens of one request, 1 or more."""
        return self.whole(field, 1, MOST_TOKENS)

    def seconds(self, field: str) -> float | None:
        """A finite number, 0 or more; None where the field is absent. Raises RequestError."""
        value = self.data.get(field)
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number) or number < 0:
            raise self.fail(f"{field} is {short(value)}, it must be a finite number, 0 or more")
        return number

    def text(self, field: str) -> str | None:
        """A text, lone surrogates replaced; None where the field is absent. Raises RequestError."""
        value = self.data.get(field)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.fail(f"{field} must be text, got {short(value)}")
        return clean_text(value)

    def ids(self, field: str, message: str) -> list[int] | None:
        """A list of whole numbers of 0 or more; None where the field is absent.

        Raises RequestError with `message`.
        """
        value = self.data.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(x) is not int or not 0 <= x <= MOST_ID for x in value):
            raise self.fail(message)
        return value

    def blank(self, field: str) -> bool:
        """Whether a cell of a table holds nothing: no text, or what a program writes for a gap."""
        return str(self.data.get(field) or "").strip().lower() in (
            "",
            "nan",
            "none",
            "null",
            "na",
            "n/a",
            "<na>",
        )


def as_whole(value: Any) -> int | None:
    """A whole number as JSON or a table writes it: 472, 472.0, "472.0", "4.72e2", "1,024". None if it is no
    whole number.

    >>> [as_whole(x) for x in (472, 472.0, " 472.0", "1e3", "1,024", True, 1.5, "12a", "nan")]
    [472, 472, 472, 1000, 1024, None, None, None, None]
    """
    if isinstance(value, str):
        text = value.strip()
        if _WHOLE.fullmatch(text):
            return int(text)
        if _THOUSANDS.fullmatch(text):
            text = text.replace(",", "")
        elif not _DECIMAL.fullmatch(text):
            return None
        value = float(text)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value.is_integer() else None
    return value


def short(value: Any) -> str:
    """How a value is quoted in a message: at most 40 characters."""
    if isinstance(value, (list, dict)) and len(value) > 40:
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)} entries"
    text = shown(value, 41)
    return text if len(text) <= 40 else text[:37] + "..."


__all__ = ["MOST_ID", "MOST_TOKENS", "Row", "as_whole", "short"]
