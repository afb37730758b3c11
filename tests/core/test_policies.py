"""Who goes first, who loses: the built-in policies on queues worked out by hand, and policies typed in a
cell, good and bad.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import cbviz as cb
from cbviz import events as ev
from cbviz.config import ConfigError
from cbviz.core.policy import POLICIES, VICTIMS, check_victim, get_policy
from cbviz.core.ranking import Policy, PolicyError
from cbviz.core.request import Request
from cbviz.messages import RequestSpec
from cbviz.trace.trace import Trace
from tests.core.fuzz import POLICY_NAMES, case, make_engine, play


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Policies that a test registers are forgotten after it."""
    before = dict(POLICIES)
    yield
    POLICIES.clear()
    POLICIES.update(before)


def one_seat(policy: str, specs: list[RequestSpec], **fields: Any) -> Trace:
    """One seat, whole prompts: the order of admission is the policy's order."""
    c = case(
        0,
        discipline="chunked",
        policy=policy,
        inputs=False,
        **{
            "block_size": 4,
            "num_blocks": 33,
            "max_model_len": 64,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 64,
            "sliding_window": 0,
            "enable_prefix_caching": False,
            "watermark": 0.0,
            "long_prefill_token_threshold": 0,
            "scheduler_reserve_full_isl": None,
            "victim": None,
            **fields,
        },
    )
    c.specs = specs
    return play(c)[1]


def admitted(trace: Trace) -> list[str]:
    return [e.request_id for r in trace for e in r.events if isinstance(e, ev.Admitted)]


def spec(rid: str, prompt: int, outputs: int, step: int = 1, priority: int = 0, **more: Any) -> RequestSpec:
    return RequestSpec(rid, tuple(range(prompt)), outputs, arrival_step=step, priority=priority, **more)


# a runs first, alone; the others arrive while it does
QUEUE = [
    spec("a", 4, 9),
    spec("b", 20, 9, step=2, priority=1),
    spec("c", 8, 3, step=3, priority=2),
    spec("d", 3, 30, step=4, priority=0),
    spec("e", 8, 3, step=5, priority=1),
]


@pytest.mark.parametrize(
    "policy, order",
    [
        ("fcfs", "abcde"),
        ("priority", "adbec"),
        ("sjf", "acebd"),  # 11, 11, 29 and 33 tokens to do; c came before e
    ],
)
def test_order(policy: str, order: str) -> None:
    assert "".join(admitted(one_seat(policy, QUEUE))) == order


def test_sjf_goes_by_the_known_length() -> None:
    """d's output is known to end after 1 token, though 30 are allowed."""
    specs = [*QUEUE[:3], spec("d", 3, 30, step=4, output_len=1)]
    assert "".join(admitted(one_seat("sjf", specs))) == "adcb"


def test_the_queue_says_where_a_request_stands() -> None:
    trace = one_seat("priority", QUEUE)
    assert [(e.request_id, e.position) for r in trace for e in r.events if isinstance(e, ev.Arrived)] == [
        ("a", 0),
        ("b", 0),
        ("c", 1),
        ("d", 0),
        ("e", 2),
    ]
    assert trace.state(5).waiting == ["d", "b", "e", "c"]


def test_a_changed_policy_reorders_the_queue_and_says_so() -> None:
    c = case(
        0,
        discipline="chunked",
        policy="fcfs",
        inputs=False,
        block_size=4,
        num_blocks=33,
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        sliding_window=0,
        enable_prefix_caching=False,
        watermark=0.0,
        long_prefill_token_threshold=0,
        scheduler_reserve_full_isl=None,
        victim=None,
    )
    c.specs = QUEUE
    c.at = {7: [("configure", {"policy": "priority"})]}
    _, trace = play(c)
    assert trace.state(6).waiting == ["b", "c", "d", "e"] and trace.state(7).waiting == ["d", "b", "e", "c"]
    assert ev.Reordered(["d", "b", "e", "c"]) in trace.record(7).events


@pytest.mark.parametrize("policy, loser", [("fcfs", "c"), ("priority", "b"), ("sjf", "a")])
def test_who_loses_its_blocks(policy: str, loser: str) -> None:
    """Three run, blocks run out: fcfs takes the last comer, priority the least important, sjf the longest."""
    specs = [spec("a", 8, 30), spec("b", 8, 12, priority=3), spec("c", 8, 12)]
    trace = one_seat(policy, specs, max_num_seqs=3, num_blocks=11, max_model_len=40)
    first = next(e for r in trace for e in r.events if isinstance(e, ev.Preempted))
    assert first.request_id == loser and first.ranking[0][0] == loser


@pytest.mark.parametrize(
    "policy", [p for p in POLICY_NAMES if p not in ("sjf-predicted", "sjf-wrong")]
)  # these two guess from the id
def test_ties_end_in_arrival_order(policy: str) -> None:
    """Equal requests: whatever a policy looks at, the earlier one goes first."""
    specs = [RequestSpec(f"r{i}", (1, 2, 3), 4, arrival_step=1) for i in range(6)]
    assert admitted(one_seat(policy, specs)) == [f"r{i}" for i in range(6)]


def test_a_policy_in_a_cell() -> None:
    @cb.policy
    def longest(r: Any, now: float) -> int:
        """The longest prompt first."""
        return -r.num_prompt_tokens

    assert get_policy("longest").summary == "The longest prompt first."
    assert "".join(admitted(one_seat("longest", QUEUE))) == "abced"

    @cb.policy  # the cell is run again
    def longest(r: Any, now: float) -> int:  # noqa: F811
        return r.num_prompt_tokens

    assert "".join(admitted(one_seat("longest", QUEUE))) == "adceb"


def test_a_class_in_a_cell() -> None:
    @cb.policy
    class Nightly:
        name = "nightly"

        def rank(self, r: Any, now: float) -> tuple[int, int]:
            return (r.priority, -r.num_prompt_tokens)

        def admit(self, r: Any, now: float) -> bool:
            return r.priority < 2 or r.queued_step >= 0

    assert "".join(admitted(one_seat("nightly", QUEUE))) == "adbec"

    @cb.policy
    class Other(Policy):
        def rank(self, r: Any, now: float) -> int:
            return -r.seq

    assert get_policy("Other").name == "Other"
    assert "".join(admitted(one_seat("Other", QUEUE))) == "aedcb"


def test_a_running_engine_takes_the_new_text_of_its_cell() -> None:
    @cb.policy
    def mine(r: Any, now: float) -> int:
        return r.seq

    c = case(
        0,
        discipline="chunked",
        policy="mine",
        inputs=False,
        block_size=4,
        num_blocks=33,
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        sliding_window=0,
        victim=None,
    )
    engine = make_engine(c.config)
    engine.enqueue(QUEUE)
    for _ in range(5):
        engine.step()
    assert [r.request_id for r in engine.scheduler.state.waiting] == ["b", "c", "d", "e"]

    @cb.policy
    def mine(r: Any, now: float) -> int:  # noqa: F811
        return -r.seq

    engine.step()
    assert [r.request_id for r in engine.scheduler.state.waiting] == ["e", "d", "c", "b"]


def bad_raise(r: Any, now: float) -> float:
    return 1 / 0


def bad_name(r: Any, now: float) -> Any:
    return r.num_left


def bad_none(r: Any, now: float) -> None:
    return None


def bad_nan(r: Any, now: float) -> float:
    return float("nan")


def bad_mixed(r: Any, now: float) -> Any:
    return 1 if r.seq else "first"


def bad_complex(r: Any, now: float) -> complex:
    return 1j * r.seq


def bad_random(r: Any, now: float) -> float:
    return random.random()


def bad_arguments(r: Any) -> int:
    return 0


class BadAdmit:
    name = "bad_admit"

    def rank(self, r: Any, now: float) -> int:
        return 0

    def admit(self, r: Any, now: float) -> Any:
        return None


class BadAdmitRaises(BadAdmit):
    def admit(self, r: Any, now: float) -> Any:
        raise KeyError("tokens")


@pytest.mark.parametrize(
    "f, words",
    [
        (bad_raise, "policy bad_raise failed on request try0: ZeroDivisionError"),
        (bad_name, "has no attribute 'num_left'"),
        (bad_none, "ranked request try0 None"),
        (bad_nan, "ranked request try0 nan"),
        (bad_mixed, "don't compare with each other"),
        (bad_complex, "don't compare with each other"),
        (bad_random, "another rank when asked again"),
        (bad_arguments, "bad_arguments failed on request try0: TypeError"),
        (BadAdmit, "admit must return True or False"),
        (BadAdmitRaises, "failed in admit on request try0: KeyError"),
        (42, "a policy is a function"),
        ("fcfs", "a policy is a function"),
    ],
)
def test_a_mistake_shows_in_the_cell(f: Any, words: str) -> None:
    before = dict(POLICIES)
    with pytest.raises(PolicyError) as e:
        cb.policy(f)
    assert words in str(e.value)
    assert before == POLICIES


def test_a_policy_can_change_nothing() -> None:
    view = Request(RequestSpec("a", (1, 2), 3), 0, frozenset()).view
    for name in ("priority", "num_computed_tokens", "status", "anything"):
        with pytest.raises(AttributeError):
            setattr(view, name, 1)
    assert view.prompt_token_ids == (1, 2) and view.status == "waiting" and view.num_remaining == 5


def test_ranks_that_stop_comparing_in_the_middle_of_a_run() -> None:
    """Nothing in the trial shows it: from some request on the ranks are words.

    Named, and the state is as before.
    """

    @cb.policy
    def odd(r: Any, now: float) -> Any:
        return "word" if r.request_id == "d" else 1

    c = case(
        0,
        discipline="chunked",
        policy="odd",
        inputs=False,
        block_size=4,
        num_blocks=33,
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        sliding_window=0,
        victim=None,
    )
    engine = make_engine(c.config)
    engine.enqueue(QUEUE)
    for _ in range(3):
        engine.step()
    before = engine.snapshot()
    for _ in range(2):
        with pytest.raises(PolicyError, match=r"policy odd.*doesn't compare|policy odd.*don't compare"):
            engine.step()
        assert engine.snapshot() == before
    engine.configure(policy="fcfs")  # the way out
    while engine.step() is not None:
        pass
    assert engine.scheduler.state.num_finished == 5


def test_victims_whose_ranks_do_not_compare() -> None:
    """The queue never holds two of them, the running requests do."""

    @cb.policy
    def late(r: Any, now: float) -> Any:
        return "word" if r.request_id == "b" and r.status == "running" else 1

    specs = [spec("a", 8, 30), spec("b", 8, 30)]
    c = case(
        0,
        discipline="chunked",
        policy="late",
        inputs=False,
        block_size=4,
        num_blocks=11,
        max_model_len=40,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        sliding_window=0,
        enable_prefix_caching=False,
        watermark=0.0,
        victim="policy",
    )
    engine = make_engine(c.config)
    engine.enqueue(specs)

    def go_on() -> None:
        for _ in range(40):
            engine.step()

    with pytest.raises(PolicyError, match="policy late: its ranks of running requests don't compare"):
        go_on()
    assert engine.scheduler.state.running


def test_unknown_names() -> None:
    with pytest.raises(
        ConfigError, match=r"policy is 'priorty', it must be one of .*did you mean 'priority'"
    ):
        get_policy("priorty")
    with pytest.raises(
        ConfigError, match=r"victim is 'least-work', it must be one of .*did you mean 'least-work-lost'"
    ):
        check_victim("least-work")
    for name in (None, *VICTIMS):
        check_victim(name)


def test_every_policy_says_what_it_does() -> None:
    for name, p in POLICIES.items():
        assert p.name == name and p.title and p.summary.endswith(".")
    assert len({p.summary for p in POLICIES.values()}) == len(POLICIES)
