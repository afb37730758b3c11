"""Shapes of models and peaks of devices: what a cost model or a memory plan needs to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder, all that a cost model or a memory plan needs.

    `attention` is `mha`, `gqa` or `mla`; for MLA `kv_lora_rank` and `qk_rope_head_dim` size the cache. For
    MoE `num_experts` > 0.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    tied_embeddings: bool = True
    gated_ffn: bool = True
    attention: str = "gqa"
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    sliding_window: int = 0
    attention_sinks: int = 0
    """First tokens that every query sees in the layers with a window."""
    num_global_layers: int = 0
    """Layers that attend to everything although `sliding_window` is set (Gemma, GPT-OSS)."""
    params: int = 0
    """All parameters; 0: computed from the shape by `cost.models`."""
    active_params: int = 0
    """Parameters that one token passes through; 0: as `params`."""
    weight_bytes_per_param: float = 2.0
    expert_bytes_per_param: float = 0.0
    """Bytes of a routed expert's parameter where it differs (MXFP4 experts); 0: as `weight_bytes_per_param`.
    """
    kv_bytes_per_element: float = 2.0
    source: str = ""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Peak figures of one device, dense rates, SI units."""

    name: str
    memory_bytes: float
    bandwidth_bytes_s: float
    flops_s: float
    """Dense operations a second at 16 bits (or float32 for a CPU that was measured so)."""
    kind: str = "gpu"
    link_bytes_s: float = 0.0
    measured: bool = False
    """True when the peaks were measured on this machine, False for data-sheet figures."""
    source: str = ""


KV_CACHE_DTYPES = ("auto", "float32", "float16", "int8", "int4")


def kv_bytes_per_element(kv_cache_dtype: str, head_dim: int) -> float:
    """Bytes that one number of a key or value takes in the cache, what its token and head need beside the
    codes shared out: int8 a float16 scale, int4 a scale and a zero.

    >>> [kv_bytes_per_element(name, 64) for name in ("float32", "float16", "int8", "int4")]
    [4.0, 2.0, 1.03125, 0.5625]
    """
    return {"float32": 4.0, "float16": 2.0, "int8": 1.0 + 2.0 / head_dim, "int4": 0.5 + 4.0 / head_dim}[
        kv_cache_dtype
    ]
