"""Who goes first and who loses its blocks first. A policy ranks; it can't change anything: it sees read-only `RequestView`s.

The request with the lowest rank goes first, the one with the highest loses its blocks first; ties end in arrival order. The short
form is a function typed in a cell:

    @cb.policy
    def sjf(r, now):
        return r.num_remaining
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from cbviz.config import ConfigError
from cbviz.core.request import Request, RequestView
from cbviz.messages import RequestSpec


class PolicyError(RuntimeError):
    """A policy raised or returned something that can't be ranked. Names the policy and the request; the engine's state is untouched."""


class Policy:
    """Base of all policies. Override `rank`; optionally `admit`.

    `static`: a waiting request's rank never changes, so the queue is sorted once. `victim`: the victim rule it implies
    (`last`: the last of the running queue; `rank`: the highest rank).
    """

    name = "fcfs"
    title = "First come, first served"
    summary = "In order of arrival."
    static = True
    victim = "rank"

    def rank(self, r: RequestView, now: float) -> Any:
        """Lowest first. Any values that compare with each other."""
        return 0

    def admit(self, r: RequestView, now: float) -> bool:
        """False: the head of the queue may not be admitted in this step."""
        return True


class Fcfs(Policy):
    """First come, first served; the last of the running queue is preempted first (vLLM)."""

    victim = "last"


class Priority(Policy):
    name = "priority"
    title = "Priority"
    summary = "Smaller priority number first, ties by arrival (vLLM's --scheduling-policy priority)."

    def rank(self, r: RequestView, now: float) -> Any:
        return r.priority


class Sjf(Policy):
    name = "sjf"
    title = "Shortest job first"
    summary = "Fewest tokens still to compute first: of the prompt, and of the output up to its known length or max_tokens."
    static = False

    def rank(self, r: RequestView, now: float) -> Any:
        return r.num_remaining


POLICIES: dict[str, Policy] = {p.name: p for p in (Fcfs(), Priority(), Sjf())}

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
        raise ConfigError(f"policy is {name!r}, it must be one of {', '.join(POLICIES)}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    return found


class _FunctionPolicy(Policy):
    static = False

    def __init__(self, f: Callable[[RequestView, float], Any]) -> None:
        self._f = f
        self.name = f.__name__
        self.title = f.__name__.replace("_", " ")
        self.summary = (f.__doc__ or "A policy typed in a cell.").strip().splitlines()[0]

    def rank(self, r: RequestView, now: float) -> Any:
        return self._f(r, now)


def policy(f: Any) -> Any:
    """Registers a policy: a function `(r, now) -> rank`, or a class with `rank`. Running the cell again replaces it.

    It is tried on a few made-up requests first, so a mistake shows in the cell. Raises PolicyError.
    """
    made: Policy
    if isinstance(f, type):
        made = f() if issubclass(f, Policy) else type(f.__name__, (f, Policy), {"static": False})()
        if "name" not in vars(f):
            made.name = f.__name__
    elif callable(f):
        made = _FunctionPolicy(f)
    else:
        raise PolicyError(f"a policy is a function (r, now) or a class with rank(r, now), not {type(f).__name__}")
    _try(made)
    POLICIES[made.name] = made
    return f


def _try(p: Policy) -> None:
    """Ranks made-up requests twice: the ranks must compare with each other and be the same both times."""
    requests = [Request(RequestSpec(f"try{i}", tuple(range(1, 5 + 7 * i)), 4 + i, arrival_s=0.5 * i, priority=i % 2), i, frozenset()) for i in range(4)]
    first = [rank_of(p, r, 2.0) for r in requests]
    try:
        sorted(first)
    except TypeError as e:
        raise PolicyError(f"policy {p.name}: its ranks don't compare with each other ({e}); return numbers, or tuples of them") from None
    if [rank_of(p, r, 2.0) for r in requests] != first:
        raise PolicyError(f"policy {p.name} gives another rank when asked again with nothing changed: a policy must be a function of (r, now) alone")
    if not isinstance(p.admit(requests[0].view, 2.0), bool):
        raise PolicyError(f"policy {p.name}: admit must return True or False")


def rank_of(p: Policy, r: Request, now: float) -> Any:
    """The rank, checked. Raises PolicyError naming policy and request."""
    try:
        rank = p.rank(r.view, now)
    except Exception as e:
        raise PolicyError(f"policy {p.name} failed on request {r.request_id}: {type(e).__name__}: {e}") from e
    if rank is None or rank != rank:
        raise PolicyError(f"policy {p.name} ranked request {r.request_id} {rank!r}: return something that can be ordered")
    return rank
