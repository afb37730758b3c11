"""The exercises: question, hints, hidden cases and their marking.

The engine computes what is right; no answer is written down here.

Owns the table `TASKS`. Every case is a simulated run (`SimRunner`), so a check takes a second or two and is
the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from cbviz import events as ev
from cbviz.config import ConfigError, EngineConfig
from cbviz.core.policy import POLICIES, policy
from cbviz.core.ranking import PolicyError
from cbviz.core.speculative import ngram
from cbviz.cost import models
from cbviz.lessons.grading import LessonError, Part, Task, ask, must_be_function, told
from cbviz.messages import RequestSpec, Sampling
from cbviz.runners.tape import TapeRunner
from cbviz.session import Session, Stuck
from cbviz.specs import ModelSpec
from cbviz.trace.metrics import latencies, percentile, request_metrics
from cbviz.trace.trace import Cursor, Trace

_TO_THE_END = Sampling(ignore_eos=True)


def _spec(rid: str, rng: random.Random, prompt: int, output: int, **more: Any) -> RequestSpec:
    return RequestSpec(
        rid,
        tuple(rng.randrange(1000, 40_000) for _ in range(prompt)),
        more.pop("max_tokens", output),
        sampling=_TO_THE_END,
        output_len=output,
        **more,
    )


def _run(specs: list[RequestSpec], model: str = "smollm2", **config: Any) -> Trace:
    s = Session(specs, runner="sim", model=model, **config)
    s.run()
    return s.trace


def _events(trace: Trace, kind: type[ev.Event]) -> Iterator[Any]:
    return (e for record in trace for e in record.events if isinstance(e, kind))


class _Tally:
    """Rights and wrongs of one part; keeps the first wrong case to show."""

    def __init__(self, name: str, points: int) -> None:
        self.name, self.points, self.right, self.asked, self.fault = name, points, 0, 0, ""
        self.wrong: dict[str, Any] | None = None

    def add(self, case: dict[str, Any], truth: Any, said: Any, fault: str) -> None:
        self.asked += 1
        if not fault and said == truth:
            self.right += 1
        elif self.wrong is None:
            self.wrong, self.fault = {"case": case, "engine": truth, "said": said}, fault

    def part(self) -> Part:
        # A part without a case would be free points: the draws see to it that there is none.
        share = self.right / self.asked if self.asked else 0.0
        return Part(
            self.name,
            self.points,
            share,
            f"{self.right} of {self.asked} right" + (f"; {self.fault}" if self.fault else ""),
            self.wrong,
        )


# count the blocks -------------------------------------------------------------------------------------------


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
        one = _spec("r1", rng, case["prompt"], case["output"], max_tokens=case["max_tokens"])
        pool: dict[str, Any] = {
            "num_blocks": 400,
            "block_size": case["block_size"],
            "enable_prefix_caching": False,
        }
        paged = _run([one], discipline="vllm", **pool)
        reserved = _run([one], discipline="orca", **pool).record(1)
        taken = sum(len(e.block_ids) for e in _events(paged, ev.Allocated))
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
            "paged": _Tally("paged", 40),
            "empty": _Tally("empty", 30),
            "reserved": _Tally("reserved", 30),
        }
        for case in self._cases(seed):
            truth = self._truth(case)
            got, fault = ask(answer, case)
            for key, tally in tallies.items():
                said = got.get(key) if isinstance(got, dict) else None
                tally.add(case, truth[key], said, fault)
        return [t.part() for t in tallies.values()]


# count the hits ---------------------------------------------------------------------------------------------


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
            RequestSpec(f"r{i}", tuple(p), 1, arrival_step=3 * i + 1, sampling=_TO_THE_END, output_len=1)
            for i, p in enumerate(case["prompts"])
        ]
        trace = _run(specs, discipline="vllm", num_blocks=400, block_size=case["block_size"])
        hits = {e.request_id: e.num_cached_tokens for e in _events(trace, ev.Admitted)}
        return [hits[x.request_id] for x in specs]

    def sample(self, seed: int) -> str:
        case, _ = self._case(random.Random(seed))
        return f"A case:\n{told(case)}\nThe engine says: {self._truth(case)}"

    def grade(self, answer: Any, seed: int) -> list[Part]:
        must_be_function(answer, "one case")
        rng = random.Random(seed)
        tallies = {
            kind: _Tally(kind, points)
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


# name the victim --------------------------------------------------------------------------------------------


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
                _spec(
                    f"r{i + 1}",
                    rng,
                    rng.choice((9, 12, 24, 30)),
                    rng.randint(20, 50),
                    arrival_step=rng.randint(1, 14),
                    priority=rng.randint(0, 2),
                )
                for i in range(8)
            ]
            trace = _run(
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
            tally = _Tally(rule, points)
            for case, truth in self._cases(rule, seed):
                got, fault = ask(answer, case)
                tally.add(case, truth, got, fault)
            parts.append(tally.part())
        return parts


# predict the step -------------------------------------------------------------------------------------------


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
                _spec(
                    f"r{i + 1}",
                    rng,
                    rng.choice((5, 12, 20, 60, 90)),
                    rng.randint(2, 14),
                    arrival_step=rng.randint(1, 12),
                )
                for i in range(12)
            ]
            trace = _run(
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
            "decodes": _Tally("decodes", 25),
            "half-done prompts": _Tally("half-done prompts", 35),
            "admissions": _Tally("admissions", 40),
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


# meet the SLO -----------------------------------------------------------------------------------------------


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
                _spec(
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
        found = latencies(_run(self._workload(seed), "Llama-3.1-8B", **{**self._START, **settings}))
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


# beat FCFS --------------------------------------------------------------------------------------------------


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
            specs.append(_spec(f"r{i + 1}", rng, rng.randint(8, 40), output, arrival_step=step))
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
                _run(
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


# accept the drafts ------------------------------------------------------------------------------------------


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
        one = RequestSpec("r1", tuple(text[:-1]), 1 + len(says), sampling=_TO_THE_END, arrival_step=1)
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
            "drafts": _Tally("drafts", 40),
            "yields": _Tally("yields", 40),
            "computed": _Tally("computed", 20),
        }
        for case in self._cases(seed):
            truth = self._engine(case)
            got, fault = ask(answer, case)
            for key, tally in tallies.items():
                said = got.get(key) if isinstance(got, dict) else None
                tally.add(case, truth[key], list(said) if isinstance(said, tuple) else said, fault)
        return [t.part() for t in tallies.values()]


# fill the pool ----------------------------------------------------------------------------------------------


class FillThePool:
    """Bytes of a token, blocks in a memory, blocks under a window."""

    name = "fill-the-pool"
    title = "How much fits, and how much is held?"
    question = """Write a function of one case that returns a dict. A case is a dict:
  layers, kv_heads, head_dim   the model's cache: keys and values, a number for each of head_dim, in each head of each layer
  bits          of one such number in the cache
  scale_bytes   beside them, for the keys of a token in one head, and as many for its values (0: none)
  block_size    tokens of a block
  memory        bytes for the whole pool, the null block included
  computed      tokens of a request whose keys and values have been computed
  window        a token sees itself and the window - 1 before it; 0: all
The answer:
  block_bytes   bytes of one block
  blocks        blocks that can be given out
  held          blocks that the request holds while the last of these tokens is computed: those that lie wholly left of what it sees have been given back"""
    hints = (
        (
            "A token: layers x 2 (keys and values) x kv_heads x (head_dim x bits / 8 + scale_bytes). A "
            "block: "
            "block_size times that."
        ),
        "memory // block_bytes blocks, of which block 0 stands for nothing and is never given out.",
        (
            "The last token, at position computed - 1, sees back to position computed - window. Blocks that "
            "end before it are gone; the last block may be partly empty."
        ),
    )

    def _cases(self, seed: int) -> list[dict[str, int]]:
        rng = random.Random(seed)
        cases = []
        for i in range(14):
            bits, scale = rng.choice(((32, 0), (16, 0), (8, 4), (4, 8)))
            size, heads, dim, layers = (
                rng.choice((4, 8, 16)),
                rng.choice((1, 2, 3, 8)),
                rng.choice((32, 64, 128)),
                rng.choice((2, 12, 30)),
            )
            case = {
                "layers": layers,
                "kv_heads": heads,
                "head_dim": dim,
                "bits": bits,
                "scale_bytes": scale,
                "block_size": size,
            }
            n = rng.randint(2 * size, 90)
            window = rng.randint(2, 3 * size) if i % 3 else 0
            if i % 2 and window:  # at the edge: the last seen position begins a block, or ends one
                n += (window + rng.choice((0, 1)) - n) % size
            cases.append(
                {
                    **case,
                    "memory": self._block_bytes(case) * rng.randint(20, 400)
                    + rng.randrange(self._block_bytes(case)),
                    "computed": n,
                    "window": window,
                }
            )
        return cases

    def _block_bytes(self, c: dict[str, int]) -> int:
        each = c["bits"] / 8 + c["scale_bytes"] / c["head_dim"]
        spec = ModelSpec(
            "case",
            c["layers"],
            64,
            c["kv_heads"],
            c["kv_heads"],
            c["head_dim"],
            64,
            1000,
            4096,
            kv_bytes_per_element=each,
        )
        return round(models.kv_bytes_per_token(spec)) * c["block_size"]

    def _truth(self, c: dict[str, int]) -> dict[str, int]:
        size = self._block_bytes(c)
        one = _spec("r1", random.Random(0), c["computed"] - 1, 2)
        s = Session(
            [one],
            runner="sim",
            discipline="vllm",
            num_blocks=200,
            block_size=c["block_size"],
            sliding_window=c["window"],
            enable_prefix_caching=False,
        )
        s.run(max_steps=2)
        record = s.trace.record(2)
        at = next(i for i, e in enumerate(record.events) if isinstance(e, ev.Executed))
        return {
            "block_bytes": size,
            "blocks": EngineConfig(num_blocks=c["memory"] // size).num_usable_blocks,
            "held": sum(b != 0 for b in s.trace.state(Cursor(2, at)).request("r1").block_ids),
        }

    def sample(self, seed: int) -> str:
        case = self._cases(seed)[1]
        return f"A case:\n{told(case)}\nThe engine says: {self._truth(case)}"

    def grade(self, answer: Any, seed: int) -> list[Part]:
        must_be_function(answer, "one case")
        tallies = {
            "block_bytes": _Tally("block_bytes", 30),
            "blocks": _Tally("blocks", 20),
            "held": _Tally("held", 50),
        }
        for case in self._cases(seed):
            truth = self._truth(case)
            got, fault = ask(answer, case)
            for key, tally in tallies.items():
                tally.add(case, truth[key], got.get(key) if isinstance(got, dict) else None, fault)
        return [t.part() for t in tallies.values()]


TASKS: dict[str, Task] = {
    t.name: t
    for t in (
        CountTheBlocks(),
        CountTheHits(),
        NameTheVictim(),
        PredictTheStep(),
        MeetTheSlo(),
        BeatFcfs(),
        AcceptTheDrafts(),
        FillThePool(),
    )
}

__all__ = ["TASKS"]
