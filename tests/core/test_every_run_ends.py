"""Every run ends or says why not, whatever the knobs: disciplines, policies, victim rules, techniques, n,
beams, thresholds and tight pools, drawn independently.

For more draws than a test should make: `python -m tests.core.test_every_run_ends FIRST_SEED NUM`, which
prints how they ended and names each seed that failed.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from cbviz.config import ConfigError
from cbviz.core.policy import POLICIES
from cbviz.core.ranking import Policy
from cbviz.engine.progress import PATIENCE_STEPS, patience
from cbviz.session import Session
from tests.strategies import Drawn, draw

NUM = 500


def outcome(drawn: Drawn) -> tuple[str, int]:
    """How the run ends, and the steps it takes; `refused` where the knobs don't go together.

    The checker is asked after each step.

    A run that ends was never more than half way to being called stuck: the limit has room.
    """
    late: list[str] = []

    def look(s: Session) -> None:
        if (
            s.engine._stalled > PATIENCE_STEPS // 2
            and s.engine._stalled > (most := patience(s.engine.scheduler.state)) / 2
        ):
            late.append(f"step {s.engine.step_count}: {s.engine._stalled} steps of {most}")

    with drawn.named():
        try:
            s = drawn.session()
        except ConfigError:
            return "refused", 0
        how = drawn.play(s, after=look)
        if how != "ended":
            return "stuck: " + how, len(s.trace)
        assert not late, late[-1]
        pool = s.engine.scheduler.state.pool
        assert (
            all(r.finished or r.status == "refused" for r in s.state().by_index)
            and pool.num_free == pool.num_blocks - 1
        )
        return how, len(s.trace)


def outcomes(seeds: Iterable[int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        try:
            how, steps = outcome(draw(random.Random(seed)))
        except BaseException as e:
            e.add_note(f"draw(random.Random({seed}))")
            raise
        found[how] += 1
        found["steps"] += steps
    return found


def test_every_run_ends_or_says_why_not() -> None:
    """With the policies that come with the package none is stuck; that is what the counts say beside the rule
    itself.
    """
    found = outcomes(range(NUM))
    assert found["ended"] + found["refused"] == NUM, [k for k in found if k.startswith("stuck")]
    assert found["refused"] < NUM / 10


class Newcomers(Policy):
    """Whoever has run longest loses its blocks."""

    static = False

    def rank(self, r: Any, now: float) -> Any:
        return -r.queued_step


class Turning(Policy):
    """The order turns round with every step of waiting."""

    static = False

    def rank(self, r: Any, now: float) -> Any:
        return r.seq if r.num_waiting_steps % 2 else -r.seq


class ShortOnly(Policy):
    """Never admits a prompt of more than nine tokens."""

    def admit(self, r: Any, now: float) -> bool:
        return bool(r.num_prompt_tokens <= 9)


class Slow(Policy):
    """Admits after 20 steps of waiting."""

    def admit(self, r: Any, now: float) -> bool:
        return bool(r.num_waiting_steps >= 20)


@pytest.mark.parametrize("policy", [Newcomers, Turning, ShortOnly, Slow])
def test_under_a_policy_that_means_no_good_every_run_ends_or_is_stuck(
    policy: type[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "typed", policy())
    found: Counter[str] = Counter()
    for seed in range(60):
        drawn = draw(random.Random(seed), policy="typed")
        with drawn.named():
            try:
                how = drawn.play(drawn.session())
            except ConfigError:
                continue
            found["ended" if how == "ended" else "stuck"] += 1
            if how != "ended":
                assert "can never be admitted: policy" in how or "No request got further" in how
    assert found["ended"] > 20 and (found["stuck"] > 5 or policy is not ShortOnly)


@pytest.mark.slow
@pytest.mark.deep
def test_many_more_runs_end_or_say_why_not() -> None:
    found = outcomes(range(NUM, 10 * NUM))
    assert found["ended"] + found["refused"] == 9 * NUM, [k for k in found if k.startswith("stuck")]


def main(first: int, num: int) -> int:
    """Plays `num` draws from seed `first` on; a failure is printed and the rest goes on.

    Returns the number of failures.
    """
    found: Counter[str] = Counter()
    for seed in range(first, first + num):
        try:
            how, steps = outcome(draw(random.Random(seed)))
        except Exception as e:
            print(f"seed {seed}: {type(e).__name__}: {e}", flush=True)
            how, steps = "failed", 0
        if how.startswith("stuck"):
            print(f"seed {seed}: {how}", flush=True)
        found[how.split(":")[0]] += 1
        found["steps"] += steps
    print(
        f"seeds {first}..{first + num - 1}: "
        + ", ".join(f"{n:,} {what}" for what, n in sorted(found.items())),
        flush=True,
    )
    return found["failed"]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)
