"""Many arrivals in one step cost in proportion, in the engine, in the fold and in a replay.

Work is counted in calls and comparisons, never timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from cbviz.events import Arrived
from cbviz.messages import RequestSpec
from cbviz.session import Session
from cbviz.trace.state import State


class Id(str):
    """An id that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Id.compared += 1
        return str.__eq__(self, other)


def work(f: Callable[[], Any]) -> int:
    """Calls and comparisons of ids while `f` runs."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    Id.compared = 0
    sys.setprofile(count)
    try:
        f()
    finally:
        sys.setprofile(None)
    return calls + Id.compared


def costs(n: int, policy: str) -> tuple[int, int, int]:
    """The work of a step in which `n` requests arrive: of the step, of its fold, and of its replay."""
    s = Session(
        [RequestSpec(Id(f"r{i}"), (100, 101), 4, priority=-i % 7) for i in range(n)],
        runner="sim",
        policy=policy,
    )
    step = work(s.step)
    assert sum(isinstance(e, Arrived) for e in s.trace[0].events) == n
    fold = work(lambda: State(s.config.num_blocks, s.config.block_size).apply(s.trace[0]))
    again = work(lambda: s.rewind(1))
    return step, fold, again


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf"])
def test_four_times_the_arrivals_cost_about_four_times_the_work(policy: str) -> None:
    for few, many in zip(costs(400, policy), costs(1600, policy), strict=True):
        assert many < 5.5 * few
