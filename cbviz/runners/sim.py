"""A runner without weights: it makes up tokens and measures nothing, so the time is the cost model's.

Runs anywhere, a million requests if need be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

from cbviz.messages import Drafting, RunnerOutput, SchedulerOutput
from cbviz.specs import ModelSpec

FIRST_TOKEN = 1000
NUM_TOKENS = 39_000
WRONG_TOKEN = FIRST_TOKEN - 1
MODELLED = ("ngram", "self-draft", "draft-model")
"""Proposers whose drafts are made up here: tokens that mean nothing can't be looked up, and there is no
model.
"""


def num_right(seed: int, request_id: str, position: int, drafting: Drafting) -> int:
    """How many of the drafts for the positions from `position` on are right: each with the chance
    `acceptance` if those before it are. A pure function of its arguments.
    """
    n = 0
    while (
        n < drafting.num_tokens
        and crc32(f"{seed}/{request_id}/draft {position + n}".encode()) < drafting.acceptance * 2**32
    ):
        n += 1
    return n


class SimRunner:
    """Counter tokens: output k of a request is a pure function of (seed, request id, k), whatever shares its
    batch.

    Drafts are right as often as `EngineConfig.draft_acceptance` says. The ids lie in FIRST_TOKEN ..
    FIRST_TOKEN + NUM_TOKENS - 1, clear of special tokens.
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
        out: dict[str, list[int]] = {}
        drafts: dict[str, list[int]] = {}
        made_up = plan.drafting is not None and plan.drafting.method in MODELLED
        for c in plan.chunks:
            if not c.sample:
                continue
            at = c.start + c.num_tokens - c.num_draft
            new = [self.token(c.request_id, at)]
            while (
                len(new) <= c.num_draft
                and c.draft_token_ids is not None
                and c.draft_token_ids[len(new) - 1] == new[-1]
            ):
                new.append(self.token(c.request_id, at + len(new)))
            out[c.request_id] = new
            for i in c.fork_ids:
                out[i] = [self.token(i, at)]
            if plan.drafting is not None and made_up:
                at += len(new)
                right = num_right(self.seed, c.request_id, at, plan.drafting)
                drafts[c.request_id] = [
                    self.token(c.request_id, at + j) if j < right else WRONG_TOKEN
                    for j in range(plan.drafting.num_tokens)
                ]
        return RunnerOutput(out, draft_ids=drafts if made_up else None)

    def sync(self, tables: Mapping[str, Sequence[int]], tokens: Mapping[str, Sequence[int]]) -> int:
        """Nothing is stored, so nothing has to be computed again: 0 blocks."""
        return 0

    def damaged_blocks(self) -> set[int]:
        """Blocks whose contents a failed step may have overwritten: none here."""
        return set()

    def reset(self) -> None:
        return
