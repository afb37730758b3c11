"""A step that fails is as if it had never been tried: the state, the queues, the clock and the inputs are
those of before, and a retry gives the run without the fault.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest

from cbviz.core.check import check
from cbviz.core.outputs import RunnerOutputError
from cbviz.core.policy import POLICIES
from cbviz.core.ranking import Policy, PolicyError
from cbviz.engine import interrupts
from cbviz.engine.engine import Engine
from cbviz.messages import RequestSpec, RunnerOutput, SchedulerOutput
from cbviz.trace.trace import Trace
from tests.core.fuzz import Case, LedgerRunner, ask, case, finish, judge, make_engine, make_trace, play, steps


class Fault(Exception):
    """What the tests throw."""


def picture(engine: Engine) -> dict[str, Any]:
    """Everything that must be as before.

    The order of dictionaries counts where it decides something (`by_hash`, `evictions`).
    """
    s = engine.scheduler.state
    return {
        "digest": engine.digest(),
        "snapshot": engine.snapshot(),
        "inputs": list(engine.inputs),
        "journal": list(s.journal),
        "now": engine.now_s,
        "config": s.config,
        "policy": s.policy,
        "rules": s.rules,
        "known": set(engine.arrivals.known),
        "pending": engine.pending_ids,
        "has_work": engine.has_work,
        "stuck": engine.stuck,
        "hashes": list(s.pool.block_hash),
        "evictions": [(h, x[:2]) for h, x in s.pool.evictions.items()],
        "order": {h: list(ids) for h, ids in s.pool.by_hash.items()},
        "waiting": [id(r) for r in s.waiting],
        "running": [id(r) for r in s.running],
        "tables": [list(r.block_ids) for r in s.running],
    }


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two pictures differ, in words (digests follow from the rest)."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            d for k in {**a, **b} if k != "digest" for d in differences(a.get(k), b.get(k), f"{path}/{k}")
        ]
    return [] if a == b else [f"{path}: {a!r:.200} became {b!r:.200}"]


def play_with_faults(c: Case, faults: dict[int, BaseException], engine: Engine) -> Trace:
    """Runs a case; at each step of `faults` the step is tried once with the fault and then again without."""
    trace = make_trace(c.config)

    def try_once() -> None:
        now = engine.step_count + 1
        if now in faults and engine.has_work:
            before = picture(engine)
            with pytest.raises(type(faults[now])):
                engine.step()
            assert differences(before, picture(engine)) == []
            check(engine.scheduler)

    for _ in steps(c, engine, trace, before=try_once):
        pass
    finish(engine, trace, c)
    return trace


class Flaky(LedgerRunner):
    """Fails once in each step of `steps`: before, in the middle of or after its pass."""

    steps: dict[int, BaseException]
    how = "before"

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        error = self.steps.pop(plan.step, None)
        if error is None:
            return super().execute(plan)
        if self.how == "middle":
            self.fail = lambda plan: error
            try:
                return super().execute(plan)
            finally:
                self.fail = None
        if self.how == "after":
            super().execute(plan)
        raise error


def flaky_engine(c: Case, faults: dict[int, BaseException], how: str) -> Engine:
    runner = Flaky(c.config)
    runner.steps, runner.how = dict(faults), how
    return make_engine(c.config, runner)


@pytest.mark.parametrize("how", ["before", "middle", "after"])
@pytest.mark.parametrize("seed", range(40))
def test_a_runner_that_fails(seed: int, how: str) -> None:
    c = case(seed, inputs=seed % 2 == 0)
    c.at.setdefault(5, []).append(("configure", {"max_num_seqs": 2, "watermark": 0.1}))
    _, smooth = play(c)
    rng = random.Random(seed)
    steps = rng.sample(range(1, len(smooth) + 1), min(len(smooth), 12))
    faults: dict[int, BaseException] = {
        s: rng.choice([Fault("broken"), KeyboardInterrupt(), MemoryError()]) for s in steps
    }
    rough = play_with_faults(c, faults, flaky_engine(c, faults, how))
    assert [r.events for r in rough] == [r.events for r in smooth]
    assert [(r.t0_s, r.t1_s) for r in rough] == [(r.t0_s, r.t1_s) for r in smooth]


@pytest.mark.parametrize("seed", range(60))
def test_a_policy_that_fails(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails at its n-th question of a step: between two arrivals, while it ranks the queue or the victims,
    or at an admission.
    """

    class Moody(Policy):
        name = "moody"
        static = False
        left = -1
        error: BaseException = Fault("no mood")

        def rank(self, r: Any, now: float) -> Any:
            self.asked()
            return (r.priority, -r.num_computed_tokens)

        def admit(self, r: Any, now: float) -> bool:
            self.asked()
            return True

        def asked(self) -> None:
            if self.left == 0:
                Moody.left = -1
                raise self.error
            if self.left > 0:
                Moody.left -= 1

    monkeypatch.setitem(POLICIES, "moody", Moody())
    c = case(seed, policy="moody", victim="policy", inputs=seed % 2 == 0)
    _, smooth = play(c)
    engine, trace = make_engine(c.config), make_trace(c.config)
    engine.enqueue(c.specs)
    rng = random.Random(seed)
    failed, messages = 0, []
    for step in range(1, 4000):
        ask(engine, c.at.get(step, ()))
        Moody.left, Moody.error = rng.randrange(4), rng.choice([Fault("no mood"), KeyboardInterrupt()])
        before = picture(engine)
        try:
            record = engine.step()
        except (PolicyError, KeyboardInterrupt) as e:
            failed += 1
            messages.append(str(e))
            assert differences(before, picture(engine)) == []
            Moody.left = -1
            record = engine.step()
        if record is None:
            if step > max(c.at, default=0):
                break
            continue
        judge(engine, trace, record)
    Moody.left = -1
    finish(engine, trace, c)
    assert failed
    told = [m for m in messages if m]
    assert all(
        "policy moody failed" in m and "no mood" in m and any(f"request {x.request_id}" in m for x in c.specs)
        for m in told
    )
    assert [r.events for r in trace] == [r.events for r in smooth]


def test_a_runner_that_returns_too_little() -> None:
    class Mute(LedgerRunner):
        def execute(self, plan: SchedulerOutput) -> RunnerOutput:
            out = super().execute(plan)
            return RunnerOutput({}) if plan.step == 2 and self.slots else out

    c = case(
        0, discipline="chunked", policy="fcfs", inputs=False, block_size=4, num_blocks=12, max_model_len=40
    )
    c.specs = [RequestSpec("a", (1, 2, 3), 5, arrival_step=1)]
    engine = make_engine(c.config, Mute(c.config))
    engine.enqueue(c.specs)
    engine.step()
    before = picture(engine)
    with pytest.raises(RunnerOutputError, match="step 2: the runner returned no token for a"):
        engine.step()
    assert differences(before, picture(engine)) == []


def held_victim_case() -> Case:
    """Two requests, and blocks for hardly more than one: the younger loses its blocks to the older."""
    c = case(
        0,
        discipline="chunked",
        policy="fcfs",
        block_size=2,
        num_blocks=9,
        max_model_len=14,
        max_num_seqs=2,
        sliding_window=0,
        enable_prefix_caching=True,
        victim=None,
        max_num_batched_tokens=64,
        watermark=0.0,
        long_prefill_token_threshold=0,
        inputs=False,
    )
    c.specs = [
        RequestSpec("old", (1, 2, 3, 4), 8, arrival_step=1),
        RequestSpec("young", (5, 6, 7, 8, 9), 8, arrival_step=1),
    ]
    return c


@pytest.mark.parametrize("caching", [True, False])
def test_blocks_of_a_victim_that_was_no_victim(caching: bool) -> None:
    """The failed pass wrote into blocks that it had taken from a preempted request.

    Taken back, that request holds them again.

    Another step follows, in which it goes on: it must not read what was written.
    """
    c = held_victim_case()
    c.config = c.config.replace(enable_prefix_caching=caching)
    _, smooth = play(c)
    step = next(r.step for r in smooth if any(type(e).__name__ == "Preempted" for e in r.events))
    engine = flaky_engine(c, {step: Fault("broken")}, "middle")
    trace = make_trace(c.config)
    engine.enqueue(c.specs)
    for _ in range(step - 1):
        judge(engine, trace, engine.step())
    with pytest.raises(Fault):
        engine.step()
    held = {b for r in engine.scheduler.state.running for b in r.block_ids}
    assert engine.runner.damaged_blocks() & held
    check(engine.scheduler)
    engine.abort("old")  # now nobody is preempted: "young" goes on with its old blocks
    while (record := engine.step()) is not None:
        judge(engine, trace, record)  # the ledger refuses to read wrong contents
    assert trace.state().request("young").output_token_ids == smooth.state().request("young").output_token_ids


def test_a_damaged_block_is_never_read() -> None:
    """A free block that can be hit is taken and half overwritten by a pass that fails.

    Whoever hits it afterwards gets its true content, computed again.
    """
    c = case(
        0,
        discipline="chunked",
        policy="fcfs",
        block_size=2,
        num_blocks=7,
        max_model_len=12,
        max_num_seqs=2,
        sliding_window=0,
        enable_prefix_caching=True,
        victim=None,
        max_num_batched_tokens=64,
        watermark=0.0,
        long_prefill_token_threshold=0,
        inputs=False,
    )
    first, other, again = (
        RequestSpec("first", (1, 2, 3, 4, 5, 6, 7, 8), 1, arrival_step=1),
        RequestSpec("other", tuple(range(20, 29)), 2, arrival_step=2),
        RequestSpec("again", (1, 2, 3, 4, 5, 6, 7, 8, 9), 1, arrival_step=99),
    )
    c.specs = [first, other]
    engine = flaky_engine(c, {2: Fault("broken")}, "middle")
    trace = make_trace(c.config)
    engine.enqueue(c.specs)
    judge(engine, trace, engine.step())
    cached = {b for b in range(1, 7) if engine.scheduler.state.pool.block_hash[b] is not None}
    assert len(cached) == 4
    before = picture(engine)
    with pytest.raises(Fault):
        engine.step()
    assert engine.runner.damaged_blocks() & cached
    assert differences(before, picture(engine)) == []
    engine.abort("other")
    engine.add(again)
    while (record := engine.step()) is not None:
        judge(engine, trace, record)  # the ledger refuses to read wrong contents
    assert trace.state().request("again").num_cached_tokens == 8


def test_interrupts_wait_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real SIGINT inside schedule() is raised at the forward pass, where nothing is half done; one inside
    update() after the step is complete.
    """
    c = held_victim_case()
    engine = make_engine(c.config)
    engine.simulated = False  # as a runner whose pass takes long
    engine.enqueue(c.specs)
    engine.step()
    before = picture(engine)
    schedule = engine.scheduler.schedule
    monkeypatch.setattr(
        engine.scheduler, "schedule", lambda now: (signal.raise_signal(signal.SIGINT), schedule(now))[1]
    )
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    assert differences(before, picture(engine)) == []
    update = engine.scheduler.update
    monkeypatch.setattr(
        engine.scheduler,
        "update",
        lambda plan, out: (signal.raise_signal(signal.SIGINT), update(plan, out))[1],
    )
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    assert engine.step_count == 2
    check(engine.scheduler)
    assert engine.step() is not None and engine.step_count == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # one that lands in a finaliser is lost, by Python's rules
def test_interrupts_at_any_moment() -> None:
    """SIGINTs from a timer hit wherever they hit: every step is done or not done, never half."""
    c = case(
        5,
        discipline="vllm",
        policy="priority",
        block_size=2,
        num_blocks=40,
        max_model_len=60,
        max_num_seqs=8,
        sliding_window=0,
        enable_prefix_caching=True,
        inputs=False,
    )
    _, smooth = play(c)
    rng = random.Random(1)
    landed = 0
    old = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        for _ in range(10):
            engine = make_engine(c.config)
            engine.simulated = False
            engine.enqueue(c.specs)
            while engine.has_work:
                n = engine.step_count
                try:
                    with interrupts.held():  # as a session: the record is kept before the interrupt is raised
                        with interrupts.let_in():
                            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 4e-4))
                        engine.step()
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    landed += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert engine.step_count in (n, n + 1)
                assert not engine.scheduler.state.journal
                check(engine.scheduler)
            assert engine.step_count == len(smooth)
            assert (
                engine.scheduler.state.pool.snapshot()["free"]
                == play(c)[0].scheduler.state.pool.snapshot()["free"]
            )
    finally:
        signal.signal(signal.SIGALRM, old)
    assert landed


def test_a_second_interrupt_is_raised_at_once() -> None:
    """Somebody presses twice because a policy never returns."""

    def press_twice() -> None:
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the second one waited")

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_waits_while_our_own_code_runs() -> None:
    """Given two interrupts in a change, when both come in code of cbviz, which always ends, then the change
    is made whole and one interrupt is raised.
    """
    inside = type(interrupts)("cbviz.inside")
    exec(
        compile(
            (
                "import signal\ndef change():\n    signal.raise_signal(signal.SIGINT)\n    "
                "signal.raise_signal(signal.SIGINT)\n    done.append(1)\n"
            ),
            "inside",
            "exec",
        ),
        inside.__dict__,
    )
    inside.done = []
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        inside.change()
    assert inside.done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupts_are_left_alone_elsewhere() -> None:
    """In another thread, and where somebody ignores them, nothing is changed."""
    seen: list[object] = []

    def work() -> None:
        with interrupts.held(), interrupts.let_in():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.held(), interrupts.let_in():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.001)
            seen.append(signal.getsignal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, old)
    assert seen == [signal.default_int_handler, signal.SIG_IGN]
