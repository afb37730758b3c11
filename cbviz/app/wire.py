"""Encodes a trace at a cursor for the page, and remembers what the page has.

Knows messages, no widget and no engine.

A message is a small JSON head and named binary buffers. It holds what was added to the history (requests,
segments of the timeline, words, one row of figures a step) and the state at the cursor: in full after a jump,
else only what the steps in between changed. Reads only records, keyframes and states of its own, so the
engine may append to the trace from another thread meanwhile. `static/store.js` is the reader.
"""

from __future__ import annotations

from array import array
from typing import Any

from cbviz import events as ev
from cbviz.messages import StepRecord
from cbviz.trace import Cursor, Trace, explain, metrics, reservation
from cbviz.trace.accounting import SLOT_PARTS, TOKEN_PARTS, executed_at
from cbviz.trace.experts import layers_of
from cbviz.trace.explain import copies_told, explain_event
from cbviz.trace.metrics import work
from cbviz.trace.reservation import PARTS, SCHEMES
from cbviz.trace.state import CODE, NULL_BLOCK, RequestState, State
from cbviz.trace.utilisation import device_sentences, phases, profiled_steps

SERIES = (
    "t0",
    "t1",
    "busy",
    "sampled",
    "useful",
    "recomputed",
    "padded",
    "rejected",
    "running",
    "waiting",
    "flops",
    "bytes",
    "dflops",
    "dbytes",
    "pflops",
    "pbytes",
    "kernels",
)
"""Columns of the figures of a step, float64, NaN if unknown.

`busy`: seconds of the pass itself; `flops`, `bytes`: its work; with d and p: its decode's and its prefill's,
where they are known apart; `kernels`: share of the pass in which an accelerator's kernels ran.
"""
STATUS = ("waiting", "running", "preempted", "finished", "refused")
KIND = {"prefill": 0, "decode": 1, "recompute": 2, "padded": 3}
ROW_WORDS = 13
"""Words of a request's row before its blocks: index, state, computed, cached, outputs, preemptions, wait
reason, need, have, end, status, blocks on the host, number of blocks.
"""
SAME_BLOCKS = 0xFFFFFFFF
"""In place of the number of blocks: the table is as it was."""
CACHED, NULL = 1, 2
MOST_FOLDS = 200
"""A jump of more steps is sent in full: folding them one by one would cost more."""

_TABLE_EVENTS = (ev.Allocated, ev.Shared, ev.Preempted, ev.Freed, ev.OutOfWindow, ev.Copied)


def words(values: list[int]) -> bytes:
    return array("I", values).tobytes()


class Wire:
    """One page's picture.

    `message` says what it lacks; `forget` makes the next one start from nothing (a reload).
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._trace: Trace | None = None
        self._steps = 0
        self._sent: list[int] = []
        """Segments sent, a request."""
        self._index: dict[str, int] = {}
        self._asked: dict[str, dict[str, Any]] = {}
        """What was sent of each request, by id."""
        self._chosen: dict[str, list[int]] = {}
        """Steps at which a beam search that goes on has chosen."""
        self._words: dict[str, int] = {"": 0}
        self._queue: tuple[list[str], list[str]] | None = None
        self.view: State | None = None
        self._num_blocks = 0
        self._expert_sum: tuple[int, list[list[int]]] = (0, [])

    @property
    def cursor(self) -> Cursor | None:
        """Where the page stands; None before its first message."""
        return None if self.view is None else Cursor(self.view.step, self.view.event)

    def message(self, trace: Trace, cursor: Cursor) -> tuple[dict[str, Any], list[bytes]] | None:
        """What the page needs to show `trace` at `cursor`; None if it shows just that."""
        steps = len(trace)
        size = trace.num_blocks_at(cursor)
        reset = trace is not self._trace or steps < self._steps or size != self._num_blocks
        if not reset and steps == self._steps and self.cursor == cursor:
            return None
        head: dict[str, Any] = {"type": "picture", "steps": steps, "step": cursor.step, "event": cursor.event}
        parts: dict[str, bytes] = {}
        if reset:
            self.forget()
            self._trace, self._num_blocks = trace, size
            h = trace.header
            head.update(
                reset=True,
                num_blocks=size,
                block_size=h.block_size,
                series=list(SERIES),
                meta={
                    "clock": h.clock,
                    "device": h.device,
                    "peak_bytes_s": h.peak_bytes_s,
                    "peak_flops_s": h.peak_flops_s,
                    "peaks_measured": h.peaks_measured,
                    "model": h.model,
                    "runner": h.runner,
                    "workload": h.workload,
                    "missing": h.missing,
                    "window": h.config.get("sliding_window", 0),
                    "sinks": h.config.get("attention_sinks", 0),
                    "kv_bytes": h.kv_bytes_per_token,
                },
            )
        known = len(self._words)
        self._history(trace, steps, head, parts, reset)
        self._state(trace, cursor, head, parts)
        if len(self._words) > known or reset:
            head["words"] = list(self._words)[1 if reset else known :]
        head["b"] = list(parts)
        return head, list(parts.values())

    # history ------------------------------------------------------------------------------------------------

    def _history(
        self, trace: Trace, steps: int, head: dict[str, Any], parts: dict[str, bytes], reset: bool
    ) -> None:
        requests: list[dict[str, Any]] = []
        out: dict[int, tuple[list[str], list[int]]] = {}
        beams: list[list[Any]] = []
        ended: dict[int, int] = {}
        figures = array("d")
        for record in trace.records[self._steps : steps]:
            sampled = 0
            prompts = {s.request_id: s for s in record.arrivals}
            for e in record.events:
                if isinstance(e, ev.Sampled):
                    sampled += len(e.token_ids)
                    i = self._index[e.request_id]
                    pieces, at = out.setdefault(i, ([], []))
                    texts = record.texts.get(e.request_id) if record.texts else None
                    pieces.extend(
                        texts
                        if texts is not None and len(texts) == len(e.token_ids)
                        else [f" {t}" for t in e.token_ids]
                    )
                    at.extend([record.step] * len(e.token_ids))
                elif isinstance(e, ev.BeamStep):
                    sampled += len(e.token_ids)
                    self._chosen.setdefault(e.request_id, []).append(record.step)
                    ids = [self._index[i] for i in e.beam_ids]
                    pieces = [
                        "".join((record.texts or {}).get(i, [f" {t}"]))
                        for i, t in zip(e.beam_ids, e.token_ids, strict=True)
                    ]
                    beams.append(
                        [record.step, ids, e.parents, pieces, e.scores]
                    )  # from which the page follows the lineage of each
                elif isinstance(e, ev.BeamsEnded):
                    chosen = [*self._chosen.pop(e.request_id, []), record.step]
                    sampled += sum(len(ids) == len(chosen) for ids in e.outputs)
                    for rid, ids in zip(e.beam_ids, e.outputs, strict=True):
                        ended[self._index[rid]] = record.step
                        out[self._index[rid]] = (
                            (
                                list(record.texts[rid])
                                if record.texts and rid in record.texts
                                else [f" {t}" for t in ids]
                            ),
                            chosen[: len(ids)],
                        )
                elif isinstance(e, ev.Forked):
                    first = next(q for q in (*requests, *self._asked.values()) if q["id"] == e.request_id)
                    for child in e.child_ids:
                        self._index[child] = len(self._index)
                        requests.append({**first, "id": child, "of": e.request_id})
                elif isinstance(e, (ev.Arrived, ev.Refused)):
                    spec = prompts.get(e.request_id)
                    self._index[e.request_id] = len(self._index)
                    requests.append(
                        {
                            "id": e.request_id,
                            "np": e.num_prompt_tokens
                            if isinstance(e, ev.Arrived)
                            else len(spec.prompt_token_ids)
                            if spec
                            else 0,
                            "mt": e.max_tokens
                            if isinstance(e, ev.Arrived)
                            else spec.max_tokens
                            if spec
                            else 0,
                            "pr": e.priority if isinstance(e, ev.Arrived) else 0,
                            "at": record.step,
                            "prompt": spec.prompt[:2000] if spec is not None and spec.prompt else None,
                        }
                    )
            figures.extend(_figures(record, sampled))
        if requests:
            head["requests"] = requests
            self._asked.update({q["id"]: q for q in requests})
        if out:
            head["out"] = [[i, *v] for i, v in out.items()]
        if beams:
            head["beams"] = beams
        if ended:
            head["ended"] = [[i, step] for i, step in ended.items()]
        if figures:
            parts["series"] = figures.tobytes()
        self._steps = steps
        self._segments(trace, parts, reset)

    def _segments(self, trace: Trace, parts: dict[str, bytes], reset: bool) -> None:
        n = len(self._index)
        segments = trace.segments[:n]
        if reset:
            pointers: list[int] = [0]
            flat: list[int] = []
            for mine in segments:
                flat.extend(s.step * 32 + s.code for s in mine)
                pointers.append(len(flat))
            self._sent = [b - a for a, b in zip(pointers, pointers[1:])]
            parts["ptr"], parts["seg"] = words(pointers), words(flat)
            return
        self._sent.extend([0] * (n - len(self._sent)))
        new: list[int] = []
        for i, mine in enumerate(segments):
            have = self._sent[i]
            if len(mine) != have:
                for s in mine[max(0, have - 1) :]:  # the last one sent may have been corrected
                    new += (i, s.step, s.code)
                self._sent[i] = len(mine)
        if new:
            parts["tr"] = words(new)

    # state --------------------------------------------------------------------------------------------------

    def _state(self, trace: Trace, cursor: Cursor, head: dict[str, Any], parts: dict[str, bytes]) -> None:
        view, blocks, marks, tables = self._move(trace, cursor)
        full = blocks is None
        if full:
            head["full"] = True
            changed = list(range(len(view.by_index)))
            parts["words"] = words([w for b in range(view.num_blocks) for w in block_words(view, b)])
        else:
            assert blocks is not None
            changed = sorted(view.changed)
            if blocks:
                parts["blocks"] = words([w for b in sorted(blocks) for w in (b, *block_words(view, b))])
        view.changed.clear()
        rows: list[int] = []
        for i in changed:
            rows += self._row(view.by_index[i], full or view.by_index[i].request_id in tables)
        if rows:
            parts["rows"] = words(rows)
        parts["marks"] = words(sorted(marks - {NULL_BLOCK}))
        if self._queue != (view.waiting, view.running):
            self._queue = (view.waiting.copy(), view.running.copy())
            parts["queue"] = words(
                [
                    len(view.waiting),
                    *(self._index[r] for r in view.waiting),
                    *(self._index[r] for r in view.running),
                ]
            )
        record = trace.records[cursor.step - 1] if cursor.step else None
        if record is not None:
            head["pad"] = record.num_padding_tokens
            if made := copies(record):
                head["copies"] = made
            if record.expert_load:
                head["experts"] = self._experts(trace, cursor.step, record.expert_load)
        parts["chunks"] = words(self._chunks(record) if record is not None else [])
        head["config"] = config_head(view.config)

    def _move(self, trace: Trace, cursor: Cursor) -> tuple[State, set[int] | None, set[int], set[str]]:
        """Brings the view to `cursor`.

        Returns it, the blocks that changed (None: all), those the last step changed, and the requests whose
        table did.
        """
        view = self.view
        tables: set[str] = set()
        if (
            view is not None
            and view.event is None
            and cursor.event is None
            and 0 <= cursor.step - view.step <= MOST_FOLDS
        ):
            blocks: set[int] = set()
            marks: set[int] = set() if cursor.step > view.step else view.touched.copy()
            for record in trace.records[view.step : cursor.step]:
                view.touched.clear()
                view.apply(record)
                blocks |= view.touched
                marks = view.touched.copy()
                tables.update(e.request_id for e in record.events if isinstance(e, _TABLE_EVENTS))
                tables.update(i for e in record.events if isinstance(e, ev.Forked) for i in e.child_ids)
                tables.update(i for e in record.events if isinstance(e, ev.BeamStep) for i in e.beam_ids)
            return view, blocks, marks, tables
        if cursor.step == 0:
            view = State(trace.header.num_blocks, trace.header.block_size, trace.header.config)
        else:
            view = trace.state(
                Cursor(cursor.step - 1)
            ).clone()  # never the live one: the engine may be changing it
            view.changed.clear()
            view.touched.clear()
            view.apply(trace.record(cursor.step), upto=cursor.event)
        self.view = view
        self._queue = None
        return view, None, view.touched.copy(), tables

    def _row(self, r: RequestState, with_blocks: bool) -> list[int]:
        row = [
            r.index,
            CODE[r.state],
            max(0, r.num_computed_tokens),
            r.num_cached_tokens,
            len(r.output_token_ids),
            r.num_preemptions,
            self._word(r.wait_reason),
            max(0, r.wait_need),
            max(0, r.wait_have),
            self._word(r.finish_reason),
            STATUS.index(r.status),
            len(r.host_block_ids),
        ]
        return [*row, len(r.block_ids), *r.block_ids] if with_blocks else [*row, SAME_BLOCKS]

    def _chunks(self, record: StepRecord) -> list[int]:
        """The step's batch, four words a chunk: request, first position, tokens, kind (the lowest 8 bits) and
        how many of the tokens are drafts.
        """
        out: list[int] = []
        for c in record.chunks:
            kind = KIND[
                "padded" if c.padding else "recompute" if c.num_recomputed and c.kind == "prefill" else c.kind
            ]
            out += (self._index[c.request_id], c.start, c.num_tokens, kind | c.num_draft << 8)
        return out

    def _experts(self, trace: Trace, step: int, load: list[list[int]]) -> dict[str, Any]:
        """A mixture's step: the sparse layers, tokens of each expert in the step, and in all steps up to it."""
        layers = layers_of(load)
        done, total = self._expert_sum
        if done > step or not total:
            done, total = 0, [[0] * len(load[i]) for i in layers]
        for record in trace.records[done:step]:
            if record.expert_load:
                total = [[a + b for a, b in zip(row, record.expert_load[i])] for row, i in zip(total, layers)]
        self._expert_sum = (step, total)
        return {"layers": layers, "load": [load[i] for i in layers], "sum": total}

    def _word(self, text: str) -> int:
        return self._words.setdefault(text, len(self._words))


def block_words(s: State, b: int) -> tuple[int, int]:
    if b >= s.num_blocks:  # the pool was larger at another moment of the run
        return 0, NULL
    flags = NULL if b == NULL_BLOCK else CACHED if s.is_cached(b) else 0
    return s.owner(b) + 1, min(s.ref_count(b), 0xFFFF) << 16 | min(s.fill(b), 0xFFF) << 4 | flags


def copies(record: StepRecord) -> list[list[int]]:
    """Blocks that the step copied on write, as [source, destination]."""
    return [[e.src, e.dst] for e in record.events if isinstance(e, ev.Copied)]


def config_head(now: dict[str, Any]) -> dict[str, Any]:
    """The settings in force, as the page shows them."""
    return {
        "discipline": str(now.get("discipline", "")),
        "policy": str(now.get("policy", "")),
        "budget": _whole(now.get("max_num_batched_tokens")),
        "max_num_seqs": _whole(now.get("max_num_seqs")),
        "swap_blocks": _whole(now.get("swap_blocks")) if now.get("preemption_mode") == "swap" else 0,
    }


def why_message(trace: Trace, step: int) -> dict[str, Any]:
    """The sentences of step `step`."""
    return {"type": "why", "step": step, "items": list(map(told, explain(trace, step)))}


def event_sentence(trace: Trace, step: int, index: int) -> dict[str, Any]:
    """What event number `index` of step `step` was."""
    return told(explain_event(trace, trace.record(step), index))


def told(s: Any) -> dict[str, Any]:
    """A sentence, as the page gets it."""
    return {"kind": s.kind, "text": str(s), "ids": list(s.request_ids)}


def inside_message(trace: Trace, step: int, watched: list[int] | None = None) -> dict[str, Any]:
    """What was measured inside step `step` and on its device, and which steps were watched."""
    record = trace.record(step) if step else None
    p = record.profile if record is not None else None
    moved = (
        None
        if record is None or not record.spans or not trace.has("time")
        else {
            "clock": record.clock,
            "spans": [[s.what, s.start_s, s.end_s, s.num_blocks, s.bytes] for s in record.spans],
            "said": copies_told(record),
        }
    )
    return {
        "type": "inside",
        "step": step,
        "moved": moved,
        "watched": profiled_steps(trace) if watched is None else watched,
        "device": device_sentences(record) if record is not None else [],
        "profile": None
        if p is None
        else {
            "source": p.source,
            "names": p.names,
            "name": p.name,
            "start": p.start_s,
            "duration": p.duration_s,
            "lane": p.lane,
            "lanes": p.lanes,
            "total": p.total_s,
        },
    }


def step_account(record: StepRecord) -> dict[str, Any]:
    """Where the step's tokens and the pool's slots were."""
    return {
        "type": "account",
        "step": record.step,
        "tokens": [["total", record.tokens.total], *([p, getattr(record.tokens, p)] for p in TOKEN_PARTS)],
        "slots": [["total", record.slots.total], *([p, getattr(record.slots, p)] for p in SLOT_PARTS)],
        "at_event": executed_at(record),
    }


def reserved(trace: Trace) -> dict[str, Any]:
    """The whole run beside contiguous reservation, or why that can't be said."""
    try:
        r = reservation(trace)
    except ValueError as e:
        return {"missing": str(e)}
    return {
        "steps": len(trace),
        "parts": list(PARTS),
        "assumptions": list(r.assumptions),
        "sentences": r.sentences,
        "rows": [
            [name, SCHEMES[name], [r.shares[name][p] for p in PARTS], r.placed[name]] for name in r.steps
        ],
    }


def metrics_message(trace: Trace, cursor: Cursor) -> dict[str, Any]:
    """The figures of the run up to `cursor`, those that there are."""
    values = {k: v for k, v in metrics(trace, cursor).items() if isinstance(v, (int, float))}
    return {"type": "metrics", "steps": cursor.step, "clock": trace.header.clock, "values": values}


def _figures(record: StepRecord, sampled: int) -> tuple[float, ...]:
    done = work(record)
    flops, moved = (done[0], done[1]) if done is not None else (float("nan"), float("nan"))
    apart = {p.kind: p for p in phases(record)}
    parts = [
        v
        for kind in ("decode", "prefill")
        for v in ((apart[kind].flops, apart[kind].moved) if kind in apart else (float("nan"), float("nan")))
    ]
    d = record.device or {}
    kernels = d["busy_s"] / (d["busy_s"] + d.get("gap_s", 0.0)) if d.get("busy_s") else float("nan")
    t, g = record.tokens, record.gauges
    busy = record.measured_s if record.measured_s is not None else record.t1_s - record.t0_s
    return (
        record.t0_s,
        record.t1_s,
        busy,
        sampled,
        t.useful,
        t.recomputed,
        t.padded,
        t.rejected,
        g.num_running,
        g.num_waiting,
        flops,
        moved,
        *parts,
        kernels,
    )


def _whole(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0
