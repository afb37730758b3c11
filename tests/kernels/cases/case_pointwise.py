"""Norms and the MLP's gate against float64."""

from __future__ import annotations

import pytest
import torch
from cases.common import DEVICE, TOLERANCE, close, kernels

from cbviz.model import ops

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("rows, width", [(1, 576), (3, 24), (2, 1), (4, 100)])
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    """The residual stream stays float32 whatever products are fed with."""
    torch.manual_seed(rows)
    x, residual, weight = (
        torch.randn(rows, width).to(DEVICE, dtype),
        torch.randn(rows, width).to(DEVICE),
        torch.randn(width).to(DEVICE),
    )
    o = kernels(dtype)
    y = o.rms_norm(residual, weight, 1e-5)
    assert y.dtype == dtype
    close(y, ops.rms_norm(residual.double(), weight.double(), 1e-5), TOLERANCE[dtype])
    want, total = ops.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)
    y, summed = o.add_rms_norm(x, residual.clone(), weight, 1e-5)
    close(y, want, TOLERANCE[dtype])
    close(summed, total, 1e-6)
    assert summed.dtype == F32


def test_norm_of_heads_keeps_its_type() -> None:
    x, weight = torch.randn(3, 4, 10).to(DEVICE), torch.randn(10).to(DEVICE)
    y = kernels(F16).rms_norm(x, weight, 1e-5)
    assert y.dtype == F32
    close(y, ops.rms_norm(x.double(), weight.double(), 1e-5), 1e-5)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("rows, width", [(1, 1536), (3, 40), (2, 1), (2, 1025)])
def test_silu_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x = torch.randn(rows, 2 * width).to(DEVICE) * 4
    y = kernels(dtype).silu_mul(x)
    assert y.dtype == dtype and y.shape == (rows, width)
    close(y, ops.silu_mul(x.double()), TOLERANCE[dtype] * 4)


def test_nothing_to_do() -> None:
    o, none = kernels(), torch.empty(0, 8, device=DEVICE)
    assert o.rms_norm(none, torch.ones(8, device=DEVICE), 1e-5).shape == (0, 8)
    assert o.silu_mul(none).shape == (0, 4)
    assert o.choose(none) == ([], [], [])
