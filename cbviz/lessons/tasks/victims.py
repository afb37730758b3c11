"""Who is preempted."""

from __future__ import annotations

import random
from typing import Any

from cbviz import events as ev
from cbviz.lessons.grading import Part, ask, must_be_function, told
from cbviz.lessons.tasks.common import Tally, make_spec, run_simulated


class NameTheVictim:
    """Four rules of preemption, on situations from real schedules."""

    name = "name-the-victim"
    title = "Who loses its blocks?"
    question = """The pool is full and a running request needs a block. Write a function of one case that returns the id of the request that is preempted. A case is a dict:
  rule     last | lowest-priority | least-work-lost | fewest-outputs
  running  the running requests in the scheduler's order, each a dict with request_id, arrived (0 came first), priority (smaller is more urgent),
           num_prompt_tokens, num_output_tokens, num_computed_tokens"""
    hints = (
        (
            "last: the last of the running queue, whoever it is. The running queue is in the order of "
            "admission, and a resumed request goes to its end."
        ),
        (
            "lowest-priority: the largest priority number; among equals the latest arrival. least-work-lost: "
            "the fewest computed tokens; among equals the latest arrival."
        ),
        (
            "fewest-outputs: the fewest output tokens, among equals the longest prompt, among these the "
            "latest "
            "arrival. max(running, key=lambda r: (...)) says it in one line."
        ),
    )
    _RULES = {"last": 15, "lowest-priority": 25, "least-work-lost": 30, "fewest-outputs": 30}

    def _cases(self, rule: str, seed: int, most: int = 6) -> list[tuple[dict[str, Any], str]]:
        """Situations at the first preemption of a step, and who was the victim.

        Another than the last of the queue wherever the rule allows.
        """
        rng = random.Random(seed)
        plain: list[tuple[dict[str, Any], str]] = []
        telling: list[tuple[dict[str, Any], str]] = []
        for _ in range(12):
            specs = [
                make_spec(
                    f"r{i + 1}",
                    rng,
                    rng.choice((9, 12, 24, 30)),
                    rng.randint(20, 50),
                    arrival_step=rng.randint(1, 14),
                    priority=rng.randint(0, 2),
                )
                for i in range(8)
            ]
            trace = run_simulated(
                specs,
                discipline="vllm",
                victim=rule,
                max_num_seqs=6,
                num_blocks=22,
                block_size=8,
                max_model_len=96,
                max_num_batched_tokens=64,
                enable_prefix_caching=False,
            )
            for record in trace:
                hit = next((e for e in record.events if isinstance(e, ev.Preempted)), None)
                if hit is None or len(hit.ranking) < 4:
                    continue
                state = trace.state(record.step - 1)
                rows = [state.requests[rid] for rid in state.running]
                case = {
                    "rule": rule,
                    "running": [
                        {
                            "request_id": r.request_id,
                            "arrived": r.index,
                            "priority": r.priority,
                            "num_prompt_tokens": r.num_prompt_tokens,
                            "num_output_tokens": len(r.output_token_ids),
                            "num_computed_tokens": r.num_computed_tokens,
                        }
                        for r in rows
                    ],
                }
                (telling if hit.request_id != state.running[-1] else plain).append((case, hit.request_id))
            if len(telling) >= most or (rule == "last" and len(plain) >= most):
                break
        return (telling + plain)[:most]

    def sample(self, seed: int) -> str:
        case, victim = self._cases("least-work-lost", seed, 1)[0]
        return f"A case:\n{told(case)}\nThe engine preempted {victim}."

    def grade(self, answer: Any, seed: int) -> list[Part]:
        must_be_function(answer, "one case")
        parts = []
        for rule, points in self._RULES.items():
            tally = Tally(rule, points)
            for case, truth in self._cases(rule, seed):
                got, fault = ask(answer, case)
                tally.add(case, truth, got, fault)
            parts.append(tally.part())
        return parts
