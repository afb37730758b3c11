"""Contiguous reservation: a request takes one run of neighbouring blocks, as engines did before paging."""

from __future__ import annotations

from cbviz.core.kv.block_pool import BlockPool


def free_runs(pool: BlockPool) -> list[tuple[int, int]]:
    """Runs of free blocks by address, as (first block, length). O(num_blocks)."""
    out: list[tuple[int, int]] = []
    first = 0
    for b, n in enumerate(pool.ref_count):
        if n == 0:
            first = first or b
        elif first:
            out.append((first, b - first))
            first = 0
    return [*out, (first, pool.num_blocks - first)] if first else out


def allocate_run(pool: BlockPool, n: int, owner: str, fit: str) -> list[int]:
    """Takes `n` blocks that lie side by side: from the first run of free ones that is long enough, or
    (`best-fit`) from the shortest such run.

    The caller has checked that there is one. Only for pools without caching: no block may carry a hash.
    """
    runs = [(first, length) for first, length in free_runs(pool) if length >= n]
    first, _ = min(runs, key=lambda run: (run[1], run[0])) if fit == "best-fit" else runs[0]
    for b in range(first, first + n):
        pool.take(b, owner)
    return list(range(first, first + n))
