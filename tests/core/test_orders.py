"""Every policy's order, worked out by hand: by length known, guessed and wrong, by age, by deadline, by what
the cache holds, by session.
"""

from __future__ import annotations

from typing import Any

import pytest

from cbviz import events as ev
from cbviz.core.policies import LongestPrefix
from cbviz.core.policy import POLICIES
from cbviz.messages import RequestSpec
from tests.core.byhand import admitted, byhand, found, plan, run, spec
from tests.core.fuzz import play

# one seat: a runs first, for 9 steps, and the others arrive meanwhile. Tokens to do: b 18 + 2, c 8 + 3, d 3 +
# 1, e 8 + 8, f 2 + 12
QUEUE = [
    spec("a", 4, 9),
    spec("b", 18, 9, step=2, priority=1, output_len=2),
    spec("c", 8, 3, step=3, priority=2),
    spec("d", 3, 30, step=4, output_len=1),
    spec("e", 8, 8, step=5, priority=1, deadline_s=7.0),
    spec("f", 2, 12, step=6, deadline_s=5.0),
]


@pytest.mark.parametrize(
    "policy, order",
    [
        ("fcfs", "a b c d e f"),
        ("priority", "a d f b e c"),  # 0 0 1 1 2
        ("ageing", "a d f b e c"),  # nobody has waited for 25 steps
        ("sjf", "a d c f e b"),  # 4, 11, 14, 16, 20
        ("srpt", "a d b c e f"),  # outputs: 1, 2, 3, 8, 12
        (
            "sjf-predicted",
            "a d c f b e",
        ),  # e's 8 outputs are guessed to be 13.6, b's 2 to be 1.98: 19.98 and 21.6
        ("sjf-wrong", "a f e c b d"),  # outputs: 12, 8, 3, 2, 1
        ("deadline", "a f e b c d"),  # 5 s, 7 s, none
    ],
)
def test_order(policy: str, order: str) -> None:
    assert admitted(run(QUEUE, policy=policy, max_num_seqs=1)) == order


def test_predictions_are_off_by_two_either_way_and_right_on_average() -> None:
    p = POLICIES["sjf-predicted"]

    class View:
        num_prompt_tokens, output_len, max_tokens = 0, 64, 100

        def __init__(self, i: int) -> None:
            self.request_id = f"r{i}"

    guesses = [p.rank(View(i), 0.0) for i in range(2000)]  # type: ignore[arg-type]
    assert 32 <= min(guesses) < 34 and 122 < max(guesses) <= 128
    below = sum(g < 64 for g in guesses)
    assert 900 < below < 1100


def test_the_shortest_rest_keeps_its_blocks() -> None:
    """srpt ranks the running by what is left, too: a has 30 outputs to go, b 12, c 20."""
    t = run(
        [spec("a", 8, 30), spec("b", 8, 12), spec("c", 8, 20)], policy="srpt", num_blocks=11, max_model_len=40
    )
    assert found(t, ev.Preempted)[0].request_id == "a"


def test_a_wrong_prediction_costs() -> None:
    """Mean waiting in steps, by hand: in order of length d, c, f, e, b the outputs 1, 3, 12, 8, 2 go ahead;
    in the wrong order 12, 8, 3, 2.
    """

    def waited(policy: str) -> int:
        return sum(e.num_waiting_steps for e in found(run(QUEUE, policy=policy, max_num_seqs=1), ev.Admitted))

    # c to f queue from steps 2 to 6 on; a ends with step 9; starts at 10, 11, 14, 26, 34 and at 10, 22, 30,
    # 33, 35
    assert waited("sjf") == (10 - 4) + (11 - 3) + (14 - 6) + (26 - 5) + (34 - 2)
    assert waited("sjf-wrong") == (10 - 6) + (22 - 5) + (30 - 3) + (33 - 2) + (35 - 4)


A, B = tuple(range(100, 108)), tuple(range(200, 208))
"""Beginnings of two blocks each."""


def cached(rid: str, prompt: tuple[int, ...], step: int) -> RequestSpec:
    return RequestSpec(rid, prompt, 1, arrival_step=step)


PREFIXES = [  # step 1 computes A, step 2 computes B; then five come
    cached("a", (*A, 1), 1),
    cached("b", (*B, 1), 1),
    cached("t", (7, 7, 7, 7, 7), 3),
    cached("q", (*B[:4], 9, 9, 9, 9, 9), 3),
    cached("p", (*A, 2), 3),
    cached("r", (*B, 3), 3),
    cached("s", (*B, 4), 3),
]


@pytest.mark.parametrize(
    "policy, order",
    [
        ("fcfs", "a b t q p r s"),
        ("lpm", "a b p r s q t"),  # 8, 8, 8, 4 and 0 tokens are cached
        (
            "dfs-weight",
            "a b r s q p t",
        ),  # the branch B has three, of which two go on to its second block; A has one
    ],
)
def test_order_by_the_cache(policy: str, order: str) -> None:
    assert admitted(run(PREFIXES, policy=policy, max_num_seqs=1, enable_prefix_caching=True)) == order


def test_dfs_weight_stays_under_one_branch() -> None:
    """Two branches of equal weight are not mixed in one batch, though their requests arrived in turn."""
    specs = [*PREFIXES[:2], *(cached(f"{'ab'[i % 2]}{i}", (*(A, B)[i % 2], 10 + i), 3) for i in range(6))]
    assert (
        admitted(run(specs, policy="dfs-weight", max_num_seqs=3, enable_prefix_caching=True))
        == "a b a0 a2 a4 b1 b3 b5"
    )
    assert (
        admitted(run(specs, policy="lpm", max_num_seqs=3, enable_prefix_caching=True))
        == "a b a0 b1 a2 b3 a4 b5"
    )


def test_one_of_those_that_begin_alike_goes_ahead() -> None:
    """x and y share 32 tokens that nobody has computed: under lpm y lets z pass, and finds x's blocks in the
    next step. 31 tokens are not enough.
    """
    long = tuple(range(300, 340))
    specs = [
        RequestSpec("x", (*long, 1), 4, arrival_step=1),
        RequestSpec("y", (*long, 2), 4, arrival_step=1),
        RequestSpec("z", (5, 6, 7), 4, arrival_step=1),
    ]
    fields: dict[str, Any] = {
        "max_num_seqs": 2,
        "enable_prefix_caching": True,
        "num_blocks": 65,
        "max_num_batched_tokens": 128,
    }
    t = run(specs, policy="lpm", **fields)
    assert plan(t, 1) == "x0+41 z0+3" and admitted(t) == "x z y"
    assert found(t, ev.PrefixHit) == [ev.PrefixHit("y", 40, found(t, ev.PrefixHit)[0].block_ids)]
    assert admitted(run(specs, policy="fcfs", **fields)) == "x y z"
    short = [
        RequestSpec(s.request_id, s.prompt_token_ids[9:], 4, arrival_step=1) if s.request_id != "z" else s
        for s in specs
    ]
    assert admitted(run(short, policy="lpm", **fields)) == "x y z"


def test_a_long_queue_is_not_ranked_by_prefix() -> None:
    class View:
        num_prefix_tokens, prompt_token_ids = 8, (1, 2)

    views: list[Any] = [View() for _ in range(129)]
    assert set(LongestPrefix().rank_all(views, 0.0)) == {0} and set(
        LongestPrefix().rank_all(views[:128], 0.0)
    ) == {-8}


def session(rid: str, name: str | None, step: int = 1) -> RequestSpec:
    return spec(rid, 4, 4, step=step, session=name)


def test_fair_shares() -> None:
    """A asks six times before B asks twice and two ask without a session: each of the three is served in its
    turn, and the rest is A's.
    """
    specs = (
        [session(f"A{i}", "A") for i in range(6)]
        + [session(f"B{i}", "B") for i in range(2)]
        + [session(f"n{i}", None) for i in range(2)]
    )
    t = run(specs, policy="fair", max_num_seqs=1)
    assert admitted(t) == "A0 B0 n0 A1 B1 n1 A2 A3 A4 A5"
    assert admitted(run(specs, policy="fcfs", max_num_seqs=1)) == "A0 A1 A2 A3 A4 A5 B0 B1 n0 n1"


def test_fair_shares_are_of_tokens() -> None:
    """A's requests are three times as long as B's: of B three are served for each of A."""
    specs = [spec(f"A{i}", 16, 6, session="A") for i in range(3)] + [
        spec(f"B{i}", 4, 4, session="B") for i in range(9)
    ]
    # an A computes 16 + 5 tokens, a B 4 + 3. A0 | B B B to 21, then the tie is A's, which came first | ...
    assert admitted(run(specs, policy="fair", max_num_seqs=1)) == "A0 B0 B1 B2 A1 B3 B4 B5 A2 B6 B7 B8"


def test_served_tokens_are_taken_back_with_the_step() -> None:
    """A session's count follows what was computed, recomputation included, and nothing else."""
    specs = [spec("a", 8, 12, session="A"), spec("b", 8, 12, session="B"), spec("c", 8, 12)]
    c = byhand(specs, policy="fair", num_blocks=10, max_model_len=24)
    engine, t = play(c)
    computed: dict[str, int] = {}
    for r in t:
        for x in r.chunks:
            computed[x.request_id] = computed.get(x.request_id, 0) + x.num_tokens
    assert engine.scheduler.state.served == {"A": computed["a"], "B": computed["b"], "": computed["c"]}
    assert sum(r.tokens.recomputed for r in t) > 0
