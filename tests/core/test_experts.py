"""The policy that groups by experts: fed by what the runner reports, the same after a replay, and nothing
without experts.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec
import pytest

from cbviz import events as ev
from cbviz.messages import RequestSpec, RunnerOutput, SchedulerOutput
from tests.core.fuzz import LedgerRunner, case, finish, make_engine, make_trace, steps

LAYERS, EXPERTS = 3, 4


class RoutingRunner(LedgerRunner):
    """A LedgerRunner whose tokens take experts: two a layer, by the request's session (or id) and position."""

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        out = super().execute(plan)
        out.routed = {}
        for c in plan.chunks:
            if c.sample:
                first = len(c.request_id) + c.start if c.request_id[0] == "r" else ord(c.request_id[0])
                out.routed[c.request_id] = [
                    [(first + i) % EXPERTS, (first + i + 1) % EXPERTS] for i in range(LAYERS)
                ]
        return out


@pytest.mark.parametrize("seed", range(12))
def test_a_mirror_follows(seed: int) -> None:
    """Admissions by expert use with aborts, changed knobs and preemptions: records alone bring another engine
    to the same state, histories included.
    """
    c = case(seed, policy="experts")
    c.specs = [msgspec.structs.replace(x, session=(None, "s1", "s2")[i % 3]) for i, x in enumerate(c.specs)]
    engine, mirror, trace = (
        make_engine(c.config, RoutingRunner(c.config)),
        make_engine(c.config),
        make_trace(c.config),
    )
    seen = False
    for _ in steps(c, engine, trace, mirror=mirror):
        seen |= bool(engine.scheduler.state.routed)
        restored = make_engine(c.config)
        restored.scheduler.restore(
            json.loads(json.dumps(engine.scheduler.state.snapshot())),
            {x.request_id: x for x in c.specs} | {x.request_id: x for r in trace for x in r.arrivals},
        )
        assert restored.scheduler.state.routed == engine.scheduler.state.routed
    finish(engine, trace, c)
    assert seen and all(
        name.startswith("s ") for name in engine.scheduler.state.routed
    )  # requests without a session are forgotten with their end


def test_who_shares_the_running_ones_experts_goes_first() -> None:
    """Two seats, sessions a and b take different experts; while an a runs, the waiting a goes before b, which
    came first.
    """
    c = case(
        0,
        discipline="vllm",
        policy="experts",
        inputs=False,
        block_size=4,
        num_blocks=65,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        sliding_window=0,
        enable_prefix_caching=False,
        watermark=0.0,
        long_prefill_token_threshold=0,
        scheduler_reserve_full_isl=None,
        victim=None,
    )

    def spec(rid: str, n: int) -> RequestSpec:
        return RequestSpec(rid, (1, 2, 3), n, arrival_step=1, session=rid[0])

    def order(policy: str) -> list[str]:
        engine = make_engine(dataclasses.replace(c.config, policy=policy), RoutingRunner(c.config))
        engine.enqueue([spec("a1", 4), spec("b1", 2), spec("b2", 9), spec("a2", 3)])
        out: list[str] = []
        while (record := engine.step()) is not None:
            out += [e.request_id for e in record.events if isinstance(e, ev.Admitted)]
        return out

    assert order("fcfs") == ["a1", "b1", "b2", "a2"]
    assert order("experts") == ["a1", "b1", "a2", "b2"]  # when b1 leaves, a1 runs: a2 overlaps with it


def test_views_tell_shares() -> None:
    c = case(0, discipline="vllm", policy="fcfs", inputs=False)
    engine = make_engine(c.config, RoutingRunner(c.config))
    engine.enqueue(
        [
            RequestSpec("a1", (1, 2, 3), 8, arrival_step=1, session="a"),
            RequestSpec("a2", (4, 5), 8, arrival_step=3, session="a"),
        ]
    )
    engine.step()
    (one,) = engine.scheduler.state.running
    assert one.view.expert_use == one.view.batch_expert_use
    assert all(abs(sum(row) - 1) < 1e-9 for row in one.view.expert_use) and len(one.view.expert_use) == LAYERS
    engine.step()
    engine.step()
    assert (
        engine.scheduler.state.requests["a2"].view.expert_use == one.view.expert_use
    )  # of its session, before it has computed anything


def test_without_experts_it_is_first_come_first_served() -> None:
    runs: list[Any] = []
    for policy in ("experts", "fcfs"):
        c = case(3, discipline="chunked", policy="fcfs", inputs=False, num_blocks=200)
        engine = make_engine(c.config.replace(policy=policy))
        engine.enqueue(c.specs)
        runs.append(
            [[(x.request_id, x.start, x.num_tokens) for x in r.chunks] for r in iter(engine.step, None)]
        )
        assert "routed" not in engine.scheduler.state.snapshot()
    assert runs[0] == runs[1]
