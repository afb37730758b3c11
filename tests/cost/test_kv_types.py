"""The measured figures stand in one place: the page on KV memory says the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbviz.cost import kv_types, models

PAGE = Path(__file__).parents[2] / "docs" / "kv-memory.md"


@pytest.mark.parametrize("kind", list(kv_types.MEASURED))
def test_the_page_says_what_the_table_says(kind: str) -> None:
    cells = next(
        line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| {kind} |")
    ).split("|")[2:-1]
    size, blocks, change, apart, same = (c.strip().replace(",", "").removesuffix(" %") for c in cells)
    q = kv_types.MEASURED[kind]
    assert (float(change), float(apart), float(same)) == pytest.approx(
        (q.logprob_change, q.divergence, 100 * q.agreement)
    )
    told = kv_types.saving(models.get(kv_types.NAME), kind)
    assert told.replace(",", "").startswith(f"{size} bytes a token")
    if kind != "float16":
        assert f"{told.split(', ')[1].split(' x')[0]} x those of float16" in blocks


def test_mla_has_no_codes() -> None:
    assert kv_types.choice("x", models.get("deepseek-v3"), "int4") == ""
