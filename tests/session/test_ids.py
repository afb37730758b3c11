"""All ids at any moment: a request is never missing while it moves from what is to come into the step under
way and from there into the trace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from cbviz.messages import RequestSpec, Sampling
from cbviz.session import Session
from tests.core.fuzz import LedgerRunner
from tests.session.test_interrupts import HERE, SMALL

SPECS = [
    RequestSpec("now", (1, 2, 3), 9),
    RequestSpec("timed", (4, 5), 3, arrival_s=1e-9),
    RequestSpec("second", (6, 7, 8), 4, arrival_step=2),
    RequestSpec("twins", (9, 9), 4, arrival_step=2, sampling=Sampling(n=2)),
    RequestSpec("third", (6, 7), 4, arrival_step=3),
    RequestSpec("never", (1,), 4, arrival_step=9),
]


class Broken(LedgerRunner):
    """Fails in its passes number `fails`."""

    fails: tuple[int, ...] = ()
    passes = 0

    def execute(self, plan: Any) -> Any:
        self.passes += 1
        if self.passes in self.fails:
            raise RuntimeError("the card fell out")
        return super().execute(plan)


def looked_at_every_line(s: Session, f: Callable[[], object], look: Callable[[], object]) -> int:
    """Calls `look` before each line of cbviz that `f` runs, as a thread may that gets to run there.

    Returns how many lines these were.
    """
    count = 0

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line" and not s.trace._lock._is_owned():  # type: ignore[attr-defined]  # another thread would wait for the trace's lock
            count += 1
            sys.settrace(None)
            look()
            sys.settrace(enter)
        return line

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(HERE) else None

    sys.settrace(enter)
    try:
        f()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("fails", [(), (1, 3)], ids=["", "some steps fail"])
def test_no_request_is_missing_at_any_line_of_a_step(fails: tuple[int, ...]) -> None:
    """Given requests that arrive, are added or are aborted before they arrive, when another thread looks in
    the middle of their step, then all are there and each counts once.
    """
    probe = Session(SPECS, runner="sim", **SMALL)
    runner = Broken(probe.config)
    runner.fails = fails
    s = Session(SPECS, runner=runner, **SMALL)
    wanted = {x.request_id for x in SPECS}
    for n in range(1, 6):
        if n == 2:
            wanted.add(s.add([1, 2], max_tokens=2, request_id="added"))
        if n == 3:
            s.abort("never")
        before = set(s.request_ids)
        assert before >= wanted

        def look() -> None:
            ids = s.request_ids
            assert set(ids) >= wanted
            assert len(ids) == len(set(ids))
            assert s.num_requests == len(wanted)

        def step() -> None:
            try:
                s.step()
            except RuntimeError:
                s.step()

        assert looked_at_every_line(s, step, look) > 100
    assert set(s.request_ids) > wanted  # the second of the twins


def test_no_request_is_missing_at_any_line_of_a_way_back() -> None:
    s = Session(SPECS, runner="sim", **SMALL)
    s.add([1, 2], max_tokens=2, request_id="added")
    s.step(6)
    wanted = {x.request_id for x in SPECS} | {"added"}

    def look() -> None:
        assert set(s.request_ids) >= wanted

    assert looked_at_every_line(s, lambda: s.rewind(3), look) > 100
