"""The operators in plain torch for any device: few large calls, and nothing read on the host, so that a pass
of decodes can be captured.

Owns the path of a card for which there are no kernels of ours; same signatures and meaning as `ops`. With
float32 weights everything is float32. With 16-bit weights each product takes and gives 16 bits and adds up in
float32; the residual stream, norms, rotation and logits stay float32.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from cbviz.model.hub import ModelError
from cbviz.model.kv_store import KVLayer, quantise
from cbviz.model.matrix import Int8Matrix, Matrix
from cbviz.model.ops import Batch, OpSet, choose, read_kv

_GATHERED_TOKENS = 1 << 20
"""Keys of one gather over decodes: bounds the copy (64 heads of 128 in 16 bits: 16 GB; SmolLM2: 0.4 GB)."""
_SLAB = 512
"""Queries of a prompt's chunk that attend in one call: bounds their mask."""


def pack(weight: Matrix) -> torch.Tensor:
    if isinstance(weight, Int8Matrix):
        raise ModelError(
            "precision is 'int8', but operators 'torch' multiply no 8-bit weights; set precision to 'fast' "
            "or 'exact', or kernels to 'auto' on a CPU"
        )
    return weight


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))


def head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In 16 bits two tokens of nearly equal logits would stand level, so the sums are kept as they were added
    up.
    """
    if weight.dtype == torch.float32:
        return F.linear(x, weight)
    x = x.to(weight.dtype)
    if not weight.is_cuda:
        return F.linear(x.float(), weight.float())
    return (
        torch.mm(x, weight.t(), out_dtype=torch.float32)
        if _keeps_sums(weight.dtype)
        else F.linear(x, weight).float()
    )


@functools.cache
def _keeps_sums(dtype: torch.dtype) -> bool:
    """Whether this torch gives a 16-bit product as float32 (2.8 and later, on CUDA)."""
    one = torch.ones(16, 16, dtype=dtype, device="cuda")
    try:
        return torch.mm(one, one, out_dtype=torch.float32).dtype == torch.float32
    except (TypeError, RuntimeError):  # NotImplementedError is one
        return False


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual.add_(x)
    return F.rms_norm(residual, (x.shape[-1],), weight, eps), residual


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)


def write_kv(k: torch.Tensor, v: torch.Tensor, layer: KVLayer, batch: Batch) -> None:
    if (found := batch.shared.get("slots")) is None:
        # Which tokens are padding is known to the device alone: they write zeros into the null block, which
        # nobody attends to.
        kept = batch.slot_mapping >= 0
        slots = batch.slot_mapping.clamp(min=0)
        found = batch.shared["slots"] = (
            slots // batch.block_size,
            slots % batch.block_size,
            ~kept[:, None, None],
        )
    blocks, offsets, padding = found
    for x, kept, scales, zeros in (
        (k, layer.k, layer.k_scale, layer.k_zero),
        (v, layer.v, layer.v_scale, layer.v_zero),
    ):
        at = blocks, slice(None), offsets
        if scales is None:
            kept[at] = x.to(kept.dtype).masked_fill(padding, 0)
            continue
        codes, scale, zero = quantise(x.float().masked_fill(padding, 0), kept.dtype)
        kept[at], scales[at] = codes, scale
        if zeros is not None and zero is not None:
            zeros[at] = zero


def attention(
    q: torch.Tensor, layer: KVLayer, batch: Batch, scale: float, window: int, sinks: int = 0
) -> torch.Tensor:
    out = torch.empty_like(q)
    lens = batch.query_lens_list
    b = token = 0
    while b < len(lens):
        if lens[b] != 1:
            _attend_chunk(q, out, layer, batch, b, token, scale, window, sinks)
            token += lens[b]
            b += 1
            continue
        end = b
        while end < len(lens) and lens[end] == 1:
            end += 1
        _attend_decodes(q, out, layer, batch, b, end, token, scale, window, sinks)
        token += end - b
        b = end
    out[token:] = 0
    return out


def _attend_decodes(
    q: torch.Tensor,
    out: torch.Tensor,
    layer: KVLayer,
    batch: Batch,
    first: int,
    last: int,
    token: int,
    scale: float,
    window: int,
    sinks: int,
) -> None:
    """Sequences `first` to `last`, one query each: their blocks side by side, the heads of a group as rows of
    their key head.
    """
    heads_kv, size = layer.k.shape[1:3]
    heads, dim = q.shape[1:]
    # A captured pass knows no lengths: it attends over the whole width of its table.
    width = (
        batch.block_table.shape[1]
        if batch.captured
        else (max(batch.seq_lens_list[first:last]) + size - 1) // size
    )
    at_once = max(1, _GATHERED_TOKENS // (width * size))
    for b in range(first, last, at_once):
        end = min(b + at_once, last)
        n, t = end - b, token + b - first
        table = batch.block_table[b:end, :width].clamp(min=0).long()
        seen = _seen(batch, b, end, width * size, window, sinks)
        k, v = (
            x.view(n, width, heads_kv, size, dim)
            .transpose(1, 2)
            .reshape(n, heads_kv, width * size, dim)
            .to(q.dtype)
            for x in read_kv(layer, table.view(-1), slice(None))
        )
        y = F.scaled_dot_product_attention(
            q[t : t + n].reshape(n, heads_kv, heads // heads_kv, dim), k, v, attn_mask=seen, scale=scale
        )
        out[t : t + n] = y.reshape(n, heads, dim)


def _seen(batch: Batch, first: int, last: int, keys: int, window: int, sinks: int) -> torch.Tensor:
    """[B, 1, 1, keys]: which keys each sequence's newest token sees.

    The same in every layer of that window.
    """
    name = ("seen", first, last, keys, window, sinks)
    if name not in batch.shared:
        at, end = torch.arange(keys, device=batch.seq_lens.device), batch.seq_lens[first:last, None]
        batch.shared[name] = ((at < end) & ((at >= end - window) | (at < sinks)) if window else at < end)[
            :, None, None, :
        ]
    mask: torch.Tensor = batch.shared[name]
    return mask


def _attend_chunk(
    q: torch.Tensor,
    out: torch.Tensor,
    layer: KVLayer,
    batch: Batch,
    b: int,
    token: int,
    scale: float,
    window: int,
    sinks: int,
) -> None:
    """Several queries of sequence `b`, which start at `token`."""
    heads_kv, size = layer.k.shape[1:3]
    heads, dim = q.shape[1:]
    n, length = batch.query_lens_list[b], batch.seq_lens_list[b]
    groups = heads // heads_kv
    for begin in range(0, n, _SLAB):
        end = min(begin + _SLAB, n)
        first, stop = length - n + begin, length - n + end  # the slab's positions
        lead = max(0, first + 1 - window) // size if window and not sinks else 0
        table = batch.block_table[b, lead : (stop + size - 1) // size].clamp(min=0).long()
        k, v = (
            x.transpose(0, 1).reshape(heads_kv, -1, dim)[None, :, : stop - lead * size].to(q.dtype)
            for x in read_kv(layer, table, slice(None))
        )
        query, at = (
            torch.arange(first, stop, device=q.device)[:, None],
            torch.arange(lead * size, stop, device=q.device),
        )
        seen = (at <= query) & ((at > query - window) | (at < sinks)) if window else at <= query
        rows = (
            q[token + begin : token + end]
            .view(end - begin, heads_kv, groups, dim)
            .permute(1, 2, 0, 3)
            .reshape(1, heads_kv, -1, dim)
        )
        y = F.scaled_dot_product_attention(rows, k, v, attn_mask=seen.repeat(groups, 1), scale=scale)
        out[token + begin : token + end] = (
            y[0].view(heads_kv, groups, end - begin, dim).permute(2, 0, 1, 3).reshape(end - begin, heads, dim)
        )


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return F.silu(x[:, :half]).mul_(x[:, half:])


TORCH = OpSet(
    "device",
    "plain torch, few and large calls, for any device",
    linear,
    rms_norm,
    add_rms_norm,
    rope,
    write_kv,
    attention,
    silu_mul,
    choose,
    pack,
    head=head,
    capturable=True,
)
