"""Which tile sizes a kernel is launched with: one table, read by the launchers and by the ahead-of-time
check.

Chosen from compiled code, not from measurements: the largest tiles that spill no register on any card that
they are compiled for (`aot`, `budget.json`).
"""

from __future__ import annotations

from typing import NamedTuple

SPLIT_KEYS = 256
"""Keys of one split of a decode. Fixed, so that a row's sums do not depend on the batch."""
MOST_SPLITS = 64
"""From here on (16,384 keys) splits get longer: the parts of a row are joined in one tile."""
WRITE_TOKENS = 16
"""Tokens of one program of the KV write and of the rotation."""
SILU_BLOCK = 1024
LOGITS_BLOCK = 4096
DRAW_BLOCK = 1024
MOST_HEAD_DIM = 256
MOST_GROUPS = 64
MOST_HIDDEN = 16_384


class Tile(NamedTuple):
    rows: int
    """Rows of the dot products: query heads of one key head, times tokens."""
    keys: int
    warps: int
    stages: int


def power(n: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << max(n - 1, 0).bit_length()


def decode(groups: int, head_dim: int, wide: bool, coded: bool = False) -> Tile:
    """`wide`: products of float32, which go through the ordinary units and need many registers.

    `coded`: the cache holds codes, whose unpacking needs registers too.
    """
    rows = max(16, power(groups))
    if wide:
        return Tile(rows, 32 if head_dim <= 64 else 16, 4, 2)
    return Tile(rows, 64 if head_dim <= (64 if coded else 128) else 32, 4, 2)


def prefill(groups: int, head_dim: int, wide: bool, coded: bool = False) -> Tile:
    rows = max(16, power(groups))
    if wide:
        return Tile(rows, 32 if head_dim <= 64 else 16, 4, 2)
    if coded:
        return Tile(max(64 if head_dim <= 64 else 32, rows), 32, 4, 2)
    return Tile(max(64, rows), 64 if head_dim <= 64 else 32, 4, 2)


def split_keys(table_tokens: int) -> int:
    """Keys of one split for a block table with room for `table_tokens`."""
    size = SPLIT_KEYS
    while size * MOST_SPLITS < table_tokens:
        size *= 2
    return size


def norm_warps(hidden: int) -> int:
    return min(16, max(1, power(hidden) // 512))
