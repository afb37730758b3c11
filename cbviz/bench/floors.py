"""What the engine shall reach at least, beside whoever was measured; and, where it does not, where the time
goes. A table for people: nothing fails by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cbviz.bench import decode


class Floor(NamedTuple):
    """`of`: picks the figure out of a bench's result; KeyError where it was not measured.

    `profile`: the batch size whose pass says where the time goes.
    """

    text: str
    precision: str
    least: float
    of: Callable[[dict[str, Any]], float]
    batch: int


def _against(
    load: str, precision: str, other: str, seats: int | None = None
) -> Callable[[dict[str, Any]], float]:
    def of(result: dict[str, Any]) -> float:
        x = next((x for x in result["loads"] if x["name"] == load and seats in (None, x["seats"])), None)
        if x is None:
            raise KeyError(load)
        name = next((n for n in x["contenders"] if n.split()[0] == other), None)
        if name is None:
            raise KeyError(other)
        return float(x["ratios"][precision][name])

    return of


def _decode(precision: str, batch: int, other: str | None) -> Callable[[dict[str, Any]], float]:
    def of(result: dict[str, Any]) -> float:
        c = next((c for c in result["decode"] if c["batch"] == batch), None)
        if c is None:
            raise KeyError(batch)
        if other is None:
            return float(c["contenders"][precision]["floor_share"])
        name = next((n for n in c["contenders"] if n.split()[0] == other), None)
        if name is None:
            raise KeyError(other)
        return float(c["ratios"][precision][name])

    return of


FLOORS = (
    Floor(
        "exact over vLLM's CPU build, article, 8 seats",
        "exact",
        1.2,
        _against("article", "exact", "vLLM", 8),
        8,
    ),
    Floor("exact over vLLM's CPU build, alone", "exact", 1.0, _against("alone", "exact", "vLLM"), 1),
    Floor(
        "fast over vLLM's CPU build, article, 8 seats", "fast", 2.0, _against("article", "fast", "vLLM", 8), 8
    ),
    Floor("fast over vLLM's CPU build, alone", "fast", 1.8, _against("alone", "fast", "vLLM"), 1),
    Floor(
        "fast over transformers' static batches, article, 8 seats",
        "fast",
        5.0,
        _against("article", "fast", "transformers", 8),
        8,
    ),
    Floor("int8 decode steps over llama.cpp Q4_1, batch 8", "int8", 1.0, _decode("int8", 8, "llama.cpp"), 8),
    Floor("int8 decode steps over llama.cpp Q4_1, alone", "int8", 0.7, _decode("int8", 1, "llama.cpp"), 1),
    *(
        Floor(f"{p} alone, of the floor that reading weights and KV sets", p, 0.6, _decode(p, 1, None), 1)
        for p in ("exact", "fast", "int8")
    ),
)


def judged(result: dict[str, Any]) -> list[tuple[Floor, float]]:
    """The floors whose figure was measured, each with it."""
    out = []
    for f in FLOORS:
        try:
            out.append((f, f.of(result)))
        except KeyError:
            continue
    return out


def lines(result: dict[str, Any]) -> list[str]:
    """For people; a missed floor comes with the profile of its pass."""
    found = judged(result)
    if not found:
        return []
    out, told = ["", "floors:"], set[tuple[str, int]]()
    for f, value in found:
        met = value >= f.least
        out.append(f"  {f.text}: {value:.2f}, at least {f.least:g}: {'reached' if met else 'MISSED'}")
        case = next(
            (c for c in result["decode"] if c["batch"] == f.batch and f.precision in c["contenders"]), None
        )
        if (
            not met
            and case is not None
            and (f.precision, f.batch) not in told
            and case["contenders"][f.precision]["parts_s"]
        ):
            told.add((f.precision, f.batch))
            out += decode.profile_lines(case, f.precision)
    return [*out, ""]
