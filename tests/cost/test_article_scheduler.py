"""The article's figures again, from the plans of the real scheduler."""

from __future__ import annotations

import pytest

from cbviz.config import EngineConfig
from cbviz.core.scheduler import Scheduler
from cbviz.cost import CostModel
from cbviz.cost.article import ArticleCost, ArticleSharedCost
from cbviz.messages import RequestSpec, RunnerOutput
from cbviz.workload import PRESETS, build


def run(specs: list[RequestSpec], config: EngineConfig, cost: CostModel) -> tuple[int, float, int]:
    """(steps, seconds, preemptions) of a run in which every token is 5."""
    scheduler = Scheduler(config.resolve(8192)[0])
    waiting, step, seconds, preempted = list(specs), 0, 0.0, 0
    while waiting or scheduler.has_unfinished:
        while waiting and (waiting[0].arrival_step or 0) <= step:
            scheduler.add(waiting.pop(0))
        scheduler.begin()
        plan = scheduler.schedule(float(step))
        seconds += cost.price(plan).total_s
        preempted += len(plan.preempted_ids)
        scheduler.update(plan, RunnerOutput({c.request_id: [5] for c in plan.chunks if c.sample}))
        scheduler.drain()
        step += 1
    return step, seconds, preempted


@pytest.mark.parametrize(
    ("discipline", "seats", "steps", "published"),
    [
        ("static", 8, 555, "3.087"),
        ("orca", 8, 364, "2.132"),
        ("chunked", 8, 364, "2.132"),
        ("static", 4, 815, "4.386"),
        ("orca", 4, 581, "3.216"),
        ("chunked", 4, 581, "3.216"),
    ],
)
def test_shared_weights(discipline: str, seats: int, steps: int, published: str) -> None:
    got_steps, seconds, _ = run(
        build("article"), EngineConfig(discipline=discipline, max_num_seqs=seats), ArticleSharedCost()
    )
    assert (got_steps, f"{seconds:.3f}") == (steps, published)


@pytest.mark.parametrize(
    ("discipline", "charge_prefill", "published"),
    [("static", True, "13.855"), ("chunked", True, "13.855"), ("chunked", False, "12.960")],
)
def test_linear_cost(discipline: str, charge_prefill: bool, published: str) -> None:
    assert (
        f"{run(build('article'), EngineConfig(discipline=discipline), ArticleCost(charge_prefill))[1]:.3f}"
        == published
    )


def test_the_preemption_scenario_preempts() -> None:
    config = EngineConfig(**PRESETS["preemption"].settings)
    assert run(build("preemption"), config, ArticleSharedCost())[2] >= 2
    assert run(build("preemption"), config.replace(num_blocks=256), ArticleSharedCost())[2] == 0
