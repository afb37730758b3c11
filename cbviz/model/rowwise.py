"""The reference operators, one row at a time: slow, and no number depends on who shares the batch.

A library's product picks its kernel, its split of a sum and its vector tails by the number of rows, so the
same row comes out a little different among others. Here every call has the same shape whatever the batch: one
row, copied into memory of its own (a library may also look at how an address is aligned). Attention of the
reference goes query by query already, over that query's keys alone. What follows is independent of
batch-mates, of where a prompt is cut, of padding, and of where the blocks lie. Source of the idea: He et al.,
"Defeating Nondeterminism in LLM Inference", 2025, whose kernels fix tile and split sizes instead, which costs
far less; ours of that kind is the compiled pass (`cpu_pass`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cbviz.model import ops
from cbviz.model.kv_store import KVLayer
from cbviz.model.matrix import dense
from cbviz.model.ops import Batch, OpSet, Router


def _each(f: Callable[..., torch.Tensor], *by_row: torch.Tensor) -> torch.Tensor:
    """`f` of each row of `by_row`, given as [1, ...]; no rows: as `f` has it."""
    if not len(by_row[0]):
        return f(*by_row)
    return torch.cat(
        [
            f(*(t[i : i + 1].clone(memory_format=torch.contiguous_format) for t in by_row))
            for i in range(len(by_row[0]))
        ]
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    def row(r: torch.Tensor) -> torch.Tensor:
        y = torch.mv(weight, r[0])[None] if len(r) else r @ weight.T
        return y if bias is None else y + bias

    return _each(row, x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _each(lambda r: ops.rms_norm(r, weight, eps), x)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual  # one rounding a number: the same in any company
    return rms_norm(total, weight, eps), total


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return _each(ops.rope, x, cos, sin)


def angles(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _each(lambda p: ops.angles(p, frequencies)[0], positions), _each(
        lambda p: ops.angles(p, frequencies)[1], positions
    )


def choose_experts(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, num_chosen: int, router: Router
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [ops.choose_experts(x[i : i + 1].clone(), matrix, bias, num_chosen, router) for i in range(len(x))]
    return torch.cat([w for w, _ in rows]), torch.cat([c for _, c in rows])


def experts(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    return _each(lambda r, w, c: ops.experts_loop(r, w, c, gate_up, down), x, weights, chosen)


def latent_attention(
    q: torch.Tensor, kv_b: torch.Tensor, layer: KVLayer, batch: Batch, scale: float
) -> torch.Tensor:
    """Each query as the last of its sequence so far: what stands behind it in its chunk is not expanded
    along.
    """
    out: list[torch.Tensor] = []
    for b, (n, length) in enumerate(zip(batch.query_lens_list, batch.seq_lens_list, strict=True)):
        for seen in range(length - n + 1, length + 1):
            one = Batch.build([batch.block_table[b].tolist()], [1], [seen], batch.block_size, 0, q.device)
            out.append(ops.latent_attention(q[len(out) : len(out) + 1].clone(), kv_b, layer, one, scale))
    return torch.cat(
        [
            *out,
            q.new_zeros(
                len(q) - len(out),
                q.shape[1],
                kv_b.shape[1] - (q.shape[2] - (layer.k.shape[3] - kv_b.shape[2])),
            ),
        ]
    )


def mix(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    return _each(lambda r: ops.mix(r, rotation), x)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    return _each(ops.silu_mul, x)


def choose(logits: torch.Tensor) -> tuple[list[int], list[float], list[float]]:
    rows = [ops.choose(logits[i : i + 1].clone()) for i in range(len(logits))]
    return [r[0][0] for r in rows], [r[1][0] for r in rows], [r[2][0] for r in rows]


ROWWISE = OpSet(
    "row by row",
    "the reference one row at a time: batch-invariant, and slow",
    linear,
    rms_norm,
    add_rms_norm,
    rope,
    ops.write_kv,
    ops.attention,
    silu_mul,
    choose,
    dense,
    angles=angles,
    mix=mix,
    route=choose_experts,
    experts=experts,
    latent_attention=latent_attention,
    batch_invariant=True,
)
