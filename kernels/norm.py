"""RMS norm (Zhang and Sennrich 2019), alone or fused with the residual sum before it. Graph-safe."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x, residual, weight, y, eps, x_t, r_t, y_t, C: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    """Grid (rows). y [T, C] = norm of x [T, C]; with ADD of x + residual, and the sum replaces residual [T,
    C]. Sums in float32.
    """
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < C
    v = tl.load(x + t * x_t + c, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        v += tl.load(residual + t * r_t + c, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual + t * r_t + c, v.to(residual.dtype.element_ty), mask=mask)
    r = tl.rsqrt(tl.sum(v * v, 0) / C + eps)
    w = tl.load(weight + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + t * y_t + c, (v * r * w).to(y.dtype.element_ty), mask=mask)
