"""Knobs that keep a promise."""

from __future__ import annotations

import random
from typing import Any

from cbviz.config import ConfigError, EngineConfig
from cbviz.lessons.grading import LessonError, Part
from cbviz.lessons.tasks.common import make_spec, run_simulated
from cbviz.messages import RequestSpec
from cbviz.session import Stuck
from cbviz.trace.metrics import latencies, percentile


class MeetTheSlo:
    """Two goals that pull the token budget apart, and seats."""

    name = "meet-the-slo"
    title = "Tune the engine until it keeps its promises"
    TTFT_S, ITL_S = 0.5, 0.016
    question = f"""A chat service on a modelled A100 with Llama-3.1-8B: 60 requests, about 12 a second, every twelfth with a prompt of 5,000 to 7,000 tokens.
It has promised that 99 of 100 first tokens come within {TTFT_S * 1000:.0f} ms of their request, and that 99 of 100 gaps between tokens are at most {ITL_S * 1000:.0f} ms.
Answer with a dict of settings. You may set max_num_seqs, max_num_batched_tokens, long_prefill_token_threshold, discipline, policy, watermark, enable_chunked_prefill.
It starts from discipline chunked, 8 seats, a budget of 256 tokens, 8,000 blocks of 16."""
    hints = (
        (
            "Look at what waits: with 8 seats the queue time is most of the time to first token. Seats cost "
            "memory only, and there is plenty."
        ),
        (
            "The gap between two tokens is as long as the step between them, and a step is as long as its "
            "tokens make it: the budget bounds the gap."
        ),
        (
            "A small budget starves the long prompts. Find the largest budget whose full step takes less "
            "than "
            "16 ms: this model needs about 51 µs a token once it is compute-bound."
        ),
    )
    FREE = (
        "max_num_seqs",
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
        "discipline",
        "policy",
        "watermark",
        "enable_chunked_prefill",
    )
    _START: dict[str, Any] = {
        "discipline": "chunked",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "num_blocks": 8000,
        "block_size": 16,
        "modelled_device": "NVIDIA A100 80GB SXM",
    }

    def _workload(self, seed: int) -> list[RequestSpec]:
        rng = random.Random(seed)
        specs, now = [], 0.0
        for i in range(60):
            now += rng.expovariate(12.0)
            specs.append(
                make_spec(
                    f"r{i + 1}",
                    rng,
                    rng.randint(5000, 7000) if i % 12 == 5 else rng.randint(100, 400),
                    rng.randint(40, 120),
                    arrival_s=now,
                )
            )
        return specs

    def figures(self, settings: dict[str, Any], seed: int) -> tuple[float, float]:
        """(99th percentile of TTFT, of ITL), seconds, modelled, of one draw under `settings`."""
        found = latencies(run_simulated(self._workload(seed), "Llama-3.1-8B", **{**self._START, **settings}))
        return percentile(found["ttft_s"], 0.99) or 0.0, percentile(found["itl_s"], 0.99) or 0.0

    def sample(self, seed: int) -> str:
        ttft, itl = self.figures({}, seed)
        return (
            f"With the settings of the start (modelled): 99 of 100 first tokens within {ttft * 1000:.0f} "
            f"ms, 99 of 100 gaps at most {itl * 1000:.1f} ms."
        )

    def grade(self, answer: Any, seed: int) -> list[Part]:
        if not isinstance(answer, dict):
            raise LessonError(
                f"the answer is a dict of settings, such as {{'max_num_seqs': 12}}, not "
                f"{type(answer).__name__}"
            )
        if strange := [k for k in answer if k not in self.FREE]:
            raise LessonError(f"{strange[0]!r} is not yours to set here; you may set {', '.join(self.FREE)}")
        try:
            EngineConfig(**{**self._START, **answer})
            reached = [self.figures(answer, seed + i) for i in range(3)]
        except ConfigError as e:
            raise LessonError(str(e)) from e
        except Stuck as e:
            return [
                Part("first tokens", 30, 0.0, str(e)),
                Part("gaps", 30, 0.0),
                Part("both at once", 40, 0.0),
            ]
        first, gaps = [t <= self.TTFT_S for t, _ in reached], [g <= self.ITL_S for _, g in reached]
        return [
            Part(
                "first tokens",
                30,
                sum(first) / 3,
                (
                    f"99 of 100 within {', '.join(f'{1000 * t:.0f}' for t, _ in reached)} ms in three draws, "
                    f"promised {1000 * self.TTFT_S:.0f}"
                ),
            ),
            Part(
                "gaps",
                30,
                sum(gaps) / 3,
                (
                    f"99 of 100 at most {', '.join(f'{1000 * g:.1f}' for _, g in reached)} ms, promised "
                    f"{1000 * self.ITL_S:.0f}"
                ),
            ),
            Part("both at once", 40, sum(a and b for a, b in zip(first, gaps)) / 3),
        ]
