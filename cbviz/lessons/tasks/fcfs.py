"""A policy that beats first come, first served."""

from __future__ import annotations

import random
from typing import Any

from cbviz.core.policy import POLICIES, policy
from cbviz.core.ranking import PolicyError
from cbviz.lessons.grading import Part, must_be_function
from cbviz.lessons.tasks.common import make_spec, run_simulated
from cbviz.messages import RequestSpec
from cbviz.trace.metrics import request_metrics


class BeatFcfs:
    """A policy that is quicker on average and lets nobody starve."""

    name = "beat-fcfs"
    title = "Beat first come, first served, without starving anybody"
    FASTER, LONGEST, NO_POINTS = 0.85, 1.2, 1.6
    question = f"""80 requests for 4 seats; three of four want 5 to 30 tokens, one of four 120 to 200, and more arrive than the seats can serve.
Write a policy, a function (r, now) that returns a rank, lowest first (help(cbviz.core.request.RequestView) lists what r tells). It must bring the mean time
from arrival to end to {FASTER:.0%} of FCFS's or less, and nobody may wait for a seat longer than {LONGEST} times the longest wait under FCFS.
It is tried on three draws that you have not seen."""
    hints = (
        (
            "Who is served first matters for the mean: let those go first who hold a seat only for a short "
            "time. r.num_remaining says how much is still to compute."
        ),
        (
            "Shortest first alone lets the long ones wait as long as short ones arrive. r.num_waiting_steps "
            "says how long somebody has waited."
        ),
        (
            "Take something off the rank for each step of waiting: r.num_remaining - k * "
            "r.num_waiting_steps. "
            "How large must k be, and what happens if it is very large?"
        ),
    )

    def _workload(self, seed: int) -> list[RequestSpec]:
        rng = random.Random(seed)
        long = {i for start in range(0, 80, 8) for i in rng.sample(range(start, start + 8), 2)}
        specs, step = [], 1
        for i in range(80):
            output = rng.randint(120, 200) if i in long else rng.randint(5, 30)
            specs.append(make_spec(f"r{i + 1}", rng, rng.randint(8, 40), output, arrival_step=step))
            step += rng.randint(0, 16)
        return specs

    def figures(self, name: str, seed: int, draws: int = 3) -> tuple[float, float]:
        """(mean time from arrival to end, longest wait for a seat) under the registered policy `name`,
        seconds, modelled (5 ms a step + 0.1 ms a token).
        """
        ends: list[float] = []
        waits: list[float] = []
        for i in range(draws):
            rows = request_metrics(
                run_simulated(
                    self._workload(seed + i),
                    discipline="vllm",
                    max_num_seqs=4,
                    num_blocks=256,
                    policy=name,
                    cost="article-shared",
                )
            )
            ends += [r["e2e_s"] for r in rows]
            waits += [r["queue_time_s"] for r in rows]
        return sum(ends) / len(ends), max(waits)

    def sample(self, seed: int) -> str:
        mean, wait = self.figures("fcfs", seed, 1)
        return (
            f"Under FCFS in one draw (modelled): mean {mean:.2f} s from arrival to end, longest wait "
            f"{wait:.2f} s."
        )

    def grade(self, answer: Any, seed: int) -> list[Part]:
        must_be_function(answer, "(r, now)")
        before = dict(POLICIES)
        try:
            policy(answer)
            # under a name of its own: a function called fcfs must not become what it is compared with
            mine = next(p for n, p in POLICIES.items() if before.get(n) is not p)
            POLICIES.clear()
            POLICIES.update(before)
            POLICIES["lesson"] = mine
            mean, wait = self.figures("lesson", seed)
        except PolicyError as e:
            return [Part("faster", 60, 0.0, str(e)), Part("nobody starves", 40, 0.0)]
        finally:
            POLICIES.clear()
            POLICIES.update(before)
        fcfs_mean, fcfs_wait = self.figures("fcfs", seed)
        faster, longer = mean / fcfs_mean, wait / fcfs_wait
        gained = min(1.0, max(0.0, (1 - faster) / (1 - self.FASTER)))
        kept = min(1.0, max(0.0, (self.NO_POINTS - longer) / (self.NO_POINTS - self.LONGEST)))
        not_all = "" if gained == 1 else "; counts as far as it is faster"
        return [
            Part("faster", 60, gained, f"mean time is {faster:.0%} of FCFS's, asked for {self.FASTER:.0%}"),
            # FCFS itself starves nobody: only whoever is faster earns this
            Part(
                "nobody starves",
                40,
                kept * gained,
                f"the longest wait is {longer:.2f} times FCFS's, at most {self.LONGEST}{not_all}",
            ),
        ]
