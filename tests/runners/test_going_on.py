"""Runs of real (tiny, random) models can be left and taken up again: saved and loaded, rewound, forked, the
same steps follow and the same words are said.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cbviz as cb
from cbviz import events as ev
from cbviz.config import ConfigError, EngineConfig
from cbviz.messages import RequestError, RequestSpec, Sampling
from cbviz.model.hub import ModelError
from cbviz.runners.torch_runner import TorchRunner
from cbviz.session import Session
from tests.runners.test_kv_runs import MODEL, VOCAB
from tests.runners.test_mixture_runs import MODELS as MIXTURES

MODELS = {"dense": MODEL, **MIXTURES}


def drawn(rng: random.Random) -> tuple[list[RequestSpec], dict[str, Any]]:
    """Requests and knobs, each technique drawn on its own."""
    fields: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": rng.choice((20, 30, 60)),
        "max_model_len": 48,
        "max_num_seqs": 6,
        "precision": "exact",
        "clock": "modelled",
        "discipline": rng.choice(("vllm", "chunked", "paged", "static", "retract")),
        "policy": rng.choice(("fcfs", "priority", "experts")),
        "enable_prefix_caching": rng.random() < 0.5,
        "kv_cache_dtype": rng.choice(("auto", "auto", "float16", "int8")),
        "batch_invariant": rng.random() < 0.3,
        "sliding_window": rng.choice((0, 0, 12)),
        "speculative": rng.choice(("off", "off", "ngram", "self-draft")),
        "num_speculative_tokens": 2,
        "preemption_mode": rng.choice(("recompute", "swap")),
        "swap_blocks": 20,
        "kv_allocation": rng.choice(("paged", "paged", "paged", "contiguous")),
    }
    if fields["sliding_window"] and fields["preemption_mode"] == "recompute":
        fields["attention_sinks"] = rng.choice((0, 3))
    common = rng.choices(range(VOCAB), k=9)
    requests = []
    for i in range(rng.randint(2, 5)):
        how = rng.choice(
            (
                Sampling(ignore_eos=True),
                Sampling(ignore_eos=True, n=2),
                Sampling(ignore_eos=True, beam_width=2),
            )
        )
        prompt = tuple(common[: rng.choice((0, 9))] + rng.choices(range(VOCAB), k=rng.randint(1, 6)))
        requests.append(
            RequestSpec(
                f"r{i}", prompt, rng.randint(2, 8), arrival_step=1 + i // 2, priority=i % 3, sampling=how
            )
        )
    return requests, fields


def told(s: Session) -> list[Any]:
    """What was decided and said at each step.

    Log-probabilities may differ in their last digits: KV that was computed again met other neighbours.
    """
    return [
        (r.chunks, [e for e in r.events if not isinstance(e, (ev.Scored, ev.BeamStep, ev.BeamsEnded))])
        for r in s.trace
    ]


def try_one(model: str, seed: int, folder: Path) -> bool:
    rng = random.Random(seed)
    requests, fields = drawn(rng)
    try:
        s = Session(requests, runner=TorchRunner(MODELS[model], EngineConfig(**fields)), **fields)
    except (ConfigError, RequestError, ModelError):
        return False
    s.run(max_steps=60)
    whole, end = told(s), {i: s.outputs(i) for i in s.request_ids}
    step = rng.randint(0, len(s.trace))
    fork = s.fork(at=step)
    s.rewind(step)
    again = Session.from_trace(
        cb.load(s.save(folder / "run.jsonl")), runner=TorchRunner(MODELS[model], EngineConfig(**fields))
    )
    for x in (fork, s, again):
        x.run(max_steps=max(1, len(whole) - step))
        assert told(x) == whole
        assert {i: x.outputs(i) for i in x.request_ids} == end
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("model", list(MODELS))
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_run_goes_on_as_it_went(model: str, folder: Path, seed: int) -> None:
    try_one(model, seed, folder)


@pytest.mark.parametrize("how", ["rewind", "fork", "from trace"])
def test_a_mixture_whose_requests_have_several_sequences_goes_on(how: str, tmp_path: Path) -> None:
    """Given tiny-moe with two sequences a request, when the run is taken up again in its middle, then it goes
    on: a child's first token took its parent's experts.
    """
    s = Session(
        [RequestSpec("a", (5, 6, 7), 6, sampling=Sampling(n=2, ignore_eos=True))],
        model="tiny-moe",
        runner="torch",
        clock="modelled",
    )
    s.run()
    whole = told(s)
    if how == "fork":
        s = s.fork(3)
    else:
        s.rewind(3)
        if how == "from trace":
            s = Session.from_trace(cb.load(s.save(tmp_path / "run.jsonl")))
    s.run()
    assert told(s) == whole
