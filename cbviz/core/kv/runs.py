"""Lists of block ids as runs of neighbours: how long free lists stand in a snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

LONG_LIST = 65_536
"""Free lists that are longer stand in a snapshot as runs: a list of millions at every keyframe would fill the
memory.
"""


def runs_of(ids: Sequence[int]) -> list[list[int]]:
    """Ids as runs of neighbours, each [first, last]; a run may count down.

    >>> runs_of([4, 5, 6, 9, 3, 2, 1])
    [[4, 6], [9, 9], [3, 1]]
    """
    out: list[list[int]] = []
    step = 0
    for b in ids:
        if out and b - out[-1][1] in (1, -1) and step in (0, b - out[-1][1]):
            step = b - out[-1][1]
            out[-1][1] = b
        else:
            out.append([b, b])
            step = 0
    return out


def ids_of(runs: Sequence[Sequence[int]]) -> Iterator[int]:
    """The ids of `runs_of`, in order."""
    for first, last in runs:
        yield from range(first, last + 1) if last >= first else range(first, last - 1, -1)
