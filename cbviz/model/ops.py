"""The operators of the decoder: their signatures, and a slow obvious version of each, which is the
specification.

Owns shapes and meaning. Every faster set (`cpu_ops`, Triton kernels) has the same signatures and is tested
against this one.

    T  tokens of the step      B  sequences in the batch     C  hidden size
    H  query heads             H_kv  key/value heads         D  head size      I  MLP size

    E  routed experts          K  experts a token takes

    q [T, H, D]   k, v [T, H_kv, D]   kv layer: k, v [num_blocks, H_kv, block_size, D]
    slot_mapping [T] int64, -1: not written     block_table [B, max_blocks] int32, padded with -1
    query_start_loc [B+1] int32                 seq_lens [B] int32: keys of each sequence, this step's included

Tokens from `query_start_loc[B]` on belong to no sequence (padding): their attention output is 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from cbviz.model.hub import ModelError
from cbviz.model.kv_store import KVLayer, dequantise, quantise
from cbviz.model.matrix import Matrix, dense

if TYPE_CHECKING:
    from cbviz.model.decoder import Decoder


@dataclass(slots=True)
class Batch:
    """One packed step, ready for every layer.

    Lists are the tensors' values on the host, so that no operator waits for a device.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    query_lens_list: list[int]
    seq_lens_list: list[int]
    block_size: int
    shared: dict[Any, Any] = field(default_factory=dict)
    """What an operator computes in the first layer and uses again in the others (indices, masks)."""
    chosen: list[torch.Tensor] = field(default_factory=list)
    """Filled by the pass of a mixture: the experts of each token, [T, K] a sparse layer; a layer's tokens may
    come in several pieces, in order.
    """
    captured: bool = False
    """The pass is recorded now and replayed later with other values: decodes only, padded with rows that
    write nothing; reading `seq_lens_list` raises.
    """

    @classmethod
    def build(
        cls,
        block_tables: list[list[int]],
        query_lens: list[int],
        seq_lens: list[int],
        block_size: int,
        num_padding: int = 0,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """From each sequence's table, its tokens in this step, and its length with them.

        Query tokens are its last ones.
        """
        import numpy as np

        width = max(((n + block_size - 1) // block_size for n in seq_lens), default=1)
        table = np.full((len(block_tables), width), -1, dtype=np.int32)
        starts = np.zeros(len(block_tables) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=starts[1:])
        slots = np.full(int(starts[-1]) + num_padding, -1, dtype=np.int64)
        for i, (blocks, n, end) in enumerate(zip(block_tables, query_lens, seq_lens, strict=True)):
            used = (end + block_size - 1) // block_size
            table[i, :used] = blocks[:used]
            pos = np.arange(end - n, end)
            slots[starts[i] : starts[i + 1]] = (
                table[i, pos // block_size].astype(np.int64) * block_size + pos % block_size
            )
        return cls(
            torch.from_numpy(slots).to(device),
            torch.from_numpy(table).to(device),
            torch.from_numpy(starts).to(device),
            torch.tensor(seq_lens, dtype=torch.int32, device=device),
            list(query_lens),
            list(seq_lens),
            block_size,
        )


def angles(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    turned = positions.float()[:, None] * frequencies
    return turned.cos(), turned.sin()


@dataclass(frozen=True, slots=True)
class Router:
    """How a token's experts are chosen from the router's scores, and what they weigh.

    The defaults are Mixtral's.
    """

    score: str = "softmax"
    """`softmax` over all experts, or `sigmoid` of each (DeepSeek-V3)."""
    normalise: bool = True
    """The chosen weights are divided by their sum: with softmax the same as a softmax over the chosen alone.

    OLMoE and DeepSeek-V2 don't.
    """
    scale: float = 1.0
    """Factor of the weights (DeepSeek's routed_scaling_factor)."""
    num_groups: int = 1
    """Group-limited routing: experts stand in this many groups, and only the best `top_groups` of them are
    chosen from.
    """
    top_groups: int = 1
    group_score: str = "max"
    """A group is as good as its best expert (`max`, V2) or its two best together (`top2`, V3)."""

    def __post_init__(self) -> None:
        if self.score not in ("softmax", "sigmoid") or self.group_score not in ("max", "top2"):
            raise ModelError(
                f"the router scores by {self.score!r} and groups by {self.group_score!r}; built are "
                "softmax and sigmoid, max and top2"
            )
        if not 1 <= self.top_groups <= self.num_groups:
            raise ModelError(f"topk_group is {self.top_groups}, it must lie in 1..n_group, {self.num_groups}")


def route(
    scores: torch.Tensor, bias: torch.Tensor | None, num_chosen: int, router: Router
) -> tuple[torch.Tensor, torch.Tensor]:
    """(router scores [T, E] float32, bias [E] or None) -> the chosen experts' weights [T, K] and their
    numbers [T, K].

    Groups and bias have a say in who is chosen, not in the weights, which are the scores themselves. Softmax
    over all, then the best divided by their sum, is a softmax over the best alone: Mixtral's and Qwen3's
    routers are one.
    """
    num_tokens, num_experts = scores.shape
    shares = scores.softmax(dim=-1) if router.score == "softmax" else scores.sigmoid()
    ranked = shares if bias is None else shares + bias
    if router.num_groups > 1:
        grouped = ranked.view(num_tokens, router.num_groups, num_experts // router.num_groups)
        good = (
            grouped.amax(dim=-1)
            if router.group_score == "max"
            else grouped.topk(2, dim=-1).values.sum(dim=-1)
        )
        open_groups = torch.zeros_like(good, dtype=torch.bool).scatter_(
            1, good.topk(router.top_groups, dim=-1).indices, True
        )
        ranked = grouped.masked_fill(~open_groups[:, :, None], float("-inf")).view(num_tokens, num_experts)
    chosen = ranked.topk(num_chosen, dim=-1).indices
    weights = shares.gather(1, chosen)
    if router.normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * router.scale, chosen


def choose_experts(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, num_chosen: int, router: Router
) -> tuple[torch.Tensor, torch.Tensor]:
    return route(x.float() @ matrix.T, bias, num_chosen, router)


def experts_loop(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """One expert after the other, each on the tokens that chose it."""
    out = torch.zeros_like(x)
    for e in range(len(gate_up)):
        tokens, places = (chosen == e).nonzero(as_tuple=True)
        if len(tokens):
            y = silu_mul(x[tokens] @ gate_up[e].T) @ down[e].T
            out[tokens] += y * weights[tokens, places, None].to(y.dtype)
    return out


def experts_grouped(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Tokens sorted by expert, two products over the groups.

    A token's result is summed in its own order of experts, whoever stands beside it.
    """
    kind, x = x.dtype, x.to(gate_up.dtype)
    if not can_group(x.device.type, x.dtype, gate_up.shape[-1], down.shape[-1]):
        return experts_loop(x, weights, chosen, gate_up, down).to(kind)
    num_tokens, num_chosen = chosen.shape
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    load = torch.zeros(len(gate_up), dtype=torch.int32, device=x.device).scatter_add_(
        0, flat, torch.ones_like(flat, dtype=torch.int32)
    )
    ends = load.cumsum(0, dtype=torch.int32)
    y = F.grouped_mm(
        silu_mul(F.grouped_mm(x[order // num_chosen], gate_up.transpose(1, 2), offs=ends)),
        down.transpose(1, 2),
        offs=ends,
    )
    back = torch.empty_like(y)
    back[order] = y
    return (
        (back.view(num_tokens, num_chosen, x.shape[1]) * weights[:, :, None].to(y.dtype)).sum(dim=1).to(kind)
    )


@functools.cache
def can_group(device: str, dtype: torch.dtype, *inner: int) -> bool:
    """Whether this torch has `grouped_mm` for the device and type, and rows of these lengths lie on its 16
    bytes.
    """
    if not hasattr(F, "grouped_mm") or any(n * dtype.itemsize % 16 for n in inner):
        return False
    try:
        ends = torch.tensor([2], dtype=torch.int32, device=device)
        F.grouped_mm(
            torch.ones(2, 8, dtype=dtype, device=device),
            torch.ones(1, 8, 8, dtype=dtype, device=device).transpose(1, 2),
            offs=ends,
        )
        return True
    except (RuntimeError, NotImplementedError):
        return False


def pack_experts(weight: Matrix, num_experts: int) -> torch.Tensor:
    """[E out, in] -> [E, out, in] float32."""
    return dense(weight).view(num_experts, -1, weight.shape[1])


def write_latent(latent: torch.Tensor, layer: KVLayer, batch: Batch) -> None:
    """MLA's `write_kv`: latent [T, d_c + d_rope] into their slots.

    Padding stands at the end and is not written.
    """
    n = sum(batch.query_lens_list)
    slots = batch.slot_mapping[:n]
    layer.k[slots // batch.block_size, 0, slots % batch.block_size] = latent[:n].to(layer.k.dtype)


def latent_attention(
    q: torch.Tensor, kv_b: torch.Tensor, layer: KVLayer, batch: Batch, scale: float
) -> torch.Tensor:
    """MLA as it is defined: every latent is expanded to keys and values of all heads, then attention as ever."""
    rank = kv_b.shape[2]
    plain = q.shape[2] - (layer.k.shape[3] - rank)
    out = q.new_zeros(len(q), q.shape[1], kv_b.shape[1] - plain)
    starts = batch.query_start_loc.tolist()
    for b, length in enumerate(batch.seq_lens.tolist()):
        kept = _kept(layer, batch, b, length)
        keys_values = torch.einsum("sc,hnc->shn", kept[:, :rank], kv_b)
        keys = torch.cat(
            (keys_values[..., :plain], kept[:, None, rank:].expand(-1, q.shape[1], -1)), dim=-1
        )  # [S, H, D]
        values = keys_values[..., plain:]
        for t in range(starts[b], starts[b + 1]):
            seen = length - starts[b + 1] + t + 1
            weights = torch.softmax((keys[:seen] * q[t]).sum(-1) * scale, dim=0)
            out[t] = (weights[:, :, None] * values[:seen]).sum(0)
    return out


def latent_attention_absorbed(
    q: torch.Tensor, kv_b: torch.Tensor, layer: KVLayer, batch: Batch, scale: float
) -> torch.Tensor:
    """The same in the latent space: the expansion of keys is applied to the queries, that of values to the
    result, so that all heads share one key and value of d_c numbers.

    Equal because q . (W c) = (W^T q) . c (DeepSeek-V2, section 2.1.2); it reads each latent once and expands
    none.
    """
    kind, q = q.dtype, q.to(kv_b.dtype)
    rank = kv_b.shape[2]
    plain = q.shape[2] - (layer.k.shape[3] - rank)
    query = torch.cat(
        (torch.einsum("thn,hnc->thc", q[..., :plain], kv_b[:, :plain]), q[..., plain:]), dim=-1
    )  # [T, H, d_c + d_rope]
    out = query.new_zeros(len(q), q.shape[1], rank)
    first = 0
    for b, (n, length) in enumerate(zip(batch.query_lens_list, batch.seq_lens_list, strict=True)):
        kept = _kept(layer, batch, b, length)
        scores = torch.einsum("qhd,sd->hqs", query[first : first + n], kept) * scale
        if n > 1:
            hidden = (
                torch.arange(length, device=q.device)
                > torch.arange(length - n, length, device=q.device)[:, None]
            )
            scores = scores.masked_fill(hidden, float("-inf"))
        out[first : first + n] = torch.einsum("hqs,sc->qhc", scores.softmax(dim=-1), kept[:, :rank])
        first += n
    return torch.einsum("thc,hvc->thv", out, kv_b[:, plain:]).to(kind)


def _kept(layer: KVLayer, batch: Batch, b: int, length: int) -> torch.Tensor:
    """What the cache holds of sequence `b`'s first `length` positions: [length, d_c + d_rope] float32."""
    at = torch.arange(length, device=layer.k.device)
    return layer.k[batch.block_table[b, at // batch.block_size].long(), 0, at % batch.block_size].float()


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides whether a fast operator can be used.

    `dtype`: of the KV cache, and of what products are fed with.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


def mix(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    return (x.float() @ rotation).to(x.dtype)


@dataclass(frozen=True, slots=True)
class OpSet:
    """The callables a decoder is given; there is no global choice."""

    name: str
    about: str
    """One line for people: what these are, and why they and not faster ones."""
    linear: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
    """(x [T, in], weight [out, in] as `pack` gives it, bias [out] or None) -> [T, out]"""
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    """(x [..., C], weight [C], eps) -> [..., C]"""
    add_rms_norm: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
    ]
    """(x [T, C], residual [T, C], weight, eps) -> (norm of the sum, the sum).

    May overwrite x and residual.
    """
    rope: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """(x [T, heads, D], cos [T, D/2], sin [T, D/2]) -> rotated x; the first half of D is turned against the
    second.
    """
    write_kv: Callable[[torch.Tensor, torch.Tensor, KVLayer, Batch], None]
    """(k [T, H_kv, D], v [T, H_kv, D], layer, batch): puts them into their slots."""
    attention: Callable[..., torch.Tensor]
    """(q [T, H, D], layer, batch, scale, window, sinks=0) -> [T, H, D].

    Query at position i sees keys j <= i with i - window < j or j < sinks; window 0: all j <= i. Blocks that
    no query of the step sees may be the null block, which holds nothing.
    """
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    """(gate and up [T, 2 I], gate first) -> silu(gate) * up [T, I]"""
    choose: Callable[[torch.Tensor], tuple[list[int], list[float], list[float]]]
    """(logits [R, V]) -> of each row the best id (ties: the smaller), its lead over the second, log of the
    sum of exponentials
    """
    pack: Callable[[Matrix], Any]
    """A weight matrix as `linear` wants it; done once, when a decoder is made."""
    whole: Callable[[Decoder], Callable[..., torch.Tensor] | None] | None = None
    """Where it is not None: makes a decoder's `forward` as one call, or None for a decoder that it cannot
    serve. What it makes has an attribute `batch_invariant` that is True if it keeps the promise of the field
    below.
    """
    route: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor | None, int, Router], tuple[torch.Tensor, torch.Tensor]
    ] = choose_experts
    """(x [T, C], router [E, C], bias [E] or None, K, how) -> the chosen experts' weights [T, K] and their
    numbers [T, K]
    """
    experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any, Any], torch.Tensor] = experts_grouped
    """(x [T, C], weights [T, K], chosen [T, K], gate_up [E, 2 I, C], down [E, C, I] as `pack_experts` gives
    them) -> [T, C]
    """
    pack_experts: Callable[[Matrix, int], Any] = pack_experts
    """(all experts' matrices below one another, E) -> what `experts` wants; done once, when a decoder is
    made.
    """
    latent_attention: Callable[[torch.Tensor, torch.Tensor, KVLayer, Batch, float], torch.Tensor] = (
        latent_attention_absorbed
    )
    """(q [T, H, d_nope + d_rope], expansion [H, d_nope + d_v, d_c], layer, batch, scale) -> [T, H, d_v]: MLA
    over the latents in the cache.
    """
    rope_and_write: (
        Callable[
            [
                torch.Tensor,
                torch.Tensor,
                torch.Tensor,
                torch.Tensor | None,
                torch.Tensor | None,
                float,
                int,
                KVLayer,
                Batch,
            ],
            torch.Tensor,
        ]
        | None
    ) = None
    """Where it is not None: (qkv [T, (H + 2 H_kv) D], cos, sin, norm weights of queries and keys [D] or None,
    eps, H, layer, batch) -> q [T, H, D]. In one call: queries and keys normed where there are weights,
    rotated, keys and values written.
    """
    draw: (
        Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None
    ) = None
    """Where it is not None: (logits [R, V], temperature [R] float64, top_k [R] int64, top_p [R] float64,
    uniform [R] float64) -> ids [R] int64, on the logits' device and without waiting for it; what
    `sampling.filtered_probs` and the uniform number choose. Temperature 0: the best.
    """
    head: Callable[[torch.Tensor, Any], torch.Tensor] | None = None
    """(x [R, C], weight as `pack` gives it) -> logits [R, V] float32, where `linear` gives fewer bits.

    None: `linear` does it.
    """
    choose_on_device: Callable[[torch.Tensor], torch.Tensor] | None = None
    """As `choose`, on the logits' device and without waiting for it: [R, 3] float64, id, lead, log total.

    None: plain torch does it.
    """
    capturable: bool = False
    """Nothing in a pass over decodes alone depends on values that the host read, only on shapes: the pass may
    be captured once and replayed.
    """
    report: dict[str, str] = field(default_factory=dict)
    """Operator -> which implementation it is, and why where it is not this set's own. Empty: all are."""
    angles: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = angles
    """(positions [T], inverse frequencies [D/2]) -> cos, sin [T, D/2]"""
    mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = mix
    """(x [T, heads, D], rotation [D, D]) -> x times it: for a cache that wants keys (and so queries) turned
    before they are coded
    """
    batch_invariant: bool = False
    """The promise that a row of each operator's result depends, to the bit, on that row's input and on its
    sequence's keys and values alone: not on other rows, their number, the cut of a prompt into chunks, or
    where blocks lie. On one machine, with one number of threads.
    """


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    y = x @ dense(weight).T
    return y if bias is None else y + bias


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


def write_kv(k: torch.Tensor, v: torch.Tensor, layer: KVLayer, batch: Batch) -> None:
    for t, slot in enumerate(batch.slot_mapping.tolist()):
        if slot >= 0:
            at = slot // batch.block_size, slice(None), slot % batch.block_size
            if layer.k_scale is None:
                layer.k[at], layer.v[at] = k[t], v[t]
                continue
            for x, codes, scales, zeros in (
                (k[t], layer.k, layer.k_scale, layer.k_zero),
                (v[t], layer.v, layer.v_scale, layer.v_zero),
            ):
                assert scales is not None
                codes[at], scales[at], zero = quantise(x, codes.dtype)
                if zeros is not None and zero is not None:
                    zeros[at] = zero


def read_kv(
    layer: KVLayer, blocks: torch.Tensor, offsets: torch.Tensor | slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of these slots as numbers, float32 where the layer holds codes: [n, H_kv, D] for n
    blocks and offsets, [n, H_kv, block_size, D] for whole blocks.
    """
    at = blocks, slice(None), offsets
    if layer.k_scale is None or layer.v_scale is None:
        return layer.k[at], layer.v[at]
    return (
        dequantise(layer.k[at], layer.k_scale[at], None if layer.k_zero is None else layer.k_zero[at]),
        dequantise(layer.v[at], layer.v_scale[at], None if layer.v_zero is None else layer.v_zero[at]),
    )


def attention(
    q: torch.Tensor, layer: KVLayer, batch: Batch, scale: float, window: int, sinks: int = 0
) -> torch.Tensor:
    out = torch.zeros_like(q)
    groups = q.shape[1] // layer.k.shape[1]
    starts = batch.query_start_loc.tolist()
    for b, length in enumerate(batch.seq_lens.tolist()):
        queries = q[starts[b] : starts[b + 1]]  # [n, H, D], the sequence's last n tokens
        for i, row in enumerate(queries):
            position = length - len(queries) + i
            seen = torch.arange(position + 1, device=q.device)
            if window:
                seen = seen[(seen > position - window) | (seen < sinks)]
            blocks, offsets = batch.block_table[b, seen // batch.block_size].long(), seen % batch.block_size
            keys, values = (
                x.repeat_interleave(groups, dim=1) for x in read_kv(layer, blocks, offsets)
            )  # [seen, H, D]
            weights = torch.softmax((keys * row).sum(-1) * scale, dim=0)  # [seen, H]
            out[starts[b] + i] = (weights[:, :, None] * values).sum(0)
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def choose(logits: torch.Tensor) -> tuple[list[int], list[float], list[float]]:
    ids, leads, totals = choose_on_device(logits).t().tolist()
    return [int(i) for i in ids], leads, totals


def choose_on_device(logits: torch.Tensor) -> torch.Tensor:
    best_two = logits.topk(min(2, logits.shape[-1]), dim=-1).values
    return torch.stack(
        (
            logits.argmax(dim=-1).double(),
            (best_two[:, 0] - best_two[:, -1]).double(),
            logits.logsumexp(dim=-1).double(),
        ),
        dim=1,
    )


def pack(weight: Matrix) -> Matrix:
    return weight


REFERENCE = OpSet(
    "reference",
    "plain torch, slow and obvious: the specification",
    linear,
    rms_norm,
    add_rms_norm,
    rope,
    write_kv,
    attention,
    silu_mul,
    choose,
    pack,
    experts=experts_loop,
    latent_attention=latent_attention,
)


def pick(name: str, device: torch.device | str, shape: Shape | None = None) -> OpSet:
    """The operators called `name` for `device`.

    `auto`: the fastest that works there. Operators that cannot take `shape` are torch's; `report` says so.

    Raises ModelError with the reason if there is no such set here.
    """
    from cbviz.model import device_ops

    kind = torch.device(device).type
    if name == "reference":
        return REFERENCE
    if name == "torch":
        return device_ops.TORCH
    if name == "triton" or (name == "auto" and kind != "cpu"):
        from cbviz.model import triton_ops

        if not (why := triton_ops.unavailable(device)):
            return triton_ops.op_set(device, shape)
        if name == "triton":
            raise ModelError(
                f"kernels 'triton' cannot be used: {why}; set kernels to 'auto', 'torch', 'cpu' or "
                "'reference'"
            )
        return replace(device_ops.TORCH, about=f"{device_ops.TORCH.about}; no Triton kernels: {why}")
    if name in ("auto", "cpu"):
        if kind != "cpu":
            raise ModelError(
                f"kernels 'cpu' run on the CPU, but device is {kind!r}; set device to 'cpu' or kernels to "
                "'auto'"
            )
        from cbviz.model import cpu_ops, cpu_pass, native

        built = native.library()
        return (
            cpu_pass.op_set(built)
            if built.lib is not None
            else replace(cpu_ops.CPU, about=f"{cpu_ops.CPU.about}; {built.about}")
        )
    raise ModelError(f"kernels is {name!r}, it must be one of auto, reference, torch, cpu, triton")
