"""The article's six figures, from a replay of static and continuous batching that shares no code with the
scheduler.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from cbviz.cost.article import ArticleCost, ArticleSharedCost
from cbviz.messages import Chunk, Sampling, SchedulerOutput


def article_lengths() -> list[tuple[int, int]]:
    rng = random.Random(42)
    return [(rng.randint(10, 100), rng.randint(20, 200)) for _ in range(20)]


def replay(lengths: list[tuple[int, int]], seats: int, static: bool) -> Iterator[SchedulerOutput]:
    """Plans of one run.

    A prompt is computed whole in the step that admits it, beside the decodes, and that step yields the first
    output token.
    """
    waiting, running, step = list(lengths), [], 0
    while waiting or running:
        if not (static and running):
            while waiting and len(running) < seats:
                prompt, output = waiting.pop(0)
                running.append([prompt, output, 0])
        plan = SchedulerOutput(step)
        for row in running:
            prompt, _, done = row
            start, num_tokens = (prompt + done - 1, 1) if done else (0, prompt)
            plan.chunks.append(Chunk("r", start, num_tokens, [], [], True, Sampling()))
            row[2] += 1
        running = [row for row in running if row[2] < row[1]]
        yield plan
        step += 1


def total(cost: ArticleCost | ArticleSharedCost, seats: int, static: bool) -> tuple[int, float]:
    seconds, steps = 0.0, 0
    for plan in replay(article_lengths(), seats, static):
        seconds += cost.price(plan).total_s
        steps += 1
    return steps, seconds


def test_the_workload_is_the_articles() -> None:
    assert sum(o for _, o in article_lengths()) == 2160
    assert sum(p for p, _ in article_lengths()) == 975


def test_faulty_listing_makes_continuous_look_faster() -> None:
    assert f"{total(ArticleCost(charge_prefill=False), 8, static=False)[1]:.3f}" == "12.960"
    assert f"{total(ArticleCost(), 4, static=True)[1]:.3f}" == "13.855"


@pytest.mark.parametrize("seats", [1, 4, 8, 20])
@pytest.mark.parametrize("static", [True, False])
def test_with_prefill_charged_no_schedule_gains_anything(seats: int, static: bool) -> None:
    assert f"{total(ArticleCost(), seats, static)[1]:.3f}" == "13.855"


@pytest.mark.parametrize(
    ("seats", "static", "steps", "exact_s", "published"),
    [
        (8, True, 555, 3.0865, "3.087"),
        (8, False, 364, 2.1315, "2.132"),
        (4, True, 815, 4.3865, "4.386"),
        (4, False, 581, 3.2165, "3.216"),
    ],
)
def test_shared_weights_make_batching_pay(
    seats: int, static: bool, steps: int, exact_s: float, published: str
) -> None:
    # The exact sums end in half a millisecond; summing floats step by step, as an engine's clock does, rounds
    # to the published digits.
    got_steps, got_s = total(ArticleSharedCost(), seats, static)
    assert got_steps == steps
    assert got_s == pytest.approx(exact_s, abs=1e-9)
    assert f"{got_s:.3f}" == published


def test_ratios_of_the_ledger() -> None:
    s = {
        (seats, static): total(ArticleSharedCost(), seats, static)[1]
        for seats in (4, 8)
        for static in (True, False)
    }
    assert round(s[4, True] / s[4, False], 2) == 1.36
    assert round(s[8, True] / s[8, False], 2) == 1.45
    assert round(s[4, True] / s[8, False], 2) == 2.06


def test_chunks_of_a_prompt_cost_what_the_whole_costs() -> None:
    whole, parts = SchedulerOutput(0), [SchedulerOutput(0), SchedulerOutput(1)]
    whole.chunks = [Chunk("r", 0, 90, [], [], True, Sampling())]
    parts[0].chunks = [Chunk("r", 0, 64, [], [], False, Sampling())]
    parts[1].chunks = [Chunk("r", 64, 26, [], [], True, Sampling())]
    cost = ArticleCost()
    assert (
        sum(cost.price(p).total_s for p in parts)
        == pytest.approx(cost.price(whole).total_s)
        == pytest.approx(0.092)
    )


@pytest.mark.parametrize("cost", [ArticleCost(), ArticleSharedCost()])
def test_an_empty_plan_costs_nothing(cost: ArticleCost | ArticleSharedCost) -> None:
    assert cost.price(SchedulerOutput(0)).total_s == 0


def test_padding_is_charged() -> None:
    plan = SchedulerOutput(0)
    plan.chunks = [Chunk("r", 0, 10, [], [], True, Sampling())]
    plan.num_padding_tokens = 5
    assert ArticleCost().price(plan).total_s == pytest.approx(0.017)
    assert ArticleSharedCost().price(plan).total_s == pytest.approx(0.0065)
