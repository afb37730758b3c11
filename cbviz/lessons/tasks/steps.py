"""What the next step computes."""

from __future__ import annotations

import random
from typing import Any

from cbviz.lessons.grading import Part, ask, must_be_function, told
from cbviz.lessons.tasks.common import Tally, make_spec, run_simulated


class PredictTheStep:
    """Decodes, half-done prompts, admissions: one budget."""

    name = "predict-the-step"
    title = "What will the next step compute?"
    question = """Chunked prefill, first come first served, blocks enough, nothing cached. Write a function of one case that returns a dict: request id -> tokens that it
computes in the next step (leave out, or give 0, who computes nothing). A case is a dict:
  budget   tokens of one step
  seats    requests that may run at once
  running  in the scheduler's order, each a dict with request_id, num_tokens (known so far) and num_computed_tokens
  waiting  the queue, head first, each a dict with request_id and num_tokens"""
    hints = (
        (
            "A request wants num_tokens - num_computed_tokens tokens. If that is 1 it decodes; if it is "
            "more, "
            "its prompt is half done."
        ),
        (
            "Decodes go first, in their order; then half-done prompts, each with as much as the budget still "
            "has; then the queue."
        ),
        (
            "From the queue, head first, as long as a seat and a token of budget are left. The last one "
            "gets a "
            "smaller chunk, and nobody behind it is let in."
        ),
    )

    def _cases(self, seed: int, most: int = 10) -> list[tuple[dict[str, Any], dict[str, int]]]:
        rng = random.Random(seed)
        cases: list[tuple[dict[str, Any], dict[str, int]]] = []
        for _ in range(40):
            budget, seats = rng.choice((16, 24, 32, 48)), rng.randint(3, 6)
            specs = [
                make_spec(
                    f"r{i + 1}",
                    rng,
                    rng.choice((5, 12, 20, 60, 90)),
                    rng.randint(2, 14),
                    arrival_step=rng.randint(1, 12),
                )
                for i in range(12)
            ]
            trace = run_simulated(
                specs,
                discipline="chunked",
                max_num_seqs=seats,
                max_num_batched_tokens=budget,
                num_blocks=400,
                block_size=8,
                enable_prefix_caching=False,
            )
            here: list[tuple[dict[str, Any], dict[str, int]]] = []
            for record in trace.records[1:]:
                if record.arrivals:  # a request that is only about to arrive can't be known
                    continue
                state = trace.state(record.step - 1)
                if not state.waiting or not any(
                    self._half_done(state.requests[rid]) for rid in state.running
                ):
                    continue
                running, waiting = (
                    [state.requests[rid] for rid in state.running],
                    [state.requests[rid] for rid in state.waiting],
                )
                case = {
                    "budget": budget,
                    "seats": seats,
                    "running": [
                        {
                            "request_id": r.request_id,
                            "num_tokens": r.num_tokens,
                            "num_computed_tokens": r.num_computed_tokens,
                        }
                        for r in running
                    ],
                    "waiting": [{"request_id": r.request_id, "num_tokens": r.num_tokens} for r in waiting],
                }
                here.append((case, {c.request_id: c.num_tokens for c in record.chunks}))
            # of one run those in which somebody is let in first, and no more than three, so that the cases
            # differ
            here.sort(key=lambda x: not any(w["request_id"] in x[1] for w in x[0]["waiting"]))
            cases += here[:3]
            if len(cases) >= most:
                break
        return cases[:most]

    @staticmethod
    def _half_done(r: Any) -> bool:
        return bool(r.num_tokens - r.num_computed_tokens > 1)

    def sample(self, seed: int) -> str:
        case, truth = self._cases(seed, 1)[0]
        return f"A case:\n{told(case)}\nThe engine computed: {truth}"

    def grade(self, answer: Any, seed: int) -> list[Part]:
        must_be_function(answer, "one case")
        tallies = {
            "decodes": Tally("decodes", 25),
            "half-done prompts": Tally("half-done prompts", 35),
            "admissions": Tally("admissions", 40),
        }
        for case, truth in self._cases(seed):
            got, fault = ask(answer, case)
            said = {k: v for k, v in got.items() if v} if isinstance(got, dict) else None
            decodes = {
                r["request_id"] for r in case["running"] if r["num_tokens"] - r["num_computed_tokens"] == 1
            }
            halves = {r["request_id"] for r in case["running"]} - decodes
            known = {
                "decodes": decodes,
                "half-done prompts": halves,
                "admissions": {r["request_id"] for r in case["waiting"]},
            }
            for what, ids in known.items():
                if not ids:
                    continue
                right = {k: v for k, v in truth.items() if k in ids}
                mine = None if said is None else {k: v for k, v in said.items() if k in ids}
                tallies[what].add(case, right, mine, fault)
        return [t.part() for t in tallies.values()]
