"""One step while it is being planned: what is left of the budget, and who got what so far."""

from __future__ import annotations

from cbviz.config import EngineConfig
from cbviz.core.request import Request
from cbviz.messages import Chunk, ChunkRecord, SchedulerOutput, SlotAccount, TokenAccount

NO_TOKENS = TokenAccount()
NO_SLOTS = SlotAccount()
"""What is counted before the plan stands."""


class Iteration:
    """Made by `Scheduler.schedule` for each step, and of no more use when its tokens are there."""

    __slots__ = (
        "budget",
        "now_s",
        "num_preempted",
        "plan",
        "prefill_ran",
        "records",
        "shares",
        "slots",
        "tokens",
    )

    def __init__(self, step: int, config: EngineConfig, now_s: float) -> None:
        self.plan = SchedulerOutput(step, config.block_size)
        self.now_s = now_s
        self.budget = config.max_num_batched_tokens or 0
        """Tokens that may still be planned."""
        self.shares: list[Request] = []
        """Whose the chunks of the plan are, in their order."""
        self.records: list[ChunkRecord] = []
        """The chunks as the trace will have them, in their order."""
        self.num_preempted = 0
        self.prefill_ran = False
        """A running request that was in its prefill has tokens in this step."""
        self.tokens = NO_TOKENS
        self.slots = NO_SLOTS

    def put_at(self, place: int, r: Request, chunk: Chunk, record: ChunkRecord) -> None:
        """One more chunk at `place` of the plan."""
        self.plan.chunks.insert(place, chunk)
        self.shares.insert(place, r)
        self.records.insert(place, record)
        self.budget -= chunk.num_tokens

    def take_back(self, r: Request) -> bool:
        """Takes the request's chunk out of the plan. False: it has none."""
        if r not in self.shares:
            return False
        place = self.shares.index(r)
        self.budget += self.plan.chunks[place].num_tokens
        del self.shares[place], self.plan.chunks[place], self.records[place]
        return True
