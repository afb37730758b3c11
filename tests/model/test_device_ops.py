"""The operators for any device against the reference, on awkward shapes; and drawing tokens there."""

from __future__ import annotations

import random

import pytest
import torch

from cbviz.messages import Sampling
from cbviz.model import device_ops, ops
from cbviz.model.hub import ModelError
from cbviz.model.kv_store import KVLayer, KVStore
from cbviz.model.matrix import convert
from cbviz.model.ops import Batch
from cbviz.model.sampling import draw_rows, filtered_probs
from tests.device import NoWaiting
from tests.model.conftest import awkward_batch

REF, DEV = ops.REFERENCE, device_ops.TORCH


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_pointwise(rows: int, kind: torch.dtype) -> None:
    torch.manual_seed(rows)
    tight = {"atol": 2e-5, "rtol": 2e-5} if kind == torch.float32 else {"atol": 2e-2, "rtol": 4e-3}
    x, r, w = torch.randn(rows, 24), torch.randn(rows, 24), torch.randn(24)
    matrix, bias = torch.randn(70, 24).to(kind), torch.randn(70)
    with NoWaiting():
        got = [
            DEV.linear(x, matrix, None),
            DEV.linear(x, matrix, bias),
            DEV.head(x, matrix),
            DEV.silu_mul(x.to(kind)),  # type: ignore[misc]
            DEV.rms_norm(x.to(kind), w, 1e-5),
            *DEV.add_rms_norm(x.to(kind), r.clone(), w, 1e-5),
        ]
    want = [
        REF.linear(x, matrix, None),
        REF.linear(x, matrix, bias),
        REF.linear(x, matrix, None),
        REF.silu_mul(x),
        REF.rms_norm(x, w, 1e-5),
        *REF.add_rms_norm(x, r, w, 1e-5),
    ]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float(), b, **tight)
    assert [t.dtype for t in got] == [
        kind,
        kind,
        torch.float32,
        kind,
        kind,
        torch.float32,
        torch.float32,
    ]  # the residual stream and the logits are float32
    heads, angle = torch.randn(rows, 5, 8), torch.randn(rows, 4)
    turned = DEV.rope(heads.to(kind), angle.cos(), angle.sin())
    assert turned.dtype == kind
    torch.testing.assert_close(turned.float(), REF.rope(heads, angle.cos(), angle.sin()), **tight)


@pytest.mark.parametrize("heads, heads_kv, dim", [(8, 2, 10), (9, 3, 64)])
@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
@pytest.mark.parametrize("sinks", [0, 2])
def test_write_and_attention(
    sinks: int,
    heads: int,
    heads_kv: int,
    dim: int,
    block_size: int,
    window: int,
    kind: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decodes and chunks in any order, with and without a prefix, a padded tail; small limits, so that
    gathers and slabs split. Nothing waits for the device.
    """
    monkeypatch.setattr(device_ops, "_SLAB", 16)
    monkeypatch.setattr(device_ops, "_GATHERED_TOKENS", 600)
    rng = random.Random(f"{heads} {block_size} {window}")
    torch.manual_seed(rng.randrange(10**6))
    batch, num_blocks = awkward_batch(rng, block_size)
    tokens = len(batch.slot_mapping)
    data = torch.randn(2, num_blocks, heads_kv, block_size, dim).to(kind).float()
    data[:, 0] = 0
    before = data[0].clone()
    theirs, mine = KVLayer(*data.clone()), KVLayer(*data.to(kind))
    q, k, v = (torch.randn(tokens, h, dim).to(kind) for h in (heads, heads_kv, heads_kv))
    REF.write_kv(k.float(), v.float(), theirs, batch)
    want = REF.attention(q.float(), theirs, batch, dim**-0.5, window, sinks)
    with NoWaiting():
        DEV.write_kv(k, v, mine, batch)
        got = DEV.attention(q, mine, batch, dim**-0.5, window, sinks)
    assert torch.equal(mine.k.float(), theirs.k) and torch.equal(mine.v.float(), theirs.v)
    assert not torch.equal(theirs.k, before)
    torch.testing.assert_close(
        got.float(),
        want,
        **({"atol": 2e-5, "rtol": 2e-5} if kind == torch.float32 else {"atol": 4e-3, "rtol": 4e-3}),
    )
    assert (got[-3:] == 0).all()


@pytest.mark.parametrize("storage", [torch.int8, torch.uint8])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_a_cache_of_codes(storage: torch.dtype, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = Batch.build([[3, 1, 6], [2, 4], [5]], [1, 7, 1], [9, 7, 3], 4, num_padding=2)
    stores = [KVStore(1, 8, 2, 4, 16, dtype=storage) for _ in range(2)]
    q, k, v = (torch.randn(11, h, 16).to(kind) for h in (6, 2, 2))
    mine, theirs = stores[0].layers[0], stores[1].layers[0]
    with NoWaiting():
        DEV.write_kv(k, v, mine, batch)
        got = DEV.attention(q, mine, batch, 0.25, 0)
    REF.write_kv(k.float(), v.float(), theirs, batch)
    for a, b in zip(mine, theirs, strict=True):
        assert b is None or torch.equal(a, b)  # type: ignore[arg-type]
    torch.testing.assert_close(
        got.float(), REF.attention(q.float(), theirs, batch, 0.25, 0), atol=4e-3, rtol=4e-3
    )
    assert stores[0].quantised and mine.k.any()


def test_eight_bit_weights_are_refused() -> None:
    with pytest.raises(ModelError, match="precision is 'int8'"):
        DEV.pack(convert(torch.randn(3, 4), "int8"))


def test_a_product_in_float32_of_16_bits_is_known_to_torch() -> None:
    """The call that the head makes on a card, checked where there is none for its signature alone."""
    a = torch.empty(2, 3, dtype=torch.float16, device="meta")
    assert torch.mm(a, a.t(), out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("seed", range(30))
def test_drawing_all_rows_at_once_draws_what_one_row_does(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num, vocab = rng.choice([1, 3, 8]), rng.choice([2, 7, 100])
    logits = (torch.randn(num, vocab) * rng.choice([0.1, 3, 20])).round(decimals=1)  # with ties
    samplings = [
        Sampling(
            temperature=rng.choice([0.2, 1.0, 5.0]),
            top_k=rng.choice([0, 1, 3, 2 * vocab]),
            top_p=rng.choice([1.0, 0.9, 0.3, 1e-6]),
        )
        for _ in range(num)
    ]
    chances = [rng.choice([0.0, rng.random(), 1 - 2**-53]) for _ in range(num)]
    with NoWaiting():
        got = draw_rows(
            logits,
            torch.tensor([s.temperature for s in samplings], dtype=torch.float64),
            torch.tensor([s.top_k for s in samplings]),
            torch.tensor([s.top_p for s in samplings], dtype=torch.float64),
            torch.tensor(chances, dtype=torch.float64),
        )
    for row, (s, chance) in enumerate(zip(samplings, chances, strict=True)):
        ids, probs = filtered_probs(logits[row], s)
        ends = probs.cumsum(0)
        place = ids.tolist().index(int(got[row]))
        # Where the number lies within rounding of a border, either side is right.
        assert (place == 0 or ends[place - 1] <= chance + 1e-12) and (
            place == len(ids) - 1 or chance < ends[place] + 1e-12
        ), (s, chance)
