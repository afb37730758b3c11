"""Who goes first and who loses its blocks first.

A policy ranks; it can't change anything: it sees read-only `RequestView`s.

The request with the lowest rank goes first, the one with the highest loses its blocks first; ties end in
arrival order. The short form is a function typed in a cell:

    @cb.policy
    def sjf(r, now):
        return r.num_remaining
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from cbviz.config import ConfigError
from cbviz.core.policies import (
    Ageing,
    Deadline,
    DfsWeight,
    ExpertOverlap,
    FairShare,
    Fcfs,
    LongestPrefix,
    Priority,
    Sjf,
    SjfPredicted,
    SjfWrong,
    Srpt,
)
from cbviz.core.ranking import Policy, PolicyError
from cbviz.core.request import Request, RequestView
from cbviz.messages import RequestSpec

POLICIES: dict[str, Policy] = {
    p.name: p
    for p in (
        Fcfs(),
        Priority(),
        Ageing(),
        Sjf(),
        Srpt(),
        SjfPredicted(),
        SjfWrong(),
        Deadline(),
        LongestPrefix(),
        DfsWeight(),
        FairShare(),
        ExpertOverlap(),
    )
}

VICTIMS: dict[str, str] = {
    "policy": "as the policy ranks: the highest rank; with fcfs the last of the running queue",
    "last": "the last of the running queue (vLLM, fcfs)",
    "lowest-priority": "the largest priority number, the latest arrival among equals (vLLM, priority)",
    "least-work-lost": "the fewest computed tokens, the latest arrival among equals",
    "fewest-outputs": "the fewest output tokens, the longest prompt among equals (SGLang's retraction)",
}


def get_policy(name: str) -> Policy:
    """The registered policy. Raises ConfigError with the nearest name."""
    found = POLICIES.get(name)
    if found is None:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        raise ConfigError(
            f"policy is {name!r}, it must be one of {', '.join(POLICIES)}"
            + (f" (did you mean {near[0]!r}?)" if near else "")
        )
    return found


def check_victim(name: str | None) -> None:
    """Raises ConfigError if there is no such victim rule; None leaves it to the discipline."""
    if name is not None and name not in VICTIMS:
        near = difflib.get_close_matches(name, VICTIMS, n=1)
        raise ConfigError(
            f"victim is {name!r}, it must be one of {', '.join(VICTIMS)}"
            + (f" (did you mean {near[0]!r}?)" if near else "")
        )


class _FunctionPolicy(Policy):
    static = False
    typed = True

    def __init__(self, f: Callable[[RequestView, float], Any]) -> None:
        self._f = f
        self.name = f.__name__
        self.title = f.__name__.replace("_", " ")
        self.summary = (f.__doc__ or "A policy typed in a cell.").strip().splitlines()[0]

    def rank(self, r: RequestView, now: float) -> Any:
        return self._f(r, now)


def policy(f: Any) -> Any:
    """Registers a policy: a function `(r, now) -> rank`, or a class with any of `rank`, `rank_all` and
    `admit`. Running the cell again replaces the policy, even during a run. A policy of the same name that
    came with the package is replaced as well, until the process ends.

    It is tried on a few made-up requests first, so a mistake shows in the cell. Raises PolicyError.

    >>> import cbviz as cb
    >>> @cb.policy
    ... def longest_prompt(r, now):
    ...     return -r.num_prompt_tokens
    >>> s = cb.Session("article", runner="sim", policy="longest_prompt", max_num_seqs=1)
    >>> s.step().chunks[0].num_tokens
    99
    >>> del POLICIES["longest_prompt"]
    """
    made: Policy
    if isinstance(f, type):
        own = vars(f)
        try:
            made = f() if issubclass(f, Policy) else type(f.__name__, (f, Policy), {})()
        except Exception as e:
            raise PolicyError(f"policy {f.__name__} can't be made: {type(e).__name__}: {e}") from e
        made.typed = True
        made.static = bool(own.get("static", False))  # ranked anew in each step unless it says otherwise
        made.name = own.get("name", f.__name__)
        made.title = own.get("title", made.name.replace("_", " "))
        made.summary = own.get("summary", (f.__doc__ or "A policy typed in a cell.").strip().splitlines()[0])
    elif callable(f):
        made = _FunctionPolicy(f)
    else:
        raise PolicyError(
            f"a policy is a function (r, now) or a class with rank(r, now), not {type(f).__name__}"
        )
    _try(made)
    POLICIES[made.name] = made
    return f


def _try(p: Policy) -> None:
    """Ranks made-up requests twice: the ranks must compare with each other and be the same both times, one by
    one and as a queue.
    """
    requests = [
        Request(
            RequestSpec(f"try{i}", tuple(range(1, 5 + 7 * i)), 4 + i, arrival_s=0.5 * i, priority=i % 2),
            i,
            frozenset(),
        )
        for i in range(4)
    ]
    singly, together = [rank_of(p, r, 2.0) for r in requests], ranks_of(p, requests, 2.0)
    try:
        sorted(singly + together)
    except TypeError as e:
        raise PolicyError(
            f"policy {p.name}: its ranks don't compare with each other ({e}); return numbers, or tuples of "
            "them"
        ) from None
    if [rank_of(p, r, 2.0) for r in requests] != singly or ranks_of(p, requests, 2.0) != together:
        raise PolicyError(f"policy {p.name} {_UNSTEADY}")
    if admits(p, requests[0], 2.0) is not admits(p, requests[0], 2.0):
        raise PolicyError(
            f"policy {p.name} admits a request and then, asked again with nothing changed, does not: a "
            "policy must be a function of (r, now) alone"
        )


_UNSTEADY = (
    "gives another rank when asked again with nothing changed: a policy must be a function of (r, now) alone"
)


def admits(p: Policy, r: Request, now: float) -> bool:
    """Ask the policy whether the head of the queue may be admitted, and check the type of its answer.

    Raises PolicyError naming policy and request.
    """
    try:
        welcome = p.admit(r.view, now)
    except Exception as e:
        raise PolicyError(
            f"policy {p.name} failed in admit on request {r.request_id}: {type(e).__name__}: {e}"
        ) from e
    if not isinstance(welcome, bool):
        raise PolicyError(
            f"policy {p.name}: admit must return True or False, it returned {welcome!r} for request "
            f"{r.request_id}"
        )
    return welcome


def rank_of(p: Policy, r: Request, now: float) -> Any:
    """The rank, checked. Raises PolicyError naming policy and request."""
    try:
        rank = p.rank(r.view, now)
    except Exception as e:
        raise PolicyError(f"policy {p.name} failed on request {r.request_id}: {type(e).__name__}: {e}") from e
    return _checked(p, r, rank)


def ranks_of(p: Policy, rs: list[Request], now: float) -> list[Any]:
    """The ranks of a whole queue, checked. Raises PolicyError naming policy and request."""
    singly = type(p).rank_all is Policy.rank_all
    ranks = [rank_of(p, r, now) for r in rs] if singly else _ranked_together(p, rs, now)
    if p.typed and rs:
        # One of the queue is asked again, each in its turn: a rank that depends on more than (r, now) would
        # make a run that can't be replayed.
        around = rs[0].surroundings
        i = (around.step if around is not None else 0) % len(rs)
        again = rank_of(p, rs[i], now) if singly else _ranked_together(p, rs, now)[i]
        if again != ranks[i]:
            raise PolicyError(
                f"policy {p.name} ranked request {rs[i].request_id} {ranks[i]!r} and then {again!r}: it "
                f"{_UNSTEADY}"
            )
    return ranks


def _ranked_together(p: Policy, rs: list[Request], now: float) -> list[Any]:
    try:
        ranks = list(p.rank_all([r.view for r in rs], now))
    except Exception as e:
        raise PolicyError(
            f"policy {p.name} failed on the queue of {len(rs)} requests "
            f"({', '.join(r.request_id for r in rs[:5])}{', ...' if len(rs) > 5 else ''}): "
            f"{type(e).__name__}: {e}"
        ) from e
    if len(ranks) != len(rs):
        raise PolicyError(f"policy {p.name} gave {len(ranks)} ranks for {len(rs)} requests")
    return [_checked(p, r, rank) for r, rank in zip(rs, ranks, strict=True)]


def _checked(p: Policy, r: Request, rank: Any) -> Any:
    try:
        good = rank is not None and bool(rank == rank)  # NaN is not
    except Exception:
        good = False
    if not good:
        raise PolicyError(
            f"policy {p.name} ranked request {r.request_id} {rank!r}: return something that can be "
            "ordered, such as a number or a tuple of numbers"
        )
    return rank
