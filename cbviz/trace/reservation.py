"""What contiguous memory would have held for the same running requests: the PagedAttention paper's figure 2
for any run, step by step. A pure function of the trace.

An allocator without blocks gives each request one piece of the pool, large enough for whatever it may become.
Per step every slot of the pool is one of

    used       holds a token's KV
    reserved   inside a request's piece, and the request will still fill it
    internal   inside a request's piece, and never filled (`paged`: the rest of a block in use, empty now)
    external   outside all pieces, while the next request that runs in the trace finds no piece large enough
    free       the rest

and `used + reserved + internal + external + free` is the pool, exactly. SCHEMES are how large a piece is;
`paged` is what the run's own blocks did. (Kwon et al., "Efficient Memory Management for Large Language Model
Serving with PagedAttention", SOSP 2023, section 3.1 and figure 2: Orca (Max), (Oracle), (Pow2).)
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from cbviz import events as ev
from cbviz.trace.accounting import executed_at
from cbviz.trace.metrics import mean
from cbviz.trace.trace import Trace

PARTS = ("used", "reserved", "internal", "external", "free")
SCHEMES = {
    "max_model_len": "one piece of max_model_len slots a request, first fit",
    "exact": "one piece of prompt + max_tokens slots a request, first fit",
    "buddy": "prompt + max_tokens rounded up to a power of two, from a buddy allocator",
    "paged": "this run's own blocks",
}
ASSUMPTIONS = (
    "The pool is as large as the run's own (its usable blocks times the block size), and the running "
    "requests are those of the trace: the other allocator "
    "preempts and delays nobody.",
    (
        "A request gets its piece when it is admitted in the trace and keeps it until it ends or is "
        "preempted "
        "there; one that finds no piece waits for it, first come first served."
    ),
    "Contiguous pieces share nothing: a prefix that the run had once counts once for each request.",
    (
        "How long an output became is taken from the whole trace; a request that had not ended by then is "
        "taken to need all of its max_tokens."
    ),
    "The last token of a request is never computed, so its slot is never used.",
    "A finished row that only keeps its seat (static batching) holds no piece.",
)
"""What the figures take for granted."""


class Held(NamedTuple):
    """The pool's slots during one step, and how many of the trace's running requests have their piece."""

    used: int
    reserved: int
    internal: int
    external: int
    free: int
    num_placed: int
    num_running: int


@dataclass(frozen=True)
class Reservation:
    """`steps[scheme][n]` is what stood during step n + 1; `shares[scheme][part]` the mean share of the pool
    over the steps in which somebody ran.
    """

    total_slots: int
    steps: dict[str, list[Held]]
    shares: dict[str, dict[str, float]]
    placed: dict[str, float | None]
    """Share of the running requests that had their piece, over all steps; None if nobody ever ran."""
    assumptions: tuple[str, ...] = ASSUMPTIONS
    sentences: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "total_slots": self.total_slots,
            "schemes": {name: SCHEMES[name] for name in self.steps},
            "parts": list(PARTS),
            "steps": {name: [list(x) for x in rows] for name, rows in self.steps.items()},
            "shares": self.shares,
            "placed": self.placed,
            "assumptions": list(self.assumptions),
            "sentences": self.sentences,
        }


class _Allocator(Protocol):
    def take(self, n: int) -> int | None: ...

    def give(self, at: int, n: int) -> None: ...

    def size_of(self, n: int) -> int: ...


class FirstFit:
    """Pieces at the lowest address where they fit; neighbours that are given back join."""

    def __init__(self, total: int) -> None:
        self.holes: list[tuple[int, int]] = [(0, total)] if total else []
        """(address, length), by address; adjacent holes are one."""

    def size_of(self, n: int) -> int:
        return n

    def take(self, n: int) -> int | None:
        for i, (at, length) in enumerate(self.holes):
            if length >= n:
                self.holes[i : i + 1] = [(at + n, length - n)] if length > n else []
                return at
        return None

    def give(self, at: int, n: int) -> None:
        insort(self.holes, (at, n))
        i = self.holes.index((at, n))
        for k in (i, i - 1):  # with the one after it, then with the one before
            if 0 <= k < len(self.holes) - 1 and self.holes[k + 1][0] == sum(self.holes[k]):
                self.holes[k : k + 2] = [(self.holes[k][0], self.holes[k][1] + self.holes[k + 1][1])]


class Buddy:
    """Pieces of powers of two, split in halves and joined with their buddies (Knowlton 1965).

    A pool that is no power of two is a row of arenas that are.
    """

    def __init__(self, total: int) -> None:
        self.free: dict[int, list[int]] = {}
        """Order -> addresses of free pieces of 2^order slots, sorted."""
        self.arenas: list[tuple[int, int]] = []
        at = 0
        for order in range(total.bit_length() - 1, -1, -1):
            if total >> order & 1:
                self.free[order] = [at]
                self.arenas.append((at, order))
                at += 1 << order

    def size_of(self, n: int) -> int:
        return 1 << (n - 1).bit_length()

    def take(self, n: int) -> int | None:
        order = (n - 1).bit_length()
        for larger in sorted(k for k, v in self.free.items() if k >= order and v):
            at = self.free[larger].pop(0)
            for k in range(larger - 1, order - 1, -1):
                insort(self.free.setdefault(k, []), at + (1 << k))
            return at
        return None

    def give(self, at: int, n: int) -> None:
        order = (n - 1).bit_length()
        base, top = next((a, k) for a, k in reversed(self.arenas) if a <= at)
        while order < top:
            buddy = base + ((at - base) ^ (1 << order))
            mates = self.free.get(order, [])
            if buddy not in mates:
                break
            mates.remove(buddy)
            at, order = min(at, buddy), order + 1
        insort(self.free.setdefault(order, []), at)


def reservation(trace: Trace) -> Reservation:
    """What each scheme would have held at every step. O(steps x running requests).

    Raises ValueError for a trace without a pool, saying which figure is missing.
    """
    total = (trace.header.num_blocks - 1) * trace.header.block_size
    if total <= 0:
        raise ValueError(
            "this trace has no pool of blocks: there is nothing to compare contiguous memory with"
        )
    limit = int(trace.header.config.get("max_model_len") or 0)
    end = trace.state()
    final, wanted = {}, {}
    for r in end.by_index:
        outputs = len(r.output_token_ids) if r.finished else r.max_tokens
        final[r.request_id] = r.num_prompt_tokens + max(0, outputs - 1)
        wanted[r.request_id] = r.num_prompt_tokens + r.max_tokens
    schemes: dict[str, tuple[_Allocator, dict[str, int]]] = {
        "exact": (FirstFit(total), wanted),
        "buddy": (Buddy(total), wanted),
    }
    if limit:
        schemes = {
            "max_model_len": (FirstFit(total), {rid: max(limit, n) for rid, n in wanted.items()}),
            **schemes,
        }
    rows = _running(trace)
    steps = {
        name: _play(allocator, sizes, final, rows, total) for name, (allocator, sizes) in schemes.items()
    }
    if trace.has("accounting"):
        steps["paged"] = [
            Held(
                s.used,
                s.reserved,
                s.partly_empty,
                s.fragmented,
                s.cached + s.free,
                len(running),
                len(running),
            )
            for s, running in zip((record.slots for record in trace), rows)
            if s.total
        ]
        if len(steps["paged"]) != len(trace):
            del steps["paged"]
    shares = {
        name: {p: mean([getattr(x, p) / total for x in held if x.num_running]) or 0.0 for p in PARTS}
        for name, held in steps.items()
    }
    placed = {
        name: sum(x.num_placed for x in held) / n if (n := sum(x.num_running for x in held)) else None
        for name, held in steps.items()
    }
    return Reservation(total, steps, shares, placed, ASSUMPTIONS, _sentences(shares, placed))


def _running(trace: Trace) -> list[dict[str, int]]:
    """For each step the requests that held memory while it ran, in order of admission, with the tokens that
    they had computed by its end.
    """
    out = []
    now: dict[str, int] = {}
    for record in trace:
        ran = {c.request_id for c in record.chunks}
        at = executed_at(record)
        for i, e in enumerate(record.events):
            if i == at:
                out.append(dict(now))
            if isinstance(e, ev.Admitted):
                now[e.request_id] = e.num_cached_tokens
            elif isinstance(e, ev.Forked):
                now.update(dict.fromkeys(e.child_ids, e.num_tokens))
            elif isinstance(e, (ev.Preempted, ev.Finished)):
                now.pop(e.request_id, None)
            elif (
                isinstance(e, ev.Scheduled) and not e.padding and e.request_id in ran and e.request_id in now
            ):
                now[e.request_id] = e.start + e.num_tokens
            elif isinstance(e, ev.Sampled) and e.request_id in now:
                now[e.request_id] -= e.num_rejected
        if len(out) < record.step:
            out.append(dict(now))
    return out


def _play(
    allocator: _Allocator,
    sizes: dict[str, int],
    final: dict[str, int],
    rows: list[dict[str, int]],
    total: int,
) -> list[Held]:
    """Gives and takes pieces as the trace's requests come and go."""
    pieces: dict[str, int] = {}
    out = []
    for running in rows:
        for rid in [x for x in pieces if x not in running]:
            allocator.give(pieces.pop(rid), sizes[rid])
        stuck = False
        for rid in running:
            if rid in pieces:
                continue
            at = allocator.take(sizes[rid])
            if at is None:
                stuck = True
                break
            pieces[rid] = at
        used = reserved = held = 0
        for rid in pieces:
            computed = running[rid]
            used += computed
            reserved += max(0, final[rid] - computed)
            held += allocator.size_of(sizes[rid])
        rest = total - held
        out.append(
            Held(
                used,
                reserved,
                held - used - reserved,
                rest if stuck else 0,
                0 if stuck else rest,
                len(pieces),
                len(running),
            )
        )
    return out


def _sentences(shares: dict[str, dict[str, float]], placed: dict[str, float | None]) -> list[str]:
    out = []
    for name, s in shares.items():
        if placed[name] is None:
            continue
        text = (
            f"{SCHEMES[name][:1].upper()}{SCHEMES[name][1:]}: {100 * s['used']:.1f} % of the pool held tokens"
        )
        waste = [
            f"{100 * s[p]:.1f} % {word}"
            for p, word in (
                ("reserved", "reserved for later"),
                ("internal", "in the empty rest of blocks" if name == "paged" else "never used"),
                ("external", "in no piece large enough"),
            )
            if s[p] > 0
        ]
        text += f" ({', '.join(waste)})" if waste else ""
        out.append(
            text
            if name == "paged"
            else f"{text}; {100 * (placed[name] or 0):.0f} % of the running requests would have had room"
        )
    return out
