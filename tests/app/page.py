"""A page without a browser: decodes what the kernel sends as static/store.js does, and compares it with a
fold of the trace.
"""

from __future__ import annotations

from array import array
from typing import Any

from cbviz.app.wire import ROW_WORDS, SAME_BLOCKS, SERIES, STATUS
from cbviz.trace import Cursor, Trace
from cbviz.trace.state import STATES


class Page:
    """Decodes as static/store.js does, without drawing."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.ids: list[str] = []
        self.out: list[list[str]] = []
        self.segments: list[dict[int, int]] = []
        self.words: list[str] = []

    def read(self, message: tuple[dict[str, Any], list[bytes]]) -> None:
        head, buffers = message
        buf = {n: array("d" if n == "series" else "I", b) for n, b in zip(head["b"], buffers, strict=True)}
        if head.get("reset"):
            self.__init__()  # type: ignore[misc]
            self.words = [""]
            self.blocks = [(0, 0)] * head["num_blocks"]
            self.series: list[float] = []
        self.words += head.get("words", [])
        for q in head.get("requests", []):
            self.ids.append(q["id"])
            self.out.append([])
            self.segments.append({})
        if "ptr" in buf:
            for i, (a, b) in enumerate(zip(buf["ptr"], buf["ptr"][1:])):
                self.segments[i] = {w // 32: w % 32 for w in buf["seg"][a:b]}
        for i in range(0, len(buf.get("tr", [])), 3):
            r, step, code = buf["tr"][i : i + 3]
            self.segments[r][step] = code
        for r, pieces, steps in head.get("out", []):
            assert len(pieces) == len(steps)
            self.out[r] += pieces
        self.series.extend(buf.get("series", []))
        if head.get("full"):
            self.rows = {}
        w = buf.get("rows", array("I"))
        i = 0
        while i < len(w):
            r, nb = w[i], w[i + ROW_WORDS - 1]
            blocks = (
                self.rows.get(r, {"blocks": []})["blocks"]
                if nb == SAME_BLOCKS
                else list(w[i + ROW_WORDS : i + ROW_WORDS + nb])
            )
            self.rows[r] = {
                "state": STATES[w[i + 1]],
                "computed": w[i + 2],
                "outputs": w[i + 4],
                "preemptions": w[i + 5],
                "wait": self.words[w[i + 6]],
                "end": self.words[w[i + 9]],
                "status": STATUS[w[i + 10]],
                "blocks": blocks,
            }
            i += ROW_WORDS + (0 if nb == SAME_BLOCKS else nb)
        if "words" in buf:
            self.blocks = [(buf["words"][2 * b], buf["words"][2 * b + 1]) for b in range(len(self.blocks))]
        for i in range(0, len(buf.get("blocks", [])), 3):
            self.blocks[buf["blocks"][i]] = (buf["blocks"][i + 1], buf["blocks"][i + 2])
        if "queue" in buf:
            n = buf["queue"][0]
            self.waiting, self.running = (
                [self.ids[r] for r in buf["queue"][1 : 1 + n]],
                [self.ids[r] for r in buf["queue"][1 + n :]],
            )
        self.marks = list(buf["marks"])
        self.chunks = [tuple(buf["chunks"][i : i + 4]) for i in range(0, len(buf["chunks"]), 4)]
        self.step, self.event, self.steps = head["step"], head["event"], head["steps"]


def assert_equal(page: Page, trace: Trace, cursor: Cursor) -> None:
    state = trace.state(cursor)
    assert (page.step, page.event) == cursor
    assert page.ids[: len(state.by_index)] == [r.request_id for r in state.by_index]
    assert {page.ids[i] for i in page.rows} == set(state.requests)
    for r in state.by_index:
        row = page.rows[r.index]
        assert (
            row["state"],
            row["computed"],
            row["outputs"],
            row["blocks"],
            row["status"],
            row["preemptions"],
            row["wait"],
            row["end"],
        ) == (
            r.state,
            max(0, r.num_computed_tokens),
            len(r.output_token_ids),
            r.block_ids,
            r.status,
            r.num_preemptions,
            r.wait_reason,
            r.finish_reason,
        ), (cursor, r.request_id)
    assert (page.waiting, page.running) == (state.waiting, state.running)
    for b in range(state.num_blocks):
        owner, word = page.blocks[b]
        cached = bool(word & 1)
        assert (owner - 1, word >> 16, (word >> 4) & 4095) == (
            state.owner(b),
            state.ref_count(b),
            state.fill(b),
        ), (cursor, b)
        assert cached == (bool(state.cached[b]) and b != 0)


def assert_history(page: Page, trace: Trace) -> None:
    assert page.steps == len(trace)
    assert len(page.series) == len(SERIES) * len(trace)
    for i, segments in enumerate(trace.segments):
        assert page.segments[i] == {s.step: s.code for s in segments}
    for r in trace.state().by_index:
        assert len(page.out[r.index]) == len(r.output_token_ids)
