"""Every operator of a set against the reference in float64, on awkward shapes and a cache whose unused slots
hold poison. For any device and type.

Owns the cases and tolerances. Poison is NaN for kernels, which must not read what they do not need, and a
large number for sets that gather whole blocks and mask them (`capturable` plain torch), where a NaN would
survive its weight of 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from cbviz.messages import Sampling
from cbviz.model import ops
from cbviz.model.kv_store import KVLayer, KVStore
from cbviz.model.ops import Batch, OpSet, Shape
from cbviz.model.sampling import draw_rows

TOLERANCE = {torch.float32: 3e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
"""Largest difference allowed, of numbers around 1; larger numbers by as much relatively."""
SHAPES = ((9, 3, 64, 16), (8, 2, 80, 7), (4, 4, 32, 1), (14, 2, 128, 32))
"""Query heads, key heads, head size, block size.

The first is SmolLM2's; 7 heads a key head, blocks of 1, and sizes that are no powers of two among the others.
"""
SEQUENCES = ((1, 1), (1, 15), (5, 5), (1, 16), (33, 70), (1, 17), (2, 90), (1, 130), (20, 20))
"""Tokens in the step and keys of each sequence, in this order: decodes and chunks mixed."""
DECODES = ((1, 1), (1, 16), (1, 17), (1, 130), (1, 64), (1, 300))
HIDDEN, INNER = 72, 200

Row = dict[str, Any]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""What an operator gave, and what it should have."""


def run(
    kernels: str,
    device: torch.device | str,
    kinds: Sequence[torch.dtype] = tuple(TOLERANCE),
    shapes: Sequence[tuple[int, int, int, int]] = SHAPES,
) -> Iterator[Row]:
    """One row a case as it is done: `op`, `kernels`, `dtype`, `shape`, `error`, `tolerance`, `ok`; or
    `raised` instead of the figures.

    Raises ModelError where there is no such set.
    """
    for kind in kinds:
        for heads, heads_kv, dim, size in shapes:
            o = ops.pick(kernels, device, Shape(HIDDEN, heads, heads_kv, dim, size, kind))
            where = {
                "kernels": o.name,
                "dtype": str(kind).removeprefix("torch."),
                "shape": f"{heads} heads on {heads_kv}, {dim} wide, blocks of {size}",
            }
            for name, case in _cases(o, torch.device(device), kind, heads, heads_kv, dim, size):
                yield _judge(name, case, TOLERANCE[kind]) | where


def _judge(name: str, case: Callable[[], Pairs], tolerance: float) -> Row:
    try:
        error = max(_difference(got, want) for got, want in case())
    except Exception as e:
        return {"op": name, "ok": False, "raised": f"{type(e).__name__}: {str(e)[:300]}"}
    return {"op": name, "ok": error <= tolerance, "error": error, "tolerance": tolerance}


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest, relative where the wanted number is above 1.

    A NaN that should not be there, or is missing, is infinite.
    """
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    if got.shape != want.shape or not torch.equal(got.isnan(), want.isnan()):
        return float("inf")
    if not got.numel():
        return 0.0
    return float(((got - want).abs() / want.abs().clamp(min=1)).nan_to_num(0.0).max())


def _cases(
    o: OpSet, device: torch.device, kind: torch.dtype, heads: int, heads_kv: int, dim: int, size: int
) -> Iterator[tuple[str, Callable[[], Pairs]]]:
    g = torch.Generator().manual_seed(heads * dim + size)

    def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(kind).to(device)

    for rows in (1, 5, 33):
        x, residual = numbers(rows, HIDDEN), numbers(rows, HIDDEN).float()
        norm, weight, bias = (
            numbers(HIDDEN).float(),
            numbers(3 * HIDDEN, HIDDEN, scale=HIDDEN**-0.5),
            numbers(3 * HIDDEN).float(),
        )
        yield f"linear, {rows} rows", partial(_linear, o, x, weight, None)
        yield f"linear with bias, {rows} rows", partial(_linear, o, x, weight, bias)
        yield f"rms_norm, {rows} rows", partial(_rms_norm, o, x.float(), norm)
        yield f"add_rms_norm, {rows} rows", partial(_add_rms_norm, o, x, residual, norm)
        yield f"silu_mul, {rows} rows", partial(_silu_mul, o, numbers(rows, 2 * INNER))
        yield (
            f"rope, {rows} rows",
            partial(
                _rope, o, numbers(rows, heads, dim), torch.rand(rows, dim // 2, generator=g).to(device) * 100
            ),
        )
    for what, shapes in (("mixed", SEQUENCES), ("decodes", DECODES)):
        for window, sinks in ((0, 0), (5, 0), (40, 2)):
            name = (
                f"write_kv and attention, {what}"
                + (f", window {window}" if window else "")
                + (f", {sinks} sinks" if sinks else "")
            )
            yield (
                name,
                partial(_attention, o, device, kind, heads, heads_kv, dim, size, shapes, window, sinks),
            )
    if o.rope_and_write is not None:
        for normed in (False, True):
            yield (
                f"rope_and_write{', normed' * normed}",
                partial(_rope_and_write, o, device, kind, heads, heads_kv, dim, size, normed),
            )
    for storage in (torch.int8, torch.uint8):
        if size > 1 and not (storage == torch.uint8 and dim % 4):
            yield (
                f"cache of {str(storage).removeprefix('torch.')} codes",
                partial(_codes, o, device, kind, heads, heads_kv, dim, size, storage),
            )
    if kind == torch.float32:  # logits are float32 whatever the rest is
        logits = (torch.randn(7, 5003, generator=g) * 8).to(device)
        logits[3, 4000] = logits[3, 17] = 60.0
        yield "choose", partial(_choose, o, logits)
        yield "draw", partial(_draw, o, logits)
    if o.head is not None:
        yield "head", partial(_head, o, numbers(5, HIDDEN), numbers(500, HIDDEN, scale=HIDDEN**-0.5))


def _exact(t: torch.Tensor) -> torch.Tensor:
    return t.detach().double().cpu()


def _linear(o: OpSet, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Pairs:
    want = _exact(x) @ _exact(weight).T
    return [(o.linear(x, o.pack(weight), bias), want if bias is None else want + _exact(bias))]


def _head(o: OpSet, x: torch.Tensor, weight: torch.Tensor) -> Pairs:
    assert o.head is not None
    got = o.head(x, o.pack(weight))
    if got.dtype != torch.float32:
        raise TypeError(f"logits are {got.dtype}, not float32")
    return [(got, _exact(x) @ _exact(weight).T)]


def _rms_norm(o: OpSet, x: torch.Tensor, norm: torch.Tensor) -> Pairs:
    return [(o.rms_norm(x, norm, 1e-5), ops.rms_norm(_exact(x), _exact(norm), 1e-5))]


def _add_rms_norm(o: OpSet, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor) -> Pairs:
    want = ops.add_rms_norm(_exact(x), _exact(residual), _exact(norm), 1e-5)
    return list(zip(o.add_rms_norm(x.clone(), residual.clone(), norm, 1e-5), want, strict=True))


def _silu_mul(o: OpSet, x: torch.Tensor) -> Pairs:
    return [(o.silu_mul(x.clone()), ops.silu_mul(_exact(x)))]


def _rope(o: OpSet, x: torch.Tensor, angle: torch.Tensor) -> Pairs:
    return [
        (o.rope(x, angle.cos(), angle.sin()), ops.rope(_exact(x), _exact(angle.cos()), _exact(angle.sin())))
    ]


def _choose(o: OpSet, logits: torch.Tensor) -> Pairs:
    return [((o.choose_on_device or ops.choose_on_device)(logits), ops.choose_on_device(_exact(logits)))]


def _batch(shapes: Sequence[tuple[int, int]], size: int, device: torch.device) -> tuple[Batch, Batch, int]:
    """The same batch on the device and on the host, in scattered blocks; and the number of blocks."""
    rng = random.Random(0)
    needed = [-(-length // size) for _, length in shapes]
    num = sum(needed) + 3
    free = rng.sample(range(1, num), num - 1)
    tables = [[free.pop() for _ in range(n)] for n in needed]
    made = [
        Batch.build(tables, [q for q, _ in shapes], [n for _, n in shapes], size, 3, d)
        for d in (device, "cpu")
    ]
    return made[0], made[1], num


def _caches(
    o: OpSet, batch: Batch, num: int, kind: torch.dtype, heads_kv: int, dim: int, device: torch.device
) -> tuple[KVLayer, KVLayer]:
    """One layer on the device and its copy in float64: random where an earlier step wrote, poison elsewhere;
    the null block holds zeros, as it does in a store.
    """
    gathers = o.name == "device"
    data = torch.full((2, num, heads_kv, batch.block_size, dim), 1e4 if gathers else float("nan"))
    g = torch.Generator().manual_seed(1)
    for b, (n, length) in enumerate(zip(batch.query_lens_list, batch.seq_lens_list, strict=True)):
        at = torch.arange(length - n)
        blocks = batch.block_table[b, at // batch.block_size].long().cpu()
        data[:, blocks, :, at % batch.block_size] = torch.randn(len(at), 2, heads_kv, dim, generator=g)
    data[:, 0] = 0
    data = data.to(kind)
    there = data.to(device)
    return KVLayer(there[0], there[1]), KVLayer(data[0].double(), data[1].double())


def _attention(
    o: OpSet,
    device: torch.device,
    kind: torch.dtype,
    heads: int,
    heads_kv: int,
    dim: int,
    size: int,
    shapes: Sequence[tuple[int, int]],
    window: int,
    sinks: int,
) -> Pairs:
    there, here, num = _batch(shapes, size, device)
    mine, theirs = _caches(o, here, num, kind, heads_kv, dim, device)
    g = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(len(here.slot_mapping), h, dim, generator=g).to(kind) for h in (heads, heads_kv, heads_kv)
    )
    o.write_kv(k.to(device), v.to(device), mine, there)
    ops.REFERENCE.write_kv(k.double(), v.double(), theirs, here)
    got = o.attention(q.to(device), mine, there, dim**-0.5, window, sinks=sinks)
    want = ops.REFERENCE.attention(q.double(), theirs, here, dim**-0.5, window, sinks)
    # The caches too: all that was written, nothing else (poison stays poison).
    return [(got, want), (mine.k, theirs.k), (mine.v, theirs.v)]


def _rope_and_write(
    o: OpSet,
    device: torch.device,
    kind: torch.dtype,
    heads: int,
    heads_kv: int,
    dim: int,
    size: int,
    normed: bool,
) -> Pairs:
    assert o.rope_and_write is not None
    there, here, num = _batch(SEQUENCES, size, device)
    mine, theirs = _caches(o, here, num, kind, heads_kv, dim, device)
    g = torch.Generator().manual_seed(3)
    n = len(here.slot_mapping)
    qkv = torch.randn(n, (heads + 2 * heads_kv) * dim, generator=g)
    angle, q_norm, k_norm = (
        torch.rand(n, dim // 2, generator=g) * 50,
        torch.rand(dim, generator=g) + 0.5,
        torch.rand(dim, generator=g) + 0.5,
    )
    weights = q_norm.to(device) if normed else None, k_norm.to(device) if normed else None
    got = o.rope_and_write(
        qkv.to(device),
        angle.cos().to(device),
        angle.sin().to(device),
        weights[0],
        weights[1],
        1e-5,
        heads,
        mine,
        there,
    )
    q, k, v = qkv.double().view(n, -1, dim).split([heads, heads_kv, heads_kv], dim=1)
    if normed:
        q, k = ops.rms_norm(q, q_norm.double(), 1e-5), ops.rms_norm(k, k_norm.double(), 1e-5)
    cos, sin = angle.cos().double(), angle.sin().double()
    ops.REFERENCE.write_kv(ops.rope(k, cos, sin), v, theirs, here)
    return [(got, ops.rope(q, cos, sin)), (mine.k, theirs.k), (mine.v, theirs.v)]


def _codes(
    o: OpSet,
    device: torch.device,
    kind: torch.dtype,
    heads: int,
    heads_kv: int,
    dim: int,
    size: int,
    storage: torch.dtype,
) -> Pairs:
    """A cache of codes: attention over what was written.

    Compared with the reference on the same codes, which may differ from its own by a rounding.
    """
    there, here, num = _batch(SEQUENCES[:6], size, device)
    layer = KVStore(1, num, heads_kv, size, dim, device, storage).layers[0]
    g = torch.Generator().manual_seed(4)
    first = Batch.build(
        [[int(b) for b in row if b > 0] for row in here.block_table],
        here.seq_lens_list,
        here.seq_lens_list,
        size,
        0,
        device,
    )
    past = [
        torch.randn(len(first.slot_mapping), heads_kv, dim, generator=g).to(kind).to(device) for _ in range(2)
    ]
    o.write_kv(past[0], past[1], layer, first)
    q = torch.randn(len(here.slot_mapping), heads, dim, generator=g).to(kind)
    got = o.attention(q.to(device), layer, there, dim**-0.5, 0)
    theirs = KVLayer(*(None if t is None else t.cpu() for t in layer))  # type: ignore[arg-type]
    want = ops.REFERENCE.attention(q.float(), theirs, here, dim**-0.5, 0)
    kept = ops.read_kv(
        theirs,
        torch.div(first.slot_mapping.cpu(), size, rounding_mode="floor"),
        first.slot_mapping.cpu() % size,
    )
    # Codes of 4 bits leave an error of half a step of some 5 / 15; the attention over them is compared in the
    # type's own tolerance.
    coarse = 0.5 if storage == torch.uint8 else 0.05
    scale = TOLERANCE[kind] / coarse
    return [(got, want), *((x * scale, y.cpu().float() * scale) for x, y in zip(kept, past, strict=True))]


def _draw(o: OpSet, logits: torch.Tensor) -> Pairs:
    """Ids drawn with numbers that lie in the middle of a token's share, so that no rounding decides."""
    rows, device = len(logits), logits.device
    asked = (
        (0.7, 0, 1.0),
        (1.0, 50, 0.9),
        (2.0, 3, 1.0),
        (1.0, 0, 0.5),
        (5.0, 0, 0.99),
        (0.3, 1, 1.0),
        (1.3, 20, 0.95),
    )
    samplings = [Sampling(temperature=t, top_k=k, top_p=p) for t, k, p in asked]
    numbers = [
        torch.tensor([getattr(s, f) for s in samplings[:rows]], dtype=torch.float64)
        for f in ("temperature", "top_p")
    ]
    top_k = torch.tensor([s.top_k for s in samplings[:rows]])
    chance = torch.linspace(0.05, 0.9, rows, dtype=torch.float64)
    want = draw_rows(logits.cpu(), numbers[0], top_k, numbers[1], chance)
    got = (o.draw or draw_rows)(
        logits, numbers[0].to(device), top_k.to(device), numbers[1].to(device), chance.to(device)
    )
    return [(got, want)]


__all__ = ["DECODES", "SEQUENCES", "SHAPES", "TOLERANCE", "run"]
