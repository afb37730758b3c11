"""Ranks that all requests of a session share, so that a long queue is ranked session by session.

Under fair share every step changes the rank of the sessions that were served. The order of the queue changes
only if two sessions change places, and only then the whole queue is sorted again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cbviz.core.request import Request


class SessionRank:
    """The rank of all waiting requests of one session."""

    __slots__ = ("member", "value")

    def __init__(self, member: Request, value: Any) -> None:
        self.member = member
        """One of its requests, by which the session is ranked."""
        self.value = value


def same_order(before: list[Any], after: list[Any]) -> bool:
    """Do the ranks `after` put the sessions into the order of `before`, equal ranks included?"""
    order = sorted(range(len(before)), key=before.__getitem__)
    return all(
        after[i] < after[j] if before[i] < before[j] else after[i] == after[j]
        for i, j in zip(order, order[1:], strict=False)
    )


def plain_rank(rank: Any) -> Any:
    """The rank itself, whether it is shared or not."""
    return rank.value if type(rank) is SessionRank else rank


def session_of(r: Request) -> str:
    return r.spec.session or ""


def members_of(requests: Iterable[Request]) -> dict[str, Request]:
    """One request of each session."""
    members: dict[str, Request] = {}
    for r in requests:
        members.setdefault(session_of(r), r)
    return members
