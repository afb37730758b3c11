"""Rotation of query and key heads by their positions (RoPE, Su et al.

2021): the first half of a head is turned against the second.

Graph-safe. `kv_write.rotate_and_write` does the same in one launch with the write.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def rotate(
    x,
    cos,
    sin,
    out,
    num_tokens,
    x_t,
    x_h,
    angle_t,
    o_t,
    o_h,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Grid (tokens / BLOCK_T, heads). x, out [T, heads, 2 HALF]; cos, sin [T, HALF] float32."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_HALF)
    mask = (t < num_tokens)[:, None] & (d < HALF)[None, :]
    at = x + t[:, None] * x_t + head * x_h + d[None, :]
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + t[:, None] * angle_t + d[None, :], mask=mask, other=0.0)
    s = tl.load(sin + t[:, None] * angle_t + d[None, :], mask=mask, other=0.0)
    to = out + t[:, None] * o_t + head * o_h + d[None, :]
    tl.store(to, (low * c - high * s).to(out.dtype.element_ty), mask=mask)
    tl.store(to + HALF, (high * c + low * s).to(out.dtype.element_ty), mask=mask)
