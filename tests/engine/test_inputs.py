"""What the user does between two steps: configuration first, then aborts, then arrivals, so that no input
that fails keeps another from getting through.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbviz import events as ev
from cbviz.config import ConfigError
from cbviz.core.policy import POLICIES
from cbviz.core.ranking import Policy, PolicyError
from cbviz.core.speculative import PROPOSERS, Proposer, ProposerError
from cbviz.engine.engine import Engine
from cbviz.messages import RequestError, RequestSpec, StepRecord
from tests.core.anything import engine_for
from tests.core.byhand import byhand, spec
from tests.core.fuzz import Case, case


class Failing(Policy):
    """Fails on the requests of `on`; '*' stands for all."""

    name = "failing"
    static = False
    on: frozenset[str] = frozenset("*")

    def rank(self, r: Any, now: float) -> int:
        if "*" in self.on or r.request_id in self.on:
            raise ZeroDivisionError("no rank")
        return 0


def no_drafts(tokens: Any, k: int, config: Any) -> list[int]:
    raise ZeroDivisionError("no drafts")


@pytest.fixture(autouse=True)
def failing() -> Iterator[Failing]:
    p = POLICIES["failing"] = Failing()
    PROPOSERS["failing"] = Proposer("failing", "", "", no_drafts)
    yield p
    POLICIES.pop("failing", None)
    PROPOSERS.pop("failing", None)


def running(policy: str = "fcfs", **fields: Any) -> Engine:
    """An engine in the middle of a run: two requests run, `late` is to come."""
    c = byhand(
        [spec("a", 4, 30), spec("b", 4, 30), spec("late", 4, 3, step=60)], {}, **{"policy": policy, **fields}
    )
    engine = engine_for(c, 1)
    engine.step()
    return engine


def kinds(record: StepRecord | None) -> list[str]:
    assert record is not None
    return [type(e).__name__ for e in record.events]


def test_a_failing_policy_is_replaced_while_a_request_waits_to_arrive() -> None:
    """Given a request that the policy fails on, when another policy is chosen after it was added, then the
    step goes through with both.
    """
    engine = running()
    engine.configure(policy="failing")
    engine.add(spec("c", 4, 3))
    with pytest.raises(PolicyError):
        engine.step()
    engine.configure(policy="sjf")
    record = engine.step()
    assert kinds(record)[:3] == ["Configured", "Configured", "Arrived"]
    assert engine.config.policy == "sjf" and "c" in engine.scheduler.state.requests
    assert record is not None and [i["op"] for i in record.inputs] == ["configure", "add", "configure"]


def test_an_abort_gets_through_though_the_policy_fails_on_that_request(failing: Failing) -> None:
    """Given a policy that fails on one waiting request, when that request is aborted after another was added,
    then the step goes through.
    """
    failing.on = frozenset(["b"])
    engine = running(max_num_seqs=1)
    engine.configure(policy="failing")
    engine.add(spec("c", 4, 3))
    with pytest.raises(PolicyError, match="request b"):
        engine.step()
    engine.abort("b")
    engine.step()
    assert list(engine.scheduler.state.requests) == ["a", "c"]


def test_a_request_that_cannot_be_ranked_can_be_taken_back(failing: Failing) -> None:
    """Given an added request that the policy fails on, when it is aborted before the step, then it arrives
    and ends in that step and nobody ranks it.
    """
    failing.on = frozenset(["c"])
    engine = running()
    engine.configure(policy="failing")
    engine.add(spec("c", 4, 3))
    engine.add(spec("d", 4, 3))
    with pytest.raises(PolicyError, match="request c"):
        engine.step()
    engine.abort("c")
    record = engine.step()
    assert record is not None
    about_c = [e for e in record.events if getattr(e, "request_id", "") == "c"]
    assert [type(e) for e in about_c] == [ev.Arrived, ev.Finished]
    assert list(engine.scheduler.state.requests) == ["a", "b", "d"]


def test_a_failing_proposer_is_replaced_while_requests_wait_to_arrive() -> None:
    engine = running()
    engine.configure(speculative="failing", num_speculative_tokens=2)
    engine.add(spec("c", 4, 3))
    with pytest.raises(ProposerError):
        engine.step()
    engine.configure(speculative="off")
    engine.step()
    assert engine.config.speculative == "off" and "c" in engine.scheduler.state.requests


@pytest.mark.parametrize("knob", ["policy", "speculative"])
def test_a_setting_whose_cell_is_gone_can_be_replaced(knob: str) -> None:
    """Given a policy (or proposer) that is in force and no longer registered, when it is replaced, also after
    another knob was turned, then the step goes through.
    """
    engine = running()
    engine.configure(**{knob: "failing"})
    del (POLICIES if knob == "policy" else PROPOSERS)["failing"]
    engine.configure(max_num_seqs=2)
    engine.configure(**{knob: "sjf" if knob == "policy" else "off"})
    engine.step()
    assert engine.config.max_num_seqs == 2 and getattr(engine.config, knob) != "failing"


def test_bad_inputs_are_refused_at_once_and_leave_the_others() -> None:
    engine = running()
    engine.add(spec("c", 4, 3))
    with pytest.raises(RequestError):
        engine.add(spec("c", 4, 3))
    with pytest.raises(RequestError):
        engine.add(spec("d", 4, 10**6))
    with pytest.raises(ConfigError):
        engine.configure(policy="unheard-of")
    with pytest.raises(ConfigError):
        engine.configure(block_size=2)
    engine.abort("nobody")
    engine.configure(max_num_seqs=3)
    engine.step()
    assert engine.config.max_num_seqs == 3 and set(engine.scheduler.state.requests) == {"a", "b", "c"}


def draws(rng: random.Random, c: Case, n: int) -> list[tuple[str, Any]]:
    """Inputs that can be taken, in any order."""
    limit = c.config.max_model_len or 0
    out: list[tuple[str, Any]] = []
    for i in range(rng.randint(1, 4)):
        prompt = tuple(rng.randrange(1000) for _ in range(rng.randint(1, max(1, limit // 2))))
        out.append(("add", RequestSpec(f"u{n}-{i}", prompt, rng.randint(1, max(1, limit - len(prompt))))))
        if rng.random() < 0.2:
            out.append(("abort", f"u{n}-{i}"))
    out += [("abort", rng.choice([x.request_id for x in c.specs])) for _ in range(rng.randint(0, 2))]
    out += [("configure", {"max_num_seqs": rng.randint(1, 5)}) for _ in range(rng.randint(0, 1))]
    out += [
        ("configure", {"policy": rng.choice(("fcfs", "sjf", "priority"))}) for _ in range(rng.randint(0, 1))
    ]
    added: set[str] = set()
    order = rng.sample(out, len(out))
    # an abort of an added request comes after it
    for op, what in list(order):
        if op == "add":
            added.add(what.request_id)
        elif op == "abort" and str(what).startswith("u") and what not in added:
            order.remove((op, what))
            order.append((op, what))
    return order


def trouble(rng: random.Random) -> tuple[str, Any]:
    """An input that makes the step fail, or is refused at once."""
    return rng.choice(
        (
            ("configure", {"policy": "failing"}),
            ("configure", {"speculative": "failing", "num_speculative_tokens": 2}),
            ("configure", {"policy": "unheard-of"}),
            ("configure", {"max_num_seqs": 0}),
            ("add", RequestSpec("r0", (1,), 1)),
            ("add", RequestSpec("too-long", (1,), 10**7)),
        )
    )


def tell(engine: Engine, inputs: list[tuple[str, Any]]) -> None:
    for op, what in inputs:
        try:
            engine.add(what) if op == "add" else engine.abort(what) if op == "abort" else engine.configure(
                **what
            )
        except (ConfigError, RequestError):
            continue


def decided(record: StepRecord | None) -> tuple[Any, ...]:
    """What a step did, apart from what was told about knobs."""
    if record is None:
        return ()
    return (
        record.chunks,
        [e for e in record.events if not isinstance(e, ev.Configured)],
        {x.request_id for x in record.arrivals},
    )


@settings(max_examples=120)
@given(st.integers(0, 10**9))
def test_failing_inputs_leave_the_others_in_force(seed: int) -> None:
    """Given any inputs in any order and failing ones among them, when the failing settings are replaced, then
    the run goes on as if they had never been.
    """
    rng = random.Random(seed)
    c = case(
        seed,
        speculative="off",
        discipline=rng.choice(("vllm", "chunked", "paged", "static", "orca", "max-util", "retract")),
    )
    engine, twin = engine_for(c, 1), engine_for(c, 1)
    for n in range(1, 26):
        if rng.random() < 0.4:
            good = draws(rng, c, n)
            mixed = list(good)
            for _ in range(rng.randint(1, 3)):
                mixed.insert(rng.randint(0, len(mixed)), trouble(rng))
            tell(twin, good)
            tell(engine, mixed)
            waiting = len(engine.inputs)
            if (engine._planned().policy, engine._planned().speculative) != (twin._planned().policy, "off"):
                try:
                    engine.step()
                except (PolicyError, ProposerError):
                    assert len(engine.inputs) == waiting, "an input was lost"
                else:
                    # nobody was asked, so the setting was in force for a step: from here on it is another run
                    return
                tell(
                    engine,
                    [
                        ("configure", {"policy": twin._planned().policy}),
                        (
                            "configure",
                            {"speculative": "off", "num_speculative_tokens": c.config.num_speculative_tokens},
                        ),
                    ],
                )
        assert decided(engine.step()) == decided(twin.step())
        assert engine.config == twin.config
        assert list(engine.scheduler.state.requests) == list(twin.scheduler.state.requests)
