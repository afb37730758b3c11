"""The quick operators against the reference, on awkward shapes."""

from __future__ import annotations

import random

import pytest
import torch

from cbviz.model import cpu_ops, ops
from cbviz.model.hub import ModelError
from cbviz.model.kv_store import KVLayer
from cbviz.model.ops import Batch
from tests.model.conftest import awkward_batch

REF, CPU = ops.REFERENCE, cpu_ops.CPU


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 40])
def test_linear(rows: int) -> None:
    torch.manual_seed(rows)
    x, w, b = torch.randn(rows, 33), torch.randn(70, 33), torch.randn(70)
    for bias in (None, b):
        y = CPU.linear(x, w, bias)
        assert y.is_contiguous()
        close(y, REF.linear(x, w, bias))


@pytest.mark.parametrize("rows", [1, 4, 17])
def test_pointwise(rows: int) -> None:
    torch.manual_seed(rows)
    x, r, w = torch.randn(rows, 24), torch.randn(rows, 24), torch.randn(24)
    close(CPU.rms_norm(x, w, 1e-5), REF.rms_norm(x, w, 1e-5))
    for got, want in zip(
        CPU.add_rms_norm(x.clone(), r.clone(), w, 1e-5), REF.add_rms_norm(x, r, w, 1e-5), strict=True
    ):
        close(got, want)
    close(CPU.silu_mul(x.clone()), REF.silu_mul(x))
    heads, angle = torch.randn(rows, 5, 8), torch.randn(rows, 4)
    close(CPU.rope(heads, angle.cos(), angle.sin()), REF.rope(heads, angle.cos(), angle.sin()))


def test_rope_turns_by_position_only_relatively() -> None:
    """The score of a query and a key depends on their distance."""
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    freq = torch.tensor([1.0, 0.3, 0.1, 0.01])

    def score(i: int, j: int) -> float:
        a, b = i * freq[None], j * freq[None]
        return float((REF.rope(q, a.cos(), a.sin()) * REF.rope(k, b.cos(), b.sin())).sum())

    assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-4)


@pytest.mark.parametrize("heads, heads_kv, dim", [(1, 1, 16), (8, 2, 10), (9, 3, 64), (4, 4, 8)])
@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("window", [0, 1, 5, 40])
def test_write_and_attention(
    heads: int, heads_kv: int, dim: int, block_size: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes of very different lengths, chunks with and without a prefix, a padded tail; small limits, so
    that groups and slabs split.
    """
    monkeypatch.setattr(cpu_ops, "_SLAB", 16)
    monkeypatch.setattr(cpu_ops, "_MAX_GATHERED_TOKENS", 200)
    rng = random.Random(f"{heads} {block_size} {window}")
    torch.manual_seed(rng.randrange(10**6))
    batch, num_blocks = awkward_batch(rng, block_size)
    tokens = len(batch.slot_mapping)
    data = torch.randn(2, num_blocks, heads_kv, block_size, dim)
    layers = [KVLayer(*data.clone()), KVLayer(*data.clone())]
    q, k, v = (
        torch.randn(tokens, heads, dim),
        torch.randn(tokens, heads_kv, dim),
        torch.randn(tokens, heads_kv, dim),
    )
    for o, layer in zip((REF, CPU), layers, strict=True):
        o.write_kv(k, v, layer, batch)
    assert torch.equal(layers[0].k, layers[1].k) and torch.equal(layers[0].v, layers[1].v)
    assert not torch.equal(layers[0].k, data[0])
    want, got = (
        o.attention(q, layer, batch, dim**-0.5, window) for o, layer in zip((REF, CPU), layers, strict=True)
    )
    close(got, want)
    assert (got[-3:] == 0).all()


def test_reference_attention_is_softmax_of_scores() -> None:
    """The specification itself, against the textbook formula on contiguous tensors."""
    torch.manual_seed(0)
    n, dim = 6, 4
    k, v, q = torch.randn(n, 1, dim), torch.randn(n, 1, dim), torch.randn(n, 1, dim)
    layer = KVLayer(torch.zeros(3, 1, 4, dim), torch.zeros(3, 1, 4, dim))
    batch = Batch.build([[2, 1]], [n], [n], 4)
    REF.write_kv(k, v, layer, batch)
    scores = (q[:, 0] @ k[:, 0].T) * 0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    close(REF.attention(q, layer, batch, 0.5, 0)[:, 0], scores.softmax(-1) @ v[:, 0])


def test_pick() -> None:
    assert (
        ops.pick("auto", "cpu").name in ("compiled", "torch")
        and ops.pick("cpu", "cpu").name == ops.pick("auto", "cpu").name
    )
    assert ops.pick("torch", "cpu").capturable and not ops.pick("cpu", "cpu").capturable
    assert ops.pick("reference", "cpu") is ops.REFERENCE
    assert ops.pick("auto", "cuda").name in ("device", "triton") and ops.pick("auto", "cuda").capturable
    with pytest.raises(ModelError, match=r"kernels 'triton' cannot be used: .*; set kernels to"):
        ops.pick("triton", "cpu")
    with pytest.raises(ModelError, match="device is 'cuda'"):
        ops.pick("cpu", "cuda")
    with pytest.raises(ModelError, match="one of auto"):
        ops.pick("fastest", "cpu")
