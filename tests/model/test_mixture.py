"""Routing and experts, and MLA's two forms: the operators against plain arithmetic, and what must hold of a
mixture's pass.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cbviz.model import cpu_ops, ops
from cbviz.model.decoder import DecoderConfig
from cbviz.model.hub import ModelError
from cbviz.model.matrix import convert
from cbviz.model.ops import Batch, Router


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_router_by_hand() -> None:
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 3.0, 1.0]])
    p = scores.softmax(-1)
    weights, chosen = ops.route(scores, None, 2, Router())
    assert [sorted(c) for c in chosen.tolist()] == [[0, 1], [2, 3]]
    torch.testing.assert_close(weights[0], p[0, chosen[0]] / p[0, :2].sum())
    torch.testing.assert_close(
        weights, scores.gather(1, chosen).softmax(-1)
    )  # softmax over all, normalised = softmax over the chosen
    raw, _ = ops.route(scores, None, 2, Router(normalise=False, scale=3.0))
    torch.testing.assert_close(raw[1], 3 * p[1, chosen[1]])


def test_bias_chooses_and_does_not_weigh() -> None:
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    weights, chosen = ops.route(
        scores, torch.tensor([-9.0, 0, 0, 9.0]), 2, Router("sigmoid", normalise=False)
    )
    assert sorted(chosen[0].tolist()) == [1, 3]
    torch.testing.assert_close(weights[0], scores.sigmoid()[0, chosen[0]])


def test_groups_limit_the_choice() -> None:
    scores = torch.tensor([[9.0, 0.0, 5.0, 5.5, 4.0, 6.0]])  # groups (9 0) (5 5.5) (4 6)
    best = ops.route(scores, None, 3, Router(num_groups=3, top_groups=2, group_score="max"))[1][0].tolist()
    assert sorted(best) == [0, 4, 5]  # by their best: 9 and 6
    both = ops.route(scores, None, 3, Router("sigmoid", num_groups=3, top_groups=2, group_score="top2"))[1][
        0
    ].tolist()
    assert sorted(both) == [2, 3, 5]  # by their two best: the sigmoids of 5 + 5.5 and of 4 + 6


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 40])
def test_grouped_experts_equal_the_loop(num_tokens: int) -> None:
    experts, width, inner = 6, 16, 12
    x = rand(num_tokens, width)
    gate_up, down = rand(experts, 2 * inner, width, seed=1), rand(experts, width, inner, seed=2)
    weights, chosen = ops.route(rand(num_tokens, experts, seed=3), None, 2, Router())
    expected = torch.zeros_like(x)
    for t in range(num_tokens):
        for w, e in zip(weights[t], chosen[t], strict=True):
            g, u = (gate_up[e] @ x[t]).chunk(2)
            expected[t] += w * (down[e] @ (torch.nn.functional.silu(g) * u))
    assert ops.can_group("cpu", torch.float32, width, inner)
    for run in (ops.experts_loop, ops.experts_grouped, cpu_ops.experts):
        torch.testing.assert_close(run(x, weights, chosen, gate_up, down), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("precision", ["fast", "int8"])
def test_packed_experts_are_the_rounded_ones(precision: str) -> None:
    experts, width, inner = 5, 16, 12
    x = rand(9, width)
    stacks = [
        convert(rand(experts * n, m, seed=n), precision) for n, m in ((2 * inner, width), (width, inner))
    ]
    weights, chosen = ops.route(rand(9, experts, seed=3), None, 2, Router())
    expected = ops.experts_loop(x, weights, chosen, *(ops.pack_experts(s, experts) for s in stacks))
    got = cpu_ops.experts(x, weights, chosen, *(cpu_ops.pack_experts(s, experts) for s in stacks))
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=1e-2)


def test_the_three_forms_of_mla_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expanded and absorbed, with the blocks scattered, lengths mixed, and a padded row that must stay 0 or
    be left alone.
    """
    heads, plain, rope, value, rank, size = 3, 6, 4, 5, 8, 4
    layer = DecoderConfig.from_hf(tiny_config()).store(12, size).layers[0]
    layer = type(layer)(rand(12, 1, size, rank + rope, seed=4), torch.empty(0))
    layer = type(layer)(layer.k, layer.k[..., :rank])
    batch = Batch.build([[3, 7, 1], [9], [5, 2]], [1, 3, 5], [10, 3, 7], size, num_padding=2)
    q, kv_b = rand(11, heads, plain + rope, seed=5), rand(heads, plain + value, rank, seed=6)
    naive = ops.latent_attention(q, kv_b, layer, batch, 0.3)
    assert naive.shape == (11, heads, value) and not naive[9:].any() and naive[:9].abs().min() > 0
    torch.testing.assert_close(
        ops.latent_attention_absorbed(q, kv_b, layer, batch, 0.3), naive, atol=1e-5, rtol=1e-5
    )
    monkeypatch.setattr(
        torch, "empty", lambda *shape, **k: torch.full(shape, float("nan"), **k)
    )  # what is not written shows
    torch.testing.assert_close(
        cpu_ops.latent_attention(q, kv_b, layer, batch, 0.3), naive, atol=1e-5, rtol=1e-5
    )


def tiny_config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 6,
        "intermediate_size": 8,
        "vocab_size": 9,
        "max_position_embeddings": 64,
        "kv_lora_rank": 8,
        "q_lora_rank": None,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 5,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    } | changes


def test_config_is_kept_through_json() -> None:
    c = DecoderConfig.from_hf(tiny_config())
    assert (
        DecoderConfig.from_dict(c.to_dict()) == c
        and c.router.group_score == "top2"
        and c.sparse_layers == (1,)
    )
    old = {
        k: v
        for k, v in DecoderConfig.from_hf(
            {
                "model_type": "llama",
                "num_hidden_layers": 2,
                "hidden_size": 24,
                "num_attention_heads": 6,
                "intermediate_size": 8,
                "vocab_size": 9,
                "max_position_embeddings": 64,
            }
        )
        .to_dict()
        .items()
        if k not in ("router", "sparse_layers", "kv_lora_rank")
    }
    assert DecoderConfig.from_dict(old).is_plain


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, it must lie in 1..8"),
        ({"n_group": 3}, "n_group is 3, it must divide"),
        ({"num_experts_per_tok": 5}, "topk_group 2 leaves 4 experts"),
        ({"topk_group": 9}, "topk_group is 9"),
        ({"qk_rope_head_dim": 3, "qk_nope_head_dim": 5}, "qk_rope_head_dim is 3"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        DecoderConfig.from_hf(tiny_config(**changes))


def test_a_window_over_mla_is_refused(tiny: Any) -> None:
    with pytest.raises(ModelError, match="sliding_window is 4"):
        tiny("deepseek-v3").ours.decoder(ops.REFERENCE, window=4)


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_batch_mates_change_nothing(name: str, tiny: Any, feed: Any) -> None:
    """The same request alone and among others that route elsewhere: equal logits, and the same choices of
    experts.
    """
    decoder = tiny(name).ours.decoder(ops.pick("cpu", "cpu"))
    mine = random.Random(1).choices(range(97), k=30)
    others = [random.Random(i).choices(range(97), k=20 + i) for i in range(2, 8)]
    (alone,) = feed(decoder, [mine], block_size=4, pieces=lambda rng: 1)
    together = feed(
        decoder, [mine, *others], block_size=4, pieces=lambda rng: rng.randint(1, 9), num_padding=3
    )[0]
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
    assert together.argmax(-1).tolist() == alone.argmax(-1).tolist()


def test_the_pass_tells_who_went_where(tiny: Any) -> None:
    model = tiny("qwen3-moe").ours
    c = model.config
    batch = Batch.build([[1], [2]], [4, 3], [4, 3], 8, num_padding=1)
    model.decoder(ops.pick("cpu", "cpu")).forward(
        torch.arange(8), torch.tensor([0, 1, 2, 3, 0, 1, 2, 0]), batch, c.store(4, 8), torch.tensor([3, 6])
    )
    assert c.sparse_layers == (0, 2) and [tuple(x.shape) for x in batch.chosen] == [(8, 3), (8, 3)]
    assert all(len(set(row)) == 3 for x in batch.chosen for row in x.tolist())


def test_routers_keep_float32_in_every_precision(tiny: Any) -> None:
    model = tiny("mixtral").ours
    for precision in ("fast", "int8"):
        for mine, theirs in zip(model.weights_in(precision).layers, model.weights.layers, strict=True):
            assert (
                mine.router is not None
                and mine.router.dtype == torch.float32
                and torch.equal(mine.router, theirs.router)
            )


def test_parameters_are_counted(tiny: Any) -> None:
    for name in ("mixtral", "qwen3-moe", "olmoe", "deepseek-v2", "deepseek-v3"):
        model = tiny(name)
        spec, c = model.ours.spec(), model.ours.config
        extra = sum(
            b.numel() for k, b in model.judge.named_buffers() if k.endswith("e_score_correction_bias")
        )
        assert spec.params == sum(p.numel() for p in model.judge.parameters()) + extra
        looked_up = 0 if c.tied_embeddings else c.vocab_size * c.hidden_size
        idle = (
            (c.num_experts - c.num_experts_per_tok)
            * 3
            * c.hidden_size
            * c.moe_intermediate_size
            * len(c.sparse_layers)
        )
        assert spec.active_params == spec.params - looked_up - idle and spec.num_experts == c.num_experts
        assert (spec.attention == "mla") == bool(c.kv_lora_rank)
        assert c.store(2, 4).bytes_per_token == 4 * c.num_layers * (20 if c.kv_lora_rank else 2 * c.kv_size)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v3"])
def test_operators_of_any_device(name: str, tiny: Any, feed: Any) -> None:
    """The set that a card without Triton gets, here on the CPU: exact in float32, and in 16 bits within their
    rounding.
    """
    model = tiny(name)
    sequence = random.Random(4).choices(range(97), k=30)
    expected = model.expected(sequence)
    decoder = model.ours.decoder(ops.pick("torch", "cpu"))
    (got,) = feed(decoder, [sequence], block_size=4, pieces=lambda rng: rng.randint(1, 6))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    for kernels in ("torch", "cpu"):
        (half,) = feed(
            model.ours.decoder(ops.pick(kernels, "cpu"), precision="fast"),
            [sequence],
            block_size=4,
            pieces=lambda rng: 30,
        )
        # A rounded score may choose another expert for a token here and there: most agree.
        close = ((half - expected).abs().amax(dim=1) < 0.3).float().mean()
        assert half.dtype == torch.float32 and close > 0.6, (kernels, close)


def test_the_compiled_pass_says_why_it_steps_back(tiny: Any) -> None:
    kernels = ops.pick("cpu", "cpu")
    assert tiny("mixtral").ours.decoder(ops.REFERENCE).fallback == ""
    if kernels.whole is not None:
        assert (
            "does not know experts and MLA" in tiny("deepseek-v3").ours.decoder(kernels).fallback
            and tiny("llama").ours.decoder(kernels).fallback == ""
        )
        assert "does not know experts:" in tiny("olmoe").ours.decoder(kernels).fallback
