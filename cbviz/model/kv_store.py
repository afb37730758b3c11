"""The paged KV tensors and a ledger of what they hold.

Owns the memory and the truth about its contents; not who uses which block (that is the scheduler's block
pool), nor why. The tensors are a cache: everything in them follows from token ids and can be computed again.

    layers[l].k, layers[l].v   [num_blocks, H_kv, block_size, D]   float32 or float16; int8: codes; uint8: two codes a byte, [..., D / 2] ("int4")
    k_scale, v_scale           [num_blocks, H_kv, block_size]      float16, with codes: one a token and head
    k_zero, v_zero             [num_blocks, H_kv, block_size]      float16, with int4
    with MLA                   [num_blocks, 1, block_size, d_c + d_rope]: the latent, then the rotated part of the key; v is a view of k's latent
    slot of a token            block id * block_size + position % block_size

Codes (`quantise`), each token and head by itself, so that what a token's slot holds depends on nothing but
its own key and value:

    int8   x = code * scale                  code -127 .. 127, scale = max |x| / 127
    int4   x = code * scale + zero           code 0 .. 15,     zero = min x, scale = (max x - zero) / 15; byte i holds code i (low half) and code i + D / 2

scale and zero are rounded to float16 first, and the codes are made with the rounded ones; a scale of 0 gives
code 0. With D = 64 the key of a token and head takes 256 bytes as float32, 128 as float16, 66 as int8, 36 as
int4, its value the same.

Keys have a few channels much larger than the rest, which would set everybody's scale. With int4 the decoder
therefore turns queries and keys, after RoPE, by the same orthogonal matrix (`KVLayer.rotation`), which
spreads a channel over all and leaves every product of a query and a key as it is; operators see turned keys
and know nothing of it. On SmolLM2 that and the zero are what makes 4 bits usable (Kullback-Leibler distance
from float32 in nats a token, on the conformance prompts): symmetric 0.36, with a zero 0.14, with a zero and
turned keys 0.057, values turned too 0.061 (so they are not). int8 needs neither: 0.0008. Sources: a scale a
token and head is vLLM's `int8_per_token_head`; the rotation is QuaRot's (arXiv 2404.00456). KIVI (arXiv
2402.02750) quantises keys along channels instead, which a cache that grows token by token can only do with a
buffer of recent tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

EMPTY = 0
"""Ledger entry of a slot that holds nothing."""


STORAGE = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8, "int4": torch.uint8}
"""What `EngineConfig.kv_cache_dtype` names, and the type of the tensors that hold it."""


class KVLayer(NamedTuple):
    """One layer's cache, `[num_blocks, H_kv, block_size, D]` each; with MLA `v` is the first d_c numbers of
    `k`, the same memory.

    Where `k` and `v` hold codes, scales (and with int4 zeros) `[num_blocks, H_kv, block_size]` stand beside
    them.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_zero: torch.Tensor | None = None
    v_zero: torch.Tensor | None = None
    rotation: torch.Tensor | None = None
    """[D, D] that queries and keys are multiplied by, after RoPE and before they come here; None: as they
    are.
    """


def quantise(x: torch.Tensor, storage: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(codes, scale, zero) of `x` [..., D] float32, as the module's docstring says.

    `storage`: int8, or uint8 for int4. scale, zero: [...] float16.
    """
    zero, top = None, x.abs().amax(-1)
    if storage == torch.uint8:
        zero = x.amin(-1).half()
        x, top = x - zero.float()[..., None], x.amax(-1) - zero.float()
    most = 15 if storage == torch.uint8 else 127
    scale = (top / most).half()
    by = torch.where(scale > 0, 1 / scale.float(), 0.0)
    codes = (x * by[..., None]).round_()
    if storage == torch.int8:
        return codes.clamp_(-127, 127).to(torch.int8), scale, None
    low, high = codes.clamp_(0, 15).to(torch.uint8).chunk(2, -1)
    return low | high << 4, scale, zero


def dequantise(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """float32 [..., D] from what `quantise` made."""
    if zero is None:
        return codes.float() * scale.float()[..., None]
    return (
        torch.cat((codes & 15, codes >> 4), -1).float() * scale.float()[..., None] + zero.float()[..., None]
    )


def chain(parent: int, token_id: int) -> int:
    """Running hash of a sequence: of all ids up to and with `token_id`. Never EMPTY.

    Python's tuple hash of two integers is a fixed 64-bit function (xxHash rounds, not randomised), 10 times
    cheaper than a cryptographic one; the ledger is compared only within one process.
    """
    return hash((parent, token_id)) or 1


def chain_all(token_ids: Sequence[int], parent: int = EMPTY) -> list[int]:
    """`chain` after each of the ids."""
    out = []
    for t in token_ids:
        parent = hash((parent, t)) or 1
        out.append(parent)
    return out


def hadamard(dim: int) -> torch.Tensor:
    """[dim, dim] orthogonal and symmetric: Hadamard matrices of the largest power of two that divides `dim`,
    along the diagonal.
    """
    size = dim & -dim
    block = torch.ones(1, 1)
    while len(block) < size:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    return torch.block_diag(*[block * size**-0.5] * (dim // size))


class KVStore:
    """KV memory of all layers and, for each slot, the running hash of the token ids whose KV it holds.

    A slot's KV depends on its token and on all tokens before it, so the running hash names its content
    exactly (rounding aside). Entries are cleared before their slots are written and set after the pass
    succeeded: a pass that raises leaves a ledger that claims too little, never too much.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        latent_dim: int = 0,
    ) -> None:
        """`latent_dim`: MLA (DeepSeek-V2, section 2.1): one head of `head_dim` numbers is all that is kept,
        its first `latent_dim` are the values too. 0: both.
        """
        self.latent_dim = latent_dim
        self.num_layers, self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim = (
            num_layers,
            num_blocks,
            num_kv_heads,
            block_size,
            head_dim,
        )
        self.device, self.dtype = torch.device(device), dtype
        shape = (num_layers, 1 if latent_dim else 2, num_blocks, num_kv_heads, block_size)
        self._data = self._zeros((*shape, head_dim // 2 if dtype == torch.uint8 else head_dim), dtype)
        self.parts = [self._data]
        """All memory of the store: tensors [num_layers, n, num_blocks, ...].

        Who copies or moves blocks does it to each of them, along their third axis.
        """
        self.layers = [KVLayer(x[0], x[0, ..., :latent_dim] if latent_dim else x[1]) for x in self._data]
        if dtype in (torch.int8, torch.uint8):
            if latent_dim:
                raise ValueError("codes are not built for MLA's latent")
            scales = self._zeros((num_layers, 4 if dtype == torch.uint8 else 2, *shape[2:]), torch.float16)
            self.parts.append(scales)
            rotation = hadamard(head_dim).to(self.device) if dtype == torch.uint8 else None
            self.layers = [
                KVLayer(*x, *y)._replace(rotation=rotation) for x, y in zip(self._data, scales, strict=True)
            ]
        self.ledger = np.full((num_blocks, block_size), EMPTY, dtype=np.int64)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros, not empty: masked slots are multiplied by weight 0, which a NaN would survive.

        On the host numpy's zeros take no memory until written; torch's do.
        """
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return torch.from_numpy(np.zeros(shape, dtype=str(dtype).removeprefix("torch.")))

    @property
    def quantised(self) -> bool:
        """Whether k and v hold codes."""
        return len(self.parts) > 1

    @property
    def bytes_per_token(self) -> int:
        """What is kept of one token, in all layers, scales included."""
        return self.num_bytes // (self.num_blocks * self.block_size)

    def like(self, num_blocks: int) -> KVStore:
        """An empty store of the same layout with another number of blocks."""
        return KVStore(
            self.num_layers,
            num_blocks,
            self.num_kv_heads,
            self.block_size,
            self.head_dim,
            self.device,
            self.dtype,
            self.latent_dim,
        )

    def first_layers(self, num_layers: int) -> KVStore:
        """The same memory and ledger, seen by a decoder that has only the first layers."""
        part = copy.copy(self)
        part.num_layers, part.parts, part.layers = (
            num_layers,
            [p[:num_layers] for p in self.parts],
            self.layers[:num_layers],
        )
        part._data = part.parts[0]
        return part

    @property
    def num_bytes(self) -> int:
        return sum(p.nbytes for p in self.parts)

    def hash_at(self, block_table: Sequence[int], position: int) -> int:
        """What slot `position` of a sequence with this table holds: a running hash or EMPTY."""
        return int(self.ledger[block_table[position // self.block_size], position % self.block_size])

    def clear(self, block_ids: Sequence[int], offsets: Sequence[int]) -> None:
        """Forgets these slots: called before they are written."""
        self.ledger[block_ids, offsets] = EMPTY

    def record(self, block_ids: Sequence[int], offsets: Sequence[int], hashes: Sequence[int]) -> None:
        """States what these slots hold now: called after they were written."""
        self.ledger[block_ids, offsets] = hashes

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks `(source, destination)` in order, contents and ledger."""
        for src, dst in pairs:
            self.ledger[dst] = EMPTY
            for part in self.parts:
                part[:, :, dst] = part[:, :, src]
            self.ledger[dst] = self.ledger[src]

    def reset(self) -> None:
        """Forgets all contents."""
        self.ledger.fill(EMPTY)
