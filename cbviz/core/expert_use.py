"""Which experts of a mixture the tokens of each session took: what an expert-aware policy ranks by."""

from __future__ import annotations

from collections.abc import Iterable

from cbviz.core.request import Request

Counts = dict[str, list[list[int]]]
"""Session (of a request without one: the request) -> [sparse layer][expert], how often it was chosen."""
Shares = tuple[tuple[float, ...], ...]
"""The same as shares of a layer's choices."""


def copy(counts: Counts) -> Counts:
    return {name: [list(row) for row in rows] for name, rows in counts.items()}


def note(counts: Counts, r: Request, layers: list[list[int]]) -> None:
    """Adds the experts that a request's newest token took, [sparse layer][choice]."""
    mine = counts.setdefault(_owner(r), [[] for _ in layers])
    for row, chosen in zip(mine, layers, strict=True):
        for expert in chosen:
            row.extend([0] * (expert + 1 - len(row)))
            row[expert] += 1


def forget_ended(counts: Counts, requests: dict[str, Request]) -> None:
    """Choices of requests that have ended and belong to no session are of no more use."""
    for name in [n for n in counts if n.startswith("r ") and n[2:] not in requests]:
        del counts[name]


def shares_of_request(counts: Counts, r: Request) -> Shares:
    """Of the request's session. Empty: nothing is known."""
    return _shares(counts.get(_owner(r), []))


def shares_of_all(counts: Counts, running: Iterable[Request]) -> Shares:
    """Of all sessions that run together."""
    total: list[list[int]] = []
    for name in dict.fromkeys(_owner(r) for r in running):
        for i, row in enumerate(counts.get(name, [])):
            if i == len(total):
                total.append([])
            total[i].extend([0] * (len(row) - len(total[i])))
            for expert, n in enumerate(row):
                total[i][expert] += n
    return _shares(total)


def _owner(r: Request) -> str:
    return f"s {r.spec.session}" if r.spec.session else f"r {r.request_id}"


def _shares(counts: list[list[int]]) -> Shares:
    return tuple(tuple(n / (sum(row) or 1) for n in row) for row in counts)
