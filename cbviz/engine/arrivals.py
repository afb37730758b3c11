"""The requests that are still to arrive, and the ids that a run has used.

Any thread may ask who is to come while a step takes requests away; only the step's thread changes anything.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from cbviz.messages import RequestError, RequestSpec, sequence_ids

Pending = tuple[float, int, RequestSpec]
"""(time or step of arrival, order, request)."""


class Arrivals:
    """Requests by time and by step, each list with the next one last."""

    def __init__(self) -> None:
        self.by_time: list[Pending] = []
        self.by_step: list[Pending] = []
        self.taken: tuple[list[Pending], list[Pending]] = [], []
        """Those that the step under way has taken from `by_time` and `by_step`."""
        self.known: set[str] = set()
        """All ids ever used, those of requests still to arrive included."""
        self._order = 0

    def __len__(self) -> int:
        return len(self.by_time) + len(self.by_step)

    @property
    def ids(self) -> list[str]:
        """Ids of the requests that have not arrived yet, in order of arrival."""
        # Slices: another thread's step may take some away meanwhile.
        return ids_of(self.by_time[::-1], self.by_step[::-1])

    def enqueue(self, specs: Iterable[RequestSpec]) -> None:
        """More requests, to be delivered at their arrival time or step.

        Raises RequestError for an id that was used before.
        """
        for spec in specs:
            self.take_ids(spec)
            if spec.arrival_step is None:
                self.by_time.append((spec.arrival_s, self._order, spec))
            else:
                self.by_step.append((spec.arrival_step, self._order, spec))
            self._order += 1
        self.by_time.sort(key=_when, reverse=True)
        self.by_step.sort(key=_when, reverse=True)

    def take_ids(self, spec: RequestSpec) -> None:
        """The request's ids, those of its further sequences included, are used from now on.

        Raises RequestError for one that was used before.
        """
        for request_id in sequence_ids(spec):
            if request_id in self.known:
                raise RequestError(f"request id {request_id!r} was used before: ids must be unique in a run")
        self.known.update(sequence_ids(spec))

    def discard(self, request_id: str) -> None:
        """A request that has not arrived never will; its ids may be used again.

        Raises KeyError if it is not among them.
        """
        self.known.difference_update(sequence_ids(self._spec(request_id)))
        self.drop({request_id})

    def revise(self, spec: RequestSpec) -> None:
        """Another spec for a request that has not arrived; its place in the order of arrival stays.

        Raises KeyError if it is not among them.
        """
        self._spec(spec.request_id)
        self.by_time = [(t, n, spec if x.request_id == spec.request_id else x) for t, n, x in self.by_time]
        self.by_step = [(t, n, spec if x.request_id == spec.request_id else x) for t, n, x in self.by_step]

    def _spec(self, request_id: str) -> RequestSpec:
        for _, _, spec in (*self.by_time, *self.by_step):
            if spec.request_id == request_id:
                return spec
        raise KeyError(f"{request_id!r} is not among the requests still to arrive")

    def drop(self, request_ids: Container[str]) -> None:
        """These are no longer to arrive."""
        self.by_time = [x for x in self.by_time if x[2].request_id not in request_ids]
        self.by_step = [x for x in self.by_step if x[2].request_id not in request_ids]

    def forget(self, arrived: set[str]) -> None:
        """These have arrived. Nearly always they are the next ones; else all are looked through."""
        for pending in (self.by_time, self.by_step):
            while pending and pending[-1][2].request_id in arrived:
                arrived.discard(pending.pop()[2].request_id)
        if arrived:
            self.drop(arrived)

    def take_due(self, now_s: float, step: int) -> list[RequestSpec]:
        """Takes the requests that are due: by time, then by step."""
        _take(self.by_time, now_s, self.taken[0])
        _take(self.by_step, step, self.taken[1])
        return [x[2] for x in (*self.taken[0], *self.taken[1])]

    def settle(self) -> None:
        """Those that were taken are found elsewhere from here on: in a record, or in the lists again."""
        self.taken = [], []


class Kept:
    """What a step that fails gives back to `arrivals`."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._lists = arrivals.by_time, arrivals.by_step
        self._lengths = len(arrivals.by_time), len(arrivals.by_step)

    def put_back(self, arrivals: Arrivals) -> None:
        arrivals.by_time, arrivals.by_step = self._lists
        for pending, taken, length in zip(self._lists, arrivals.taken, self._lengths, strict=True):
            pending += reversed(taken[: length - len(pending)])


def ids_of(*pending: list[Pending]) -> list[str]:
    return [x[2].request_id for some in pending for x in some]


def _when(x: Pending) -> tuple[float, int]:
    return x[0], x[1]


def _take(pending: list[Pending], now: float, into: list[Pending]) -> None:
    while pending and pending[-1][0] <= now:
        into.append(pending[-1])  # first in both lists, then in one: whoever looks meanwhile finds it
        pending.pop()
