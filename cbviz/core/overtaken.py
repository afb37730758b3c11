"""How often each waiting request was overtaken, for a whole queue at once.

An admission passes over every waiting request that joined the queue before the admitted one. Counting them
one by one would take time in proportion to the queue for each admission. Here the waiting requests have
places in the order in which they joined, so an admission adds 1 to all places before its own: a range of a
segment tree. The tree keeps the least number of admissions that still lack to a count that is told (8, 16,
32, ...), so those that reach one are found without asking the others.

                         low, add           low: the least number missing in this half, less the admissions
                       /          \\              that were counted for the whole half at once (add)
               low, add            low, add
              /        \\          /        \\
    place       0       1        2        3      joined first ... joined last

All changes are written to the undo log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cbviz.core.request import Request, Status

FIRST_TOLD = 8
"""The first count that is told; the next ones are twice as many each."""
_NOBODY = 1 << 60
"""What is missing at a place that nobody holds."""
_SPARE = 64
"""Places of requests that have left are dropped when they are more than those that wait, and these."""


class Overtaken:
    """The counts of one queue.

    Nothing is kept until the first admission that may pass over somebody: under first come, first served
    there is none. Until then a request's count is its `overtaken_before`.
    """

    def __init__(self, undo: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
        self._undo = undo
        self._forget()

    def _forget(self) -> None:
        self._kept = False
        self._places: dict[str, int] = {}
        self._who: list[Request | None] = []
        """By place; None where the request has left."""
        self._next_told: list[int] = []
        self._size = 1
        self._low = [_NOBODY] * 2
        self._add = [0] * 2

    def count(self, r: Request) -> int:
        """Number of later arrivals that were admitted since `r` (last) joined the queue."""
        place = self._places.get(r.request_id)
        return r.overtaken_before if place is None else self._next_told[place] - self._missing(place)

    def join(self, r: Request) -> None:
        """`r` has joined the queue, where its count begins at 0."""
        if self._kept:
            self._undo.append((self._take_back_join, (r.request_id,)))
            self._append(r, 0)

    def leave(self, r: Request) -> None:
        """`r` waits no more."""
        if (place := self._places.pop(r.request_id, None)) is not None:
            self._undo.append((self._put_back, (r, place, self._missing(place))))
            self._who[place] = None
            self._set_missing(place, _NOBODY)

    def admit(self, r: Request, waiting: Iterable[Request]) -> list[tuple[Request, int]]:
        """Count that `r` was admitted past those that joined before it, and take it out.

        Returns the requests whose count has reached 8, 16, 32, ... with it. `waiting`: the others.
        """
        if not self._kept:
            self._undo.append((self._forget, ()))
            self._build([*waiting, r])
        place = self._places[r.request_id]
        self._undo.append((self._shift, (place, 1)))
        self._shift(place, -1)
        reached = []
        for p in self._at_zero() if not self._low[1] else ():
            who, n = self._who[p], self._next_told[p]
            assert who is not None
            reached.append((who, n))
            self._undo.append((self._tell_next, (p, n, 0)))
            self._tell_next(p, 2 * n, n)
        self.leave(r)
        return reached

    def tidy(self) -> None:
        """Drop the places of those that have left, if they are many. Only where nothing can be undone."""
        if len(self._who) > 2 * len(self._places) + _SPARE:
            self._place([(w, self.count(w)) for w in self._who if w is not None])

    # undo -----------------------------------------------------------------------------------------------------

    def _take_back_join(self, request_id: str) -> None:
        place = self._places.pop(request_id)
        self._set_missing(place, _NOBODY)
        del self._who[place:], self._next_told[place:]

    def _put_back(self, r: Request, place: int, missing: int) -> None:
        self._places[r.request_id] = place
        self._who[place] = r
        self._set_missing(place, missing)

    def _tell_next(self, place: int, n: int, missing: int) -> None:
        self._next_told[place] = n
        self._set_missing(place, missing)

    # the tree -------------------------------------------------------------------------------------------------

    def _build(self, queue: list[Request]) -> None:
        """The places follow from the requests: a preempted one joined in its step, after the arrivals."""
        self._kept = True
        queue.sort(key=lambda r: (r.queued_step, r.status is Status.PREEMPTED, r.seq))
        self._place([(r, r.overtaken_before) for r in queue])

    def _place(self, counts: list[tuple[Request, int]]) -> None:
        """Give the requests places from 0 on, with their counts."""
        self._places = {r.request_id: i for i, (r, _) in enumerate(counts)}
        self._who = [r for r, _ in counts]
        self._next_told = [_told_after(n) for _, n in counts]
        self._make([told - n for told, (_, n) in zip(self._next_told, counts, strict=True)])

    def _make(self, missing: list[int]) -> None:
        """The tree over these leaves, with room for as many again."""
        size = self._size = 1 << (2 * len(missing)).bit_length()
        low = self._low = [_NOBODY] * size + missing + [_NOBODY] * (size - len(missing))
        self._add = [0] * (2 * size)
        for node in range(size - 1, 0, -1):
            low[node] = min(low[2 * node], low[2 * node + 1])

    def _append(self, r: Request, n: int) -> None:
        place = len(self._who)
        if place == self._size:
            self._make([_NOBODY if w is None else self._missing(p) for p, w in enumerate(self._who)])
        self._places[r.request_id] = place
        self._who.append(r)
        self._next_told.append(_told_after(n))
        self._set_missing(place, self._next_told[place] - n)

    def _missing(self, place: int) -> int:
        """How many admissions lack to the next count that is told."""
        node, add = self._size + place, self._add
        missing = self._low[node]
        while node := node >> 1:
            missing += add[node]
        return missing

    def _set_missing(self, place: int, missing: int) -> None:
        node, low, add = self._size + place, self._low, self._add
        low[node] += missing - self._missing(place)
        while node := node >> 1:
            low[node] = min(low[2 * node], low[2 * node + 1]) + add[node]

    def _shift(self, end: int, by: int) -> None:
        """Adds `by` to what is missing at all places before `end`."""
        node, low, add = self._size + end, self._low, self._add
        while node > 1:
            if node & 1:  # a right half: the left one lies before it as a whole
                low[node - 1] += by
                add[node - 1] += by
            node >>= 1
            left, right = low[2 * node], low[2 * node + 1]
            low[node] = (left if left < right else right) + add[node]

    def _at_zero(self) -> list[int]:
        """Places at which nothing is missing."""
        found = []
        nodes = [(1, 0)]  # with what was added above it
        while nodes:
            node, above = nodes.pop()
            if self._low[node] + above == 0:
                if node >= self._size:
                    found.append(node - self._size)
                else:
                    above += self._add[node]
                    nodes += ((2 * node, above), (2 * node + 1, above))
        return found


def _told_after(n: int) -> int:
    """The next count after `n` that is told: 8, 16, 32, ..."""
    return max(FIRST_TOLD, 1 << n.bit_length())
