"""n > 1 on the real engine: each sequence says what a request of its id says, the KV that is shared and
copied is right, and samples are spread as the model says.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from cbviz import events as ev
from cbviz.config import EngineConfig
from cbviz.messages import RequestSpec, Sampling
from cbviz.runners.torch_runner import TorchRunner
from cbviz.session import Session
from tests.runners.test_torch_runner import MODEL


def session(specs: list[RequestSpec], **fields: Any) -> Session:
    config = {
        "num_blocks": 26,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 6,
        "precision": "exact",
        "clock": "measured",
        "discipline": "vllm",
        **fields,
    }
    return Session(specs, runner=TorchRunner(MODEL, EngineConfig(**config)), **config)


WARM = Sampling(temperature=1.0, seed=7, ignore_eos=True)
PROMPTS = {"a": tuple(range(5, 15)), "b": tuple(range(30, 49)), "c": tuple(range(8, 11))}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True])
def test_sequences_say_what_requests_of_their_ids_say(mode: str, caching: bool) -> None:
    """In a pool so small that sequences lose their blocks, with copies on write, prefix cache and swapping."""
    wide = Sampling(temperature=1.0, seed=7, ignore_eos=True, n=3)
    s = session(
        [RequestSpec(i, ids, 24, arrival_step=1, sampling=wide) for i, ids in PROMPTS.items()],
        preemption_mode=mode,
        enable_prefix_caching=caching,
    )
    s.run()
    alone = session(
        [
            RequestSpec(f"{i}{k}", ids, 24, arrival_step=1, sampling=WARM)
            for i, ids in PROMPTS.items()
            for k in ("", ".1", ".2")
        ],
        num_blocks=200,
    )
    alone.run()
    for i in PROMPTS:
        assert s.state().outputs(i) == [alone.request(f"{i}{k}").output_token_ids for k in ("", ".1", ".2")]
    happened = {type(e) for r in s.trace for e in r.events}
    assert {ev.Forked, ev.Copied, ev.Preempted} <= happened and (ev.SwappedOut in happened) == (
        mode == "swap"
    )
    computed = sum(r.tokens.useful for r in s.trace)
    assert computed < sum(r.tokens.useful for r in alone.trace)  # each prompt once
    assert any(x.what == "copy" for r in s.trace for x in r.spans)


def test_first_tokens_are_spread_as_the_model_says() -> None:
    """Chi-square of 4,000 first tokens (80 requests of 50 sequences) against the softmax of the row that they
    were all drawn from.
    """
    counts: Counter[int] = Counter()
    for k in range(80):
        s = session(
            [RequestSpec(f"q{k}", PROMPTS["c"], 1, arrival_step=1, sampling=Sampling(temperature=1.0, n=50))],
            max_num_seqs=50,
        )
        s.step()
        counts.update(t for ids in s.state().outputs(f"q{k}") for t in ids)
    runner = s.runner
    assert isinstance(runner, TorchRunner)
    logits = runner._run([(list(PROMPTS["c"]), 0, [1])], runner.kv.like(3), 0, [2])[0]
    p = torch.softmax(logits.double(), 0).tolist()
    total = sum(counts.values())
    big = [t for t in range(len(p)) if p[t] * total >= 5]
    rest = 1 - sum(p[t] for t in big)
    cells = [(counts[t], p[t] * total) for t in big] + (
        [(total - sum(counts[t] for t in big), rest * total)] if rest * total >= 5 else []
    )
    chi = sum((seen - want) ** 2 / want for seen, want in cells)
    degrees = len(cells) - 1
    assert total == 4000 and degrees >= 4
    assert chi < degrees + 4 * math.sqrt(2 * degrees), f"chi-square {chi:.1f} at {degrees} degrees of freedom"
