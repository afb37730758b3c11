"""Gates of admission are rows of a table: a discipline that asks an unusual one is a row and one function."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

import cbviz as cb
from cbviz import events as ev
from cbviz.config import DISCIPLINES
from cbviz.core.admission import GATES, Admission, Gate, Wait, gates_of, only_named
from cbviz.messages import RequestSpec
from cbviz.session import Session


def one_for_each_session(a: Admission) -> Wait | None:
    """A session has at most one running request, so no user takes all seats."""
    mine = [r for r in a.state.running if r.spec.session == a.r.spec.session]
    return Wait("session", 1, 0) if mine else None


@pytest.fixture
def _new_discipline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(GATES, "session", Gate(one_for_each_session, only_named))
    row = replace(DISCIPLINES["vllm"], name="tenant", title="One for each session", gates=("session",))
    monkeypatch.setitem(DISCIPLINES, "tenant", row)
    return


def requests() -> list[RequestSpec]:
    sessions = ("ann", "ann", "ann", "bob", "bob", "cleo")
    return [
        RequestSpec(f"r{i}", (1, 2, 3, 4), 5, arrival_step=1, session=session)
        for i, session in enumerate(sessions)
    ]


@pytest.mark.usefixtures("_new_discipline")
def test_a_new_discipline_is_a_row_and_one_function() -> None:
    s = Session(requests(), runner="sim", discipline="tenant", max_num_seqs=4)

    s.run()

    assert s.num_requests == 6 and not s.engine.scheduler.state.requests
    for record in s.trace:
        at_once = Counter(s.request(c.request_id).spec.session for c in record.chunks)
        assert max(at_once.values(), default=0) <= 1, f"step {record.step}: {at_once}"
    waits = [e for record in s.trace for e in record.events if isinstance(e, ev.NotAdmitted)]
    assert {(e.reason, e.need, e.have) for e in waits} == {("session", 1, 0)}


@pytest.mark.usefixtures("_new_discipline")
def test_the_reason_that_is_written_down_is_the_gate_that_said_no() -> None:
    s = Session(requests(), runner="sim", discipline="tenant", max_num_seqs=4)

    s.step()

    assert any(re.search(r"\br1\b.*\bsession\b", sentence) for sentence in cb.explain(s.trace, 1))


@pytest.mark.usefixtures("_new_discipline")
def test_no_other_discipline_asks_it() -> None:
    asked_by = {name for name, row in DISCIPLINES.items() if one_for_each_session in gates_of(row)}

    assert asked_by == {"tenant"}


def test_every_gate_is_asked_by_some_discipline() -> None:
    for name, gate in GATES.items():
        assert any(gate.ask in gates_of(row) for row in DISCIPLINES.values()), name
