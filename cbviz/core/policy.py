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
from zlib import crc32

from cbviz.config import ConfigError
from cbviz.core.request import Request, RequestView
from cbviz.messages import RequestSpec


class PolicyError(RuntimeError):
    """A policy raised or returned something that can't be ranked.

    Names the policy and the request; the engine's state is untouched.
    """


class Policy:
    """Base of all policies. Override `rank`; optionally `admit`.

    `static`: a waiting request's rank never changes, so the queue is sorted once. `victim`: the victim rule
    it implies (`last`: the last of the running queue; `rank`: the highest rank). `by_session`: all requests of
    a session always have the same rank, so a long queue is ranked session by session. `typed`: a user's, so it is
    asked again now and then, to see that it gives the same answer.
    """

    name = "fcfs"
    title = "First come, first served"
    summary = "In order of arrival."
    static = True
    typed = False
    by_session = False
    victim = "rank"

    @property
    def ranks_sessions(self) -> bool:
        """May the queue be ranked session by session? A user's policy may rank otherwise than its base."""
        return self.by_session and not self.typed

    def rank(self, r: RequestView, now: float) -> Any:
        """Lowest first. Any values that compare with each other."""
        return 0

    def rank_all(self, rs: list[RequestView], now: float) -> list[Any]:
        """Ranks of the whole waiting queue, for orders that depend on the others. Default: one by one."""
        return [self.rank(r, now) for r in rs]

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
    summary = (
        "Fewest tokens still to compute first: of the prompt, and of the output up to its known length or "
        "max_tokens."
    )

    def rank(self, r: RequestView, now: float) -> Any:
        return r.num_remaining


class Srpt(Policy):
    name = "srpt"
    title = "Shortest remaining time first"
    summary = "Fewest output tokens still to come first, also when somebody must be preempted."

    def rank(self, r: RequestView, now: float) -> Any:
        end = r.output_len if r.output_len is not None else r.max_tokens
        return end - r.num_output_tokens


class SjfPredicted(Policy):
    """Shortest job first on a prediction that is right on average: the true length (or max_tokens) times 2^e,
    e in -1..1 drawn from the request's id.
    """

    name = "sjf-predicted"
    title = "Shortest job first, predicted lengths"
    summary = "As sjf with the output length guessed: off by a factor of up to 2 either way."

    def rank(self, r: RequestView, now: float) -> Any:
        end = r.output_len if r.output_len is not None else r.max_tokens
        return r.num_prompt_tokens + end * 2 ** (crc32(r.request_id.encode()) % 2001 / 1000 - 1)


class SjfWrong(Policy):
    name = "sjf-wrong"
    title = "Shortest job first, wrong lengths"
    summary = (
        "As sjf with predictions turned round: the longest output is taken for the shortest. What a bad "
        "predictor costs."
    )

    def rank(self, r: RequestView, now: float) -> Any:
        return -(r.output_len if r.output_len is not None else r.max_tokens)


class Ageing(Policy):
    """Priority with ageing: each AGE_STEPS steps of waiting are worth one priority level, so nobody starves."""

    name = "ageing"
    title = "Priority with ageing"
    summary = "Smaller priority number first, but every 25 steps of waiting count as one level."
    static = False
    AGE_STEPS = 25

    def rank(self, r: RequestView, now: float) -> Any:
        return r.priority - r.num_waiting_steps / self.AGE_STEPS


class Deadline(Policy):
    """Earliest deadline first (Liu and Layland 1973). Requests without a deadline go last."""

    name = "deadline"
    title = "Earliest deadline first"
    summary = "The earliest deadline_s first; requests without one go last."

    def rank(self, r: RequestView, now: float) -> Any:
        return r.deadline_s if r.deadline_s is not None else float("inf")


class LongestPrefix(Policy):
    """Longest prefix match (SGLang's `lpm`, RadixAttention paper): who finds most of its tokens in the cache
    goes first.

    As there, one of several that begin alike and are not cached yet goes ahead, the others go last and find
    its blocks when it is through; and a queue of more than 128 is not ranked at all.
    """

    name = "lpm"
    title = "Longest prefix match"
    summary = (
        "Whoever finds most of its tokens in the prefix cache goes first; of several that share an "
        "uncached beginning, one goes ahead and the others wait for its blocks."
    )
    static = False
    victim = "last"
    ALIKE_TOKENS = 32
    """Beginnings of that many equal tokens are alike (SGLang's IN_BATCH_PREFIX_CACHING thresholds)."""
    MOST_RANKED = 128

    def rank(self, r: RequestView, now: float) -> Any:
        return -r.num_prefix_tokens

    def rank_all(self, rs: list[RequestView], now: float) -> list[Any]:
        if len(rs) > self.MOST_RANKED:
            return [0] * len(rs)
        ranks: list[float] = []
        begun: set[tuple[int, ...]] = set()
        for r in rs:
            cached = r.num_prefix_tokens
            ranks.append(-cached)
            begins = r.prompt_token_ids[: self.ALIKE_TOKENS]
            if cached <= self.ALIKE_TOKENS == len(begins):
                if begins in begun:
                    ranks[-1] = float("inf")
                begun.add(begins)
        return ranks


class DfsWeight(Policy):
    """SGLang's `dfs-weight`: the tree of cached prefixes is walked depth first, heavier branches (more
    waiting requests) before lighter ones, so that requests under one branch are served together.
    """

    name = "dfs-weight"
    title = "Prefix tree, heaviest branch first"
    summary = "Walks the tree of cached prefixes depth first, the branch with most waiting requests first."
    static = False
    victim = "last"

    def rank_all(self, rs: list[RequestView], now: float) -> list[Any]:
        nodes: dict[tuple[int, int], int] = {}
        weight = [0]
        paths = []
        for r in rs:
            at, path = 0, []
            for b in r.prefix_block_ids:
                at = nodes.setdefault((at, b), len(weight))
                if at == len(weight):
                    weight.append(0)
                weight[at] += 1
                path.append(at)
            paths.append(path)
        # whoever goes on down a branch comes before whoever ends at its root, as there: (0, 0) is above every
        # (-weight, node)
        return [(*((-weight[n], n) for n in path), (0, 0)) for path in paths]

    def rank(self, r: RequestView, now: float) -> Any:
        return self.rank_all([r], now)[0]


class FairShare(Policy):
    """Fair share by session: the session that has been served fewest tokens goes first (Virtual Token
    Counter, OSDI 2024).

    Without its weights of prompt and output tokens, and a session that was away keeps what it did not use;
    there it is lifted to the others' level.

    The last of the running queue loses its blocks. If the session served most lost them, computing them again
    would count as service and turn the order round: two sessions could evict each other for ever.
    """

    name = "fair"
    title = "Fair share by session"
    summary = (
        "The session served the fewest tokens so far goes first; all requests without a session count as one."
    )
    static = False
    by_session = True
    victim = "last"

    def rank(self, r: RequestView, now: float) -> Any:
        return r.session_served_tokens


class ExpertOverlap(Policy):
    """Expert-aware grouping for mixtures: a waiting request goes first whose session's tokens take the
    experts that the running ones take, so that a step touches fewer distinct experts and reads fewer weights.
    Overlap is the mean over layers of the two shares' common part, 0..1. Who is unknown counts as choosing
    evenly. It hardly pays: with four seats on the tiny mixture (8 experts, 2 a token) and four kinds of text
    it saves some 7 % of the weight bytes a token, and one seat more under fcfs saves 13 % (`cbviz bench
    techniques --only moe` counts both). A lone kind of request may wait long; nothing here ages.
    """

    name = "experts"
    title = "Expert overlap"
    summary = (
        "Of a mixture of experts: whoever's session uses the experts of the running requests goes first; "
        "without experts, in order of arrival."
    )
    static = False
    victim = "last"

    def rank(self, r: RequestView, now: float) -> Any:
        return self.rank_all([r], now)[0]

    def rank_all(self, rs: list[RequestView], now: float) -> list[Any]:
        batch = rs[0].batch_expert_use if rs else ()
        ranks = []
        for r in rs:
            mine = r.expert_use or tuple((1 / len(row),) * len(row) for row in batch if row)
            # rounded: sums of shares differ in their last bits with the order in which they were added
            ranks.append(
                -round(
                    sum(min(a, b) for x, y in zip(mine, batch) for a, b in zip(x, y)) / max(1, len(batch)), 9
                )
            )
        return ranks


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
    `admit`. Running the cell again replaces it, also in a run that is on. A policy of the same name that came
    with the package is replaced as well, until the process ends.

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
    """May the head of the queue be admitted? Checked. Raises PolicyError naming policy and request."""
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
