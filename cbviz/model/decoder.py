"""One decoder: the Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3), mixtures of experts (Mixtral,
Qwen3-MoE, OLMoE) and MLA (DeepSeek-V2, V3).

Owns the architecture: its shape (`DecoderConfig`), its weights (`Weights`), and one forward pass over a
packed batch and a paged KV store. Knows no requests: it is given token ids, positions and a `Batch`, and
returns logits of the rows asked for. What an operator does is `ops`; where weights come from is `loader`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch

from cbviz.config import shown
from cbviz.model.hub import ModelError
from cbviz.model.kv_store import KVLayer, KVStore
from cbviz.model.matrix import Matrix, dense, num_bytes, rows
from cbviz.model.ops import Batch, OpSet, Router, write_latent
from cbviz.specs import ModelSpec

ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
)
_GGUF = ("llama", "mistral", "qwen2", "qwen3")
_MLP_ROWS = 1024
"""Tokens whose MLP is computed at once."""
_LATENT_EPS = 1e-6
"""Of the norms inside MLA: fixed in DeepSeek's code, whatever rms_norm_eps says."""


MOST = {
    "num_layers": 2000,
    "hidden_size": 1 << 20,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 16,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 24,
    "max_context": 1 << 30,
    "num_experts": 1 << 14,
}
"""Greatest sizes of a model: far beyond those there are, and asked before anything of that size is made."""


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
    """Empty; or `rope_type` `linear` with `factor`; or `llama3` with its four figures; or, for MLA, `yarn`
    with its own.
    """
    tied_embeddings: bool = True
    qk_norm: bool = False
    """RMS norm of each query and key head before rotation (Qwen3)."""
    windows: tuple[int, ...] = ()
    """Attention window of each layer, 0: full attention."""
    qk_norm_whole: bool = False
    """RMS norm over all query heads together, and all key heads (OLMoE)."""
    clip_qkv: float = 0.0
    """Queries, keys and values are held within plus and minus this (OLMoE); 0: not."""
    num_experts: int = 0
    """Routed experts of a sparse layer; 0: every layer is dense."""
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    sparse_layers: tuple[int, ...] = ()
    """The layers that have experts; the others have an MLP of `intermediate_size`."""
    router: Router = field(default_factory=Router)
    shared_intermediate_size: int = 0
    """Width of the expert that every token passes through beside the routed ones; 0: none."""
    kv_lora_rank: int = 0
    """MLA: numbers of the latent d_c that stands for a token's keys and values; 0: no MLA."""
    q_lora_rank: int = 0
    """MLA: rank of the queries' own compression; 0: not compressed."""
    qk_rope_head_dim: int = 0
    """MLA: numbers of a query's and of the shared key's rotated part; the last of `head_dim`."""
    v_head_dim: int = 0
    """MLA: numbers of a value head."""
    rope_interleave: bool = False
    """MLA: the source has a rotated pair side by side; in the engine's layout its halves stand apart."""

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ModelError(f"architecture is {self.architecture!r}; built are {', '.join(ARCHITECTURES)}")
        for name in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "max_context",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ModelError(f"{name} must be a whole number, got {shown(value)}")
            if not 1 <= value <= MOST[name]:
                raise ModelError(f"{name} is {shown(value)}, it must lie in 1..{MOST[name]}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ModelError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}, and "
                f"head_dim {self.head_dim} even"
            )
        if len(self.windows) != self.num_layers:
            raise ModelError(f"windows names {len(self.windows)} layers, the model has {self.num_layers}")
        if self.num_experts:
            if self.num_experts > MOST["num_experts"]:
                raise ModelError(
                    f"num_experts is {shown(self.num_experts)}, the most is {MOST['num_experts']}"
                )
            if not 1 <= self.num_experts_per_tok <= self.num_experts:
                raise ModelError(
                    f"num_experts_per_tok is {self.num_experts_per_tok}, it must lie in "
                    f"1..{self.num_experts}, the number of experts"
                )
            if self.num_experts % self.router.num_groups:
                raise ModelError(
                    f"n_group is {self.router.num_groups}, it must divide the number of experts, "
                    f"{self.num_experts}"
                )
            if (
                limit := self.num_experts // self.router.num_groups * self.router.top_groups
            ) < self.num_experts_per_tok:
                raise ModelError(
                    f"num_experts_per_tok is {self.num_experts_per_tok}, but topk_group "
                    f"{self.router.top_groups} leaves {limit} experts to choose from"
                )
            if self.moe_intermediate_size < 1:
                raise ModelError(f"moe_intermediate_size is {self.moe_intermediate_size}, the least is 1")
        if self.kv_lora_rank:
            if (
                not 0 < self.qk_rope_head_dim < self.head_dim
                or self.qk_rope_head_dim % 2
                or self.v_head_dim < 1
            ):
                raise ModelError(
                    f"qk_rope_head_dim is {self.qk_rope_head_dim} and v_head_dim {self.v_head_dim}: "
                    f"the first must be even and below the query head's {self.head_dim}, the second above 0"
                )
            if any(self.windows):
                raise ModelError("a sliding window together with MLA is not built")

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
        if (bits := c.get("quantization_config")) is not None:
            raise ModelError(
                f"quantization_config is {bits!s:.80}; weights in float32, float16 and bfloat16 are read"
            )
        try:
            heads, layers = (
                _size("num_attention_heads", c["num_attention_heads"], "num_heads"),
                _size("num_hidden_layers", c["num_hidden_layers"], "num_layers"),
            )
            rope = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
            theta = float(rope.pop("rope_theta", None) or c.get("rope_theta") or 10_000.0)
            rope.setdefault("rope_type", rope.pop("type", "default"))
            if rope["rope_type"] == "llama3":
                rope.setdefault("original_max_position_embeddings", c["max_position_embeddings"])
            latent = _hf_latent(c) if kind.startswith("deepseek") else {}
            head_dim = latent.pop("head_dim", None) or c.get("head_dim") or c["hidden_size"] // heads
            kv_heads = heads if latent else c.get("num_key_value_heads") or heads
            return cls(
                architecture=kind,
                num_layers=layers,
                hidden_size=c["hidden_size"],
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                intermediate_size=c["intermediate_size"],
                vocab_size=c["vocab_size"],
                max_context=c["max_position_embeddings"],
                rms_norm_eps=c.get("rms_norm_eps", 1e-6),
                rope_theta=theta,
                rope_scaling={} if rope["rope_type"] == "default" else rope,
                tied_embeddings=bool(c.get("tie_word_embeddings", False)),
                qk_norm=kind in ("qwen3", "qwen3_moe"),
                windows=_hf_windows(kind, c, layers),
                qk_norm_whole=kind == "olmoe",
                clip_qkv=float(c.get("clip_qkv") or 0.0),
                **_hf_experts(kind, c, layers),
                **latent,
            )
        except KeyError as e:
            raise ModelError(f"config.json has no {e.args[0]!r}") from e

    @classmethod
    def from_gguf(cls, m: Mapping[str, Any], *, tied: bool, vocab_size: int) -> DecoderConfig:
        """From a GGUF file's metadata. Raises ModelError naming a key that asks for what is not built."""
        arch = m.get("general.architecture", "")
        if arch not in _GGUF:
            raise ModelError(
                f"general.architecture is {arch!r}; built from GGUF are {', '.join(_GGUF)}. Mixtures of "
                "experts and MLA are read from a folder with safetensors."
            )
        try:
            heads, layers, hidden = (
                _size(f"{arch}.{key}", m[f"{arch}.{key}"], name)
                for key, name in (
                    ("attention.head_count", "num_heads"),
                    ("block_count", "num_layers"),
                    ("embedding_length", "hidden_size"),
                )
            )
            head_dim = m.get(f"{arch}.attention.key_length", hidden // heads)
            scaling = m.get(f"{arch}.rope.scaling.type", "none")
            if scaling not in ("none", "linear"):
                raise ModelError(
                    f"{arch}.rope.scaling.type is {scaling!r}; built are none, linear, and llama3 by its "
                    "tensor of factors"
                )
            if m.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
                raise ModelError(
                    f"{arch}.rope.dimension_count is {m[f'{arch}.rope.dimension_count']}; only the whole "
                    f"head, {head_dim}, is built"
                )
            return cls(
                architecture=arch,
                num_layers=layers,
                hidden_size=hidden,
                num_heads=heads,
                num_kv_heads=m.get(f"{arch}.attention.head_count_kv", heads),
                head_dim=head_dim,
                intermediate_size=m[f"{arch}.feed_forward_length"],
                vocab_size=vocab_size,
                max_context=m[f"{arch}.context_length"],
                rms_norm_eps=m[f"{arch}.attention.layer_norm_rms_epsilon"],
                rope_theta=m.get(f"{arch}.rope.freq_base", 10_000.0),
                rope_scaling={"rope_type": "linear", "factor": m[f"{arch}.rope.scaling.factor"]}
                if scaling == "linear"
                else {},
                tied_embeddings=tied,
                qk_norm=arch == "qwen3",
                windows=(int(m.get(f"{arch}.attention.sliding_window", 0)),) * layers,
            )
        except KeyError as e:
            raise ModelError(f"the GGUF file's metadata has no {e.args[0]!r}") from e

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> DecoderConfig:
        """What `to_dict` made, also an older version's, which lacks the newer fields."""
        return cls(
            **{
                **d,
                "windows": tuple(d["windows"]),
                "sparse_layers": tuple(d.get("sparse_layers", ())),
                "router": Router(**d.get("router", {})),
            }
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qk_nope_head_dim(self) -> int:
        """MLA: numbers of a query head that are not rotated."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def latent_size(self) -> int:
        """MLA: numbers kept of a token in a layer, d_c + d_rope."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def out_size(self) -> int:
        """Numbers of all heads' attention output together."""
        return self.num_heads * (self.v_head_dim if self.kv_lora_rank else self.head_dim)

    @property
    def is_plain(self) -> bool:
        """No experts and no MLA: what a pass written as one call knows."""
        return not (self.num_experts or self.kv_lora_rank or self.qk_norm_whole or self.clip_qkv)

    def store(
        self,
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> KVStore:
        """An empty KV store of this model's layout."""
        if self.kv_lora_rank and not dtype.is_floating_point:
            raise ModelError(
                f"{self.architecture} has MLA: its latents are kept in 16 or 32 bits, codes of 8 and 4 "
                "bits are not built for them"
            )
        heads, dim = (1, self.latent_size) if self.kv_lora_rank else (self.num_kv_heads, self.head_dim)
        return KVStore(self.num_layers, num_blocks, heads, block_size, dim, device, dtype, self.kv_lora_rank)

    def inverse_frequencies(self) -> torch.Tensor:
        """RoPE's frequencies [D/2] (MLA: of the rotated part), scaled as the config says (linear: position
        interpolation; llama3: long waves slower). Radians a position.
        """
        dim = self.qk_rope_head_dim or self.head_dim
        freq = 1.0 / (self.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        kind = self.rope_scaling.get("rope_type", "default")
        if kind == "default":
            return freq
        factor = float(self.rope_scaling["factor"])
        if kind == "linear":
            return freq / factor
        if kind == "llama3":
            low, high, original = (
                float(self.rope_scaling[k])
                for k in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            )
            waves = original * freq / (2 * math.pi)  # full turns inside the original context
            keep = ((waves - low) / (high - low)).clamp(0, 1)
            return freq * (keep + (1 - keep) / factor)
        if kind == "yarn" and self.kv_lora_rank:
            # Fast waves keep their frequency, slow ones are stretched by the factor, with a ramp between
            # (YaRN, section 3.2).
            fast, slow, original = (
                float(self.rope_scaling.get(k) or d)
                for k, d in (
                    ("beta_fast", 32),
                    ("beta_slow", 1),
                    ("original_max_position_embeddings", self.max_context),
                )
            )
            low, high = (
                dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.rope_theta))
                for turns in (fast, slow)
            )
            first, last = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
            stretched = ((torch.arange(dim // 2).float() - first) / max(last - first, 0.001)).clamp(0, 1)
            return freq * (1 - stretched) + freq / factor * stretched
        raise ModelError(
            f"rope_scaling has rope_type {kind!r}; built are default, linear, llama3, and yarn for MLA"
        )

    def _yarn(self, of: str) -> float:
        """YaRN's correction of the attention's temperature, 0.1 m ln(factor) + 1 with m the config's `of`; 1
        without YaRN.
        """
        if self.rope_scaling.get("rope_type") != "yarn" or float(self.rope_scaling["factor"]) <= 1:
            return 1.0
        return (
            0.1 * float(self.rope_scaling.get(of) or 0.0) * math.log(float(self.rope_scaling["factor"])) + 1.0
        )

    @property
    def rope_factor(self) -> float:
        """By what cosines and sines are multiplied: YaRN's mscale over mscale_all_dim; 1 without it."""
        if self.rope_scaling.get("mscale") and self.rope_scaling.get("mscale_all_dim"):
            return self._yarn("mscale") / self._yarn("mscale_all_dim")
        return (
            0.1 * math.log(max(1.0, float(self.rope_scaling["factor"]))) + 1.0
            if self.rope_scaling.get("rope_type") == "yarn"
            else 1.0
        )

    @property
    def score_scale(self) -> float:
        """By what scores are multiplied before the softmax."""
        return self.head_dim**-0.5 * self._yarn("mscale_all_dim") ** 2

    def spec(self, name: str, params: int, precision: str = "exact") -> ModelSpec:
        """What cost models and planners need: sizes as this engine holds them in that precision."""
        expert = 3 * self.hidden_size * self.moe_intermediate_size * len(self.sparse_layers)
        looked_up = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        return ModelSpec(
            name=name,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            tied_embeddings=self.tied_embeddings,
            attention="mla" if self.kv_lora_rank else "mha" if self.num_heads == self.num_kv_heads else "gqa",
            num_experts=self.num_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            moe_intermediate_size=self.moe_intermediate_size,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            active_params=params - looked_up - (self.num_experts - self.num_experts_per_tok) * expert
            if self.num_experts
            else 0,
            sliding_window=max(self.windows),
            num_global_layers=self.windows.count(0) if any(self.windows) else 0,
            params=params,
            weight_bytes_per_param={"exact": 4.0, "fast": 2.0, "int8": 1.0}[precision],
            kv_bytes_per_element=4.0 if precision == "exact" else 2.0,
            source="counted from the loaded weights",
        )


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights: matrices `[out, in]` in any form, vectors float32."""

    attn_norm: torch.Tensor
    qkv: Matrix
    """[(H + 2 H_kv) D, C]: queries, keys, values below one another.

    MLA: queries (or their compression, q_lora_rank), the latent, the shared rotated key.
    """
    o: Matrix
    mlp_norm: torch.Tensor
    gate_up: Matrix
    """[2 I, C]: gate, then up. With experts [E 2 I, C]: those of expert 0, of expert 1, ..."""
    down: Matrix
    """[C, I]. With experts [E C, I], below one another."""
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    router: torch.Tensor | None = None
    """[E, C], float32 in every precision: a rounded score could choose another expert."""
    router_bias: torch.Tensor | None = None
    """[E], added to the scores when experts are chosen, not to their weights (DeepSeek-V3)."""
    shared_gate_up: Matrix | None = None
    shared_down: Matrix | None = None
    q_b: Matrix | None = None
    """MLA with compressed queries: [H (d_nope + d_rope), q_lora_rank]."""
    q_a_norm: torch.Tensor | None = None
    kv_b: Matrix | None = None
    """MLA: [H (d_nope + d_v), d_c], the latent's expansion to keys and values, head by head."""
    kv_a_norm: torch.Tensor | None = None


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

    def __init__(
        self, config: DecoderConfig, weights: Weights, ops: OpSet, window: int = 0, sinks: int = 0
    ) -> None:
        """`window`: attention window laid over the model's own in every layer (the smaller counts), 0: the
        model's own only. `sinks`: first tokens that every query sees in the layers with a window.
        """
        c = self.config = config
        self.weights = weights
        self.ops = ops
        self.windows = tuple(min(w, window) if w and window else w or window for w in config.windows)
        self.sinks = sinks
        if window and config.kv_lora_rank:
            raise ModelError(
                f"sliding_window is {window}, but {config.architecture} has MLA, for which no window is "
                "built; set sliding_window to 0"
            )
        routed: list[Matrix] = [
            m for layer in weights.layers if layer.router is not None for m in (layer.gate_up, layer.down)
        ]
        tensors: list[Matrix] = [
            t
            for layer in weights.layers
            for n in LayerWeights.__slots__
            if (t := getattr(layer, n)) is not None
            and not (layer.router is not None and n in ("gate_up", "down"))
        ]
        self.layer_params = sum(t.numel() for t in tensors) + weights.norm.numel()
        """Parameters that every token passes through, head and embedding aside: of a mixture all but the
        routed experts.
        """
        self.layer_matmul_params = sum(t.numel() for t in tensors if len(t.shape) == 2)
        self.layer_bytes = sum(map(num_bytes, [*tensors, weights.norm]))
        """Bytes that `layer_params` are held in."""
        self.head_bytes = num_bytes(weights.head)
        self.embed_row_bytes = num_bytes(weights.embed) // config.vocab_size
        self.expert_params = sum(t.numel() for t in routed) // max(1, c.num_experts * len(c.sparse_layers))
        """Parameters of one routed expert in one layer."""
        self.expert_bytes = sum(map(num_bytes, routed)) // max(1, c.num_experts * len(c.sparse_layers))
        self.num_params = (
            self.layer_params
            + sum(t.numel() for t in routed)
            + weights.embed.numel()
            + (0 if config.tied_embeddings else weights.head.numel())
        )
        self._whole = ops.whole(self) if ops.whole is not None and config.is_plain else None
        self._packed = self._pack() if self._whole is None else weights

    @property
    def fallback(self) -> str:
        """Why the pass runs operator by operator although these operators have it in one call; '' if it
        doesn't, or they have none.
        """
        if self.ops.whole is None or self._whole is not None:
            return ""
        c = self.config
        what = " and ".join(w for w, has in (("experts", c.num_experts), ("MLA", c.kv_lora_rank)) if has)
        return (
            f"The pass compiled as one call does not know {what or 'this shape'}: {c.architecture} runs "
            "operator by operator, on torch's, which costs some milliseconds a step"
        )

    @property
    def batch_invariant(self) -> bool:
        """The promise of `OpSet.batch_invariant` for whatever this decoder computes with."""
        return (
            self.ops.batch_invariant
            if self._whole is None
            else bool(getattr(self._whole, "batch_invariant", False))
        )

    @property
    def whole(self) -> Any:
        """The pass in one call where there is one, else None."""
        return self._whole

    def first_layers(self, num_layers: int) -> Decoder:
        """The decoder that ends after its first layers, with the same last norm and head: the weights are
        shared.
        """
        c = self.config
        part = replace(
            c,
            num_layers=num_layers,
            windows=self.windows[:num_layers],
            sparse_layers=tuple(i for i in c.sparse_layers if i < num_layers),
        )
        return Decoder(
            part, replace(self.weights, layers=self.weights.layers[:num_layers]), self.ops, sinks=self.sinks
        )

    def _pack(self) -> Weights:
        c, ops = self.config, self.ops

        def pack(layer: LayerWeights) -> LayerWeights:
            packed = {
                f: ops.pack(m)
                for f in ("qkv", "o", "gate_up", "down", "shared_gate_up", "shared_down", "q_b")
                if (m := getattr(layer, f)) is not None
                and not (layer.router is not None and f in ("gate_up", "down"))
            }
            if layer.router is not None:
                packed |= {f: ops.pack_experts(getattr(layer, f), c.num_experts) for f in ("gate_up", "down")}
            if layer.kv_b is not None:
                packed["kv_b"] = dense(layer.kv_b).view(
                    c.num_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank
                )
            return replace(layer, **packed)

        return replace(
            self.weights,
            layers=[pack(layer) for layer in self.weights.layers],
            head=self.ops.pack(self.weights.head),
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: Batch,
        kv: KVStore,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Computes all tokens, writes their KV, returns logits.

        token_ids, positions: [T] int64, sequences in the batch's order, padding last. sample_rows: [R] rows
        of T. Returns [R, vocab] float32.
        """
        if self._whole is not None:
            return self._whole(token_ids, positions, batch, kv, sample_rows)
        c, w, ops = self.config, self._packed, self.ops
        cos, sin = ops.angles(positions, w.inverse_frequencies)
        if c.rope_factor != 1:
            cos, sin = cos * c.rope_factor, sin * c.rope_factor
        residual = rows(w.embed, token_ids)
        x = ops.rms_norm(residual, w.layers[0].attn_norm, c.rms_norm_eps)
        for i, layer in enumerate(w.layers):
            attend = self._attention if layer.kv_b is None else self._latent_attention
            y = ops.linear(attend(i, layer, x, cos, sin, batch, kv.layers[i]), layer.o, layer.o_bias)
            x, residual = ops.add_rms_norm(y, residual, layer.mlp_norm, c.rms_norm_eps)
            # Rows of the MLP are independent: slabs bound its memory, the largest of a step.
            slabs = [
                self._mlp(layer, s) if layer.router is None else self._experts(layer, s, batch)
                for s in x.split(_MLP_ROWS)
            ]
            y = slabs[0] if len(slabs) == 1 else torch.cat(slabs)
            if i + 1 == c.num_layers:
                # Only rows that sample go through the last norm and the head.
                x, _ = ops.add_rms_norm(y[sample_rows], residual[sample_rows], w.norm, c.rms_norm_eps)
            else:
                x, residual = ops.add_rms_norm(y, residual, w.layers[i + 1].attn_norm, c.rms_norm_eps)
        if not len(sample_rows):
            return torch.empty(0, c.vocab_size, device=x.device)
        return ops.linear(x, w.head, None) if ops.head is None else ops.head(x, w.head)

    def _attention(
        self,
        i: int,
        layer: LayerWeights,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: Batch,
        cache: KVLayer,
    ) -> torch.Tensor:
        """Attention of layer `i` over x [T, C], before the output projection: [T, H D]."""
        c, ops, num_tokens = self.config, self.ops, len(x)
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
        if (
            ops.rope_and_write is not None
            and not c.qk_norm_whole
            and not c.clip_qkv
            and cache.rotation is None
        ):
            q = ops.rope_and_write(
                qkv, cos, sin, layer.q_norm, layer.k_norm, c.rms_norm_eps, c.num_heads, cache, batch
            )
            return ops.attention(
                q, cache, batch, c.head_dim**-0.5, self.windows[i], sinks=self.sinks
            ).reshape(num_tokens, c.q_size)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qkv[:, : c.q_size], qkv[:, c.q_size : c.q_size + c.kv_size]
            if c.qk_norm_whole:
                q, k = (
                    ops.rms_norm(q.contiguous(), layer.q_norm, c.rms_norm_eps),
                    ops.rms_norm(k.contiguous(), layer.k_norm, c.rms_norm_eps),
                )
                q, k = (
                    q.view(num_tokens, c.num_heads, c.head_dim),
                    k.view(num_tokens, c.num_kv_heads, c.head_dim),
                )
            else:
                q = ops.rms_norm(q.reshape(num_tokens, c.num_heads, c.head_dim), layer.q_norm, c.rms_norm_eps)
                k = ops.rms_norm(
                    k.reshape(num_tokens, c.num_kv_heads, c.head_dim), layer.k_norm, c.rms_norm_eps
                )
            heads = torch.cat((q, k), dim=1)
        else:
            heads = qkv[:, : c.q_size + c.kv_size].view(num_tokens, c.num_heads + c.num_kv_heads, c.head_dim)
        v = qkv[:, c.q_size + c.kv_size :].view(num_tokens, c.num_kv_heads, c.head_dim)
        if c.clip_qkv:
            heads, v = heads.clamp(-c.clip_qkv, c.clip_qkv), v.clamp(-c.clip_qkv, c.clip_qkv)
        turned = ops.rope(heads, cos, sin)
        if cache.rotation is not None:
            turned = ops.mix(turned, cache.rotation)
        # All KV of the layer is in place before anybody attends: a sequence may use blocks that another
        # computes in this step.
        ops.write_kv(turned[:, c.num_heads :], v, cache, batch)
        return ops.attention(
            turned[:, : c.num_heads], cache, batch, c.head_dim**-0.5, self.windows[i], sinks=self.sinks
        ).reshape(num_tokens, c.q_size)

    def _latent_attention(
        self,
        i: int,
        layer: LayerWeights,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: Batch,
        cache: KVLayer,
    ) -> torch.Tensor:
        """MLA (DeepSeek-V2, section 2.1) over x [T, C], before the output projection: [T, H d_v].

        What is cached is the latent and the one rotated key of all heads.
        """
        c, ops, num_tokens = self.config, self.ops, len(x)
        assert layer.kv_b is not None and layer.kv_a_norm is not None
        q, latent, key = ops.linear(x, layer.qkv, None).split(
            [c.q_lora_rank or c.q_size, c.kv_lora_rank, c.qk_rope_head_dim], dim=-1
        )
        if layer.q_b is not None and layer.q_a_norm is not None:
            q = ops.linear(ops.rms_norm(q.contiguous(), layer.q_a_norm, _LATENT_EPS), layer.q_b, None)
        plain, turning = q.reshape(num_tokens, c.num_heads, c.head_dim).split(
            [c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1
        )
        turned = ops.rope(torch.cat((turning, key[:, None]), dim=1), cos, sin)
        write_latent(
            torch.cat(
                (ops.rms_norm(latent.contiguous(), layer.kv_a_norm, _LATENT_EPS), turned[:, -1]), dim=-1
            ),
            cache,
            batch,
        )
        y = ops.latent_attention(
            torch.cat((plain, turned[:, :-1]), dim=-1),
            cast(torch.Tensor, layer.kv_b),
            cache,
            batch,
            c.score_scale,
        )
        return y.reshape(num_tokens, c.out_size)

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        """The dense MLP of x [T, C]."""
        ops = self.ops
        return ops.linear(
            ops.silu_mul(ops.linear(x, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias
        )

    def _experts(self, layer: LayerWeights, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The routed experts of x [T, C], and the shared one where there is one.

        Notes in the batch who went where.
        """
        ops = self.ops
        assert layer.router is not None
        weights, chosen = ops.route(
            x, layer.router, layer.router_bias, self.config.num_experts_per_tok, self.config.router
        )
        batch.chosen.append(chosen)
        y = ops.experts(x, weights, chosen, layer.gate_up, layer.down)
        if layer.shared_gate_up is not None:
            y = y + ops.linear(
                ops.silu_mul(ops.linear(x, layer.shared_gate_up, None)), layer.shared_down, None
            )
        return y


def _hf_experts(kind: str, c: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The fields of a mixture from a config.json; none for a dense model."""
    num = next((c[k] for k in ("n_routed_experts", "num_local_experts", "num_experts") if c.get(k)), 0)
    if kind not in ("mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3") or not num:
        return {}
    sparse = list(range(layers))
    router = Router()
    shared = 0
    if kind == "qwen3_moe":
        every, dense_ones = c.get("decoder_sparse_step", 1), c.get("mlp_only_layers") or []
        sparse = [i for i in range(layers) if i not in dense_ones and (i + 1) % every == 0]
        router = Router(normalise=bool(c.get("norm_topk_prob", False)))
    elif kind == "olmoe":
        router = Router(normalise=bool(c.get("norm_topk_prob", False)))
    elif kind.startswith("deepseek"):
        if c.get("moe_layer_freq", 1) != 1:
            raise ModelError(f"moe_layer_freq is {c['moe_layer_freq']}; only 1 is built")
        sparse = list(range(c.get("first_k_dense_replace", 0), layers))
        shared = c["moe_intermediate_size"] * (c.get("n_shared_experts") or 0)
        scale = float(c.get("routed_scaling_factor", 1.0))
        if kind == "deepseek_v3":
            router = Router(
                "sigmoid",
                bool(c.get("norm_topk_prob", True)),
                scale,
                c.get("n_group") or 1,
                c.get("topk_group") or 1,
                "top2",
            )
        elif (method := c.get("topk_method", "greedy")) not in ("greedy", "group_limited_greedy"):
            raise ModelError(
                f"topk_method is {method!r}; built for deepseek_v2 are greedy and group_limited_greedy"
            )
        elif c.get("norm_topk_prob"):
            raise ModelError("norm_topk_prob is true; for deepseek_v2 only false is built")
        else:
            limited = method == "group_limited_greedy"
            router = Router(
                "softmax",
                False,
                scale,
                (c.get("n_group") or 1) if limited else 1,
                (c.get("topk_group") or 1) if limited else 1,
            )
    return {
        "num_experts": num,
        "num_experts_per_tok": c["num_experts_per_tok"],
        "moe_intermediate_size": c.get("moe_intermediate_size") or c["intermediate_size"],
        "sparse_layers": tuple(sparse),
        "router": router,
        "shared_intermediate_size": shared,
    }


def _size(field: str, value: Any, name: str) -> int:
    """A size that others are made from, before they are. Raises ModelError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST[name]:
        raise ModelError(f"{field} is {shown(value)}, it must be a whole number, 1..{MOST[name]}")
    return value


def _hf_latent(c: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of MLA from a config.json."""
    if c.get("attention_bias"):
        raise ModelError("attention_bias is true; MLA is built without biases")
    return {
        "kv_lora_rank": c["kv_lora_rank"],
        "q_lora_rank": c.get("q_lora_rank") or 0,
        "qk_rope_head_dim": c["qk_rope_head_dim"],
        "v_head_dim": c["v_head_dim"],
        "head_dim": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
        "rope_interleave": c["model_type"] == "deepseek_v2" or bool(c.get("rope_interleave", True)),
    }


def _hf_windows(kind: str, c: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    window = c.get("sliding_window") or 0
    if not window or kind == "llama" or (kind.startswith("qwen") and not c.get("use_sliding_window", False)):
        return (0,) * layers
    if types := c.get("layer_types"):
        return tuple(window if t == "sliding_attention" else 0 for t in types)
    if kind.startswith("qwen"):
        return tuple(window if i >= c.get("max_window_layers", layers) else 0 for i in range(layers))
    return (window,) * layers
