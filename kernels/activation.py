"""The gate of the MLP: silu(gate) * up (SwiGLU, Shazeer 2020). Graph-safe."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu_mul(x, y, x_t, y_t, I: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, I / BLOCK). x [T, 2 I], gate first -> y [T, I]."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + t * x_t + i, mask=i < I, other=0.0).to(tl.float32)
    up = tl.load(x + t * x_t + I + i, mask=i < I, other=0.0).to(tl.float32)
    tl.store(y + t * y_t + i, (gate / (1.0 + tl.exp(-gate)) * up).to(y.dtype.element_ty), mask=i < I)
