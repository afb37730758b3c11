"""The engine on a stand-in for a card: decode steps replayed from recordings say what the CPU's own path
says, whatever the scheduler does.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from cbviz.config import EngineConfig
from cbviz.core.check import check
from cbviz.messages import RequestSpec, Sampling
from cbviz.runners.torch_runner import TorchRunner
from cbviz.session import Session
from tests.device import NoWaiting, Tape
from tests.runners.test_torch_runner import MODEL, VOCAB

WARM = Sampling(temperature=0.8, top_k=10, top_p=0.9)
pytestmark = pytest.mark.usefixtures("one_thread")


def specs(seed: int) -> list[RequestSpec]:
    """Requests that share a beginning, arrive over time, and of which some draw their tokens."""
    rng = random.Random(seed)
    shared = tuple(rng.choices(range(VOCAB), k=13))
    return [
        RequestSpec(
            f"r{i}",
            shared[: rng.choice([0, 5, 13])] + tuple(rng.choices(range(VOCAB), k=rng.randrange(1, 20))),
            rng.randrange(2, 24),
            arrival_step=1 + i // 2,
            priority=i % 3,
            sampling=rng.choice([Sampling(ignore_eos=True), WARM]),
        )
        for i in range(9)
    ]


class Waitless(TorchRunner):
    """Every pass under a guard that raises where the host would wait for a card."""

    def execute(self, plan: Any) -> Any:
        with NoWaiting():
            return super().execute(plan)


def play(runner: TorchRunner, requests: list[RequestSpec], **fields: Any) -> Session:
    """To the end, one request aborted on the way, the invariants checked after every step."""
    s = Session(requests, runner=runner, precision="exact", clock="modelled", block_size=4, **fields)
    while s.step() is not None:
        check(s.engine.scheduler)
        if s.engine.step_count == 7:
            s.abort("r2")
    return s


CASES: dict[str, dict[str, Any]] = {
    "vllm": {"max_num_batched_tokens": 17},
    "chunked": {"max_num_batched_tokens": 9, "max_num_seqs": 5},
    "paged": {"policy": "priority"},
    "static-padded": {"max_num_seqs": 4, "num_blocks": 80},
    "max-util": {"max_num_seqs": 6},
    "retract": {"max_num_batched_tokens": 24},
    "orca": {"num_blocks": 60, "sliding_window": 9},
    "no-evict": {"num_blocks": 60, "kv_cache_dtype": "int4"},
    "vllm sinks": {"num_blocks": 60, "sliding_window": 9, "attention_sinks": 2},
    "vllm swap": {"preemption_mode": "swap", "swap_blocks": 40},
    "vllm drafts": {
        "speculative": "self-draft",
        "num_speculative_tokens": 2,
        "num_blocks": 40,
        "draft_layers": 1,
    },
}
RUNNERS = ("num_blocks", "sliding_window", "attention_sinks", "kv_cache_dtype", "swap_blocks")
"""Fields that a runner reads."""


@pytest.mark.parametrize("discipline", CASES)
def test_the_schedule_changes_no_token_on_a_device(discipline: str) -> None:
    fields = {
        "num_blocks": 22,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "discipline": discipline.split()[0],
    } | CASES[discipline]
    tape = Tape()
    shape = {"block_size": 4, "precision": "exact"} | {k: v for k, v in fields.items() if k in RUNNERS}
    there = Waitless(MODEL, EngineConfig(kernels="torch", **shape), backend=tape)
    plain = TorchRunner(MODEL, EngineConfig(kernels="reference", **shape))
    a, b = (play(r, specs(3), **fields) for r in (there, plain))
    assert {i: a.request(i).output_token_ids for i in a.request_ids} == {
        i: b.request(i).output_token_ids for i in b.request_ids
    }
    assert a.digest() == b.digest()
    counts = there.device_pass.counts  # type: ignore[union-attr]
    assert counts.captured == tape.captures and not counts.eager_decodes
    if "speculative" in fields:
        assert counts.eager > 10  # a step that checks drafts has several tokens a row: no graph serves it
    else:
        assert counts.replayed > 10 and counts.captured > 1
    steps = [r for r in a.trace if r.chunks]
    # One wait a step, and sync's where blocks were computed again. A step is one transfer in, one out, and
    # one more where tokens are drawn.
    assert len(steps) <= counts.waits <= len(steps) + 2 and counts.transfers <= 3 * len(steps)
    if discipline in ("vllm", "paged", "max-util"):
        assert sum(len([e for e in r.events if type(e).__name__ == "Preempted"]) for r in steps) > 0
    for r in steps:
        assert (
            r.device is not None
            and r.device["busy_s"] > 0
            and r.device["busy_s"] + r.device["gap_s"] >= r.measured_s
        )  # type: ignore[operator]
    assert all(r.device is None for r in b.trace)


def test_rewind_and_fork_compute_lost_blocks_on_the_device() -> None:
    there = Waitless(
        MODEL, EngineConfig(kernels="torch", num_blocks=40, block_size=4, precision="exact"), backend=Tape()
    )
    s = play(there, specs(5), num_blocks=40, max_model_len=64, discipline="vllm")
    whole = {i: s.request(i).output_token_ids for i in s.request_ids}
    s.rewind(11)
    b = s.fork(at=9, policy="sjf")
    for x in (s, b):
        x.run()
        assert {i: x.request(i).output_token_ids for i in x.request_ids if i != "r2"} == {
            i: t for i, t in whole.items() if i != "r2"
        }


def test_a_card_s_pass_and_eager_agree() -> None:
    outs = []
    for eager in (False, True):
        r = TorchRunner(
            MODEL,
            EngineConfig(
                kernels="torch", num_blocks=40, block_size=4, precision="exact", enforce_eager=eager
            ),
            backend=Tape(),
        )
        s = play(r, specs(8), num_blocks=40, max_model_len=64, enforce_eager=eager)
        outs.append([s.request(i).output_token_ids for i in s.request_ids])
        assert r.device_pass is not None and bool(r.device_pass.counts.replayed) is not eager
    assert outs[0] == outs[1]


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_precisions(precision: str) -> None:
    """16-bit weights run through 16-bit products: the tiny model's tokens stay the same for a while, its
    log-probabilities are close.
    """
    r = TorchRunner(
        MODEL, EngineConfig(kernels="torch", num_blocks=40, block_size=4, precision=precision), backend=Tape()
    )
    plain = TorchRunner(
        MODEL, EngineConfig(kernels="reference", num_blocks=40, block_size=4, precision="exact")
    )
    spec = RequestSpec("a", (7, 1, 44), 3, arrival_step=1, sampling=Sampling(ignore_eos=True))
    got, want = (
        Session([spec], runner=x, precision=p, clock="modelled", num_blocks=40, block_size=4)
        for x, p in ((r, precision), (plain, "exact"))
    )
    got.run()
    want.run()
    assert got.request("a").output_token_ids == want.request("a").output_token_ids
    for a, b in zip(got.trace, want.trace, strict=True):
        if b.logprobs:
            assert a.logprobs["a"] == pytest.approx(
                b.logprobs["a"], abs=1e-5 if precision == "exact" else 0.05
            )  # type: ignore[index]
    assert r.kv.dtype == (torch.float32 if precision == "exact" else torch.float16)


@pytest.mark.model
def test_the_real_model_s_recorded_tokens(conformance: Path) -> None:
    requests = list(json.loads((conformance / "smollm2-greedy.json").read_text("utf-8"))["requests"])[:5]
    r = Waitless("smollm2", EngineConfig(kernels="torch", precision="exact", num_blocks=60), backend=Tape())
    asked = [
        RequestSpec(f"q{i}", tuple(q["prompt_token_ids"]), min(8, q["max_tokens"]), arrival_step=1 + i // 3)
        for i, q in enumerate(requests)
    ]
    s = Session(
        asked,
        runner=r,
        discipline="vllm",
        precision="exact",
        clock="modelled",
        num_blocks=60,
        max_num_batched_tokens=64,
    )
    s.run()
    for i, q in enumerate(requests):
        ours = s.request(f"q{i}").output_token_ids
        tie = next((k for k, gap in enumerate(q["gap_to_second"]) if gap < 0.001), len(ours))
        assert ours[:tie] == q["output_token_ids"][: len(ours)][:tie]
    counts = r.device_pass.counts  # type: ignore[union-attr]
    assert counts.replayed > 5 and not counts.eager_decodes
