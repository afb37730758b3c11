"""Every architecture against transformers, whole and in pieces."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cbviz.model import cpu_ops, ops
from cbviz.model.decoder import DecoderConfig
from cbviz.model.hub import ModelError


def op_set(name: str) -> ops.OpSet:
    """As `ops.pick`; `torch`: the CPU's operators where nothing can be compiled."""
    return cpu_ops.CPU if name == "torch" else ops.pick(name, "cpu")


DENSE = [
    "llama",
    "llama-biases",
    "llama-linear",
    "llama-llama3",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "qwen3",
]
MIXTURES = ["mixtral", "qwen3-moe", "qwen3-moe-raw", "olmoe"]
LATENT = [
    "deepseek-v2",
    "deepseek-v2-groups",
    "deepseek-v3",
    "deepseek-v3-halves",
    "deepseek-v2-yarn",
    "deepseek-v3-yarn",
]
ALL = DENSE + MIXTURES + LATENT


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(97), k=n)


@pytest.mark.parametrize("kernels", ["reference", "cpu", "torch"])
@pytest.mark.parametrize("name", ALL)
def test_whole_prompt_equals_transformers(name: str, kernels: str, tiny: Any, feed: Any) -> None:
    model = tiny(name)
    decoder = model.ours.decoder(op_set(kernels))
    sequence = ids(50)
    (logits,) = feed(decoder, [sequence], block_size=16, pieces=lambda rng: 50)
    expected = model.expected(sequence)
    assert expected.abs().max() > 1  # a model whose logits are all alike proves nothing
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name, block_size",
    [(n, b) for n in DENSE for b in (1, 7, 16)]
    + [(n, 7) for n in MIXTURES + LATENT]
    + [(n, b) for n in ("qwen3-moe", "deepseek-v3") for b in (1, 16)],
)
def test_pieces_mixed_in_one_batch_equal_transformers(
    name: str, block_size: int, tiny: Any, feed: Any
) -> None:
    """Chunks and decodes of several requests together, scattered blocks: the same logits as each request
    whole and alone.
    """
    model = tiny(name)
    sequences = [ids(n, seed=n) for n in (1, 5, 23, 40, 61)]
    for kernels, longest in (
        ("reference", 9),
        ("cpu", 9),
        ("cpu", 1),
        ("cpu", 33),
        ("torch", 9),
        ("torch", 33),
    ):
        decoder = model.ours.decoder(op_set(kernels))
        got = feed(
            decoder,
            sequences,
            block_size=block_size,
            pieces=lambda rng: rng.randint(1, longest),  # noqa: B023
            seed=longest,
            num_padding=2,
        )
        for logits, sequence in zip(got, sequences, strict=True):
            torch.testing.assert_close(logits, model.expected(sequence), atol=1e-4, rtol=1e-4)


def test_window_of_the_engine_is_laid_over_the_models_own(tiny: Any, feed: Any) -> None:
    sequence = ids(40)
    mistral = tiny("mistral-window")
    assert mistral.ours.decoder(ops.REFERENCE).windows == (9, 9, 9)
    assert mistral.ours.decoder(ops.REFERENCE, window=4).windows == (4, 4, 4)
    assert mistral.ours.decoder(ops.REFERENCE, window=20).windows == (9, 9, 9)
    assert tiny("qwen2-window").ours.decoder(ops.REFERENCE, window=8).windows == (8, 6, 6)
    full = tiny("llama").ours
    (wide,) = feed(full.decoder(ops.REFERENCE), [sequence], block_size=4, pieces=lambda rng: 40)
    for kernels in ("reference", "cpu", "torch"):
        (narrow,) = feed(
            full.decoder(op_set(kernels), window=8), [sequence], block_size=4, pieces=lambda rng: 40
        )
        (in_pieces,) = feed(
            full.decoder(op_set(kernels), window=8), [sequence], block_size=4, pieces=lambda rng: 7
        )
        torch.testing.assert_close(narrow[:8], wide[:8], atol=1e-4, rtol=1e-4)
        assert (narrow[8:] - wide[8:]).abs().max() > 0.01
        torch.testing.assert_close(in_pieces, narrow, atol=1e-4, rtol=1e-4)


def test_mlp_in_slabs_is_the_same(tiny: Any, feed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama-biases")
    monkeypatch.setattr("cbviz.model.decoder._MLP_ROWS", 7)
    (logits,) = feed(model.ours.decoder(cpu_ops.CPU), [ids(40)], block_size=16, pieces=lambda rng: 40)
    torch.testing.assert_close(logits, model.expected(ids(40)), atol=1e-4, rtol=1e-4)


def test_only_asked_rows_yield_logits(tiny: Any) -> None:
    decoder = tiny("llama").ours.decoder(ops.pick("cpu", "cpu"))
    c = decoder.config
    kv = ops_store(c)
    batch = ops.Batch.build([[1], [2]], [4, 3], [4, 3], 8)
    tokens, positions = torch.tensor(ids(7)), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    every = decoder.forward(tokens, positions, batch, kv, torch.arange(7))
    some = decoder.forward(tokens, positions, batch, kv, torch.tensor([3, 6]))
    torch.testing.assert_close(some, every[[3, 6]], atol=1e-5, rtol=1e-5)
    assert decoder.forward(tokens, positions, batch, kv, torch.tensor([], dtype=torch.int64)).shape == (0, 97)


def ops_store(c: DecoderConfig) -> Any:
    from cbviz.model.kv_store import KVStore

    return KVStore(c.num_layers, 4, c.num_kv_heads, 8, c.head_dim)


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("model_type", "gpt2", "model_type is 'gpt2'"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2.0}, "'yarn'"),
        ("num_attention_heads", 5, "multiple of num_kv_heads"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0"),
    ],
)
def test_what_is_not_built_is_refused_by_name(field: str, value: Any, said: str) -> None:
    good: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
        "max_position_embeddings": 64,
        "head_dim": 4,
    }
    DecoderConfig.from_hf(good).inverse_frequencies()
    with pytest.raises(ModelError, match=said):
        DecoderConfig.from_hf(good | {field: value}).inverse_frequencies()


def test_config_without_a_needed_field_names_it() -> None:
    with pytest.raises(ModelError, match="no 'hidden_size'"):
        DecoderConfig.from_hf({"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 6})


def test_parameters_are_counted(tiny: Any) -> None:
    for name in ("llama", "llama-biases", "qwen3"):
        model = tiny(name)
        assert model.ours.spec().params == sum(p.numel() for p in model.judge.parameters())
