"""A runner that replays recorded tokens under any schedule: what-ifs change scheduling alone, and a classroom needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cbviz.config import ModelSpec
from cbviz.messages import RunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from cbviz.model.tokenizer import Tokenizer


class TapeError(RuntimeError):
    """The tape has no token for what was asked. Names the request and the position."""


class TapeRunner:
    """`tokens`: for each request id its recorded output tokens; `prompt_lens`: its prompt's length.

    `texts`: for each request id what each of its tokens added to the text, as it was recorded, so that words are shown without a tokenizer.
    """

    name = "tape"
    simulated = True

    def __init__(self, spec: ModelSpec, tokens: dict[str, list[int]], prompt_lens: dict[str, int], tokenizer: Tokenizer | None = None, eos_token_ids: tuple[int, ...] = (),
                 texts: dict[str, list[str]] | None = None) -> None:
        self.spec = spec
        self.tokens = tokens
        self.prompt_lens = prompt_lens
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.texts = texts or {}

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        out: dict[str, list[int]] = {}
        for c in plan.chunks:
            if not c.sample:
                continue
            tape = self.tokens.get(c.request_id)
            if tape is None:
                raise TapeError(f"{c.request_id} is not on the tape: a taped run can only replay the requests of its recording")
            k = c.start + c.num_tokens - self.prompt_lens[c.request_id]
            if k >= len(tape):
                raise TapeError(f"{c.request_id}: the tape holds {len(tape)} output tokens, token {k + 1} was asked for")
            out[c.request_id] = [tape[k]]
        return RunnerOutput(out)

    def sync(self, tables: Mapping[str, Sequence[int]], tokens: Mapping[str, Sequence[int]]) -> int:
        return 0

    def damaged_blocks(self) -> set[int]:
        return set()

    def reset(self) -> None:
        return
