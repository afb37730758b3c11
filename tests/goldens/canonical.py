"""Values as text that is the same in every process, and short hashes of it.

Numbers are kept to nine digits, so that another machine's mathematics library makes no difference. Prose is
told from data by its characters: a text with a blank and a letter is for readers, any other is a name or numbers.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

PROSE = "…"
"""Stands in the data where prose was."""


def plain(value: Any) -> Any:
    """Lists, dicts with text keys, names and numbers of nine digits."""
    kind = type(value)
    if kind is int or kind is str or kind is bool or value is None:  # nearly all values, so they come first
        return value
    if kind is dict:
        return {k if type(k) is str else str(k): plain(v) for k, v in value.items()}
    if kind is list:
        return [plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.9g}") if value == value and abs(value) != float("inf") else str(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(v) for v in value), key=str)
    if hasattr(value, "tolist"):  # numpy
        return plain(value.tolist())
    return plain(msgspec.to_builtins(value))


def is_prose(value: str) -> bool:
    """Whether a text is a sentence or a label, not a name or a row of numbers."""
    return " " in value and any(c.isalpha() for c in value)


def split_prose(value: Any) -> tuple[Any, list[str]]:
    """`value` with PROSE in place of each sentence, and the sentences in order."""
    sentences: list[str] = []
    return _without_prose(plain(value), sentences), sentences


def _without_prose(value: Any, sentences: list[str]) -> Any:
    kind = type(value)
    if kind is str:
        if is_prose(value):
            sentences.append(value)
            return PROSE
        return value
    if kind is dict:
        return {k: _without_prose(value[k], sentences) for k in sorted(value)}
    if kind is list:
        return [_without_prose(v, sentences) for v in value]
    return value


def text(value: Any) -> str:
    """JSON with sorted keys, a line for each of the first levels: `diff` then shows what changed."""
    return "\n".join(_lines(plain(value), "")) + "\n"


def _lines(value: Any, path: str) -> list[str]:
    short = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if len(path) + len(short) > 110 and isinstance(value, dict):
        return [line for k in sorted(value) for line in _lines(value[k], f"{path}.{k}")]
    if (
        len(path) + len(short) > 110
        and isinstance(value, list)
        and any(isinstance(v, (dict, list)) for v in value)
    ):
        return [line for i, v in enumerate(value) for line in _lines(v, f"{path}[{i}]")]
    return [f"{path} {short}"]


def short_hash(value: Any) -> str:
    """Ten hexadecimal digits."""
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()[:10]
