"""On a real card: tokens, graphs against eager, no wait but one, and every operator.

Skipped where there is none; `kernels/device_check.py` does the same and measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cbviz.bench import op_suite
from cbviz.config import EngineConfig
from cbviz.messages import RequestSpec, Sampling
from cbviz.model import ops
from cbviz.runners.torch_runner import TorchRunner
from cbviz.session import Session
from tests.runners.test_device_pass import CASES, RUNNERS, play, specs
from tests.runners.test_torch_runner import MODEL

pytestmark = pytest.mark.gpu


def cuda(kernels: str = "auto", precision: str = "exact", eager: bool = False, **shape: Any) -> TorchRunner:
    return TorchRunner(
        MODEL,
        EngineConfig(
            **(
                {
                    "device": "cuda",
                    "kernels": kernels,
                    "precision": precision,
                    "enforce_eager": eager,
                    "num_blocks": 22,
                    "block_size": 4,
                }
                | shape
            )
        ),
    )


def outputs(s: Session) -> dict[str, Any]:
    return {i: s.request(i).output_token_ids for i in s.request_ids}


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "triton" and ops.pick("auto", "cuda").name != "triton":
        pytest.skip(ops.pick("auto", "cuda").about)
    return str(request.param)


@pytest.mark.parametrize("discipline", CASES)
@pytest.mark.parametrize("eager", [False, True])
def test_the_engine_says_on_a_card_what_it_says_on_the_cpu(
    discipline: str, eager: bool, kernels: str
) -> None:
    fields = {
        "num_blocks": 22,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "discipline": discipline.split()[0],
    } | CASES[discipline]
    shape = {k: v for k, v in fields.items() if k in RUNNERS}
    there = cuda(kernels, eager=eager, **shape)
    here = TorchRunner(MODEL, EngineConfig(kernels="cpu", block_size=4, precision="exact", **shape))
    a, b = (
        play(there, specs(3), device="cuda", enforce_eager=eager, **fields),
        play(here, specs(3), device="cpu", **fields),
    )
    assert outputs(a) == outputs(b)
    assert there.device_pass is not None and "a capture failed" not in there.device_pass.about, (
        there.device_pass.about
    )
    assert (there.device_pass.counts.replayed > 0) is not (eager or "speculative" in fields)
    assert all(r.device["busy_s"] > 0 for r in a.trace if r.chunks and r.device) and any(
        r.device for r in a.trace
    )


@pytest.fixture
def guard() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_a_step_waits_for_its_results_and_nothing_else(
    precision: str, kernels: str, request: pytest.FixtureRequest
) -> None:
    runner = cuda(kernels, precision, num_blocks=60)
    fields: dict[str, Any] = {
        "runner": runner,
        "precision": precision,
        "clock": "measured",
        "device": "cuda",
        "num_blocks": 60,
        "block_size": 4,
        "max_model_len": 64,
        "enable_prefix_caching": False,
    }
    warm = Session(specs(4), **fields)
    warm.run()  # captures and compiles, and waits for that
    runner.reset()
    request.getfixturevalue("guard")
    again = Session(specs(4), **fields)
    again.run()
    assert outputs(warm) == outputs(again)


def test_fast_weights_stay_in_16_bits_on_the_card_and_no_others_are_there(kernels: str) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    runner = cuda(kernels, "fast")
    assert (
        runner.decoder.weights.layers[0].qkv.dtype == torch.float16
        and runner.decoder.weights.layers[0].qkv.is_cuda
    )  # type: ignore[union-attr]
    d = runner.decoder
    assert torch.cuda.memory_allocated() - before < 1.5 * (
        d.layer_bytes + d.head_bytes + runner.kv.num_bytes
    ) + (4 << 20)
    assert MODEL.weights.norm.device.type == "cpu"


def test_a_request_alone_and_one_that_no_graph_serves(kernels: str) -> None:
    r = cuda(kernels, num_blocks=40)
    s = Session(
        [RequestSpec("a", (5, 6, 7), 9, arrival_step=1)],
        runner=r,
        device="cuda",
        precision="exact",
        clock="modelled",
        num_blocks=40,
        block_size=4,
    )
    s.run()
    assert (
        r.device_pass is not None
        and r.device_pass.counts.eager == 1
        and r.device_pass.counts.eager_decodes == 0
    )  # the prompt, and nothing else


def test_a_step_and_a_request_are_held_against_themselves_alone(kernels: str) -> None:
    runner = cuda(kernels)
    step = runner.step_difference([(list(range(1, 9)), 4, 4), (list(range(3, 9)), 5, 1)], 1)
    assert step.ops and step.rows == (5, 1) and step.logits.largest < 1e-3
    ids = list(range(1, 8))
    found = runner.alone("a", ids, [(0, 6), (6, 1)], Sampling(), [6, 7], [1, 2])
    drawn = runner.alone("a", ids, [(0, 6), (6, 1)], Sampling(temperature=0.8, top_k=5), [6, 7], [1, 2])
    assert len(found.tokens) == len(drawn.tokens) == 2


@pytest.mark.parametrize("kind", list(op_suite.TOLERANCE))
def test_every_operator(kind: torch.dtype, kernels: str) -> None:
    failed = [r for r in op_suite.run(kernels, "cuda", (kind,)) if not r["ok"]]
    assert not failed
