"""The glossary's links lead somewhere, and what they name is there; vLLM's metrics are those that we export
under its names.
"""

from __future__ import annotations

import re
from pathlib import Path

from cbviz.interop.vllm_metrics import NAMES

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "glossary.md"
LINK = re.compile(r"\[`([^`]+)`\]\(([^)]+)\)")


def faults(text: str, folder: Path) -> list[str]:
    """Links whose file is missing, or whose name does not stand in its file."""
    out = []
    for name, target in LINK.findall(text):
        path = (folder / target).resolve()
        if not path.is_file():
            out.append(f"{name}: no file {target}")
        elif not re.search(rf"\b{re.escape(name)}\b", path.read_text(encoding="utf-8")):
            out.append(f"{name} does not stand in {target}")
    return out


def rows() -> list[list[str]]:
    lines = [x for x in FILE.read_text(encoding="utf-8").splitlines() if x.startswith("| **")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", x)[1:-1]] for x in lines]


def test_links_lead_to_what_they_name() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(LINK.findall(text)) > 50
    assert re.findall(r"\]\((?!\.\./)", text) == []  # links of other forms would go unchecked
    assert faults(text, FILE.parent) == []


def test_a_dead_link_is_seen() -> None:
    assert faults("[`Scheduler`](../cbviz/core/nothing.py)", FILE.parent) == [
        "Scheduler: no file ../cbviz/core/nothing.py"
    ]
    assert faults("[`Schedulist`](../cbviz/core/scheduler.py)", FILE.parent) == [
        "Schedulist does not stand in ../cbviz/core/scheduler.py"
    ]


def test_every_term_has_four_cells_and_its_place() -> None:
    assert all(len(r) == 4 and all(r) for r in rows()), [r for r in rows() if len(r) != 4 or not all(r)]
    terms = [r[0] for r in rows()]
    assert len(set(terms)) == len(terms)
    for section in FILE.read_text(encoding="utf-8").split("\n## ")[1:]:
        names = [x.lower() for x in re.findall(r"^\| \*\*(.+?)\*\*", section, re.MULTILINE)]
        assert names == sorted(names), section.splitlines()[0]


def test_vllm_metrics_are_named_as_we_export_them() -> None:
    named = set(re.findall(r"`(vllm:\w+)`", FILE.read_text(encoding="utf-8")))
    assert len(named) >= 8
    assert named <= set(NAMES)
