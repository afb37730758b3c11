"""Records are enough: a second engine that is only told what the first one did stands, after every step,
where the first one stands.
"""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from cbviz.core.check import check
from cbviz.core.policy import POLICIES
from cbviz.core.ranking import Policy
from cbviz.engine.engine import Engine
from cbviz.trace.trace import Trace
from tests.core.fuzz import (
    DISCIPLINE_NAMES,
    Case,
    LedgerRunner,
    case,
    finish,
    judge,
    make_engine,
    make_trace,
    play,
)


def follow(c: Case) -> tuple[Engine, Engine, Trace]:
    """Plays a case; a second engine applies each record, as it comes back from a file, and is compared."""
    mirror = make_engine(c.config)
    engine, trace = play(c, mirror=mirror)
    return engine, mirror, trace


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("discipline", DISCIPLINE_NAMES)
def test_a_mirror_follows(discipline: str, seed: int) -> None:
    c = case(seed, discipline=discipline)
    c.at.setdefault(9, []).append(("configure", {"policy": "priority", "max_num_seqs": 2}))
    c.at.setdefault(20, []).append(("configure", {"discipline": "vllm"}))
    follow(c)


@pytest.mark.parametrize("seed", range(60))
def test_under_overload(seed: int) -> None:
    """Time limits, full queues, shedding, degradation and deadlines, all at once: invariants hold, blocks
    come back, and a mirror follows.
    """
    rng = random.Random(seed)
    c = case(seed)
    c.config = c.config.replace(
        timeout_s=rng.choice((0.0, 0.002, 0.01)),
        shed_after_s=rng.choice((0.0, 0.001, 0.004)),
        max_waiting_requests=rng.choice((0, 2, 5)),
        max_waiting_tokens=rng.choice((0, 60)),
        degrade_above=rng.choice((0.0, 0.4)),
    )
    c.specs = [
        msgspec.structs.replace(
            x, deadline_s=rng.choice((None, 0.0005, 0.003)), session=rng.choice((None, "s1", "s2"))
        )
        for x in c.specs
    ]
    follow(c)


def test_overload_cases_are_hard() -> None:
    reasons = set()
    for seed in range(60):
        rng = random.Random(seed)
        c = case(seed)
        c.config = c.config.replace(
            timeout_s=rng.choice((0.0, 0.002)), shed_after_s=0.001, max_waiting_requests=2
        )
        c.specs = [msgspec.structs.replace(x, deadline_s=rng.choice((None, 0.001))) for x in c.specs]
        reasons |= {r.finish_reason.split(":")[0] for r in play(c)[1].state().by_index}
    assert {"length", "abort", "timeout", "deadline", "shed", "refused"} <= reasons


def test_a_mirror_asks_no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(Policy):
        name = "sjf"
        static = False

        def rank(self, r: object, now: float) -> int:
            raise AssertionError("asked")

    c = case(3, discipline="vllm", policy="sjf", inputs=False)
    _, trace = play(c)
    mirror = make_engine(c.config)
    mirror.enqueue(c.specs)
    monkeypatch.setitem(POLICIES, "sjf", Twice())
    for record in trace:
        mirror.apply(record)
    assert not mirror.has_work


def resume(c: Case) -> None:
    """A snapshot, as plain JSON, restored into another engine with an empty KV cache: the same steps follow,
    and no slot is read that holds something else.
    """
    _, smooth = play(c)
    for at in sorted({1, len(smooth) // 3, len(smooth) // 2, len(smooth) - 1} - {0}):
        first = make_engine(c.config)
        first.enqueue(c.specs)
        records = [first.step() for _ in range(at)]
        plain = json.loads(json.dumps(first.snapshot()))
        second = make_engine(c.config, LedgerRunner(c.config))
        held = len(
            {
                b
                for r in first.scheduler.state.requests.values()
                for b in r.block_ids[: -(-r.num_computed_tokens // c.config.block_size)]
                if b
            }
        )
        assert second.restore(plain, {x.request_id: x for x in c.specs}) == held
        assert second.digest() == first.digest()
        trace = make_trace(c.config)
        for record in records:
            assert record is not None
            trace.append(record)
        while (record := second.step()) is not None:
            judge(second, trace, record)
        assert [r.events for r in trace] == [r.events for r in smooth]
        assert [r.t1_s for r in trace] == [r.t1_s for r in smooth]
        finish(second, trace, c)


@pytest.mark.parametrize("seed", range(12))
def test_from_any_step_on(seed: int) -> None:
    resume(case(seed, inputs=False))


@pytest.mark.parametrize("seed", range(12))
def test_back_in_time_with_a_full_cache(seed: int) -> None:
    """The same engine goes back: its KV cache holds what later steps wrote, and blocks that could be hit then
    may hold something else now.
    """
    c = case(
        seed, enable_prefix_caching=True, inputs=False, discipline=("chunked", "vllm", "paged")[seed % 3]
    )
    engine = make_engine(c.config)
    engine.enqueue(c.specs)
    snapshots, records = [engine.snapshot()], []
    while (record := engine.step()) is not None:
        records.append(record)
        snapshots.append(engine.snapshot())
    specs = {x.request_id: x for x in c.specs}
    for at in sorted({0, 1, len(records) // 4, len(records) // 2, 3 * len(records) // 4}):
        engine.restore(snapshots[at], specs)
        for old in records[at:]:
            new = engine.step()
            assert new is not None and new.events == old.events and new.t1_s == old.t1_s
            check(engine.scheduler)
        assert engine.step() is None
        assert engine.snapshot() == snapshots[-1]
