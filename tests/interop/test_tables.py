"""CSV tables: every request and step once, and no cell that a spreadsheet would run."""

from __future__ import annotations

import csv
import io

from cbviz import events as ev
from cbviz.interop.tables import requests_csv, steps_csv
from cbviz.messages import StepRecord
from cbviz.trace import Trace
from tests.golden import golden


def test_requests() -> None:
    rows = list(csv.DictReader(io.StringIO(requests_csv(golden()))))
    assert [r["request_id"] for r in rows] == ["r1", "r2", "r3", "r4", "r6", "r5"]
    assert (
        float(rows[0]["ttft_s"]) == 0.010 and rows[3]["ttft_s"] == "" and rows[3]["finish_reason"] == "abort"
    )


def test_steps() -> None:
    rows = list(csv.DictReader(io.StringIO(steps_csv(golden()))))
    assert [int(r["tokens_total"]) for r in rows] == [10, 12, 5, 2, 1, 9, 6, 0]
    assert rows[5]["tokens_recomputed"] == "8" and rows[0]["work"] == "modelled" and rows[7]["work"] == ""
    assert steps_csv(Trace()) == ""


def test_formulas_are_defused() -> None:
    trace = Trace()
    trace.append(StepRecord(1, 0.0, 1.0, "measured", [], [ev.Arrived("=1+1", 0, 1, 1)]))
    assert next(csv.DictReader(io.StringIO(requests_csv(trace))))["request_id"] == "'=1+1"
