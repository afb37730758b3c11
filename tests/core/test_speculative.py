"""Speculative decoding in the control plane: every discipline with every kind of proposer, over tiny pools,
with preemption, prefix hits, windows, aborts and knobs that change.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cbviz as cb
from cbviz import events as ev
from cbviz.config import ConfigError, EngineConfig
from cbviz.core.outputs import RunnerOutputError
from cbviz.core.running import NO_DRAFT
from cbviz.core.scheduler import Scheduler
from cbviz.core.speculative import PROPOSERS, ProposerError, ngram
from cbviz.messages import RequestSpec, RunnerOutput, Sampling
from cbviz.runners.tape import TapeRunner
from tests.core.fuzz import DISCIPLINE_NAMES, POLICY_NAMES, SPEC, LedgerRunner, case, make_engine, play
from tests.core.test_workloads import play_all
from tests.engine.test_replay import follow, resume

TAKES_DRAFTS = tuple(d for d in DISCIPLINE_NAMES if d != "static-padded")


@pytest.mark.parametrize("discipline", TAKES_DRAFTS)
def test_random_workloads(discipline: str) -> None:
    play_all(discipline, range(40), limited=4, drafts=True)


@settings(max_examples=40)
@given(st.integers(0, 10**9), st.sampled_from(TAKES_DRAFTS), st.sampled_from(POLICY_NAMES), st.booleans())
def test_hypothesis_workloads(seed: int, discipline: str, policy: str, caching: bool) -> None:
    play(case(seed, discipline=discipline, policy=policy, enable_prefix_caching=caching, drafts=True))


@pytest.mark.parametrize("seed", range(40))
def test_a_mirror_follows_and_knobs_change(seed: int) -> None:
    """Speculation goes on and off and changes in the middle; an engine that only hears of it stands where the
    first one stands.
    """
    c = case(seed, discipline=TAKES_DRAFTS[seed % len(TAKES_DRAFTS)], drafts=True)
    c.at.setdefault(7, []).append(("configure", {"speculative": "off"}))
    c.at.setdefault(12, []).append(
        ("configure", {"speculative": "self-draft", "num_speculative_tokens": 4, "draft_acceptance": 0.8})
    )
    c.at.setdefault(20, []).append(("configure", {"discipline": "vllm", "num_speculative_tokens": 2}))
    c.at.setdefault(26, []).append(("configure", {"speculative": "ngram"}))
    follow(c)


@pytest.mark.parametrize("seed", range(10))
def test_from_any_step_on(seed: int) -> None:
    resume(case(seed, inputs=False, drafts=True))


def test_a_failed_pass_takes_the_drafts_back() -> None:
    """A step that raises leaves the drafts where they were, and the run goes on to the same end."""
    failed = 0
    for seed in range(15):
        c = case(seed, drafts=True, inputs=False, discipline=("vllm", "chunked", "retract")[seed % 3])
        rng = random.Random(seed)

        def fail(plan: object, rng: random.Random = rng) -> BaseException | None:
            nonlocal failed
            if rng.random() >= 0.2:
                return None
            failed += 1
            return RuntimeError("a pass that fails")

        play(c, make_engine(c.config, LedgerRunner(c.config, fail)), faults=(RuntimeError,))
    assert failed > 20


def test_the_cases_are_hard() -> None:
    """Drafts are accepted, thrown away, cut by the budget, lost to a preemption, taken back after they were
    scheduled, and made up to lengthen a row.
    """
    seen: dict[str, int] = {}

    def count(what: str, n: int) -> None:
        seen[what] = seen.get(what, 0) + n

    for seed in range(210):
        c = case(
            seed,
            discipline=("vllm", "chunked", "max-util")[seed % 3],
            policy=("fcfs", "priority")[seed % 2],
            drafts=True,
        )
        _, trace = play(c)
        held: dict[str, int] = {}
        for record in trace:
            planned: dict[str, int] = {}
            for e in record.events:
                if isinstance(e, ev.Proposed):
                    held[e.request_id] = len(e.token_ids)
                elif isinstance(e, ev.Scheduled):
                    planned[e.request_id] = e.num_draft
                    count("padding", e.draft_padding)
                    count("cut", not e.draft_padding and e.num_draft < held.pop(e.request_id, 0))
                elif isinstance(e, ev.Preempted):
                    count("lost", bool(held.pop(e.request_id, 0)))
                elif isinstance(e, ev.Unscheduled):
                    count("taken back", bool(planned.get(e.request_id)))
                elif isinstance(e, ev.Sampled):
                    count("rejected", e.num_rejected)
                    count("accepted", planned[e.request_id] - e.num_rejected)
                elif isinstance(e, ev.PrefixHit):
                    count("hits", 1)
    least = {
        "padding": 3,
        "cut": 20,
        "lost": 5,
        "taken back": 1,
        "rejected": 500,
        "accepted": 1000,
        "hits": 20,
    }
    assert {k: n for k, n in least.items() if seen.get(k, 0) < n} == {}, seen


def test_speculation_saves_steps_and_says_the_same() -> None:
    """The closed form: with every draft right, k drafts make 1 + k tokens a step; with none right, one."""
    spec = RequestSpec("r", tuple(range(20)), 41)

    def steps(**fields: object) -> cb.Session:
        s = cb.Session([spec], runner="sim", num_speculative_tokens=3, **fields)  # type: ignore[arg-type]
        s.run()
        return s

    plain, right, wrong = (
        steps(),
        steps(speculative="ngram", draft_acceptance=1.0),
        steps(speculative="ngram", draft_acceptance=0.0),
    )
    assert len(plain.trace) == len(wrong.trace) == 41
    assert len(right.trace) == 1 + 40 // 4
    words = [s.request("r").output_token_ids for s in (plain, right, wrong)]
    assert words[0] == words[1] == words[2] and len(words[0]) == 41
    assert sum(r.tokens.rejected for r in right.trace) == 0
    # one draft fewer at each step near the end: only as many as max_tokens leaves room for
    assert sum(r.tokens.rejected for r in wrong.trace) == 37 * 3 + 2 + 1


# n-gram -----------------------------------------------------------------------------------------------------


def slow_ngram(tokens: list[int], k: int, shortest: int, longest: int) -> list[int]:
    """Its definition, place by place."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + k]
    return []


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 3) | st.sampled_from((256, 1 << 40)), max_size=40),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_ngram_is_its_definition(tokens: list[int], k: int, shortest: int, more: int) -> None:
    assert ngram(tokens, k, shortest, shortest + more) == slow_ngram(tokens, k, shortest, shortest + more)


def test_ngram_on_a_tape_is_a_real_lookup() -> None:
    """A taped run has real tokens: prompt lookup is done on them, and what the tape says decides."""
    prompt = (1, 2, 3, 4, 5, 9, 1, 2)
    tape = [3, 4, 5, 7, 1, 2, 3, 4, 5, 7, 1, 2]
    spec = RequestSpec("r", prompt, len(tape))
    s = cb.Session(
        [spec],
        runner=TapeRunner(SPEC, {"r": tape}, {"r": len(prompt)}),
        speculative="ngram",
        num_speculative_tokens=3,
    )
    s.run()
    assert s.request("r").output_token_ids == tape
    first = next(e for r in s.trace for e in r.events if isinstance(e, ev.Proposed))
    assert (
        first.token_ids == [4, 5, 9] and first.by == "ngram"
    )  # behind the first "1 2 3"; the tape goes on 4 5 7
    second = s.trace.record(2)
    assert [e.num_rejected for e in second.events if isinstance(e, ev.Sampled)] == [
        1
    ] and second.tokens.rejected == 1
    r = s.trace.state(2).requests["r"]
    assert (
        r.output_token_ids == [3, 4, 5, 7]
        and r.output_drafted == [1, 2]
        and r.checked_drafts == (2, [4, 5, 9], 2)
    )
    assert len(s.trace) < len(tape)


# a proposer of one's own ------------------------------------------------------------------------------------


@pytest.fixture
def clean_proposers() -> Iterator[None]:
    before = dict(PROPOSERS)
    yield
    PROPOSERS.clear()
    PROPOSERS.update(before)


@pytest.mark.usefixtures("clean_proposers")
def test_a_typed_proposer_runs_and_is_replaced() -> None:
    seen: list[int] = []

    @cb.proposer
    def next_ones(tokens: tuple[int, ...], k: int) -> list[int]:
        """Counts on."""
        seen.append(len(tokens))
        return [tokens[-1] + 1 + i for i in range(k)]

    s = cb.Session(
        [RequestSpec("r", (5, 6), 8)], runner="sim", speculative="next_ones", num_speculative_tokens=2
    )
    s.step()
    newest = s.request("r").output_token_ids[-1]
    assert s.request("r").draft_token_ids == [newest + 1, newest + 2] and seen[-1] == 3

    @cb.proposer
    def next_ones(tokens: tuple[int, ...], k: int) -> list[int]:  # noqa: F811
        return [tokens[-1]]

    s.step()
    assert s.request("r").draft_token_ids == [s.request("r").output_token_ids[-1]]
    s.run()
    plain = cb.Session([RequestSpec("r", (5, 6), 8)], runner="sim")
    plain.run()
    assert s.request("r").output_token_ids == plain.request("r").output_token_ids


@pytest.mark.usefixtures("clean_proposers")
def test_a_broken_proposer_is_named_and_takes_nothing_with_it() -> None:
    def off(tokens: tuple[int, ...], k: int) -> list[int]:
        return []

    def text(tokens: tuple[int, ...], k: int) -> str:
        return "words"

    def negative(tokens: tuple[int, ...], k: int) -> list[int]:
        return [-1]

    draws = random.Random(1)

    def dice(tokens: tuple[int, ...], k: int) -> list[int]:
        return [draws.randrange(1000)]

    for f, says in (
        (off, "can't be called 'off'"),
        (text, "is a token id"),
        (negative, "is a token id"),
        (dice, "other drafts when asked again"),
        (7, "is a function"),
    ):
        with pytest.raises(ProposerError, match=says):
            cb.proposer(f)

    @cb.proposer
    def fails_later(tokens: tuple[int, ...], k: int) -> list[int]:
        if tokens[0] == 77 and len(tokens) > 5:
            raise ValueError("no idea")
        return []

    s = cb.Session([RequestSpec("r", (77, 6), 8)], runner="sim", speculative="fails_later")
    s.step(3)
    before = s.digest()
    with pytest.raises(
        ProposerError, match=r"fails_later failed on request r .6 tokens.: ValueError: no idea"
    ):
        s.step()
    assert s.digest() == before and len(s.trace) == 3
    s.configure(speculative="off")
    s.run()
    assert s.request("r").finished


# what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"speculative": "ngramm"}, "did you mean 'ngram'"),
        (
            {"speculative": "ngram", "discipline": "static-padded"},
            "static-padded.*one token each.*Choose another discipline",
        ),
        ({"speculative": "draft-model"}, "draft_model is empty"),
        (
            {"speculative": "ngram", "prompt_lookup_min": 5},
            "prompt_lookup_min is 5, it may be at most prompt_lookup_max, 4",
        ),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0, the least is 1"),
        ({"draft_acceptance": 1.5}, "draft_acceptance is 1.5, the most is 1"),
    ],
)
def test_bad_settings_are_named(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cb.Session("article", runner="sim", **fields)  # type: ignore[arg-type]


def test_a_request_must_fit_with_its_drafts() -> None:
    spec = RequestSpec("r", tuple(range(30)), 34)  # 64 slots: exactly the pool
    fields = {"runner": "sim", "block_size": 16, "num_blocks": 5, "max_model_len": 80}
    cb.Session([spec], **fields).run()  # type: ignore[arg-type]
    s = cb.Session([spec], speculative="self-draft", **fields)  # type: ignore[arg-type]
    s.step()
    assert "slots for drafts" in s.request("r").finish_reason
    s = cb.Session([spec], **fields)  # type: ignore[arg-type]
    s.step(3)
    with pytest.raises(ConfigError, match="may need 67 slots for r, the pool has 64"):
        s.configure(speculative="self-draft")
    s.configure(speculative="ngram")  # nothing beyond max_tokens
    s.run()
    assert s.request("r").finished
    s = cb.Session(None, **fields)  # type: ignore[arg-type]
    s.engine.add(spec)  # both between the same two steps
    with pytest.raises(ConfigError, match="may need 67 slots for r, the pool has 64"):
        s.configure(speculative="self-draft")
    s = cb.Session(None, **fields)  # type: ignore[arg-type]
    s.configure(speculative="self-draft")
    with pytest.raises(cb.RequestError, match="and 3 slots for drafts"):
        s.engine.add(spec)


def test_a_runner_that_gives_too_much_is_refused() -> None:
    config, _ = EngineConfig(discipline="vllm").resolve(4096)
    s = Scheduler(config)
    s.begin()
    s.add(RequestSpec("r", (1, 2), 5))
    plan = s.schedule()
    with pytest.raises(RunnerOutputError, match="2 tokens for r, whose 0 drafts allow 1"):
        s.update(plan, RunnerOutput({"r": [5, 6]}))


def test_stop_ids_cut_accepted_drafts() -> None:
    """Drafts behind a stop token are accepted by the model and still not said: they count as thrown away."""
    config, _ = EngineConfig(discipline="vllm", speculative="self-draft", num_speculative_tokens=3).resolve(
        4096
    )
    s = Scheduler(config)
    s.begin()
    s.add(RequestSpec("r", (1, 2), 20, sampling=Sampling(stop_token_ids=(8,))))
    s.update(s.schedule(), RunnerOutput({"r": [5]}, draft_ids={"r": [7, 8, 9]}))
    s.begin()
    plan = s.schedule()
    assert plan.chunks[0].draft_token_ids == [7, 8, 9]
    s.update(plan, RunnerOutput({"r": [7, 8, 9, 10]}, draft_ids={"r": [1, 2, 3]}))
    sampled = next(e for e in s.drain() if isinstance(e, ev.Sampled) and e.num_rejected)
    assert (sampled.token_ids, sampled.num_rejected) == ([7, 8], 1)
    assert s.it.tokens.rejected == 1 and s.it.tokens.useful == 3 and not s.state.requests


def test_vllms_padding_rule() -> None:
    """One token to compute, decodes under way: vLLM makes the newcomer as long as they are; other disciplines
    do not.
    """
    specs = [RequestSpec("long", tuple(range(9)), 20), RequestSpec("short", (3,), 5, arrival_step=3)]
    for discipline, drafts in (("vllm", 3), ("chunked", 0)):
        s = cb.Session(
            specs, runner="sim", discipline=discipline, speculative="ngram", num_speculative_tokens=3
        )
        s.step(3)
        e = next(
            e for e in s.trace.record(3).events if isinstance(e, ev.Scheduled) and e.request_id == "short"
        )
        assert (e.num_draft, e.draft_padding, e.num_tokens) == (drafts, bool(drafts), 1 + drafts)
    assert NO_DRAFT < 0


# pictures, figures and prices -------------------------------------------------------------------------------


def test_the_timeline_metrics_and_sentences_show_it() -> None:
    prompt, tape = (1, 2, 3, 4, 5, 9, 1, 2), [3, 4, 5, 7, 1, 2, 3, 4, 5, 7, 1, 2]
    s = cb.Session(
        [RequestSpec("r", prompt, len(tape))],
        runner=TapeRunner(SPEC, {"r": tape}, {"r": len(prompt)}),
        speculative="ngram",
        num_speculative_tokens=3,
    )
    s.run(until=cb.on("proposed"))
    assert len(s.trace) == 1
    s.run()
    assert s.trace.state(2).requests["r"].state == "accepted"
    assert (
        "r proposed 3 drafts, 2 accepted, 1 is thrown away: the model chose another token; it got 3 tokens "
        "in one step"
    ) in cb.explain(s.trace, 2)
    m = cb.metrics(s.trace)
    drafts = sum(c.num_draft for r in s.trace for c in r.chunks)
    assert m["draft_tokens"] == drafts and m["rejected_tokens"] == sum(r.tokens.rejected for r in s.trace)
    assert m["draft_acceptance_rate"] == pytest.approx(1 - m["rejected_tokens"] / drafts)
    checks = sum(c.num_draft > 0 for r in s.trace for c in r.chunks)
    assert m["mean_acceptance_length"] == pytest.approx(
        sum(
            len(e.token_ids)
            for r in s.trace
            for e in r.events[:]
            if isinstance(e, ev.Sampled) and r.chunks[0].num_draft
        )
        / checks
    )
    wrong = cb.Session([RequestSpec("r", (1, 2), 9)], runner="sim", speculative="ngram", draft_acceptance=0.0)
    wrong.step(2)
    assert wrong.request("r").state == "rejected"
    assert (
        cb.metrics(cb.Session([RequestSpec("r", (1, 2), 9)], runner="sim").trace)["draft_acceptance_rate"]
        is None
    )


def test_drafting_passes_are_priced() -> None:
    """Roofline: k passes through a share of the layers and the head, on top of the step itself. n-gram drafts
    cost nothing to make.
    """

    def first(**fields: object) -> float:
        s = cb.Session([RequestSpec("r", tuple(range(50)), 9)], runner="sim", model="SmolLM2-135M", **fields)  # type: ignore[arg-type]
        record = s.step()
        assert record is not None and record.cost is not None
        return record.cost.weight_bytes

    plain, looked_up = first(), first(speculative="ngram")
    assert looked_up == plain
    one, three, deep = (
        first(speculative="self-draft", num_speculative_tokens=k, draft_layers=n)
        for k, n in ((1, 10), (3, 10), (3, 29))
    )
    assert plain < one < three < deep
    assert three - plain == pytest.approx(3 * (one - plain))
    assert first(
        speculative="self-draft", num_speculative_tokens=1, draft_layers=30
    ) - plain == pytest.approx(plain)
