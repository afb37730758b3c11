"""Load of experts in rows, picture, words and the page: the same figures everywhere, and a dense run that
says it has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

import cbviz as cb
from cbviz.app.wire import Wire
from cbviz.interop.tables import steps_csv
from cbviz.trace import experts as facts
from cbviz.trace.schema import TraceHeader
from cbviz.trace.show import show
from cbviz.trace.trace import Trace
from cbviz.views import experts, experts_rows
from tests.runs import run

LOADS = ([[3, 1, 0, 0], [], [1, 1, 1, 1]], None, [[0, 0, 0, 6], [], [2, 1, 3, 0]])


def some(loads: Sequence[list[list[int]] | None]) -> Trace:
    """The first steps of a run, with these loads."""
    whole = run()
    t = Trace(
        TraceHeader(
            config=whole.header.config,
            block_size=whole.header.block_size,
            num_blocks=whole.header.num_blocks,
            capabilities=["schedule", "blocks", "time"],
        )
    )
    for r, load in zip(whole, loads):
        t.append(msgspec.structs.replace(r, expert_load=load))
    return t


@pytest.fixture(scope="module")
def trace() -> Trace:
    return some(LOADS)


def test_rows(trace: Trace) -> None:
    rows = experts_rows(trace)
    assert (
        rows.layers == [0, 2]
        and rows.step.tolist() == [1, 3]
        and rows.load.tolist() == [[[3, 1, 0, 0], [1, 1, 1, 1]], [[0, 0, 0, 6], [2, 1, 3, 0]]]
    )
    assert rows.touched.tolist() == [6 / 8, 4 / 8] and rows.uneven.tolist() == [(3 + 1) / 2, (4 + 2) / 2]
    assert experts_rows(trace, 2).step.tolist() == [1] and experts_rows(trace, 0).layers == []


def test_figure(trace: Trace) -> None:
    now, run, uneven, touched = experts(trace)["data"]
    assert (
        now["z"] == [[0, 0, 0, 6], [2, 1, 3, 0]]
        and run["z"] == [[3, 1, 0, 6], [3, 2, 4, 1]]
        and now["y"] == ["layer 0", "layer 2"]
    )
    assert uneven["y"] == [2.0, 3.0] and touched["y"] == [0.75, 0.5]
    assert experts(trace, 2)["data"][0]["z"] == [[0] * 4] * 2  # nothing was computed in step 2
    for fig, note in (
        (experts(trace, 0), "no step has run yet"),
        (experts(Trace(TraceHeader())), "no step has run yet"),
    ):
        assert len(fig["data"]) == 4 and fig["layout"]["annotations"][0]["text"] == note
    assert experts(some([None]))["layout"]["annotations"][0]["text"] == "this run's model has no experts"
    assert "experts" in cb.views.VIEWS


def test_words(trace: Trace) -> None:
    s = facts.summary(trace.record(3))
    assert s == (4, 8, 3.0, (0, 3, 6, 4.0)) and facts.summary(trace.record(2)) is None
    told = [str(x) for x in cb.explain(trace, 3)]
    assert any(
        "took 4 of the 8 experts" in x and "expert 3 of layer 0, got 6 choices, 4.0 times" in x for x in told
    )
    assert any(
        str(x).endswith("only their weights were read") for x in cb.explain(some([[[1, 1, 0, 0]]]), 1)
    )  # a lone token: no word of who is busiest
    assert not any("experts" in str(x) for x in cb.explain(trace, 2))
    text = show(trace, 3)
    assert (
        "layer 0   e0 0  e1 0  e2 0  e3 6   1 of 4 taken, busiest 4.0 x the mean" in text
        and "EXPERTS" not in show(trace, 2)
    )


def test_the_page_gets_the_step_and_the_run_so_far(trace: Trace) -> None:
    wire = Wire()

    def at(step: int) -> dict[str, Any] | None:
        made = wire.message(trace, cb.Cursor(step))
        assert made is not None
        return made[0].get("experts")

    assert at(1) == {
        "layers": [0, 2],
        "load": [[3, 1, 0, 0], [1, 1, 1, 1]],
        "sum": [[3, 1, 0, 0], [1, 1, 1, 1]],
    }
    assert at(2) is None
    end = {"layers": [0, 2], "load": [[0, 0, 0, 6], [2, 1, 3, 0]], "sum": [[3, 1, 0, 6], [3, 2, 4, 1]]}
    assert at(3) == end
    assert at(1) is not None and at(3) == end  # back and forth


def test_the_table_of_steps_has_them(trace: Trace) -> None:
    head, *lines = (line.split(",") for line in steps_csv(trace).splitlines())
    assert head[-2:] == ["experts_touched", "expert_imbalance"] and [x[-2:] for x in lines] == [
        ["6", "2.0"],
        ["0", ""],
        ["4", "3.0"],
    ]
    assert "experts_touched" not in steps_csv(some([None]))
