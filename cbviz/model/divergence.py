"""Where the numbers of one sequence differ between its run among others and its run alone: layer by layer,
operator by operator.

Owns the measure and the two passes of a step. Knows no requests and no traces: token ids, where they were
cut, a KV store.

A difference is told in two ways: `largest`, the largest absolute difference of two numbers at the same place;
and `ulps`, the same in units in the last place of the largest number of that row (of that token, in that
layer): the unit in which its sums were rounded. 0 means: equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from cbviz.model.decoder import Decoder
from cbviz.model.kv_store import KVStore
from cbviz.model.ops import Batch, OpSet, read_kv
from cbviz.model.sampling import Draw, Sampled, sample

MOST_ROWS = 1024
"""Tokens of a step whose operators are compared: above, the decoder cuts its work and rows no longer stand
where they stood.
"""


@dataclass(frozen=True)
class OpDifference:
    """One operator's result for one sequence's tokens, in company against alone.

    `layer` -1: before the first and behind the last.
    """

    layer: int
    op: str
    largest: float
    ulps: float
    share: float
    """Of its numbers, those that differ."""


@dataclass(frozen=True)
class StepDifference:
    """One step of one sequence, twice over the same keys and values: with the others of that step, and alone."""

    ops: list[OpDifference]
    """In the order of computing; empty where the whole pass is one call, which has no inside."""
    keys_values: list[OpDifference]
    """A layer each: what was written into the cache."""
    logits: OpDifference
    gap: float
    """Lead of the best token over the second, alone, in nats."""
    same_best: bool
    """The best token is the same."""
    rows: tuple[int, int]
    """Rows that the step's products had: in company, alone."""

    @property
    def first(self) -> OpDifference | None:
        """The first operator, or else layer, whose numbers differ."""
        return next((d for d in [*(self.ops or self.keys_values), self.logits] if d.largest), None)


def difference(a: torch.Tensor, b: torch.Tensor, layer: int, op: str) -> OpDifference:
    """Of two tensors [rows, ...] of equal shape and type."""
    largest, ulps = by_row(a.flatten(1), b.flatten(1))
    share = float((a != b).float().mean()) if a.numel() else 0.0
    return OpDifference(
        layer,
        op,
        float(largest.max()) if len(largest) else 0.0,
        float(ulps.max()) if len(ulps) else 0.0,
        share,
    )


def by_row(a: torch.Tensor, b: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Of [rows, n]: `largest` and `ulps` of each row.

    Two numbers that are both not finite count as equal if they are the same.
    """
    kind = torch.float16 if a.dtype == torch.float16 else torch.float32
    x, y = a.double(), b.double()
    apart = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs()).amax(-1)
    top = torch.maximum(x.abs(), y.abs()).amax(-1).clamp(min=torch.finfo(kind).tiny)
    unit = 2.0 ** torch.floor(torch.log2(top)) * torch.finfo(kind).eps
    return apart.numpy(), (apart / unit).numpy()


def cached(kv: KVStore, table: Sequence[int], first: int, last: int) -> torch.Tensor:
    """Keys and values of positions first .. last - 1 as they lie in the store: [layers, positions, H_kv * D
    of keys, then the values].
    """
    at = np.arange(first, last)
    blocks, offsets = (
        torch.from_numpy(np.asarray(table)[at // kv.block_size]),
        torch.from_numpy(at % kv.block_size),
    )
    return torch.stack(
        [
            torch.cat([t.flatten(1) for t in read_kv(layer, blocks, offsets)], dim=1).cpu()
            for layer in kv.layers
        ]
    )


def recorded(ops: OpSet, log: list[tuple[str, torch.Tensor]], names: dict[int, str]) -> OpSet:
    """The same operators, each writing down its result. `names`: of weights, by identity."""

    def keep(name: str, out: torch.Tensor) -> torch.Tensor:
        log.append((name, out.detach().to("cpu", copy=True)))
        return out

    def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return keep(names.get(id(weight), "product"), ops.linear(x, weight, bias))

    def add_rms_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, total = ops.add_rms_norm(x, residual, weight, eps)
        return keep("norm", out), total

    def one(name: str, f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *a, **k: keep(name, f(*a, **k))

    return replace(
        ops,
        linear=linear,
        add_rms_norm=add_rms_norm,
        rms_norm=one("norm", ops.rms_norm),
        rope=one("rotary", ops.rope),
        attention=one("attention", ops.attention),
        silu_mul=one("silu", ops.silu_mul),
        experts=one("experts", ops.experts),
        rope_and_write=one("rotary", ops.rope_and_write) if ops.rope_and_write is not None else None,
        latent_attention=one("attention", ops.latent_attention),
        whole=None,
    )


@dataclass(frozen=True)
class Alone:
    """A sequence's whole life, computed again without company, against what was computed and said in company.

    `keys`, `values`, `ulps` [layers, positions]: largest difference of what the cache holds, NaN where it no
    longer holds that position (both: for `ulps`). `tokens`: of each draw what it says alone, in order of
    their places.
    """

    keys: np.ndarray
    values: np.ndarray
    ulps: np.ndarray
    tokens: list[Sampled]


@torch.inference_mode()
def alone(
    decoder: Decoder,
    ids: Sequence[int],
    cuts: Sequence[tuple[int, int]],
    draws: Mapping[int, Draw],
    theirs: KVStore,
    table: Sequence[int],
    held: np.ndarray,
    aside: KVStore,
    progress: Callable[[float], None] = lambda share: None,
) -> Alone:
    """Computes `ids` in the pieces `cuts` (first position, tokens) in the store `aside`, and holds its keys
    and values against those of `theirs`, where `held` [positions] says that they are there. `draws`: by the
    place of the new token.
    """
    own = list(range(aside.num_blocks))
    end = sum(cuts[-1]) if cuts else 0
    tokens: list[Sampled] = []
    for i, (start, n) in enumerate(cuts):
        drawn = [p for p in range(start + 1, start + n + 1) if p in draws]
        logits = _go(decoder, [(list(ids), start, n)], [own], aside, [p - start - 1 for p in drawn])
        tokens += sample(logits, [draws[p] for p in drawn], decoder.ops.choose)
        progress((i + 1) / len(cuts))
    layers = aside.num_layers
    keys, values, ulps = (np.full((layers, end), np.nan) for _ in range(3))
    for p in np.flatnonzero(held[:end]):
        a, b = (
            cached(kv, t, int(p), int(p) + 1)[:, 0].tensor_split([kv.num_kv_heads * kv.head_dim], dim=1)
            for kv, t in ((theirs, table), (aside, own))
        )
        (keys[:, p], ku), (values[:, p], vu) = by_row(a[0], b[0]), by_row(a[1], b[1])
        ulps[:, p] = np.maximum(ku, vu)
    return Alone(keys, values, ulps, tokens)


@dataclass
class _Pass:
    logits: torch.Tensor
    kv: torch.Tensor
    log: list[tuple[str, torch.Tensor]] = field(default_factory=list)


@torch.inference_mode()
def step_difference(
    decoder: Decoder,
    parts: Sequence[tuple[list[int], int, int]],
    which: int,
    empty: Callable[[int], KVStore],
    size: int,
) -> StepDifference:
    """`parts`: of each chunk of a step the sequence's ids, first position and number of tokens; the last of
    each part samples. `empty`: makes a store of so many blocks of `size`.

    The keys and values before each chunk are computed first, each sequence by itself, and are the same for
    both passes: what is compared is this step alone.
    """
    log: list[tuple[str, torch.Tensor]] = []
    used = decoder
    if decoder._whole is None:
        names: dict[int, str] = {}
        used = copy(decoder)
        used.ops = recorded(decoder.ops, log, names)
        for w in used._packed.layers:
            names.update(
                {
                    id(getattr(w, n)): n
                    for n in ("qkv", "o", "gate_up", "down", "q_b", "shared_gate_up", "shared_down")
                    if getattr(w, n) is not None
                }
            )
        names[id(used._packed.head)] = "head"
    total = sum(n for _, _, n in parts)
    store = empty(sum(-(-(start + n) // size) for _, start, n in parts))
    tables: list[list[int]] = []
    free = 0
    for _, start, n in parts:
        need = -(-(start + n) // size)
        tables.append(list(range(free, free + need)))
        free += need
    for (ids, start, _), table in zip(parts, tables, strict=True):
        if start:
            _go(decoder, [(ids[:start], 0, start)], [table], store)
    ids, start, n = parts[which]
    at = sum(p[2] for p in parts[:which])

    def run(some: Sequence[int]) -> _Pass:
        log.clear()
        logits = _go(used, [parts[i] for i in some], [tables[i] for i in some], store)
        return _Pass(logits.cpu(), cached(store, tables[which], start, start + n), list(log))

    together, by_itself = run(range(len(parts))), run([which])
    rows, one = slice(at, at + n), slice(which, which + 1)
    ops: list[OpDifference] = []
    layer = 0
    if total <= MOST_ROWS:
        for i, ((name, a), (_, b)) in enumerate(zip(together.log, by_itself.log, strict=True)):
            if i and name == "qkv" and any(d.op == "qkv" for d in ops):
                layer += 1
            mine = a[rows] if len(a) == total else a[one]
            place = -1 if name == "head" else layer
            ops.append(difference(mine, b[-1:] if len(b) != n and len(mine) == 1 else b, place, name))
    kvs = [
        difference(a, b, i, "keys and values")
        for i, (a, b) in enumerate(zip(together.kv, by_itself.kv, strict=True))
    ]
    a, b = together.logits[one], by_itself.logits
    best = b[0].double().topk(2)
    return StepDifference(
        ops,
        kvs,
        difference(a, b, -1, "logits"),
        float(best.values[0] - best.values[1]),
        int(a[0].argmax()) == int(b[0].argmax()),
        (total, n),
    )


def _go(
    decoder: Decoder,
    parts: Sequence[tuple[list[int], int, int]],
    tables: Sequence[list[int]],
    kv: KVStore,
    rows: Sequence[int] | None = None,
) -> torch.Tensor:
    """One pass over parts; logits of `rows`, or else of the last row of each."""
    lens = [n for _, _, n in parts]
    device = kv.device
    token_ids = torch.tensor([t for ids, start, n in parts for t in ids[start : start + n]], device=device)
    positions = torch.tensor([p for _, start, n in parts for p in range(start, start + n)], device=device)
    batch = Batch.build(list(tables), lens, [start + n for _, start, n in parts], kv.block_size, 0, device)
    return decoder.forward(
        token_ids,
        positions,
        batch,
        kv,
        torch.tensor(np.cumsum(lens) - 1 if rows is None else rows, dtype=torch.int64, device=device),
    )
