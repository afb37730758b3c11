"""What the kernels' cases share: the device, Triton's interpreter mended for bfloat16, poisoned memory, and
attention written down in float64.

These files are run by `test_kernels.py` in processes of their own, in the interpreter on CPU tensors or on a
card: a kernel that writes where it must not takes its process with it.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import numpy as np
import torch

from cbviz.model import ops
from cbviz.model.kv_store import KVLayer, KVStore
from cbviz.model.ops import Batch, OpSet, Shape

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

torch.set_num_threads(1)

if DEVICE == "cpu":
    import triton.language as tl
    from triton.runtime import interpreter

    _create_dot = interpreter.InterpreterBuilder.create_dot

    def _widened(h: interpreter.TensorHandle) -> interpreter.TensorHandle:
        """The interpreter keeps bfloat16 as bit patterns and multiplies these; a card multiplies the numbers
        and sums in float32.
        """
        if h.data.dtype == np.uint16:
            return interpreter.TensorHandle((h.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return (
            interpreter.TensorHandle(h.data.astype(np.float32), tl.float32)
            if h.data.dtype == np.float16
            else h
        )

    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, d, *rest: _create_dot(
        self, _widened(a), _widened(b), d, *rest
    )


def kernels(dtype: torch.dtype = torch.float32) -> OpSet:
    return ops.pick("triton", DEVICE, Shape(576, 9, 3, 64, 16, dtype))


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.double().cpu(), want.double().cpu(), atol=tolerance, rtol=tolerance)


class Guarded:
    """A tensor that lies in the middle of a larger one filled with `poison`; `intact()`: nobody wrote beside
    it.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, poison: float = float("nan"), zone: int = 512
    ) -> None:
        n = int(np.prod(shape))
        self.all = torch.full((n + 2 * zone,), poison, dtype=dtype, device=DEVICE)
        self.inner = self.all[zone : zone + n].view(shape)
        self._zones = (self.all[:zone], self.all[zone + n :])
        self._before = [z.clone() for z in self._zones]

    def intact(self) -> bool:
        return all(
            torch.equal(a.nan_to_num(-77.0), b.nan_to_num(-77.0))
            for a, b in zip(self._zones, self._before, strict=True)
        )


@dataclass
class Scene:
    """A batch over a poisoned cache: slots that no sequence has are NaN, those of this step too until they
    are written.
    """

    batch: Batch
    layer: KVLayer
    guards: tuple[Guarded, Guarded]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: list[list[int]]

    def intact(self) -> bool:
        return all(g.intact() for g in self.guards)


def scene(
    shapes: list[tuple[int, int]],
    heads: int,
    heads_kv: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    padding: int = 2,
    window: int = 0,
    sinks: int = 0,
) -> Scene:
    """`shapes`: (query tokens, length) of each sequence.

    The KV of earlier tokens is in place. Blocks that a window has left behind are given back (0).
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    needed = [-(-n // block_size) for _, n in shapes]
    num_blocks = sum(needed) + 3
    free = rng.sample(range(1, num_blocks), num_blocks - 1)
    tables = [[free.pop() for _ in range(n)] for n in needed]
    if window:
        for table, (queries, n) in zip(tables, shapes, strict=True):
            for i in range(-(-sinks // block_size), max(0, n - queries - window + 1) // block_size):
                table[i] = 0
    batch = Batch.build(tables, [q for q, _ in shapes], [n for _, n in shapes], block_size, padding)
    # Behind the last row lies block 0, whose numbers are NaN.
    table = Guarded(tuple(batch.block_table.shape), torch.int32, 0)
    table.inner.copy_(batch.block_table)
    batch.block_table = table.inner
    for name in ("slot_mapping", "query_start_loc", "seq_lens"):
        setattr(batch, name, getattr(batch, name).to(DEVICE))
    caches = tuple(Guarded((num_blocks, heads_kv, block_size, dim), dtype) for _ in range(2))
    for blocks, (queries, n) in zip(tables, shapes, strict=True):
        for p in range(n - queries):
            if blocks[p // block_size]:
                for cache in caches:
                    cache.inner[blocks[p // block_size], :, p % block_size] = torch.randn(heads_kv, dim).to(
                        DEVICE, dtype
                    )
    tokens = len(batch.slot_mapping)
    # Queries, keys and values as a decoder cuts them out of one product: rows further apart than they are
    # long.
    qkv = torch.randn(tokens, heads + 2 * heads_kv, dim).to(DEVICE, dtype)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + heads_kv], qkv[:, heads + heads_kv :]
    return Scene(batch, KVLayer(caches[0].inner, caches[1].inner), caches, q, k, v, tables)


def codes(
    shapes: list[tuple[int, int]], heads: int, heads_kv: int, dim: int, storage: torch.dtype
) -> tuple[Scene, KVLayer]:
    """A scene whose cache holds codes (`kv_store.quantise`), all of its tokens written by the reference; its
    batch on the CPU. Scales and zeros elsewhere are NaN.
    """
    s = scene(shapes, heads, heads_kv, dim, 16, torch.float32)
    store = KVStore(1, len(s.layer.k), heads_kv, 16, dim, dtype=storage)
    for part in store.parts[1:]:
        part.fill_(float("nan"))
    whole = ops.Batch.build(s.tables, s.batch.seq_lens_list, s.batch.seq_lens_list, 16)
    n = len(whole.slot_mapping)
    ops.REFERENCE.write_kv(
        torch.randn(n, heads_kv, dim), torch.randn(n, heads_kv, dim) + 0.3, store.layers[0], whole
    )
    s.batch = ops.Batch.build(s.tables, s.batch.query_lens_list, s.batch.seq_lens_list, 16, 2)
    return s, KVLayer(*(x.to(DEVICE) if x is not None else None for x in store.layers[0]))


def attention(
    s: Scene, scale: float, window: int, sinks: int = 0, sink_logits: torch.Tensor | None = None
) -> torch.Tensor:
    """The definition, in float64, a query at a time. The scene's keys and values must have been written."""
    out = torch.zeros(s.q.shape, dtype=torch.float64)
    groups = s.q.shape[1] // s.layer.k.shape[1]
    q, kc, vc = s.q.double().cpu(), s.layer.k.double().cpu(), s.layer.v.double().cpu()
    at, size = 0, s.batch.block_size
    for table, queries, length in zip(s.tables, s.batch.query_lens_list, s.batch.seq_lens_list, strict=True):
        for position in range(length - queries, length):
            seen = [j for j in range(position + 1) if not window or j > position - window or j < sinks]
            keys = torch.stack([kc[table[j // size], :, j % size] for j in seen]).repeat_interleave(groups, 1)
            values = torch.stack([vc[table[j // size], :, j % size] for j in seen]).repeat_interleave(
                groups, 1
            )
            scores = torch.einsum("hd,shd->hs", q[at], keys) * scale
            if sink_logits is not None:
                scores = torch.cat((scores, sink_logits.double().cpu()[:, None]), 1)
            out[at] = torch.einsum("hs,shd->hd", scores.softmax(1)[:, : len(seen)], values)
            at += 1
    return out
