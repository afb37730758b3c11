"""A policy or a breakpoint's predicate typed in the page: runs its code in this kernel.

Only `cbviz explore --allow-code` lets the player call this.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import cbviz
from cbviz.config import ConfigError
from cbviz.core.policy import POLICIES

FILE = "<policy>"
MOST_CHARACTERS = 20_000


def register(source: str) -> str:
    """Runs `source`, in which `cb` is cbviz, and returns the name of the policy that it registered (the last,
    of several).

    Raises ConfigError with the line and what was wrong with it; then the policies are what they were before.
    """
    if len(source) > MOST_CHARACTERS:
        raise ConfigError(f"the code has {len(source):,} characters, the limit is {MOST_CHARACTERS:,}")
    before = dict(POLICIES)
    names: dict[str, Any] = {"cb": cbviz, "__name__": "policy"}
    try:
        exec(compile(source, FILE, "exec"), names)
        made = [name for name, p in POLICIES.items() if before.get(name) is not p]
        if not made:
            raise ConfigError("the code registers no policy: write @cb.policy above a function of (r, now)")
    except BaseException as e:
        POLICIES.clear()
        POLICIES.update(before)
        if isinstance(e, ConfigError):
            raise
        if not isinstance(e, (Exception, SystemExit)):
            raise
        raise ConfigError(_told(e)) from None
    return made[-1]


def predicate(source: str) -> Callable[..., Any]:
    """The condition that `lambda record, state: ...` is. Raises ConfigError with what is wrong with it."""
    if len(source) > MOST_CHARACTERS:
        raise ConfigError(f"the code has {len(source):,} characters, the limit is {MOST_CHARACTERS:,}")
    try:
        f = eval(compile(source.strip(), FILE, "eval"), {"cb": cbviz})
    except Exception as e:
        raise ConfigError(_told(e)) from None
    if not callable(f):
        raise ConfigError("the code makes no function: write lambda record, state: ...")
    f.__name__ = " ".join(source.split())[:60]
    return f


def _told(e: BaseException) -> str:
    if isinstance(e, SyntaxError):
        return f"line {e.lineno}: {e.msg}"
    lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == FILE]
    return f"{f'line {lines[-1]}: ' if lines else ''}{type(e).__name__}: {e}"
