"""The article's linear cost models, by name.

Own what a token and a step cost there; know no device, no model shape and no schedule.

The tutorial that cbviz began from (`StaticBatchingScheduler` against `ContinuousBatchingScheduler`, 20
requests, seed 42, 2,160 output tokens, 975 prompt tokens) sleeps for a time that is linear in the batch. Its
figures follow from these charges, each made in the step named:

`ArticleCost`, in milliseconds, no term for the step itself:
    1 for each computed token, prompt or output;
    2 for a request whose prompt ends in this step (which also yields its first output token);
    5 for each decoding request.
  A request with a prompt of P and an output of N tokens so costs P + 2 in its prefill and 6 in each of its N
  - 1 decode steps, whoever shares its batch: 975 + 20 x 2 + 2,140 x 6 = 13,855 ms under any schedule. Weights
  are never shared, so batching cannot pay. `charge_prefill=False` is the listing's fault: its continuous
  scheduler moves a request from PREFILL to DECODE before the forward pass, so the prefill step is charged as
  one more decode: 2,160 x 6 = 12,960 ms.

`ArticleSharedCost`: weights are read once a step:
    5 ms for a step in which anything is computed, 0.1 ms for each computed token, prompt or output (padding
    included).
  Static at 8 seats 555 steps, 3.087 s; continuous at 8 364 steps, 2.132 s; static at 4 815 steps, 4.386 s;
  continuous at 4 581 steps, 3.216 s.

A chunk is a decode if it computes one token (drafts aside) after at least one other, a finished row that is
still computed included; any other chunk belongs to a prefill. A plan does not say more, so a prompt's chunk
of a single token is priced as a decode. Modelled, not measured; `tests/cost/test_article.py` replays all six
figures.
"""

from __future__ import annotations

from cbviz.messages import SchedulerOutput, StepCost


class ArticleCost:
    """1 ms a token, 5 ms a decoding request, 2 ms a prompt. Linear in the batch."""

    name = "article"

    def __init__(self, charge_prefill: bool = True) -> None:
        self.charge_prefill = charge_prefill
        """False: as in the faulty listing, a prompt is never paid for and its step is priced as a decode."""

    def price(self, plan: SchedulerOutput) -> StepCost:
        """Modelled time of one step; no work is counted."""
        ms = plan.num_padding_tokens if self.charge_prefill else 0
        for c in plan.chunks:
            n = c.num_tokens
            if c.start and n - c.num_draft == 1:
                ms += n + 5
            elif self.charge_prefill:
                ms += n + 2 if c.sample else n
            elif c.sample:
                ms += 6
        return StepCost(compute_s=ms / 1000, total_s=ms / 1000)


class ArticleSharedCost:
    """5 ms a step, 0.1 ms a token: the article's model with the weights read once a step."""

    name = "article-shared"

    def price(self, plan: SchedulerOutput) -> StepCost:
        """Modelled time of one step; no work is counted. A plan without tokens costs nothing."""
        num_tokens = plan.num_padding_tokens
        for c in plan.chunks:
            num_tokens += c.num_tokens
        if not num_tokens:
            return StepCost()
        compute_s = 0.0001 * num_tokens
        return StepCost(compute_s=compute_s, overhead_s=0.005, total_s=0.005 + compute_s)


__all__ = ["ArticleCost", "ArticleSharedCost"]
