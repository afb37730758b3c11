"""Keys and values into their slots of the paged cache, alone or together with the rotation that comes before.

Owns the write; the layout is `paged_attention`'s (slots, codes of 8 and 4 bits with scales and zeros).

Graph-safe: slots come from the device, -1 is skipped; the grid follows from the number of tokens and heads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _nearest(x):
    """To the nearest whole number, ties to even, for |x| < 2^22: adding and taking away 1.5 * 2^23 leaves no
    bits for the rest.
    """
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _store(
    cache,
    scales,
    zeros,
    block,
    offset,
    head,
    low,
    high,
    ok,
    d,
    c_b,
    c_h,
    c_s,
    s_b,
    s_h,
    HALF: tl.constexpr,
    KV_BITS: tl.constexpr,
):
    """The rows `low` [T, D/2] (dimensions below D/2) and `high` (the others), float32, into slots (block,
    offset) [T] of one head; as codes if KV_BITS is 8 or 4.
    """
    at = (block * c_b + head * c_h + offset * c_s)[:, None]
    inside = (d < HALF)[None, :]
    mask = ok[:, None] & inside
    if KV_BITS > 8:
        tl.store(cache + at + d[None, :], low.to(cache.dtype.element_ty), mask=mask)
        tl.store(cache + at + HALF + d[None, :], high.to(cache.dtype.element_ty), mask=mask)
    else:
        beside = block * s_b + head * s_h + offset
        if KV_BITS == 4:
            least = tl.minimum(
                tl.min(tl.where(inside, low, float("inf")), 1),
                tl.min(tl.where(inside, high, float("inf")), 1),
            )
            most = tl.maximum(
                tl.max(tl.where(inside, low, -float("inf")), 1),
                tl.max(tl.where(inside, high, -float("inf")), 1),
            )
            zero = least.to(tl.float16)
            tl.store(zeros + beside, zero, mask=ok)
            zero = zero.to(tl.float32)
            low -= zero[:, None]
            high -= zero[:, None]
            span = tl.div_rn(most - zero, 15.0)
        else:
            span = tl.div_rn(tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1)), 127.0)
        # Codes are made with the scale as it is kept, rounded to 16 bits.
        scale = span.to(tl.float16)
        tl.store(scales + beside, scale, mask=ok)
        scale = scale.to(tl.float32)
        by = tl.where(scale > 0.0, tl.div_rn(1.0, tl.where(scale > 0.0, scale, 1.0)), 0.0)[:, None]
        low = _nearest(low * by)
        high = _nearest(high * by)
        if KV_BITS == 8:
            tl.store(cache + at + d[None, :], tl.clamp(low, -127.0, 127.0).to(tl.int8), mask=mask)
            tl.store(cache + at + HALF + d[None, :], tl.clamp(high, -127.0, 127.0).to(tl.int8), mask=mask)
        else:
            packed = tl.clamp(low, 0.0, 15.0).to(tl.int32) | (tl.clamp(high, 0.0, 15.0).to(tl.int32) << 4)
            tl.store(cache + at + d[None, :], packed.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def write(
    k,
    v,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    k_zero,
    v_zero,
    slots,
    num_tokens,
    x_t,
    x_h,
    y_t,
    y_h,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    s_b,
    s_h,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    KV_BITS: tl.constexpr,
):
    """Grid (tokens / BLOCK_T, H_kv). k, v [T, H_kv, 2 HALF] into slots [T] int64; -1: nowhere."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_HALF)
    slot = tl.load(slots + t, mask=t < num_tokens, other=-1).to(tl.int64)
    ok = slot >= 0
    mask = ok[:, None] & (d < HALF)[None, :]
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    at = k + t[:, None] * x_t + head * x_h + d[None, :]
    _store(
        k_cache,
        k_scale,
        k_zero,
        block,
        offset,
        head,
        tl.load(at, mask=mask, other=0.0).to(tl.float32),
        tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32),
        ok,
        d,
        k_b,
        k_h,
        k_s,
        s_b,
        s_h,
        HALF,
        KV_BITS,
    )
    at = v + t[:, None] * y_t + head * y_h + d[None, :]
    _store(
        v_cache,
        v_scale,
        v_zero,
        block,
        offset,
        head,
        tl.load(at, mask=mask, other=0.0).to(tl.float32),
        tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32),
        ok,
        d,
        v_b,
        v_h,
        v_s,
        s_b,
        s_h,
        HALF,
        KV_BITS,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def rotate_and_write(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    k_zero,
    v_zero,
    slots,
    num_tokens,
    eps,
    qkv_t,
    angle_t,
    q_t,
    q_h,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    s_b,
    s_h,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NORM: tl.constexpr,
    KV_BITS: tl.constexpr,
):
    """Grid (tokens / BLOCK_T, H + 2 H_kv). qkv [T, (H + 2 H_kv) D] as the product left it: queries, keys,
    values of each token.

    Queries are normed per head (NORM), rotated and go to q [T, H, D]; keys likewise, into their slots; values
    into theirs. Slot -1: q only.
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_HALF)
    inside = (t < num_tokens)[:, None] & (d < HALF)[None, :]
    at = qkv + t[:, None] * qkv_t + head * (2 * HALF) + d[None, :]
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < H + H_KV:
        if NORM:
            weight = q_norm if head < H else k_norm
            w_low = tl.load(weight + d, mask=d < HALF, other=0.0).to(tl.float32)
            w_high = tl.load(weight + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
            r = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
            low = low * r * w_low[None, :]
            high = high * r * w_high[None, :]
        c = tl.load(cos + t[:, None] * angle_t + d[None, :], mask=inside, other=0.0)
        s = tl.load(sin + t[:, None] * angle_t + d[None, :], mask=inside, other=0.0)
        turned = low * c - high * s
        high = high * c + low * s
        low = turned
    if head < H:
        to = q + t[:, None] * q_t + head * q_h + d[None, :]
        tl.store(to, low.to(q.dtype.element_ty), mask=inside)
        tl.store(to + HALF, high.to(q.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + t, mask=t < num_tokens, other=-1).to(tl.int64)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        if head < H + H_KV:
            _store(
                k_cache,
                k_scale,
                k_zero,
                block,
                offset,
                head - H,
                low,
                high,
                slot >= 0,
                d,
                k_b,
                k_h,
                k_s,
                s_b,
                s_h,
                HALF,
                KV_BITS,
            )
        else:
            _store(
                v_cache,
                v_scale,
                v_zero,
                block,
                offset,
                head - H - H_KV,
                low,
                high,
                slot >= 0,
                d,
                v_b,
                v_h,
                v_s,
                s_b,
                s_h,
                HALF,
                KV_BITS,
            )
