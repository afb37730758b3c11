"""Random cases over every technique at once, and failures at every point of a step where something of the
user's is asked.

`anything(seed)` draws a case; `Anything` is the runner that can play it; `Trouble` counts the points of a
step and fails at a chosen one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from cbviz.config import EngineConfig
from cbviz.core.policy import POLICIES
from cbviz.core.ranking import Policy
from cbviz.core.speculative import PROPOSERS, Proposer, ngram
from cbviz.engine.engine import Engine
from cbviz.messages import RequestSpec, RunnerOutput, SchedulerOutput
from tests.core import test_beam
from tests.core.fuzz import POLICY_NAMES, Case, case, make_engine
from tests.core.test_beam import Ranking
from tests.core.test_experts import EXPERTS, LAYERS


def anything(seed: int) -> Case:
    """A case that draws some of the techniques together. Equal seeds, equal cases."""
    rng = random.Random(f"anything {seed}")
    if rng.random() < 0.15:
        fields = {
            "discipline": rng.choice(("vllm", "chunked", "paged", "max-util")),
            "policy": rng.choice(POLICY_NAMES),
        }
        return test_beam.wide(seed, **fields)
    fields = {}
    if rng.random() < 0.3:
        fields = {"preemption_mode": "swap", "swap_blocks": rng.choice((3, 12, 200))}
    elif rng.random() < 0.15:
        fields = {
            "kv_allocation": "contiguous",
            "contiguous_fit": rng.choice(("first-fit", "best-fit")),
            "sliding_window": 0,
        }
    c = case(
        seed, limits=rng.random() < 0.5, drafts=rng.random() < 0.4 and "kv_allocation" not in fields, **fields
    )
    if rng.random() < 0.5:
        c.specs = [_several(x, rng.choice((1, 1, 2, 3))) for x in c.specs]
    if rng.random() < 0.5:
        c.specs = [msgspec.structs.replace(x, session=rng.choice((None, "s1", "s2"))) for x in c.specs]
    if rng.random() < 0.5:
        c.at.setdefault(rng.randint(2, 9), []).append(
            ("configure", {"max_num_seqs": 3, "timeout_s": rng.choice((0.0, 0.002))})
        )
    return c


def _several(x: RequestSpec, n: int) -> RequestSpec:
    return msgspec.structs.replace(x, sampling=msgspec.structs.replace(x.sampling, n=n))


class Anything(Ranking):
    """A LedgerRunner that also gives candidates for beams and, if `routes`, the experts that each token took."""

    routes = False
    beams = False
    asked: Callable[[str], object] = staticmethod(lambda where: None)

    def chain(self, request_id: str, tokens: Sequence[int], end: int) -> list[int]:
        return (super() if self.beams else super(Ranking, self)).chain(request_id, tokens, end)

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        self.asked("runner, before the pass")
        out = super().execute(plan)
        if self.routes:
            out.routed = {
                c.request_id: [
                    [(c.start + i) % EXPERTS, (len(c.tokens) + i) % EXPERTS] for i in range(LAYERS)
                ]
                for c in plan.chunks
                if c.sample
            }
        self.asked("runner, after the pass")
        return out


def engine_for(c: Case, seed: int, config: EngineConfig | None = None) -> Engine:
    runner = Anything(config or c.config)
    runner.routes = seed % 3 == 0
    runner.beams = any(x.sampling.beam_width > 1 for x in c.specs)
    engine = make_engine(config or c.config, runner)
    engine.enqueue(c.specs)
    return engine


class Fault(Exception):
    """What a step is made to fail with."""


class Trouble:
    """Counts the points of a step at which something is asked that may fail; `left` more are passed before
    one fails (-1: none fails).
    """

    def __init__(self) -> None:
        self.left = -1
        self.passed = 0

    def asked(self, where: str) -> None:
        self.passed += 1
        if self.left == 0:
            self.left = -1
            raise Fault(where)
        if self.left > 0:
            self.left -= 1

    def watch(self, engine: Engine) -> None:
        """The engine's runner and cost model are asked through this."""
        runner, cost = engine.runner, engine.cost
        assert isinstance(runner, Anything)
        runner.asked = self.asked  # type: ignore[assignment]
        runner.fail = self._in_the_pass
        price = cost.price

        def priced(plan: SchedulerOutput) -> Any:
            self.asked("cost")
            return price(plan)

        cost.price = priced  # type: ignore[method-assign]

    def _in_the_pass(self, plan: SchedulerOutput) -> BaseException | None:
        try:
            self.asked("runner, in the middle of the pass")
        except Fault as e:
            return e
        return None


@contextmanager
def asked_through(trouble: Trouble) -> Iterator[None]:
    """Every policy and the n-gram proposer are asked through `trouble`."""
    policies, proposers = dict(POLICIES), dict(PROPOSERS)
    for name, p in policies.items():
        POLICIES[name] = _watched(p, trouble)
    PROPOSERS["ngram"] = Proposer(
        "ngram", "", "", lambda tokens, k, c: (trouble.asked("proposer"), ngram(tokens, k, 1, 3))[1]
    )
    try:
        yield
    finally:
        POLICIES.update(policies)
        PROPOSERS.update(proposers)


def _watched(p: Policy, trouble: Trouble) -> Policy:
    class Watched(type(p)):  # type: ignore[misc]
        def rank(self, r: Any, now: float) -> Any:
            trouble.asked("policy, rank")
            return p.rank(r, now)

        def admit(self, r: Any, now: float) -> bool:
            trouble.asked("policy, admit")
            return p.admit(r, now)

    if type(p).rank_all is not Policy.rank_all:

        def rank_all(self: Any, rs: Any, now: float) -> list[Any]:
            trouble.asked("policy, ranks of the queue")
            return p.rank_all(rs, now)

        Watched.rank_all = rank_all  # type: ignore[method-assign]
    return Watched()
