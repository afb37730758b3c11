"""The KV write, the rotation, and both in one launch: every slot that was meant, no other one."""

from __future__ import annotations

import pytest
import torch
from cases.common import DEVICE, TOLERANCE, Scene, close, kernels, scene

from cbviz.model import ops
from cbviz.model.kv_store import KVLayer, KVStore

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SHAPES = [(1, 1), (5, 5), (19, 40), (1, 17)]


def expected(s: Scene, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """The caches as they must be, from the slots' meaning."""
    out = [c.clone() for c in s.layer[:2]]
    for t, slot in enumerate(s.batch.slot_mapping.tolist()):
        if slot >= 0:
            for cache, x in zip(out, (k, v), strict=True):
                cache[slot // s.batch.block_size, :, slot % s.batch.block_size] = x[t].to(cache.dtype)
    return out


def same(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    close(got.nan_to_num(0.0), want.nan_to_num(0.0), tolerance)


@pytest.mark.parametrize(
    "dtype, heads_kv, dim, block_size",
    [(F32, 1, 32, 16), (F16, 3, 64, 8), (F16, 2, 80, 32), (F32, 1, 128, 1), (F32, 2, 10, 7)],
)
def test_write(dtype: torch.dtype, heads_kv: int, dim: int, block_size: int) -> None:
    s = scene(SHAPES, heads_kv, heads_kv, dim, block_size, dtype, padding=3)
    s.batch.slot_mapping[3] = -1  # also in the middle
    want = expected(s, s.k, s.v)
    kernels(dtype).write_kv(s.k, s.v, s.layer, s.batch)
    for got, cache in zip(s.layer[:2], want, strict=True):
        same(got, cache, 0.0)
    assert s.intact()


def test_write_of_another_type() -> None:
    s = scene(SHAPES, 2, 2, 64, 16, F16)
    k, v = torch.randn(s.k.shape).to(DEVICE), torch.randn(s.v.shape).to(DEVICE)
    want = expected(s, k, v)
    kernels(F16).write_kv(k, v, s.layer, s.batch)
    for got, cache in zip(s.layer[:2], want, strict=True):
        same(got, cache, 0.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "storage, dim", [(torch.int8, 64), (torch.int8, 10), (torch.uint8, 64), (torch.uint8, 80)]
)
def test_codes_are_the_reference_s(storage: torch.dtype, dim: int, fused: bool) -> None:
    """Code for code, scale for scale; rows of zeros, of one number, and with a few large ones among them."""
    torch.manual_seed(dim)
    batch = ops.Batch.build([[3, 1], [2]], [20, 5], [20, 9], 16, 3)
    n = len(batch.slot_mapping)
    k, v = torch.randn(n, 2, dim), torch.randn(n, 2, dim) * 3
    k[1], k[2, :, 0], v[3], v[4] = 0.0, 50.0, 0.7, -0.7
    want, got = (KVStore(1, 5, 2, 16, dim, dtype=storage) for _ in range(2))
    ops.REFERENCE.write_kv(k, v, want.layers[0], batch)
    parts = [p.to(DEVICE) for p in got.parts]
    layer = KVLayer(*parts[0][0], *parts[1][0])
    batch.slot_mapping = batch.slot_mapping.to(DEVICE)
    if fused:
        qkv = torch.cat((torch.randn(n, 2, dim), k, v), 1).reshape(n, -1).to(DEVICE)
        still = torch.zeros(n, dim // 2, device=DEVICE)  # turned by nothing
        kernels().rope_and_write(qkv, still + 1, still, None, None, 1e-5, 2, layer, batch)
    else:
        kernels().write_kv(k.to(DEVICE), v.to(DEVICE), layer, batch)
    for a, b in zip(parts, want.parts, strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("dtype, dim", [(F32, 64), (F32, 10), (F16, 80), (BF16, 32)])
def test_rotate(dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(dim)
    x, angle = torch.randn(19, 3, 2 * dim).to(DEVICE, dtype)[..., :dim], torch.randn(19, dim // 2).to(DEVICE)
    y = kernels(dtype).rope(x, angle.cos(), angle.sin())
    assert y.dtype == dtype
    close(y, ops.rope(x.double(), angle.double().cos(), angle.double().sin()), TOLERANCE[dtype])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    "dtype, heads, heads_kv, dim, block_size", [(F32, 9, 3, 64, 16), (F32, 2, 2, 10, 7), (F16, 7, 1, 80, 32)]
)
def test_rotate_and_write(
    dtype: torch.dtype, heads: int, heads_kv: int, dim: int, block_size: int, normed: bool
) -> None:
    s = scene(SHAPES, heads, heads_kv, dim, block_size, dtype)
    n = len(s.batch.slot_mapping)
    qkv, angle = torch.randn(n, (heads + 2 * heads_kv) * dim).to(DEVICE), torch.randn(n, dim // 2).to(DEVICE)
    weights = (torch.rand(dim).to(DEVICE) + 0.5, torch.rand(dim).to(DEVICE) + 0.5) if normed else (None, None)
    parts = [
        x.reshape(n, -1, dim).double()
        for x in qkv.split([heads * dim, heads_kv * dim, heads_kv * dim], dim=1)
    ]
    if normed:
        parts[:2] = [ops.rms_norm(x, w.double(), 1e-5) for x, w in zip(parts, weights)]
    turned = [ops.rope(x, angle.double().cos(), angle.double().sin()) for x in parts[:2]]
    want = expected(s, turned[1], parts[2])
    q = kernels(dtype).rope_and_write(qkv, angle.cos(), angle.sin(), *weights, 1e-5, heads, s.layer, s.batch)
    assert q.shape == (n, heads, dim) and q.dtype == dtype
    close(q, turned[0], TOLERANCE[dtype])
    for got, cache in zip(s.layer[:2], want, strict=True):
        same(got, cache, TOLERANCE[dtype])
    assert s.intact()
