"""Policies typed in a cell while a run is on: what each form sees, what happens when one fails, wavers or is
typed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import cbviz as cb
from cbviz import events as ev
from cbviz.core.policy import POLICIES, get_policy
from cbviz.core.ranking import Policy, PolicyError
from cbviz.engine.engine import Engine
from tests.core.byhand import admitted, byhand, found, run, spec
from tests.core.fuzz import make_engine

QUEUE = [spec("a", 4, 9), *(spec(x, 4 + i, 3, step=2) for i, x in enumerate("bcde"))]


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = dict(POLICIES)
    yield
    POLICIES.clear()
    POLICIES.update(before)


def begun(policy: str, steps: int = 4) -> Engine:
    engine = make_engine(byhand([], policy=policy, max_num_seqs=1).config)
    engine.enqueue(QUEUE)
    for _ in range(steps):
        engine.step()
    return engine


def to_the_end(engine: Engine) -> None:
    while engine.step() is not None:
        pass


def test_a_class_may_rank_the_queue_as_a_whole() -> None:
    """The median of the queue first: what no rank of one request alone can say."""

    @cb.policy
    class Middle:
        """The median prompt first."""

        def rank_all(self, rs: list[Any], now: float) -> list[Any]:
            lengths = sorted(r.num_prompt_tokens for r in rs)
            return [abs(r.num_prompt_tokens - lengths[len(lengths) // 2]) for r in rs]

    assert (
        get_policy("Middle").title == "Middle" and get_policy("Middle").summary == "The median prompt first."
    )
    # of 4 5 6 7 (b c d e): 6, d; of 4 5 7: 5, c; of 4 7: 7, e
    assert admitted(run(QUEUE, policy="Middle", max_num_seqs=1)) == "a d c e b"


def test_a_class_that_admits_one_at_a_time() -> None:
    @cb.policy
    class Spaced:
        """Whoever is not the first waits for 6 steps."""

        def admit(self, r: Any, now: float) -> bool:
            return bool(r.seq == 0 or r.num_waiting_steps >= 6)

    t = run(QUEUE, policy="Spaced", max_num_seqs=4)
    assert found(t, ev.NotAdmitted, 2) == [ev.NotAdmitted("b", "policy", 0, 0)]
    assert [r.step for r in t for e in r.events if isinstance(e, ev.Admitted)] == [
        1,
        8,
        8,
        8,
        10,
    ]  # a ends with step 9


def test_a_subclass_is_ranked_anew_in_each_step_unless_it_says_otherwise() -> None:
    @cb.policy
    class Turning(Policy):
        def rank(self, r: Any, now: float) -> Any:
            return r.seq if r.num_waiting_steps < 4 else -r.seq

    @cb.policy
    class Fixed(Turning):
        static = True

    assert admitted(run(QUEUE, policy="Turning", max_num_seqs=1)) == "a e d c b"
    assert admitted(run(QUEUE, policy="Fixed", max_num_seqs=1)) == "a b c d e"


def test_an_exception_names_the_request_and_leaves_the_state() -> None:
    """The trial knows no request called d; the run does."""

    @cb.policy
    def touchy(r: Any, now: float) -> float:
        return 1 / (r.request_id != "d")

    engine = begun("fcfs")
    before, digest, step = engine.snapshot(), engine.digest(), engine.step_count
    engine.configure(policy="touchy")
    for _ in range(3):
        with pytest.raises(
            PolicyError, match="policy touchy failed on request d: ZeroDivisionError: division by zero"
        ):
            engine.step()
        assert engine.snapshot() == before and engine.digest() == digest and engine.step_count == step

    @cb.policy  # mended, in the same cell
    def touchy(r: Any, now: float) -> float:  # noqa: F811
        return float(r.seq)

    to_the_end(engine)
    assert engine.scheduler.state.num_finished == 5


def test_an_exception_in_the_middle_of_admitting_takes_back_who_was_admitted() -> None:
    @cb.policy
    class Half:
        def admit(self, r: Any, now: float) -> bool:
            if r.request_id == "c":
                raise LookupError("no c")
            return True

    engine = make_engine(byhand([], policy="Half", max_num_seqs=4).config)
    engine.enqueue(QUEUE)
    engine.step()
    before = engine.snapshot()
    with pytest.raises(PolicyError, match="policy Half failed in admit on request c: LookupError: no c"):
        engine.step()  # b had been admitted
    assert engine.snapshot() == before and [r.request_id for r in engine.scheduler.state.running] == ["a"]
    engine.configure(policy="fcfs")
    to_the_end(engine)


def test_an_exception_while_somebody_must_lose() -> None:
    @cb.policy
    class Shy:
        def rank(self, r: Any, now: float) -> int:
            if r.request_id == "b" and r.status == "running" and r.num_output_tokens > 3:
                raise RuntimeError("not me")
            return int(r.seq)

    engine = make_engine(byhand([], policy="Shy", num_blocks=11, max_model_len=40).config)
    engine.enqueue([spec("a", 8, 30), spec("b", 8, 30)])
    while engine.scheduler.state.pool.num_free or any(
        len(r.token_ids) % 4 != 1 for r in engine.scheduler.state.running
    ):
        engine.step()  # until both need a block and none is free
    before = engine.snapshot()
    with pytest.raises(PolicyError, match="policy Shy failed on request b: RuntimeError: not me"):
        engine.step()
    assert engine.snapshot() == before
    engine.configure(victim="last")  # another rule asks nobody
    engine.configure(policy="fcfs")
    to_the_end(engine)


class Wavering:
    """Steady in its trial, in which no step is taken."""

    calls = 0

    def rank(self, r: Any, now: float) -> int:
        if r.num_waiting_steps > 0:
            Wavering.calls += 1
        return Wavering.calls


class WaveringTogether:
    calls = 0

    def rank_all(self, rs: list[Any], now: float) -> list[Any]:
        WaveringTogether.calls += any(r.num_waiting_steps > 0 for r in rs)
        return [WaveringTogether.calls] * len(rs)


@pytest.mark.parametrize("f", [Wavering, WaveringTogether])
def test_a_policy_that_wavers_in_a_run_is_caught(f: type) -> None:
    cb.policy(f)
    engine = begun("fcfs")
    before = engine.snapshot()
    engine.configure(policy=f.__name__)
    with pytest.raises(
        PolicyError,
        match=rf"policy {f.__name__} ranked request [b-e] \d+ and then \d+: it gives another rank when asked again with nothing changed",
    ):
        engine.step()
    assert engine.snapshot() == before


@pytest.mark.parametrize(
    "body, words",
    [
        ("return [0]", "gave 1 ranks for 4 requests"),
        ("return [0, 1, 2, 'x']", "don't compare with each other"),
        ("return [r.nothing for r in rs]", "failed on the queue of 4 requests (try0, "),
        ("return [0, 1, None, 3]", "ranked request try2 None"),
        ("return 5", "failed on the queue"),
    ],
)
def test_a_mistake_in_rank_all_shows_in_the_cell(body: str, words: str) -> None:
    space: dict[str, Any] = {}
    exec(f"class Whole:\n    def rank_all(self, rs, now):\n        {body}", space)
    with pytest.raises(PolicyError) as e:
        cb.policy(space["Whole"])
    assert words in str(e.value) and "Whole" not in POLICIES


def test_a_class_that_cannot_be_made_or_wavers_in_admit() -> None:
    class Needy:
        def __init__(self, weight: int) -> None: ...

    with pytest.raises(PolicyError, match="policy Needy can't be made: TypeError"):
        cb.policy(Needy)

    class Coin:
        side = False

        def admit(self, r: Any, now: float) -> bool:
            self.side = not self.side
            return self.side

    with pytest.raises(
        PolicyError, match="policy Coin admits a request and then, asked again with nothing changed, does not"
    ):
        cb.policy(Coin)


def test_a_built_in_may_be_typed_anew() -> None:
    """The name says nothing about the order: a policy of one's own called fcfs is counted on to overtake."""

    @cb.policy
    def fcfs(r: Any, now: float) -> int:
        return -r.num_prompt_tokens

    specs = [spec("s", 2, 2), *(spec(f"l{i}", 8, 2, step=1 + 2 * i) for i in range(12))]
    t = run(specs, policy="fcfs", max_num_seqs=1)
    assert admitted(t).split()[-1] == "s" and [e.num_overtaken for e in found(t, ev.Starving)] == [8]
