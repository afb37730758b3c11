"""A step that failed anywhere and is tried again is the step that never failed: its record, the order of its
events, and the state after it, order included.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbviz.core.check import check
from cbviz.core.ranking import PolicyError
from cbviz.core.speculative import ProposerError
from cbviz.engine.engine import Engine
from cbviz.messages import RequestSpec, StepRecord
from tests.core.anything import Fault, Trouble, anything, asked_through, engine_for
from tests.core.byhand import byhand, spec
from tests.core.fuzz import Case, ask

MOST_STEPS = 40
FAILS = (Fault, PolicyError, ProposerError)


def written(engine: Engine) -> str:
    """The state as text, dictionaries in their own order, but for `by_hash`: blocks are only ever looked up
    in it.
    """
    plain = engine.snapshot()
    pool = plain["scheduler"]["pool"]
    pool["by_hash"] = dict(sorted(pool["by_hash"].items()))
    return json.dumps(plain)


def lines(records: list[StepRecord]) -> list[bytes]:
    return [msgspec.json.encode(r) for r in records]


def twins(c: Case, seed: int, trouble: Trouble, chance: float) -> int:
    """Plays a case twice, once with failing steps, side by side. Returns how many steps failed."""
    rng, failed = random.Random(seed), 0
    smooth, rough, mirror = (engine_for(c, seed) for _ in range(3))
    trouble.watch(smooth)
    trouble.watch(rough)
    for n in range(1, MOST_STEPS + 1):
        for engine in (smooth, rough):
            ask(engine, c.at.get(n, ()))
        trouble.left, trouble.passed = -1, 0
        expected = smooth.step()
        if expected is None:
            if n > max(c.at, default=0):
                break
            continue
        if rng.random() < chance:
            before = written(rough)
            trouble.left = rng.randrange(trouble.passed)
            with pytest.raises(FAILS):
                rough.step()
            assert written(rough) == before
            check(rough.scheduler)
            failed += 1
        trouble.left = -1
        record = rough.step()
        assert record is not None
        assert lines([record]) == lines([expected])
        assert written(rough) == written(smooth)
        mirror.apply(msgspec.json.decode(msgspec.json.encode(record), type=StepRecord))
        assert list(mirror.scheduler.state.requests) == list(rough.scheduler.state.requests)
        assert mirror.digest() == rough.digest()
    return failed


@settings(max_examples=100)
@given(st.integers(0, 10**9))
def test_a_retry_gives_what_the_step_without_the_failure_gives(seed: int) -> None:
    trouble = Trouble()
    with asked_through(trouble):
        twins(anything(seed), seed, trouble, 0.5)


@pytest.mark.parametrize("seed", [154341105, 18633])
def test_a_pass_that_is_taken_back_leaves_no_values_in_blocks_of_others(seed: int) -> None:
    """The failure comes after the pass; a block that was given away in that step is its old owner's again,
    and holds what the pass wrote.
    """
    trouble = Trouble()
    with asked_through(trouble):
        assert twins(anything(seed), seed, trouble, 0.7)


@pytest.mark.parametrize("seed", [8000496, 8002116])
def test_a_retry_reads_nothing_that_the_failed_step_wrote(seed: int) -> None:
    """Given a step that fails after its pass, when it is tried again, then blocks that others hold again are
    computed anew (about one draw in a thousand asks for it).
    """
    trouble = Trouble()
    with asked_through(trouble):
        assert twins(anything(seed), seed, trouble, 0.5)


@pytest.mark.deep
@settings(max_examples=3000)
@given(st.integers(0, 10**9))
def test_a_retry_gives_what_the_step_without_the_failure_gives_more(seed: int) -> None:
    trouble = Trouble()
    with asked_through(trouble):
        twins(anything(seed), seed, trouble, 0.7)


def one_failing_step(c: Case, at: int) -> tuple[Engine, Engine]:
    """Two engines after step `at` of a case: one that failed in it and tried again, one that did not.

    Their records of that step are equal.
    """
    trouble = Trouble()
    engines, records = [], []
    for fails in (True, False):
        engine = engine_for(c, 1)
        trouble.watch(engine)
        for n in range(1, at + 1):
            ask(engine, c.at.get(n, ()))
            if fails and n == at:
                trouble.left = 0
                with pytest.raises(Fault):
                    engine.step()
            record = engine.step()
            assert record is not None
        engines.append(engine)
        records.append(record)
    assert lines(records[:1]) == lines(records[1:])
    return engines[0], engines[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.at.update({4: [("configure", {"timeout_s": 1e-9})]}),
        lambda c: c.at.update({4: [("abort", "a")]}),
    ],
    ids=["two time-outs", "an abort with children"],
)
def test_requests_come_back_in_their_order(change: Callable[[Case], None]) -> None:
    """Given two requests of three sequences each, when a step that ends several of them fails and is tried
    again, then they end in the order of the run without a failure.
    """
    c = byhand([spec("a", 4, 9), spec("b", 4, 9)], {}, max_num_seqs=8)
    c.specs = [msgspec.structs.replace(x, sampling=msgspec.structs.replace(x.sampling, n=3)) for x in c.specs]
    change(c)
    rough, smooth = one_failing_step(c, 4)
    assert written(rough) == written(smooth)
    assert rough.scheduler.state.num_finished in (3, 6)


def test_the_digest_tells_the_order_of_requests() -> None:
    """Given two engines that differ only in the order of their requests, then their digests differ; in the
    form of earlier versions they do not.
    """
    c = byhand([RequestSpec("a", (1, 2), 9), RequestSpec("b", (3, 4), 9)], {})
    one, other = engine_for(c, 1), engine_for(c, 1)
    one.step()
    other.step()
    other.scheduler.state.requests = dict(reversed(other.scheduler.state.requests.items()))
    assert one.digest() != other.digest()
    assert one.digest(form=1) == other.digest(form=1)
