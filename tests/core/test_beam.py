"""Beam search over made-up probabilities: invariants, accounts, fold and mirror after every step, under
preemption, prefix caching, abort and failing steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import pytest

from cbviz import events as ev
from cbviz.config import ConfigError
from cbviz.core.policy import POLICIES
from cbviz.core.ranking import Policy
from cbviz.engine.engine import Engine
from cbviz.messages import RequestError, RequestSpec, RunnerOutput, Sampling, SchedulerOutput
from cbviz.session import Session
from cbviz.trace.accounting import check_trace
from cbviz.trace.trace import Trace
from tests.core.byhand import byhand, found, spec
from tests.core.fuzz import Case, LedgerRunner, make_engine, make_trace, steps

STOP = 3


class Ranking(LedgerRunner):
    """Candidates are a function of all tokens before them; KV is looked after as in `LedgerRunner`."""

    gives_candidates = True

    def chain(self, request_id: str, tokens: Sequence[int], end: int) -> list[int]:
        self._chains[request_id] = []  # a beam's earlier tokens change
        return super().chain(request_id, tokens, end)

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        out = super().execute(plan)
        out.candidates = {
            c.request_id: ranked(c.tokens[: c.start + c.num_tokens], c.num_candidates)
            for c in plan.chunks
            if c.num_candidates
        }
        return out


def ranked(tokens: Sequence[int], n: int) -> list[tuple[int, float]]:
    rng = random.Random(crc32(repr(list(tokens)).encode()))
    return sorted(
        zip(rng.sample(range(2, 60), n), (-5 * rng.random() - 0.1 for _ in range(n)), strict=True),
        key=lambda x: -x[1],
    )


def search(prompt: Sequence[int], s: Sampling, new: int) -> list[list[int]]:
    """Beam search by the book, with no scheduler."""
    k, done, beams = s.beam_width, [], [(0.0, [])]
    for length in range(1, new + 1):
        found = sorted(
            ((x + p, [*out, t]) for x, out in beams for t, p in ranked([*prompt, *out], 2 * k)),
            key=lambda x: -x[0],
        )
        done += [
            (x / length**s.length_penalty, out) for x, out in found[:k] if out[-1] == STOP or length == new
        ]
        done = sorted(done, key=lambda x: -x[0])[:k]
        beams = [x for x in found if x[1][-1] != STOP][:k]
        if len(done) == k and (s.early_stopping or beams[0][0] / length**s.length_penalty <= done[-1][0]):
            break
    return [out for _, out in done]


def follow(c: Case, fail: float = 0.0) -> tuple[Engine, Trace]:
    rng = random.Random(7)
    runner = Ranking(c.config, lambda plan: OSError("power") if rng.random() < fail else None)
    engine, mirror, trace = (
        make_engine(c.config, runner),
        make_engine(c.config, Ranking(c.config)),
        make_trace(c.config),
    )
    for _ in steps(c, engine, trace, mirror=mirror, faults=(OSError,) if fail else ()):
        pass
    assert (
        engine.scheduler.state.pool.num_free == c.config.num_usable_blocks
        and not engine.scheduler.state.requests
    )
    check_trace(trace)
    return engine, trace


def wide(seed: int, **fields: Any) -> Case:
    rng = random.Random(seed)
    specs = []
    for i in range(10):
        how = rng.choice(
            (
                Sampling(),
                Sampling(n=2),
                *[
                    Sampling(
                        beam_width=rng.randint(2, 3),
                        length_penalty=rng.choice((0.0, 1.0, 2.0)),
                        early_stopping=rng.random() < 0.5,
                        stop_token_ids=(STOP,),
                    )
                ]
                * 3,
            )
        )
        prompt = tuple(
            rng.choice(((1,) * 9, ())) + tuple(rng.randrange(50) for _ in range(rng.randint(1, 9)))
        )
        specs.append(
            RequestSpec(
                f"r{i}",
                prompt,
                rng.randint(1, 20),
                arrival_step=rng.randint(1, 5),
                priority=rng.randint(0, 3),
                sampling=how,
            )
        )
    at = {rng.randint(3, 30): [("abort", f"r{rng.randrange(8)}")] for _ in range(2)}
    return byhand(
        specs,
        at,
        **{
            "num_blocks": 25,
            "max_model_len": 40,
            "max_num_seqs": 14,
            "max_num_batched_tokens": 40,
            "enable_prefix_caching": True,
        }
        | fields,
    )


@pytest.mark.parametrize("discipline", ["vllm", "chunked", "paged", "max-util"])
def test_any_workload(discipline: str) -> None:
    dropped = preempted = 0
    for seed in range(10):
        c = wide(seed, discipline=discipline, policy=("fcfs", "priority")[seed % 2])
        _, trace = follow(c)
        state = trace.state()
        for x in c.specs:
            r = state.request(x.request_id)
            if x.sampling.beam_width > 1 and r.finish_reason in ("stop", "length"):
                assert state.outputs(x.request_id) == search(x.prompt_token_ids, x.sampling, x.max_tokens), (
                    x.request_id
                )
        dropped += sum(n != p for e in found(trace, ev.BeamStep) for n, p in enumerate(e.parents))
        preempted += sum("." in e.request_id for e in found(trace, ev.Preempted))
    assert dropped and preempted


def test_idle_beams_of_two_searches_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Victims drawn at random, so that several searches each lack a beam; what they shared must be computed
    for each again, so it needs more blocks than it gave.
    """

    class Mixed(Policy):
        name = "mixed"
        static = True
        victim = "rank"

        def rank(self, r: Any, now: float) -> int:
            return crc32(r.request_id.encode()) % 97

    monkeypatch.setitem(POLICIES, "mixed", Mixed())
    stalls = 0
    for seed in range(12):
        rng = random.Random(seed)
        how = Sampling(beam_width=2, stop_token_ids=(STOP,))
        specs = [
            spec(
                f"q{rng.randrange(1000)}.{i}",
                rng.randint(14, 26),
                rng.randint(4, 12),
                first=i,
                sampling=how if i % 3 else Sampling(),
            )
            for i in range(6)
        ]
        c = byhand(
            specs,
            num_blocks=22,
            max_model_len=40,
            max_num_seqs=12,
            enable_prefix_caching=False,
            policy="mixed",
            discipline="vllm",
        )
        stalls += sum(e.rule == "idle-beam" for e in found(follow(c)[1], ev.Preempted))
    assert stalls


@pytest.mark.parametrize("seed", range(4))
def test_a_step_that_fails_leaves_everything_as_it_was(seed: int) -> None:
    follow(wide(seed, discipline="vllm"), fail=0.3)


def test_abort_of_one_beam_ends_all() -> None:
    how = Sampling(beam_width=3)
    engine, trace = follow(byhand([spec("a", 10, 12, sampling=how)], {5: [("abort", "a.2")]}))
    assert {r.finish_reason for r in trace.state().by_index} == {
        "abort"
    } and engine.scheduler.state.pool.num_free == 32


def test_blocks_are_shared_and_copied() -> None:
    """Ten prompt tokens in blocks of 4, three beams: the first step shares all three blocks, the next copies
    the last one twice.
    """
    _, t = follow(byhand([spec("a", 10, 6, sampling=Sampling(beam_width=3))]))
    assert t.record(1).tokens.total == 10 and t.record(1).gauges.num_saved_blocks == 6
    assert [e.parents for e in found(t, ev.BeamStep, 1)] == [[0, 0, 0]]
    assert len(found(t, ev.Copied, 2)) == 2


def test_what_can_not_be() -> None:
    for bad, said in (
        ({"beam_width": 3, "n": 2}, "n is 2 and beam_width 3"),
        ({"beam_width": 3, "temperature": 0.5}, "temperature is 0.5"),
        ({"beam_width": 17}, "the most is 16"),
        ({"beam_width": 3, "early_stopping": "never"}, "'never', is not there"),
    ):
        with pytest.raises(RequestError, match=said):
            Sampling(**bad)
    with pytest.raises(RequestError, match="runner 'sim' makes up"):
        Session(None, runner="sim").engine.add(spec("a", 4, 4, sampling=Sampling(beam_width=2)))
    c = byhand([spec("a", 10, 12, sampling=Sampling(beam_width=2))])
    engine = make_engine(c.config, Ranking(c.config))
    engine.enqueue(c.specs)
    engine.step()
    with pytest.raises(ConfigError, match="a runs beam search: speculative"):
        engine.configure(speculative="ngram")
    with pytest.raises(ConfigError, match="a runs beam search: there are 1 seats"):
        engine.configure(max_num_seqs=1)
    with pytest.raises(ConfigError, match="the beams of a request may need"):
        engine.resize(9)
