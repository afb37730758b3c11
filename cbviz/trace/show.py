"""The text twin of the explorer: one moment of a run as plain characters. Knows the trace alone.

Every character that came from a user or a model is made printable first, so that no text can steer a
terminal.
"""

from __future__ import annotations

import textwrap

from cbviz.messages import StepProfile
from cbviz.trace import utilisation
from cbviz.trace.accounting import SLOT_PARTS, TOKEN_PARTS
from cbviz.trace.experts import imbalance, layers_of
from cbviz.trace.explain import count, explain_record
from cbviz.trace.metrics import format_value, metrics, num_seats, seconds, token_budget, whose_time
from cbviz.trace.state import STATES, RequestState, State
from cbviz.trace.trace import Trace

LETTERS = {
    "none": " ",
    "waiting": ".",
    "prefill": "#",
    "decode": "=",
    "preempted": "x",
    "swapped": "s",
    "finished": " ",
    "idle": "-",
    "held": "h",
    "padded": "p",
    "recompute": "r",
    "aborted": "a",
    "transferring": "t",
    "accepted": ">",
    "rejected": "<",
}
"""What stands for a state on a line of text."""
BLOCK_SIGNS = {"null": "_", "free": ".", "cached": ":", "reserved": "+", "shared": "*"}
"""What stands for a block; a block in use shows its owner's sign."""
OWNERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
LAST_STEPS = 60


def printable(text: str) -> str:
    """The text without control characters (they are shown as '·'; line breaks as '⏎')."""
    return "".join(c if c.isprintable() else "⏎" if c == "\n" else "·" for c in text)


def owner_sign(index: int) -> str:
    """The sign of a request's blocks: a cycle of 62."""
    return OWNERS[index % len(OWNERS)] if index >= 0 else "?"


def strip(trace: Trace, index: int, step: int, num_steps: int = LAST_STEPS) -> str:
    """What request `index` was in the last `num_steps` steps up to `step`, one letter a step."""
    first = max(1, step - num_steps + 1)
    line = [" "] * (step - first + 1)
    mine = trace.segments_until(index, step) if index < len(trace.segments) else []
    for i, s in enumerate(mine):
        end = mine[i + 1].step if i + 1 < len(mine) else step + 1
        for k in range(max(s.step, first), min(end, step + 1)):
            line[k - first] = LETTERS[STATES[s.code]]
    return "".join(line)


def show(trace: Trace, step: int | None = None, width: int = 120, max_rows: int = 32) -> str:
    """The run after `step` steps (default: all), as text of at most `width` columns.

    At most `max_rows` requests: the unfinished first, then those that ended last.

    Raises IndexError if the trace has no such step.
    """
    at = len(trace) if step is None else step
    state = trace.state(at)
    width = max(width, 60)
    parts = [_head(trace, state, width), _timeline(trace, state, width, max_rows)]
    if at:
        record = trace.record(at)
        parts.append(
            _section(
                f"WHY, step {at}",
                [
                    line
                    for s in explain_record(trace, record, state)
                    for line in textwrap.wrap(printable(s), width - 2, subsequent_indent="  ")
                ],
            )
        )
        parts.append(_section("BATCH", _batch(trace, state, width)))
        if trace.has("cost") and trace.has("time") and record.chunks:
            parts.append(
                _section(
                    "UTILISATION",
                    [
                        line
                        for text in utilisation.sentences(trace, at)
                        for line in textwrap.wrap(printable(text), width - 2, subsequent_indent="  ")
                    ],
                )
            )
        if record.profile is not None:
            parts.append(
                _section(
                    f"INSIDE THE STEP (measured: {record.profile.source})", _inside(record.profile, width)
                )
            )
    parts.append(_section("QUEUE", _queue(state, width)))
    if trace.has("blocks") and state.num_blocks:
        parts.append(
            _section(
                "BLOCKS  "
                + "  ".join(f"{sign} {kind}" for kind, sign in BLOCK_SIGNS.items())
                + "  0-9A-z owner",
                _blocks(state, width),
            )
        )
    if trace.has("texts"):
        parts.append(_section("TEXT", _text(state, width, max_rows)))
    if at and (load := trace.record(at).expert_load):
        parts.append(_section("EXPERTS (counted: tokens of each in this step)", _experts(load, width)))
    if at and trace.has("accounting"):
        record = trace.record(at)
        t, s = record.tokens, record.slots
        parts.append(
            _section(
                "ACCOUNTING (counted)",
                [
                    f"tokens of the step  {t.total:,} = "
                    + " + ".join(f"{getattr(t, p):,} {p}" for p in TOKEN_PARTS),
                    f"slots of the pool   {s.total:,} = "
                    + " + ".join(f"{getattr(s, p):,} {p.replace('_', ' ')}" for p in SLOT_PARTS),
                ],
            )
        )
    lines = [line for part in parts for line in [*part.split("\n"), ""]]
    return "\n".join(printable(x) for line in lines for x in _fit(line, width))


def _fit(line: str, width: int) -> list[str]:
    """The line, broken where it is too wide."""
    return (
        [line]
        if len(line) <= width
        else textwrap.wrap(line, width, subsequent_indent="    ", drop_whitespace=False)
    )


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([title, *("  " + line for line in lines)])


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _head(trace: Trace, state: State, width: int) -> str:
    h, c = trace.header, state.config
    m = metrics(trace, state.step)
    name = " | ".join(
        printable(str(x)) for x in (h.model, h.runner, c.get("discipline"), c.get("policy")) if x
    )
    done = m["num_finished"] + m["num_aborted"] + m["num_refused"]
    seats = num_seats(c)
    facts = [
        f"step {state.step} of {len(trace)}",
        f"{done}/{m['num_requests']} done",
        f"{m['num_running']} running" + (f" of {count(seats, 'seat')}" if seats else ""),
        f"{m['num_waiting']} waiting",
    ]
    if trace.has("time"):
        facts += [f"t {seconds(state.time_s)}", format_value("output_throughput", m["output_throughput"])]
    if m["kv_usage"] is not None:
        facts.append(f"KV {format_value('kv_usage', m['kv_usage'])}")
    facts.append(f"{count(m['num_preemptions'], 'preemption')}")
    return "\n".join(
        [
            _cut(f"{h.producer}  {name}", width),
            *_flow(facts, width),
            *([_cut(whose_time(m), width)] if trace.has("time") else []),
        ]
    )


def _chosen(state: State, max_rows: int) -> list[RequestState]:
    if len(state.by_index) <= max_rows:
        return list(state.by_index)
    alive = [r for r in state.by_index if not r.finished]
    ended = sorted((r for r in state.by_index if r.finished), key=lambda r: r.finish_step)
    keep = alive[:max_rows]
    keep += ended[len(ended) - (max_rows - len(keep)) :] if len(keep) < max_rows else []
    return sorted(keep, key=lambda r: r.index)


def _timeline(trace: Trace, state: State, width: int, max_rows: int) -> str:
    rows = _chosen(state, max_rows)
    names = [_cut(printable(r.request_id), 16) for r in rows]
    wide = max((len(n) for n in names), default=0)
    steps = max(10, min(LAST_STEPS, width - wide - 40, max(state.step, 10)))
    first = max(1, state.step - steps + 1)
    used = {s for r in rows for s in strip(trace, r.index, state.step, steps)} - {" "}
    legend = "  ".join(f"{sign} {name}" for name, sign in LETTERS.items() if sign in used)
    lines = []
    for r, name in zip(rows, names):
        tail = f"{r.state:<9} {len(r.output_token_ids):>4}/{r.max_tokens:<4}" + (
            f" {len(r.block_ids)} bl" if r.block_ids else ""
        )
        lines.append(
            _cut(
                (
                    f"{owner_sign(r.index)} {name:<{wide}} "
                    f"|{strip(trace, r.index, state.step, steps):<{steps}}| {tail}"
                ).rstrip(),
                width - 2,
            )
        )
    left_out = len(state.by_index) - len(rows)
    if left_out:
        lines.append(f"({count(left_out, 'more row')} not shown)")
    return _section(
        f"TIMELINE  steps {first}..{state.step}  {legend}".rstrip() if state.step else "TIMELINE",
        lines or ["no request has arrived"],
    )


def _batch(trace: Trace, state: State, width: int) -> list[str]:
    record = trace.record(state.step)
    budget = token_budget(state.config)
    total = sum(c.num_tokens for c in record.chunks) + record.num_padding_tokens
    shares = [
        (
            f"{printable(c.request_id)} "
            f"{c.num_tokens}{'p' if c.padding else 'd' if c.kind == 'decode' else 'r' if c.num_recomputed else 'f'}"
        )
        for c in record.chunks
    ]
    if record.num_padding_tokens:
        shares.append(f"padding {record.num_padding_tokens}")
    head = (
        f"{total:,}"
        + (f" of {budget:,}" if budget else "")
        + " tokens"
        + (" (f prefill, r recomputed, d decode, p padded):" if shares else "")
    )
    return [head, *_flow(shares, width - 2)]


MOST_NAMES = 12
"""Operators or kernels of a watched step that are listed."""


def _inside(p: StepProfile, width: int) -> list[str]:
    """What ran in the step, the longest first, each with its share of all that ran."""
    ran = utilisation.totals(p)
    whole = sum(r.total_s for r in ran) or 1.0
    room = width - 42
    lines = [
        (
            f"{_cut(r.name, room):<{room}} {r.times:>5} x {seconds(r.total_s):>9} "
            f"{r.total_s / whole:>6.1%}  {'#' * round(10 * r.total_s / whole)}"
        ).rstrip()
        for r in ran[:MOST_NAMES]
    ]
    if len(ran) > MOST_NAMES:
        rest = ran[MOST_NAMES:]
        lines.append(f"({count(len(rest), 'other name')}: {seconds(sum(r.total_s for r in rest))})")
    return [
        *lines,
        f"in all {seconds(whole)} of the {seconds(p.total_s)} that the pass took while it was watched",
    ]


def _flow(items: list[str], width: int) -> list[str]:
    """Items side by side, two spaces apart, none broken over two lines."""
    return [
        line.replace("\0", " ")
        for line in textwrap.wrap(
            "  ".join(i.replace(" ", "\0") for i in items), width, break_long_words=False
        )
    ]


def _experts(load: list[list[int]], width: int) -> list[str]:
    """A line a sparse layer: tokens of each expert (of more than 16 the busiest), how many were taken, the
    busiest over the mean.
    """
    lines = []
    for i in layers_of(load):
        row = load[i]
        few = "  ".join(
            f"e{e} {n}"
            for e, n in (
                enumerate(row) if len(row) <= 16 else sorted(enumerate(row), key=lambda x: -x[1])[:8]
            )
        )
        lines.append(
            f"layer {i:<3} {few}{'  ...' if len(row) > 16 else ''}   {sum(n > 0 for n in row)} of "
            f"{len(row)} taken, busiest {imbalance(row):.1f} x the mean"
        )
    return lines


def _queue(state: State, width: int) -> list[str]:
    if not state.waiting:
        return ["empty"]
    head = state.requests[state.waiting[0]]
    why = f" (reason: {head.wait_reason})" if head.wait_reason else ""
    return textwrap.wrap(
        printable(head.request_id) + why + "".join("  " + printable(rid) for rid in state.waiting[1:]),
        width - 2,
    )


def _blocks(state: State, width: int) -> list[str]:
    per_line = max(16, (width - 10) // 16 * 16)
    signs = []
    for b in range(state.num_blocks):
        kind = state.block_kind(b)
        signs.append(owner_sign(state.owner(b)) if kind == "used" else BLOCK_SIGNS[kind])
    return [f"{b:>6} " + "".join(signs[b : b + per_line]) for b in range(0, state.num_blocks, per_line)]


def _text(state: State, width: int, max_rows: int) -> list[str]:
    lines = []
    for r in _chosen(state, max_rows):
        words = printable("".join(r.output_texts))
        name = _cut(printable(r.request_id), 16)
        room = width - 4 - len(name)
        if words:
            lines.append(f"{name}: " + (words if len(words) <= room else "…" + words[-(room - 1) :]))
    return lines or ["nothing yet"]
