"""The whole engine on the kernels: a tiny model, prompts in chunks, a shared prefix, a preemption; token for
token what the reference operators say.
"""

from __future__ import annotations

import torch
from cases.common import DEVICE

import cbviz
from cbviz.config import EngineConfig
from cbviz.messages import RequestSpec, Sampling
from cbviz.model.decoder import DecoderConfig, LayerWeights, Weights
from cbviz.model.graphs import InOrder
from cbviz.model.loader import LoadedModel
from cbviz.runners.torch_runner import TorchRunner


def tiny() -> LoadedModel:
    """Two layers of random weights, queries and keys normed, the second layer with a window."""
    c = DecoderConfig(
        architecture="qwen3",
        num_layers=2,
        hidden_size=24,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        intermediate_size=40,
        vocab_size=61,
        max_context=256,
        rms_norm_eps=1e-5,
        windows=(0, 9),
        qk_norm=True,
    )
    g = torch.Generator().manual_seed(3)

    def w(*shape: int) -> torch.Tensor:
        return (
            torch.randn(*shape, generator=g) * (0.4 if len(shape) == 2 else 0.2)
            + (0 if len(shape) == 2 else 1)
        ).to(DEVICE)

    layers = [
        LayerWeights(
            w(24),
            w(c.q_size + 2 * c.kv_size, 24),
            w(24, c.q_size),
            w(24),
            w(80, 24),
            w(24, 40),
            q_norm=w(10),
            k_norm=w(10),
        )
        for _ in range(2)
    ]
    embed = w(61, 24)
    return LoadedModel(
        "tiny",
        "Tiny",
        c,
        Weights(embed, layers, w(24), embed, c.inverse_frequencies().to(DEVICE)),
        None,
        (3,),
    )


def test_tokens_equal_the_reference() -> None:
    model = tiny()
    rng = torch.Generator().manual_seed(1)
    shared = torch.randint(4, 61, (9,), generator=rng).tolist()
    asked = [
        RequestSpec(
            f"r{i}",
            tuple(shared + torch.randint(4, 61, (n,), generator=rng).tolist()),
            5,
            arrival_step=i,
            sampling=Sampling(temperature=0.8 if i == 1 else 0.0, ignore_eos=True),
        )
        for i, n in enumerate((1, 4, 12))
    ]
    said = {}
    for kernels in ("reference", "triton"):
        config = EngineConfig(
            num_blocks=10,
            block_size=4,
            precision="exact",
            kernels=kernels,
            device=DEVICE,
            max_num_batched_tokens=14,
        )
        # In the interpreter too the kernels run as on a card: packed inputs, tokens chosen on the device,
        # passes over decodes with no lengths on the host.
        runner = TorchRunner(
            model, config, backend=InOrder() if DEVICE == "cpu" and kernels == "triton" else None
        )
        s = cbviz.Session(
            asked,
            runner=runner,
            num_blocks=10,
            block_size=4,
            precision="exact",
            kernels=kernels,
            max_num_batched_tokens=14,
            max_model_len=36,
        )
        s.run()
        said[kernels] = {i: s.request(i).output_token_ids for i in s.request_ids}
        if kernels == "triton":
            assert (
                runner.device_pass is not None
                and runner.device_pass.counts.replayed > 2
                and not runner.device_pass.counts.eager_decodes
            ), runner.device_pass
        assert (
            cbviz.metrics(s.trace)["num_preemptions"] > 0 and cbviz.metrics(s.trace)["prefix_hit_tokens"] > 0
        )
        s.close()
    assert said["triton"] == said["reference"]
    assert all(len(ids) == 5 for ids in said["triton"].values())
