"""The policies that come with cbviz, each after a paper or an engine."""

from __future__ import annotations

from typing import Any
from zlib import crc32

from cbviz.core.ranking import Policy
from cbviz.core.request import RequestView


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
    Overlap is the mean over layers of the two shares' common part, 0..1. A request without history is assumed
    to use all experts equally. It hardly pays: with four seats on the tiny mixture (8 experts, 2 a token) and
    four kinds of text it saves some 7 % of the weight bytes a token, and one seat more under fcfs saves 13 %
    (`cbviz bench techniques --only moe` counts both). A lone kind of request may wait long; nothing here
    ages.
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
