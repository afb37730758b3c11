"""Why, asked about one thing: a request that waits, a chunk, a preemption, a prefix that missed, a block.

Knows the trace alone, up to the cursor.

Each question gives a `Why`: sentences for people, and the figures behind them as plain data. What the engine
wrote down as its reason is told as such; what is worked out here (which earlier request has the same
beginning, who would give back how many blocks) is computed from the trace's own tokens and tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cbviz import events as ev
from cbviz.disciplines import DISCIPLINES
from cbviz.messages import StepRecord
from cbviz.trace.explain import RULES, Sentence, are, count, explain_event, listed, wait_sentence
from cbviz.trace.metrics import num_seats, token_budget
from cbviz.trace.state import NULL_BLOCK, RequestState, State
from cbviz.trace.trace import Cursor, Trace

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@dataclass(frozen=True)
class Why:
    """An answer. `facts` is plain JSON; `step` is where what is explained happened (or the cursor's)."""

    question: str
    step: int
    sentences: list[Sentence] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def to_dict(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "step": self.step,
            "sentences": [s.to_dict() for s in self.sentences],
            "facts": self.facts,
        }


def _at(trace: Trace, cursor: Cursor | int | None) -> Cursor:
    return trace.last if cursor is None else Cursor(cursor) if isinstance(cursor, int) else cursor


def _past(trace: Trace, at: Cursor) -> Iterator[tuple[StepRecord, int, Any]]:
    """(record, place, event) of all that had happened at the cursor, in order."""
    for record in trace.records[: at.step]:
        inside = at.event if record.step == at.step and at.event is not None else len(record.events)
        for i in range(min(inside, len(record.events))):
            yield record, i, record.events[i]


def _last(trace: Trace, at: Cursor, kind: type, request_id: str) -> tuple[StepRecord, int, Any] | None:
    """The latest event of this kind and request at the cursor."""
    for record in reversed(trace.records[: at.step]):
        end = at.event if record.step == at.step and at.event is not None else len(record.events)
        for i in range(min(end, len(record.events)) - 1, -1, -1):
            e: Any = record.events[i]
            if isinstance(e, kind) and e.request_id == request_id:  # type: ignore[attr-defined]
                return record, i, e
    return None


def _tokens(state: State, request_id: str) -> list[int]:
    """Prompt and outputs that the request has at the state; empty if the trace does not hold its prompt."""
    r = state.requests.get(request_id)
    return [*r.spec.prompt_token_ids, *r.output_token_ids] if r is not None and r.spec is not None else []


def _contents(trace: Trace, at: Cursor) -> dict[int, tuple[str, int]]:
    """For each findable block: whose tokens it was filled with, and which block of that request's sequence it
    is.
    """
    filled: dict[int, str] = {}
    for _, _, e in _past(trace, at):
        if isinstance(e, ev.BlockCached):
            filled[e.block_id] = e.request_id
        elif isinstance(e, ev.Resized):
            filled.update({b: filled[a] for a, b in e.moved if a in filled})
    state = trace.state(at)
    return {
        b: (owner, state.place(b))
        for b, owner in filled.items()
        if b < state.num_blocks and state.is_cached(b)
    }


def _hits(trace: Trace, state: State, at: Cursor, request_id: str) -> list[int]:
    """Blocks of the request's known tokens that could be found at the cursor, leading ones first; one token
    is left to compute.
    """
    mine, size = _tokens(state, request_id), state.block_size
    if state.config.get("enable_prefix_caching") not in (True, "True") or not mine:
        return []
    by_place: dict[int, list[tuple[int, str]]] = {}
    for block, (owner, place) in _contents(trace, at).items():
        by_place.setdefault(place, []).append((block, owner))
    tokens: dict[str, list[int]] = {}
    out: list[int] = []
    for i in range((len(mine) - 1) // size):
        end = (i + 1) * size
        for block, owner in by_place.get(i, ()):
            if owner not in tokens:
                tokens[owner] = _tokens(state, owner)
            if tokens[owner][:end] == mine[:end]:
                out.append(block)
                break
        else:
            break
    return out


# a request that waits ---------------------------------------------------------------------------------------


def why_waiting(trace: Trace, cursor: Cursor | int | None, request_id: str) -> Why:
    """What it would take to admit the request now: its place in the queue, a seat, blocks, and who would give
    back how many of them. Raises KeyError.

    A request that does not wait gets one sentence that says what it does instead. `facts`: `position` (0:
    head), `ahead`, `reason`, `seats`, `seats_taken`, `blocks_needed`, `blocks_free`, `blocks_cached`, and
    `frees`: for each running request the blocks that only it holds and how many more tokens it may get.
    """
    at = _at(trace, cursor)
    state = trace.state(at)
    r = state.request(request_id)
    question = f"Why does {request_id} wait?"
    if request_id not in state.waiting:
        what = (
            "is running"
            if request_id in state.running and not r.finished
            else "has finished"
            if r.status == "finished"
            else "was refused"
            if r.status == "refused"
            else r.status
        )
        return Why(
            question,
            at.step,
            [Sentence("waits", f"{request_id} does not wait: it {what}", (request_id,))],
            {"status": r.status},
        )
    place = state.waiting.index(request_id)
    ahead = state.waiting[:place]
    said: list[Sentence] = []
    if not place:
        said.append(
            Sentence(
                "waits",
                f"{request_id} is at the head of the queue"
                + (
                    (
                        f"; {count(len(state.waiting) - 1, 'request')} "
                        f"{'waits' if len(state.waiting) == 2 else 'wait'} behind it"
                    )
                    if len(state.waiting) > 1
                    else ""
                ),
                (request_id,),
            )
        )
        if r.wait_reason:
            said.append(
                Sentence(
                    "waits",
                    wait_sentence(request_id, r.wait_reason, r.wait_need, r.wait_have, state, False),
                    (request_id,),
                )
            )
    else:
        nth = ORDINALS[place] if place < len(ORDINALS) else f"number {place + 1}"
        said.append(
            Sentence(
                "waits",
                (
                    f"{request_id} is {nth} in the queue: {listed(ahead)} "
                    f"{'stands' if place == 1 else 'stand'} before it, and nobody is overtaken"
                ),
                (request_id, *ahead),
            )
        )
        head = state.requests[ahead[0]]
        if head.wait_reason:
            said.append(
                Sentence(
                    "waits",
                    wait_sentence(ahead[0], head.wait_reason, head.wait_need, head.wait_have, state, False),
                    (ahead[0],),
                )
            )
    facts: dict[str, Any] = {
        "position": place,
        "ahead": ahead,
        "reason": state.requests[state.waiting[0]].wait_reason,
        "seats": num_seats(state.config),
        "seats_taken": len(state.running),
    }
    rows = [state.requests[x] for x in state.running if not state.requests[x].finished]
    frees: list[dict[str, Any]] = sorted(
        (
            {
                "request_id": x.request_id,
                "blocks": sum(state.ref_count(b) == 1 for b in x.block_ids if b),
                "tokens_left": x.max_tokens - len(x.output_token_ids),
            }
            for x in rows
        ),
        key=_tokens_left,
    )
    facts["frees"] = frees
    said += _seats(request_id, facts, frees)
    if trace.has("blocks"):
        said += _room(trace, state, at, r, facts, frees)
        if not place and "short" not in facts and len(state.running) < facts["seats"] and trace.last == at:
            said.append(
                Sentence(
                    "waits",
                    "A seat and its blocks are there now: it is asked again in the next step",
                    (request_id,),
                )
            )
    return Why(question, at.step, said, facts)


def _tokens_left(f: dict[str, Any]) -> int:
    return int(f["tokens_left"])


def _seats(request_id: str, facts: dict[str, Any], frees: list[dict[str, Any]]) -> list[Sentence]:
    seats, taken = facts["seats"], facts["seats_taken"]
    if not seats:
        return []
    if taken < seats:
        return [
            Sentence("waits", f"A seat: {seats - taken} of {seats} {are(seats - taken)} free", (request_id,))
        ]
    first = frees[0] if frees else None
    ends = (
        f"; {first['request_id']} ends first, after at most {count(first['tokens_left'], 'more token')}"
        if first
        else ""
    )
    return [
        Sentence(
            "waits",
            f"A seat: all {seats} are taken{ends}" if seats > 1 else f"A seat: the only one is taken{ends}",
            (request_id, *([first["request_id"]] if first else [])),
        )
    ]


def _room(
    trace: Trace,
    state: State,
    at: Cursor,
    r: RequestState,
    facts: dict[str, Any],
    frees: list[dict[str, Any]],
) -> list[Sentence]:
    """Blocks: needed, free, and who would make up what is short."""
    size, free = state.block_size, state.num_free_blocks
    row = DISCIPLINES.get(str(state.config.get("discipline", "")))
    contiguous = state.config.get("kv_allocation") == "contiguous"
    ahead_of_need = contiguous or (row is not None and row.reserve in ("max-tokens", "guaranteed"))
    tokens = r.num_prompt_tokens + r.max_tokens if ahead_of_need else r.num_tokens
    hits = _hits(trace, state, at, r.request_id)
    idle = sum(1 for b in hits if not state.ref_count(b))
    need = max(0, -(-tokens // size) - len(hits)) + idle
    facts |= {"blocks_needed": need, "blocks_free": free, "blocks_cached": len(hits)}
    whole = "its prompt and longest output" if ahead_of_need else "all its known tokens"
    found = (
        f", {len(hits)} of them {are(len(hits))} in the cache"
        + (f" ({idle} held by nobody, so taken from the free ones)" if idle else "")
        if hits
        else ""
    )
    said = [
        Sentence(
            "waits",
            (
                f"Blocks: {whole}, {tokens}, fill {count(-(-tokens // size), 'block')} of {size}{found}; it "
                f"needs {need}, {free} {are(free)} free"
            ),
            (r.request_id,),
            hits,
        )
    ]
    short = need - free
    if short <= 0:
        longest = max((len(run) for run in state.free_runs()), default=0)
        if contiguous and longest < need:
            facts["longest_run"] = longest
            text = (
                f"They must lie side by side, and the longest run of free blocks has {longest}: what is "
                "missing is not room, but room in one piece"
            )
            said.append(Sentence("waits", text, (r.request_id,)))
        return said
    helpers, got = [], 0
    for f in frees:
        if got >= short:
            break
        if f["blocks"]:
            helpers.append(f)
            got += f["blocks"]
    facts["short"] = short
    if not helpers:
        return [
            *said,
            Sentence(
                "waits",
                f"{count(short, 'block')} {are(short)} missing, and no running request holds any alone",
                (r.request_id,),
            ),
        ]
    parts = [
        f"{f['request_id']} gives back {f['blocks']} after at most {count(f['tokens_left'], 'more token')}"
        for f in helpers
    ]
    end = (
        "then there are enough"
        if got >= short
        else f"that is {short - got} too few: the cache must give way, or those before it"
    )
    facts["enough_after"] = helpers[-1]["request_id"] if got >= short else None
    return [
        *said,
        Sentence(
            "waits",
            f"{count(short, 'block')} {are(short)} missing: {listed(parts)}; {end}",
            (r.request_id, *[f["request_id"] for f in helpers]),
        ),
    ]


# a chunk ----------------------------------------------------------------------------------------------------


def why_chunk(trace: Trace, step: int, request_id: str) -> Why:
    """What capped the request's share of step `step`, or why it had none. Raises IndexError, KeyError.

    `facts`: `num_tokens`, `wanted`, `cap`, `budget`, and `before`: what each row before it took.
    """
    record = trace.record(step)
    state = trace.state(step)
    state.request(request_id)
    question = f"What held {request_id} in step {step}?"
    budget = token_budget(state.config)
    before: list[tuple[str, int]] = []
    ran = {c.request_id for c in record.chunks}
    for i, e in enumerate(record.events):
        if not isinstance(e, ev.Scheduled) or e.request_id not in ran:
            continue
        if e.request_id != request_id:
            before.append((e.request_id, e.num_tokens))
            continue
        said = [explain_event(trace, record, i, state)]
        taken = sum(n for _, n in before)
        facts = {
            "num_tokens": e.num_tokens,
            "wanted": e.wanted or e.num_tokens,
            "cap": e.cap,
            "budget": budget,
            "before": [list(x) for x in before],
            "start": e.start,
            "num_draft": e.num_draft,
        }
        if before and budget:
            said.append(
                Sentence(
                    "capped",
                    (
                        f"Before it, {listed([f'{rid} ({n})' for rid, n in before], 8)} took {taken} of the "
                        f"step's {budget} tokens; {budget - taken} were left"
                    ),
                    [x for x, _ in before],
                )
            )
        elif budget:
            said.append(
                Sentence(
                    "capped",
                    f"It was the first in the step: all {budget} tokens of the budget were left",
                    (request_id,),
                )
            )
        if not e.cap:
            all_of = (
                f"all {e.num_tokens} tokens that it had to compute"
                if e.num_tokens > 1
                else "the one token that it had to compute"
            )
            said.append(Sentence("capped", f"Nothing held it back: it took {all_of}", (request_id,)))
        if e.num_draft:
            what = (
                "drafts that stand for nothing, to make it as long as the decodes"
                if e.draft_padding
                else "drafts to be checked"
            )
            said.append(
                Sentence(
                    "capped",
                    f"{count(e.num_draft, 'token')} of them {are(e.num_draft)} {what}",
                    (request_id,),
                )
            )
        return Why(question, step, said, facts)
    for i, e in enumerate(record.events):
        if isinstance(e, (ev.Skipped, ev.Preempted, ev.Unscheduled)) and e.request_id == request_id:
            facts = {
                "num_tokens": 0,
                "cap": e.reason if isinstance(e, ev.Skipped) else "preempted",
                "budget": budget,
                "before": [list(x) for x in before],
            }
            said = [explain_event(trace, record, i, state)]
            if isinstance(e, ev.Skipped) and e.reason == "budget" and budget:
                said.append(
                    Sentence(
                        "skipped",
                        f"{listed([f'{rid} ({n})' for rid, n in before], 8)} took all {budget} tokens",
                        [x for x, _ in before],
                    )
                )
            return Why(question, step, said, facts)
    if request_id in state.waiting:
        return Why(
            question,
            step,
            why_waiting(trace, step, request_id).sentences,
            {"num_tokens": 0, "cap": "waiting", "budget": budget},
        )
    return Why(
        question,
        step,
        [
            Sentence(
                "step",
                f"{request_id} had no part in step {step}: it is {state.requests[request_id].state}",
                (request_id,),
            )
        ],
        {"num_tokens": 0, "cap": "", "budget": budget},
    )


# a preemption -----------------------------------------------------------------------------------------------


def why_preempted(trace: Trace, cursor: Cursor | int | None, request_id: str) -> Why:
    """The request's latest preemption at the cursor: for whom, by which rule, the ranking of all candidates,
    and what it cost. Raises KeyError.

    `facts`: `for_id`, `rule`, `need`, `have`, `tokens_lost`, `blocks`, `ranking` (first to lose first:
    request_id, rank, num_computed_tokens, blocks that only it held), and once it is back `resumed_step`,
    `tokens_found` (in the cache, or on the host where it was swapped out), `tokens_again`.
    """
    at = _at(trace, cursor)
    trace.state(at).request(request_id)
    question = f"Why was {request_id} preempted?"
    found = _last(trace, at, ev.Preempted, request_id)
    if found is None:
        return Why(
            question,
            at.step,
            [Sentence("preempted", f"{request_id} has not been preempted", (request_id,))],
            {},
        )
    record, i, e = found
    before = trace.state(Cursor(record.step, i))
    ranking = []
    for rid, rank in e.ranking:
        r = before.requests[rid]
        ranking.append(
            {
                "request_id": rid,
                "rank": rank,
                "num_computed_tokens": r.num_computed_tokens,
                "blocks": sum(before.ref_count(b) == 1 for b in r.block_ids if b),
            }
        )
    alone = sum(before.ref_count(b) == 1 for b in e.block_ids if b)
    facts: dict[str, Any] = {
        "for_id": e.for_id,
        "rule": e.rule,
        "need": e.need,
        "have": e.have,
        "tokens_lost": e.num_tokens_lost,
        "blocks": len(e.block_ids),
        "blocks_freed": alone,
        "ranking": ranking,
    }
    said = [explain_event(trace, record, i)]
    if ranking:
        by = RULES.get(e.rule, ("", e.rule))[1]
        rows = [
            (
                f"{x['request_id']} ({x['rank']}; {x['num_computed_tokens']} computed, "
                f"{count(x['blocks'], 'block')} of its own)"
            )
            for x in ranking
        ]
        said.append(
            Sentence(
                "ranking",
                f"Candidates by {by or 'the rule'}, first to lose first: {listed(rows, 12)}",
                [x["request_id"] for x in ranking],
            )
        )
    shared = len(e.block_ids) - alone
    said.append(
        Sentence(
            "preempted",
            f"It held {count(len(e.block_ids), 'block')}; {alone} became free"
            + (f", {shared} {are(shared)} shared and stayed with others" if shared else ""),
            (request_id,),
            e.block_ids,
        )
    )
    back = next(
        (
            (rec, x)
            for rec, _, x in _past(trace, at)
            if rec.step > record.step
            and isinstance(x, ev.Admitted)
            and x.request_id == request_id
            and x.resumed
        ),
        None,
    )
    away = next(
        (x for x in record.events[i:] if isinstance(x, ev.SwappedOut) and x.request_id == request_id), None
    )
    lost = f"It lost {count(e.num_tokens_lost, 'computed token')}"
    if away is not None:
        lost = (
            f"Its {count(away.num_tokens, 'computed token')} went to "
            f"{count(len(away.host_block_ids), 'block')} on the host"
        )
    kind = "recomputes" if away is None else "swapped"
    if back is None:
        said.append(Sentence(kind, f"{lost}; it has no seat again yet", (request_id,)))
    else:
        came, x = back
        again = max(0, e.num_tokens_lost - x.num_cached_tokens)
        facts |= {"resumed_step": came.step, "tokens_found": x.num_cached_tokens, "tokens_again": again}
        how = (
            f"the cache still had {x.num_cached_tokens} of them, {again} had to be computed again"
            if away is None
            else "nothing had to be computed again"
        )
        said.append(
            Sentence(
                kind,
                (
                    f"{lost}; at step {came.step}, {count(came.step - record.step, 'step')} later, it came "
                    f"back: {how}"
                ),
                (request_id,),
            )
        )
    return Why(question, record.step, said, facts)


# a prefix that missed ---------------------------------------------------------------------------------------


def why_missed(trace: Trace, cursor: Cursor | int | None, request_id: str) -> Why:
    """Where the request's prefix stopped matching at its latest admission, and the cause. Raises KeyError.

    Where the content is new, the earlier request with the longest common beginning is found, and the position
    and the two tokens at which they part. `facts`: `block_index`, `positions` (first and last of that block),
    `cause`, `tokens_found`; with `new`: `other`, `position`, `ours`, `theirs`; with `evicted`:
    `evicted_step`, `evicted_by`, `block_id`, `owner`, `idle_steps`.
    """
    at = _at(trace, cursor)
    r = trace.state(at).request(request_id)
    question = f"Why did the prefix of {request_id} miss?"

    def plain(text: str, **facts: Any) -> Why:
        return Why(question, at.step, [Sentence("miss", text, (request_id,))], facts)

    if trace.header.config.get("enable_prefix_caching") is False:
        return plain("Prefix caching is off: nothing can be found", cause="off")
    found = _last(trace, at, ev.PrefixMiss, request_id)
    seated = _last(trace, at, ev.Admitted, request_id)
    if found is None:
        if seated is None:
            return plain(f"{request_id} has not been admitted yet: its prefix is looked up then", cause="")
        return plain(
            (
                f"{request_id} missed nothing: it found {count(r.num_cached_tokens, 'token')}, or its tokens "
                "do not fill a block"
            ),
            cause="",
        )
    record, i, e = found
    size = trace.header.block_size
    first, last = e.block_index * size, (e.block_index + 1) * size - 1
    hit = (
        e.block_index
        if e.cause != "last-token"
        else seated[2].num_cached_tokens // size
        if seated is not None
        else 0
    )
    facts: dict[str, Any] = {
        "block_index": e.block_index,
        "positions": [first, last],
        "cause": e.cause,
        "tokens_found": hit * size,
    }
    said = [explain_event(trace, record, i)]
    when = Cursor(record.step, i)
    state = trace.state(when)
    if e.cause == "new":
        said += _parting(trace, state, when, request_id, e.block_index, facts)
    elif e.cause == "evicted":
        facts |= {"evicted_step": e.evicted_step, "evicted_by": e.evicted_by}
        gone = _evicted_block(trace, e, _tokens(state, request_id))
        if gone is not None:
            x, owner = gone
            facts |= {
                "block_id": x.block_id,
                "owner": x.owner,
                "idle_steps": x.idle_steps,
                "content_of": owner,
            }
            said.append(
                Sentence(
                    "evicted",
                    (
                        f"It lay in block {x.block_id}, filled for {owner}; {x.owner} used it last, "
                        f"{_ago(x.idle_steps)}, when {x.by} took it at step {e.evicted_step}"
                    ),
                    (x.owner, x.by),
                    (x.block_id,),
                )
            )
    elif e.cause == "partial":
        known = len(_tokens(state, request_id)) or r.num_tokens
        rest = known - e.block_index * size
        facts["rest"] = rest
        said.append(
            Sentence(
                "miss",
                (
                    f"Its last {count(rest, 'token')}, from position {first}, fill no block of {size}: only "
                    "whole blocks are found"
                ),
                (request_id,),
            )
        )
    elif e.cause == "last-token":
        said.append(
            Sentence(
                "miss",
                (
                    f"Block {e.block_index} (positions {first} to {last}) is cached too, but without "
                    "computing "
                    "a token there are no logits to sample from"
                ),
                (request_id,),
            )
        )
    return Why(question, record.step, said, facts)


def _parting(
    trace: Trace, state: State, at: Cursor, request_id: str, block_index: int, facts: dict[str, Any]
) -> list[Sentence]:
    """The earlier request that begins most like this one, and where they part."""
    mine = _tokens(state, request_id)
    size = state.block_size
    best, other, theirs = -1, "", []
    for r in state.by_index:
        if r.request_id == request_id or (r.first_scheduled_step < 0 and r.status != "running"):
            continue
        tokens = _tokens(state, r.request_id)
        n = next((k for k, (x, y) in enumerate(zip(mine, tokens)) if x != y), min(len(mine), len(tokens)))
        if n > best:
            best, other, theirs = n, r.request_id, tokens
    if not mine:
        return []
    if best <= 0:
        facts |= {"other": None, "position": 0}
        return [
            Sentence(
                "miss",
                "No request that ran before it begins with the same token"
                if state.by_index[1:]
                else "It is the first request of the run",
                (request_id,),
            )
        ]
    facts |= {
        "other": other,
        "position": best,
        "ours": mine[best] if best < len(mine) else None,
        "theirs": theirs[best] if best < len(theirs) else None,
    }
    inside = best // size
    if best >= (block_index + 1) * size:
        q = state.requests[other]
        if q.num_computed_tokens < (block_index + 1) * size and not q.finished:
            return [
                Sentence(
                    "miss",
                    (
                        f"{other} has the same tokens there, but has computed only {q.num_computed_tokens} "
                        "of "
                        f"its own yet: block {block_index} is not full"
                    ),
                    (request_id, other),
                )
            ]
        return [
            Sentence(
                "miss",
                (
                    f"{other} had the same tokens there; that block can no longer be found, and when it went "
                    "is forgotten"
                ),
                (request_id, other),
            )
        ]
    if best >= len(theirs):
        return [
            Sentence(
                "miss",
                (
                    f"It equals {other} for {count(best, 'token')}, all that {other} has: block {inside} "
                    "of it "
                    "is not full"
                ),
                (request_id, other),
            )
        ]
    return [
        Sentence(
            "miss",
            (
                f"It equals {other} for {count(best, 'token')}; at position {best}, in block {inside}, it "
                "has "
                f"token {mine[best]} where {other} has {theirs[best]}"
            ),
            (request_id, other),
        )
    ]


def _evicted_block(trace: Trace, miss: ev.PrefixMiss, mine: list[int]) -> tuple[ev.Evicted, str] | None:
    """The eviction that a miss speaks of, and whose tokens the block held."""
    if not 1 <= miss.evicted_step <= len(trace):
        return None
    record = trace.record(miss.evicted_step)
    end = (miss.block_index + 1) * trace.header.block_size
    state = trace.state(miss.evicted_step)
    for i, e in enumerate(record.events):
        if isinstance(e, ev.Evicted) and (not miss.evicted_by or e.by == miss.evicted_by):
            held = _contents(trace, Cursor(record.step, i)).get(e.block_id)
            if (
                held is not None
                and held[1] == miss.block_index
                and _tokens(state, held[0])[:end] == mine[:end]
            ):
                return e, held[0]
    return None


# a block ----------------------------------------------------------------------------------------------------


def why_block(trace: Trace, cursor: Cursor | int | None, block_id: int) -> Why:
    """The life of a block up to the cursor: who took it, filled it, shared it, gave it back, and whose cache
    was evicted for whom after how long. Raises IndexError.

    `facts`: `kind` (of `State.block_kind`), `holders`, `life`: a list of {step, what, request_id, ...},
    oldest first.
    """
    at = _at(trace, cursor)
    state = trace.state(at)
    if not 0 <= block_id < state.num_blocks:
        raise IndexError(f"block {block_id} is not in this pool: it has blocks 0..{state.num_blocks - 1}")
    question = f"What is block {block_id}?"
    if block_id == NULL_BLOCK:
        return Why(
            question,
            at.step,
            [
                Sentence(
                    "step",
                    (
                        "Block 0 is the null block: it is never given out and stands for places that hold "
                        "nothing"
                    ),
                )
            ],
            {"kind": "null", "holders": [], "life": []},
        )
    life: list[dict[str, Any]] = []
    refs: set[str] = set()
    for record, i, e in _past(trace, at):
        entry: dict[str, Any] | None = None
        if isinstance(e, ev.Allocated) and block_id in e.block_ids:
            refs = {e.request_id}
            entry = {"what": "allocated", "request_id": e.request_id}
        elif isinstance(e, ev.Shared) and block_id in e.block_ids:
            refs.add(e.request_id)
            entry = {"what": "shared", "request_id": e.request_id, "holders": len(refs)}
        elif isinstance(e, ev.Forked) and block_id in e.block_ids:
            refs.update(e.child_ids)
            entry = {
                "what": "forked",
                "request_id": e.request_id,
                "holders": len(refs),
                "sequences": 1 + len(e.child_ids),
            }
        elif isinstance(e, ev.Copied) and e.src == block_id:
            refs.discard(e.request_id)
            entry = {"what": "copied", "request_id": e.request_id, "to": e.dst, "holders": len(refs)}
        elif isinstance(e, ev.Copied) and e.dst == block_id:
            refs = {e.request_id}
            entry = {"what": "allocated", "request_id": e.request_id, "copy_of": e.src}
        elif isinstance(e, ev.BeamStep):
            now = refs.difference(e.beam_ids) | {
                i for i, parent in zip(e.beam_ids, e.parents, strict=True) if e.beam_ids[parent] in refs
            }
            if now != refs:
                entry = {"what": "beams", "request_id": e.request_id, "holders": len(now)}
            refs = now
        elif (
            isinstance(e, ev.Resized)
            and (came := next((a for a, b in e.moved if b == block_id), None)) is not None
        ):
            then = trace.state(Cursor(record.step, i + 1))
            refs = {then.by_index[x].request_id for x in then.holders.get(block_id, ())}
            entry = {"what": "moved", "request_id": "", "from": came, "holders": len(refs)}
        elif isinstance(e, ev.BlockCached) and e.block_id == block_id:
            entry = {"what": "cached", "request_id": e.request_id}
        elif isinstance(e, ev.Evicted) and e.block_id == block_id:
            entry = {"what": "evicted", "request_id": e.owner, "by": e.by, "idle_steps": e.idle_steps}
        elif isinstance(e, (ev.Freed, ev.Preempted, ev.OutOfWindow)) and block_id in e.block_ids:
            refs.discard(e.request_id)
            entry = {
                "what": "freed",
                "request_id": e.request_id,
                "why": "preempted"
                if isinstance(e, ev.Preempted)
                else "window"
                if isinstance(e, ev.OutOfWindow)
                else "finished",
                "holders": len(refs),
            }
        if entry is not None:
            life.append({"step": record.step, **entry})
    kind = state.block_kind(block_id)
    holders = [state.by_index[i].request_id for i in state.holders.get(block_id, ())]
    said = [Sentence("step", _block_now(state, block_id, kind, holders, life, at), holders, (block_id,))]
    said += [
        Sentence(
            _LIFE_KINDS[x["what"]],
            f"Step {x['step']}: {_life_text(x)}",
            [y for y in (x["request_id"], x.get("by")) if y],
            (block_id,),
        )
        for x in life
    ]
    return Why(
        question,
        at.step,
        said,
        {"kind": kind, "holders": holders, "fill": state.fill(block_id), "life": life},
    )


_LIFE_KINDS = {
    "allocated": "allocated",
    "shared": "shared",
    "cached": "cached",
    "evicted": "evicted",
    "freed": "freed",
    "forked": "shared",
    "copied": "shared",
    "beams": "shared",
    "moved": "configured",
}


def _ago(steps: int) -> str:
    return f"{count(steps, 'step')} before" if steps else "in that same step"


def _block_now(
    state: State, block_id: int, kind: str, holders: list[str], life: list[dict[str, Any]], at: Cursor
) -> str:
    idle = next((at.step - x["step"] for x in reversed(life) if x["what"] in ("freed", "beams")), 0)
    if holders:
        fill = f"{state.fill(block_id)} of its {state.block_size} slots hold a token"
        who = f"is held by {holders[0]}" if len(holders) == 1 else f"is shared by {listed(holders)}"
        return (
            f"Block {block_id} {who}, as block {state.place(block_id)} of "
            f"{'its table' if len(holders) == 1 else 'their tables'}; {fill}"
        )
    if kind == "cached":
        last = (
            state.by_index[state.held_last(block_id)].request_id
            if state.held_last(block_id) >= 0
            else "nobody"
        )
        return (
            f"Block {block_id} is free, but what {last} left in it can still be found; nobody has used it "
            f"for {count(idle, 'step')}"
        )
    return f"Block {block_id} is free" + (
        f", for {count(idle, 'step')}; its content can't be found" if life else ": it was never used"
    )


def _life_text(x: dict[str, Any]) -> str:
    who = x["request_id"]
    if x["what"] == "allocated":
        return f"{who} took it as a new block" + (
            f" and copied block {x['copy_of']} to it, which others hold too" if "copy_of" in x else ""
        )
    if x["what"] == "forked":
        return f"{who} goes on as {count(x['sequences'], 'sequence')}, which share it"
    if x["what"] == "copied":
        return (
            f"{who} copied it to block {x['to']} before writing, and {count(x['holders'], 'other')} "
            f"{'keeps' if x['holders'] == 1 else 'keep'} it"
        )
    if x["what"] == "beams":
        return (
            f"the beams of {who} went on: {count(x['holders'], 'sequence')} "
            f"{'holds' if x['holders'] == 1 else 'hold'} it now"
        )
    if x["what"] == "moved":
        return f"the pool was made smaller: what lay in block {x['from']} was moved here"
    if x["what"] == "shared":
        return f"{who} found it in the cache" + (
            f" and shares it with {count(x['holders'] - 1, 'other')}"
            if x["holders"] > 1
            else "; nobody held it"
        )
    if x["what"] == "cached":
        return f"{who} filled it: it can be found from now on"
    if x["what"] == "evicted":
        return (
            f"it was evicted: {x['by']} took it; {who or 'somebody'} had used it last, "
            f"{_ago(x['idle_steps'])}"
        )
    why = {
        "preempted": "when it was preempted",
        "window": "when its window had left it",
        "finished": "when it ended",
    }[x["why"]]
    return f"{who} gave it back {why}" + (
        f"; {count(x['holders'], 'request')} still {'holds' if x['holders'] == 1 else 'hold'} it"
        if x["holders"]
        else ""
    )


__all__ = ["Why", "why_block", "why_chunk", "why_missed", "why_preempted", "why_waiting"]
