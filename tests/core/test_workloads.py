"""Random workloads under every discipline and policy: after every step all invariants hold, at the end
everything has ended, come back and said the right words.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbviz import events as ev
from cbviz.config import CONFIG_FIELDS
from cbviz.core.policy import VICTIMS
from cbviz.messages import RequestSpec
from cbviz.trace.accounting import check_trace
from tests.core.fuzz import DISCIPLINE_NAMES, POLICY_NAMES, Case, case, make_engine, make_trace, play, solo

NUM = 500
"""Cases a discipline.

The policy, the victim rule, the budget, the pool and, in every second case, timeouts and other limits are
drawn.
"""


def play_all(discipline: str, seeds: range, limited: int = 2, drafts: bool = False) -> None:
    """Every `limited`-th case has timeouts and other limits."""
    for seed in seeds:
        limits = seed % limited == 1
        c = case(
            seed,
            discipline=discipline,
            policy=POLICY_NAMES[seed % len(POLICY_NAMES)],
            limits=limits,
            drafts=drafts,
        )
        try:
            _, trace = play(c)
            if seed % 10 == 0:
                check_trace(trace)
        except BaseException as e:
            e.add_note(
                f"case({seed}, discipline={discipline!r}, policy={c.config.policy!r}, {limits=}, "
                f"{drafts=}): {c}"
            )
            raise


@pytest.mark.parametrize("discipline", DISCIPLINE_NAMES)
def test_random_workloads(discipline: str) -> None:
    play_all(discipline, range(NUM))


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize("discipline", DISCIPLINE_NAMES)
def test_many_random_workloads(discipline: str) -> None:
    play_all(discipline, range(NUM, 6 * NUM))


@settings(max_examples=40)
@given(
    st.integers(0, 10**9),
    st.sampled_from(DISCIPLINE_NAMES),
    st.sampled_from(POLICY_NAMES),
    st.sampled_from((None, *VICTIMS)),
    st.booleans(),
    st.booleans(),
)
def test_hypothesis_workloads(
    seed: int, discipline: str, policy: str, victim: str | None, caching: bool, limits: bool
) -> None:
    """The same judge on cases that hypothesis picks (and remembers when they fail)."""
    play(
        case(
            seed,
            discipline=discipline,
            policy=policy,
            victim=victim,
            enable_prefix_caching=caching,
            limits=limits,
        )
    )


def test_the_cases_are_hard() -> None:
    """The random cases do what they are for: blocks run out, prefixes are hit and evicted, windows move,
    chunks are taken back.
    """
    seen: dict[str, int] = {}
    for seed in range(80):
        _, trace = play(
            case(seed, discipline=("chunked", "vllm")[seed % 2], policy=("fcfs", "priority", "sjf")[seed % 3])
        )
        for record in trace:
            for e in record.events:
                seen[type(e).__name__] = seen.get(type(e).__name__, 0) + 1
    least = {
        "Preempted": 40,
        "PrefixHit": 40,
        "Evicted": 500,
        "OutOfWindow": 100,
        "Unscheduled": 2,
        "Skipped": 10,
    }
    assert {k: n for k, n in least.items() if seen.get(k, 0) < n} == {}, seen


def test_the_limits_are_met() -> None:
    """The cases with limits do what they are for: requests are ended by each of them, refused and demoted,
    and most still end by themselves.
    """
    seen: dict[str, int] = {}
    for seed in range(1, 120, 2):
        _, trace = play(case(seed, discipline=DISCIPLINE_NAMES[seed % len(DISCIPLINE_NAMES)], limits=True))
        for record in trace:
            for e in record.events:
                what = (
                    e.reason
                    if isinstance(e, (ev.Finished, ev.NotAdmitted))
                    else "full"
                    if isinstance(e, ev.Refused) and "queue is full" in e.reason
                    else ""
                )
                seen[what] = seen.get(what, 0) + 1
    least = {"timeout": 10, "deadline": 10, "shed": 10, "full": 10, "degraded": 10, "length": 100}
    assert {k: n for k, n in least.items() if seen.get(k, 0) < n} == {}, seen


def knob_changes(rng: random.Random, c: Case) -> dict[str, object]:
    """One or two knobs that may change during a run."""
    choices: dict[str, list[object]] = {
        "discipline": list(DISCIPLINE_NAMES),
        "policy": list(POLICY_NAMES),
        "max_num_seqs": [1, 2, 5],
        "watermark": [0.0, 0.2],
        "victim": [None, *VICTIMS],
        "long_prefill_token_threshold": [0, 3],
        "scheduler_reserve_full_isl": [None, True, False],
        "max_num_batched_tokens": [c.config.max_model_len, 100],
    }
    assert all(CONFIG_FIELDS[f].metadata["live"] for f in choices)
    return {f: rng.choice(choices[f]) for f in rng.sample(list(choices), rng.randint(1, 2))}


@pytest.mark.parametrize("seed", range(60))
def test_knobs_change_in_the_middle(seed: int) -> None:
    """Disciplines, policies and limits may change before any step: running requests keep what they have, and
    everything still ends.
    """
    rng = random.Random(seed)
    c = case(seed)
    for step in sorted(rng.sample(range(2, 60), 8)):
        c.at.setdefault(step, []).append(("configure", knob_changes(rng, c)))
    for (
        inputs
    ) in c.at.values():  # a budget below max_model_len is refused by disciplines that compute whole prompts
        for op, what in inputs:
            if op == "configure" and "max_num_batched_tokens" in what:
                what["max_num_batched_tokens"] = max(
                    c.config.max_model_len or 0, what["max_num_batched_tokens"]
                )
    play(c)


@pytest.mark.parametrize("before", DISCIPLINE_NAMES)
@pytest.mark.parametrize("after", DISCIPLINE_NAMES)
def test_every_pair_of_disciplines(before: str, after: str) -> None:
    c = case(
        7,
        discipline=before,
        policy="fcfs",
        block_size=4,
        num_blocks=12,
        max_model_len=40,
        max_num_seqs=4,
        sliding_window=0,
        enable_prefix_caching=True,
        long_prefill_token_threshold=0,
    )
    c.at[6] = [("configure", {"discipline": after})]
    c.at[13] = [("configure", {"discipline": before})]
    play(c)


@pytest.mark.parametrize("before", POLICY_NAMES)
@pytest.mark.parametrize("after", POLICY_NAMES)
def test_every_pair_of_policies(before: str, after: str) -> None:
    c = case(
        11,
        discipline="vllm",
        policy=before,
        block_size=4,
        num_blocks=12,
        max_model_len=40,
        max_num_seqs=4,
        sliding_window=0,
        enable_prefix_caching=True,
    )
    c.at[4] = [("configure", {"policy": after})]
    play(c)


def test_a_block_that_is_not_computed_is_not_found() -> None:
    """A request scheduled in this step loses its blocks to one of better priority: blocks that its chunk
    would have filled must not be hit when it comes back.
    """
    c = case(
        0,
        discipline="vllm",
        policy="priority",
        block_size=1,
        num_blocks=15,
        max_model_len=14,
        max_num_seqs=3,
        sliding_window=0,
        enable_prefix_caching=True,
        victim=None,
        max_num_batched_tokens=64,
        watermark=0.0,
        long_prefill_token_threshold=3,
        scheduler_reserve_full_isl=False,
        inputs=False,
    )
    # "brief" is there so that "low" is not alone at first: the threshold holds only among several
    c.specs = [
        RequestSpec("brief", (41,), 1, arrival_step=1),
        RequestSpec("low", tuple(range(11)), 3, arrival_step=1, priority=5),
        RequestSpec("high", (31, 32), 8, arrival_step=2),
    ]
    _, trace = play(c)
    record = trace.record(4)
    assert ev.Unscheduled("low") in record.events
    planned = [e.block_id for e in record.events if isinstance(e, ev.BlockCached) and e.request_id == "low"]
    assert len(planned) == 2 and set(planned) <= {
        b for e in record.events if isinstance(e, ev.Preempted) for b in e.block_ids
    }
    free = [b for b in planned if not trace.state(4).ref_count(b)]
    assert free and not any(trace.state(4).cached[b] for b in free)


def test_held_seats_alone_do_not_block_the_queue() -> None:
    """A finished request holds its seat, the other one loses its blocks: then the batch is over, though
    nothing has ended in that step.
    """
    c = case(
        0,
        discipline="vllm",
        policy="fcfs",
        block_size=1,
        num_blocks=13,
        max_model_len=12,
        max_num_seqs=2,
        sliding_window=0,
        enable_prefix_caching=False,
        victim=None,
        max_num_batched_tokens=64,
        watermark=0.0,
        long_prefill_token_threshold=0,
        scheduler_reserve_full_isl=None,
        inputs=False,
    )
    c.specs = [
        RequestSpec("a", (1, 2, 3, 4), 4, arrival_step=1),
        RequestSpec("b", (5, 6), 10, arrival_step=1),
    ]
    c.at = {2: [("configure", {"discipline": "static-padded"})]}
    _, trace = play(c)
    assert any(isinstance(e, ev.Preempted) for r in trace for e in r.events)


def test_solo_is_what_one_request_alone_gets() -> None:
    """The yardstick itself: a request that runs alone through the engine."""
    c = case(3, discipline="chunked", policy="fcfs", inputs=False)
    for spec in c.specs:
        engine, trace = make_engine(c.config), make_trace(c.config)
        engine.enqueue([spec])
        while (record := engine.step()) is not None:
            trace.append(record)
        assert trace.state().request(spec.request_id).output_token_ids == solo(
            spec, c.config.seed, c.config.max_model_len or 0
        )
