"""Perfetto JSON: valid, nothing overlapping on a track, counters, flows and instants where they belong."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from cbviz.disciplines import DISCIPLINES
from cbviz.interop.perfetto import ENGINE, REQUESTS, to_perfetto
from cbviz.trace import Trace
from tests.golden import golden
from tests.runs import run


def tracks(out: dict) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """Slices of each track in nanoseconds, in order of time."""
    found = defaultdict(list)
    for e in out["traceEvents"]:
        if e["ph"] == "X":
            found[e["pid"], e["tid"]].append(
                (round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000), e["name"])
            )
    return {k: sorted(v) for k, v in found.items()}


def test_states_of_the_golden_run() -> None:
    out = tracks(to_perfetto(golden()))
    ms = 1_000_000
    assert out[REQUESTS, 1] == [(0, 10 * ms, "prefill"), (10 * ms, 44 * ms, "decode")]
    assert out[REQUESTS, 2] == [
        (5 * ms, 10 * ms, "waiting"),
        (10 * ms, 20 * ms, "prefill"),
        (20 * ms, 60 * ms, "decode"),
    ]
    assert out[REQUESTS, 3] == [
        (8 * ms, 10 * ms, "waiting"),
        (10 * ms, 32 * ms, "prefill"),
        (32 * ms, 60 * ms, "preempted"),
        (60 * ms, 72 * ms, "recompute"),
    ]
    assert out[REQUESTS, 4] == [(20 * ms, 60 * ms, "waiting")]
    assert len(out[ENGINE, 1]) == 8


@pytest.mark.parametrize("discipline", list(DISCIPLINES))
def test_nothing_overlaps_on_a_track(discipline: str) -> None:
    out = to_perfetto(run(discipline=discipline))
    json.dumps(out, allow_nan=False)
    for track, slices in tracks(out).items():
        for (_, end, _), (begin, _, _) in zip(slices, slices[1:]):
            assert end <= begin, track
    assert all(e["dur"] >= 0 for e in out["traceEvents"] if e["ph"] == "X")


def test_preemptions_are_instants_with_an_arrow() -> None:
    events = to_perfetto(golden())["traceEvents"]
    (instant,) = [e for e in events if e["ph"] == "i" and e["cat"] == "preemption"]
    assert (instant["tid"], instant["ts"], instant["name"]) == (3, 32000.0, "preempted for r1")
    (start,) = [e for e in events if e["ph"] == "s"]
    (end,) = [e for e in events if e["ph"] == "f"]
    assert start["id"] == end["id"] and (start["tid"], end["tid"]) == (3, 1) and end["bp"] == "e"


def test_counters_names_and_reasons() -> None:
    out = to_perfetto(golden())
    counters = [e["args"] for e in out["traceEvents"] if e["ph"] == "C" and e["name"] == "requests"]
    assert counters[3] == {"running": 1, "waiting": 2}
    names = [
        e["args"]["name"] for e in out["traceEvents"] if e["name"] == "thread_name" and e["pid"] == REQUESTS
    ]
    assert names == ["r1", "r2", "r3", "r4", "r6", "r5"]
    step = next(e for e in out["traceEvents"] if e["name"] == "step 4")
    assert step["args"]["why"][0].startswith("r3, last to arrive, was preempted")
    assert out["otherData"]["clock"] == "modelled"
    assert (
        "why"
        not in next(
            e for e in to_perfetto(golden(), sentences=False)["traceEvents"] if e["name"] == "step 4"
        )["args"]
    )


def test_without_times_it_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"no times.*only a schedule"):
        to_perfetto(golden(capabilities=["schedule"], missing={"time": "only a schedule was logged"}))
    assert to_perfetto(Trace())["traceEvents"]


def test_copies_lie_beside_the_pass() -> None:
    """A run that swaps: copies to the host begin with the pass, those from the host end before it; each kind
    has a lane.
    """
    from cbviz.session import Session
    from tests.core.byhand import spec

    s = Session(
        [spec("a", 8, 8), spec("b", 7, 8, first=50)],
        runner="sim",
        num_blocks=7,
        block_size=4,
        preemption_mode="swap",
        swap_blocks=8,
        enable_prefix_caching=False,
    )
    s.run()
    events = to_perfetto(s.trace)["traceEvents"]
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e.get("cat") == "copies"]
    assert {e["tid"] for e in spans} == {
        lanes["pass, in steps that copy"],
        lanes["copies from the host"],
        lanes["copies to the host"],
    }
    out = next(e for e in spans if e["name"] == "swap-out 3 blocks")
    assert any(e["name"] == "pass" and e["ts"] == out["ts"] for e in spans)
    back = next(e for e in spans if e["name"].startswith("swap-in"))
    assert any(e["name"] == "pass" and abs(e["ts"] - back["ts"] - back["dur"]) < 0.002 for e in spans)
