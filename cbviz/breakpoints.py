"""Where a run stops, and what is watched: conditions over one step's record and the state after it.

Knows traces, not who steps.

Owns `on` (a breakpoint: an event, a request, a block, KV usage, an expression, or any predicate), the search
for the next or last step at which one holds, and `watch`: a small language of comparisons and arithmetic over
the gauges and the requests. Its expressions are checked word by word before they are evaluated and never run
as Python, so that a page may take them from anybody.

    kv_usage > 0.9            num_waiting >= 3 and num_running < 8        r3.num_computed_tokens / r3.num_tokens        min(num_free_blocks, 4)
"""

from __future__ import annotations

import ast
import difflib
import inspect
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cbviz import bounded
from cbviz import events as ev
from cbviz.bounded import BudgetError
from cbviz.config import ConfigError
from cbviz.messages import StepRecord
from cbviz.trace.explain import Sentence, count, explain_event
from cbviz.trace.metrics import useful_rows
from cbviz.trace.schema import KEYFRAME_EVERY
from cbviz.trace.state import RequestState, State
from cbviz.trace.trace import Cursor, Trace

Predicate = Callable[[StepRecord, State], Any]

EVENTS: dict[str, type[ev.Event]] = {
    "preempted": ev.Preempted,
    "swapped out": ev.SwappedOut,
    "swapped in": ev.SwappedIn,
    "forked": ev.Forked,
    "copied": ev.Copied,
    "proposed": ev.Proposed,
    "beams chosen": ev.BeamStep,
    "beams ended": ev.BeamsEnded,
    "evicted": ev.Evicted,
    "prefix miss": ev.PrefixMiss,
    "finished": ev.Finished,
    "starved": ev.Starving,
    "admitted": ev.Admitted,
    "refused": ev.Refused,
    "waits": ev.NotAdmitted,
    "prefix hit": ev.PrefixHit,
    "arrived": ev.Arrived,
    "skipped": ev.Skipped,
    "configured": ev.Configured,
    "reordered": ev.Reordered,
    "allocated": ev.Allocated,
    "shared": ev.Shared,
    "cached": ev.BlockCached,
    "freed": ev.Freed,
}
"""What a breakpoint may be set on, by name.

`freed` is also a preemption or a window that gave blocks back.
"""
BLOCK_EVENTS = ("allocated", "evicted", "shared", "cached", "freed")
"""Those that speak of blocks; a breakpoint on a block without an event is on all of these."""
_GIVES_BACK = (ev.Freed, ev.Preempted, ev.OutOfWindow)


class BreakpointError(RuntimeError):
    """A condition failed. Names it, the step and the error; the run itself is whole and can go on."""


class WatchError(ValueError):
    """An expression can't be watched.

    Says which word is not known and what is known, or which limit it exceeds (see `cbviz.bounded`).
    """


# breakpoints ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stop:
    """Why a run stopped at `step`: names and sentences of the breakpoints that held.

    `cursor` is the moment inside the step at which the first of them did.
    """

    step: int
    names: tuple[str, ...]
    sentences: tuple[Sentence, ...]
    cursor: Cursor

    @property
    def text(self) -> str:
        return f"Step {self.step}: " + "; ".join(
            f"{name}: {s}" if name not in s else str(s) for name, s in zip(self.names, self.sentences)
        )

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: step, names, sentences, event (how many events of the step had happened, None for its
        end), text.
        """
        return {
            "step": self.step,
            "names": list(self.names),
            "sentences": [s.to_dict() for s in self.sentences],
            "event": self.cursor.event,
            "text": self.text,
        }


@dataclass(eq=False)
class Breakpoint:
    """A condition with a name. Call it with (record, state after it) to ask whether it holds. Made by `on`.

    `level`: the condition describes a state, not an event. A run stops when the state begins, not at every
    step in which it lasts.
    """

    name: str
    find: Callable[[StepRecord, State], int]
    """How many events of the step had happened when it held first; 0: at the end of the step; -1: it does not
    hold.
    """
    level: bool = False
    enabled: bool = True
    error: str = ""
    """What the predicate raised; such a breakpoint is switched off."""
    hits: int = field(default=0)
    """How often it stopped a run."""
    when: Watch | None = None
    """The expression that is part of it."""

    def __call__(self, record: StepRecord, state: State) -> bool:
        return self.find(record, state) >= 0

    def why(self, trace: Trace, record: StepRecord, state: State) -> tuple[Sentence, Cursor]:
        """A sentence of why it holds at this record, and the moment. Call only where it holds."""
        at = self.find(record, state)
        if at > 0:
            return explain_event(trace, record, at - 1, state), Cursor(record.step, at)
        usage = usage_of(state)
        blocks = f", {100 * usage:.0f} % of the blocks in use" if usage is not None else ""
        told = (
            f"{self.name} holds: {count(len(state.running), 'request')} running, {len(state.waiting)} "
            f"waiting{blocks}"
        )
        return Sentence("step", told), Cursor(record.step)


def on(
    event: str | Predicate | None = None,
    *,
    request: str | None = None,
    block: int | None = None,
    kv_above: float | None = None,
    when: str | None = None,
    name: str | None = None,
) -> Breakpoint:
    """A condition for `Session.run(until=...)`, `Session.break_on` and the search in a trace.

    `event`: one of EVENTS by name, or a predicate `f(record, state)`. `request`: only where the event speaks
    of it; alone: whatever is decided about it. `block`: only where the event speaks of that block; alone:
    allocated, shared, cached, evicted, freed. `kv_above`: share of blocks in use, 0..1. `when`: an expression
    as in `watch`. Several of these must hold in the same step. Raises ConfigError or WatchError naming what
    is wrong.
    """
    if event is None and request is None and block is None and kv_above is None and when is None:
        raise ConfigError(
            f"on() needs an event ({', '.join(EVENTS)}), a predicate, request=, block=, kv_above= or when="
        )
    parts: list[Callable[[StepRecord, State], int]] = []
    words: list[str] = []
    if callable(event):
        if request is not None or block is not None:
            raise ConfigError("a predicate sees the whole record: put the request or block into it")
        parts.append(_from_predicate(event))
        words.append(_name_of(event))
    elif event is not None or request is not None or block is not None:
        parts.append(_from_event(event, request, block))
        words.append(
            " ".join(
                [
                    *([event] if event is not None else []),
                    *([str(request)] if request is not None else []),
                    *([f"block {block}"] if block is not None else []),
                ]
            )
        )
    if kv_above is not None:
        if isinstance(kv_above, bool) or not isinstance(kv_above, (int, float)) or not 0 <= kv_above < 1:
            raise ConfigError(
                f"kv_above is {kv_above!r}, it must be a share of the blocks, at least 0 and below 1"
            )
        parts.append(lambda record, state: 0 if (usage_of(state) or 0.0) > kv_above else -1)
        words.append(f"KV above {100 * kv_above:g} %")
    expression = Watch(when) if when is not None else None
    if expression is not None:
        parts.append(_from_watch(expression))
        words.append(expression.expression)
    level = event is None and request is None and block is None
    return Breakpoint(name or " and ".join(words), _all(parts), level, when=expression)


def as_breakpoint(condition: Breakpoint | Predicate) -> Breakpoint:
    """The condition itself, or one made of a plain predicate."""
    return condition if isinstance(condition, Breakpoint) else on(condition)


def usage_of(state: State) -> float | None:
    """Share of the pool's blocks that somebody holds (cached ones count as free, as in vLLM's gauge); None
    without a pool.
    """
    return 1 - state.num_free_blocks / (state.num_blocks - 1) if state.num_blocks > 1 else None


def _all(parts: Sequence[Callable[[StepRecord, State], int]]) -> Callable[[StepRecord, State], int]:
    if len(parts) == 1:
        return parts[0]

    def find(record: StepRecord, state: State) -> int:
        found = 0
        for part in parts:
            at = part(record, state)
            if at < 0:
                return -1
            found = max(found, at)
        return found

    return find


def _name_of(f: Predicate) -> str:
    """A function's name; of a lambda its text, where the source can be read (in a notebook it can)."""
    name = str(getattr(f, "__name__", type(f).__name__))
    if name != "<lambda>":
        return name
    try:
        source = " ".join(inspect.getsource(f).split())
    except (OSError, TypeError):
        return "predicate"
    text = source[source.find("lambda") :]
    depth, body = 0, False
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        body = body or (c == ":" and not depth)
        if depth < 0 or (c == "," and body and not depth):
            return text[:i].strip()
    return text


def _from_predicate(f: Predicate) -> Callable[[StepRecord, State], int]:
    return lambda record, state: 0 if f(record, state) else -1


def _from_event(
    event: str | None, request: str | None, block: int | None
) -> Callable[[StepRecord, State], int]:
    if event is not None and event not in EVENTS:
        near = difflib.get_close_matches(event, EVENTS, n=1)
        raise ConfigError(
            f"event is {event!r}, it must be one of {', '.join(EVENTS)}"
            + (f" (did you mean {near[0]!r}?)" if near else "")
        )
    if block is not None:
        if isinstance(block, bool) or not isinstance(block, int) or block < 1:
            raise ConfigError(f"block is {block!r}, it must be the number of a block, 1 or more")
        if event is not None and event not in (*BLOCK_EVENTS, "preempted"):
            raise ConfigError(f"{event!r} says nothing of blocks; these do: {', '.join(BLOCK_EVENTS)}")
    kinds: tuple[type, ...]
    if event == "freed":
        kinds = _GIVES_BACK
    elif event is not None:
        kinds = (EVENTS[event],)
    elif block is not None:
        kinds = (*(EVENTS[x] for x in BLOCK_EVENTS), *_GIVES_BACK)
    else:
        kinds = tuple(k for x, k in EVENTS.items() if x not in BLOCK_EVENTS or x == "evicted")

    def find(record: StepRecord, state: State) -> int:
        for i, e in enumerate(record.events):
            if not isinstance(e, kinds) or not _counts(e) or (event == "freed" and not _blocks(e)):
                continue
            if (request is None or request in _speaks_of(e, event is None)) and (
                block is None or block in _blocks(e)
            ):
                return i + 1
        return -1

    return find


def _counts(e: Any) -> bool:
    """A prefix that stopped only because the prompt ended is no miss."""
    return not (isinstance(e, ev.PrefixMiss) and e.cause in ("partial", "last-token"))


def _speaks_of(e: Any, widely: bool) -> tuple[str, ...]:
    """Requests that an event is about. `widely`: those on whose behalf it happened, too."""
    if isinstance(e, ev.Evicted):
        return e.owner, e.by
    if isinstance(e, ev.Reordered):
        return tuple(e.request_ids)
    if isinstance(e, ev.Preempted) and widely:
        return e.request_id, e.for_id
    return (e.request_id,) if hasattr(e, "request_id") else ()


def _blocks(e: Any) -> Sequence[int]:
    return (e.block_id,) if hasattr(e, "block_id") else getattr(e, "block_ids", ())


def _from_watch(w: Watch) -> Callable[[StepRecord, State], int]:
    return lambda record, state: 0 if w.of(record, state) else -1


def held(
    breakpoints: Iterable[Breakpoint],
    record: StepRecord,
    state: State,
    before: dict[Breakpoint, bool] | None = None,
) -> list[Breakpoint]:
    """The enabled breakpoints at which a run stops after this record.

    `before` remembers which levels held at the step before, and is brought up to date.

    Raises BreakpointError for one that fails; it is switched off first, so that the run can go on.
    """
    stops = []
    for b in breakpoints:
        if not b.enabled:
            continue
        try:
            now = b(record, state)
        except Exception as e:
            b.enabled, b.error = False, f"{type(e).__name__}: {e}"
            n = record.step
            raise BreakpointError(
                f"breakpoint {b.name!r} failed at step {n}: {b.error}. It is switched off; the run stands "
                f"after step {n} and can go on"
            ) from e
        if now and not (b.level and before is not None and before.get(b, False)):
            stops.append(b)
        if b.level and before is not None:
            before[b] = now
    return stops


def stop_of(breakpoints: Sequence[Breakpoint], trace: Trace, record: StepRecord, state: State) -> Stop:
    """What to tell of breakpoints that hold at this record."""
    told = [b.why(trace, record, state) for b in breakpoints]
    inside = [c for _, c in told if c.event is not None]
    return Stop(
        record.step,
        tuple(b.name for b in breakpoints),
        tuple(s for s, _ in told),
        min(inside) if inside else Cursor(record.step),
    )


def _walk(
    trace: Trace, breakpoints: Sequence[Breakpoint], first: int, last: int
) -> Iterator[tuple[StepRecord, State, list[Breakpoint]]]:
    """(record, state, breakpoints that stop there) for the steps `first` .. `last`."""
    state = trace.state(first - 1).clone()
    before: dict[Breakpoint, bool] = {}
    if first > 1:
        held([b for b in breakpoints if b.level], trace.record(first - 1), state, before)
    for record in trace.records[first - 1 : last]:
        state.apply(record)
        stops = held(breakpoints, record, state, before)
        if stops:
            yield record, state, stops


def next_stop(trace: Trace, breakpoints: Sequence[Breakpoint], after: int) -> Stop | None:
    """The first recorded step after step `after` at which an enabled breakpoint stops; None if there is none.

    Raises BreakpointError.
    """
    for record, state, stops in _walk(trace, breakpoints, after + 1, len(trace)):
        return stop_of(stops, trace, record, state)
    return None


def last_stop(trace: Trace, breakpoints: Sequence[Breakpoint], before: int) -> Stop | None:
    """The last recorded step before step `before` at which an enabled breakpoint stops; None if there is
    none. Raises BreakpointError.
    """
    end = min(before - 1, len(trace))
    while end >= 1:
        first = (end - 1) // KEYFRAME_EVERY * KEYFRAME_EVERY + 1
        found = None
        for record, state, stops in _walk(trace, breakpoints, first, end):
            found = stop_of(stops, trace, record, state)
        if found is not None:
            return found
        end = first - 1
    return None


# watch expressions ------------------------------------------------------------------------------------------

GAUGES: dict[str, tuple[str, Callable[[StepRecord, State], Any]]] = {
    "step": ("number of the step", lambda r, s: r.step),
    "time_s": ("the run's clock at the end of the step", lambda r, s: r.t1_s),
    "step_s": ("how long the step took", lambda r, s: r.t1_s - r.t0_s),
    "num_running": (
        "sequences with a seat (a request is one, unless n > 1 or it has beams)",
        lambda r, s: r.gauges.num_running,
    ),
    "num_waiting": ("sequences without one", lambda r, s: r.gauges.num_waiting),
    "num_finished": ("sequences that have ended", lambda r, s: r.gauges.num_finished),
    "num_requests": ("requests that have arrived", lambda r, s: s.num_requests),
    "num_blocks": ("blocks that can be given out", lambda r, s: s.num_blocks - 1),
    "num_free_blocks": ("blocks nobody holds, cached ones included", lambda r, s: s.num_free_blocks),
    "num_cached_blocks": (
        "of these, the ones that can still be found",
        lambda r, s: r.gauges.num_cached_blocks,
    ),
    "num_used_blocks": ("blocks that somebody holds", lambda r, s: s.num_blocks - 1 - s.num_free_blocks),
    "kv_usage": ("share of the blocks that somebody holds, 0..1", lambda r, s: usage_of(s)),
    "num_tokens": ("tokens computed in the step", lambda r, s: r.tokens.total),
    "useful_tokens": ("of these, useful", lambda r, s: r.tokens.useful),
    "recomputed_tokens": ("of these, computed before a preemption already", lambda r, s: r.tokens.recomputed),
    "padded_tokens": ("of these, padding", lambda r, s: r.tokens.padded),
    "rejected_tokens": ("of these, drafts thrown away", lambda r, s: r.tokens.rejected),
    "num_chunks": ("rows of the step's batch", lambda r, s: len(r.chunks)),
    "num_useful_rows": ("rows that did useful work", lambda r, s: useful_rows(r)),
    "num_prefills": (
        "rows that prefill or recompute",
        lambda r, s: sum(c.kind == "prefill" for c in r.chunks),
    ),
    "num_decodes": (
        "rows that decode",
        lambda r, s: sum(c.kind == "decode" and not c.padding for c in r.chunks),
    ),
    "num_preempted": (
        "requests preempted in the step",
        lambda r, s: sum(isinstance(e, ev.Preempted) for e in r.events),
    ),
    "num_evicted": (
        "cached blocks evicted in the step",
        lambda r, s: sum(isinstance(e, ev.Evicted) for e in r.events),
    ),
    "num_sampled": (
        "tokens sampled in the step",
        lambda r, s: sum(len(e.token_ids) for e in r.events if isinstance(e, ev.Sampled)),
    ),
}
"""What an expression may name, and what it means."""

ATTRIBUTES: dict[str, tuple[str, Callable[[RequestState, State], Any]]] = {
    "status": ("waiting, running, preempted, finished or refused", lambda r, s: r.status),
    "state": ("what it did in the step: prefill, decode, waiting, ...", lambda r, s: r.state),
    "num_tokens": ("prompt and outputs so far", lambda r, s: r.num_tokens),
    "num_prompt_tokens": ("tokens of its prompt", lambda r, s: r.num_prompt_tokens),
    "num_output_tokens": ("tokens sampled so far", lambda r, s: len(r.output_token_ids)),
    "num_computed_tokens": ("tokens whose KV is there", lambda r, s: r.num_computed_tokens),
    "num_cached_tokens": ("found in the cache at its last admission", lambda r, s: r.num_cached_tokens),
    "num_preemptions": ("how often it was preempted", lambda r, s: r.num_preemptions),
    "max_tokens": ("outputs it asked for", lambda r, s: r.max_tokens),
    "priority": ("smaller goes first", lambda r, s: r.priority),
    "num_blocks": ("blocks in its table", lambda r, s: len(r.block_ids)),
    "position": (
        "its place in the queue, from 0; nothing if it does not wait",
        lambda r, s: s.waiting.index(r.request_id) if r.request_id in s.waiting else None,
    ),
    "wait_reason": ("what it was last refused a seat for", lambda r, s: r.wait_reason),
    "finish_reason": ("how it ended, '' if it has not", lambda r, s: r.finish_reason),
    "arrival_step": ("the step before which it arrived", lambda r, s: r.arrival_step),
}
"""What may be asked of a request, as `r3.num_tokens` or `request("my id").num_tokens`; nothing (no value)
before it has arrived.
"""

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs, "round": round}
MOST_CHARACTERS = 200


class Watch:
    """An expression and its value at any moment of any trace. Made by `watch`.

    A value is a number, a truth value or a text; None where it is undefined: a request that has not arrived,
    a division by zero, or anything computed from these.
    """

    def __init__(self, expression: str, name: str | None = None) -> None:
        self.expression = expression.strip()
        self.name = name or self.expression
        if not self.expression:
            raise WatchError("the expression is empty; try kv_usage > 0.9")
        for what, text in (("expression", self.expression), ("name", self.name)):
            if len(text) > MOST_CHARACTERS:
                raise WatchError(f"the {what} has {len(text)} characters, the most is {MOST_CHARACTERS}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # odd escapes and the like: what is wrong is said below
                tree = ast.parse(self.expression, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            raise WatchError(
                f"{self.expression!r} can't be read: {e.msg if isinstance(e, SyntaxError) else e}"
            ) from None
        try:
            bounded.check_shape(tree)
            self._value = _compile(tree, self.expression)
        except BudgetError as e:
            raise WatchError(f"{self.expression!r}: {e}") from None

    def of(self, record: StepRecord, state: State) -> Any:
        """Its value after a record.

        Raises WatchError if that costs more than an expression may (see `cbviz.bounded`).
        """
        try:
            return bounded.limited(self._value(record, state))
        except BudgetError as e:
            raise WatchError(f"{self.expression!r}: {e}") from None

    def value(self, trace: Trace, cursor: Cursor | int | None = None) -> Any:
        """Its value at the cursor (default: the end).

        Before the first step it has none; inside a step, the step's own figures are those of the step.
        """
        at = trace.last if cursor is None else Cursor(cursor) if isinstance(cursor, int) else cursor
        return self.of(trace.record(at.step), trace.state(at)) if at.step else None

    def series(self, trace: Trace) -> list[Any]:
        """Its values after every step, from step 1: one fold of the whole trace."""
        state = trace.state(0).clone()
        out = []
        for record in trace:
            state.apply(record)
            out.append(self.of(record, state))
        return out

    def __repr__(self) -> str:
        return f"Watch({self.expression!r})"


def watch(expression: str, name: str | None = None) -> Watch:
    """An expression to be watched: GAUGES, attributes of requests, numbers, texts in quotes, + - * / // %,
    comparisons, and, or, not, `a if b else c`, min, max, abs, round. Raises WatchError naming the word that
    is not among these, or the limit that it exceeds (see `cbviz.bounded`).
    """
    return Watch(expression, name)


_Value = Callable[[StepRecord, State], Any]


def _compile(node: ast.AST, text: str) -> _Value:
    """A function of (record, state) for an expression.

    Constants among its parts are computed once here, so that what exceeds a limit is said now.
    """
    value = _compile_part(node, text)
    if not _is_constant(node):
        return value
    constant = bounded.limited(value(*_NOWHERE))
    return lambda r, s: constant


_NOWHERE: Any = (None, None)
"""The record and the state that a constant is computed from."""


def _is_constant(node: ast.AST) -> bool:
    names = (x for x in ast.walk(node) if isinstance(x, (ast.Name, ast.Attribute)))
    return all(isinstance(x, ast.Name) and x.id in _FUNCTIONS for x in names)


def _compile_part(node: ast.AST, text: str) -> _Value:
    """Every kind of node that is not named here is refused."""
    if isinstance(node, ast.Constant):
        if node.value is not None and not isinstance(node.value, (bool, int, float, str)):
            raise WatchError(f"{text!r}: {node.value!r} is neither a number nor a text")
        if isinstance(node.value, str) and any("\ud800" <= c <= "\udfff" for c in node.value):
            raise WatchError(
                f"{text!r}: {node.value!r} holds half a character (a lone surrogate), which can't be "
                "written down"
            )
        constant = node.value
        return lambda r, s: constant
    if isinstance(node, ast.Name):
        if node.id in GAUGES:
            return GAUGES[node.id][1]
        near = difflib.get_close_matches(node.id, GAUGES, n=1)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else (
                f"of a request something must be asked, as in {node.id}.num_tokens; else known: "
                f"{', '.join(GAUGES)}"
            )
        )
        raise WatchError(f"{text!r}: {node.id} is not known; {hint}")
    if isinstance(node, ast.Attribute):
        return _attribute(node, text)
    if isinstance(node, ast.BoolOp):
        parts = [_compile(x, text) for x in node.values]
        return _all_of(parts) if isinstance(node.op, ast.And) else _any_of(parts)
    if isinstance(node, ast.UnaryOp):
        x = _compile(node.operand, text)
        if isinstance(node.op, ast.Not):
            return lambda r, s: None if (v := x(r, s)) is None else not v
        if isinstance(node.op, (ast.USub, ast.UAdd)):
            sign = -1 if isinstance(node.op, ast.USub) else 1
            return lambda r, s: _computed(operator.mul, sign, x(r, s))
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        f, left, right = _ARITHMETIC[type(node.op)], _compile(node.left, text), _compile(node.right, text)
        return lambda r, s: _computed(f, left(r, s), right(r, s))
    if isinstance(node, ast.Compare) and all(type(op) in _COMPARISONS for op in node.ops):
        return _comparison(
            [_COMPARISONS[type(op)] for op in node.ops],
            [_compile(x, text) for x in (node.left, *node.comparators)],
        )
    if isinstance(node, ast.IfExp):
        test, yes, no = _compile(node.test, text), _compile(node.body, text), _compile(node.orelse, text)
        return lambda r, s: yes(r, s) if test(r, s) else no(r, s)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
        and node.args
        and not node.keywords
    ):
        g, args = _FUNCTIONS[node.func.id], [_compile(x, text) for x in node.args]
        if node.func.id in ("abs", "round") and len(args) > (1 if node.func.id == "abs" else 2):
            raise WatchError(
                f"{text!r}: {node.func.id} takes "
                f"{'one value' if node.func.id == 'abs' else 'a value and a number of places'}"
            )
        if node.func.id in ("min", "max") and len(args) < 2:
            raise WatchError(f"{text!r}: {node.func.id} takes two values or more")
        if g is round and len(args) == 2 and _is_constant(node.args[1]):
            _called(
                round, [0, args[1](*_NOWHERE)]
            )  # too many places are refused here, before there is a number to round
        return lambda r, s: _called(g, [x(r, s) for x in args])
    raise WatchError(
        f"{text!r}: {ast.unparse(node)!r} can't be watched; there are names, numbers, + - * / // %, "
        f"comparisons, and, or, not, if else, {', '.join(_FUNCTIONS)}"
    )


def _attribute(node: ast.Attribute, text: str) -> _Value:
    """`r3.num_tokens`, `request("r3").num_tokens`."""
    owner = node.value
    if isinstance(owner, ast.Name) and owner.id not in GAUGES:
        rid = owner.id
    elif (
        isinstance(owner, ast.Call)
        and isinstance(owner.func, ast.Name)
        and owner.func.id == "request"
        and len(owner.args) == 1
        and not owner.keywords
        and isinstance(owner.args[0], ast.Constant)
        and isinstance(owner.args[0].value, str)
    ):
        rid = owner.args[0].value
    else:
        raise WatchError(
            f"{text!r}: {ast.unparse(owner)!r} is no request; write r3.num_tokens or request('my "
            "id').num_tokens"
        )
    if node.attr not in ATTRIBUTES:
        near = difflib.get_close_matches(node.attr, ATTRIBUTES, n=1)
        raise WatchError(
            f"{text!r}: a request has no {node.attr}"
            + (f"; did you mean {near[0]}?" if near else f"; known: {', '.join(ATTRIBUTES)}")
        )
    ask = ATTRIBUTES[node.attr][1]

    def value(record: StepRecord, state: State) -> Any:
        r = state.requests.get(rid)
        return None if r is None else ask(r, state)

    return value


def _number(v: Any) -> bool:
    return isinstance(v, (int, float))


def _computed(f: Callable[[Any, Any], Any], x: Any, y: Any) -> Any:
    return bounded.computed(f, x, y) if _number(x) and _number(y) else None


def _called(f: Callable[..., Any], values: list[Any]) -> Any:
    if not all(map(_number, values)):
        return None
    if f is round and len(values) == 2:
        return bounded.rounded(*values)
    return bounded.computed(f, *values)


def _comparison(ops: list[Callable[[Any, Any], Any]], parts: list[_Value]) -> _Value:
    def value(record: StepRecord, state: State) -> Any:
        values = [p(record, state) for p in parts]
        out = True
        for f, x, y in zip(ops, values, values[1:]):
            if f in (operator.eq, operator.ne):
                out = out and f(x, y)
            elif x is None or y is None or isinstance(x, str) != isinstance(y, str):
                return None
            else:
                out = out and f(x, y)
        return out

    return value


def _all_of(parts: list[_Value]) -> _Value:
    def value(record: StepRecord, state: State) -> Any:
        values = [p(record, state) for p in parts]
        return False if any(v is not None and not v for v in values) else None if None in values else True

    return value


def _any_of(parts: list[_Value]) -> _Value:
    def value(record: StepRecord, state: State) -> Any:
        values = [p(record, state) for p in parts]
        return True if any(values) else None if None in values else False

    return value
