"""Whether a request can be served at all, asked before it is taken: every refusal names the figures."""

from __future__ import annotations

from cbviz.config import ConfigError, EngineConfig
from cbviz.core import beam
from cbviz.core.request import Request
from cbviz.messages import RequestError, RequestSpec
from cbviz.runners.base import Runner


def check(spec: RequestSpec, c: EngineConfig, runner: Runner) -> None:
    """Raises RequestError, with the figures, if the request can't be served under config `c` at all."""
    limit = c.max_model_len or 0
    n, total = len(spec.prompt_token_ids), len(spec.prompt_token_ids) + spec.max_tokens
    if n >= limit:
        raise RequestError(
            f"{spec.request_id}: the prompt has {n} tokens; with max_model_len {limit} it may have at "
            f"most {limit - 1}"
        )
    if total > limit:
        raise RequestError(
            f"{spec.request_id}: prompt {n} + max_tokens {spec.max_tokens} = {total} tokens, over "
            f"max_model_len {limit}: lower max_tokens to {limit - n}"
        )
    drafts = min(c.num_draft_slots, limit - total)
    if total + drafts > c.pool_tokens:
        size = c.block_size
        extra = f" and {drafts} slots for drafts" if drafts else ""
        raise RequestError(
            f"{spec.request_id}: prompt {n} + max_tokens {spec.max_tokens} = {total} tokens{extra} "
            f"need {-(-(total + drafts) // size)} blocks of {size}; "
            f"the pool has {c.num_usable_blocks}: raise num_blocks or lower max_tokens"
        )
    if spec.sampling.n > 1:
        if spec.sampling.n > c.max_num_seqs:
            raise RequestError(
                f"{spec.request_id}: n is {spec.sampling.n}, but there are {c.max_num_seqs} seats, and "
                "each sequence needs one: raise max_num_seqs or lower n"
            )
        if c.kv_allocation == "contiguous":
            raise RequestError(
                f"{spec.request_id}: n is {spec.sampling.n}, but with kv_allocation contiguous nobody "
                "shares blocks: set kv_allocation to 'paged', or ask "
                f"{spec.sampling.n} times"
            )
    if spec.sampling.beam_width > 1 and (why := refuses_beams(spec, c, runner)):
        raise RequestError(f"{spec.request_id}: beam_width is {spec.sampling.beam_width}, but {why}")
    vocab = runner.spec.vocab_size
    ids = spec.prompt_token_ids
    if set(map(type, ids)) != {int}:
        bad = next(t for t in ids if type(t) is not int)
        raise RequestError(f"{spec.request_id}: token id {bad!r} is no whole number")
    if min(ids) < 0 or max(ids) >= vocab:
        raise RequestError(
            f"{spec.request_id}: token id {next(t for t in ids if not 0 <= t < vocab)} is outside the "
            f"model's vocabulary 0..{vocab - 1}"
        )


def refuses_beams(spec: RequestSpec, c: EngineConfig, runner: Runner) -> str:
    """Why the request's beam search can't run under config `c`; '' if it can."""
    k = spec.sampling.beam_width
    if not getattr(runner, "gives_candidates", False):
        name = getattr(runner, "name", type(runner).__name__)
        return (
            f"runner {name!r} makes up or repeats its tokens and knows no probabilities: use runner 'torch'"
        )
    if why := beam.refusal(c):
        return why
    if k > c.max_num_seqs:
        return (
            f"there are {c.max_num_seqs} seats, and each beam needs one: raise max_num_seqs or lower "
            "beam_width"
        )
    if (need := beam.blocks_at_most(spec, c)) > c.num_usable_blocks:
        return (
            f"its beams may need {need} blocks, the pool has {c.num_usable_blocks}: raise num_blocks, "
            "or lower beam_width or max_tokens"
        )
    stops = frozenset(spec.sampling.stop_token_ids) | (
        frozenset() if spec.sampling.ignore_eos else frozenset(runner.eos_token_ids)
    )
    if (most := beam.num_candidates(spec.sampling, stops)) > runner.spec.vocab_size:
        return (
            f"it looks at {most} candidates a beam, more than the {runner.spec.vocab_size} tokens "
            "of the vocabulary: lower beam_width"
        )
    return ""


def check_change(
    new: EngineConfig, planned: EngineConfig, here: list[Request], queued: list[RequestSpec], runner: Runner
) -> None:
    """Raises ConfigError, with the figures, if a request could not be served any more under config `new`.

    `planned`: the config before the change. `here`: the requests that have arrived. `queued`: those that a user
    has added since the last step.
    """
    _check_drafts(new, planned, [r.spec for r in here] + queued)
    for spec in [r.spec for r in here if r.num_forks] + queued:
        if spec.sampling.n > new.max_num_seqs:
            raise ConfigError(
                f"max_num_seqs is {new.max_num_seqs}, but the {spec.sampling.n} sequences of "
                f"{spec.request_id} need a seat each: the least is {spec.sampling.n}"
            )
    for spec in [r.spec for r in here if not r.parent] + queued:
        if spec.sampling.beam_width > 1 and (why := refuses_beams(spec, new, runner)):
            raise ConfigError(f"{spec.request_id} runs beam search: {why}, or wait until it has ended")


def _check_drafts(new: EngineConfig, planned: EngineConfig, specs: list[RequestSpec]) -> None:
    """Raises ConfigError where a request would not fit the pool any more with the slots that drafts need:
    it would take its own blocks for ever.
    """
    limit, pool = new.max_model_len or 0, new.pool_tokens
    if new.num_draft_slots > planned.num_draft_slots:
        for x in specs:
            if (n := min(limit, len(x.prompt_token_ids) + x.max_tokens + new.num_draft_slots)) > pool:
                raise ConfigError(
                    f"speculative {new.speculative!r} with {new.num_speculative_tokens} drafts may "
                    f"need {n} slots for {x.request_id}, the pool has {pool}: "
                    "lower num_speculative_tokens, or fork with more num_blocks"
                )
