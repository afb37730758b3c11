"""Which drafts are accepted."""

from __future__ import annotations

import random
from typing import Any

from cbviz import events as ev
from cbviz.core.speculative import ngram
from cbviz.cost import models
from cbviz.lessons.grading import Part, ask, must_be_function, told
from cbviz.lessons.tasks.common import TO_THE_END, Tally
from cbviz.messages import RequestSpec
from cbviz.runners.tape import TapeRunner
from cbviz.session import Session


class AcceptTheDrafts:
    """Prompt lookup, and what a step with drafts yields."""

    name = "accept-the-drafts"
    title = "What does a step with drafts yield?"
    question = """Speculative decoding by prompt lookup, greedy. Write a function of one case that returns a dict. A case is a dict:
  text      token ids of a request so far; the last of them is about to be computed
  most      drafts that may be proposed
  shortest, longest   how many of the last tokens are looked for earlier in the text
  would_say what the model alone would say next, token by token
The answer:
  drafts    the tokens that are proposed
  yields    the tokens that this step adds to the text
  computed  how many tokens the step computes for this request, those that are thrown away included"""
    hints = (
        (
            "Try the longest run of last tokens first, then shorter ones. Of several places where it stands "
            "earlier, the first in the text counts."
        ),
        (
            "What followed there is proposed: at most `most` tokens, fewer where the text ends. The run at "
            "the "
            "very end itself is no find."
        ),
        (
            "Drafts are right as long as they are what the model would say. The step yields those and one "
            "more, the model's own: after d right drafts d + 1 tokens."
        ),
    )

    def _cases(self, seed: int, most: int = 14) -> list[dict[str, Any]]:
        rng = random.Random(seed)
        cases = []
        for i in range(most):
            motif = [rng.randrange(10, 16) for _ in range(rng.randint(4, 9))]
            before, between = (
                [rng.randrange(low, low + 6) for _ in range(rng.randint(0, n))]
                for low, n in ((10, 5), (20, 4))
            )
            text = [*before, *motif, *between, *motif[: rng.randint(2, len(motif))]]
            shortest = rng.randint(1, 2)
            case = {
                "text": text,
                "most": rng.randint(1, 5),
                "shortest": shortest,
                "longest": shortest + rng.randint(0, 3),
            }
            drafts = self._engine({**case, "would_say": [1] * 8})["drafts"]
            right = (rng.randint(0, len(drafts)), len(drafts), 0)[i % 3]
            cases.append(
                {**case, "would_say": (drafts[:right] + [rng.randrange(40, 50) for _ in range(8)])[:8]}
            )
        return cases

    def _engine(self, case: dict[str, Any]) -> dict[str, Any]:
        """The step that computes the text's last token: on a tape of what the model would say."""
        text, says = case["text"], case["would_say"]
        shape = models.get("smollm2")
        one = RequestSpec("r1", tuple(text[:-1]), 1 + len(says), sampling=TO_THE_END, arrival_step=1)
        s = Session(
            [one],
            runner=TapeRunner(shape, {"r1": [text[-1], *says]}, {"r1": len(text) - 1}),
            discipline="vllm",
            num_blocks=64,
            enable_prefix_caching=False,
            speculative="ngram",
            num_speculative_tokens=case["most"],
            prompt_lookup_min=case["shortest"],
            prompt_lookup_max=case["longest"],
        )
        s.run(max_steps=2)
        record = s.trace.record(2)
        drafts = ngram(text, case["most"], case["shortest"], case["longest"])
        return {
            "drafts": drafts,
            "yields": next(list(e.token_ids) for e in record.events if isinstance(e, ev.Sampled)),
            "computed": record.tokens.total,
        }

    def sample(self, seed: int) -> str:
        case = next(c for c in self._cases(seed) if len(self._engine(c)["drafts"]) > 1)
        return f"A case:\n{told({k: str(v) for k, v in case.items()})}\nThe engine says: {self._engine(case)}"

    def grade(self, answer: Any, seed: int) -> list[Part]:
        must_be_function(answer, "one case")
        tallies = {
            "drafts": Tally("drafts", 40),
            "yields": Tally("yields", 40),
            "computed": Tally("computed", 20),
        }
        for case in self._cases(seed):
            truth = self._engine(case)
            got, fault = ask(answer, case)
            for key, tally in tallies.items():
                said = got.get(key) if isinstance(got, dict) else None
                tally.add(case, truth[key], list(said) if isinstance(said, tuple) else said, fault)
        return [t.part() for t in tallies.values()]
