"""A runner without weights: it makes up tokens and measures nothing, so the time is the cost model's. Runs anywhere, a million requests if need be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

from cbviz.config import ModelSpec
from cbviz.messages import RunnerOutput, SchedulerOutput

FIRST_TOKEN = 1000
NUM_TOKENS = 39_000


class SimRunner:
    """Counter tokens: output k of a request is a pure function of (seed, request id, k), whatever shares its batch.

    The ids lie in FIRST_TOKEN .. FIRST_TOKEN + NUM_TOKENS - 1, clear of special tokens.
    """

    name = "sim"
    tokenizer = None
    eos_token_ids: tuple[int, ...] = ()
    simulated = True

    def __init__(self, spec: ModelSpec, seed: int = 0) -> None:
        self.spec = spec
        self.seed = seed

    def token(self, request_id: str, position: int) -> int:
        """The token at `position` of the whole sequence (prompt included)."""
        return FIRST_TOKEN + (crc32(f"{self.seed}/{request_id}".encode()) + position * 7919) % NUM_TOKENS

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        return RunnerOutput({c.request_id: [self.token(c.request_id, c.start + c.num_tokens)] for c in plan.chunks if c.sample})

    def sync(self, tables: Mapping[str, Sequence[int]], tokens: Mapping[str, Sequence[int]]) -> int:
        """Nothing is stored, so nothing has to be computed again: 0 blocks."""
        return 0

    def damaged_blocks(self) -> set[int]:
        """Blocks whose contents a failed step may have overwritten: none here."""
        return set()

    def reset(self) -> None:
        return
