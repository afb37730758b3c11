"""The paged KV tensors and a ledger of what they hold.

Owns the memory and the truth about its contents; not who uses which block (that is the scheduler's block pool), nor why. The
tensors are a cache: everything in them follows from token ids and can be computed again.

    layers[l].k, layers[l].v   [num_blocks, H_kv, block_size, D]   float32, or float16
    with MLA                   [num_blocks, 1, block_size, d_c + d_rope]: the latent, then the rotated part of the key; v is a view of k's latent
    slot of a token            block id * block_size + position % block_size
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

EMPTY = 0
"""Ledger entry of a slot that holds nothing."""


class KVLayer(NamedTuple):
    """One layer's cache, `[num_blocks, H_kv, block_size, D]` each; with MLA `v` is the first d_c numbers of `k`, the same memory."""

    k: torch.Tensor
    v: torch.Tensor


def chain(parent: int, token_id: int) -> int:
    """Running hash of a sequence: of all ids up to and with `token_id`. Never EMPTY.

    Python's tuple hash of two integers is a fixed 64-bit function (xxHash rounds, not randomised), 10 times cheaper than a
    cryptographic one; the ledger is compared only within one process.
    """
    return hash((parent, token_id)) or 1


def chain_all(token_ids: Sequence[int], parent: int = EMPTY) -> list[int]:
    """`chain` after each of the ids."""
    out = []
    for t in token_ids:
        parent = hash((parent, t)) or 1
        out.append(parent)
    return out


class KVStore:
    """KV memory of all layers and, for each slot, the running hash of the token ids whose KV it holds.

    A slot's KV depends on its token and on all tokens before it, so the running hash names its content exactly (rounding aside).
    Entries are cleared before their slots are written and set after the pass succeeded: a pass that raises leaves a ledger that
    claims too little, never too much.
    """

    def __init__(self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, device: torch.device | str = "cpu",
                 dtype: torch.dtype = torch.float32, latent_dim: int = 0) -> None:
        """`latent_dim`: MLA (DeepSeek-V2, section 2.1): one head of `head_dim` numbers is all that is kept, its first `latent_dim` are the values too. 0: both."""
        self.latent_dim = latent_dim
        self.num_layers, self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim = num_layers, num_blocks, num_kv_heads, block_size, head_dim
        self.device, self.dtype = torch.device(device), dtype
        # Zeros, not empty: masked slots are multiplied by weight 0, which a NaN would survive. On the host numpy's zeros take no memory until written; torch's do.
        zeros = np.zeros((num_layers, 1 if latent_dim else 2, num_blocks, num_kv_heads, block_size, head_dim), dtype=np.float16 if dtype == torch.float16 else np.float32)
        self._data = torch.from_numpy(zeros).to(self.device)
        self.layers = [KVLayer(x[0], x[0, ..., :latent_dim] if latent_dim else x[1]) for x in self._data]
        self.ledger = np.full((num_blocks, block_size), EMPTY, dtype=np.int64)

    @property
    def element_size(self) -> int:
        return self._data.element_size()

    @property
    def bytes_per_token(self) -> int:
        """What is kept of one token, in all layers."""
        return self.num_layers * (1 if self.latent_dim else 2) * self.num_kv_heads * self.head_dim * self._data.element_size()

    def like(self, num_blocks: int) -> KVStore:
        """An empty store of the same layout with another number of blocks."""
        return KVStore(self.num_layers, num_blocks, self.num_kv_heads, self.block_size, self.head_dim, self.device, self.dtype, self.latent_dim)

    @property
    def num_bytes(self) -> int:
        return self._data.numel() * self._data.element_size()

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
            self._data[:, :, dst] = self._data[:, :, src]
            self.ledger[dst] = self.ledger[src]

    def reset(self) -> None:
        """Forgets all contents."""
        self.ledger.fill(EMPTY)
