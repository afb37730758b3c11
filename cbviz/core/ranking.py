"""What a policy is: it ranks requests, lowest first, and can't change anything."""

from __future__ import annotations

from typing import Any

from cbviz.core.request import RequestView


class PolicyError(RuntimeError):
    """A policy raised or returned something that can't be ranked.

    Names the policy and the request; the engine's state is untouched.
    """


class Policy:
    """Base of all policies. Override `rank`; optionally `admit`.

    `static`: a waiting request's rank never changes, so the queue is sorted once. `victim`: the victim rule
    it implies (`last`: the last of the running queue; `rank`: the highest rank). `by_session`: all requests
    of a session always have the same rank, so a long queue is ranked session by session. `typed`: a user's,
    so it is asked again now and then, to see that it gives the same answer.
    """

    name = "fcfs"
    title = "First come, first served"
    summary = "In order of arrival."
    static = True
    typed = False
    by_session = False
    victim = "rank"

    @property
    def ranks_sessions(self) -> bool:
        """May the queue be ranked session by session? A user's policy may rank otherwise than its base."""
        return self.by_session and not self.typed

    def rank(self, r: RequestView, now: float) -> Any:
        """Lowest first. Any values that compare with each other."""
        return 0

    def rank_all(self, rs: list[RequestView], now: float) -> list[Any]:
        """Rank the whole waiting queue at once, if ranks depend on other requests. Default: one by one."""
        return [self.rank(r, now) for r in rs]

    def admit(self, r: RequestView, now: float) -> bool:
        """False: the head of the queue may not be admitted in this step."""
        return True
