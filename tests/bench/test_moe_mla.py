"""The techniques of mixtures and MLA, done quickly: every check holds, and what is counted says what must
come out.
"""

from __future__ import annotations

import pytest

from cbviz.bench.techniques import Context, mla, moe
from cbviz.model.hub import resolve


def test_mixture() -> None:
    assert resolve("tiny-moe").kind == "folder"
    rows = list(moe.measure(Context(quick=True)))
    assert all(r.check.holds for r in rows), rows
    alone, eight = rows[:2]
    assert (
        alone.benefit is not None
        and eight.benefit is not None
        and alone.cost is not None
        and eight.cost is not None
    )
    assert (
        alone.benefit.value == 75 and 0 < eight.benefit.value < 40
    )  # two of eight; of eight rows' choices little is left over
    assert eight.cost.value < alone.cost.value / 2  # a batch shares what it reads
    grouped = next(r for r in rows if "policy" in r.versus)
    assert grouped.cost is not None and grouped.cost.kind == "counted"


def test_latents() -> None:
    rows = list(mla.measure(Context(quick=True)))
    assert all(r.check.holds for r in rows), rows
    against = {(r.setting.split(",")[0], r.versus.split()[3]): r.benefit for r in rows[:4]}
    v3 = against["DeepSeek-V3", "MHA"]
    assert v3 is not None and v3.value == pytest.approx(71.1, abs=0.05) and v3.kind == "counted"
