"""What the requests say: every output token with the step that made it.

All words are harmless text, never markup.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cbviz.trace.trace import Cursor, Trace
from cbviz.views.blocks import data_table
from cbviz.views.figure import Figure, done_steps, lacking, layout, place, plain
from cbviz.views.theme import theme


class TokenRows(NamedTuple):
    """All output tokens up to the cursor, request by request; arrays [tokens].

    `text` is as the tokenizer gave it (not yet harmless), '' where there is none.
    """

    request: np.ndarray
    """Row of the request, in order of arrival."""
    position: np.ndarray
    token_id: np.ndarray
    step: np.ndarray
    new: np.ndarray
    """True for tokens of the last step."""
    text: list[str]


def tokens_rows(trace: Trace, cursor: Cursor | int | None = None) -> TokenRows:
    """The outputs at the cursor, with the step that made each."""
    at = place(trace, cursor)
    state = trace.state(at)
    rows: list[tuple[int, int, int, int]] = []
    text: list[str] = []
    for r in state.by_index:
        rows += [
            (r.index, i, token, step)
            for i, (token, step) in enumerate(zip(r.output_token_ids, r.output_steps))
        ]
        words = r.output_texts[: len(r.output_token_ids)]
        text += words + [""] * (len(r.output_token_ids) - len(words))
    request, position, token, step = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return TokenRows(request, position, token, step, step == at.step, text)


def tokens(
    trace: Trace, cursor: Cursor | int | None = None, *, width: int = 240, dark: bool = False
) -> Figure:
    """A row a request: its state, its text so far (the last `width` characters, tokens of this step bold,
    accepted drafts underlined), how many tokens and from which steps. One table trace.

    Where the trace has no words the token ids stand in their place.
    """
    t, at = theme(dark), place(trace, cursor)
    note = lacking(trace, "tokens")
    cells: list[list[object]] = [[], [], [], [], []]
    if not note:
        rows = tokens_rows(trace, at)
        state = trace.state(at)
        starts = np.searchsorted(rows.request, np.arange(len(state.by_index) + 1))
        worded = trace.has("texts")
        for r in state.by_index:
            mine = range(starts[r.index], starts[r.index + 1])
            line, used = [], 0
            drafted = set(r.output_drafted)
            for i in reversed(mine):
                word = rows.text[i] if worded else f" {rows.token_id[i]}"
                used += len(word)
                if used > width:
                    line.append("… ")
                    break
                shown = f"<u>{plain(word)}</u>" if i - starts[r.index] in drafted and word else plain(word)
                line.append(f"<b>{shown}</b>" if rows.new[i] and word else shown)
            steps = f"{rows.step[mine[0]]}..{rows.step[mine[-1]]}" if mine else ""
            for column, value in zip(
                cells,
                (plain(r.request_id), r.state, "".join(reversed(line)), f"{len(mine)}/{r.max_tokens}", steps),
            ):
                column.append(value)
    what = "Text" if trace.has("texts") else "Token ids (" + (lacking(trace, "texts") or "no words") + ")"
    return {
        "data": [
            data_table(
                t,
                ["request", "state", "output", "tokens", "steps"],
                cells,
                [100, 110, 520, 80, 80],
                mono=True,
            )
        ],
        "layout": layout(t, f"{what} after {done_steps(at)} steps", note=note, margin={"l": 8, "r": 8}),
    }
