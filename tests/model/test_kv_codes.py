"""Attention over codes, windows and sinks: each operator set against dense attention in float64, the whole
pass alone and in company, cut and uncut.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cbviz.model import cpu_ops, ops
from cbviz.model.kv_store import STORAGE, KVLayer, KVStore
from cbviz.model.loader import LoadedModel
from cbviz.model.ops import Batch, OpSet
from tests.model.test_precision import SHAPES, model, tokens

MASKS = [(0, 0), (9, 0), (9, 3), (1, 1), (20, 17), (5, 60)]


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, sinks: int
) -> torch.Tensor:
    """q [n, H, D] are the last n tokens of k, v [length, H_kv, D]: one masked softmax over everything,
    float64.
    """
    groups, length = q.shape[1] // k.shape[1], len(k)
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    i, j = torch.arange(length - len(q), length)[:, None], torch.arange(length)
    seen = (j <= i) & ((i - window < j) | (j < sinks)) if window else j <= i
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("window, sinks", MASKS)
@pytest.mark.parametrize("name", STORAGE)
@pytest.mark.parametrize("operators", [ops.REFERENCE, cpu_ops.CPU], ids=["reference", "torch"])
def test_attention_equals_dense_attention(operators: OpSet, name: str, window: int, sinks: int) -> None:
    """Over what can be read back from the cache.

    Blocks that nobody sees are the null block, and that holds large numbers.
    """
    g = torch.Generator().manual_seed(0)
    size, heads, heads_kv, dim = 4, 6, 2, 12
    lens, fresh = [41, 50, 33, 50, 7], [1, 1, 20, 50, 3]
    layer = KVStore(1, 80, heads_kv, size, dim, dtype=STORAGE[name]).layers[0]
    for x in layer[:4]:
        if x is not None:
            x[0] = 100 if x.dtype in (torch.int8, torch.uint8) else 1e4
    free = random.Random(0).sample(range(1, 80), 79)
    tables = [[free.pop() for _ in range(-(-n // size))] for n in lens]
    keys, values = ([torch.randn(n, heads_kv, dim, generator=g) for n in lens] for _ in range(2))
    batch = Batch.build(tables, lens, lens, size)
    operators.write_kv(torch.cat(keys), torch.cat(values), layer, batch)
    back = [
        ops.read_kv(layer, torch.tensor(t)[torch.arange(n) // size], torch.arange(n) % size)
        for t, n in zip(tables, lens, strict=True)
    ]
    span = max(float(x.max() - x.min()) for x in (*keys, *values))
    off = {"float32": 0.0, "float16": 2e-3, "int8": span / 254 * 1.1, "int4": span / 15 * 0.55}[name]
    assert max(float((k - b[0]).abs().max()) for k, b in zip(keys, back, strict=True)) <= off
    if window:  # as the scheduler does
        gone = [max(0, n - f + 1 - window) // size for n, f in zip(lens, fresh, strict=True)]
        kept = -(-sinks // size)
        tables = [
            [b if i < kept or i >= n else 0 for i, b in enumerate(t)]
            for t, n in zip(tables, gone, strict=True)
        ]
        assert sinks > 20 or any(0 in t for t in tables)
    q = torch.randn(sum(fresh) + 2, heads, dim, generator=g)
    got = operators.attention(q, layer, Batch.build(tables, fresh, lens, size, 2), 0.3, window, sinks=sinks)
    first = 0
    for n, (k, v) in zip(fresh, back, strict=True):
        torch.testing.assert_close(
            got[first : first + n].double(),
            dense(q[first : first + n], k.float(), v.float(), 0.3, window, sinks),
            atol=3e-5,
            rtol=3e-5,
        )
        first += n
    assert not got[first:].any()


def passes(
    m: LoadedModel,
    o: OpSet,
    name: str,
    sequences: list[list[int]],
    pieces: list[list[int]],
    window: int,
    sinks: int,
    size: int = 7,
) -> tuple[list[torch.Tensor], KVStore]:
    """Logits of all positions, the sequences together, cut as `pieces` says; blocks that leave the window are
    replaced by the null block, which holds large numbers.
    """
    d = m.decoder(o, window, "exact", sinks)
    needed = [-(-len(s) // size) for s in sequences]
    kv = m.config.store(sum(needed) + 1, size, dtype=STORAGE[name])
    for part in kv.parts:
        part[:, :, 0] = 100
    free = random.Random(1).sample(range(1, kv.num_blocks), kv.num_blocks - 1)
    tables = [[free.pop() for _ in range(n)] for n in needed]
    done, out = [0] * len(sequences), [[] for _ in sequences]  # type: ignore[var-annotated]
    for step in range(max(map(len, pieces))):
        some = [i for i, p in enumerate(pieces) if step < len(p)]
        lens = [pieces[i][step] for i in some]
        if window and min(m.config.windows) == max(m.config.windows):
            for i in some:
                for b in range(-(-sinks // size), max(0, done[i] - window + 1) // size):
                    tables[i][b] = 0
        ids = [t for i, n in zip(some, lens, strict=True) for t in sequences[i][done[i] : done[i] + n]]
        positions = [p for i, n in zip(some, lens, strict=True) for p in range(done[i], done[i] + n)]
        batch = Batch.build(
            [tables[i] for i in some], lens, [done[i] + n for i, n in zip(some, lens, strict=True)], size
        )
        logits = d.forward(torch.tensor(ids), torch.tensor(positions), batch, kv, torch.arange(len(ids)))
        for i, part in zip(some, logits.split(lens), strict=True):
            out[i].append(part)
            done[i] += len(part)
    return [torch.cat(x) for x in out], kv


@pytest.mark.parametrize("window, sinks", [(0, 0), (9, 3), (40, 8)])
@pytest.mark.parametrize("name", STORAGE)
@pytest.mark.parametrize("shape", ["even", "odd", "as SmolLM2"])
def test_the_compiled_pass_equals_the_operators(
    shape: str, name: str, window: int, sinks: int, compiled: OpSet
) -> None:
    """A number that lies between two codes may become the other one, here and there; nothing else differs."""
    m = model(**SHAPES[shape])
    sequence = tokens(70, m.config.vocab_size)
    (want,), a = passes(m, cpu_ops.CPU, name, [sequence], [[70]], window, sinks)
    (got,), b = passes(m, compiled, name, [sequence], [[70]], window, sinks)
    bound = {"float32": 2e-5, "float16": 2e-3, "int8": 5e-3, "int4": 5e-2}[name]
    assert (got - want).abs().max() < bound * want.abs().max()
    if name.startswith("int"):
        assert all(float((x != y).float().mean()) < 0.02 for x, y in zip(a.parts, b.parts, strict=True))
        assert b.parts[0].float().std() > 1, "codes were written"


@pytest.mark.parametrize("window, sinks", [(0, 0), (9, 3), (33, 20)])
@pytest.mark.parametrize("name", STORAGE)
def test_company_and_cuts_change_no_bit(name: str, window: int, sinks: int, compiled: OpSet) -> None:
    for shape in ("odd", "as SmolLM2"):
        m = model(**SHAPES[shape])
        sequences = [tokens(n, m.config.vocab_size, n) for n in (65, 12, 40)]
        apart = [passes(m, compiled, name, [s], [[len(s)]], window, sinks)[0][0] for s in sequences]
        together, _ = passes(
            m, compiled, name, sequences, [[30, 1, 1, 1, 32], [12], [1] * 10 + [30]], window, sinks
        )
        assert all(torch.equal(x, y) for x, y in zip(apart, together, strict=True))


def test_what_a_mask_hides_is_not_read() -> None:
    """A window and sinks change the logits from the first hidden key on, and not before."""
    m = model(**SHAPES["even"])
    sequence = tokens(40, m.config.vocab_size)

    def run(window: int, sinks: int) -> torch.Tensor:
        return passes(m, ops.REFERENCE, "float32", [sequence], [[40]], window, sinks)[0][0]

    full, bare, sunk = run(0, 0), run(8, 0), run(8, 3)
    assert torch.equal(full[:8], bare[:8]) and torch.equal(full[:11], sunk[:11])
    assert (
        (full[8] - bare[8]).abs().max() > 1e-3
        and (full[11] - sunk[11]).abs().max() > 1e-3
        and (bare[20] - sunk[20]).abs().max() > 1e-3
    )


def test_quantised_attention_is_near_and_not_equal(compiled: OpSet) -> None:
    m = model(**SHAPES["as SmolLM2"])
    sequence = tokens(60, m.config.vocab_size)
    full, half, eight, four = (passes(m, compiled, n, [sequence], [[60]], 0, 0)[0][0] for n in STORAGE)
    errors = [
        float((x - full).square().mean().sqrt() / full.square().mean().sqrt()) for x in (half, eight, four)
    ]
    assert 1e-5 < errors[0] < 1e-3 < errors[1] < 0.02 < errors[2] < 0.25, errors


def test_turned_keys_are_the_keys(compiled: OpSet) -> None:
    """The rotation alone changes nothing: with float32 numbers in place of 4-bit codes the logits stay."""
    m = model(**SHAPES["even"])
    sequence = tokens(30, m.config.vocab_size)

    def run(turned: bool) -> torch.Tensor:
        d = m.decoder(ops.REFERENCE)
        kv = m.config.store(8, 4)
        if turned:
            from cbviz.model.kv_store import hadamard

            kv.layers = [KVLayer(x.k, x.v, rotation=hadamard(m.config.head_dim)) for x in kv.layers]
        every = torch.arange(30)
        return d.forward(
            torch.tensor(sequence), every, Batch.build([list(range(8))], [30], [30], 4), kv, every
        )

    torch.testing.assert_close(run(True), run(False), atol=2e-5, rtol=2e-5)


def test_shapes_of_any_kind() -> None:
    extra: dict[str, Any] = {"heads": 4, "kv_heads": 4, "dim": 6}
    m = model(**extra)
    (got,), _ = passes(m, cpu_ops.CPU, "int4", [tokens(9, 50)], [[9]], 0, 0)
    assert torch.isfinite(got).all()
