"""Random sessions over every knob at once: what properties about whole runs are tried on.

A `Drawn` holds the three things that make a run: `specs` (the workload), `keywords` (those of
`cbviz.Session`) and `at` (what the user does just before which step). Each knob is drawn on its own, so any
two techniques meet; only what is refused outright is mostly avoided. How to use it, in a test of its own:

    for seed in range(500):
        drawn = draw(random.Random(seed))           # equal seeds, equal runs
        with drawn.named():                         # a failure then says which seed and which knobs
            s = drawn.session()                     # a Session on a runner without weights; ConfigError if the knobs are refused
            how = drawn.play(s)                     # to its end: "ended", or why it is stuck
            assert ...                              # the property: of s.trace, s.engine, s.fork(...), ...

`drawn.play(s, after=f)` calls `f(s)` after each step. A test that rewinds, forks or saves in the middle steps
by itself: `drawn.ask(s)` does what the user does before the next step, then `s.step()`. To let hypothesis
draw, and shrink what fails: `@given(sessions())`.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import msgspec
from hypothesis import strategies as st

from cbviz.config import ConfigError, EngineConfig, as_run
from cbviz.core import beam
from cbviz.core.check import check
from cbviz.core.policy import POLICIES, VICTIMS
from cbviz.cost import models
from cbviz.disciplines import DISCIPLINES
from cbviz.messages import RequestError, RequestSpec, RunnerOutput, Sampling, SchedulerOutput, sequence_ids
from cbviz.runners.sim import SimRunner
from cbviz.session import Session
from cbviz.specs import KV_CACHE_DTYPES

MODEL = "SmolLM2-135M"
MOST_STEPS = 20_000
"""No drawn run needs so many steps: the longest has some 3,000 tokens to compute, and a budget of at least 1.
"""
STOP = 3
"""Beams may end with this token."""


class ScoringRunner(SimRunner):
    """A `SimRunner` that gives beams their candidates: a pure function of the tokens before them."""

    gives_candidates = True

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        out = super().execute(plan)
        out.candidates = {
            c.request_id: _ranked(c.tokens[: c.start + c.num_tokens], c.num_candidates)
            for c in plan.chunks
            if c.num_candidates
        }
        return out


def _ranked(tokens: list[int], n: int) -> list[tuple[int, float]]:
    rng = random.Random(crc32(array("q", tokens).tobytes()))
    return sorted(
        zip(rng.sample(range(2, 60), n), (-5 * rng.random() - 0.1 for _ in range(n)), strict=True),
        key=lambda x: -x[1],
    )


@dataclass
class Drawn:
    """One run: a workload, the session's keywords, and the user's inputs by the step before which they come."""

    specs: list[RequestSpec]
    keywords: dict[str, Any]
    at: dict[int, list[tuple[str, Any]]] = field(default_factory=dict)
    """step -> [("abort", request id) or ("add", RequestSpec) or ("configure", {knob: value})]"""
    refused: list[str] = field(default_factory=list)
    """What `ask` was told when an input was refused."""

    @property
    def has_beams(self) -> bool:
        added = [what for inputs in self.at.values() for op, what in inputs if op == "add"]
        return any(x.sampling.beam_width > 1 for x in [*self.specs, *added])

    def runner(self) -> Any:
        """What `Session(runner=...)` and `Session.from_trace(runner=...)` take."""
        if not self.has_beams:
            return "sim"
        return ScoringRunner(as_run(models.get(MODEL), EngineConfig(**self.keywords)), self.keywords["seed"])

    def session(self) -> Session:
        """A new session. Raises ConfigError if the knobs don't go together."""
        return Session(self.specs, runner=self.runner(), model=MODEL, **self.keywords)

    def ask(self, s: Session, step: int | None = None) -> None:
        """Does what the user does before the next step (or before `step`).

        What is refused changes nothing and is kept in `refused`.
        """
        for op, what in self.at.get(s.engine.step_count + 1 if step is None else step, ()):
            try:
                if op == "abort":
                    s.abort(what)
                elif op == "add":
                    s.add(
                        what.prompt_token_ids,
                        max_tokens=what.max_tokens,
                        priority=what.priority,
                        sampling=what.sampling,
                        request_id=what.request_id,
                    )
                else:
                    s.configure(**what)
            except (ConfigError, RequestError, KeyError) as e:
                self.refused.append(f"{type(e).__name__}: {e}")

    def play(
        self, s: Session, after: Callable[[Session], object] = lambda s: None, most: int = MOST_STEPS
    ) -> str:
        """Steps `s` to its end, with the checker after every step.

        Returns "ended", or why the run is stuck. AssertionError: neither within `most` steps.
        """
        asked = 0
        for _ in range(most):
            step = s.engine.step_count + 1
            if s.done and (later := min((k for k in self.at if k > asked), default=0)):
                step = later  # nothing is left to do, or the run is stuck: the user's next input comes
            if step > asked:
                self.ask(s, step)
                asked = step
            if s.engine.stuck:
                return s.engine.stuck
            if s.step() is None:
                if asked >= max(self.at, default=0):
                    return "ended"
                continue
            check(s.engine.scheduler)
            after(s)
        raise AssertionError(
            f"the run neither ended nor said why within {most} steps: {s.engine.scheduler.state.running} run, "
            f"{s.engine.scheduler.state.waiting} wait"
        )

    @contextmanager
    def named(self) -> Iterator[None]:
        """Adds to whatever fails inside what the run was."""
        try:
            yield
        except BaseException as e:
            e.add_note(repr(self))
            raise


def draw(rng: random.Random, **fixed: Any) -> Drawn:
    """A run. `fixed`: knobs that are as given.

    Works on `random.Random` and on hypothesis' own (see `sessions`).
    """
    keywords = _knobs(rng, fixed)
    resolved = _resolved(keywords)
    specs = [_request(rng, f"r{i}", keywords, resolved) for i in range(rng.randint(1, 12))]
    specs = _arrivals(rng, specs)
    return Drawn(specs, keywords, _inputs(rng, specs, keywords, resolved))


def sessions(**fixed: Any) -> st.SearchStrategy[Drawn]:
    """The same as a strategy of hypothesis."""
    return st.randoms(use_true_random=False).map(lambda rng: draw(rng, **fixed))


def _seldom(rng: random.Random, chance: float, value: Any, otherwise: Any) -> Any:
    return value if rng.random() < chance else otherwise


def _knobs(rng: random.Random, fixed: dict[str, Any]) -> dict[str, Any]:
    size = rng.choice((1, 2, 3, 4, 8, 16))
    limit = rng.choice((5, 12, 40, 40, 90))
    blocks = 1 + max(1, round(-(-limit // size) * rng.choice((1.0, 1.0, 1.0, 1.3, 1.6, 2.5))))
    knobs: dict[str, Any] = {
        "block_size": size,
        "num_blocks": blocks,
        "max_model_len": max(2, min(limit, (blocks - 1) * size)),
        "discipline": rng.choice(tuple(DISCIPLINES)),
        "policy": rng.choice(tuple(POLICIES)),
        "victim": rng.choice((None, *VICTIMS)),
        "max_num_seqs": rng.choice((1, 2, 4, 8, 8, 16)),
        "max_num_batched_tokens": rng.choice(
            (None, rng.randint(1, 4), rng.randint(2, 12), rng.randint(8, 64))
        ),
        "enable_chunked_prefill": rng.choice((None, None, True, False)),
        "enable_prefix_caching": rng.random() < 0.5,
        "long_prefill_token_threshold": rng.choice((0, 0, 1, rng.randint(1, 8))),
        "scheduler_reserve_full_isl": rng.choice((None, True, False)),
        "watermark": rng.choice((0.0, 0.0, 0.1, 0.5, 0.9)),
        "kv_cache_dtype": rng.choice(KV_CACHE_DTYPES),
        "sliding_window": _seldom(rng, 0.3, rng.randint(1, 30), 0),
        "preemption_mode": _seldom(rng, 0.3, "swap", "recompute"),
        "swap_blocks": rng.choice((0, 2, 8, 256)),
        "kv_allocation": _seldom(rng, 0.2, "contiguous", "paged"),
        "contiguous_fit": rng.choice(("first-fit", "best-fit")),
        "speculative": _seldom(rng, 0.3, rng.choice(("ngram", "self-draft", "draft-model")), "off"),
        "num_speculative_tokens": rng.choice((1, 2, 3, 5, 8)),
        "draft_model": "another",
        "draft_acceptance": rng.choice((0.0, 0.3, 0.7, 1.0)),
        "timeout_s": _seldom(rng, 0.2, rng.choice((0.001, 0.004, 0.02)), 0.0),
        "shed_after_s": _seldom(rng, 0.15, rng.choice((0.0005, 0.003)), 0.0),
        "max_waiting_requests": _seldom(rng, 0.15, rng.choice((1, 3, 6)), 0),
        "max_waiting_tokens": _seldom(rng, 0.15, rng.choice((20, 100)), 0),
        "degrade_above": _seldom(rng, 0.25, rng.choice((0.05, 0.2, 0.6)), 0.0),
        "cost": rng.choice(("roofline", "article", "article-shared")),
        "seed": rng.randrange(1000),
    }
    knobs["attention_sinks"] = _seldom(rng, 0.4, rng.randint(1, 12), 0) if knobs["sliding_window"] else 0
    knobs.update(fixed)
    if rng.random() < 0.25:  # otherwise beams would hardly ever be taken
        wish = {
            "discipline": rng.choice(beam.DISCIPLINES),
            "kv_allocation": "paged",
            "sliding_window": 0,
            "preemption_mode": "recompute",
            "speculative": "off",
        }
        knobs.update({k: v for k, v in wish.items() if k not in fixed})
    if rng.random() < 0.95:  # the rest shows that what can't be is refused
        _reconcile(rng, knobs, fixed)
    return knobs


def _reconcile(rng: random.Random, knobs: dict[str, Any], fixed: dict[str, Any]) -> None:
    """Turns one of two knobs off that are refused together."""
    pairs = (
        (
            knobs["discipline"] == "static-padded" and knobs["speculative"] != "off",
            (("speculative", "off"), ("discipline", "static")),
        ),
        (
            knobs["kv_allocation"] == "contiguous" and knobs["speculative"] != "off",
            (("speculative", "off"), ("kv_allocation", "paged")),
        ),
        (
            knobs["kv_allocation"] == "contiguous" and knobs["sliding_window"],
            (("sliding_window", 0), ("kv_allocation", "paged")),
        ),
        (
            knobs["attention_sinks"] and knobs["preemption_mode"] == "swap",
            (("attention_sinks", 0), ("preemption_mode", "recompute")),
        ),
    )
    for clash, cures in pairs:
        still = [(k, v) for k, v in cures if k not in fixed]
        if clash and still:
            knobs.update([rng.choice(still)])
    if not knobs["sliding_window"]:
        knobs["attention_sinks"] = 0
    chunked = (
        DISCIPLINES[knobs["discipline"]].chunked
        if knobs["enable_chunked_prefill"] is None
        else knobs["enable_chunked_prefill"]
    )
    budget, limit = knobs["max_num_batched_tokens"], knobs["max_model_len"]
    if (
        not chunked
        and budget is not None
        and limit is not None
        and budget < limit
        and "max_num_batched_tokens" not in fixed
    ):
        knobs["max_num_batched_tokens"] = rng.choice((None, limit, limit + budget))


def _resolved(keywords: dict[str, Any]) -> EngineConfig | None:
    try:
        return EngineConfig(**keywords).resolve(models.get(MODEL).max_context)[0]
    except ConfigError:
        return None


def _request(
    rng: random.Random, request_id: str, keywords: dict[str, Any], config: EngineConfig | None
) -> RequestSpec:
    """A request that mostly fits the pool; prompts often begin alike."""
    limit = keywords["max_model_len"]
    if config is not None and rng.random() < 0.97:
        limit = max(2, min(limit, config.pool_tokens - config.num_draft_slots))
    prompt_length = rng.choice(
        (1, rng.randint(1, limit - 1), rng.randint(1, max(1, limit // 2)), rng.randint(1, max(1, limit // 3)))
    )
    most = rng.choice(
        (1, limit - prompt_length, limit - prompt_length, rng.randint(1, limit - prompt_length))
    )
    shared = rng.choice((0, 0, prompt_length, rng.randint(0, prompt_length)))
    prompt = tuple(range(10, 10 + shared)) + tuple(rng.randrange(1000) for _ in range(prompt_length - shared))
    stop = rng.random() < 0.3
    sampling = Sampling(stop_token_ids=(STOP,) if stop else ())
    kind = rng.choice(("one", "one", "n", "beams"))
    allowed = config is not None and rng.random() < 0.97
    if kind == "n":
        n = rng.randint(2, 5)
        if allowed and config is not None:
            n = 1 if config.kv_allocation == "contiguous" else min(n, config.max_num_seqs)
        sampling = Sampling(stop_token_ids=sampling.stop_token_ids, n=n)
    elif kind == "beams":
        width = rng.randint(2, 4)
        if allowed and config is not None:
            width = 0 if beam.refusal(config) else min(width, config.max_num_seqs)
            while width > 1 and _beam_blocks(prompt, most, width, config) > config.num_usable_blocks:
                width -= 1
        if width > 1:
            sampling = Sampling(
                stop_token_ids=sampling.stop_token_ids,
                beam_width=width,
                length_penalty=rng.choice((0.0, 1.0, 2.0)),
                early_stopping=rng.random() < 0.5,
            )
    lengths = (
        tuple(rng.choice((None, rng.randint(1, most))) for _ in range(sampling.n - 1))
        if rng.random() < 0.5
        else ()
    )
    return RequestSpec(
        request_id,
        prompt,
        most,
        priority=rng.choice((0, 0, rng.randint(-2, 3))),
        sampling=sampling,
        output_len=rng.choice((None, None, rng.randint(1, most))),
        output_lens=lengths,
        session=rng.choice((None, "A", "B")),
    )


def _beam_blocks(prompt: tuple[int, ...], most: int, width: int, config: EngineConfig) -> int:
    return beam.blocks_at_most(RequestSpec("x", prompt, most, sampling=Sampling(beam_width=width)), config)


def _arrivals(rng: random.Random, specs: list[RequestSpec]) -> list[RequestSpec]:
    """All at once, one after the other by step, or by the clock; a step takes about 0.1 ms of modelled time."""
    out, step, time = [], 1, 0.0
    how = rng.choice(("at once", "steps", "clock", "both"))
    for x in specs:
        step += rng.choice((0, 0, 1, 3, 9))
        time += rng.choice((0.0, 0.0, 0.0004, 0.01))
        by_step = how in ("at once", "steps") or (how == "both" and rng.random() < 0.5)
        deadline = time + rng.choice((0.0, 0.002, 0.01)) if rng.random() < 0.1 else None
        out.append(
            msgspec.structs.replace(
                x,
                arrival_step=(1 if how == "at once" else step) if by_step else None,
                arrival_s=0.0 if by_step else time,
                deadline_s=deadline,
            )
        )
    return out


def _inputs(
    rng: random.Random, specs: list[RequestSpec], keywords: dict[str, Any], config: EngineConfig | None
) -> dict[int, list[tuple[str, Any]]]:
    at: dict[int, list[tuple[str, Any]]] = {}
    for i in range(rng.choice((0, 0, 1, 2, 5))):
        step = rng.randint(1, 40)
        op = rng.choice(("abort", "add", "configure"))
        what: Any = rng.choice(sequence_ids(rng.choice(specs)))
        if op == "add":
            what = _request(rng, f"late{i}", keywords, config)
        elif op == "configure":
            what = _changes(rng, keywords)
        at.setdefault(step, []).append((op, what))
    return at


def _changes(rng: random.Random, keywords: dict[str, Any]) -> dict[str, Any]:
    """One or two knobs that may change during a run."""
    budget = rng.choice(
        (keywords["max_model_len"], keywords["max_model_len"] + rng.randint(0, 60), rng.randint(1, 16))
    )
    choices: dict[str, tuple[Any, ...]] = {
        "discipline": tuple(DISCIPLINES),
        "policy": tuple(POLICIES),
        "victim": (None, *VICTIMS),
        "max_num_seqs": (1, 2, 5),
        "watermark": (0.0, 0.3, 0.9),
        "long_prefill_token_threshold": (0, 1, 3),
        "scheduler_reserve_full_isl": (None, True, False),
        "max_num_batched_tokens": (budget,),
        "enable_chunked_prefill": (None, True, False),
        "preemption_mode": ("recompute", "swap"),
        "speculative": ("off", "ngram", "self-draft"),
        "num_speculative_tokens": (1, 4),
        "timeout_s": (0.0, 0.004),
        "degrade_above": (0.0, 0.3),
        "max_waiting_requests": (0, 2),
    }
    return {f: rng.choice(choices[f]) for f in rng.sample(list(choices), rng.randint(1, 2))}
