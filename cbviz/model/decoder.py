"""One decoder for the Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3.

Owns the architecture: its shape (`DecoderConfig`), its weights (`Weights`), and one forward pass over a packed batch and a paged
KV store. Knows no requests: it is given token ids, positions and a `Batch`, and returns logits of the rows asked for. What an
operator does is `ops`; where weights come from is `loader`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from cbviz.config import ModelSpec
from cbviz.model.hub import ModelError
from cbviz.model.kv_store import KVStore
from cbviz.model.matrix import Matrix, num_bytes, rows
from cbviz.model.ops import Batch, OpSet

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_MLP_ROWS = 1024
"""Tokens whose MLP is computed at once."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a decoder, as its weights need it. Names are Hugging Face's."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    rms_norm_eps: float
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, float | str] = field(default_factory=dict)
    """Empty; or `rope_type` `linear` with `factor`; or `llama3` with its four figures."""
    tied_embeddings: bool = True
    qk_norm: bool = False
    """RMS norm of each query and key head before rotation (Qwen3)."""
    windows: tuple[int, ...] = ()
    """Attention window of each layer, 0: full attention."""

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ModelError(f"architecture is {self.architecture!r}; built are {', '.join(ARCHITECTURES)}")
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size", "max_context"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}, the least is 1")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ModelError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}, and head_dim {self.head_dim} even")
        if len(self.windows) != self.num_layers:
            raise ModelError(f"windows names {len(self.windows)} layers, the model has {self.num_layers}")

    @classmethod
    def from_hf(cls, c: Mapping[str, Any]) -> DecoderConfig:
        """From a config.json. Raises ModelError naming a field that asks for what is not built."""
        kind = c.get("model_type", "")
        if kind not in ARCHITECTURES:
            raise ModelError(f"model_type is {kind!r}; built are {', '.join(ARCHITECTURES)}")
        if (act := c.get("hidden_act", "silu")) != "silu":
            raise ModelError(f"hidden_act is {act!r}; only 'silu' is built")
        if c.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ModelError(f"partial_rotary_factor is {c['partial_rotary_factor']}; only 1 is built")
        try:
            heads, layers = c["num_attention_heads"], c["num_hidden_layers"]
            rope = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
            theta = float(rope.pop("rope_theta", None) or c.get("rope_theta") or 10_000.0)
            rope.setdefault("rope_type", rope.pop("type", "default"))
            if rope["rope_type"] == "llama3":
                rope.setdefault("original_max_position_embeddings", c["max_position_embeddings"])
            return cls(architecture=kind, num_layers=layers, hidden_size=c["hidden_size"], num_heads=heads, num_kv_heads=c.get("num_key_value_heads") or heads,
                       head_dim=c.get("head_dim") or c["hidden_size"] // heads, intermediate_size=c["intermediate_size"], vocab_size=c["vocab_size"],
                       max_context=c["max_position_embeddings"], rms_norm_eps=c.get("rms_norm_eps", 1e-6), rope_theta=theta,
                       rope_scaling={} if rope["rope_type"] == "default" else rope, tied_embeddings=bool(c.get("tie_word_embeddings", False)), qk_norm=kind == "qwen3",
                       windows=_hf_windows(kind, c, layers))
        except KeyError as e:
            raise ModelError(f"config.json has no {e.args[0]!r}") from e

    @classmethod
    def from_gguf(cls, m: Mapping[str, Any], *, tied: bool, vocab_size: int) -> DecoderConfig:
        """From a GGUF file's metadata. Raises ModelError naming a key that asks for what is not built."""
        arch = m.get("general.architecture", "")
        if arch not in ARCHITECTURES:
            raise ModelError(f"general.architecture is {arch!r}; built are {', '.join(ARCHITECTURES)}")
        try:
            heads, layers, hidden = m[f"{arch}.attention.head_count"], m[f"{arch}.block_count"], m[f"{arch}.embedding_length"]
            head_dim = m.get(f"{arch}.attention.key_length", hidden // heads)
            scaling = m.get(f"{arch}.rope.scaling.type", "none")
            if scaling not in ("none", "linear"):
                raise ModelError(f"{arch}.rope.scaling.type is {scaling!r}; built are none, linear, and llama3 by its tensor of factors")
            if m.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
                raise ModelError(f"{arch}.rope.dimension_count is {m[f'{arch}.rope.dimension_count']}; only the whole head, {head_dim}, is built")
            return cls(architecture=arch, num_layers=layers, hidden_size=hidden, num_heads=heads, num_kv_heads=m.get(f"{arch}.attention.head_count_kv", heads), head_dim=head_dim,
                       intermediate_size=m[f"{arch}.feed_forward_length"], vocab_size=vocab_size, max_context=m[f"{arch}.context_length"],
                       rms_norm_eps=m[f"{arch}.attention.layer_norm_rms_epsilon"], rope_theta=m.get(f"{arch}.rope.freq_base", 10_000.0),
                       rope_scaling={"rope_type": "linear", "factor": m[f"{arch}.rope.scaling.factor"]} if scaling == "linear" else {},
                       tied_embeddings=tied, qk_norm=arch == "qwen3", windows=(int(m.get(f"{arch}.attention.sliding_window", 0)),) * layers)
        except KeyError as e:
            raise ModelError(f"the GGUF file's metadata has no {e.args[0]!r}") from e

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> DecoderConfig:
        return cls(**{**d, "windows": tuple(d["windows"])})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def inverse_frequencies(self) -> torch.Tensor:
        """RoPE's frequencies [D/2], scaled as the config says (linear: position interpolation; llama3: long waves slower, short ones kept). Radians a position."""
        freq = 1.0 / (self.rope_theta ** (torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim))
        kind = self.rope_scaling.get("rope_type", "default")
        if kind == "default":
            return freq
        factor = float(self.rope_scaling["factor"])
        if kind == "linear":
            return freq / factor
        if kind == "llama3":
            low, high, original = (float(self.rope_scaling[k]) for k in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
            waves = original * freq / (2 * math.pi)   # full turns inside the original context
            keep = ((waves - low) / (high - low)).clamp(0, 1)
            return freq * (keep + (1 - keep) / factor)
        raise ModelError(f"rope_scaling has rope_type {kind!r}; built are default, linear, llama3")

    def spec(self, name: str, params: int, precision: str = "exact") -> ModelSpec:
        """What cost models and planners need: sizes as this engine holds them in that precision."""
        return ModelSpec(name=name, num_layers=self.num_layers, hidden_size=self.hidden_size, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
                         intermediate_size=self.intermediate_size, vocab_size=self.vocab_size, max_context=self.max_context, tied_embeddings=self.tied_embeddings,
                         attention="mha" if self.num_heads == self.num_kv_heads else "gqa", sliding_window=max(self.windows),
                         num_global_layers=self.windows.count(0) if any(self.windows) else 0, params=params,
                         weight_bytes_per_param={"exact": 4.0, "fast": 2.0, "int8": 1.0}[precision], kv_bytes_per_element=4.0 if precision == "exact" else 2.0,
                         source="counted from the loaded weights")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights: matrices `[out, in]` in any form, vectors float32."""

    attn_norm: torch.Tensor
    qkv: Matrix
    """[(H + 2 H_kv) D, C]: queries, keys, values below one another."""
    o: Matrix
    mlp_norm: torch.Tensor
    gate_up: Matrix
    """[2 I, C]: gate, then up."""
    down: Matrix
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights. With tied embeddings `head` is the same tensor as `embed`."""

    embed: Matrix
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: Matrix
    inverse_frequencies: torch.Tensor


class Decoder:
    """The forward pass. Holds weights and operators, no state of any sequence."""

    def __init__(self, config: DecoderConfig, weights: Weights, ops: OpSet, window: int = 0) -> None:
        """`window`: attention window laid over the model's own in every layer (the smaller counts), 0: the model's own only."""
        self.config = config
        self.weights = weights
        self.ops = ops
        self.windows = tuple(min(w, window) if w and window else w or window for w in config.windows)
        tensors: list[Matrix] = [t for layer in weights.layers for t in (getattr(layer, n) for n in LayerWeights.__slots__) if t is not None]
        self.layer_params = sum(t.numel() for t in tensors) + weights.norm.numel()
        """Parameters that every token passes through, head and embedding aside."""
        self.layer_matmul_params = sum(t.numel() for t in tensors if len(t.shape) == 2)
        self.layer_bytes = sum(map(num_bytes, [*tensors, weights.norm]))
        """Bytes that `layer_params` are held in."""
        self.head_bytes = num_bytes(weights.head)
        self.embed_row_bytes = num_bytes(weights.embed) // config.vocab_size
        self.num_params = self.layer_params + weights.embed.numel() + (0 if config.tied_embeddings else weights.head.numel())
        self._whole = ops.whole(self) if ops.whole is not None else None
        self._packed = self._pack() if self._whole is None else weights

    def _pack(self) -> Weights:
        def pack(layer: LayerWeights) -> LayerWeights:
            return replace(layer, **{f: self.ops.pack(getattr(layer, f)) for f in ("qkv", "o", "gate_up", "down")})

        return replace(self.weights, layers=[pack(layer) for layer in self.weights.layers], head=self.ops.pack(self.weights.head))

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: Batch, kv: KVStore, sample_rows: torch.Tensor) -> torch.Tensor:
        """Computes all tokens, writes their KV, returns logits.

        token_ids, positions: [T] int64, sequences in the batch's order, padding last. sample_rows: [R] rows of T. Returns [R, vocab] float32.
        """
        if self._whole is not None:
            return self._whole(token_ids, positions, batch, kv, sample_rows)
        c, w, ops = self.config, self._packed, self.ops
        angles = positions.float()[:, None] * w.inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        num_tokens, scale = len(token_ids), c.head_dim**-0.5
        residual = rows(w.embed, token_ids)
        x = ops.rms_norm(residual, w.layers[0].attn_norm, c.rms_norm_eps)
        for i, layer in enumerate(w.layers):
            qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
            if layer.q_norm is not None and layer.k_norm is not None:
                q = ops.rms_norm(qkv[:, :c.q_size].reshape(num_tokens, c.num_heads, c.head_dim), layer.q_norm, c.rms_norm_eps)
                k = ops.rms_norm(qkv[:, c.q_size:c.q_size + c.kv_size].reshape(num_tokens, c.num_kv_heads, c.head_dim), layer.k_norm, c.rms_norm_eps)
                heads = torch.cat((q, k), dim=1)
            else:
                heads = qkv[:, :c.q_size + c.kv_size].view(num_tokens, c.num_heads + c.num_kv_heads, c.head_dim)
            turned = ops.rope(heads, cos, sin)
            v = qkv[:, c.q_size + c.kv_size:].view(num_tokens, c.num_kv_heads, c.head_dim)
            # All KV of the layer is in place before anybody attends: a sequence may use blocks that another computes in this step.
            ops.write_kv(turned[:, c.num_heads:], v, kv.layers[i], batch)
            y = ops.attention(turned[:, :c.num_heads], kv.layers[i], batch, scale, self.windows[i])
            y = ops.linear(y.reshape(num_tokens, c.q_size), layer.o, layer.o_bias)
            x, residual = ops.add_rms_norm(y, residual, layer.mlp_norm, c.rms_norm_eps)
            # Rows of the MLP are independent: slabs bound its memory, the largest of a step.
            slabs = [ops.linear(ops.silu_mul(ops.linear(s, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias) for s in x.split(_MLP_ROWS)]
            y = slabs[0] if len(slabs) == 1 else torch.cat(slabs)
            if i + 1 == c.num_layers:
                # Only rows that sample go through the last norm and the head.
                x, _ = ops.add_rms_norm(y[sample_rows], residual[sample_rows], w.norm, c.rms_norm_eps)
            else:
                x, residual = ops.add_rms_norm(y, residual, w.layers[i + 1].attn_norm, c.rms_norm_eps)
        if not len(sample_rows):
            return torch.empty(0, c.vocab_size, device=x.device)
        return ops.linear(x, w.head, None)


def _hf_windows(kind: str, c: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    window = c.get("sliding_window") or 0
    if not window or kind == "llama" or (kind.startswith("qwen") and not c.get("use_sliding_window", False)):
        return (0,) * layers
    if types := c.get("layer_types"):
        return tuple(window if t == "sliding_attention" else 0 for t in types)
    if kind.startswith("qwen"):
        return tuple(window if i >= c.get("max_window_layers", layers) else 0 for i in range(layers))
    return (window,) * layers
