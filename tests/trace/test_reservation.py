"""Contiguous memory beside the run's own: figures worked out on paper, slots that sum exactly, allocators
that never hand a slot out twice.
"""

from __future__ import annotations

import json
import random

import pytest

from cbviz.disciplines import DISCIPLINES
from cbviz.trace import Trace
from cbviz.trace.accounting import SLOT_PARTS, TIME_PARTS, TOKEN_PARTS, summary
from cbviz.trace.reservation import ASSUMPTIONS, PARTS, SCHEMES, Buddy, FirstFit, Held, reservation
from tests.golden import golden
from tests.runs import run, specs


def test_the_golden_run_on_paper() -> None:
    """28 slots, max_model_len 28. r1: 10 + 4 = 14 slots, 13 of them used in the end; r2: 10 + 8 = 18, 13 used
    (it stops); r3: 12 + 2 = 14, 13 used.
    """
    r = reservation(golden())
    assert r.total_slots == 28 and list(r.steps) == ["max_model_len", "exact", "buddy", "paged"]
    assert r.steps["max_model_len"][:2] == [
        Held(10, 3, 15, 0, 0, 1, 1),
        Held(11, 2, 15, 0, 0, 1, 3),
    ]  # one request takes all 28
    assert r.steps["exact"][0] == Held(10, 3, 1, 0, 14, 1, 1)
    assert r.steps["exact"][1] == Held(
        11, 2, 1, 14, 0, 1, 3
    )  # 14 are left, and r2 wants 18: r3, behind it, waits too
    assert r.steps["exact"][4] == Held(13, 0, 5, 0, 10, 1, 1)  # r2 alone, which was placed when r1 had gone
    assert r.steps["buddy"][0] == Held(
        10, 3, 3, 0, 12, 1, 1
    )  # 16 of an arena of 16; arenas of 8 and 4 are free
    assert r.steps["buddy"][4] == Held(0, 0, 0, 28, 0, 0, 1)  # 18 become 32, more than there is
    assert r.steps["paged"][1] == Held(22, 0, 6, 0, 0, 3, 3)
    assert (
        r.placed["max_model_len"] == pytest.approx(7 / 12)
        and r.placed["buddy"] == pytest.approx(6 / 12)
        and r.placed["paged"] == 1
    )
    assert r.shares["max_model_len"]["used"] == pytest.approx((10 + 11 + 12 + 13 + 13 + 13 + 6) / 7 / 28)
    assert r.sentences[0] == (
        "One piece of max_model_len slots a request, first fit: 39.8 % of the pool held tokens (3.1 % "
        "reserved for later, 57.1 % never used); "
        "58 % of the running requests would have had room"
    )
    assert "in the empty rest of blocks" in r.sentences[3]
    assert json.loads(json.dumps(r.to_dict(), allow_nan=False))["assumptions"] == list(ASSUMPTIONS)


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_slots_sum_exactly(discipline: str) -> None:
    trace = run(specs(16), discipline=discipline, num_blocks=40, at={7: ("abort", "r5")})
    r = reservation(trace)
    assert set(r.steps) == set(SCHEMES)
    for name, rows in r.steps.items():
        assert len(rows) == len(trace)
        for x in rows:
            assert sum(getattr(x, p) for p in PARTS) == r.total_slots, (name, x)
            assert min(x) >= 0 and x.num_placed <= x.num_running
            assert x.external == 0 or x.num_placed < x.num_running
        assert sum(r.shares[name].values()) == pytest.approx(1)
    assert all(
        x.reserved + x.used <= y.reserved + y.used or x.num_placed <= y.num_placed
        for x, y in zip(r.steps["max_model_len"], r.steps["exact"])
    )


def test_a_large_pool_places_everybody_and_then_only_the_sizes_differ() -> None:
    r = reservation(run(specs(12), num_blocks=400))
    for least, most in (("exact", "buddy"), ("exact", "max_model_len")):
        for x, y in zip(r.steps[least], r.steps[most]):
            assert (
                x.num_placed == y.num_placed == x.num_running
                and x[:2] == y[:2]
                and x.internal <= y.internal
                and x.external == y.external == 0
            )


def test_no_pool_no_figure() -> None:
    with pytest.raises(ValueError, match="no pool"):
        reservation(Trace())


@pytest.mark.parametrize("kind", [FirstFit, Buddy])
@pytest.mark.parametrize("total", [1, 28, 64, 100, 1000])
def test_no_slot_is_given_out_twice_and_all_come_back(kind: type, total: int) -> None:
    rng = random.Random(total)
    a = kind(total)
    owner: dict[int, int] = {}
    live: list[tuple[int, int]] = []
    for _ in range(400):
        if live and rng.random() < 0.5:
            at, n = live.pop(rng.randrange(len(live)))
            a.give(at, n)
            for slot in range(at, at + a.size_of(n)):
                del owner[slot]
            continue
        n = rng.randrange(1, max(2, total // 3))
        at = a.take(n)
        if at is None:
            size = a.size_of(n)
            if kind is FirstFit:
                assert not any(
                    all(s not in owner for s in range(b, b + size)) for b in range(total - size + 1)
                )
            continue
        for slot in range(at, at + a.size_of(n)):
            assert 0 <= slot < total and slot not in owner
            owner[slot] = at
        live.append((at, n))
    for at, n in live:
        a.give(at, n)
    if kind is FirstFit:
        assert a.holes == [(0, total)]
    else:
        assert {k: v for k, v in a.free.items() if v} == dict(Buddy(total).free)


def test_where_tokens_memory_and_time_went() -> None:
    s = summary(golden())
    assert s["tokens"] == {"total": 45, "useful": 37, "recomputed": 8, "padded": 0, "rejected": 0} and s[
        "token_shares"
    ]["recomputed"] == pytest.approx(8 / 45)
    assert s["slot_steps"]["total"] == 8 * 28 and s["slot_shares"]["used"] == pytest.approx(108 / 224)
    t = s["time_s"]
    assert (
        t["prefill"] == pytest.approx(0.032)
        and t["decode"] == pytest.approx(0.028)
        and t["mixed"] == pytest.approx(0.022)
        and t["idle"] == pytest.approx(0.028)
    )
    assert t["total"] == pytest.approx(0.110)
    for shares, parts in (
        ("token_shares", TOKEN_PARTS),
        ("slot_shares", SLOT_PARTS),
        ("time_shares", TIME_PARTS),
    ):
        assert set(s[shares]) == set(parts) and sum(s[shares].values()) == pytest.approx(1)
    empty = summary(Trace())
    assert empty["token_shares"] is None and empty["slot_shares"] is None and empty["time_shares"] is None
    assert summary(golden(capabilities=["schedule"]))["time_s"] is None
