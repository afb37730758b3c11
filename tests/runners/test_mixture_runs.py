"""Mixtures and MLA under the whole engine: preemption, prefix caching and aborts change no token; what the
runner tells of experts is counted right.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cbviz as cb
from cbviz.config import EngineConfig
from cbviz.core.check import check
from cbviz.messages import RequestSpec, Sampling
from cbviz.model.decoder import Decoder, DecoderConfig
from cbviz.model.loader import LoadedModel, _weights
from cbviz.runners.torch_runner import TorchRunner

VOCAB = 61
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "tie_word_embeddings": True,
}
MLA: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": True,
}


def random_model(hf: dict[str, Any]) -> LoadedModel:
    c = DecoderConfig.from_hf(hf)
    g = torch.Generator().manual_seed(1)

    def w(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * (0.4 if len(shape) == 2 else 0.2) + (
            0 if len(shape) == 2 else 1
        )

    t: dict[str, Any] = {
        "inverse_frequencies": c.inverse_frequencies(),
        "embed": w(VOCAB, c.hidden_size),
        "norm": w(c.hidden_size),
    }
    for i in range(c.num_layers):
        p = f"layers.{i}."
        t |= {
            f"{p}attn_norm": w(c.hidden_size),
            f"{p}mlp_norm": w(c.hidden_size),
            f"{p}o": w(c.hidden_size, c.out_size),
        }
        if c.kv_lora_rank:
            t |= {
                f"{p}qkv": w(c.q_lora_rank + c.latent_size, c.hidden_size),
                f"{p}q_a_norm": w(c.q_lora_rank),
                f"{p}q_b": w(c.q_size, c.q_lora_rank),
                f"{p}kv_a_norm": w(c.kv_lora_rank),
                f"{p}kv_b": w(c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
            }
        else:
            t |= {
                f"{p}qkv": w(c.q_size + 2 * c.kv_size, c.hidden_size),
                f"{p}q_norm": w(c.head_dim),
                f"{p}k_norm": w(c.head_dim),
            }
        if i in c.sparse_layers:
            n, m = c.num_experts, c.moe_intermediate_size
            t |= {
                f"{p}router": w(n, c.hidden_size),
                f"{p}gate_up": w(n * 2 * m, c.hidden_size),
                f"{p}down": w(n * c.hidden_size, m),
            }
            if s := c.shared_intermediate_size:
                t |= {
                    f"{p}router_bias": w(n) - 1,
                    f"{p}shared_gate_up": w(2 * s, c.hidden_size),
                    f"{p}shared_down": w(c.hidden_size, s),
                }
        else:
            t |= {
                f"{p}gate_up": w(2 * c.intermediate_size, c.hidden_size),
                f"{p}down": w(c.hidden_size, c.intermediate_size),
            }
    return LoadedModel("tiny", "Tiny", c, _weights(c, t, "cpu"), None, (3,))


MODELS = {"moe": random_model(MOE), "mla": random_model(MLA)}


def session(model: str, requests: list[RequestSpec], **config: Any) -> cb.Session:
    fields = {
        "block_size": 4,
        "num_blocks": 80,
        "precision": "exact",
        "max_model_len": 64,
        "max_num_seqs": 4,
        **config,
    }
    return cb.Session(
        requests, runner=TorchRunner(MODELS[model], EngineConfig(**fields)), clock="modelled", **fields
    )


def requests(seed: int, num: int = 6) -> list[RequestSpec]:
    """Some begin alike, so that they share blocks; two arrive at every second step."""
    rng = random.Random(seed)
    common = rng.choices(range(4, VOCAB), k=11)
    return [
        RequestSpec(
            f"r{i}",
            tuple(common[: rng.choice((0, 8, 11))] + rng.choices(range(4, VOCAB), k=rng.randint(1, 12))),
            rng.randint(3, 14),
            arrival_step=1 + i // 2 * 2,
            priority=i % 3,
            sampling=Sampling(ignore_eos=True),
        )
        for i in range(num)
    ]


def alone(model: str, x: RequestSpec) -> list[int]:
    """The uninterrupted run: nobody else, room enough, nothing cached."""
    s = session(model, [x], enable_prefix_caching=False, num_blocks=40)
    s.run()
    return list(s.request(x.request_id).output_token_ids)


@pytest.mark.parametrize("model", ["moe", "mla"])
@given(
    seed=st.integers(0, 200),
    blocks=st.integers(15, 22),
    policy=st.sampled_from(["fcfs", "priority", "experts"]),
    abort=st.integers(0, 5),
    at=st.integers(2, 9),
)
@settings(max_examples=6)
def test_tokens_are_those_of_the_uninterrupted_run(
    model: str, seed: int, blocks: int, policy: str, abort: int, at: int
) -> None:
    """Preemption, prefix caching and an abort at once, checked after every step."""
    asked = requests(seed)
    s = session(model, asked, num_blocks=blocks, policy=policy, max_model_len=40)
    while not s.done:
        if s.engine.scheduler.step == at and f"r{abort}" in s.engine.scheduler.state.requests:
            s.abort(f"r{abort}")
        if s.step() is None:
            break
        check(s.engine.scheduler)
    for x in asked:
        got = list(s.request(x.request_id).output_token_ids)
        expected = alone(model, x)
        assert got == (expected[: len(got)] if x.request_id == f"r{abort}" else expected), x.request_id


@pytest.mark.parametrize("model", ["moe", "mla"])
def test_preemption_and_hits_really_happen_and_a_rewind_is_exact(model: str) -> None:
    s = session(model, requests(1, 8), num_blocks=13, max_model_len=40)
    s.run()
    m = cb.metrics(s.trace)
    assert m["num_preemptions"] > 0 and m["prefix_hit_tokens"] > 0
    ends = {r: list(s.request(r).output_token_ids) for r in s.request_ids}
    middle = len(s.trace) // 2
    b = s.fork(at=middle)
    b.run()
    assert (
        b.digest() == s.digest() and {r: list(b.request(r).output_token_ids) for r in b.request_ids} == ends
    )
    s.rewind(middle)
    s.run()
    assert {r: list(s.request(r).output_token_ids) for r in s.request_ids} == ends


def test_load_is_counted_from_the_real_choices() -> None:
    s = session("moe", requests(2), discipline="chunked")
    s.run()
    c, d = MODELS["moe"].config, Decoder(MODELS["moe"].config, MODELS["moe"].weights, s.runner.ops)
    for r in s.trace:
        tokens = sum(x.num_tokens for x in r.chunks)
        if not tokens:
            continue
        assert (
            r.expert_load is not None
            and r.expert_load[1] == []
            and [len(x) for x in r.expert_load] == [6, 0, 6]
        )
        assert all(sum(r.expert_load[i]) == tokens * c.num_experts_per_tok for i in c.sparse_layers)
        assert r.routed is not None and set(r.routed) == {x.request_id for x in r.chunks if x.sample}
        assert all(
            len(layers) == 2 and all(len(set(chosen)) == 2 for chosen in layers)
            for layers in r.routed.values()
        )
        touched = sum(n > 0 for layer in r.expert_load for n in layer)
        head = d.head_bytes if r.routed else 0
        assert (
            r.counted is not None
            and r.counted["weight_bytes"]
            == d.layer_bytes + head + tokens * d.embed_row_bytes + touched * 3 * 24 * 12 * 4
        )
    # a lone decode takes exactly the experts that its record says
    last = s.trace.record(len(s.trace))
    if len(last.chunks) == 1 and last.chunks[0].kind == "decode":
        (layers,) = (last.routed or {}).values()
        assert [[e for e, n in enumerate(row) if n] for row in (last.expert_load or []) if row] == [
            sorted(x) for x in layers
        ]


def test_mla_counts_latents() -> None:
    s = session("mla", requests(2), discipline="chunked")
    s.run()
    kept = 3 * (16 + 4) * 4
    assert s.runner.kv.bytes_per_token == kept
    for r in s.trace:
        if r.chunks and r.counted:
            seen = sum(x.start + x.num_tokens for x in r.chunks)
            assert r.counted["kv_bytes"] == kept * (seen + sum(x.num_tokens for x in r.chunks))


def test_dense_models_report_no_experts() -> None:
    dense = random_model({k: v for k, v in MOE.items() if "expert" not in k} | {"model_type": "qwen3"})
    runner = TorchRunner(dense, EngineConfig(block_size=4, num_blocks=40, precision="exact"))
    s = cb.Session(
        requests(0, 2), runner=runner, clock="modelled", block_size=4, num_blocks=40, precision="exact"
    )
    s.run()
    assert all(r.expert_load is None and r.routed is None for r in s.trace)
