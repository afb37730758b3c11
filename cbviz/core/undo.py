"""How a step is taken back: what it changed is put back in reverse order, and the rest as it was at `begin`."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from cbviz.config import EngineConfig
from cbviz.core import request
from cbviz.core.fields import undone
from cbviz.core.kv.block_pool import BlockPool
from cbviz.core.overtaken import Overtaken
from cbviz.core.plain import FIELDS
from cbviz.core.policy import POLICIES
from cbviz.core.ranking import Policy
from cbviz.core.request import Request
from cbviz.core.speculative import PROPOSERS, Proposer
from cbviz.events import AnyEvent

_UNDONE = undone(FIELDS)
_REQUEST_UNDONE = undone(request.FIELDS)
_begun = attrgetter(*_UNDONE)
_saved = attrgetter(*_REQUEST_UNDONE)


class Undoable:
    """The part of `ControlState` that remembers. Its fields are made there."""

    pool: BlockPool
    undo: list[tuple[Callable[..., Any], tuple[Any, ...]]]
    journal: list[AnyEvent]
    config: EngineConfig
    policy: Policy
    proposer: Proposer | None
    step: int
    requests: dict[str, Request]
    waiting: list[Request]
    running: list[Request]
    overtaken: Overtaken
    finished_ids: list[str]
    _begun: tuple[Any, ...] = ()

    def _forget_caches(self) -> None:
        """What can be computed again: it is looked up when somebody asks."""
        self.ranked_now = False
        """The ranks are those of this step."""
        self.tokens_waiting: int | None = None
        """Tokens of the waiting queue while requests arrive."""
        self.next_end_s: float | None = None
        """Nobody's time is up before this moment."""
        self._queues_saved = self._requests_saved = False

    def begin(self) -> None:
        """Starts a step: what follows can be taken back by `rollback`."""
        self.undo.clear()
        self.pool.step = self.step + 1
        self.overtaken.tidy()
        self._queues_saved = self._requests_saved = self.ranked_now = False
        self.tokens_waiting = None
        self._begun = len(self.journal), len(self.finished_ids), _begun(self)
        # Their cells may have been run again. One that is gone stays in force: the input that replaces it
        # must get through.
        self.policy = POLICIES.get(self.config.policy, self.policy)
        self.proposer = PROPOSERS.get(self.config.speculative, self.proposer)

    def rollback(self) -> None:
        """Takes back everything since `begin`."""
        self.pool.rollback()
        num_events, num_finished, values = self._begun
        for name, value in zip(_UNDONE, values, strict=True):
            setattr(self, name, value)
        del self.journal[num_events:]
        del self.finished_ids[num_finished:]
        self.pool.step = self.step
        self._forget_caches()

    def save(self, r: Request) -> None:
        """Keeps the request's fields before they change."""
        self.undo.append((_restore_request, (r, _saved(r), r.block_ids, len(r.block_ids))))

    def change(self, r: Request, name: str, value: object) -> None:
        """Sets one field of a request and notes what it was."""
        self.undo.append((setattr, (r, name, getattr(r, name))))
        setattr(r, name, value)

    def save_queues(self) -> None:
        """Keeps both queues before the first change of a step."""
        if not self._queues_saved:
            self._queues_saved = True
            self.undo.append((self._restore_queues, (self.waiting.copy(), self.running.copy())))

    def _restore_queues(self, waiting: list[Request], running: list[Request]) -> None:
        self.waiting[:] = waiting
        self.running[:] = running

    def save_requests(self) -> None:
        """Keeps all requests in their order, before the first of them leaves: put back one by one they would
        stand in another.
        """
        if not self._requests_saved:
            self._requests_saved = True
            self.undo.append((setattr, (self, "requests", self.requests.copy())))


def _restore_request(r: Request, values: tuple[Any, ...], block_ids: list[int], length: int) -> None:
    for name, value in zip(_REQUEST_UNDONE, values, strict=True):
        setattr(r, name, value)
    del block_ids[length:]
    r.block_ids = block_ids
