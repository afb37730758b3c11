"""The decoder's whole pass in one compiled call, and the choice of tokens from its logits.

Owns the hand-over to `cpu_kernels.c`: structures, pointers, memory.

float32 activations throughout. With 8-bit weights each row of activations becomes integers of some 14 bits
with one scale a token just before a product. A row's result does not depend on the other rows, bit for bit,
whatever the mode.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from ctypes import c_double, c_int64, c_void_p
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cbviz.model import cpu_ops, native
from cbviz.model.kv_store import KVStore
from cbviz.model.matrix import Int8Matrix, Matrix
from cbviz.model.ops import Batch, OpSet

if TYPE_CHECKING:
    from cbviz.model.decoder import Decoder

_MATRICES = ("qkv", "o", "gate_up", "down")
_VECTORS = ("attn_norm", "mlp_norm", "q_norm", "k_norm", "qkv_bias", "o_bias", "gate_up_bias", "down_bias")
PARTS = (
    "begin",
    "embedding",
    "QKV product",
    "rotary and KV write",
    "attention",
    "output product",
    "gate and up product",
    "down product",
    "output head",
)
"""Parts of a pass, in the order of the enum in `cpu_kernels.c`: a product's norm (and rounding to integers)
belongs to it.
"""
_SCALES = ("k_scale", "v_scale", "k_zero", "v_zero")
_KV_KINDS = {torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.uint8: 3}
_KEPT_BYTES = 32 << 20
"""Working memory up to this size is kept between passes."""


class _Layer(ctypes.Structure):
    _fields_ = [
        *((n, c_void_p) for n in _VECTORS),
        *((n, c_void_p) for n in _MATRICES),
        *((f"{n}_scale", c_void_p) for n in _MATRICES),
        *((n, c_void_p) for n in ("k_cache", "v_cache", *_SCALES)),
        ("window", c_int64),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *(
            (n, c_int64)
            for n in (
                "num_layers",
                "hidden",
                "heads",
                "kv_heads",
                "head_dim",
                "inter",
                "vocab",
                "block_size",
                "weights",
                "kv",
                "threads",
                "sinks",
            )
        ),
        ("eps", c_double),
        ("scale", c_double),
        *((n, c_void_p) for n in ("freq", "norm", "embed_scale", "head_scale", "embed", "head", "layers")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((n, c_int64) for n in ("tokens", "sequences", "table_width", "sampled")),
        *(
            (n, c_void_p)
            for n in ("ids", "positions", "slots", "rows", "table", "starts", "lens", "logits", "marks")
        ),
    ]


class CompiledPass:
    """`Decoder.forward` for one decoder. Made by `whole`."""

    batch_invariant = True
    """See `OpSet.batch_invariant`; here also for any number of threads."""

    def __init__(self, decoder: Decoder, lib: ctypes.CDLL) -> None:
        c, w = decoder.config, decoder.weights
        self._lib = lib
        self._held: list[torch.Tensor] = []
        """What the structures point to."""
        self._vocab = c.vocab_size
        self._kinds = {
            _kind(m) for m in (w.embed, w.head, *(getattr(layer, n) for layer in w.layers for n in _MATRICES))
        }
        self._layers = (_Layer * c.num_layers)()
        for to, layer, window in zip(self._layers, w.layers, decoder.windows, strict=True):
            for name in _VECTORS:
                setattr(to, name, self._vector(getattr(layer, name)))
            for name in _MATRICES:
                data, scale = self._matrix(getattr(layer, name))
                setattr(to, name, data)
                setattr(to, f"{name}_scale", scale)
            to.window = window
        embed, embed_scale = self._matrix(w.embed)
        head, head_scale = self._matrix(w.head)
        self._model = _Model(
            c.num_layers,
            c.hidden_size,
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            c.intermediate_size,
            c.vocab_size,
            1,
            next(iter(self._kinds)),
            0,
            1,
            decoder.sinks,
            c.rms_norm_eps,
            c.head_dim**-0.5,
            self._vector(w.inverse_frequencies),
            self._vector(w.norm),
            embed_scale,
            head_scale,
            embed,
            head,
            ctypes.addressof(self._layers),
        )
        self._kv: weakref.ref[KVStore] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.marking = False
        """Whether passes take the time at the end of each of their parts (some 40 ns each)."""
        self.marks: list[tuple[int, float]] = []
        """Of the last such pass: (part, seconds since its beginning at the part's end)."""
        self.began_s = 0.0
        """When it began, by `time.perf_counter`."""

    @property
    def fits(self) -> bool:
        """One kind of matrix throughout, and shapes within the kernels' limits."""
        return len(self._kinds) == 1 and bool(self._lib.cbviz_fits(ctypes.byref(self._model)))

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: Batch,
        kv: KVStore,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """See `Decoder.forward`."""
        self._use(kv)
        m = self._model
        m.threads = torch.get_num_threads()
        logits = torch.empty(len(sample_rows), self._vocab)
        inputs = [
            x.contiguous()
            for x in (
                token_ids,
                positions,
                batch.slot_mapping,
                sample_rows,
                batch.block_table,
                batch.query_start_loc,
                batch.seq_lens,
            )
        ]
        marks = (
            torch.zeros(self._lib.cbviz_marks(ctypes.byref(m), c_int64(len(token_ids))), 2, dtype=torch.int64)
            if self.marking
            else None
        )
        step = _Step(
            len(token_ids),
            len(batch.query_lens_list),
            batch.block_table.shape[1],
            len(sample_rows),
            *(x.data_ptr() for x in inputs),
            logits.data_ptr(),
            marks.data_ptr() if marks is not None else None,
        )
        size = self._lib.cbviz_memory(ctypes.byref(m), c_int64(step.tokens), c_int64(step.sampled))
        memory = (
            self._memory if self._memory.numel() >= size + 64 else torch.empty(size + 64, dtype=torch.uint8)
        )
        if memory.numel() <= _KEPT_BYTES:
            self._memory = memory
        at = (memory.data_ptr() + 63) // 64 * 64
        failed = self._lib.cbviz_forward(ctypes.byref(m), ctypes.byref(step), c_void_p(at))
        _keep_while_read(self._lib, self, step, inputs, memory, kv)
        if failed:
            raise MemoryError("no memory for the kernels' own buffers")
        if marks is not None:
            made = [(part, at) for part, at in marks.tolist() if at]
            self.began_s = time.perf_counter() - (time.monotonic_ns() - made[0][1]) * 1e-9
            self.marks = [(part, (at - made[0][1]) * 1e-9) for part, at in made[1:]]
        return logits

    def _use(self, kv: KVStore) -> None:
        if self._kv is not None and self._kv() is kv:
            return
        while (
            not self._lib.cbviz_quiet()
        ):  # a late helper may still follow a block table into the store that these point to
            time.sleep(0)
        for to, layer in zip(self._layers, kv.layers, strict=True):
            to.k_cache, to.v_cache = layer.k.data_ptr(), layer.v.data_ptr()
            for name in _SCALES:
                part = getattr(layer, name)
                setattr(to, name, None if part is None else part.data_ptr())
        self._model.block_size = kv.block_size
        self._model.kv = _KV_KINDS[kv.dtype]
        self._kv = weakref.ref(kv)

    def _vector(self, t: torch.Tensor | None) -> int | None:
        if t is None:
            return None
        t = t.float().contiguous()
        self._held.append(t)
        return t.data_ptr()

    def _matrix(self, m: Matrix) -> tuple[int, int | None]:
        data = (m.q if isinstance(m, Int8Matrix) else m).contiguous()
        self._held.append(data)
        return data.data_ptr(), self._vector(m.scale) if isinstance(m, Int8Matrix) else None


_read: list[tuple[object, ...]] = []
"""What helper threads may still be reading, see `_keep_while_read`."""


def _keep_while_read(lib: ctypes.CDLL, *things: object) -> None:
    """A helper thread that the system stopped in the middle of an item, which was then taken over, reads on
    when it goes on: what it reads must be there.
    """
    _read.append(things)
    if lib.cbviz_quiet():
        _read.clear()


def _kind(m: Matrix) -> int:
    return 2 if isinstance(m, Int8Matrix) else {torch.float32: 0, torch.float16: 1}[m.dtype]


def op_set(built: native.Native) -> OpSet:
    """The operators in torch, with the compiled pass before them. `built.lib` must be there."""
    lib = built.lib
    assert lib is not None

    def whole(decoder: Decoder) -> CompiledPass | None:
        made = CompiledPass(decoder, lib)
        return made if made.fits else None

    def choose(logits: torch.Tensor) -> tuple[list[int], list[float], list[float]]:
        if logits.dtype != torch.float32 or logits.device.type != "cpu":
            return cpu_ops.CPU.choose(logits)
        logits = logits.contiguous()
        n = len(logits)
        best, gap, total = torch.empty(n, dtype=torch.int64), torch.empty(n), torch.empty(n)
        sizes = (c_int64(x) for x in (n, logits.shape[1], torch.get_num_threads()))
        failed = lib.cbviz_choose(
            c_void_p(logits.data_ptr()), *sizes, *(c_void_p(t.data_ptr()) for t in (best, gap, total))
        )
        _keep_while_read(lib, logits, best, gap, total)
        if failed:
            raise MemoryError("no memory for the kernels' own buffers")
        return best.tolist(), gap.tolist(), total.tolist()

    return replace(
        cpu_ops.CPU, name="compiled", about=f"one call a step, {built.about}", whole=whole, choose=choose
    )
