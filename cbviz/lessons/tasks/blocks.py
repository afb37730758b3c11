"""How many blocks a request holds."""

from __future__ import annotations

import random
from typing import Any

from cbviz import events as ev
from cbviz.lessons.grading import Part, ask, must_be_function, told
from cbviz.lessons.tasks.common import Tally, events_of, make_spec, run_simulated


class CountTheBlocks:
    """Ceiling division, and which tokens have KV."""

    name = "count-the-blocks"
    title = "How many KV blocks does it hold?"
    question = """A request has `prompt` prompt tokens, may produce `max_tokens` tokens, and now gets its output token number `output`. Nothing is shared.
Write a function of one case (a dict with prompt, output, max_tokens, block_size) that returns a dict:
  paged     blocks that it holds in this step when blocks are taken on demand (paged, vllm)
  empty     slots in these blocks in which no token's KV stands after the step
  reserved  blocks that it took at admission when all of prompt + max_tokens is reserved (orca)"""
    hints = (
        (
            "A block holds block_size tokens, and the last one may be partly empty: divide and round up, "
            "-(-tokens // block_size)."
        ),
        (
            "The step that samples output token number n computes the KV of the prompt and of the n - 1 "
            "tokens "
            "before it."
        ),
        (
            "The new token itself gets its KV in the next step, if there is one: tokens with KV = prompt + "
            "output - 1."
        ),
    )

    def _cases(self, seed: int) -> list[dict[str, int]]:
        rng = random.Random(seed)
        cases = []
        for i in range(16):
            size = rng.choice((1, 4, 8, 16, 32)) if i % 4 else 16
            prompt, output = rng.randint(1, 90), rng.randint(1, 40)
            if i % 2:  # half of them at the edge, where rounding and the token without KV show
                prompt += (rng.choice((0, 1)) - prompt - output) % size
            cases.append(
                {
                    "prompt": prompt,
                    "output": output,
                    "max_tokens": output + rng.randint(0, 60),
                    "block_size": size,
                }
            )
        return cases

    def _truth(self, case: dict[str, int]) -> dict[str, int]:
        rng = random.Random(0)
        one = make_spec("r1", rng, case["prompt"], case["output"], max_tokens=case["max_tokens"])
        pool: dict[str, Any] = {
            "num_blocks": 400,
            "block_size": case["block_size"],
            "enable_prefix_caching": False,
        }
        paged = run_simulated([one], discipline="vllm", **pool)
        reserved = run_simulated([one], discipline="orca", **pool).record(1)
        taken = sum(len(e.block_ids) for e in events_of(paged, ev.Allocated))
        return {
            "paged": taken,
            "empty": paged.records[-1].slots.partly_empty,
            "reserved": sum(len(e.block_ids) for e in reserved.events if isinstance(e, ev.Allocated)),
        }

    def sample(self, seed: int) -> str:
        case = self._cases(seed)[0]
        return f"A case:\n{told(case)}\nThe engine says: {self._truth(case)}"

    def grade(self, answer: Any, seed: int) -> list[Part]:
        must_be_function(answer, "one case")
        tallies = {
            "paged": Tally("paged", 40),
            "empty": Tally("empty", 30),
            "reserved": Tally("reserved", 30),
        }
        for case in self._cases(seed):
            truth = self._truth(case)
            got, fault = ask(answer, case)
            for key, tally in tallies.items():
                said = got.get(key) if isinstance(got, dict) else None
                tally.add(case, truth[key], said, fault)
        return [t.part() for t in tallies.values()]
