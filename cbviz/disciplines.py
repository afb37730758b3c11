"""Ways of forming batches, as the rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Discipline:
    """One way of forming batches.

    A mode is a row of this table; the difference of two rows explains two modes.
    """

    name: str
    title: str
    summary: str
    """One sentence: what is different here."""
    source: str
    """Paper or engine the idea comes from."""
    admit_when: Literal["free-seat", "batch-empty"] = "free-seat"
    """`batch-empty`: nothing is admitted until every request of the last batch has ended (static batching).
    """
    reserve: Literal["on-demand", "max-tokens", "guaranteed", "estimate"] = "on-demand"
    """Which blocks a request takes at admission: those it needs now; all of prompt + max_tokens at once; none
    ahead, but it is admitted only if everybody's prompt + max_tokens still fits (TensorRT-LLM); or only if
    everybody's rest fits when each is expected to use a share of its max_tokens (SGLang's new-token ratio).
    """
    hold_seat: bool = False
    """A finished request keeps its seat until the whole batch has ended."""
    pad: bool = False
    """Finished rows are really computed until the batch ends, and prompts are padded to the longest, as
    `generate()` does.
    """
    mix: Literal["running-first", "decode-first", "prefill-first"] = "running-first"
    """Order inside a step.

    `running-first`: running requests in queue order, then admissions (vLLM v1); `decode-first`: decodes, then
    half-done prefills, then admissions (Sarathi); `prefill-first`: a step holds prefills or decodes, prefills
    win.
    """
    chunked: bool = True
    """May a prompt be split over several steps?"""
    reserve_full_isl: bool = False
    """Admit only if all known tokens fit in the free blocks now, though only a chunk is allocated."""
    victim: str = "policy"
    """Who loses its blocks when the pool is full; a name of `core.policy.VICTIMS`."""
    when_full: Literal["preempt", "retract"] = "preempt"
    """`preempt`: a running request that finds no block takes those of the victim, which goes back to its
    place in the order of arrival (vLLM, TensorRT-LLM). `retract`: before a decode step, victims lose their
    blocks until all others can take that step; they go behind the queue (SGLang).
    """
    admission_watermark: float = 0.0
    """Share of the pool that an admission leaves free."""
    trim_drafts: bool = True
    """Drafts that max_tokens leaves no room for are not computed; vLLM computes them and throws the tokens
    away.
    """
    pad_drafts: bool = False
    """While requests decode, one that is admitted with a single token to compute gets drafts that stand for
    nothing, so that all rows of the step are alike and a recorded graph fits (vLLM).
    """
    gates: tuple[str, ...] = ()
    """Further gates that an admission must pass, by their names in `core.admission.GATES`."""


_ARTICLE = "the article's StaticBatchingScheduler; FasterTransformer"
DISCIPLINES: dict[str, Discipline] = {
    d.name: d
    for d in (
        Discipline(
            "static",
            "Static batches",
            (
                "A batch is admitted when the last one is empty; a finished request leaves its seat idle "
                "until "
                "the batch ends."
            ),
            _ARTICLE,
            admit_when="batch-empty",
            reserve="max-tokens",
            hold_seat=True,
            mix="prefill-first",
            chunked=False,
        ),
        Discipline(
            "static-padded",
            "Static, padded",
            (
                "As static, and the idle rows are really computed: finished rows and padding run along, as "
                "generate() does it."
            ),
            "transformers' generate(); the Orca paper, section 3",
            admit_when="batch-empty",
            reserve="max-tokens",
            hold_seat=True,
            pad=True,
            mix="prefill-first",
            chunked=False,
        ),
        Discipline(
            "orca",
            "Orca",
            (
                "Requests join and leave at every iteration; all of prompt + max_tokens is reserved at "
                "admission."
            ),
            "Orca, OSDI 2022",
            reserve="max-tokens",
            mix="running-first",
            chunked=False,
        ),
        Discipline(
            "paged",
            "Paged",
            (
                "Blocks are taken on demand; a step is either prefill or decode, prefill first; the last "
                "comer "
                "is preempted when blocks run out."
            ),
            "PagedAttention, SOSP 2023; vLLM 0.2",
            mix="prefill-first",
            chunked=False,
            admission_watermark=0.01,
        ),
        Discipline(
            "chunked",
            "Chunked prefill",
            "One token budget a step: decodes first, what is left goes to chunks of prompts.",
            "Sarathi-Serve, OSDI 2024",
            mix="decode-first",
        ),
        Discipline(
            "vllm",
            "vLLM v1",
            (
                "Step for step what vLLM's v1 scheduler does: running requests in order, then admissions, "
                "one "
                "budget."
            ),
            "vLLM 0.32, v1/core/sched/scheduler.py",
            mix="running-first",
            reserve_full_isl=True,
            trim_drafts=False,
            pad_drafts=True,
        ),
        Discipline(
            "no-evict",
            "TensorRT-LLM no-evict",
            (
                "A request is admitted only if everybody's prompt + max_tokens still fits, so nobody is ever "
                "preempted; blocks are taken on demand."
            ),
            "TensorRT-LLM, batch_manager/capacityScheduler.cpp, policy GUARANTEED_NO_EVICT",
            reserve="guaranteed",
            mix="running-first",
            chunked=False,
        ),
        Discipline(
            "max-util",
            "TensorRT-LLM max-util",
            (
                "Admits whoever's prompt fits right now, with nothing kept back for growth; when blocks run "
                "out the last started is paused and recomputed."
            ),
            "TensorRT-LLM, batch_manager/capacityScheduler.cpp, policy MAX_UTILIZATION",
            mix="running-first",
            chunked=False,
            victim="last",
        ),
        Discipline(
            "retract",
            "SGLang retract",
            "Admits by an estimate: each running request is expected to use a share of its max_tokens "
            "still open, a share that decays with every decode step and is "
            "taken anew from what was decoded when requests had to be retracted; prefill goes before decode.",
            (
                "SGLang, managers/schedule_policy.py (PrefillAdder), schedule_batch.py (retract_decode), "
                "new_token_ratio"
            ),
            reserve="estimate",
            mix="prefill-first",
            victim="fewest-outputs",
            when_full="retract",
        ),
    )
}
