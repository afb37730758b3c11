"""From logits to tokens: greedy, temperature, top-k, top-p.

Owns the choice of a token. Randomness is a pure function of (seed, request id, position): no generator has a
state, so what is drawn does not depend on who shares the batch or on the order of steps, and a step computed
again draws the same.

Drafts are checked by the same rule (`num_accepted`): at each position the model draws its own token with that
position's number, and the draft is right if it is that token. So with and without drafts, and whoever
proposes them, the same tokens come out, not only equally distributed ones. A draft d that does not depend on
the number is accepted with the model's probability p(d), and what is drawn instead has p without d: the rule
min(1, p/q) with its residual (Leviathan et al., ICML 2023) for a q that is all on d.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from cbviz.messages import Sampling
from cbviz.model.hub import ModelError
from cbviz.model.ops import choose


@dataclass(frozen=True, slots=True)
class Draw:
    """Which random number a row gets: `position` is the place of the new token in its sequence."""

    sampling: Sampling
    seed: int
    request_id: str
    position: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """`logprob`: of the token under the model's own distribution (temperature 1, nothing cut), in nats.

    `gap`: best minus second best, in nats.
    """

    token_id: int
    logprob: float
    gap: float


def uniform(seed: int, request_id: str, position: int) -> float:
    """A number in [0, 1) with 53 random bits: the hash of its three arguments."""
    text = request_id.encode()
    digest = blake2b(b"%d\0%d\0" % (seed, position) + text, digest_size=8, person=b"cbviz-sample").digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def filtered_probs(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """What is drawn from: token ids, best first (ties: smaller id first), and their probabilities (float64,
    sum 1).

    logits [V]; temperature > 0. top-k keeps the k best; of these, top-p keeps the fewest best whose
    probabilities reach p.
    """
    order = torch.sort(logits, descending=True, stable=True)
    values, ids = order.values.double() / sampling.temperature, order.indices
    if sampling.top_k:
        values, ids = values[: sampling.top_k], ids[: sampling.top_k]
    probs = torch.softmax(values, dim=0)
    if sampling.top_p < 1:
        before = probs.cumsum(0) - probs
        keep = max(1, int((before < sampling.top_p).sum()))  # the first always, but in a row of NaN
        probs, ids = probs[:keep] / probs[:keep].sum(), ids[:keep]
    return ids, probs


def draw_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    chance: torch.Tensor,
) -> torch.Tensor:
    """A token a row, drawn as `filtered_probs` says, all rows at once and without the host: ids [R] int64.

    logits [R, V]; the others [R] on the same device: float64, but `top_k` int64. `chance` in [0, 1) picks
    from the cumulated probabilities.
    """
    order = torch.sort(logits, dim=-1, descending=True, stable=True)
    place = torch.arange(logits.shape[-1], device=logits.device)
    kept = (top_k[:, None] == 0) | (place < top_k[:, None])
    probs = torch.softmax(
        (order.values.double() / temperature[:, None]).masked_fill(~kept, -torch.inf), dim=-1
    )
    kept = kept & ((probs.cumsum(-1) - probs < top_p[:, None]) | (top_p[:, None] >= 1))
    probs = probs.masked_fill(~kept, 0)
    probs = torch.where(top_p[:, None] < 1, probs / probs.sum(-1, keepdim=True), probs)
    at = torch.searchsorted(probs.cumsum(-1), chance[:, None].contiguous(), right=True)
    # Of a row of NaN none is kept; a card that gathers outside a row can't be used again.
    return order.indices.gather(-1, torch.minimum(at, kept.sum(-1, keepdim=True) - 1).clamp(min=0))[:, 0]


def num_accepted(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many leading drafts are what the model chose. tokens: [1 + len(drafts)], each drawn as if the
    drafts before it were right.
    """
    n = 0
    while n < len(drafts) and drafts[n] == tokens[n]:
        n += 1
    return n


@torch.inference_mode()
def sample(
    logits: torch.Tensor,
    draws: Sequence[Draw],
    choose: Callable[[torch.Tensor], tuple[list[int], list[float], list[float]]] = choose,
) -> list[Sampled]:
    """One token a row. logits [R, V] float32; temperature 0 takes the best (ties: the smaller id).

    `choose`: see `OpSet.choose`. Raises as `checked`.
    """
    if not draws:
        return []
    tokens, gaps, log_totals = choose(logits)
    for row, d in enumerate(draws):
        if d.sampling.temperature > 0:
            ids, probs = filtered_probs(logits[row], d.sampling)
            at = int(
                torch.searchsorted(probs.cumsum(0), uniform(d.seed, d.request_id, d.position), right=True)
            )
            tokens[row] = int(ids[min(at, len(ids) - 1)])
    chosen = torch.tensor(tokens, device=logits.device)
    values = logits.gather(-1, chosen[:, None])[:, 0].tolist()
    return checked(
        [Sampled(t, v - total, g) for t, v, total, g in zip(tokens, values, log_totals, gaps, strict=True)],
        draws,
    )


def checked(sampled: list[Sampled], draws: Sequence[Draw]) -> list[Sampled]:
    """The same, if the logits were numbers. Raises ModelError if they were not."""
    for d, s in zip(draws, sampled, strict=True):
        if not math.isfinite(s.logprob):
            raise ModelError(
                f"{d.request_id}: the logits for position {d.position} are no finite numbers; 16 bits may "
                "have overflowed: set precision to 'exact'"
            )
    return sampled
