"""The runner's tokens come back: they are appended, drafts are kept or dropped, what has ended is freed."""

from __future__ import annotations

from cbviz import events as ev
from cbviz.core import accounts, beam, expert_use
from cbviz.core.endings import close_batch, finish
from cbviz.core.iteration import Iteration
from cbviz.core.plain import INIT_NEW_TOKEN_RATIO
from cbviz.core.request import Request, Status
from cbviz.core.speculative import drafts_for
from cbviz.core.state import ControlState
from cbviz.messages import Chunk, RunnerOutput, SchedulerOutput


class RunnerOutputError(RuntimeError):
    """A runner broke its contract: a sampling chunk got no token, or more than its drafts allow.

    Nothing was changed.
    """


def take(state: ControlState, it: Iteration, out: RunnerOutput) -> None:
    """Takes the step's tokens. Raises RunnerOutputError or ProposerError before any change."""
    plan = it.plan
    _check(plan, out)
    proposed = _propose(state, it, out) if state.proposer is not None else {}
    got, journal, limit, routed = out.token_ids, state.journal, state.max_model_len, out.routed
    ended = False
    num_rejected = 0
    for r, c in zip(it.shares, plan.chunks, strict=True):
        if not c.sample:
            continue
        if c.num_candidates:
            _score(state, r, c, out)
            continue
        new = got[c.request_id]
        children = _fork(state, r, c) if c.fork_ids else ()
        if routed:
            expert_use.note(state.routed, r, routed[c.request_id])
        if len(new) == 1 and new[0] not in r.stop_ids and limit > len(r.token_ids) + 1 < r.latest_end:
            kept, reason, stop = 1, "", -1  # as nearly always: it goes on
        else:
            kept, reason, stop = _kept(r, new, limit)
        rejected = past_end = 0
        if c.num_draft:
            past_end = max(0, len(new) - 1 - kept)
            rejected = c.num_draft - (len(new) - 1) + past_end
            num_rejected += rejected
            r.num_computed_tokens -= rejected
            new = new[:kept]
        r.token_ids.extend(new)
        journal.append(ev.Sampled(c.request_id, new, rejected, past_end))
        if proposed and (drafts := proposed.get(c.request_id)):
            r.draft_token_ids = drafts
            journal.append(ev.Proposed(c.request_id, drafts, state.config.speculative))
        if reason:
            ended = True
            finish(state, r, reason, stop)
        for child in children:
            ended = _first_token(state, child, got[child.request_id]) or ended
    if state.has_groups:
        ended = _choose_beams(state, plan) or ended
    if num_rejected:
        accounts.note_rejected(it, num_rejected)
    if ended:
        state.running = [r for r in state.running if r.status is not Status.FINISHED or r.seat_held]
        close_batch(state)
    if state.routed:
        expert_use.forget_ended(state.routed, state.requests)
    if not state.requests:
        state.new_token_ratio = INIT_NEW_TOKEN_RATIO


def _check(plan: SchedulerOutput, out: RunnerOutput) -> None:
    """Raises RunnerOutputError where an output is missing or too long."""
    got = out.token_ids
    for c in plan.chunks:
        if c.num_candidates:
            if len(out.candidates.get(c.request_id) or ()) != c.num_candidates:
                raise RunnerOutputError(
                    f"step {plan.step}: the runner must return {c.num_candidates} candidates for beam "
                    f"{c.request_id}"
                )
        elif c.sample:
            new = got.get(c.request_id)
            if not new:
                raise RunnerOutputError(f"step {plan.step}: the runner returned no token for {c.request_id}")
            if c.fork_ids and any(len(got.get(i) or ()) != 1 for i in c.fork_ids):
                raise RunnerOutputError(
                    f"step {plan.step}: the runner returned no token for a sequence of {c.request_id}: "
                    f"{', '.join(c.fork_ids)} need one each"
                )
            if len(new) > 1 + c.num_draft:
                raise RunnerOutputError(
                    f"step {plan.step}: the runner returned {len(new)} tokens for {c.request_id}, "
                    f"whose {c.num_draft} drafts allow {1 + c.num_draft}"
                )


def _kept(r: Request, new: list[int], max_model_len: int) -> tuple[int, str, int]:
    """How many of the new tokens the request keeps, why it ends with the last of them ('': it goes on), and
    the stop id or -1.
    """
    n, prompt = len(r.token_ids), r.num_prompt_tokens
    for kept, t in enumerate(new, 1):
        n += 1
        if t in r.stop_ids:
            return kept, "stop", t
        if n - prompt == r.output_end:
            return kept, "stop", -1
        if n - prompt >= r.max_tokens:
            return kept, "length", -1
        if n >= max_model_len:
            return kept, "max_model_len", -1
    return len(new), "", -1


def _propose(state: ControlState, it: Iteration, out: RunnerOutput) -> dict[str, list[int]]:
    """The drafts of each request that got tokens and goes on: the runner's, or from the tokens alone.

    Changes nothing. Raises ProposerError.
    """
    found: dict[str, list[int]] = {}
    p, k, limit = state.proposer, state.config.num_speculative_tokens, state.max_model_len
    assert p is not None
    for r, c in zip(it.shares, it.plan.chunks, strict=True):
        if not c.sample:
            continue
        new = out.token_ids[c.request_id]
        kept, reason, _ = _kept(r, new, limit)
        if reason:
            continue
        n = r.num_tokens + kept
        most = k
        if state.rules.trim_drafts:  # the model's own token behind the drafts needs a place too
            most = max(0, min(k, r.num_prompt_tokens + r.max_tokens - n - 1))
        if out.draft_ids is not None:
            drafts = out.draft_ids.get(c.request_id, [])[:most]
        else:
            drafts = drafts_for(p, c.request_id, r.token_ids + new, min(most, limit - n), state.config)
        if drafts:
            found[c.request_id] = drafts
    return found


def _fork(state: ControlState, r: Request, c: Chunk) -> list[Request]:
    """The request's other sequences come to life: its prompt is computed."""
    num_tokens = c.start + c.num_tokens
    children = state.fork(r, num_tokens)
    block_ids = r.block_ids[: -(-num_tokens // state.block_size)]
    state.journal.append(ev.Forked(r.request_id, [x.request_id for x in children], block_ids, num_tokens))
    return children


def _first_token(state: ControlState, child: Request, new: list[int]) -> bool:
    """A forked sequence gets its first token. True: it has ended with it."""
    _, reason, stop = _kept(child, new, state.max_model_len)
    child.token_ids.extend(new)
    state.journal.append(ev.Sampled(child.request_id, new))
    if reason:
        finish(state, child, reason, stop)
    return bool(reason)


def _score(state: ControlState, r: Request, c: Chunk, out: RunnerOutput) -> None:
    """Stores the candidates; the first scored beam also forks its siblings."""
    if r.num_forks:
        _fork(state, r, c)
    if out.routed:
        expert_use.note(state.routed, r, out.routed[c.request_id])
    r.candidates = [(t, logprob) for t, logprob in out.candidates[c.request_id]]
    tokens, logprobs = [t for t, _ in r.candidates], [x for _, x in r.candidates]
    state.journal.append(ev.Scored(r.request_id, tokens, logprobs))


def _choose_beams(state: ControlState, plan: SchedulerOutput) -> bool:
    """Beams that all have their candidates go on, or end. True: some have ended."""
    scored = [state.requests[c.request_id] for c in plan.chunks if c.num_candidates]
    ended = False
    for root in dict.fromkeys(beam.root_of(state, r) for r in scored):
        if (decided := beam.decide(state, root)) is None:
            continue
        choice, done = decided
        state.journal.append(choice)
        if isinstance(choice, ev.BeamStep):
            beam.go_on(state, root, choice, done)
            continue
        for b in beam.end(state, choice):
            last = b.token_ids[-1]
            stopped = last in b.stop_ids
            finish(state, b, "stop" if stopped else "length", last if stopped else -1)
        ended = True
    return ended
