"""Rows first, without colours; then that each picture is valid plotly, has a fixed set of traces, and shows
no later state.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cbviz import views
from cbviz.messages import Span, StepProfile
from cbviz.trace import Cursor, Trace
from cbviz.trace.accounting import SLOT_PARTS
from cbviz.trace.explain import copies_told
from cbviz.trace.schema import TraceHeader
from cbviz.trace.state import CODE, STATES
from cbviz.trace.utilisation import PHASES, phases
from cbviz.views.batch import PARTS
from cbviz.views.blocks import KINDS, changed_blocks
from cbviz.views.figure import plain
from cbviz.views.utilisation import STEP_KINDS
from tests.core.test_beam import follow, wide
from tests.golden import NUM_STEPS, golden
from tests.runs import run

ALL: dict[str, tuple[Callable[..., Any], int]] = {
    "timeline": (views.timeline, len(STATES)),
    "timeline-time": (lambda t, c=None, **o: views.timeline(t, c, axis="time", **o), len(STATES)),
    "block_map": (views.block_map, 7),
    "block_table": (lambda t, c=None, **o: views.block_table(t, "r2", c, **o), 1),
    "batch": (views.batch, 5),
    "utilisation": (views.utilisation, 5),
    "roofline": (views.roofline, 5),
    "inside": (views.inside, 1),
    "queues": (views.queues, 4),
    "latency": (views.latency, 3),
    "tokens": (views.tokens, 1),
    "slots": (views.slots, 6),
    "compare": (lambda t, c=None, **o: views.compare(t, golden(), c, **o), 2 * len(STATES)),
}


def segments(trace: Trace, step: int, **options: Any) -> dict[str, list[tuple[str, int, int]]]:
    rows = views.timeline_rows(trace, step, **options)
    out: dict[str, list[tuple[str, int, int]]] = {
        trace.state().by_index[i].request_id: [] for i in rows.requests
    }
    for row, code, first, last in zip(rows.row, rows.code, rows.first, rows.last):
        out[trace.state().by_index[rows.requests[row]].request_id].append(
            (STATES[code], int(first), int(last))
        )
    return out


def test_timeline_rows() -> None:
    assert segments(golden(), 8) == {
        "r1": [("prefill", 1, 1), ("decode", 2, 4), ("finished", 5, 8)],
        "r2": [("prefill", 2, 2), ("decode", 3, 5), ("finished", 6, 8)],
        "r3": [("prefill", 2, 3), ("preempted", 4, 5), ("recompute", 6, 6), ("finished", 7, 8)],
        "r4": [("waiting", 3, 5), ("aborted", 6, 8)],
        "r6": [("aborted", 7, 8)],
        "r5": [("prefill", 7, 7), ("aborted", 8, 8)],
    }
    assert segments(golden(), 4)["r1"] == [("prefill", 1, 1), ("decode", 2, 4)]
    assert list(segments(golden(), 4)) == ["r1", "r2", "r3", "r4"]


def test_timeline_rows_in_time_and_inside_a_step() -> None:
    rows = views.timeline_rows(golden(), 4, axis="time")
    mine = np.flatnonzero((rows.row == 0) & (rows.code == CODE["decode"]))
    assert rows.x0[mine].tolist() == [0.010] and rows.x1[mine].tolist() == [0.044]
    assert segments(golden(), 4) == segments(golden(), Cursor(5, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="axis is 'day'"):
        views.timeline_rows(golden(), axis="day")
    with pytest.raises(KeyError, match="no request 'nobody'"):
        views.timeline_rows(golden(), requests=["nobody"])
    assert list(segments(golden(), 8, requests=["r5", "r1"])) == ["r5", "r1"]


def test_block_map_rows() -> None:
    rows = views.block_map_rows(golden(), 4)
    assert [KINDS[k] for k in rows.kind] == [
        "null",
        "used",
        "used",
        "cached",
        "used",
        "cached",
        "cached",
        "free",
    ]
    assert rows.owner.tolist() == [-1, 1, 1, 0, 1, 2, 2, 0]
    assert rows.refs.tolist() == [0, 1, 1, 0, 1, 0, 0, 0]
    assert rows.fill.tolist() == [0, 4, 4, 4, 4, 4, 4, 0]
    assert np.flatnonzero(rows.changed).tolist() == [1, 2, 3, 4, 5, 6, 7]
    two = views.block_map_rows(golden(), 2)
    assert [KINDS[k] for k in two.kind][1:] == ["shared", "shared", "used", "used", "used", "used", "used"]
    assert two.fill.tolist() == [0, 4, 4, 3, 2, 4, 4, 1]
    three = views.block_map_rows(golden(), 3)
    assert np.flatnonzero(three.changed).tolist() == [3, 4, 7]


@pytest.mark.parametrize(
    "made",
    [lambda: run(discipline="chunked"), lambda: run(kv_allocation="contiguous"), lambda: follow(wide(2))[1]],
    ids=["paged", "contiguous", "beams"],
)
def test_changed_blocks_of_real_runs_cover_every_difference(made: Callable[[], Trace]) -> None:
    trace = made()
    for step in range(1, len(trace) + 1):
        a, b = views.block_map_rows(trace, step - 1), views.block_map_rows(trace, step)
        different = {
            i
            for i in range(len(a.kind))
            if (a.kind[i], a.refs[i], a.fill[i]) != (b.kind[i], b.refs[i], b.fill[i])
        }
        assert different <= changed_blocks(trace, step), step


def test_block_table_rows() -> None:
    rows = views.block_table_rows(golden(), "r2", 3)
    assert rows.block_id.tolist() == [1, 2, 4] and rows.kind == ["shared", "shared", "used"]
    assert rows.fill.tolist() == [4, 4, 3] and rows.refs.tolist() == [2, 2, 1]
    assert rows.holders == [["r1", "r2"], ["r1", "r2"], ["r2"]] and rows.cached.tolist() == [
        True,
        True,
        False,
    ]


def test_batch_rows() -> None:
    rows = views.batch_rows(golden(), 2)
    assert rows.request_ids == ["r1", "r2", "r3"] and rows.budget == 12
    assert [dict(zip(PARTS, r)) for r in rows.tokens.tolist()] == [
        {"decode": 1, "prefill": 0, "recomputed": 0, "draft": 0, "padded": 0},
        {"decode": 0, "prefill": 2, "recomputed": 0, "draft": 0, "padded": 0},
        {"decode": 0, "prefill": 9, "recomputed": 0, "draft": 0, "padded": 0},
    ]
    assert dict(zip(PARTS, views.batch_rows(golden(), 6).tokens[0].tolist())) == {
        "decode": 0,
        "prefill": 1,
        "recomputed": 8,
        "draft": 0,
        "padded": 0,
    }
    assert views.batch_rows(golden(), 0).request_ids == []


@pytest.mark.parametrize("discipline", ["static-padded", "chunked"])
def test_the_batch_shows_every_token_of_the_account(discipline: str) -> None:
    trace = run(discipline=discipline)
    for record in trace:
        rows = views.batch_rows(trace, record.step)
        assert rows.tokens.sum() == record.tokens.total
        assert rows.tokens[:, PARTS.index("padded")].sum() == record.tokens.padded


def test_work_rows() -> None:
    rows = views.work_rows(golden())
    assert rows.step.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert (rows.source, rows.clock) == ("modelled", "modelled")
    assert rows.bytes_s[0] == pytest.approx(5e6 / 0.010) and rows.flops_s[0] == pytest.approx(8e6 / 0.010)
    assert rows.intensity[0] == pytest.approx(8 / 5)
    assert [STEP_KINDS[k] for k in rows.kind] == [
        "prefill",
        "mixed",
        "mixed",
        "decode",
        "decode",
        "prefill",
        "prefill",
    ]


def test_counted_work_and_measured_time_come_first() -> None:
    trace = golden()
    for r in trace.records:
        r.clock, r.measured_s, r.counted = (
            "measured",
            0.002,
            {"flops": 4e6, "weight_bytes": 1e6, "kv_bytes": 1e6},
        )
    rows = views.work_rows(trace)
    assert (rows.source, rows.clock) == ("counted", "measured")
    assert rows.bytes_s.tolist() == pytest.approx([1e9] * 7)
    assert "counted work, measured time" in views.utilisation(trace)["layout"]["title"]["text"]


def test_phase_rows_split_a_step_of_both_and_add_up() -> None:
    trace = run(discipline="chunked", max_num_batched_tokens=24)
    rows = views.phase_rows(trace)
    both = [r for r in trace if {c.kind for c in r.chunks} == {"decode", "prefill"}]
    assert len(both) > 3
    for r in trace:
        mine = np.flatnonzero(rows.step == r.step)
        assert r.cost is not None
        assert len(mine) == len({c.kind for c in r.chunks})
        assert rows.flops[mine].sum() == pytest.approx(r.cost.flops)
        # Both read the weights; KV belongs to one.
        assert rows.moved[mine].sum() == pytest.approx(r.cost.kv_bytes + len(mine) * r.cost.weight_bytes)
        assert {i for n in mine for i in rows.requests[n]} == {c.request_id for c in r.chunks}
    r = both[-1]
    by_kind = {PHASES[rows.kind[n]]: n for n in np.flatnonzero(rows.step == r.step)}
    decodes = [c.request_id for c in r.chunks if c.kind == "decode"]
    assert rows.requests[by_kind["decode"]] == decodes
    assert not rows.alone[by_kind["decode"]]
    assert rows.intensity[by_kind["prefill"]] > rows.intensity[by_kind["decode"]]


def test_a_recording_without_the_split_shows_steps_of_both_as_such() -> None:
    rows = views.phase_rows(golden())
    assert [PHASES[k] for k in rows.kind] == [
        "prefill",
        "mixed",
        "mixed",
        "decode",
        "decode",
        "prefill",
        "prefill",
    ]


def test_a_pass_that_was_counted_is_split_in_proportion() -> None:
    trace = run(discipline="chunked", max_num_batched_tokens=24)
    r = next(r for r in trace if {c.kind for c in r.chunks} == {"decode", "prefill"})
    assert r.cost is not None
    r.counted = {
        "flops": 2 * r.cost.flops,
        "weight_bytes": r.cost.weight_bytes,
        "kv_bytes": 3 * r.cost.kv_bytes,
    }
    decode, prefill = phases(r)
    assert (decode.kind, prefill.kind) == ("decode", "prefill")
    assert decode.flops == pytest.approx(2 * r.cost.decode_flops)
    assert decode.moved == pytest.approx(r.cost.weight_bytes + 3 * r.cost.decode_kv_bytes)
    assert decode.flops + prefill.flops == pytest.approx(2 * r.cost.flops)


def test_the_roof_bends_where_the_peaks_meet_and_the_current_step_is_marked() -> None:
    trace = run(discipline="chunked")
    h = trace.header
    figure = views.roofline(trace, 3)
    roof, decode, prefill, mixed, now = figure["data"]
    assert roof["x"][1] == pytest.approx(h.peak_flops_s / h.peak_bytes_s)
    assert roof["y"][1:] == [h.peak_flops_s] * 2
    for x, y in zip([*decode["x"], *prefill["x"]], [*decode["y"], *prefill["y"]]):
        assert y <= min(h.peak_flops_s, x * h.peak_bytes_s) * (
            1 + 1e-9
        )  # nothing is above the roof of the device that it was priced for
    rows = views.phase_rows(trace, 3)
    assert now["x"] == rows.intensity[rows.step == 3].tolist()
    assert now["name"] == "step 3"
    assert mixed["x"] == []
    said = [a["text"] for a in figure["layout"]["annotations"]]
    assert said == ["reading memory is the limit", "arithmetic is the limit"]
    assert decode["customdata"][0][2] == ", ".join(
        c.request_id for c in trace.record(decode["customdata"][0][0]).chunks if c.kind == "decode"
    )


def test_kernels_busy_is_drawn_where_it_was_measured() -> None:
    trace = golden()
    trace.records[2].device = {"busy_s": 0.003, "gap_s": 0.001}
    steps, share = views.busy_rows(trace)
    assert steps.tolist() == [3] and share.tolist() == [0.75]
    figure = views.utilisation(trace)
    assert figure["data"][4]["y"] == [0.75] and "yaxis3" in figure["layout"]
    assert "yaxis3" not in views.utilisation(golden())["layout"]


PROFILE = StepProfile(
    "a clock",
    ["product", "<b>attention</b>"],
    [0, 1, 0],
    [0.0, 0.002, 0.003],
    [0.002, 0.001, 0.004],
    [0, 0, 1],
    ["host", "stream 7"],
    0.0075,
)


def test_inside_rows_and_lanes() -> None:
    trace = golden()
    assert views.inside_rows(trace, 3) is None
    trace.records[2].profile = PROFILE
    rows = views.inside_rows(trace, 3)
    assert rows is not None and rows.lane.tolist() == [0, 0, 1]
    figure = views.inside(trace, 3)
    assert figure["data"][0]["x"] == pytest.approx([2.0, 1.0, 4.0]) and figure["data"][0][
        "base"
    ] == pytest.approx([0.0, 2.0, 3.0])
    assert figure["data"][0]["customdata"] == ["product", "&lt;b&gt;attention&lt;/b&gt;", "product"]
    assert figure["layout"]["yaxis"]["ticktext"] == ["host", "stream 7"]
    assert figure["layout"]["title"]["text"] == "Inside step 3 (measured): a clock"
    assert "watched: step 3" in views.inside(trace, 4)["layout"]["annotations"][0]["text"]


def test_copies_lie_below_the_pass_whether_or_not_the_step_was_watched() -> None:
    trace = golden()
    assert views.moved_rows(trace, 3) is None
    trace.records[2].spans = [
        Span("swap-in", 0.0, 0.001, 2),
        Span("swap-out", 0.001, 0.004, 3),
        Span("pass", 0.001, 0.011),
    ]
    figure = views.inside(trace, 3)
    bars = figure["data"][0]
    assert figure["layout"]["yaxis"]["ticktext"] == [
        "the pass",
        "swap-out: device to host",
        "swap-in: host to device",
    ]
    assert (
        bars["y"] == [2, 1, 0]
        and bars["base"] == pytest.approx([0, 1, 1])
        and bars["x"] == pytest.approx([1, 3, 10])
    )
    assert bars["customdata"] == [
        "swap-in: host to device, 2 blocks",
        "swap-out: device to host, 3 blocks",
        "the pass",
    ]
    assert figure["layout"]["title"]["text"] == "Inside step 3: blocks copied beside the pass (modelled)"
    assert copies_told(trace.records[2]) == (
        "Copied (modelled): 3 blocks to the host in 3 ms, 100 % of it beside the pass; "
        "2 blocks from the host in 1 ms, 0 % of it beside the pass"
    )
    trace.records[2].profile = PROFILE  # its lanes follow below
    bars = views.inside(trace, 3)["data"][0]
    assert bars["y"] == [2, 1, 0, 3, 3, 4] and bars["customdata"][3:] == [
        "product",
        "&lt;b&gt;attention&lt;/b&gt;",
        "product",
    ]


def test_queue_and_slot_and_latency_and_token_rows() -> None:
    q = views.queues_rows(golden())
    assert q["running"].tolist() == [1, 3, 3, 1, 0, 0, 1, 0] and q["waiting"].tolist() == [
        0,
        0,
        1,
        2,
        2,
        0,
        0,
        0,
    ]
    assert q["seats"].tolist() == [3] * 5 + [2] * 3 and q["preempted"].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    s = views.slots_rows(golden())
    assert sum(s[p] for p in SLOT_PARTS).tolist() == s["total"].tolist() == [28] * 8
    v, share = views.latency_rows(golden())["ttft_s"]
    assert v.tolist() == pytest.approx([0.010, 0.015, 0.024]) and share.tolist() == pytest.approx(
        [1 / 3, 2 / 3, 1]
    )
    k = views.tokens_rows(golden(), 4)
    assert k.token_id.tolist() == [11, 12, 13, 14, 21, 22, 23, 31] and k.step.tolist() == [
        1,
        2,
        3,
        4,
        2,
        3,
        4,
        3,
    ]
    assert k.new.tolist() == [False, False, False, True, False, False, True, False] and k.text[:2] == [
        "Once",
        " <b>upon</b>",
    ]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dark", [False, True])
def test_figures_are_plain_json_and_valid_plotly_with_fixed_traces(name: str, dark: bool) -> None:
    import plotly.graph_objects as go

    view, number = ALL[name]
    names = None
    for trace, cursor in (
        (golden(), None),
        (golden(), 0),
        (golden(), 1),
        (golden(), Cursor(5, 3)),
        (Trace(TraceHeader()), None),
        (golden(capabilities=[]), None),
    ):
        figure = view(trace, cursor, dark=dark)
        json.dumps(figure, allow_nan=False)
        go.Figure(figure)
        assert set(figure) == {"data", "layout"} and len(figure["data"]) == number
        types = [d["type"] for d in figure["data"]]
        assert names is None or types == names
        names = types


@pytest.mark.parametrize("name", [n for n in ALL if n != "compare"])
def test_a_picture_shows_no_later_state(name: str) -> None:
    view, _ = ALL[name]
    for step in range(NUM_STEPS + 1):
        assert view(golden(), step) == view(golden().share(step), step)


@pytest.mark.parametrize(
    "view, capability",
    [
        ("timeline", "schedule"),
        ("block_map", "blocks"),
        ("batch", "schedule"),
        ("utilisation", "cost"),
        ("roofline", "time"),
        ("queues", "queue"),
        ("latency", "time"),
        ("tokens", "tokens"),
        ("slots", "accounting"),
    ],
)
def test_a_view_says_which_table_is_missing_and_why(view: str, capability: str) -> None:
    held = [c for c in golden().header.capabilities if c != capability]
    figure = views.VIEWS[view](golden(capabilities=held, missing={capability: "a log has <none>"}))
    assert [a["text"] for a in figure["layout"]["annotations"]] == [
        f"This trace has no {capability}: a log has &lt;none&gt;"
    ]
    assert not any(
        d.get("x") or d.get("z", [[None]])[0][0] is not None for d in figure["data"] if d["type"] != "table"
    )


def test_words_are_never_markup() -> None:
    figure = views.tokens(golden(), 4)
    cells = figure["data"][0]["cells"]["values"]
    assert cells[2][0] == "Once &lt;b&gt;upon&lt;/b&gt; a<b> &#36;time&#36;</b>"
    assert cells[2][1] == "Hello &amp;<b>⏎</b>"
    assert plain("<a href='x'>\t&amp;") == "&lt;a href='x'&gt;⇥&amp;amp;"
    without = views.tokens(golden(capabilities=["tokens"]), 4)
    assert without["data"][0]["cells"]["values"][2][0] == " 11 12 13<b> 14</b>"


def test_request_ids_are_never_markup() -> None:
    from cbviz import events as ev
    from cbviz.messages import ChunkRecord, StepRecord

    evil = "<img src=x>$1$"
    trace = Trace(TraceHeader(num_blocks=8, block_size=4, config={"max_num_seqs": 2}))
    trace.append(
        StepRecord(
            1,
            0.0,
            1.0,
            "measured",
            [ChunkRecord(evil, 0, 3, "prefill", sample=True)],
            [
                ev.Arrived(evil, 0, 3, 4),
                ev.Admitted(evil, False, 0, 0, 0),
                ev.Allocated(evil, [1]),
                ev.Scheduled(evil, 0, 3, wanted=3),
                ev.Executed(),
                ev.Sampled(evil, [5]),
            ],
            texts={evil: [evil]},
        )
    )
    for name, (view, _) in ALL.items():
        if name != "compare":
            assert "<img" not in json.dumps(view(trace)), name
    assert "<img" not in json.dumps(views.block_table(trace, evil)) and "$1$" not in json.dumps(
        views.block_table(trace, evil)
    )


def test_compare_marks_the_first_difference() -> None:
    a, b = run(discipline="chunked"), run(discipline="orca")
    figure = views.compare(a, b, names=("chunked", "orca"))
    assert figure["layout"]["title"]["text"].startswith("step 1 is the first that differs")
    assert any(s["line"].get("dash") == "dash" for s in figure["layout"]["shapes"])
    same = views.compare(a, a)
    assert same["layout"]["title"]["text"] == "" and same["layout"]["shapes"] == []


def test_measured_and_modelled_times_do_not_share_an_axis() -> None:
    figure = views.compare(golden(), golden(clock="measured"), axis="time")
    assert (
        figure["layout"]["xaxis"]["title"]["text"] == "step"
        and "measured" in figure["layout"]["title"]["text"]
    )


def test_golden_snapshot_of_the_picture() -> None:
    """The parts of a figure that a reader sees first, as they stand."""
    figure = views.timeline(golden(), 4, selected="r2")
    seen = {d["name"]: list(zip(d["y"], d["base"], d["x"])) for d in figure["data"] if d["y"]}
    assert seen == {
        "waiting": [(3, 2.5, 2.0)],
        "prefill": [(0, 0.5, 1.0), (1, 1.5, 1.0), (2, 1.5, 2.0)],
        "decode": [(0, 1.5, 3.0), (1, 2.5, 2.0)],
        "preempted": [(2, 3.5, 1.0)],
    }
    assert figure["layout"]["yaxis"]["ticktext"] == ["r1", "r2", "r3", "r4"]
    line, box = figure["layout"]["shapes"]
    assert line["x0"] == 4.5 and (box["y0"], box["y1"]) == (0.5, 1.5)
    assert views.batch(golden(), 2)["layout"]["title"]["text"] == "Batch of step 2: 12 of 12 tokens"
    hover = views.block_map(golden(), 2)["data"][0]["hovertext"][0]
    assert hover[1] == (
        "block 1, shared by 2: r1, r2, place 0 in the table<br>4 of 4 slots hold a token, can be found "
        "by its hash"
    )
    assert hover[7] == "block 7, held by r3, place 2 in the table<br>1 of 4 slots hold a token"
