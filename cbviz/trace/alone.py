"""A request among others against the same request alone: what must be computed again for that, read from the
trace, and what came out, in figures and sentences.

Owns the reading (how a request was cut into chunks, who shared a step) and the telling. Computes nothing:
`Session.alone` has the runner do that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cbviz import events as ev
from cbviz.trace.trace import Cursor, Trace

Part = tuple[list[int], int, int]
"""Token ids of a sequence, and which of them a chunk computes: first position, number."""


@dataclass(frozen=True)
class Life:
    """How a request was computed.

    `cuts`: first position and tokens of each chunk that its keys and values come from, in order of position;
    `origin`: the step of each, 0 where a prefix hit gave them. `places`: of its outputs that a chunk drew,
    with their steps; none of a beam, whose tokens are chosen among several. `table`: where its keys and
    values lie, or lay last.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    cuts: list[tuple[int, int]]
    origin: list[int]
    places: dict[int, int]
    table: list[int]


def life(trace: Trace, request_id: str) -> Life:
    """Raises KeyError for a request that is not there, ValueError for one that nothing was computed of yet."""
    end = trace.state()
    r = end.request(request_id)
    if r.spec is None:
        raise ValueError(f"{request_id}: this trace does not hold its prompt")
    ids = [*r.spec.prompt_token_ids, *r.output_token_ids]
    cuts: list[tuple[int, int]] = []
    origin: list[int] = []
    last = 0
    for record in trace.records:
        for c in record.chunks:
            if c.request_id != request_id or c.padding:
                continue
            last = record.step
            while cuts and cuts[-1][0] >= c.start:
                cuts.pop()
                origin.pop()
            if cuts and sum(cuts[-1]) > c.start:
                cuts[-1] = (cuts[-1][0], c.start - cuts[-1][0])
            covered = sum(cuts[-1]) if cuts else 0
            if covered < c.start:
                cuts.append((covered, c.start - covered))
                origin.append(0)
            if (n := min(c.num_tokens, len(ids) - c.start)) > 0:
                cuts.append((c.start, n))
                origin.append(record.step)
    if not cuts:
        raise ValueError(f"{request_id}: nothing was computed of it yet")
    if (
        cuts[-1][1] > 1 and cuts[-1][0] >= r.num_prompt_tokens
    ):  # drafts that were taken and need no key of their own yet
        cuts[-1] = (cuts[-1][0], max(1, min(cuts[-1][1], len(ids) - 1 - cuts[-1][0])))
    events = trace.record(last).events
    at = next((i for i, e in enumerate(events) if isinstance(e, ev.Executed)), len(events))
    table = list(trace.state(Cursor(last, at) if at else last - 1).request(request_id).block_ids)
    places = (
        {r.num_prompt_tokens + i: step for i, step in enumerate(r.output_steps)}
        if r.spec.sampling.beam_width < 2
        else {}
    )
    return Life(request_id, ids, r.num_prompt_tokens, cuts, origin, places, table)


def parts_of(trace: Trace, request_id: str, step: int) -> tuple[list[Part], int, list[str]]:
    """The chunks of a step, each with its sequence's ids as they were; which of them is the request's; and
    whose they are. Raises ValueError if it took no part.
    """
    end = trace.state()
    parts: list[Part] = []
    ids: list[str] = []
    for c in trace.record(step).chunks:
        r = end.requests[c.request_id]
        if c.padding or r.spec is None:
            continue
        known = [
            *r.spec.prompt_token_ids,
            *(t for t, made in zip(r.output_token_ids, r.output_steps) if made < step),
        ]
        if (n := min(c.num_tokens, len(known) - c.start)) > 0:
            parts.append((known, c.start, n))
            ids.append(c.request_id)
    if request_id not in ids:
        raise ValueError(f"{request_id} computed nothing in step {step}")
    return parts, ids.index(request_id), ids


def last_step_of(trace: Trace, request_id: str, step: int) -> int | None:
    """The last step, up to `step`, in which the request computed something."""
    return next(
        (
            r.step
            for r in reversed(trace.records[:step])
            if any(c.request_id == request_id and not c.padding for c in r.chunks)
        ),
        None,
    )


@dataclass(frozen=True)
class TokenPair:
    """One output token: what the request said among others, and what it says alone.

    `gap`: lead of the best over the second, alone. Nats.
    """

    position: int
    step: int
    said: int
    alone: int
    logprob: float | None
    logprob_alone: float
    gap: float
    text: str = ""
    text_alone: str = ""

    @property
    def apart(self) -> float:
        """Of the two log-probabilities; 0: equal to the bit, as far as they were recorded."""
        return abs(self.logprob - self.logprob_alone) if self.logprob is not None else 0.0


@dataclass(frozen=True)
class AgainstAlone:
    """What `Session.alone` found.

    Arrays are [layers, positions]; NaN: the cache no longer holds that position.
    """

    life: Life
    keys: np.ndarray
    values: np.ndarray
    ulps: np.ndarray
    tokens: list[TokenPair]
    step: int
    """The step that is looked into."""
    mates: list[str]
    """Who took part in it, the request itself aside."""
    inside: Any
    """`model.divergence.StepDifference`: that step twice, in company and alone."""
    kernels: str
    promised: bool
    """Whether these operators promise that nothing differs."""
    notes: list[str] = field(default_factory=list)

    @property
    def apart(self) -> np.ndarray:
        """[layers, positions]: the larger of keys' and values' difference."""
        return np.fmax(self.keys, self.values)

    @property
    def largest(self) -> float:
        """Over all layers and positions that are still there."""
        seen = self.apart[~np.isnan(self.apart)]
        return float(seen.max()) if seen.size else 0.0

    @property
    def changed(self) -> list[TokenPair]:
        """Tokens that alone would be others. Every one is drawn after the same tokens as in company."""
        return [t for t in self.tokens if t.said != t.alone]

    @property
    def equal(self) -> bool:
        """Not a bit differs in what can be compared."""
        tokens = all(t.apart == 0 for t in self.tokens) and not self.changed
        return (
            tokens
            and not self.largest
            and not any(d.largest for d in (*self.inside.keys_values, self.inside.logits))
        )

    @property
    def first(self) -> tuple[int, int] | None:
        """Position and layer of the first difference: the earliest position, in it the lowest layer."""
        found = np.argwhere(np.nan_to_num(self.apart.T) > 0)
        return (int(found[0][0]), int(found[0][1])) if len(found) else None

    @property
    def closest(self) -> TokenPair | None:
        """The token whose two best candidates were closest: the one that would change first."""
        return min(self.tokens, key=lambda t: t.gap, default=None)

    def sentences(self) -> list[str]:
        """For people, the most important first."""
        rid, layers = self.life.request_id, self.apart.shape[0]
        held = int((~np.isnan(self.apart[0])).sum()) if layers else 0
        whom = (
            "nobody"
            if not self.mates
            else self.mates[0]
            if len(self.mates) == 1
            else f"{len(self.mates)} others"
        )
        out: list[str] = []
        if self.equal:
            said = (
                f", and {_count(len(self.tokens), 'token')} with their log-probabilities"
                if self.tokens
                else ""
            )
            out.append(
                f"{rid} alone is bit for bit {rid} among others: {held} positions in {layers} layers{said}."
            )
        elif bad := self.changed:
            t = bad[0]
            out.append(
                f"Alone, {rid} would say another token at position {t.position} (step {t.step}): "
                f"{t.text_alone!r} and not {t.text!r}. There the best led by only "
                f"{_small(t.gap)} nats."
            )
        else:
            said = (
                f"says the same {_count(len(self.tokens), 'token')}, but its"
                if self.tokens
                else "is not the same: its"
            )
            out.append(f"Alone, {rid} {said} numbers differ from those among others.")
        if (first := self.first) is not None:
            ulps = float(np.nanmax(self.ulps))
            out.append(
                f"Keys and values differ first at position {first[0]} in layer {first[1]}, and by up to "
                f"{_small(self.largest)} ({_units(ulps)}) over "
                f"{held} positions and {layers} layers."
            )
        pairs = [t for t in self.tokens if t.logprob is not None]
        if pairs and not self.equal:
            worst = max(pairs, key=lambda t: t.apart)
            out.append(f"Log-probabilities of its tokens differ by up to {_small(worst.apart)} nats.")
        if (c := self.closest) is not None:
            out.append(
                f"Its closest call: at position {c.position} the best token led by {_small(c.gap)} nats."
            )
        s = self.inside
        if (d := s.first) is None:
            out.append(
                f"Step {self.step}, together with {whom}: products of {s.rows[0]} rows instead of "
                f"{s.rows[1]}, and every number of {rid} comes out the same."
            )
        else:
            where = f"layer {d.layer}, {d.op}" if d.layer >= 0 else d.op
            out.append(
                f"Step {self.step}, together with {whom}: products of {s.rows[0]} rows instead of "
                f"{s.rows[1]}. The first that differs: {where}, by {_small(d.largest)} "
                f"({_units(d.ulps)}); in the end the logits differ by {_small(s.logits.largest)}, and the "
                "best token "
                f"{'stays' if s.same_best else 'changes'}."
            )
        out.append(
            f"Operators: {self.kernels}; {'they promise' if self.promised else 'they do not promise'} that "
            "nothing depends on batch-mates."
        )
        return out + self.notes


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _units(ulps: float) -> str:
    return f"{ulps:.1f}".removesuffix(".0") + f" unit{'' if ulps == 1 else 's'} in the last place"


def _small(x: float) -> str:
    return "0" if x == 0 else f"{x:.1e}" if abs(x) < 1e-3 else f"{x:.3g}"
