"""A session on the simulated runner: stepping, inputs, time travel, branches, saving.

Nothing here needs torch.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import cbviz as cb
from cbviz import events as ev
from cbviz.config import ConfigError
from cbviz.core.check import check
from cbviz.core.policy import POLICIES
from cbviz.core.ranking import Policy, PolicyError
from cbviz.core.replay import ReplayError
from cbviz.cost import models
from cbviz.messages import RequestError, RequestSpec, RunnerOutput, SchedulerOutput
from cbviz.runners.sim import SimRunner
from cbviz.session import Session, Stuck
from cbviz.trace.accounting import check_trace
from cbviz.trace.compare import compare
from cbviz.trace.schema import KEYFRAME_EVERY
from cbviz.trace.trace import Cursor, Trace, load
from tests.core.fuzz import DISCIPLINE_NAMES, LedgerRunner, same

SMALL = {
    "runner": "sim",
    "num_blocks": 25,
    "block_size": 4,
    "max_model_len": 80,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 80,
}


def requests(num: int = 8, step: int = 2) -> list[RequestSpec]:
    return [
        RequestSpec(
            f"r{i + 1}",
            tuple(100 + (i % 3) * 50 + j for j in range(9 + 5 * i)),
            6 + 3 * i,
            arrival_step=1 + step * i,
            priority=i % 2,
        )
        for i in range(num)
    ]


def small(specs: list[RequestSpec] | None = None, **changes: Any) -> Session:
    return Session(requests() if specs is None else specs, **{**SMALL, **changes})


def events(trace: Trace) -> list[Any]:
    return [(r.chunks, r.events, r.tokens, r.slots, r.gauges, r.t0_s, r.t1_s, r.inputs) for r in trace]


def consistent(s: Session) -> None:
    check(s.engine.scheduler)
    same(s.trace.state(), s.engine.scheduler.state)
    assert s.engine.step_count == len(s.trace)
    assert s.config == s.engine.config


# stepping ---------------------------------------------------------------------------------------------------


def test_step_and_run() -> None:
    s = small()
    assert s.cursor == Cursor(0) and not s.done and s.num_requests == 8
    first = s.step()
    assert first is not None and first.step == 1 and s.cursor == Cursor(1)
    fourth = s.step(3)
    assert fourth is not None and fourth.step == 4
    with pytest.raises(ConfigError, match="n is 0, it must be a whole number of steps"):
        s.step(0)
    assert s.run(max_steps=2).step == 6
    last = s.run()
    assert last is not None and s.done and s.cursor == s.trace.last == Cursor(last.step)
    assert s.step() is None and s.run() is None
    consistent(s)
    check_trace(s.trace)
    assert {r.finish_reason for r in s.state().by_index} == {"length"}


def test_run_until() -> None:
    s = small(num_blocks=21)
    s.run(until=cb.on("finished", request="r2"))
    assert s.request("r2").finished and s.cursor.step == s.request("r2").finish_step
    record = s.run(until=cb.on("preempted"))
    assert record is not None and any(isinstance(e, ev.Preempted) for e in record.events)
    t = small(num_blocks=21)
    t.breakpoints.append(cb.on("arrived", request="r8"))
    assert t.run().step == t.request("r8").arrival_step
    u = small(num_blocks=21)
    u.run(until=cb.on(kv_above=0.5))
    assert 1 - u.state().num_free_blocks / 20 > 0.5
    with pytest.raises(ConfigError, match="event is 'preemption'"):
        cb.on("preemption")
    with pytest.raises(ConfigError, match=r"on\(\) needs an event"):
        cb.on()


def test_callbacks() -> None:
    s, heard = small(), []
    stop = s.on_change(heard.append)
    s.step()
    s.add([1, 2, 3], max_tokens=2)
    s.configure(max_num_seqs=2)
    s.abort("r1")
    s.seek(0)
    s.run(max_steps=3)
    s.rewind(1)
    s.fork()
    s.reset()
    assert heard == ["step", "request", "config", "request", "seek", "step", "reset", "branch", "reset"]
    stop()
    stop()
    s.step()
    assert len(heard) == 9


def test_an_error_in_the_middle_shows_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tired(Policy):
        name = "tired"
        static = False
        broken = False

        def rank(self, r: Any, now: float) -> int:
            if self.broken and r.request_id == "r4":
                raise ValueError("tired of r4")
            return r.seq

    monkeypatch.setitem(POLICIES, "tired", Tired())
    s, heard = small(policy="tired"), []
    s.on_change(heard.append)
    Tired.broken = True
    with pytest.raises(PolicyError, match="policy tired failed on request r4: ValueError: tired of r4"):
        s.run()
    assert s.cursor == s.trace.last == Cursor(6) and heard == ["step"]
    consistent(s)
    Tired.broken = False
    s.run()
    assert s.done and events(s.trace) == events(_ran(small(policy="tired")).trace)


def _ran(s: Session) -> Session:
    s.run()
    return s


def test_ctrl_c_loses_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt between a step and its place in the trace: the step is kept, and the run goes on."""
    s = small()
    s.step(3)
    append = s.trace.append
    monkeypatch.setattr(
        s.trace, "append", lambda record: (signal.raise_signal(signal.SIGINT), append(record))[1]
    )
    with pytest.raises(KeyboardInterrupt):
        s.run()
    monkeypatch.undo()
    assert len(s.trace) == 4 and s.cursor == Cursor(4)
    consistent(s)
    s.run()
    assert events(s.trace) == events(_ran(small()).trace)


def test_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(Policy):
        name = "closed"
        open = False

        def admit(self, r: Any, now: float) -> bool:
            return self.open or r.request_id == "r1"

    monkeypatch.setitem(POLICIES, "closed", Closed())
    s = small(requests(3), policy="closed")
    with pytest.raises(Stuck, match="r2 can never be admitted: policy"):
        s.run(max_steps=500)
    assert s.done
    consistent(s)
    Closed.open = True  # the cell is run again with other rules: the engine goes on
    s.configure(max_num_seqs=3)
    s.run()
    assert all(r.finished for r in s.state().by_index)


def test_a_closed_door_does_not_stop_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may be admitted before a time that comes only with later arrivals: the clock goes on to them."""

    class Late(Policy):
        name = "late"

        def admit(self, r: Any, now: float) -> bool:
            return now >= 5.0

    monkeypatch.setitem(POLICIES, "late", Late())
    s = small(
        [RequestSpec("a", (1, 2), 2, arrival_s=0.0), RequestSpec("b", (1, 2), 2, arrival_s=7.0)],
        policy="late",
    )
    s.run(max_steps=50)
    assert s.done and s.request("a").finished and s.request("a").first_scheduled_s == 7.0


# inputs -----------------------------------------------------------------------------------------------------


def test_add_joins_the_next_step() -> None:
    s = small()
    s.step(3)
    rid = s.add([5, 6, 7], max_tokens=3, priority=-1)
    text = s.add("A story of the sea and the moon")
    assert rid not in s.state().requests and {rid, text} <= set(s.request_ids) and s.num_requests == 10
    record = s.step()
    assert record is not None
    assert record.inputs == [{"op": "add", "request_id": rid}, {"op": "add", "request_id": text}]
    assert [x.request_id for x in record.arrivals][:2] == [rid, text]
    assert s.request(rid).arrival_step == 4 and s.request(text).num_prompt_tokens == 8
    s.run()
    assert len(s.request(rid).output_token_ids) == 3 and len(s.request(text).output_token_ids) == 64
    again = s.add([1], max_tokens=1)
    assert not s.done
    s.run()
    assert s.request(again).finished


@pytest.mark.parametrize(
    "prompt, keywords, words",
    [
        ("", {}, "the prompt is empty"),
        ("   \n", {}, "the prompt is empty"),
        ([], {}, "at least 1 token"),
        ([1, 2.5], {}, "2.5"),
        ([1, True], {}, "True"),
        ([1, float("nan")], {}, "nan"),
        ([1, "2"], {}, "'2'"),
        ([-1], {}, "token id -1 is outside the model's vocabulary 0..49151"),
        ([49152], {}, "token id 49152 is outside the model's vocabulary 0..49151"),
        ([1], {"max_tokens": 0}, "max_tokens is 0, the least is 1"),
        ([1], {"max_tokens": -3}, "max_tokens is -3, the least is 1"),
        ([1], {"max_tokens": 2.0}, "max_tokens must be a whole number, got 2.0"),
        ([1], {"max_tokens": float("nan")}, "max_tokens must be a whole number, got nan"),
        (
            [1],
            {"max_tokens": 80},
            "prompt 1 + max_tokens 80 = 81 tokens, over max_model_len 80: lower max_tokens to 79",
        ),
        (list(range(80)), {}, "the prompt has 80 tokens; with max_model_len 80 it may have at most 79"),
        ([1], {"request_id": "r3"}, "request id 'r3' was used before"),
        ([1], {"request_id": "r7"}, "request id 'r7' was used before"),
        ([1], {"priority": 1.5}, "priority must be a whole number, got 1.5"),
        ([1], {"priority": float("nan")}, "priority must be a whole number, got nan"),
        ([1], {"deadline_s": float("nan")}, "deadline_s is nan"),
        ([1], {"deadline_s": -1.0}, "deadline_s is -1.0"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_figures(
    prompt: Any, keywords: dict[str, Any], words: str
) -> None:
    s = small()
    s.step(5)  # r3 has arrived, r7 has not
    before, ids = s.engine.snapshot(), s.request_ids
    with pytest.raises(RequestError) as e:
        s.add(prompt, **keywords)
    assert words in str(e.value)
    assert s.engine.snapshot() == before and s.request_ids == ids and not s.engine.inputs
    s.run()
    assert s.done


def test_a_pool_smaller_than_the_context() -> None:
    s = small([], num_blocks=6)  # 20 slots, contexts of 80
    with pytest.raises(
        RequestError,
        match=r"prompt 15 \+ max_tokens 6 = 21 tokens need 6 blocks of 4; the pool has 5: raise num_blocks or lower max_tokens",
    ):
        s.add(list(range(15)), max_tokens=6)
    s.add(list(range(15)))
    s.run()
    assert len(s.request("r0").output_token_ids) == 5


def test_a_workload_that_cannot_be_served_is_refused_on_arrival() -> None:
    specs = [
        *requests(2),
        RequestSpec("long", tuple(range(90)), 5, arrival_step=2),
        RequestSpec("odd", (1, 99_999), 5, arrival_step=3),
    ]
    s = _ran(small(specs))
    assert s.request("long").status == s.request("odd").status == "refused"
    assert (
        "the prompt has 90 tokens" in s.request("long").finish_reason
        and "token id 99999" in s.request("odd").finish_reason
    )
    assert s.request("r2").finish_reason == "length"
    consistent(s)


@pytest.mark.parametrize(
    "specs, error, words",
    [
        (
            [RequestSpec("a", (1,), 1), RequestSpec("a", (2,), 2, arrival_step=9)],
            RequestError,
            "request id 'a' was used before",
        ),
        ([(1, 2, 3)], RequestError, "a list of RequestSpec"),
        ("artcle", ConfigError, "did you mean 'article'"),
    ],
)
def test_bad_workloads(specs: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        small(specs)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"num_blocks": -5}, "num_blocks is -5, the least is 2"),
        ({"num_block": 5}, "did you mean 'num_blocks'"),
        ({"watermark": float("nan")}, "watermark must be finite, got nan"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0, the least is 1"),
        ({"max_num_seqs": True}, "max_num_seqs must be a whole number"),
        ({"discipline": "chunkd"}, "did you mean 'chunked'"),
        ({"policy": "fcsf"}, "did you mean 'fcfs'"),
        ({"victim": "lost"}, "victim is 'lost', it must be one of"),
        ({"clock": "measured"}, "computes nothing whose time could be measured"),
        ({"runner": "simulator"}, "runner is 'simulator'"),
    ],
)
def test_bad_configs(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small(**fields)


def test_bad_changes_leave_no_trace() -> None:
    s = small()
    s.step(2)
    before = s.engine.snapshot()
    for changes, words in (
        ({"num_blocks": 9}, "num_blocks can't change during a run"),
        ({"policy": "none"}, "policy is 'none'"),
        ({"victim": "none"}, "victim is 'none'"),
        ({"watermrk": 0.1}, "did you mean 'watermark'"),
        ({"discipline": "static", "max_num_batched_tokens": 9}, "at least max_model_len, 80"),
        ({"max_num_seqs": -1}, "the least is 1"),
        ({"clock": "measured"}, "clock can't change"),
    ):
        with pytest.raises(ConfigError, match=words):
            s.configure(**changes)
    assert not s.engine.inputs and s.engine.snapshot() == before
    s.configure(max_num_seqs=s.config.max_num_seqs)  # nothing changes: nothing to record
    assert not s.engine.inputs


def test_configure_is_recorded_and_holds() -> None:
    s = small()
    s.step(4)
    s.configure(max_num_seqs=1)
    s.configure(policy="priority")
    assert s.config.max_num_seqs == 4
    record = s.step()
    assert record is not None
    assert [e for e in record.events if isinstance(e, ev.Configured)] == [
        ev.Configured("max_num_seqs", "4", "1"),
        ev.Configured("policy", "fcfs", "priority"),
    ]
    assert s.config.max_num_seqs == 1 and s.config.policy == "priority"
    s.configure(discipline="static")  # computes whole prompts: the budget follows
    s.step()
    assert s.config.max_num_batched_tokens == 80
    s.run()
    consistent(s)


def test_abort_in_any_state() -> None:
    s = small([*requests(6), RequestSpec("pending", (1, 2), 2, arrival_step=500)], num_blocks=17)
    s.run(until=cb.on("preempted"))
    state = s.state()
    preempted = next(r.request_id for r in state.by_index if r.status == "preempted")
    running = state.running[0]
    pending = s.engine.pending_ids[-1]
    added = s.add([1, 2, 3])
    for rid in (preempted, running, pending, added):
        s.abort(rid)
    record = s.step()
    assert record is not None
    consistent(s)
    for rid in (preempted, running, added):
        assert s.request(rid).finish_reason == "abort" and not s.request(rid).block_ids
    assert (
        s.request(pending).status == "refused"
        and "aborted before it arrived" in s.request(pending).finish_reason
    )
    with pytest.raises(KeyError, match="no request 'nobody'"):
        s.abort("nobody")
    s.abort(running)  # again: nothing to end
    s.run()
    consistent(s)
    check_trace(s.trace)
    assert s.engine.scheduler.state.pool.num_free == 16


def test_a_request_aborted_before_it_arrives_leaves_the_others() -> None:
    """By time and by step, long before and in the very step of its arrival."""
    specs = [
        RequestSpec("a", (1, 2), 4, arrival_step=1),
        RequestSpec("b", (1, 2), 4, arrival_step=3),
        RequestSpec("c", (1, 2), 4, arrival_s=9.0),
        RequestSpec("d", (1, 2), 4, arrival_s=9.5),
    ]
    s = small(specs)
    s.abort("c")
    s.step(2)
    s.abort("b")
    s.run()
    assert [s.request(x).status for x in "abcd"] == ["finished", "refused", "refused", "finished"]
    consistent(s)
    assert events(Session.from_trace(s.trace).trace) == events(s.trace)


# time -------------------------------------------------------------------------------------------------------


def test_seek_and_back_change_only_what_is_shown() -> None:
    s = _ran(small())
    digest = s.digest()
    s.seek(5)
    assert s.state().step == 5
    s.seek(5, 3)
    assert (s.state().step, s.state().event) == (5, 3)
    s.back()
    assert s.cursor == Cursor(5)
    s.back()
    assert s.cursor == Cursor(4)
    s.seek(0)
    s.back()
    assert s.cursor == Cursor(0)
    for step, event in ((len(s.trace) + 1, None), (-1, None), (0, 1), (3, -1), (3, 999)):
        with pytest.raises(IndexError):
            s.seek(step, event)
    assert s.cursor == Cursor(0) and s.digest() == digest and len(s.trace) > 10


def played(discipline: str, **changes: Any) -> Session:
    """A run with everything in it: additions, an abort, knobs, preemption; longer than a keyframe."""
    s = small(
        [
            *requests(10),
            RequestSpec("late", tuple(range(40)), 30, arrival_step=90),
            RequestSpec("later", tuple(range(30)), 30, arrival_step=99),
        ],
        num_blocks=23,
        discipline=discipline,
        **changes,
    )
    s.step(6)
    s.add(list(range(200, 212)), max_tokens=20, request_id="mine")
    s.abort("r2")
    s.step(5)
    s.configure(policy="priority")
    s.step(30)
    s.configure(policy="sjf", max_num_seqs=3)
    s.run(max_steps=60)
    s.add(list(range(100, 109)), max_tokens=9)
    s.run()
    assert s.done and len(s.trace) > KEYFRAME_EVERY
    return s


@pytest.mark.parametrize("discipline", DISCIPLINE_NAMES)
def test_rewind_to_any_step(discipline: str) -> None:
    s = played(discipline)
    whole, digests = s.trace.share(len(s.trace)), {}
    probe = small(s.workload, num_blocks=23, discipline=discipline)
    script = {r.step: r for r in whole if r.inputs}

    def go_on(t: Session, to: int) -> None:
        while len(t.trace) < to:
            t._do_again(script.get(len(t.trace) + 1))
            t.step()

    for n in range(len(whole)):
        digests[n] = probe.digest()
        go_on(probe, n + 1)
    digests[len(whole)] = probe.digest()
    assert events(probe.trace) == events(whole) and probe.digest() == s.digest()
    steps = sorted(
        {
            0,
            1,
            6,
            7,
            len(whole) // 2,
            KEYFRAME_EVERY - 1,
            KEYFRAME_EVERY,
            KEYFRAME_EVERY + 1,
            len(whole) - 1,
            len(whole),
        },
        reverse=True,
    )
    for n in [*steps, 0]:
        s.rewind(min(n, len(s.trace)))
        assert s.digest() == digests[len(s.trace)] and s.cursor == s.trace.last
        consistent(s)
        go_on(s, len(whole))
        assert events(s.trace) == events(whole) and s.digest() == digests[len(whole)]


def test_rewind_to_every_step() -> None:
    s = _ran(small())
    whole, n = events(s.trace), len(s.trace)
    for step in range(n, -1, -1):
        s.rewind(step)
        assert len(s.trace) == step
        s.run()
        assert events(s.trace) == whole
    with pytest.raises(IndexError, match=f"step {n + 1} is not in this run: it has steps 0..{n}"):
        s.rewind(n + 1)


def test_a_rewind_that_fails_changes_nothing() -> None:
    s = _ran(small())
    digest, n = s.digest(), len(s.trace)
    s.trace.records[4].chunks[0:1] = []  # the record of step 5 lies
    s.trace.records[4].events[:] = [
        e for e in s.trace.records[4].events if not isinstance(e, (ev.Allocated, ev.Admitted))
    ]
    with pytest.raises((ReplayError, AssertionError, KeyError, ValueError)):
        s.rewind(8)
    assert s.digest() == digest and len(s.trace) == n
    assert s.done


# branches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discipline", DISCIPLINE_NAMES)
def test_a_fork_with_no_change_is_its_parent(discipline: str) -> None:
    """Also in what the user did later: what was typed at step 60 comes at step 60."""
    s = played(discipline)
    for at in (0, 3, 11, 50, KEYFRAME_EVERY + 1, len(s.trace)):
        b = s.fork(at=at)
        assert len(b.trace) == at and b.cursor == Cursor(at)
        b.run()
        assert events(b.trace) == events(s.trace), f"forked at {at}"
        assert b.digest() == s.digest() and b.done
        assert compare(s.trace, b.trace).equal
        consistent(b)


def test_a_fork_with_a_change_leaves_its_parent_alone() -> None:
    s = small(num_blocks=21)
    s.step(12)
    digest = s.digest()
    b = s.fork(at=6, policy="priority", max_num_seqs=2)
    b.run()
    assert s.digest() == digest and len(s.trace) == 12
    consistent(b)
    assert b.trace.records[:6] == s.trace.records[:6]
    assert b.trace.record(7).inputs == [
        {"op": "configure", "changes": {"policy": "priority", "max_num_seqs": 2}}
    ]
    s.run()
    assert events(s.trace) == events(_ran(small(num_blocks=21)).trace)
    c = compare(s.trace, b.trace)
    assert (
        not c.schedules_equal
        and c.tokens_equal
        and c.first_difference is not None
        and c.first_difference.step == 7
    )


def test_a_fork_at_the_start_may_change_everything() -> None:
    s = _ran(small())
    b = s.fork(
        at=0,
        num_blocks=41,
        block_size=2,
        discipline="static",
        modelled_device="NVIDIA A100 SXM 80GB",
        sliding_window=8,
    )
    b.run()
    assert b.config.num_blocks == 41 and b.config.discipline == "static" and b.trace.header.block_size == 2
    assert b.trace.header.device != s.trace.header.device and b.trace[0].t1_s != s.trace[0].t1_s
    consistent(b)
    with pytest.raises(ConfigError, match="block_size can't change in the middle of a run: fork at step 0"):
        s.fork(at=3, block_size=8)
    with pytest.raises(ConfigError, match="did you mean"):
        s.fork(at=3, polcy="fcfs")
    with pytest.raises(IndexError):
        s.fork(at=999)


def test_a_fork_of_a_fork_and_its_own_future() -> None:
    s = small()
    s.step(10)
    b = s.fork(at=8)
    b.step(2)
    c = b.fork(at=9, name="deeper")
    c.add([1, 2, 3], max_tokens=2)
    for x in (s, b, c):
        x.run()
        consistent(x)
    assert events(b.trace) == events(s.trace) and len(c.request_ids) == 9
    assert (
        c.parent is b
        and b.parent is s
        and c.root is s
        and [x.name for x in s.tree()] == ["main", b.name, "deeper"]
    )
    c.rewind(4)
    c.run()
    assert len(c.request_ids) == 8


def test_reset() -> None:
    s = played("chunked")
    s.reset()
    assert (
        len(s.trace) == 0
        and s.cursor == Cursor(0)
        and s.config.policy == "fcfs"
        and "mine" not in s.request_ids
    )
    s.step(6)
    assert events(s.trace) == events(played("chunked").trace)[:6]


# files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_save_load_and_go_on(tmp_path: Path, name: str) -> None:
    s = played("vllm")
    for step in (0, 7, 50, KEYFRAME_EVERY, len(s.trace)):
        part = s.fork(at=step)
        back = load(part.save(tmp_path / name))
        assert events(back) == events(part.trace)
        t = Session.from_trace(back)
        assert t.digest() == part.digest() and t.cursor == Cursor(step)
        assert t.engine.pending_ids == part.engine.pending_ids and t.request_ids == part.request_ids
        consistent(t)
        t._script = {r.step: r for r in s.trace.records[step:] if r.inputs}
        t.run()
        assert events(t.trace) == events(s.trace) and t.digest() == s.digest()


def test_a_preset_comes_back_with_its_parameters(tmp_path: Path) -> None:
    s = Session("burst", runner="sim", workload_params={"num_burst": 3, "at": 20}, seed=5)
    s.step(10)
    t = Session.from_trace(load(s.save(tmp_path / "run.jsonl")))
    s.run()
    t.run()
    assert events(t.trace) == events(s.trace) and len(t.request_ids) == 6
    assert t.trace.header.workload == "burst" and t.trace.header.workload_params == {"num_burst": 3, "at": 20}


def test_an_empty_start_comes_back(tmp_path: Path) -> None:
    s = Session(None, runner="sim")
    s.add("Once upon a time", max_tokens=5)
    s.step(2)
    t = Session.from_trace(load(s.save(tmp_path / "run.jsonl")))
    assert t.digest() == s.digest() and t.request_ids == ["r0"]


@pytest.mark.parametrize("steps", [1, 37, KEYFRAME_EVERY, KEYFRAME_EVERY + 20])
def test_a_crash_costs_at_most_one_step(tmp_path: Path, steps: int) -> None:
    """The process dies while it writes: the last line is cut at any byte."""
    path = tmp_path / "run.jsonl"
    s = small(requests(12, 8), autosave=path)
    s.step(steps)
    raw = path.read_bytes()
    assert raw.endswith(b"\n") and len(load(path)) == steps
    lines = raw.splitlines(keepends=True)
    for cut in (1, len(lines[-1]) // 2, len(lines[-1]) - 2):
        path.write_bytes(b"".join(lines[:-1]) + lines[-1][:cut])
        back = load(path)
        # at a keyframe the last line is the keyframe's: then no step is lost
        assert len(back) == steps - (json.loads(lines[-1])["type"] == "step")
        assert any("cut short" in n for n in back.header.notes)
        t = Session.from_trace(back, autosave=tmp_path / "again.jsonl")
        consistent(t)
        t.run()
        whole = _ran(small(requests(12, 8)))
        assert events(t.trace) == events(whole.trace)
        assert events(load(tmp_path / "again.jsonl")) == events(whole.trace)
        t.close()
    s.close()


def test_autosave_follows_rewind_and_reset(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    s = small(autosave=path)
    s.step(9)
    s.rewind(4)
    assert events(load(path)) == events(s.trace) and len(s.trace) == 4
    s.step(2)
    assert len(load(path)) == 6
    s.reset()
    s.step()
    assert len(load(path)) == 1
    s.close()
    s.close()


def test_a_changed_trace_is_not_believed(tmp_path: Path) -> None:
    s = played("chunked")
    lines = s.save(tmp_path / "run.jsonl").read_text().splitlines()
    record = next(i for i, x in enumerate(lines) if '"type":"allocated"' in x and i > KEYFRAME_EVERY + 5)
    lines[record] = lines[record].replace('"type":"allocated"', '"type":"prefixhit","num_tokens":0', 1)
    (tmp_path / "run.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises((ReplayError, AssertionError, KeyError, IndexError, ValueError)):
        Session.from_trace(load(tmp_path / "run.jsonl"))


# tapes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discipline", DISCIPLINE_NAMES)
def test_a_tape_under_another_schedule(discipline: str) -> None:
    """The recorded tokens under every discipline: only the schedule changes."""
    s = played("chunked")
    t = _ran(Session.from_tape(s.trace, discipline=discipline, policy="fcfs", num_blocks=60))
    told = {r.request_id: r.output_token_ids for r in s.state().by_index if r.output_token_ids}
    assert {r.request_id: r.output_token_ids for r in t.state().by_index} == told
    consistent(t)
    check_trace(t.trace)


def test_nothing_on_the_tape() -> None:
    with pytest.raises(ConfigError, match="no request with tokens"):
        Session.from_tape(small().trace)


# real bookkeeping -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discipline", DISCIPLINE_NAMES)
def test_no_slot_is_read_that_holds_something_else(discipline: str) -> None:
    """On a runner that keeps what each KV slot holds: there and back again and on, with hits on blocks that
    were overwritten meanwhile.
    """
    probe = small(discipline=discipline, num_blocks=21)
    s = small(
        [
            *requests(6),
            *(
                RequestSpec(f"again{i}", x.prompt_token_ids, 8, arrival_step=40 + i)
                for i, x in enumerate(requests(6))
            ),
        ],
        runner=LedgerRunner(probe.config),
        discipline=discipline,
        num_blocks=21,
    )
    s.run()
    whole, n = events(s.trace), len(s.trace)
    assert sum(r.num_cached_tokens for r in s.state().by_index) > 0
    for step in (n - 3, n // 2, 20, 5, 0):
        s.rewind(step)
        s.run()
        assert events(s.trace) == whole


class _Timed(SimRunner):
    """Made-up tokens whose passes take another time each."""

    name = "timed"
    simulated = False
    passes = 0

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        out = super().execute(plan)
        _Timed.passes += 1
        out.measured_s = 0.01 * (1 + _Timed.passes % 7)
        return out


def test_a_fork_with_no_change_keeps_measured_times() -> None:
    """Arrivals by the clock fall into the same steps only if the steps take as long as they did."""
    specs = [RequestSpec(f"r{i}", tuple(range(10, 40)), 9, arrival_s=0.07 * i) for i in range(6)]
    s = Session(specs, runner=_Timed(models.get("smollm2")), clock="measured", max_num_seqs=2)
    s.run()
    branch = s.fork(at=5)
    branch.run()
    assert [r.t1_s for r in branch.trace] == [r.t1_s for r in s.trace]
    assert compare(s.trace, branch.trace).equal
