"""Many threads on one session: changes come one at a time, lookers see a run that makes sense, and what is
left goes together.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

import cbviz as cb
from cbviz.config import ConfigError
from cbviz.engine.turns import Turn
from cbviz.messages import RequestError, RequestSpec
from cbviz.session import Session, Stuck
from cbviz.trace.trace import load
from tests.core.fuzz import same

SMALL = {
    "runner": "sim",
    "num_blocks": 25,
    "block_size": 4,
    "max_model_len": 80,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 80,
}
EXPECTED = (ConfigError, RequestError, IndexError, KeyError, Stuck)


def change(s: Session, draw: random.Random) -> None:
    """One random change; a wish that the run refuses is no fault."""
    kind = draw.choice(
        ["step", "run", "rewind", "add", "abort", "configure", "fork", "reset", "seek", "save"]
    )
    try:
        if kind == "step":
            s.step(draw.randint(1, 3))
        elif kind == "run":
            s.run(max_steps=draw.randint(1, 8))
        elif kind == "rewind":
            s.rewind(draw.randint(0, len(s.trace)))
        elif kind == "add":
            s.add([1, 2, 3], max_tokens=draw.randint(1, 9))
        elif kind == "abort":
            s.abort(draw.choice(s.request_ids))
        elif kind == "configure":
            s.configure(max_num_seqs=draw.randint(2, 6), policy=draw.choice(["fcfs", "sjf", "priority"]))
        elif kind == "fork":
            b = s.fork(at=draw.randint(0, len(s.trace)))
            b.step(2)
            b.drop()
        elif kind == "reset" and draw.random() < 0.2:
            s.reset()
        elif kind == "seek":
            s.seek(draw.randint(0, len(s.trace)))
    except EXPECTED:
        pass


def look(s: Session) -> None:
    trace, at = s.here()
    state = trace.state(at)
    assert state.step == at.step
    assert set(state.running) <= set(state.requests)
    assert len(state.holders) <= state.num_blocks
    s.state().request
    cb.metrics(trace, at)
    if at.step:
        cb.explain(trace, at.step)


@pytest.mark.parametrize("seed", range(4))
def test_random_changes_by_many_threads_leave_state_trace_and_file_together(
    seed: int, tmp_path: Path
) -> None:
    specs = [
        RequestSpec(f"r{i}", tuple(range(100, 109 + 5 * i)), 6 + 3 * i, arrival_step=1 + 2 * i)
        for i in range(8)
    ]
    s = Session(specs, autosave=tmp_path / "run.jsonl", **SMALL)
    failed: list[BaseException] = []
    over = threading.Event()

    def work(number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        try:
            for _ in range(25):
                change(s, draw)
        except BaseException as e:
            failed.append(e)

    def watch() -> None:
        try:
            while not over.is_set():
                look(s)
        except BaseException as e:
            failed.append(e)

    changers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    lookers = [threading.Thread(target=watch) for _ in range(2)]
    for t in (*changers, *lookers):
        t.start()
    for t in changers:
        t.join(120)
    over.set()
    for t in lookers:
        t.join(60)
    if failed:
        raise failed[0]
    same(s.trace.state(), s.engine.scheduler.state)
    assert s.engine.step_count == len(s.trace)
    back = load(tmp_path / "run.jsonl")
    assert not back.header.notes
    assert [(r.step, r.events) for r in back] == [(r.step, r.events) for r in s.trace]
    assert Session.from_trace(back).digest() == s.digest()


def test_a_step_comes_between_two_steps_of_a_run_that_another_thread_makes() -> None:
    """A thread that wants a turn gets the next one, however eager the other is."""
    turn, order = Turn(), list[str]()
    waits, inside = threading.Event(), threading.Event()

    def eager() -> None:
        for n in range(50):
            with turn:
                order.append("eager")
                inside.set()
                if n == 0:
                    assert waits.wait(20)
                    while not turn._waiters:
                        pass

    t = threading.Thread(target=eager)
    t.start()
    assert inside.wait(20)
    waits.set()
    with turn:
        order.append("cell")
    t.join(20)
    assert order.index("cell") == 1


def test_listeners_are_called_when_others_may_change_the_run() -> None:
    """A listener that waits for another thread's step would wait for ever inside a turn."""
    s = Session("article", runner="sim")
    made: list[Any] = []

    def listen(what: str) -> None:
        if what == "request":
            t = threading.Thread(target=lambda: made.append(s.step()))
            t.start()
            t.join(20)

    s.on_change(listen)
    s.add([1, 2, 3], max_tokens=2)
    assert len(made) == len(s.trace) == 1


def test_a_state_that_was_asked_for_stays_while_another_thread_steps() -> None:
    s = Session("article", runner="sim")
    s.step(3)
    state = s.state()
    t = threading.Thread(target=lambda: s.step(5))
    t.start()
    t.join(20)
    assert state.step == 3 and s.state().step == 8
