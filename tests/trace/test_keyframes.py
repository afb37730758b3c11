"""Kept states and keyframes stay below a limit together, however long the queue; seeking and rewinding find
the same state with fewer of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cbviz as cb
from cbviz.messages import RequestSpec, Sampling
from cbviz.session import Session
from cbviz.trace import keyframes
from cbviz.trace.keyframes import Spacing


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.integers(1, 5000))
def test_the_total_stays_below_the_limit(sizes: list[int], most: int) -> None:
    """Given copies of any sizes, when they are offered one after the other, then all kept together are below
    the limit or there is one; none kept is off the spacing.
    """
    spacing, kept = Spacing(most), set()
    for n, size in enumerate(sizes, 1):
        step = 100 * n
        if spacing.wants(step):
            kept.add(step)
            kept.difference_update(spacing.keep(step, size))
        assert kept == set(spacing.sizes)
        assert len(kept) <= 1 or sum(sizes[s // 100 - 1] for s in kept) <= most
        assert all(s % spacing.every == 0 for s in kept)


def long_queue(num: int) -> list[RequestSpec]:
    return [RequestSpec(f"r{i}", (5, 6, 7), 30, sampling=Sampling(ignore_eos=True)) for i in range(num)]


def test_a_long_queue_keeps_few_large_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a queue whose states pass the limit, when the run is long, then they stand further apart, and
    seeking and rewinding still find every state.
    """
    plain = Session(long_queue(60), runner="sim", max_num_seqs=2)
    plain.run()
    monkeypatch.setattr("cbviz.trace.trace.MOST_STATE_NUMBERS", 8000)
    monkeypatch.setattr("cbviz.trace.trace.MOST_KEYFRAME_BYTES", 50_000)
    s = Session(long_queue(60), runner="sim", max_num_seqs=2)
    s.run()
    assert len(s.trace) > 800
    assert len(s.trace._frames) < len(plain.trace._frames) and len(s.trace.digests) < len(plain.trace.digests)
    assert sum(s.trace._keyframe_spacing.sizes.values()) <= 50_000
    for step in (0, 1, 99, 100, 250, 555, len(s.trace) - 1):
        a, b = s.trace.state(step), plain.trace.state(step)
        assert (a.waiting, a.running, a.time_s) == (b.waiting, b.running, b.time_s)
    end = s.digest()
    for step in (850, 333, 100, 7):
        s.rewind(step)
        s.run()
        assert s.digest() == end == plain.digest()


def test_a_run_that_is_only_run_to_its_end_keeps_nothing(tmp_path: Path) -> None:
    """Given a run that asks for no keyframes, then none is made, none is in its file, and it can be taken up
    all the same.
    """
    s = Session(long_queue(20), runner="sim", max_num_seqs=2)
    s.trace.keyframes = False
    s.run()
    assert len(s.trace) > 200 and not s.trace.digests and list(s.trace._frames) == [0]
    again = Session.from_trace(cb.load(s.save(tmp_path / "run.jsonl")))
    assert again.digest() == s.digest()
    assert s.trace.state(150).waiting == again.trace.state(150).waiting


def test_the_limits_leave_room_for_ordinary_runs() -> None:
    """Given the longest preset, then its keyframes stand every 100 steps."""
    s = Session("article", runner="sim")
    s.run()
    assert s.trace._frame_spacing.every == s.trace._keyframe_spacing.every == keyframes.KEYFRAME_EVERY
