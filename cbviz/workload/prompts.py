"""How a prompt becomes token ids, with a tokenizer or without one.

Owns made-up ids; knows no request, no file and no model.

Without a tokenizer (a simulator has none) a text gets made-up ids of a plausible length: one for each piece
of at most six letters, digit group or sign, the id a checksum of the piece. Equal texts get equal ids and
texts that begin alike get ids that begin alike, so prefix caching behaves as with a real tokenizer.
"""

from __future__ import annotations

import functools
import random
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from cbviz.config import ConfigError

Message = Mapping[str, str]
"""`{"role": "system" | "user" | "assistant", "content": text}`"""
DEFAULT_VOCAB = 40_001
_PIECE = re.compile(r"\n| ?[^\W\d_]{1,6}| ?\d{1,3}| ?[^\w\s]|_|\s")


class Encoder(Protocol):
    """What is asked of a tokenizer here; `model.tokenizer.Tokenizer` is one."""

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text."""

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation in the model's chat template, up to where the assistant speaks."""


def id_range(model_vocab: int | None) -> tuple[int, int]:
    """Least and greatest made-up id: 100 to 40,000 leaves out special tokens at the start; a small vocabulary
    narrows it. Raises ConfigError below 2 ids.
    """
    vocab = DEFAULT_VOCAB if model_vocab is None else model_vocab
    if vocab < 2:
        raise ConfigError(f"model_vocab is {vocab}, the least is 2")
    high = min(vocab, DEFAULT_VOCAB) - 1
    return (100 if high >= 200 else 0), high


class MadeUp:
    """Makes up token ids: the same for the same seed, index and vocabulary; prompts of different index differ
    from their first block on.
    """

    def __init__(self, seed: int = 0, model_vocab: int | None = None) -> None:
        self._low, high = id_range(model_vocab)
        self._span = high - self._low + 1
        self._buffer = _buffer(seed, self._low, high)

    def ids(self, index: int, num_tokens: int) -> tuple[int, ...]:
        """`num_tokens` ids of prompt (or block) number `index`.

        The first two hold the index, the others look random.
        """
        offset = index * 7919 % len(self._buffer)
        head = (self._low + index % self._span, self._low + index // self._span % self._span)
        rest = max(0, num_tokens - 2)
        body = self._buffer[offset : offset + rest]
        while len(body) < rest:
            body += self._buffer[: rest - len(body)]
        return (head + body)[:num_tokens]

    def text(self, text: str) -> tuple[int, ...]:
        """Made-up ids of a text; empty for an empty text."""
        return tuple(self._low + zlib.crc32(piece.encode()) % self._span for piece in _PIECE.findall(text))


@functools.lru_cache(maxsize=4)
def _buffer(seed: int, low: int, high: int) -> tuple[int, ...]:
    """Ids whose slices are prompts: the ints are shared, so a long trace costs a pointer a token."""
    return tuple(random.Random(seed).choices(range(low, high + 1), k=1 << 16))


def encode(text: str, tokenizer: Encoder | None, made_up: MadeUp) -> tuple[int, ...]:
    """Ids of a plain text."""
    return made_up.text(text) if tokenizer is None else tuple(tokenizer.encode(text))


def chat(messages: Sequence[Message], tokenizer: Encoder | None, made_up: MadeUp) -> tuple[int, ...]:
    """Ids of a conversation; without a tokenizer a plain `role: content` template stands in for the model's."""
    if tokenizer is not None:
        return tuple(tokenizer.chat(messages))
    return made_up.text("".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:")


__all__ = ["Encoder", "MadeUp", "Message", "chat", "encode", "id_range"]
