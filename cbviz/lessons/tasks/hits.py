"""How many tokens a prefix cache saves."""

from __future__ import annotations

import random
from typing import Any

from cbviz import events as ev
from cbviz.lessons.grading import Part, ask, must_be_function, told
from cbviz.lessons.tasks.common import TO_THE_END, Tally, events_of, run_simulated
from cbviz.messages import RequestSpec


class CountTheHits:
    """Whole blocks, chained hashes, and the last token."""

    name = "count-the-hits"
    title = "How many tokens does the prefix cache save?"
    question = """Prompts come one after another, each when the one before has ended, and nothing is ever evicted. Write a function of one case
(a dict with block_size and prompts, a list of lists of token ids) that returns a list: for each prompt, how many of its tokens are found in the cache.
Each request asks for one output token, so only prompts are cached."""
    hints = (
        (
            "Only full blocks are found. A prompt's blocks are compared from the left, and the first that is "
            "not there ends the search."
        ),
        (
            "A block's hash holds its parent's hash: the same tokens behind another beginning are another "
            "block. Keep a set of tuple(prompt[:end])."
        ),
        (
            "At least one token must be computed, or there would be no logits: of a prompt of n tokens at "
            "most "
            "(n - 1) // block_size blocks are taken from the cache."
        ),
    )

    def _case(self, rng: random.Random) -> tuple[dict[str, Any], list[str]]:
        """A case, and for each prompt which part it belongs to."""
        size = rng.choice((2, 4, 8))
        stem = [rng.randrange(1000, 2000) for _ in range(size * rng.randint(3, 5))]
        changed = stem.copy()
        changed[rng.randrange(size, 2 * size)] = 7
        other = [5, *stem[1:]]
        tail = [rng.randrange(2000, 3000) for _ in range(rng.randint(1, 3 * size))]
        rows = [
            (stem + tail, "begin"),
            (stem, "again"),
            (stem + tail, "again"),
            (stem[: -rng.randint(1, size - 1)], "begin"),
            (changed + tail, "changed"),
            (other + tail, "changed"),
            (other, "again"),
            (stem + [9] * rng.randint(1, size), "begin"),
        ]
        first, rest = rows[0], rows[1:]
        rng.shuffle(rest)
        kinds = {
            "begin": "a shared beginning",
            "again": "a whole prompt again",
            "changed": "one token changed",
        }
        return {"block_size": size, "prompts": [p for p, _ in (first, *rest)]}, [
            kinds[k] for _, k in (first, *rest)
        ]

    def _truth(self, case: dict[str, Any]) -> list[int]:
        specs = [
            RequestSpec(f"r{i}", tuple(p), 1, arrival_step=3 * i + 1, sampling=TO_THE_END, output_len=1)
            for i, p in enumerate(case["prompts"])
        ]
        trace = run_simulated(specs, discipline="vllm", num_blocks=400, block_size=case["block_size"])
        hits = {e.request_id: e.num_cached_tokens for e in events_of(trace, ev.Admitted)}
        return [hits[x.request_id] for x in specs]

    def sample(self, seed: int) -> str:
        case, _ = self._case(random.Random(seed))
        return f"A case:\n{told(case)}\nThe engine says: {self._truth(case)}"

    def grade(self, answer: Any, seed: int) -> list[Part]:
        must_be_function(answer, "one case")
        rng = random.Random(seed)
        tallies = {
            kind: Tally(kind, points)
            for kind, points in (
                ("a shared beginning", 40),
                ("a whole prompt again", 30),
                ("one token changed", 30),
            )
        }
        for _ in range(6):
            case, kinds = self._case(rng)
            truth = self._truth(case)
            got, fault = ask(answer, case)
            for i, kind in enumerate(kinds):
                said = got[i] if isinstance(got, (list, tuple)) and len(got) == len(truth) else None
                tallies[kind].add({**case, "asked for": f"prompt {i}, counted from 0"}, truth[i], said, fault)
        return [t.part() for t in tallies.values()]
