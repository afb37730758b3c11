"""Each step in plain sentences, made from the reasons that its events carry.

Knows the trace alone, and adds no guess of its own.

The most important comes first: what went wrong for somebody (preempted, refused, waiting), then who came in,
what held a chunk back, who finished, what the cache did, and last the plain work. Things that happen to many
requests at once are one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cbviz import events as ev
from cbviz.messages import StepRecord
from cbviz.trace import experts
from cbviz.trace.metrics import arrival_s, num_seats, seconds, token_budget
from cbviz.trace.state import State
from cbviz.trace.trace import Trace

KINDS = (
    "preempted",
    "swapped",
    "unscheduled",
    "ranking",
    "refused",
    "configured",
    "starving",
    "waits",
    "admitted",
    "skipped",
    "capped",
    "finished",
    "evicted",
    "hit",
    "miss",
    "first-token",
    "rejected",
    "accepted",
    "recomputes",
    "prefill",
    "decode",
    "padding",
    "proposed",
    "arrived",
    "reordered",
    "allocated",
    "shared",
    "cached",
    "freed",
    "window",
    "seats",
    "step",
)
"""Kinds of sentences, the most important first."""

RULES = {
    "last": ("last to arrive", "place in the running order"),
    "rank": ("last by the policy's ranking", "rank, then arrival"),
    "lowest-priority": ("least urgent", "priority number, then arrival"),
    "least-work-lost": ("with the fewest computed tokens", "computed tokens"),
    "fewest-outputs": ("with the least output", "output tokens"),
    "idle-beam": ("a beam that only waited for its siblings", ""),
}
"""Victim rules in words, and what their candidates are ranked by; a rule that is not here is named as it is.
"""

SKIPS = {
    "budget": "the step's token budget is used up",
    "blocks": "the preemption ended the round",
    "prefill-step": "a step of prefills goes first",
    "beams": "it waits for the other beams of its request",
    "max_model_len": "max_model_len is reached",
}

ENDS: dict[str, Callable[[str, int, int, Any, int], str]] = {
    "length": lambda rid, n, limit, max_len, stop: (
        f"{rid} finished: it has its {count(limit, 'token')} (max_tokens)"
    ),
    "stop": lambda rid, n, limit, max_len, stop: (
        f"{rid} finished: it sampled the stop token {stop} after {count(n, 'token')}"
        if stop >= 0
        else f"{rid} finished: end of sequence after {count(n, 'token')}"
    ),
    "max_model_len": lambda rid, n, limit, max_len, stop: (
        f"{rid} finished after {count(n, 'token')}: prompt and output reached max_model_len"
        + (f", {max_len}" if max_len else "")
    ),
    "abort": lambda rid, n, limit, max_len, stop: f"{rid} was aborted after {n} of {count(limit, 'token')}",
    "timeout": lambda rid, n, limit, max_len, stop: (
        f"{rid} timed out after {n} of {count(limit, 'token')}: it took longer than timeout_s"
    ),
    "deadline": lambda rid, n, limit, max_len, stop: (
        f"{rid} ended after {n} of {count(limit, 'token')}: its deadline has passed"
    ),
    "shed": lambda rid, n, limit, max_len, stop: (
        f"{rid} was shed to relieve the overload: it waited too long without ever running"
    ),
}


class Sentence(str):
    """A sentence that knows what it speaks of, so that a picture can link it.

    It is a str; `kind` is one of KINDS.
    """

    __slots__ = ("block_ids", "kind", "request_ids")

    kind: str
    request_ids: tuple[str, ...]
    block_ids: tuple[int, ...]

    def __new__(
        cls, kind: str, text: str, request_ids: Iterable[str] = (), block_ids: Iterable[int] = ()
    ) -> Sentence:
        new = super().__new__(cls, text)
        new.kind, new.request_ids, new.block_ids = kind, tuple(request_ids), tuple(block_ids)
        return new

    @property
    def text(self) -> str:
        return str.__str__(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: kind, text, request_ids, block_ids."""
        return {
            "kind": self.kind,
            "text": self.text,
            "request_ids": list(self.request_ids),
            "block_ids": list(self.block_ids),
        }


# words ------------------------------------------------------------------------------------------------------


def count(n: int, noun: str) -> str:
    """1 block, 2 blocks."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def are(n: int) -> str:
    return "is" if n == 1 else "are"


def listed(items: Sequence[Any], most: int = 4) -> str:
    """a, b and c; beyond `most`: a, b, c and 7 more."""
    words = [str(x) for x in items]
    if len(words) > most:
        words = [*words[: most - 1], f"{len(words) - most + 1} more"]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else ""


def _blocks(block_ids: Sequence[int]) -> str:
    return (
        f" ({', '.join(map(str, block_ids[:6]))}{', ...' if len(block_ids) > 6 else ''})" if block_ids else ""
    )


def wait_sentence(rid: str, reason: str, need: int, have: int, state: State, still: bool) -> str:
    head = f"{rid} {'still waits' if still else 'waits'}: "
    if reason == "seats" and need > 1:
        return head + f"its {count(need, 'sequence')} need a seat each, {have} {are(have)} free"
    if reason == "seats":
        seats = num_seats(state.config)
        return head + (
            f"all {count(seats, 'seat')} are taken"
            if seats > 1
            else "the only seat is taken"
            if seats
            else "all seats are taken"
        )
    if reason == "blocks":
        return head + f"it needs {count(need, 'block')}, {have} {are(have)} free"
    if reason == "budget":
        budget = token_budget(state.config)
        name = f"the step's budget of {count(budget, 'token')}" if budget else "the step's token budget"
        return head + (
            f"{name} is used up"
            if have <= 0
            else f"it needs {count(need, 'token')} of this step, {have} {are(have)} left"
            + (f" of {budget}" if budget else "")
        )
    if reason == "batch":
        return (
            head + f"the last batch has not ended, {count(have, 'request')} of it {are(have)} still running"
        )
    if reason == "preempted":
        return head + "nobody is admitted in a step that preempted a request"
    if reason == "decode-step":
        return head + "this step only decodes"
    if reason == "watermark":
        return head + (
            f"it needs {count(need, 'block')}, and {have} {are(have)} free above the watermark that an "
            "admission leaves"
        )
    if reason == "reserve":
        return head + (
            f"{count(need, 'block')} must be set aside for its prompt and longest output, {have} "
            f"{are(have)} free"
        )
    if reason == "fragments":
        return head + (
            f"it needs {count(need, 'block')} side by side for its prompt and longest output; enough are "
            "free, "
            f"but the longest free run has {have} (external fragmentation)"
        )
    if reason == "guarantee":
        return head + (
            f"with it, the prompts and longest outputs of all would need {count(need, 'more block')}, "
            f"{have} {are(have)} free"
        )
    if reason == "estimate":
        return head + (
            f"with it, what is still expected of all would need {count(need, 'more block')}, {have} "
            f"{are(have)} free"
        )
    if reason == "degraded":
        return head + (
            f"under overload the batch class goes one at a time, {count(have, 'request')} of it "
            f"{are(have)} running"
        )
    if reason == "policy":
        return head + f"policy {state.config.get('policy', '')} does not admit it now".replace("  ", " ")
    return head + reason


def _miss(e: ev.PrefixMiss) -> str:
    where = f"The prefix of {e.request_id} stopped matching at block {e.block_index}: "
    if e.cause == "new":
        return (
            where + "this content was never seen, or is forgotten by now"
            if e.block_index
            else (
                f"{e.request_id} found nothing in the cache: its first block was never seen, or is "
                "forgotten by now"
            )
        )
    if e.cause == "evicted":
        return (
            where
            + (
                f"it was cached until step {e.evicted_step}"
                if e.evicted_step >= 0
                else "it was cached and evicted"
            )
            + (f", when {e.evicted_by} took the block" if e.evicted_by else "")
        )
    if e.cause == "last-token":
        return where + "all of it is cached, but one token must be computed to get logits"
    if e.cause == "partial":
        return where + "the rest does not fill a block"
    if e.cause == "window":
        return where + "the cached blocks do not cover its attention window"
    return where + e.cause


# the step ---------------------------------------------------------------------------------------------------


class _Step:
    """One record being told. `state` is the state after it; of later steps nothing is read."""

    def __init__(self, trace: Trace, record: StepRecord, state: State) -> None:
        self.trace, self.record, self.state = trace, record, state
        self.kinds = {c.request_id: c for c in record.chunks}
        self.made_longer = {
            e.request_id for e in record.events if isinstance(e, ev.Scheduled) and e.draft_padding
        }
        self.said: list[Sentence] = []
        self.by_type: dict[type, list[Any]] = {}
        for e in record.events:
            self.by_type.setdefault(type(e), []).append(e)

    def _sinks(self) -> str:
        n = int(self.state.config.get("attention_sinks") or 0)
        return (
            f"; its first {count(n, 'token')}, the attention sinks, {'stays' if n == 1 else 'stay'}"
            if n
            else ""
        )

    def of(self, kind: type) -> list[Any]:
        return self.by_type.get(kind, [])

    def say(
        self, kind: str, text: str, request_ids: Iterable[str] = (), block_ids: Iterable[int] = ()
    ) -> None:
        self.said.append(Sentence(kind, text, request_ids, block_ids))

    def outputs_before(self, rid: str) -> int:
        return sum(1 for s in self.state.requests[rid].output_steps if s < self.record.step)

    def tell(self) -> list[Sentence]:
        for part in (
            self.preemptions,
            self.entrance,
            self.waits,
            self.admissions,
            self.chunks,
            self.results,
            self.memory,
            self.work,
        ):
            part()
        return sorted(self.said, key=lambda s: KINDS.index(s.kind))

    def preemptions(self) -> None:
        caching = self.state.config.get("enable_prefix_caching") in (True, "True")
        for e in self.of(ev.Preempted):
            who, measure = RULES.get(e.rule, (f"chosen by the rule {e.rule!r}" if e.rule else "chosen", ""))
            lost = f"will recompute {count(e.num_tokens_lost, 'token')}" + (
                ", less what the cache still has" if caching and e.num_tokens_lost else ""
            )
            if any(x.request_id == e.request_id for x in self.of(ev.SwappedOut)):
                lost = "keeps what it computed, on the host"
            if e.host_need:
                lost += (
                    f" (swapping it out would take {count(e.host_need, 'host block')}, {e.host_have} "
                    f"{are(e.host_have)} free)"
                )
            short = f"needs {count(e.need, 'block')}, {e.have} {are(e.have)} free"
            if e.for_id == e.request_id:
                text = f"{e.request_id}, {who}, was preempted for want of blocks: it {short}; it {lost}"
            else:
                text = (
                    f"{e.request_id}, {who}, was preempted for {e.for_id}: {e.for_id} {short}; "
                    f"{e.request_id} {lost}"
                )
            self.say(
                "preempted",
                text,
                (e.request_id, e.for_id) if e.for_id != e.request_id else (e.request_id,),
                e.block_ids,
            )
            if len(e.ranking) > 1:
                by = f" (by {measure})" if measure else ""
                self.say(
                    "ranking",
                    f"Candidates to lose their blocks for {e.for_id}{by}, first to lose first: "
                    + listed([f"{rid} ({rank})" if rank else rid for rid, rank in e.ranking], 6),
                    [rid for rid, _ in e.ranking],
                )
        for e in self.of(ev.SwappedOut):
            n = len(e.block_ids)
            self.say(
                "swapped",
                f"{e.request_id} was swapped out: {count(n, 'block')} ({count(e.num_tokens, 'token')}) to "
                f"the host{self.took('swap-out')}; "
                f"it comes back when {count(n, 'block')} {are(n)} free at once",
                (e.request_id,),
                e.block_ids,
            )
        for e in self.of(ev.SwappedIn):
            n, kept = (
                len(e.block_ids),
                f"{count(e.num_kept, 'block')} {are(e.num_kept)} still here, in the prefix cache"
                if e.num_kept
                else "",
            )
            told = (
                f"{count(n, 'block')} from the host{self.took('swap-in')}"
                if n
                else "nothing had to be copied"
            )
            self.say(
                "swapped",
                f"{e.request_id} was swapped in: {told}"
                + (f"; {kept}" if kept else "")
                + "; nothing is computed again",
                (e.request_id,),
                e.block_ids,
            )
        for e in self.of(ev.HostFreed):
            self.say(
                "swapped",
                (
                    f"{e.request_id} ended while it was swapped out: "
                    f"{count(len(e.host_block_ids), 'host block')} {are(len(e.host_block_ids))} free"
                ),
                (e.request_id,),
            )
        for e in self.of(ev.Unscheduled):
            self.say(
                "unscheduled", f"{e.request_id} had a share of this step; it was taken back", (e.request_id,)
            )
        skipped: dict[str, list[str]] = {}
        for e in self.of(ev.Skipped):
            skipped.setdefault(e.reason, []).append(e.request_id)
        for reason, ids in skipped.items():
            self.say(
                "skipped",
                (
                    f"{listed(ids)} {'gets' if len(ids) == 1 else 'get'} no token in this step: "
                    f"{SKIPS.get(reason, reason)}"
                ),
                ids,
            )

    def took(self, what: str) -> str:
        """How long the step's copies of that kind took, and how much of it went on beside the pass."""
        if not any(s.what == what for s in self.record.spans) or not self.trace.has("time"):
            return ""
        total, beside = _copy_times(self.record, what)
        return f" in {seconds(total)} ({self.record.clock}{beside if what == 'swap-out' else ''})"

    def entrance(self) -> None:
        for e in self.of(ev.Starving):
            were = "was" if e.num_overtaken == 1 else "were"
            self.say(
                "starving",
                (
                    f"{e.request_id} is starving: {count(e.num_overtaken, 'later request')} {were} "
                    "admitted in "
                    f"its {count(e.num_waiting_steps, 'step')} of waiting"
                )
                + (
                    f"; its admission would take {count(e.need, 'block')}, {e.have} {are(e.have)} free"
                    if e.need
                    else ""
                )
                + (
                    (
                        f": what it lacks is its turn, policy {self.state.config.get('policy', '')} prefers "
                        "others"
                    )
                    if e.need <= e.have
                    else ""
                )
                + (f" ({count(e.num_ahead, 'waiting request')} before it now)" if e.num_ahead else ""),
                (e.request_id,),
            )
        for e in self.of(ev.Refused):
            self.say("refused", f"{e.request_id} was refused: {e.reason}", (e.request_id,))
        for e in self.of(ev.Configured):
            self.say(
                "configured",
                f"{e.field} was changed from {e.old} to {e.new}; it holds from this step's admission on",
            )
        for e in self.of(ev.Resized):
            moved = (
                (
                    f"; {count(len(e.moved), 'block')} in use beyond its end moved: "
                    f"{listed([f'{a} to {b}' for a, b in e.moved], 6)}"
                )
                if e.moved
                else ""
            )
            lost = f"; {count(len(e.dropped), 'cached block')} can no longer be found" if e.dropped else ""
            self.say(
                "configured",
                f"The pool has {count(e.num_blocks - 1, 'block')} to give out from here on{moved}{lost}",
                (),
                [b for _, b in e.moved],
            )
        arrived = self.of(ev.Arrived)
        if len(arrived) > 3:
            self.say(
                "arrived",
                f"{count(len(arrived), 'request')} arrived: {listed([e.request_id for e in arrived], 8)}",
                [e.request_id for e in arrived],
            )
        else:
            for e in arrived:
                self.say(
                    "arrived",
                    (
                        f"{e.request_id} arrived with {count(e.num_prompt_tokens, 'prompt token')} and asks "
                        f"for at most {count(e.max_tokens, 'token')}"
                    )
                    + (
                        (
                            f"; {count(e.position, 'request')} {'stands' if e.position == 1 else 'stand'} "
                            "before it"
                        )
                        if e.position
                        else ""
                    ),
                    (e.request_id,),
                )
        for e in self.of(ev.Reordered):
            self.say(
                "reordered",
                f"The policy put the queue into another order: {listed(e.request_ids, 6)}",
                e.request_ids,
            )

    def waits(self) -> None:
        told = {e.request_id: e for e in self.of(ev.NotAdmitted)}
        head = self.state.waiting[0] if self.state.waiting else None
        for rid, e in told.items():
            self.say(
                "waits",
                wait_sentence(rid, e.reason, e.need, e.have, self.state, False) + self._behind(rid),
                (rid,),
            )
        if head is not None and head not in told and self.trace.has("reasons"):
            r = self.state.requests[head]
            if r.wait_reason:
                self.say(
                    "waits",
                    wait_sentence(head, r.wait_reason, r.wait_need, r.wait_have, self.state, True)
                    + self._behind(head),
                    (head,),
                )

    def _behind(self, rid: str) -> str:
        waiting = self.state.waiting
        more = len(waiting) - 1 if waiting and waiting[0] == rid else 0
        return f"; {count(more, 'more request')} {'waits' if more == 1 else 'wait'} behind it" if more else ""

    def admissions(self) -> None:
        at_once = [e for e in self.of(ev.Admitted) if not e.resumed and not e.num_waiting_steps]
        if len(at_once) > 2:
            self.say(
                "admitted",
                (
                    f"{count(len(at_once), 'request')} got a seat at once: "
                    f"{listed([e.request_id for e in at_once], 8)}"
                ),
                [e.request_id for e in at_once],
            )
        for e in self.of(ev.Admitted):
            waited = count(e.num_waiting_steps, "step")
            if e.resumed:
                self.say(
                    "admitted",
                    f"{e.request_id} has a seat again, {waited} after its preemption",
                    (e.request_id,),
                )
            elif e.num_waiting_steps:
                self.say("admitted", f"{e.request_id} got a seat after waiting {waited}", (e.request_id,))
            elif len(at_once) <= 2:
                self.say("admitted", f"{e.request_id} got a seat at once", (e.request_id,))
        for e in self.of(ev.Forked):
            n, blocks = len(e.child_ids) + 1, len(e.block_ids)
            self.say(
                "shared",
                f"{e.request_id} goes on as {count(n, 'sequence')} "
                f"({listed([e.request_id, *e.child_ids], 6)}): they share {count(blocks, 'block')} of its "
                "prompt, "
                f"computed once; {count((n - 1) * blocks, 'block')} saved",
                (e.request_id, *e.child_ids),
                e.block_ids,
            )
        for e in self.of(ev.Copied):
            self.say(
                "shared",
                (
                    f"{e.request_id} copied block {e.src} to {e.dst} before writing: others hold block "
                    f"{e.src} "
                    "too (copy-on-write)"
                ),
                (e.request_id,),
                (e.src, e.dst),
            )
        chose = {i for e in (*self.of(ev.BeamStep), *self.of(ev.BeamsEnded)) for i in e.beam_ids}
        for e in self.of(ev.Scored):
            if e.request_id not in chose:
                self.say(
                    "decode",
                    (
                        f"Beam {e.request_id} has its {count(len(e.token_ids), 'candidate')} and waits for "
                        "the "
                        "other beams"
                    ),
                    (e.request_id,),
                )
        for e in self.of(ev.BeamStep):
            dropped = [i for n, i in enumerate(e.beam_ids) if n not in e.parents]
            moved = [
                f"{i} goes on from {e.beam_ids[p]}"
                for n, (i, p) in enumerate(zip(e.beam_ids, e.parents, strict=True))
                if n != p
            ]
            first = all(p == 0 for p in e.parents) and all(
                len(self.state.requests[i].output_token_ids) == 1 for i in e.beam_ids
            )
            what = (
                f"the words of {listed(dropped, 4)} are dropped: {listed(moved, 4)}"
                if moved
                else "each goes on"
            )
            if first:
                what = f"each takes another of {e.request_id}'s best first tokens"
            done = f"; {count(e.num_done, 'finished one')} kept" if e.num_done else ""
            best = max(e.scores)
            self.say(
                "shared",
                (
                    f"Beams of {e.request_id}: {what}; best log-probability {best:.2f}, worst "
                    f"{min(e.scores):.2f}{done}"
                ),
                e.beam_ids,
            )
        for e in self.of(ev.BeamsEnded):
            self.say(
                "finished",
                f"Beam search of {e.request_id} ended with {len(e.outputs)} hypotheses, {e.request_id}'s "
                f"the best; scores {e.scores[0]:.2f} (best) "
                f"to {e.scores[-1]:.2f}",
                e.beam_ids,
            )
        for e in self.of(ev.PrefixHit):
            r = self.state.requests[e.request_id]
            outputs = self.outputs_before(e.request_id)
            known = (
                f"{count(r.num_prompt_tokens + outputs, 'token')} of prompt and output"
                if outputs
                else count(r.num_prompt_tokens, "prompt token")
            )
            held = [b for b in e.block_ids if b]
            self.say(
                "hit",
                (
                    f"{e.request_id} found {e.num_tokens} of its {known} in the cache "
                    f"({count(len(held), 'block')})"
                ),
                (e.request_id,),
                held,
            )
        for e in self.of(ev.PrefixMiss):
            self.say("miss", _miss(e), (e.request_id, e.evicted_by) if e.evicted_by else (e.request_id,))

    def chunks(self) -> None:
        budget = token_budget(self.state.config)
        decodes = prefills = taken = 0
        for e in self.of(ev.Scheduled):
            chunk = self.kinds.get(e.request_id)
            if chunk is None:
                continue  # taken back by a preemption later in the step
            if e.cap:
                verb = (
                    "recomputation"
                    if chunk.num_recomputed
                    else "prefill"
                    if chunk.kind == "prefill"
                    else "decode"
                )
                text = f"{e.request_id}'s {verb} takes {e.num_tokens} of {count(e.wanted, 'token')}: "
                if e.cap == "budget":
                    others = [count(n, word) for n, word in ((decodes, "decode"), (prefills, "prefill")) if n]
                    left = f"{listed(others)} took {taken} of " if others else "it is all of "
                    text += left + (f"the step's budget of {budget}" if budget else "the step's budget")
                elif e.cap == "threshold":
                    text += (
                        "long_prefill_token_threshold is "
                        f"{self.state.config.get('long_prefill_token_threshold', e.num_tokens)}"
                    )
                elif e.cap == "max_model_len":
                    text += (
                        f"max_model_len is {self.state.config.get('max_model_len', e.start + e.num_tokens)}"
                    )
                else:
                    text += e.cap
                self.say("capped", text, (e.request_id,))
            decodes, prefills, taken = (
                decodes + (chunk.kind == "decode"),
                prefills + (chunk.kind != "decode"),
                taken + e.num_tokens,
            )

    def results(self) -> None:
        for e in self.of(ev.Finished):
            r = self.state.requests[e.request_id]
            if e.reason in ENDS:
                text = ENDS[e.reason](
                    e.request_id,
                    len(r.output_token_ids),
                    r.max_tokens,
                    self.state.config.get("max_model_len"),
                    e.stop_id,
                )
            else:
                text = f"{e.request_id} ended: {e.reason}"
            self.say("finished", text, (e.request_id,))
        for e in self.of(ev.Sampled):
            r = self.state.requests[e.request_id]
            if r.first_token_step == self.record.step:
                after = (
                    f", {seconds(max(0.0, self.record.t1_s - arrival_s(self.trace, r)))} after it arrived"
                    if self.trace.has("time")
                    else ""
                )
                self.say("first-token", f"{e.request_id} got its first token{after}", (e.request_id,))
            c = self.kinds.get(e.request_id)
            if c is not None and c.num_draft and e.request_id not in self.made_longer:
                right = c.num_draft - e.num_rejected
                ended = r.finished and r.finish_step == self.record.step and right == len(e.token_ids)
                why = "the model chose another token" + ("" if right else " at once")
                lost = (
                    (
                        f", {e.num_rejected} {are(e.num_rejected)} thrown away: "
                        f"{'it has ended' if ended else why}"
                    )
                    if e.num_rejected
                    else ""
                )
                self.say(
                    "rejected" if e.num_rejected else "accepted",
                    (
                        f"{e.request_id} proposed {count(c.num_draft, 'draft')}, {right or 'none'} "
                        f"accepted{lost}; it got {count(len(e.token_ids), 'token')} in one step"
                    ),
                    (e.request_id,),
                )
        made: dict[str, list[ev.Proposed]] = {}
        for p in self.of(ev.Proposed):
            made.setdefault(p.by, []).append(p)
        for by, some in made.items():
            n = sum(len(p.token_ids) for p in some)
            who = [p.request_id for p in some]
            self.say(
                "proposed",
                (
                    f"{by or 'The proposer'} proposes {count(n, 'draft')} for {listed(who, 4)}, to be "
                    "checked "
                    f"in {'its' if len(who) == 1 else 'their'} next step"
                ),
                who,
            )
        held = [e.request_id for e in self.of(ev.SeatHeld)]
        if held:
            self.say(
                "seats",
                (
                    f"{listed(held)} {'keeps its seat' if len(held) == 1 else 'keep their seats'} until the "
                    "batch ends"
                ),
                held,
            )
        for e in self.of(ev.SeatsFreed):
            n = len(e.request_ids)
            self.say("seats", f"The batch ended: {count(n, 'seat')} {are(n)} free again", e.request_ids)

    def memory(self) -> None:
        taken: dict[str, list[ev.Evicted]] = {}
        for e in self.of(ev.Evicted):
            taken.setdefault(e.by, []).append(e)
        for by, gone in taken.items():
            ids = [e.block_id for e in gone]
            owners = list(dict.fromkeys(e.owner for e in gone if e.owner))
            if len(gone) == 1:
                e = gone[0]
                text = f"Cached block {e.block_id} went to {by}" + (
                    (
                        f": {e.owner} used it last, "
                        f"{count(e.idle_steps, 'step') + ' ago' if e.idle_steps else 'up to this step'}"
                    )
                    if e.owner
                    else ""
                )
            else:
                text = f"{count(len(gone), 'cached block')} went to {by}{_blocks(ids)}" + (
                    f": what {listed(owners)} left there can no longer be found" if owners else ""
                )
            self.say("evicted", text, [by, *[o for o in owners if o != by]], ids)
        self._same_size("allocated", self.of(ev.Allocated), "takes", "take", "new block")
        for e in self.of(ev.Shared):
            ids = [b for b in e.block_ids if b]
            self.say(
                "shared",
                (
                    f"{e.request_id} shares {count(len(ids), 'block')} that {are(len(ids))} already "
                    f"there{_blocks(ids)}"
                ),
                (e.request_id,),
                ids,
            )
        for e in self.of(ev.OutOfWindow):
            ids = [b for b in e.block_ids if b]
            self.say(
                "window",
                (
                    f"{e.request_id} gave back {count(len(ids), 'block')} left of its attention "
                    f"window{_blocks(ids)}{self._sinks()}"
                ),
                (e.request_id,),
                ids,
            )
        cached = self.of(ev.BlockCached)
        if cached:
            n = len(cached)
            whose = list(dict.fromkeys(e.request_id for e in cached))
            self.say(
                "cached",
                (
                    f"{count(n, 'block')} of {listed(whose)} {are(n)} full and can be found by "
                    f"{'its' if n == 1 else 'their'} hash from now on"
                ),
                whose,
                [e.block_id for e in cached],
            )
        for e in self.of(ev.Freed):
            self.say(
                "freed",
                f"{e.request_id} gave back {count(len(e.block_ids), 'block')}{_blocks(e.block_ids)}",
                (e.request_id,),
                [b for b in e.block_ids if b],
            )

    def _same_size(self, kind: str, events: list[Any], one: str, many: str, noun: str) -> None:
        """`r1 takes 2 new blocks`; requests that take equally many share a sentence."""
        sizes: dict[int, list[Any]] = {}
        for e in events:
            sizes.setdefault(len(e.block_ids), []).append(e)
        for n, same in sizes.items():
            if not n:
                continue
            ids = [b for e in same for b in e.block_ids]
            who = [e.request_id for e in same]
            text = (
                f"{who[0]} {one} {count(n, noun)}{_blocks(ids)}"
                if len(same) == 1
                else f"{listed(who)} {many} {count(n, noun)} each"
            )
            self.say(kind, text, who, ids)

    def work(self) -> None:
        record = self.record
        caps = {e.request_id for e in self.of(ev.Scheduled) if e.cap}
        padded = [c.request_id for c in record.chunks if c.padding]
        decodes = [c for c in record.chunks if c.kind == "decode" and not c.padding]
        plain = [c.request_id for c in decodes if not c.num_draft]
        if plain:
            self.say(
                "decode",
                f"{plain[0]} decodes one token"
                if len(plain) == 1
                else (
                    f"{listed(plain, 3) if len(plain) < 4 else count(len(plain), 'request')} decode one "
                    "token each"
                ),
                plain,
            )
        for c in decodes:
            if c.num_draft and c.request_id not in self.made_longer:
                self.say(
                    "decode",
                    f"{c.request_id} decodes one token and checks {count(c.num_draft, 'draft')}",
                    (c.request_id,),
                )
        for c in record.chunks:
            if c.padding or c.kind == "decode":
                continue
            if c.request_id in self.made_longer:
                longer = (
                    f"made as long as the decodes, with {count(c.num_draft, 'draft')} that stand for nothing"
                )
                self.say(
                    "padding", f"{c.request_id} has one token to compute and is {longer}", (c.request_id,)
                )
                continue
            ends = (
                ""
                if not c.sample
                else ", and is done with it"
                if c.num_recomputed
                else ", the last of its prompt"
            )
            if c.num_recomputed:
                fresh = c.num_tokens - c.num_recomputed
                text = (
                    f"{c.request_id} computes {count(c.num_recomputed, 'token')} again that it had before "
                    "its preemption"
                )
                self.say("recomputes", text + (f", and {fresh} more" if fresh else ends), (c.request_id,))
            elif c.request_id not in caps:
                self.say(
                    "prefill",
                    (
                        f"{c.request_id} prefills {count(c.num_tokens, 'token')}, positions {c.start} to "
                        f"{c.start + c.num_tokens - 1}{ends}"
                    )
                    if c.num_tokens > 1
                    else f"{c.request_id} prefills 1 token, position {c.start}{ends}",
                    (c.request_id,),
                )
        if padded:
            self.say(
                "padding",
                (
                    f"{listed(padded)} {'is' if len(padded) == 1 else 'are'} finished and computed on, the "
                    "result thrown away: the batch has not ended"
                ),
                padded,
            )
        if record.num_padding_tokens:
            n = record.num_padding_tokens
            self.say(
                "padding", f"{count(n, 'token')} {are(n)} computed only to bring the prompts to one length"
            )
        total = sum(c.num_tokens for c in record.chunks) + record.num_padding_tokens
        if not record.chunks:
            self.say("step", "Nothing was computed in this step")
        else:
            took = (
                f" in {seconds(record.t1_s - record.t0_s)} ({record.clock})" if self.trace.has("time") else ""
            )
            self.say(
                "step",
                f"The step computed {count(total, 'token')} of {count(len(record.chunks), 'request')}{took}",
            )
            if told := experts.sentence(record):
                self.say("step", told)


COPIES = {"swap-out": "to the host", "swap-in": "from the host", "copy": "on the device"}


def copies_told(record: StepRecord) -> str:
    """The step's copies, one kind after the other, and how much of each lay beside the pass.

    Empty where nothing was copied.
    """
    told = []
    for what, where in COPIES.items():
        mine = [s for s in record.spans if s.what == what]
        if mine:
            total, beside = _copy_times(record, what)
            told.append(
                f"{count(sum(s.num_blocks for s in mine), 'block')} {where} in {seconds(total)}{beside}"
            )
    return f"Copied ({record.clock}): " + "; ".join(told) if told else ""


def _copy_times(record: StepRecord, what: str) -> tuple[float, str]:
    """Seconds of the step's copies of that kind, and in words how much of them lay beside the pass."""
    mine = [s for s in record.spans if s.what == what]
    total = sum(s.end_s - s.start_s for s in mine)
    beside = sum(
        max(0.0, min(s.end_s, p.end_s) - max(s.start_s, p.start_s))
        for s in mine
        for p in record.spans
        if p.what == "pass"
    )
    return total, f", {100 * beside / total:.0f} % of it beside the pass" if total else ""


def explain_record(trace: Trace, record: StepRecord, state: State | None = None) -> list[Sentence]:
    """The sentences of one record.

    `state` is the state after it (default: the trace's own); events of a step still to come are not read.
    """
    return _Step(trace, record, trace.state(record.step) if state is None else state).tell()


def explain_event(trace: Trace, record: StepRecord, index: int, state: State | None = None) -> Sentence:
    """Event number `index` of the record in one sentence: for a cursor that walks through a step.

    `state` as in `explain_record`. Raises IndexError.
    """
    if not 0 <= index < len(record.events):
        raise IndexError(f"step {record.step} has events 0..{len(record.events) - 1}, not {index}")
    e: Any = record.events[index]
    told = _Step(trace, record, trace.state(record.step) if state is None else state)
    if isinstance(e, ev.Executed):
        n, total = len(record.chunks), sum(c.num_tokens for c in record.chunks) + record.num_padding_tokens
        return Sentence(
            "step",
            f"All is decided: the forward pass computes {count(total, 'token')} of {count(n, 'request')}"
            if n
            else "All is decided: there is nothing to compute",
        )
    if isinstance(e, ev.Sampled):
        ids = listed(e.token_ids, 6)
        text = (
            f"{e.request_id} got {'token' if len(e.token_ids) == 1 else 'tokens'} {ids}"
            if e.token_ids
            else f"{e.request_id} got no token"
        )
        return Sentence(
            "decode",
            text
            + (
                f"; {count(e.num_rejected, 'draft')} {are(e.num_rejected)} thrown away"
                if e.num_rejected
                else ""
            ),
            (e.request_id,),
        )
    if isinstance(e, ev.Scored):
        return Sentence(
            "decode",
            (
                f"Beam {e.request_id} has its {count(len(e.token_ids), 'candidate')}, best first: tokens "
                f"{listed(e.token_ids, 6)}"
            ),
            (e.request_id,),
        )
    if isinstance(e, ev.Proposed):
        return Sentence(
            "proposed",
            (
                f"{e.by or 'The proposer'} proposes {count(len(e.token_ids), 'draft')} for {e.request_id}: "
                f"tokens {listed(e.token_ids, 6)}"
            ),
            (e.request_id,),
        )
    if isinstance(e, ev.Scheduled):
        told.chunks()
        capped = next((s for s in told.said if s.request_ids == (e.request_id,)), None)
        last = e.start + e.num_tokens - 1
        where = f"position {e.start}" if e.num_tokens == 1 else f"positions {e.start} to {last}"
        taken_back = (
            ", taken back later in this step"
            if e.request_id not in told.kinds
            else ", only as padding"
            if e.padding
            else ""
        )
        return capped or Sentence(
            "prefill" if e.num_tokens > 1 else "decode",
            f"{e.request_id} takes {count(e.num_tokens, 'token')} of this step, {where}{taken_back}",
            (e.request_id,),
        )
    told.by_type = {type(e): [e]}
    for part in (told.preemptions, told.entrance, told.waits, told.admissions, told.results, told.memory):
        part()
    own = getattr(e, "request_id", None)
    said = [
        s
        for s in told.said
        if s.kind != "waits" or (isinstance(e, ev.NotAdmitted) and s.request_ids == (own,))
    ]
    if not said:
        raise AssertionError(f"explain has no words for {type(e).__name__}")
    return said[0]


def explain(trace: Trace, step: int) -> list[Sentence]:
    """What step `step` did and why, in sentences, the most important first.

    Step 0 is the start, before anything happened: an empty list.

    Raises IndexError if the trace has no such step.
    """
    if step == 0:
        return []
    return explain_record(trace, trace.record(step))
