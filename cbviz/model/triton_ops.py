"""The operators as Triton kernels: same signatures and meaning as `ops`, on a CUDA card.

Owns the launches: grids, tiles, strides, and which operator falls back to which other one, with the reason.
The kernels are `cbviz.kernels`; no other module of the package knows them.

    products     torch's own (cuBLAS): 16-bit weights times 16-bit inputs, accumulated and stored in float32; `exact`: float32 throughout
    activations  what feeds a product (norms, attention, the MLP's gate) is written in 16 bits at once, the
    residual stream is float32
    attention    in the KV cache's type (codes: in that of the products' inputs); scores, softmax and sums in float32

**For CUDA graphs.** All operators but `choose` take lengths, tables and places from the device and wait for
nothing. What the host decides from the lists of a `Batch` is: which launches there are (sequences with few
tokens, with many), the width of the table, the longest chunk. So a graph that was captured with a `Batch` of
B single tokens and a table of width W replays for any contents of its tensors; rows whose `seq_lens` is 0 and
whose slot is -1 are padding, and their attention is 0. Only chunks beyond `FEW` tokens (see `attention`) make
a launch that is not for graphs. `Batch.shared` keeps the scratch of a step; give each graph a Batch of its
own.

`TRITON_INTERPRET=1` (set before this module is imported) runs the kernels in Triton's interpreter, on CPU
tensors, for tests.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any

import torch

import cbviz.kernels.tiles as tiles
from cbviz.model import device_ops, ops
from cbviz.model.kv_store import KVLayer
from cbviz.model.matrix import Int8Matrix, Matrix, dense
from cbviz.model.ops import Batch, OpSet, Shape

LEAST_TRITON = (3, 6)
LEAST_CAPABILITY = (8, 0)
"""Ampere: from here on Triton's products use the matrix units (on 7.5 they fall back to ordinary
multiplications, and spill).
"""
_LOG2_E = math.log2(math.e)
_OPS = (
    "rms_norm",
    "add_rms_norm",
    "rope",
    "write_kv",
    "rope_and_write",
    "attention",
    "silu_mul",
    "choose",
    "draw",
)


def interpreted() -> bool:
    """Are kernels run by Triton's interpreter in this process?"""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def unavailable(device: torch.device | str) -> str:
    """Why there are no Triton kernels on `device`; empty where there are."""
    kind = torch.device(device).type
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "triton is not installed (pip install 'cbviz[gpu]')"
    if tuple(int(n) for n in version.split(".")[:2]) < LEAST_TRITON:
        return f"triton is {version}, the least is {'.'.join(map(str, LEAST_TRITON))}"
    if kind == "cpu":
        return (
            ""
            if interpreted()
            else (
                "the device is the CPU, and Triton's kernels run on a CUDA card (or, for tests, in its "
                "interpreter: TRITON_INTERPRET=1)"
            )
        )
    if kind != "cuda":
        return f"the device is {kind!r}, and Triton's kernels run on a CUDA card"
    if interpreted():
        return "TRITON_INTERPRET=1 is set: the interpreter takes CPU tensors"
    if not torch.cuda.is_available():
        return "torch sees no CUDA card"
    if (
        torch.version.hip is None
        and (capability := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY
    ):
        return (
            f"the card has compute capability {capability[0]}.{capability[1]}, the least is "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
        )
    return ""


def supports(shape: Shape) -> dict[str, str]:
    """Operator -> why its kernel cannot take that shape; operators that can are not in it."""
    out = {}
    attention = ""
    if shape.head_dim % 2:
        out["rope"] = out["rope_and_write"] = out["write_kv"] = (
            f"head_dim is {shape.head_dim}, it must be even"
        )
    if shape.head_dim > tiles.MOST_HEAD_DIM:
        attention = f"head_dim is {shape.head_dim}, the most is {tiles.MOST_HEAD_DIM}"
    elif shape.num_heads % shape.num_kv_heads:
        attention = f"{shape.num_heads} query heads over {shape.num_kv_heads} key heads"
    elif shape.num_heads // shape.num_kv_heads > tiles.MOST_GROUPS:
        attention = (
            f"{shape.num_heads // shape.num_kv_heads} query heads a key head, the most is {tiles.MOST_GROUPS}"
        )
    if attention:
        out["attention"] = attention
    if shape.hidden_size > tiles.MOST_HIDDEN:
        out["rms_norm"] = out["add_rms_norm"] = (
            f"hidden_size is {shape.hidden_size}, the most is {tiles.MOST_HIDDEN}"
        )
    return out


@dataclass(frozen=True, slots=True)
class _Packed:
    """A matrix in the type its product is taken in, times `scale` [out] where there is one."""

    data: torch.Tensor
    scale: torch.Tensor | None


def pack(weight: Matrix) -> _Packed:
    """8-bit weights become 16-bit ones (their integers are exact there): no bytes are saved on the card
    beside the rows' scales.
    """
    if isinstance(weight, Int8Matrix):
        return _Packed(weight.q.half(), weight.scale)
    return _Packed(weight, None)


def linear(x: torch.Tensor, weight: _Packed, bias: torch.Tensor | None) -> torch.Tensor:
    y = device_ops.head(x, weight.data)
    if weight.scale is not None:
        y = y * weight.scale
    return y if bias is None else y + bias


def pack_experts(weight: Matrix, num_experts: int) -> torch.Tensor:
    """[E out, in] -> [E, out, in]; 8-bit weights as 16-bit ones, scales multiplied in."""
    data = dense(weight).half() if isinstance(weight, Int8Matrix) else weight
    return data.view(num_experts, -1, weight.shape[1])


def experts(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    return ops.experts_grouped(x.to(gate_up.dtype), weights, chosen, gate_up, down).float()


def kernel_modules() -> Any:
    """The kernel modules, loaded (and with them triton) on first use."""
    homes = {
        "activation": "activation",
        "attention": "paged_attention",
        "kv": "kv_write",
        "norm": "norm",
        "rotary": "rotary",
        "sampling": "sampling",
    }
    return SimpleNamespace(**{name: import_module(f"cbviz.kernels.{home}") for name, home in homes.items()})


@dataclass(frozen=True, slots=True)
class Launcher:
    """The launches, for one type of inputs to products.

    `kernels`: `kernel_modules()`, or what stands in for it to look at the launches.
    """

    kernels: Any
    dtype: torch.dtype
    """What norms, attention and the gate write: float32, or the products' 16-bit type."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        # Heads (queries and keys, normed one by one) go on to the rotation, not into a product.
        y = torch.empty(rows.shape, dtype=self.dtype if x.dim() == 2 else x.dtype, device=x.device)
        self._norm(rows, rows, weight, y, eps, False)
        return y.view(x.shape)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        self._norm(x, residual, weight, y, eps, True)
        return y, residual

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        y: torch.Tensor,
        eps: float,
        add: bool,
    ) -> None:
        n, c = x.shape
        if n:
            self.kernels.norm.rms_norm[(n,)](
                x,
                residual,
                weight,
                y,
                eps,
                x.stride(0),
                residual.stride(0),
                y.stride(0),
                C=c,
                BLOCK=tiles.power(c),
                ADD=add,
                num_warps=tiles.norm_warps(c),
            )

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        n, heads, dim = x.shape
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if n:
            self.kernels.rotary.rotate[(_ceil(n, tiles.WRITE_TOKENS), heads)](
                x,
                cos,
                sin,
                out,
                n,
                x.stride(0),
                x.stride(1),
                cos.stride(0),
                out.stride(0),
                out.stride(1),
                HALF=dim // 2,
                BLOCK_HALF=tiles.power(dim // 2),
                BLOCK_T=tiles.WRITE_TOKENS,
                num_warps=2,
            )
        return out

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, layer: KVLayer, batch: Batch) -> None:
        n, heads, dim = k.shape
        if not n:
            return
        kept = _kept(layer)
        self.kernels.kv.write[(_ceil(n, tiles.WRITE_TOKENS), heads)](
            k,
            v,
            layer.k,
            layer.v,
            *kept.beside,
            batch.slot_mapping,
            n,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            *kept.strides,
            HALF=dim // 2,
            BLOCK_HALF=tiles.power(dim // 2),
            BLOCK_SIZE=batch.block_size,
            BLOCK_T=tiles.WRITE_TOKENS,
            KV_BITS=kept.bits,
            num_warps=2,
        )

    def rope_and_write(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        num_heads: int,
        layer: KVLayer,
        batch: Batch,
    ) -> torch.Tensor:
        n, heads_kv = len(qkv), layer.k.shape[1]
        dim = qkv.shape[1] // (num_heads + 2 * heads_kv)
        q = torch.empty(n, num_heads, dim, dtype=self.dtype, device=qkv.device)
        if n:
            kept = _kept(layer)
            normed = q_norm is not None and k_norm is not None
            self.kernels.kv.rotate_and_write[(_ceil(n, tiles.WRITE_TOKENS), num_heads + 2 * heads_kv)](
                qkv,
                cos,
                sin,
                q_norm if normed else qkv,
                k_norm if normed else qkv,
                q,
                layer.k,
                layer.v,
                *kept.beside,
                batch.slot_mapping,
                n,
                eps,
                qkv.stride(0),
                cos.stride(0),
                q.stride(0),
                q.stride(1),
                *kept.strides,
                H=num_heads,
                H_KV=heads_kv,
                HALF=dim // 2,
                BLOCK_HALF=tiles.power(dim // 2),
                BLOCK_SIZE=batch.block_size,
                BLOCK_T=tiles.WRITE_TOKENS,
                NORM=normed,
                KV_BITS=kept.bits,
                num_warps=2,
            )
        return q

    def attention(
        self,
        q: torch.Tensor,
        layer: KVLayer,
        batch: Batch,
        scale: float,
        window: int,
        sinks: int = 0,
        *,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `OpSet.attention`.

        `sinks`: the first tokens, seen also outside the window. `sink_logits` [H]: a logit of each head that
        takes part in its softmax.
        """
        n, heads, dim = q.shape
        num_seqs, heads_kv = len(batch.query_lens_list), layer.k.shape[1]
        groups = heads // heads_kv
        kept = _kept(layer)
        kind = self.dtype if kept.bits <= 8 else layer.k.dtype
        wide = kind == torch.float32
        out = torch.empty(n, heads, dim, dtype=self.dtype, device=q.device)
        covered = sum(batch.query_lens_list)
        if covered < n:
            out[covered:].zero_()
        if not num_seqs:
            return out
        tile = tiles.decode(groups, dim, wide, kept.bits <= 8)
        few = tile.rows // groups
        short = max((x for x in batch.query_lens_list if x <= few), default=0)
        longest = max(batch.query_lens_list)
        block_d = max(16, tiles.power(dim))
        width = batch.block_table.shape[1]
        logits = q if sink_logits is None else sink_logits
        shared = {
            "GROUPS": groups,
            "D": dim,
            "BLOCK_D": block_d,
            "BLOCK_SIZE": batch.block_size,
            "WINDOWED": window > 0,
            "SINK_LOGITS": sink_logits is not None,
            "KV_BITS": kept.bits,
            "DTYPE": self.kernels.attention.TYPES[str(kind)],
        }
        ins = (
            q,
            layer.k,
            layer.v,
            *kept.beside,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            logits,
            out,
        )
        strides = (q.stride(0), q.stride(1), *kept.strides, out.stride(0), out.stride(1))
        if short:
            size = tiles.split_keys(width * batch.block_size)
            splits = _ceil(width * batch.block_size, size)
            part, lse = (
                _scratch(batch, q.device, num_seqs * short * heads * splits, block_d)
                if splits > 1
                else (out, out)
            )
            self.kernels.attention.decode[(num_seqs, heads_kv, splits)](
                *ins,
                part,
                lse,
                scale * _LOG2_E,
                window,
                sinks,
                batch.block_table.stride(0),
                short,
                *strides,
                ROWS=tile.rows,
                TILE=tile.keys,
                SPLIT_KEYS=size,
                WHOLE=splits == 1,
                num_warps=tile.warps,
                num_stages=tile.stages,
                **shared,
            )
            if splits > 1:
                self.kernels.attention.join[(num_seqs * short, heads)](
                    part,
                    lse,
                    batch.query_start_loc,
                    batch.seq_lens,
                    logits,
                    out,
                    window,
                    sinks,
                    splits,
                    short,
                    few,
                    out.stride(0),
                    out.stride(1),
                    H=heads,
                    D=dim,
                    BLOCK_D=block_d,
                    TILE=tile.keys,
                    SPLIT_KEYS=size,
                    BLOCK_SPLITS=tiles.power(splits),
                    WINDOWED=window > 0,
                    SINK_LOGITS=sink_logits is not None,
                    num_warps=2,
                )
        if longest > few:
            tile = tiles.prefill(groups, dim, wide, kept.bits <= 8)
            self.kernels.attention.prefill[(_ceil(longest, tile.rows // groups), heads_kv, num_seqs)](
                *ins,
                scale * _LOG2_E,
                window,
                sinks,
                batch.block_table.stride(0),
                few + 1,
                *strides,
                ROWS=tile.rows,
                TILE=tile.keys,
                num_warps=tile.warps,
                num_stages=tile.stages,
                **shared,
            )
        return out

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        n, half = x.shape[0], x.shape[1] // 2
        y = torch.empty(n, half, dtype=self.dtype, device=x.device)
        if n:
            block = min(tiles.SILU_BLOCK, tiles.power(half))
            self.kernels.activation.silu_mul[(n, _ceil(half, block))](
                x, y, x.stride(0), y.stride(0), I=half, BLOCK=block, num_warps=4
            )
        return y

    def choose_on_device(self, logits: torch.Tensor) -> torch.Tensor:
        """`OpSet.choose` as [R, 3] float64: id, lead, log of the sum of exponentials. Waits for nothing."""
        rows, vocab = logits.shape
        out = torch.empty(rows, 3, dtype=torch.float64, device=logits.device)
        if rows:
            logits = logits.float()
            parts = _ceil(vocab, tiles.LOGITS_BLOCK)
            best, second, total = torch.empty(3, rows, parts, device=logits.device)
            index = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
            self.kernels.sampling.best_of_part[(rows, parts)](
                logits,
                best,
                index,
                second,
                total,
                parts,
                logits.stride(0),
                V=vocab,
                BLOCK=tiles.LOGITS_BLOCK,
                num_warps=8,
            )
            self.kernels.sampling.best_of_row[(rows,)](
                best, index, second, total, out, parts, V=vocab, BLOCK=tiles.power(parts), num_warps=1
            )
        return out

    def choose(self, logits: torch.Tensor) -> tuple[list[int], list[float], list[float]]:
        found = self.choose_on_device(logits).tolist()
        return [int(f[0]) for f in found], [f[1] for f in found], [f[2] for f in found]

    def draw(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        rows, vocab = logits.shape
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if rows:
            order = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
            self.kernels.sampling.draw[(rows,)](
                order.values,
                order.indices,
                temperature,
                top_k,
                top_p,
                uniform,
                out,
                order.values.stride(0),
                V=vocab,
                BLOCK=min(tiles.DRAW_BLOCK, tiles.power(vocab)),
                num_warps=4,
            )
        return out


@dataclass(frozen=True, slots=True)
class _Kept:
    """How a layer's cache is laid out, as the kernels take it."""

    bits: int
    """Of a number: 32, 16; of a code: 8, 4."""
    beside: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    """Scales of k and v, zeros of k and v; anything where there are none."""
    strides: tuple[int, ...]
    """Block, head, slot of k; of v; block, head of the scales."""


def _kept(layer: KVLayer) -> _Kept:
    k, v = layer.k, layer.v
    strides = (k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2))
    if layer.k_scale is None or layer.v_scale is None:
        return _Kept(8 * k.element_size(), (k, v, k, v), (*strides, 0, 0))
    scales = layer.k_scale, layer.v_scale
    beside = (
        (*scales, *scales)
        if layer.k_zero is None or layer.v_zero is None
        else (*scales, layer.k_zero, layer.v_zero)
    )
    return _Kept(
        4 if k.dtype == torch.uint8 else 8, beside, (*strides, scales[0].stride(0), scales[0].stride(1))
    )


def _scratch(
    batch: Batch, device: torch.device, num_rows: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 memory [num_rows, width] and [num_rows], the same for all layers of a step."""
    key = ("attention parts", num_rows, width)
    found = batch.shared.get(key)
    if found is None:
        found = batch.shared[key] = (
            torch.empty(num_rows * width, device=device),
            torch.empty(num_rows, device=device),
        )
    return found


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def op_set(device: torch.device | str, shape: Shape | None = None) -> OpSet:
    """The set for `device`, which must have Triton's kernels (`unavailable`).

    Operators whose kernel cannot take `shape` are torch's.
    """
    refused = {} if shape is None else supports(shape)
    launch = Launcher(kernel_modules(), torch.float32 if shape is None else shape.dtype)
    mine = {name: getattr(launch, name) for name in _OPS}
    slow = {name: getattr(device_ops.TORCH, name) for name in _OPS}
    chosen = {name: slow[name] if name in refused else mine[name] for name in _OPS}
    where = "in Triton's interpreter" if interpreted() else f"on {torch.cuda.get_device_name(device)}"
    report = {
        "linear": "torch",
        "experts": "torch",
        "latent_attention": "torch",
        **{name: f"torch: {refused[name]}" if name in refused else "triton" for name in _OPS},
    }
    return replace(
        device_ops.TORCH,
        name="triton",
        about=f"Triton kernels {where}, products by torch"
        + "".join(f"; {n} by torch: {why}" for n, why in refused.items()),
        linear=linear,
        pack=pack,
        head=None,
        choose_on_device=launch.choose_on_device,
        pack_experts=pack_experts,
        experts=experts,
        latent_attention=ops.latent_attention_absorbed,
        report=report,
        **chosen,
    )
