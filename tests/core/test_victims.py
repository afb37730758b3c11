"""Who loses its blocks, by each rule; and what that costs: the tokens computed a second time, counted from
the chunks and as the metrics tell them.
"""

from __future__ import annotations

import pytest

from cbviz import events as ev
from cbviz.core.policy import VICTIMS
from cbviz.trace.metrics import metrics
from cbviz.trace.trace import Trace
from tests.core.byhand import found, run, spec
from tests.core.fuzz import case, play

# 12 blocks of 4. Step 1: a, b and c take 2, 3 and 3; step 2: d takes 3; step 3: a takes the last one, for its
# ninth token; step 4: b has computed 12 and needs another
FOUR = [
    spec("a", 7, 20, priority=1),
    spec("b", 10, 20, priority=3),
    spec("c", 9, 20, priority=2),
    spec("d", 9, 20, step=2, priority=3),
]
POOL = {"num_blocks": 13, "max_model_len": 40}


@pytest.mark.parametrize(
    "rule, loser, ranking",
    [
        ("last", "d", [("d", "3"), ("c", "2"), ("b", "1"), ("a", "0")]),
        (
            "lowest-priority",
            "d",
            [("d", "3, 3"), ("b", "3, 1"), ("c", "2, 2"), ("a", "1, 0")],
        ),  # b and d are equal: the later arrival
        ("least-work-lost", "a", [("a", "9, 0"), ("d", "10, -3"), ("c", "11, -2"), ("b", "12, -1")]),
        (
            "fewest-outputs",
            "d",
            [("d", "2, -9, -3"), ("b", "3, -10, -1"), ("c", "3, -9, -2"), ("a", "3, -7, 0")],
        ),
    ],
)
def test_each_rule(rule: str, loser: str, ranking: list[tuple[str, str]]) -> None:
    t = run(FOUR, victim=rule, discipline="vllm", scheduler_reserve_full_isl=False, **POOL)
    first = found(t, ev.Preempted)[0]
    assert (first.rule, first.request_id, first.for_id) == (rule, loser, "b")
    assert first.ranking == ranking and ev.Preempted in map(type, t.record(4).events)
    assert bool(found(t, ev.Unscheduled, 4)) == (loser == "a")  # a had its share of this step already


@pytest.mark.parametrize(
    "policy, rule, loser",
    [("fcfs", "last", "d"), ("priority", "rank", "d"), ("sjf", "rank", "d"), ("lpm", "last", "d")],
)
def test_the_policys_own_rule(policy: str, rule: str, loser: str) -> None:
    """`policy`, and nothing said: as the policy ranks.

    With sjf the longest rest loses: d has 29 - 10 tokens to go, b and c 18, a 18.
    """
    for victim in ("policy", None):
        t = run(
            FOUR, victim=victim, policy=policy, discipline="vllm", scheduler_reserve_full_isl=False, **POOL
        )
        first = found(t, ev.Preempted)[0]
        assert (first.rule, first.request_id) == (rule, loser)


def test_equals_lose_in_the_order_of_their_arrival_last_first() -> None:
    """Equal in all that a rule looks at: the latest arrival loses."""
    specs = [spec(x, 8, 12) for x in "abc"]
    for rule in VICTIMS:
        t = run(specs, victim=rule, num_blocks=9, max_model_len=24)
        first = found(t, ev.Preempted)[0]
        assert first.request_id == "c", rule


def computed_twice(t: Trace) -> int:
    """Tokens computed although the request had had their KV (computed or found in the cache), counted
    position by position.
    """
    seen: set[tuple[str, int]] = set()
    again = 0
    for r in t:
        for e in r.events:
            if isinstance(e, ev.Admitted):
                seen |= {(e.request_id, p) for p in range(e.num_cached_tokens)}
        for c in r.chunks:
            if not c.padding:
                places = {(c.request_id, p) for p in range(c.start, c.start + c.num_tokens)}
                again += len(places & seen)
                seen |= places
    return again


def test_the_recompute_tax_of_each_rule() -> None:
    """One workload, four rules: (preemptions, tokens computed again), counted. Losing what costs least costs
    least here, as its name says.
    """
    tax: dict[str, tuple[int, int]] = {}
    for rule in ("last", "lowest-priority", "least-work-lost", "fewest-outputs"):
        t = run(FOUR, victim=rule, discipline="vllm", scheduler_reserve_full_isl=False, **POOL)
        m = metrics(t)
        total = sum(c.num_tokens for r in t for c in r.chunks)
        assert (
            m["recomputed_tokens"] == computed_twice(t) == sum(c.num_recomputed for r in t for c in r.chunks)
        )
        assert m["recompute_tax"] == pytest.approx(m["recomputed_tokens"] / total)
        assert m["token_accounts"]["total"] == total == m["token_accounts"]["useful"] + m["recomputed_tokens"]
        tax[rule] = m["num_preemptions"], m["recomputed_tokens"]
    assert tax == {
        "last": (4, 68),
        "lowest-priority": (5, 88),
        "least-work-lost": (4, 66),
        "fewest-outputs": (5, 88),
    }


@pytest.mark.parametrize("rule", VICTIMS)
def test_the_metrics_count_what_was_computed_twice(rule: str) -> None:
    """Also where prefixes are cached and blocks found again, prompts cut and chunks taken back."""
    most = 0
    for seed in range(25):
        discipline, policy = (
            ("chunked", "vllm", "paged", "retract", "max-util")[seed % 5],
            ("fcfs", "priority", "srpt")[seed % 3],
        )
        _, t = play(case(seed, discipline=discipline, policy=policy, victim=rule, sliding_window=0))
        m = metrics(t)
        assert m["recomputed_tokens"] == computed_twice(t)
        most = max(most, m["recomputed_tokens"])
    assert most > 50
