"""A branch is its parent with a change: going back to where it begins brings the change back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cbviz as cb
from cbviz.app.branches import Family
from cbviz.session import Session
from tests.session.test_interrupts import SMALL, specs

CHANGES: list[dict[str, Any]] = [
    {"max_num_seqs": 2},
    {"policy": "sjf", "max_num_batched_tokens": 20},
    {"num_blocks": 40},
    {"num_blocks": 22},
    {"cost": "article"},
    {"add": [{"prompt": [1, 2, 3], "max_tokens": 9}]},
    {"remove": ["r2"]},
    {"remove": ["r6"]},
    {"prompts": {"r6": [1, 2, 3]}},
]


def branch(changes: dict[str, Any], at: int = 6) -> Session:
    s = Session(specs(), runner="sim", **SMALL)
    s.run(max_steps=at)
    return s.fork(at, **changes)


def made(s: Session, steps: int = 12) -> list[Any]:
    s.run(max_steps=steps)
    return [(r.inputs, r.chunks, r.events, r.t1_s) for r in s.trace]


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("at", [0, 6])
def test_a_branch_rewound_to_where_it_begins_makes_the_same_steps_again(
    changes: dict[str, Any], at: int
) -> None:
    b = branch(changes, at)
    first = made(b)
    b.rewind(at)
    assert made(b) == first
    b.rewind(at)
    assert made(b) == first


@pytest.mark.parametrize("changes", CHANGES)
def test_so_does_a_branch_that_was_saved_and_loaded(changes: dict[str, Any], tmp_path: Path) -> None:
    b = branch(changes)
    first = made(b)
    loaded = Session.from_trace(cb.load(b.save(tmp_path / "b.jsonl")))
    loaded.rewind(6)
    again = Session.from_trace(cb.load(loaded.save(tmp_path / "again.jsonl")))
    assert made(loaded) == made(again) == first


def test_before_where_it_begins_it_is_its_parent_again_for_good() -> None:
    b = branch({"max_num_seqs": 2})
    made(b)
    b.rewind(5)
    parent = Session(specs(), runner="sim", **SMALL)
    assert made(b) == made(parent, 17)
    b.rewind(6)
    assert not b.engine.asked()


def test_what_was_typed_into_the_branch_later_does_not_come_back() -> None:
    b = branch({"max_num_seqs": 2})
    b.configure(policy="sjf")
    b.step()
    b.rewind(6)
    assert [i["changes"] for i in b.engine.asked()] == [{"max_num_seqs": 2}]


def test_a_branch_of_a_branch_has_the_changes_of_both() -> None:
    b = branch({"max_num_seqs": 2})
    b.step(4)
    c = b.fork(10, policy="sjf")
    first = made(c)
    c.rewind(10)
    assert made(c) == first
    c.rewind(6)
    assert [i["changes"] for i in c.engine.asked()] == [{"max_num_seqs": 2}]


def test_a_reset_branch_starts_without_changes() -> None:
    b = branch({"max_num_seqs": 2})
    b.step(3)
    b.reset()
    b.step(6)
    b.rewind(6)
    assert not b.engine.asked()


def test_the_page_rewinds_a_branch_with_its_changes_too() -> None:
    b = branch({"max_num_seqs": 2})
    first = made(b)
    family = Family(None)
    family.rewind(b, 6)
    assert made(b) == first
