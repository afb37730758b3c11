"""Who proposes drafts from a request's tokens alone: prompt lookup, and functions typed in a cell.

(Speculative decoding: Leviathan et al., ICML 2023.)

Owns the registry of proposers and the n-gram search. Knows no scheduler: it is given token ids and returns
token ids. Proposers that need a model (`self-draft`, `draft-model`) are only named here; the runner has the
model.
"""

from __future__ import annotations

import difflib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cbviz.config import ConfigError, EngineConfig


class ProposerError(RuntimeError):
    """A proposer broke its contract. Names the proposer and the request; the step is taken back."""


def ngram(tokens: Sequence[int], k: int, shortest: int, longest: int) -> list[int]:
    """Prompt lookup: finds the last tokens earlier in the text, as many of them as possible, and proposes
    what followed there.

    Runs of `longest` down to `shortest` last tokens are tried; of several places the first in the text counts
    (vLLM's ngram_proposer; Saxena, prompt-lookup-decoding, 2023). At most `k` tokens, fewer where the text
    ends.

    >>> ngram([7, 1, 2, 3, 9, 1, 2], 3, 1, 4)
    [3, 9, 1]
    """
    if k < 1 or len(tokens) < shortest:
        return []
    text = array("q", tokens)
    raw, total, width = text.tobytes(), len(tokens), text.itemsize
    for n in range(min(longest, total - 1), shortest - 1, -1):
        last = raw[-n * width :]
        at = raw.find(last)
        while at % width:  # in the middle of a token
            at = raw.find(last, at + 1)
        start = at // width + n
        if start < total:
            return list(tokens[start : start + k])
    return []


@dataclass(frozen=True)
class Proposer:
    """`propose(tokens, k, config)` gives at most k drafts; None: the runner's model does it."""

    name: str
    title: str
    summary: str
    propose: Callable[[Sequence[int], int, EngineConfig], Any] | None = None
    typed: bool = False


PROPOSERS: dict[str, Proposer] = {
    p.name: p
    for p in (
        Proposer(
            "ngram",
            "n-gram (prompt lookup)",
            "Looks for the last tokens earlier in the text and proposes what followed there.",
            lambda tokens, k, c: ngram(tokens, k, c.prompt_lookup_min, c.prompt_lookup_max),
        ),
        Proposer(
            "self-draft",
            "self-draft",
            "The first layers of the model, with its last norm and head, propose; the whole model checks.",
        ),
        Proposer(
            "draft-model",
            "draft model",
            "A second, smaller model with the same vocabulary proposes; the model checks.",
        ),
    )
}


def get_proposer(name: str) -> Proposer | None:
    """The registered proposer, None for `off`. Raises ConfigError with the nearest name."""
    if name == "off":
        return None
    found = PROPOSERS.get(name)
    if found is None:
        names = ["off", *PROPOSERS]
        near = difflib.get_close_matches(name, names, n=1)
        raise ConfigError(
            f"speculative is {name!r}, it must be one of {', '.join(names)}"
            + (f" (did you mean {near[0]!r}?)" if near else "")
        )
    return found


def drafts_for(
    p: Proposer, request_id: str, tokens: Sequence[int], k: int, config: EngineConfig
) -> list[int]:
    """At most `k` drafts behind `tokens`, checked. Raises ProposerError."""
    if k < 1 or p.propose is None:
        return []
    try:
        got = p.propose(tuple(tokens) if p.typed else tokens, k, config)
    except Exception as e:
        raise ProposerError(
            f"proposer {p.name} failed on request {request_id} ({len(tokens)} tokens): {type(e).__name__}: "
            f"{e}"
        ) from e
    if not p.typed:
        return list(got)
    if got is None:
        return []
    try:
        ids = list(got)
    except TypeError:
        raise ProposerError(
            f"proposer {p.name} must return a list of token ids, it returned {got!r:.80} for request "
            f"{request_id}"
        ) from None
    for t in ids:
        if isinstance(t, bool) or not isinstance(t, int) or t < 0:
            raise ProposerError(
                f"proposer {p.name} proposed {t!r:.80} for request {request_id}: a draft is a token id, a "
                "whole number from 0 on"
            )
    return ids[:k]


def proposer(f: Any) -> Any:
    """Registers a proposer: a function `(tokens, k) -> at most k token ids`, where `tokens` are a request's
    prompt and outputs so far. The model checks what it proposes, so a bad one costs time and never a wrong
    word. Running the cell again replaces it.

    It is tried on made-up tokens first, so a mistake shows in the cell. It must be a function of its
    arguments alone. Raises ProposerError.

    >>> import cbviz as cb
    >>> @cb.proposer
    ... def again(tokens, k):
    ...     "Whatever was said last is said once more."
    ...     return [tokens[-1]] * k
    >>> s = cb.Session("article", runner="sim", speculative="again", num_speculative_tokens=2)
    >>> s.run().tokens.total > 0
    True
    >>> del PROPOSERS["again"]
    """
    if not callable(f) or isinstance(f, type):
        raise ProposerError(f"a proposer is a function (tokens, k), not {type(f).__name__}")
    name = f.__name__
    if name == "off":
        raise ProposerError("a proposer can't be called 'off': that switches speculation off")
    made = Proposer(
        name,
        name.replace("_", " "),
        (f.__doc__ or "A proposer typed in a cell.").strip().splitlines()[0],
        lambda tokens, k, config: f(tokens, k),
        typed=True,
    )
    config = EngineConfig()
    for tokens in ([5], [1, 2, 3, 1, 2], list(range(40)) * 2):
        if drafts_for(made, "a trial", tokens, 4, config) != drafts_for(made, "a trial", tokens, 4, config):
            raise ProposerError(
                f"proposer {name} gives other drafts when asked again: it must be a function of (tokens, "
                "k) alone, or runs can't be repeated"
            )
    PROPOSERS[name] = made
    return f
