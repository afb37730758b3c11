"""What the page is sent is the trace's own state: read back the way the page reads it, and held against a
fresh fold.
"""

from __future__ import annotations

import pytest

from cbviz import events as ev
from cbviz.app.wire import SERIES, Wire, inside_message
from cbviz.session import Session
from cbviz.trace import Cursor
from tests.app.page import Page, assert_equal, assert_history
from tests.core.test_beam import follow, wide


@pytest.mark.parametrize("scenario", ["article", "preemption", "shared-prefix", "burst"])
@pytest.mark.parametrize("discipline", ["static-padded", "paged", "chunked", "vllm"])
def test_deltas_add_up_to_the_trace(scenario: str, discipline: str) -> None:
    from cbviz.workload.presets import PRESETS

    settings = {**PRESETS[scenario].settings, "discipline": discipline, "max_num_batched_tokens": None}
    s = Session(scenario, runner="sim", **settings)
    wire, page = Wire(), Page()
    page.read(wire.message(s.trace, s.cursor))  # type: ignore[arg-type]
    assert_equal(page, s.trace, Cursor(0))
    assert wire.message(s.trace, s.cursor) is None
    for n in (*[1] * 40, 3, 7, 1, 20, 1, 60):  # one by one, and merged
        if s.step(n) is None:
            break
        message = wire.message(s.trace, s.cursor)
        assert message is not None
        assert not message[0].get("full")
        page.read(message)
        assert_equal(page, s.trace, s.cursor)
    assert_history(page, s.trace)


def test_jumps_inside_steps_and_back() -> None:
    s = Session("preemption", runner="sim", num_blocks=33, enable_prefix_caching=True)
    s.step(70)
    wire, page = Wire(), Page()
    for cursor in (
        Cursor(70),
        Cursor(12),
        Cursor(13),
        Cursor(13, 2),
        Cursor(12),
        Cursor(0),
        Cursor(1),
        Cursor(69, 1),
        Cursor(70),
        Cursor(35, 3),
        Cursor(36),
    ):
        page.read(wire.message(s.trace, cursor))  # type: ignore[arg-type]
        assert_equal(page, s.trace, cursor)
    assert_history(page, s.trace)
    s.step(5)
    page.read(wire.message(s.trace, Cursor(20)))  # type: ignore[arg-type]
    assert_equal(page, s.trace, Cursor(20))
    assert page.steps == 75


def test_a_shorter_trace_starts_over() -> None:
    s = Session("burst", runner="sim", max_num_seqs=4)
    s.step(30)
    wire, page = Wire(), Page()
    page.read(wire.message(s.trace, s.cursor))  # type: ignore[arg-type]
    s.rewind(10)
    message = wire.message(s.trace, s.cursor)
    assert message is not None
    assert message[0]["reset"]
    page.read(message)
    assert_equal(page, s.trace, Cursor(10))
    s.reset()
    page.read(wire.message(s.trace, s.cursor))  # type: ignore[arg-type]
    assert page.ids == []
    assert page.steps == 0


def test_marks_are_those_of_the_last_step_alone() -> None:
    s = Session("article", runner="sim")
    s.step(5)
    wire, page = Wire(), Page()
    page.read(wire.message(s.trace, s.cursor))  # type: ignore[arg-type]
    s.step(4)
    page.read(wire.message(s.trace, s.cursor))  # type: ignore[arg-type]
    merged = page.marks
    other = Page()
    other.read(Wire().message(s.trace, s.cursor))  # type: ignore[arg-type]
    assert merged == other.marks
    assert merged
    assert 0 not in merged


def test_a_block_of_128_with_300_sharers() -> None:
    from cbviz.app.wire import block_words
    from cbviz.trace.state import RequestState, State

    state = State(8, 128)
    for i in range(300):
        r = RequestState(f"r{i}", i, 300, 1)
        r.num_computed_tokens = 256
        state.by_index.append(r)
        state.requests[r.request_id] = r
        state._take(r, [3, 4])
    owner, word = block_words(state, 3)
    assert (owner, word >> 16, (word >> 4) & 4095) == (1, 300, 128)


def test_copies_of_a_step_are_told_though_nobody_watched_it() -> None:
    s = Session("article", runner="sim", preemption_mode="swap", num_blocks=24, enable_prefix_caching=False)
    s.run()
    told = {r.step: inside_message(s.trace, r.step) for r in s.trace}
    assert {n for n, m in told.items() if m["moved"]} == {r.step for r in s.trace if r.spans} != set()
    out = next(
        m["moved"]
        for m in told.values()
        if m["moved"] and any(x[0] == "swap-out" for x in m["moved"]["spans"])
    )
    assert (
        out["clock"] == "modelled" and "to the host" in out["said"] and "of it beside the pass" in out["said"]
    )
    assert [x[0] for x in out["spans"]].count("pass") == 1 and all(b >= a for _, a, b, *_ in out["spans"])
    assert all(m["profile"] is None for m in told.values())


def test_the_words_of_beams_follow_their_lineage_and_are_told_when_their_search_ends() -> None:
    _, trace = follow(wide(0))
    page, message = Page(), Wire().message(trace, trace.last)
    assert message is not None
    page.read(message)
    searches = {e.request_id: r.step for r in trace for e in r.events if isinstance(e, ev.BeamsEnded)}
    told = {page.ids[i]: step for i, step in message[0]["ended"]}
    assert len(searches) > 1 and {rid: told[rid] for rid in searches} == searches
    assert all(
        page.out[page.ids.index(rid)] == [f" {t}" for t in trace.state().request(rid).output_token_ids]
        for rid in told
    )
    assert {page.ids[i]: steps for i, _, steps in message[0]["out"] if page.ids[i] in told} == {
        rid: trace.state().request(rid).output_steps for rid in told
    }
    for step in range(len(trace)):
        for r in trace.state(
            Cursor(step)
        ).by_index:  # of a search that goes on, the words come of the choices up to there
            chosen = [b for b in message[0]["beams"] if b[0] <= step and r.index in b[1]]
            if chosen and r.status != "finished":
                i, told_words = chosen[0][1].index(r.index), []
                for _, _, parents, pieces, _ in reversed(chosen):
                    told_words.insert(0, pieces[i])
                    i = parents[i]
                assert (
                    told_words == [f" {t}" for t in r.output_token_ids]
                    and r.beam_score == chosen[-1][4][chosen[-1][1].index(r.index)]
                )
    sampled = page.series[SERIES.index("sampled") :: len(SERIES)]
    assert all(sampled[r.step - 1] > 0 for r in trace if any(isinstance(e, ev.BeamStep) for e in r.events))
