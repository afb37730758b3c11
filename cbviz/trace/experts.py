"""What a record tells of a mixture's experts: who got how many tokens, how uneven, and in words.

Knows the record alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cbviz.messages import StepRecord


class Load(NamedTuple):
    """One step's experts.

    `touched` of `total` (layer, expert) pairs got a token; `busiest` is (layer, expert, tokens, times the
    mean).
    """

    touched: int
    total: int
    uneven: float
    """Mean over the sparse layers of busiest expert over mean."""
    busiest: tuple[int, int, int, float]


def layers_of(load: Sequence[Sequence[int]]) -> list[int]:
    """The layers that have experts."""
    return [i for i, row in enumerate(load) if row]


def imbalance(row: Sequence[int]) -> float:
    """The busiest expert's tokens over the mean; 1 is even, the number of experts is one for all.

    0 where nobody came.

    >>> imbalance([2, 2, 2, 2]), imbalance([8, 0, 0, 0])
    (1.0, 4.0)
    """
    total = sum(row)
    return max(row) * len(row) / total if total else 0.0


def summary(record: StepRecord) -> Load | None:
    """The step's load in figures; None for a dense model or a step that computed nothing."""
    load = record.expert_load or []
    layers = layers_of(load)
    if not layers or not any(map(sum, load)):
        return None
    uneven = [imbalance(load[i]) for i in layers]
    top = max(range(len(layers)), key=lambda j: uneven[j])
    row = load[layers[top]]
    e = max(range(len(row)), key=row.__getitem__)
    return Load(
        sum(n > 0 for i in layers for n in load[i]),
        sum(len(load[i]) for i in layers),
        sum(uneven) / len(uneven),
        (layers[top], e, row[e], uneven[top]),
    )


def sentence(record: StepRecord) -> str:
    """The step's experts in a sentence; '' for a dense model."""
    s = summary(record)
    if s is None:
        return ""
    layer, e, n, times = s.busiest
    text = (
        f"Its tokens took {s.touched} of the {s.total} experts of all layers (counted); only their weights "
        "were read"
    )
    # With fewer choices than experts somebody always stands out.
    full = sum((record.expert_load or [])[layer]) >= len((record.expert_load or [])[layer])
    return text + (
        f". The busiest, expert {e} of layer {layer}, got {n:,} choices, {times:.1f} times that layer's mean"
        if full
        else ""
    )
