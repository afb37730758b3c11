"""The operators of the decoder: their signatures, and a slow obvious version of each, which is the specification.

Owns shapes and meaning. Every faster set (`cpu_ops`, Triton kernels) has the same signatures and is tested against this one.

    T  tokens of the step      B  sequences in the batch     C  hidden size
    H  query heads             H_kv  key/value heads         D  head size      I  MLP size

    q [T, H, D]   k, v [T, H_kv, D]   kv layer: k, v [num_blocks, H_kv, block_size, D]
    slot_mapping [T] int64, -1: not written     block_table [B, max_blocks] int32, padded with -1
    query_start_loc [B+1] int32                 seq_lens [B] int32: keys of each sequence, this step's included

Tokens from `query_start_loc[B]` on belong to no sequence (padding): their attention output is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from cbviz.model.hub import ModelError
from cbviz.model.kv_store import KVLayer
from cbviz.model.matrix import Matrix, dense

if TYPE_CHECKING:
    from cbviz.model.decoder import Decoder


@dataclass(slots=True)
class Batch:
    """One packed step, ready for every layer. Lists are the tensors' values on the host, so that no operator waits for a device."""

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    query_lens_list: list[int]
    seq_lens_list: list[int]
    block_size: int
    shared: dict[Any, Any] = field(default_factory=dict)
    """What an operator computes in the first layer and uses again in the others (indices, masks)."""

    @classmethod
    def build(cls, block_tables: list[list[int]], query_lens: list[int], seq_lens: list[int], block_size: int, num_padding: int = 0, device: torch.device | str = "cpu") -> Batch:
        """From each sequence's table, its tokens in this step, and its length with them. Query tokens are its last ones."""
        import numpy as np

        width = max(((n + block_size - 1) // block_size for n in seq_lens), default=1)
        table = np.full((len(block_tables), width), -1, dtype=np.int32)
        starts = np.zeros(len(block_tables) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=starts[1:])
        slots = np.full(int(starts[-1]) + num_padding, -1, dtype=np.int64)
        for i, (blocks, n, end) in enumerate(zip(block_tables, query_lens, seq_lens, strict=True)):
            used = (end + block_size - 1) // block_size
            table[i, :used] = blocks[:used]
            pos = np.arange(end - n, end)
            slots[starts[i]:starts[i + 1]] = table[i, pos // block_size].astype(np.int64) * block_size + pos % block_size
        return cls(torch.from_numpy(slots).to(device), torch.from_numpy(table).to(device), torch.from_numpy(starts).to(device),
                   torch.tensor(seq_lens, dtype=torch.int32, device=device), list(query_lens), list(seq_lens), block_size)


@dataclass(frozen=True, slots=True)
class OpSet:
    """The callables a decoder is given; there is no global choice."""

    name: str
    about: str
    """One line for people: what these are, and why they and not faster ones."""
    linear: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
    """(x [T, in], weight [out, in] as `pack` gives it, bias [out] or None) -> [T, out]"""
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    """(x [..., C], weight [C], eps) -> [..., C]"""
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    """(x [T, C], residual [T, C], weight, eps) -> (norm of the sum, the sum). May overwrite x and residual."""
    rope: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """(x [T, heads, D], cos [T, D/2], sin [T, D/2]) -> rotated x; the first half of D is turned against the second."""
    write_kv: Callable[[torch.Tensor, torch.Tensor, KVLayer, Batch], None]
    """(k [T, H_kv, D], v [T, H_kv, D], layer, batch): puts them into their slots."""
    attention: Callable[[torch.Tensor, KVLayer, Batch, float, int], torch.Tensor]
    """(q [T, H, D], layer, batch, scale, window) -> [T, H, D]. Query at position i sees keys j with i - window < j <= i; window 0: all j <= i."""
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    """(gate and up [T, 2 I], gate first) -> silu(gate) * up [T, I]"""
    choose: Callable[[torch.Tensor], tuple[list[int], list[float], list[float]]]
    """(logits [R, V]) -> of each row the best id (ties: the smaller), its lead over the second, log of the sum of exponentials"""
    pack: Callable[[Matrix], Any]
    """A weight matrix as `linear` wants it; done once, when a decoder is made."""
    whole: Callable[[Decoder], Callable[..., torch.Tensor] | None] | None = None
    """Where it is not None: makes a decoder's `forward` as one call, or None for a decoder that it cannot serve."""


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    y = x @ dense(weight).T
    return y if bias is None else y + bias


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


def write_kv(k: torch.Tensor, v: torch.Tensor, layer: KVLayer, batch: Batch) -> None:
    for t, slot in enumerate(batch.slot_mapping.tolist()):
        if slot >= 0:
            layer.k[slot // batch.block_size, :, slot % batch.block_size] = k[t]
            layer.v[slot // batch.block_size, :, slot % batch.block_size] = v[t]


def attention(q: torch.Tensor, layer: KVLayer, batch: Batch, scale: float, window: int) -> torch.Tensor:
    out = torch.zeros_like(q)
    groups = q.shape[1] // layer.k.shape[1]
    starts = batch.query_start_loc.tolist()
    for b, length in enumerate(batch.seq_lens.tolist()):
        queries = q[starts[b]:starts[b + 1]]                                     # [n, H, D], the sequence's last n tokens
        for i, row in enumerate(queries):
            position = length - len(queries) + i
            first = max(0, position - window + 1) if window else 0
            seen = torch.arange(first, position + 1, device=q.device)
            blocks, offsets = batch.block_table[b, seen // batch.block_size].long(), seen % batch.block_size
            keys = layer.k[blocks, :, offsets].repeat_interleave(groups, dim=1)   # [seen, H, D]
            values = layer.v[blocks, :, offsets].repeat_interleave(groups, dim=1)
            weights = torch.softmax((keys * row).sum(-1) * scale, dim=0)          # [seen, H]
            out[starts[b] + i] = (weights[:, :, None] * values).sum(0)
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def choose(logits: torch.Tensor) -> tuple[list[int], list[float], list[float]]:
    best_two = logits.topk(min(2, logits.shape[-1]), dim=-1).values
    return logits.argmax(dim=-1).tolist(), (best_two[:, 0] - best_two[:, -1]).tolist(), logits.logsumexp(dim=-1).tolist()


def pack(weight: Matrix) -> Matrix:
    return weight


REFERENCE = OpSet("reference", "plain torch, slow and obvious: the specification", linear, rms_norm, add_rms_norm, rope, write_kv, attention, silu_mul, choose, pack)


def pick(name: str, device: torch.device | str) -> OpSet:
    """The operators called `name` for `device`. `auto`: the fastest that works there. Raises ModelError with the reason if it does not exist."""
    kind = torch.device(device).type
    if name == "reference" or (name == "auto" and kind != "cpu"):
        return REFERENCE
    if name in ("auto", "cpu"):
        if kind != "cpu":
            raise ModelError(f"kernels 'cpu' run on the CPU, but device is {kind!r}; set device to 'cpu' or kernels to 'auto'")
        from cbviz.model import cpu_ops, cpu_pass, native

        built = native.library()
        return cpu_pass.op_set(built) if built.lib is not None else replace(cpu_ops.CPU, about=f"{cpu_ops.CPU.about}; {built.about}")
    if name == "triton":
        raise ModelError("kernels 'triton' are not built in this version; set kernels to 'auto', 'cpu' or 'reference'")
    raise ModelError(f"kernels is {name!r}, it must be one of auto, reference, cpu, triton")
