"""A run in which nobody gets further is said to be stuck, with who and why: in the engine, in Python, on the
command line; and not before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cbviz as cb
from cbviz.core import scheduler
from cbviz.core.policy import POLICIES
from cbviz.core.ranking import Policy
from cbviz.core.request import Status
from cbviz.engine.progress import PATIENCE_STEPS, patience
from cbviz.session import Session, Stuck
from tests.core.byhand import spec


class Newcomers(Policy):
    """Whoever has run longest loses its blocks, so two requests that don't fit together take turns for ever."""

    name = "newcomers"
    static = False

    def rank(self, r: Any, now: float) -> Any:
        return -r.queued_step


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "newcomers", Newcomers())


def turns(**knobs: Any) -> Session:
    """Two requests of 40 tokens and room for 64.

    Each is cut into chunks of three, so the one that comes back fills the pool before it is where it was.
    """
    specs = [spec("a", 20, 30), spec("b", 20, 30, first=100)]
    return Session(
        specs,
        runner="sim",
        policy="newcomers",
        discipline="chunked",
        block_size=4,
        num_blocks=14,
        max_model_len=52,
        enable_prefix_caching=False,
        long_prefill_token_threshold=1,
        **knobs,
    )


def ran_into() -> Session:
    s = turns()
    with pytest.raises(
        Stuck,
        match=r"^No request got further than before in the last [0-9]+ steps, since step [0-9]+: . and . compute the same tokens again and again",
    ):
        s.run(max_steps=3000)
    return s


def test_a_run_in_which_nobody_gets_further_is_stuck() -> None:
    s = ran_into()
    assert (
        s.done
        and "lost their blocks" in s.engine.stuck
        and "Choose another victim rule or policy" in s.engine.stuck
    )
    assert s.engine._stalled == patience(s.engine.scheduler.state) + 1 > PATIENCE_STEPS
    reach = [max((c.start + c.num_tokens for c in r.chunks), default=0) for r in s.trace]
    assert max(reach[-s.engine._stalled :]) <= max(reach[: -s.engine._stalled])


def test_a_changed_knob_lets_it_go_on() -> None:
    s = ran_into()
    s.configure(policy="fcfs")
    assert not s.engine.stuck and not s.done
    s.run()
    assert all(r.finish_reason == "length" for r in s.state().by_index)


def test_an_abort_lets_it_go_on() -> None:
    s = ran_into()
    s.abort("a")
    s.run()
    assert s.request("b").finish_reason == "length"


def test_single_steps_go_on_and_say_the_same() -> None:
    s = ran_into()
    assert s.step() is not None and s.engine.stuck


def test_rewind_replay_fork_and_file_count_alike(tmp_path: Path) -> None:
    """The count follows from the records: it is the same however the engine came to this step."""
    s = ran_into()
    last, count = len(s.trace), s.engine._stalled
    s.trace.save(tmp_path / "run.jsonl")
    loaded = Session.from_trace(cb.load(tmp_path / "run.jsonl"))
    assert loaded.engine.stuck == s.engine.stuck and loaded.engine._stalled == count
    branch = s.fork(at=last - 5)
    assert branch.engine._stalled == count - 5 and not branch.engine.stuck
    with pytest.raises(Stuck):
        branch.run(max_steps=100)
    assert len(branch.trace) == last
    s.rewind(last - 1)
    assert s.engine._stalled == count - 1 and not s.engine.stuck
    s.rewind(last - count)
    assert s.engine._stalled == 0


def test_a_snapshot_holds_the_count() -> None:
    s = ran_into()
    said, data = s.engine.stuck, s.engine.snapshot()
    other = turns().engine
    other.restore(data, {x.request_id: x for x in s.workload})
    assert other.stuck == said
    del data["stalled"]  # recorded before there was a count
    other.restore(data, {x.request_id: x for x in s.workload})
    assert not other.stuck


def test_a_running_request_that_gets_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Session([spec("a", 8, 4)], runner="sim", max_num_batched_tokens=64)
    s.step()
    monkeypatch.setattr(scheduler, "run", lambda state, it, order: None)
    with pytest.raises(
        Stuck,
        match=r"a runs and gets no tokens\. No token was computed in these steps\. The budget is 64 tokens a step .max_num_batched_tokens.: raise it, choose another discipline or policy, or abort a",
    ):
        s.run(max_steps=500)


def test_requests_that_lost_their_blocks_are_not_said_to_compute_where_nothing_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Given a request that runs and one that lost its blocks, when no step plans anything, then each is said
    to do what it does; a snapshot says the same.
    """
    s = turns()
    while not any(r.num_preemptions for r in s.engine.scheduler.state.requests.values()):
        s.step()
    monkeypatch.setattr(scheduler, "run", lambda state, it, order: None)
    monkeypatch.setattr(scheduler, "admit", lambda state, it: None)
    with pytest.raises(Stuck) as stuck:
        s.run(max_steps=3000)
    said = str(stuck.value)
    assert "compute" not in said.replace("No token was computed in these steps", "")
    state = {r.request_id: r.status for r in s.engine.scheduler.state.requests.values()}
    (out,) = [i for i, status in state.items() if status is Status.PREEMPTED]
    (inside,) = [i for i, status in state.items() if status is Status.RUNNING]
    assert f"{inside} runs and gets no tokens and {out} lost its blocks and is not let in again." in said
    other = turns().engine
    other.restore(s.engine.snapshot(), {x.request_id: x for x in s.workload})
    assert other.stuck == said


def test_waiting_for_an_arrival_is_not_being_stuck() -> None:
    s = Session([spec("a", 4, 2), spec("b", 4, 2, step=500)], runner="sim")
    s.run()
    assert all(r.finished for r in s.state().by_index)


def test_a_long_recomputation_is_not_being_stuck() -> None:
    """`b` loses some 400 tokens and gets two back a step: about 200 steps in which nobody gets further, and
    then it goes on.
    """
    specs = [spec("b", 380, 60), spec("a", 2, 60, step=200, priority=-1)]
    s = Session(
        specs,
        runner="sim",
        policy="priority",
        discipline="vllm",
        max_num_batched_tokens=2,
        block_size=4,
        num_blocks=112,
        max_model_len=444,
        enable_prefix_caching=False,
    )
    longest = 0
    while s.step() is not None:
        longest = max(longest, s.engine._stalled)
        assert not s.engine.stuck
    assert longest > 2 * PATIENCE_STEPS and s.request("b").num_preemptions == 1
    assert all(r.finish_reason == "length" for r in s.state().by_index)
