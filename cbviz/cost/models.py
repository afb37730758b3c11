"""Shapes of public models, with their sources; parameter counts computed from the shape.

Owns the table `MODELS` and the arithmetic of sizes (`complete`, `kv_bytes_per_token`). Knows no weights,
files or devices. The counts leave out biases, norms and vision parts, which is within 0.5 % of what the
authors publish for every row (`tests/cost/test_models.py` compares them with figures computed apart from this
code). Weights are at 16 bits unless a row says so.
"""

from __future__ import annotations

import dataclasses
import difflib
import re

from cbviz.config import ConfigError
from cbviz.specs import ModelSpec

LITGPT = (
    "Lightning-AI/litgpt litgpt/config.py @26857050 (Apache-2.0; its entries cite the Hugging Face "
    "config.json)"
)
AIC = "aiconfigurator-core 0.12.0 model_configs (Apache-2.0; copies of the Hugging Face config.json)"


def _attention_params(m: ModelSpec, q_lora_rank: int = 0) -> int:
    h, heads, d = m.hidden_size, m.num_heads, m.head_dim
    if m.attention != "mla":
        return 2 * h * heads * d + 2 * h * m.num_kv_heads * d
    # DeepSeek-V2, section 2.1: queries (low rank or full), the shared latent with its rotary part, its
    # expansion to keys and values, output.
    # The value size equals the non-rotary part of the key, as in every published MLA model.
    nope = d - m.qk_rope_head_dim
    queries = h * q_lora_rank + q_lora_rank * heads * d if q_lora_rank else h * heads * d
    return (
        queries
        + h * (m.kv_lora_rank + m.qk_rope_head_dim)
        + m.kv_lora_rank * heads * 2 * nope
        + heads * nope * h
    )


def _count_params(
    m: ModelSpec,
    *,
    shared: int = 0,
    dense_layers: int = 0,
    moe_every: int = 1,
    q_lora_rank: int = 0,
    learned_positions: bool = False,
) -> tuple[int, int]:
    """(all, active) parameters.

    `shared`: summed width of the shared experts. Active leaves out what is only looked up: input embeddings
    and learned positions.
    """
    h, mats = m.hidden_size, 3 if m.gated_ffn else 2
    head = m.vocab_size * h
    dense_ffn = mats * h * m.intermediate_size
    every_layer = m.num_layers * _attention_params(m, q_lora_rank)
    if m.num_experts:
        moe_layers = (m.num_layers - dense_layers) // moe_every
        every_layer += (m.num_layers - moe_layers) * dense_ffn + moe_layers * (
            mats * h * shared + h * m.num_experts
        )
        expert = moe_layers * mats * h * m.moe_intermediate_size
    else:
        every_layer += m.num_layers * dense_ffn
        expert = 0
    looked_up = (0 if m.tied_embeddings else head) + (m.max_context * h if learned_positions else 0)
    return (
        head + looked_up + every_layer + m.num_experts * expert,
        head + every_layer + m.num_experts_per_tok * expert,
    )


def complete(spec: ModelSpec) -> ModelSpec:
    """`spec` with `params` and `active_params` filled in from its shape where they are 0 (no shared experts,
    no dense layers in a MoE).
    """
    if spec.params and spec.active_params:
        return spec
    total, active = _count_params(spec)
    if spec.params and not spec.num_experts:
        active = spec.params - (0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size)
    return dataclasses.replace(spec, params=spec.params or total, active_params=spec.active_params or active)


def kv_bytes_per_token(spec: ModelSpec) -> float:
    """KV bytes of one token over all layers: 2 x layers x KV heads x head size x bytes an element; MLA:
    layers x (latent + rotary part). No saving from a window.
    """
    return spec.num_layers * kv_elements_per_layer(spec) * spec.kv_bytes_per_element


def kv_elements_per_layer(spec: ModelSpec) -> int:
    """Cached numbers of one token in one layer."""
    return (
        spec.kv_lora_rank + spec.qk_rope_head_dim
        if spec.attention == "mla"
        else 2 * spec.num_kv_heads * spec.head_dim
    )


def kv_variants(spec: ModelSpec) -> dict[str, float]:
    """KV bytes of one token if the same heads were cached otherwise: `mha` keys and values of every head;
    `gqa` of 8 heads shared by all (of its own where it has them); `mla` the latent, where the model has one.
    What the model really does is among them; of a window nothing is saved here.
    """
    value = spec.head_dim - spec.qk_rope_head_dim if spec.attention == "mla" else spec.head_dim
    each = spec.num_layers * (spec.head_dim + value) * spec.kv_bytes_per_element
    shared = spec.num_kv_heads if spec.attention == "gqa" else 8
    out = {"mha": each * spec.num_heads}
    if shared < spec.num_heads and spec.num_heads % shared == 0:
        out["gqa"] = each * shared
    if spec.attention == "mla":
        out["mla"] = kv_bytes_per_token(spec)
    return out


def _row(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    context: int,
    source: str,
    *,
    tied: bool = True,
    gated: bool = True,
    moe: tuple[int, int, int] = (0, 0, 0),
    shared: tuple[int, int] = (0, 0),
    moe_every: int = 1,
    dense_layers: int = 0,
    mla: tuple[int, int, int] = (0, 0, 0),
    window: int = 0,
    global_layers: int = 0,
    expert_bytes: float = 0.0,
    learned_positions: bool = False,
) -> ModelSpec:
    """One line of the table.

    `moe`: experts, experts a token, expert width; `shared`: how many, width; `mla`: query rank, latent rank,
    rotary size.
    """
    attention = "mla" if mla[1] else "mha" if heads == kv_heads else "gqa"
    spec = ModelSpec(
        name,
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab,
        context,
        tied_embeddings=tied,
        gated_ffn=gated,
        attention=attention,
        num_experts=moe[0],
        num_experts_per_tok=moe[1],
        moe_intermediate_size=moe[2],
        kv_lora_rank=mla[1],
        qk_rope_head_dim=mla[2],
        sliding_window=window,
        num_global_layers=global_layers,
        expert_bytes_per_param=expert_bytes,
        source=source,
    )
    total, active = _count_params(
        spec,
        shared=shared[0] * shared[1],
        dense_layers=dense_layers,
        moe_every=moe_every,
        q_lora_rank=mla[0],
        learned_positions=learned_positions,
    )
    return dataclasses.replace(spec, params=total, active_params=active)


# Llama 4: three of four layers attend within chunks of 8,192 tokens; the table has this as a window of that
# length, an upper bound of what such a layer reads.
# GPT-OSS: experts are released in MXFP4, about 0.53 bytes a weight. DeepSeek-V3 and R1: without the
# multi-token-prediction layer.
# Mistral v0.1 declares a window of 4,096; v0.2 and later dropped it.
MODELS: dict[str, ModelSpec] = {
    m.name: m
    for m in (
        _row("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, 8192, LITGPT),
        _row("SmolLM2-360M", 32, 960, 15, 5, 64, 2560, 49152, 8192, LITGPT),
        _row("SmolLM2-1.7B", 24, 2048, 32, 32, 64, 8192, 49152, 8192, LITGPT),
        _row(
            "GPT-2-124M",
            12,
            768,
            12,
            12,
            64,
            3072,
            50257,
            1024,
            "karpathy/nanoGPT model.py (MIT) + transformers GPT2Config defaults",
            gated=False,
            learned_positions=True,
        ),
        _row(
            "GPT-2-XL-1.5B",
            48,
            1600,
            25,
            25,
            64,
            6400,
            50257,
            1024,
            "karpathy/nanoGPT model.py (MIT)",
            gated=False,
            learned_positions=True,
        ),
        _row("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, 131072, LITGPT),
        _row("Llama-3.2-3B", 28, 3072, 24, 8, 128, 8192, 128256, 131072, LITGPT),
        _row("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256, 8192, LITGPT, tied=False),
        _row("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, 131072, LITGPT, tied=False),
        _row("Llama-3-70B", 80, 8192, 64, 8, 128, 28672, 128256, 8192, LITGPT, tied=False),
        _row("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256, 131072, LITGPT, tied=False),
        _row("Llama-3.1-405B", 126, 16384, 128, 8, 128, 53248, 128256, 131072, LITGPT, tied=False),
        _row("Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936, 32768, LITGPT),
        _row("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151936, 131072, LITGPT),
        _row("Qwen2.5-3B", 36, 2048, 16, 2, 128, 11008, 151936, 32768, LITGPT),
        _row("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, 131072, LITGPT, tied=False),
        _row("Qwen2.5-14B", 48, 5120, 40, 8, 128, 13824, 152064, 131072, LITGPT, tied=False),
        _row("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064, 131072, LITGPT, tied=False),
        _row("Qwen2.5-72B", 80, 8192, 64, 8, 128, 29568, 152064, 131072, LITGPT, tied=False),
        _row("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, 40960, LITGPT),
        _row("Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, 151936, 40960, LITGPT),
        _row("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, 40960, LITGPT),
        _row("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, 40960, LITGPT, tied=False),
        _row("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, 40960, LITGPT, tied=False),
        _row("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, 40960, LITGPT, tied=False),
        _row(
            "Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 6144, 151936, 40960, LITGPT, tied=False, moe=(128, 8, 768)
        ),
        _row(
            "Qwen3-235B-A22B",
            94,
            4096,
            64,
            4,
            128,
            12288,
            151936,
            40960,
            LITGPT,
            tied=False,
            moe=(128, 8, 1536),
        ),
        _row("Mistral-7B-v0.1", 32, 4096, 32, 8, 128, 14336, 32000, 4096, LITGPT, tied=False, window=4096),
        _row(
            "Mixtral-8x7B-v0.1",
            32,
            4096,
            32,
            8,
            128,
            14336,
            32000,
            32768,
            LITGPT,
            tied=False,
            moe=(8, 2, 14336),
        ),
        _row("Gemma-2-2B", 26, 2304, 8, 4, 256, 9216, 256000, 8192, LITGPT, window=4096, global_layers=13),
        _row("Gemma-2-9B", 42, 3584, 16, 8, 256, 14336, 256000, 8192, LITGPT, window=4096, global_layers=21),
        _row(
            "Gemma-2-27B", 46, 4608, 32, 16, 128, 36864, 256000, 8192, LITGPT, window=4096, global_layers=23
        ),
        _row("Gemma-3-1B", 26, 1152, 4, 1, 256, 6912, 262144, 131072, LITGPT, window=512, global_layers=4),
        _row("Gemma-3-4B", 34, 2560, 8, 4, 256, 10240, 262144, 131072, LITGPT, window=1024, global_layers=5),
        _row(
            "Gemma-3-12B", 48, 3840, 16, 8, 256, 15360, 262144, 131072, LITGPT, window=1024, global_layers=8
        ),
        _row(
            "Gemma-3-27B", 62, 5376, 32, 16, 128, 21504, 262144, 131072, LITGPT, window=1024, global_layers=10
        ),
        _row("Phi-3-mini-4k", 32, 3072, 32, 32, 96, 8192, 32064, 4096, LITGPT, tied=False, window=2048),
        _row("Phi-4", 40, 5120, 40, 10, 128, 17920, 100352, 16384, LITGPT, tied=False),
        _row("Phi-4-mini", 32, 3072, 24, 8, 128, 8192, 200064, 131072, LITGPT, window=262145),
        _row(
            "GPT-OSS-20B",
            24,
            2880,
            64,
            8,
            64,
            0,
            201088,
            131072,
            AIC,
            tied=False,
            moe=(32, 4, 2880),
            window=128,
            global_layers=12,
            expert_bytes=0.53,
        ),
        _row(
            "GPT-OSS-120B",
            36,
            2880,
            64,
            8,
            64,
            0,
            201088,
            131072,
            AIC,
            tied=False,
            moe=(128, 4, 2880),
            window=128,
            global_layers=18,
            expert_bytes=0.53,
        ),
        _row(
            "Llama-4-Scout-17B-16E",
            48,
            5120,
            40,
            8,
            128,
            16384,
            202048,
            10485760,
            AIC,
            tied=False,
            moe=(16, 1, 8192),
            shared=(1, 8192),
            window=8192,
            global_layers=12,
        ),
        _row(
            "Llama-4-Maverick-17B-128E",
            48,
            5120,
            40,
            8,
            128,
            16384,
            202048,
            1048576,
            AIC,
            tied=False,
            moe=(128, 1, 8192),
            shared=(1, 8192),
            moe_every=2,
            window=8192,
            global_layers=12,
        ),
        _row(
            "DeepSeek-V3",
            61,
            7168,
            128,
            128,
            192,
            18432,
            129280,
            163840,
            AIC,
            tied=False,
            moe=(256, 8, 2048),
            shared=(1, 2048),
            dense_layers=3,
            mla=(1536, 512, 64),
        ),
        _row(
            "DeepSeek-R1",
            61,
            7168,
            128,
            128,
            192,
            18432,
            129280,
            163840,
            AIC,
            tied=False,
            moe=(256, 8, 2048),
            shared=(1, 2048),
            dense_layers=3,
            mla=(1536, 512, 64),
        ),
        _row(
            "DeepSeek-V2-Lite",
            27,
            2048,
            16,
            16,
            192,
            10944,
            102400,
            163840,
            "the model's config.json as recalled, checked only by the parameter count",
            tied=False,
            moe=(64, 6, 1408),
            shared=(2, 1408),
            dense_layers=1,
            mla=(0, 512, 64),
        ),
        _row(
            "OLMoE-1B-7B",
            16,
            2048,
            16,
            16,
            128,
            0,
            50304,
            4096,
            (
                "transformers 5.24.0 OlmoeConfig (Apache-2.0), with expert_ffn 1024 as recalled (the class "
                "default says 2048); checked by the parameter count"
            ),
            tied=False,
            moe=(64, 8, 1024),
        ),
    )
}

OWN: dict[str, ModelSpec] = {
    m.name: m
    for m in (
        _row(
            "Tiny-MoE", 4, 192, 6, 2, 32, 160, 1024, 2048, "cbviz/model/tiny_moe/config.json", moe=(8, 2, 160)
        ),
    )
}
"""Shapes of the models that ship with this package and were published nowhere."""

_ALIASES = {
    "smollm2": "SmolLM2-135M",
    "gpt2": "GPT-2-124M",
    "gpt2-xl": "GPT-2-XL-1.5B",
    "llama-3.3-70b": "Llama-3.1-70B",
    "mistral-7b": "Mistral-7B-v0.1",
    "mixtral-8x7b": "Mixtral-8x7B-v0.1",
    "phi-3-mini": "Phi-3-mini-4k",
    "phi-4-14b": "Phi-4",
    "deepseek-v2-lite-chat": "DeepSeek-V2-Lite",
}
_BY_KEY = {**{n.lower(): n for n in (*MODELS, *OWN)}, **_ALIASES}


def get(name: str) -> ModelSpec:
    """The model called `name`; case, a hub's owner (`Qwen/...`) and endings such as `-Instruct` don't matter.

    Raises ConfigError with the nearest names.
    """
    key = name.strip().lower().rsplit("/", 1)[-1].removeprefix("meta-")
    short = re.sub(r"(-instruct|-chat|-it|-hf|-base)+$", "", key)
    for k in (key, short):
        if k in _BY_KEY:
            return MODELS.get(_BY_KEY[k]) or OWN[_BY_KEY[k]]
    near = list(dict.fromkeys(_BY_KEY[k] for k in difflib.get_close_matches(short, _BY_KEY, n=4, cutoff=0.5)))
    raise ConfigError(
        f"unknown model {name!r}; "
        + (f"nearest: {', '.join(near)}" if near else f"known: {', '.join(MODELS)}")
    )
