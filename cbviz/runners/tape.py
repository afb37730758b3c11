"""A runner that replays recorded tokens under any schedule: what-ifs change scheduling alone, and a classroom
needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cbviz.messages import RunnerOutput, SchedulerOutput
from cbviz.runners.sim import num_right
from cbviz.specs import ModelSpec

if TYPE_CHECKING:
    from cbviz.model.tokenizer import Tokenizer


class TapeError(RuntimeError):
    """The tape has no token for what was asked. Names the request and the position."""


class TapeRunner:
    """`tokens`: for each request id its recorded output tokens; `prompt_lens`: its prompt's length.

    A draft is right if it is what the tape says. Prompt lookup works on the recorded tokens as on any; drafts
    of a model, which is not here, are right as often as `EngineConfig.draft_acceptance` says.

    `texts`: for each request id what each of its tokens added to the text, as it was recorded, so that words
    are shown without a tokenizer.
    """

    name = "tape"
    simulated = True

    def __init__(
        self,
        spec: ModelSpec,
        tokens: dict[str, list[int]],
        prompt_lens: dict[str, int],
        tokenizer: Tokenizer | None = None,
        eos_token_ids: tuple[int, ...] = (),
        texts: dict[str, list[str]] | None = None,
    ) -> None:
        self.spec = spec
        self.tokens = tokens
        self.prompt_lens = prompt_lens
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.texts = texts or {}

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        out: dict[str, list[int]] = {}
        drafts: dict[str, list[int]] = {}
        made_up = plan.drafting is not None and plan.drafting.method in ("self-draft", "draft-model")
        for c in plan.chunks:
            if not c.sample:
                continue
            tape = self.tokens.get(c.request_id)
            if tape is None:
                raise TapeError(
                    f"{c.request_id} is not on the tape: a taped run can only replay the requests of its "
                    "recording"
                )
            k = c.start + c.num_tokens - c.num_draft - self.prompt_lens[c.request_id]
            if k >= len(tape):
                raise TapeError(
                    f"{c.request_id}: the tape holds {len(tape)} output tokens, token {k + 1} was asked for"
                )
            new = [tape[k]]
            while (
                len(new) <= c.num_draft
                and k + len(new) < len(tape)
                and c.draft_token_ids is not None
                and c.draft_token_ids[len(new) - 1] == new[-1]
            ):
                new.append(tape[k + len(new)])
            out[c.request_id] = new
            for i in c.fork_ids:
                if not self.tokens.get(i):
                    raise TapeError(
                        f"{i} is not on the tape: a taped run can only replay the sequences of its recording"
                    )
                out[i] = [self.tokens[i][0]]
            if plan.drafting is not None and made_up:
                at = k + len(new)
                right = num_right(0, c.request_id, at, plan.drafting)
                drafts[c.request_id] = [
                    t if j < right else (t + 1) % self.spec.vocab_size
                    for j, t in enumerate(tape[at : at + plan.drafting.num_tokens])
                ]
        return RunnerOutput(out, draft_ids=drafts if made_up else None)

    def sync(self, tables: Mapping[str, Sequence[int]], tokens: Mapping[str, Sequence[int]]) -> int:
        return 0

    def damaged_blocks(self) -> set[int]:
        return set()

    def reset(self) -> None:
        return
