"""The quick operators for a CPU, in plain torch: same signatures and meaning as `ops`, fewer and larger
calls.

Owns only speed. Attention of all decoding sequences is one gather of their blocks and one fused call, with
the query heads of a group as rows of its key head (so keys are not repeated); a prompt's chunk is one gather
and one call. Indices and masks are made once a step, in the first layer. float32 activations; weights in 16
or 8 bits are packed for fbgemm's product of float32 with 16 bits (integers up to 127 are exact in 16 bits, so
8-bit weights lose nothing more) where torch has it, else held in float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from cbviz.model.kv_store import KVLayer, dequantise, quantise
from cbviz.model.matrix import Int8Matrix, Matrix, dense
from cbviz.model.ops import Batch, OpSet, choose, experts_grouped

_MAX_GATHERED_TOKENS = 16_384
"""Decodes gathered in one call: bounds the copy of keys and values (13 MB each for SmolLM2)."""
_SLAB = 512
"""Queries of one call where a mask is needed."""
_FEW_ROWS = 8
"""Up to here a product is limited by reading the weights."""


@dataclass(slots=True)
class _Decodes:
    """Sequences with one query token each, of similar length."""

    tokens: torch.Tensor | slice
    """Their places in q."""
    rows: torch.Tensor
    """[B * H_kv * blocks] rows of the cache seen as [num_blocks * H_kv, block_size * D]."""
    count: int
    keys: int
    """Keys attended to, before padding to whole blocks: the longest sequence's."""
    mask: torch.Tensor | None
    """[B, 1, 1, keys] added to the scores; None where every key is seen."""


@dataclass(slots=True)
class _Chunk:
    """Several query tokens of one sequence, tokens `first` to `last` of q."""

    first: int
    last: int
    rows: torch.Tensor
    """[H_kv * blocks], as above."""
    keys: int
    mask: torch.Tensor | None
    """[queries, keys]; None for a plain causal chunk from position 0."""


@dataclass(slots=True)
class _Plan:
    num_tokens: int
    decodes: list[_Decodes]
    chunks: list[_Chunk]


@dataclass(slots=True)
class _Packed:
    """fbgemm's own copy of a matrix in 16 bits, private memory.

    The product times `scale` [out] where there is one.
    """

    data: Any
    scale: torch.Tensor | None


def pack(weight: Matrix) -> torch.Tensor | _Packed:
    if isinstance(weight, torch.Tensor) and weight.dtype == torch.float32:
        return weight
    if not _has_fbgemm():
        return dense(weight)
    if isinstance(weight, Int8Matrix):
        return _Packed(torch.ops.quantized.linear_prepack_fp16(weight.q.float(), None), weight.scale)
    return _Packed(torch.ops.quantized.linear_prepack_fp16(weight.float(), None), None)


@functools.cache
def _has_fbgemm() -> bool:
    """x86 with AVX2, and a torch that was built with it."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(torch.ones(2, 2), None)
        return bool((torch.ops.quantized.linear_dynamic_fp16(torch.ones(1, 2), packed) == 2).all())
    except (RuntimeError, AttributeError):
        return False


def linear(x: torch.Tensor, weight: torch.Tensor | _Packed, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight, _Packed):
        y = torch.ops.quantized.linear_dynamic_fp16(x, weight.data)
        if weight.scale is not None:
            y = y * weight.scale
        return y if bias is None else y + bias
    rows = x.shape[0]
    if rows > _FEW_ROWS:
        return F.linear(x, weight, bias)
    # Few rows: BLAS reads the weights 2 to 5 times faster when they are the left factor, and best with 2, 4
    # or 8 rows (measured
    # with MKL on AVX2: all products of a SmolLM2 step, 2 threads, 1 / 4 / 8 rows: 26 / 31 / 44 ms against 48
    # / 65 / 75).
    padded = max(2, 1 << (rows - 1).bit_length())
    if padded != rows:
        x = F.pad(x, (0, 0, 0, padded - rows))
    y = torch.mm(weight, x.t())[:, :rows].t().contiguous()
    return y if bias is None else y.add_(bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual.add_(x)
    return F.rms_norm(residual, (x.shape[-1],), weight, eps), residual


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    c, s = cos[:, None, :], sin[:, None, :]
    out = torch.empty(x.shape, dtype=x.dtype)
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, c, out=out[..., :half]).addcmul_(second, s, value=-1)
    torch.mul(second, c, out=out[..., half:]).addcmul_(first, s)
    return out


def write_kv(k: torch.Tensor, v: torch.Tensor, layer: KVLayer, batch: Batch) -> None:
    heads, dim = k.shape[1], k.shape[2]
    found = batch.shared.get(("slots", heads))
    if found is None:
        written = batch.slot_mapping >= 0
        slots = batch.slot_mapping[written]
        rows = ((slots // batch.block_size)[:, None] * heads + torch.arange(heads)) * batch.block_size + (
            slots % batch.block_size
        )[:, None]
        # Padding stands at the end, so the written tokens are a slice.
        found = batch.shared[("slots", heads)] = (rows.reshape(-1), int(written.sum()))
    rows, num_written = found
    for x, to, scales, zeros in (
        (k, layer.k, layer.k_scale, layer.k_zero),
        (v, layer.v, layer.v_scale, layer.v_zero),
    ):
        x = x[:num_written].reshape(-1, dim)
        if scales is None:
            to.view(-1, dim).index_copy_(0, rows, x.to(to.dtype))
            continue
        codes, scale, zero = quantise(x, to.dtype)
        to.view(-1, codes.shape[1]).index_copy_(0, rows, codes)
        scales.view(-1).index_copy_(0, rows, scale)
        if zeros is not None and zero is not None:
            zeros.view(-1).index_copy_(0, rows, zero)


def _gather(layer: KVLayer, rows: torch.Tensor, n: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [n, H_kv, count, D] float32 of the first `count` slots in these rows (blocks of one
    head) for n sequences.
    """
    heads_kv = layer.k.shape[1]

    def some(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        found = x.view(x.shape[0] * heads_kv, -1).index_select(0, rows).view(n, heads_kv, -1, *x.shape[3:])
        return found[:, :, :count]

    out = []
    for x, scales, zeros in ((layer.k, layer.k_scale, layer.k_zero), (layer.v, layer.v_scale, layer.v_zero)):
        codes, scale = some(x), some(scales)
        assert codes is not None
        out.append(codes.float() if scale is None else dequantise(codes, scale, some(zeros)))
    return out[0], out[1]


def attention(
    q: torch.Tensor, layer: KVLayer, batch: Batch, scale: float, window: int, sinks: int = 0
) -> torch.Tensor:
    heads_kv = layer.k.shape[1]
    heads, dim = q.shape[1:]
    groups = heads // heads_kv
    plan: _Plan | None = batch.shared.get(("attention", window))
    if plan is None:
        plan = batch.shared[("attention", window)] = _plan(batch, heads_kv, window, sinks)
    out = torch.empty(q.shape, dtype=q.dtype)
    for d in plan.decodes:
        n = d.count
        k, v = _gather(layer, d.rows, n, d.keys)
        y = F.scaled_dot_product_attention(
            q[d.tokens].reshape(n, heads_kv, groups, dim), k, v, attn_mask=d.mask, scale=scale
        )
        out[d.tokens] = y.reshape(n, heads, dim)
    for c in plan.chunks:
        k, v = _gather(layer, c.rows, 1, c.keys)
        y = F.scaled_dot_product_attention(
            q[c.first : c.last].transpose(0, 1)[None],
            k,
            v,
            attn_mask=c.mask,
            is_causal=c.mask is None,
            scale=scale,
            enable_gqa=groups > 1,
        )
        out[c.first : c.last] = y[0].transpose(0, 1)
    out[plan.num_tokens :] = 0
    return out


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor | list[_Packed],
    down: torch.Tensor | list[_Packed],
) -> torch.Tensor:
    """float32: sorted tokens and grouped products.

    Packed in 16 bits, for which grouped products are 25 times slower on AVX2: a loop over the experts that
    somebody chose.
    """
    if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        return experts_grouped(x, weights, chosen, gate_up, down)
    num_tokens, num_chosen = chosen.shape
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    y = torch.empty(len(flat), x.shape[1])
    first = 0
    for e, n in enumerate(flat.bincount(minlength=len(gate_up)).tolist()):
        if n:
            some = order[first : first + n]
            y[some] = linear(silu_mul(linear(x[some // num_chosen], gate_up[e], None)), down[e], None)
            first += n
    return (y.view(num_tokens, num_chosen, x.shape[1]) * weights[:, :, None]).sum(dim=1)


def pack_experts(weight: Matrix, num_experts: int) -> torch.Tensor | list[torch.Tensor | _Packed]:
    """[E, out, in] float32, or one packed matrix an expert."""
    if (isinstance(weight, torch.Tensor) and weight.dtype == torch.float32) or not _has_fbgemm():
        return dense(weight).view(num_experts, -1, weight.shape[1])
    n = weight.shape[0] // num_experts
    if isinstance(weight, Int8Matrix):
        return [
            pack(Int8Matrix(weight.q[i : i + n], weight.scale[i : i + n]))
            for i in range(0, weight.shape[0], n)
        ]
    return [pack(part) for part in weight.split(n)]


def latent_attention(
    q: torch.Tensor, kv_b: torch.Tensor, layer: KVLayer, batch: Batch, scale: float
) -> torch.Tensor:
    """MLA. Decodes in the latent space: one gather, one call, all heads on the one key head.

    A chunk with its latents expanded: fewer operations a pair.
    """
    block_size, width = layer.k.shape[2:]
    rank, heads = kv_b.shape[2], q.shape[1]
    plain = q.shape[2] - (width - rank)
    plan: _Plan | None = batch.shared.get(("attention", 0))
    if plan is None:
        plan = batch.shared[("attention", 0)] = _plan(batch, 1, 0)
    kept = layer.k.view(-1, block_size * width)
    out = torch.empty(len(q), heads, kv_b.shape[1] - plain)
    for d in plan.decodes:
        k = kept.index_select(0, d.rows).view(d.count, 1, -1, width)[:, :, : d.keys].float()
        mine = q[d.tokens].transpose(0, 1)  # [H, n, D]
        query = torch.cat(
            (torch.bmm(mine[..., :plain], kv_b[:, :plain]), mine[..., plain:]), dim=-1
        )  # [H, n, d_c + d_rope]
        y = F.scaled_dot_product_attention(
            query.transpose(0, 1)[:, None], k, k[..., :rank], attn_mask=d.mask, scale=scale
        )
        out[d.tokens] = torch.bmm(y[:, 0].transpose(0, 1), kv_b[:, plain:].transpose(1, 2)).transpose(0, 1)
    for c in plan.chunks:
        k = kept.index_select(0, c.rows).view(-1, width)[: c.keys].float()
        expanded = (
            (k[:, :rank] @ kv_b.reshape(-1, rank).T).view(len(k), heads, -1).transpose(0, 1)
        )  # [H, S, d_nope + d_v]
        keys = torch.cat((expanded[..., :plain], k[None, :, rank:].expand(heads, -1, -1)), dim=-1)
        queries, values = q[c.first : c.last].transpose(0, 1)[None], expanded[None, ..., plain:]
        y = F.scaled_dot_product_attention(
            queries, keys[None], values, attn_mask=c.mask, is_causal=c.mask is None, scale=scale
        )
        out[c.first : c.last] = y[0].transpose(0, 1)
    out[plan.num_tokens :] = 0
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return F.silu(x[:, :half]).mul_(x[:, half:])


def _plan(batch: Batch, heads_kv: int, window: int, sinks: int = 0) -> _Plan:
    """Splits the batch into groups of decodes of similar length, and chunks; makes their gather rows and
    masks.
    """
    size = batch.block_size
    sink_blocks = (sinks + size - 1) // size
    heads = torch.arange(heads_kv)
    starts = [0]
    for n in batch.query_lens_list:
        starts.append(starts[-1] + n)
    singles = sorted(
        (b for b, n in enumerate(batch.query_lens_list) if n == 1), key=lambda b: batch.seq_lens_list[b]
    )
    groups: list[list[int]] = []
    for b in singles:  # ascending, so the newest is the longest: the group is padded to it
        n = batch.seq_lens_list[b]
        if (
            groups
            and n <= 2 * batch.seq_lens_list[groups[-1][0]] + 64
            and n * (len(groups[-1]) + 1) <= _MAX_GATHERED_TOKENS
        ):
            groups[-1].append(b)
        else:
            groups.append([b])
    decodes = []
    for group in groups:
        lens = [batch.seq_lens_list[b] for b in group]
        # Blocks that lie left of everybody's window are not gathered.
        lead = max(0, min(lens) - window) // size if window else 0
        at, where = _seen_from(lead, sink_blocks, max(lens), size)
        keys = len(at)
        table = batch.block_table[group][:, where].clamp(min=0).long()
        rows = (table[:, None, :] * heads_kv + heads[None, :, None]).reshape(-1)
        mask = None
        if min(lens) != max(lens) or (window and max(lens) > window):
            end = torch.tensor(lens)[:, None]
            seen = (at < end) & ((at >= end - window) | (at < sinks)) if window else at < end
            mask = torch.zeros(len(group), 1, 1, keys).masked_fill_(~seen[:, None, None, :], float("-inf"))
        places = [starts[b] for b in group]
        # Mostly the decodes stand in a row, and a slice spares a copy.
        straight = places == list(range(places[0], places[0] + len(places)))
        decodes.append(
            _Decodes(
                slice(places[0], places[0] + len(places)) if straight else torch.tensor(places),
                rows,
                len(group),
                keys,
                mask,
            )
        )
    chunks = []
    for b, n in enumerate(batch.query_lens_list):
        if n < 2:
            continue
        length = batch.seq_lens_list[b]
        masked = n != length or (window > 0 and length > window)
        # A masked chunk is cut into slabs: masks stay small, and no slab looks at keys beyond its last query
        # or left of its window.
        slab = _SLAB if masked else n
        for begin in range(0, n, slab):
            last = min(begin + slab, n)
            stop = length - n + last  # keys up to the slab's last query
            lead = max(0, length - n + begin + 1 - window) // size if window else 0
            at, where = _seen_from(lead, sink_blocks, stop, size)
            table = batch.block_table[b, where].clamp(min=0).long()
            rows = (table[None, :] * heads_kv + heads[:, None]).reshape(-1)
            mask = None
            if masked:
                query = torch.arange(length - n + begin, stop)[:, None]
                seen = (at <= query) & ((at > query - window) | (at < sinks)) if window else at <= query
                mask = torch.zeros(last - begin, len(at)).masked_fill_(~seen, float("-inf"))
            chunks.append(_Chunk(starts[b] + begin, starts[b] + last, rows, len(at), mask))
    return _Plan(starts[-1], decodes, chunks)


def _seen_from(lead: int, sink_blocks: int, stop: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [n] that are gathered, and the places in the table of their blocks: the blocks with sinks,
    then those from `lead` on, up to position `stop`.
    """
    places = torch.arange((stop + size - 1) // size)
    if sink_blocks < lead:
        places = places[(places < sink_blocks) | (places >= lead)]
    at = (places[:, None] * size + torch.arange(size)).reshape(-1)
    return at[at < stop], places


CPU = OpSet(
    "torch",
    "plain torch, few and large calls",
    linear,
    rms_norm,
    add_rms_norm,
    rope,
    write_kv,
    attention,
    silu_mul,
    choose,
    pack,
    experts=experts,
    pack_experts=pack_experts,
    latent_attention=latent_attention,
)
