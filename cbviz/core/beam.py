"""Beam search (`Sampling.beam_width`): the k most probable continuations, kept side by side over shared
blocks.

    r     |<- shared ->|<- shared by r and r.2 ->| own |       r's best two continuations beat r.1's best one:
    r.1   |<- shared ->|<- given back ----------->|            r keeps its row, r.1 is dropped and
    r.1'  |<- r's table, by reference: copy-on-write ->|       goes on from r

The beams are sequences forked as with n > 1 (`core.sequences`). Each computes its last token like any request
and then idles with its candidates until its siblings have theirs; only then is chosen. A beam may lose its
blocks alone: the others wait for it. What is chosen and when it ends is what transformers 5 does
(`GenerationMixin._beam_search` with do_sample=False): of all beams' candidates the (1 + stop ids) * k most
probable; ends of sequence among the first k are finished hypotheses, of which the k best by score / length **
length_penalty are kept; the k best others go on. It ends at max_tokens, or when k are finished and the best
that goes on is no better than the worst of them at its present length (`early_stopping`: as soon as k are
finished).
"""

from __future__ import annotations

from cbviz import events as ev
from cbviz.config import EngineConfig
from cbviz.core.request import Request
from cbviz.core.state import ControlState
from cbviz.messages import RequestSpec, Sampling, sequence_ids

DISCIPLINES = ("vllm", "chunked", "paged", "max-util")


def refusal(c: EngineConfig) -> str:
    """Why beams can't run under this config: a field, its value and the cure; '' if they can."""
    if c.discipline not in DISCIPLINES:
        return (
            f"discipline is {c.discipline!r}, which reserves or estimates for single sequences: set it to "
            f"one of {', '.join(DISCIPLINES)}"
        )
    if c.kv_allocation == "contiguous":
        return "kv_allocation is 'contiguous', where nobody shares blocks: set it to 'paged'"
    if c.sliding_window:
        return f"sliding_window is {c.sliding_window}: set it to 0"
    if c.preemption_mode == "swap":
        return "preemption_mode is 'swap': set it to 'recompute'"
    if c.speculative != "off":
        return f"speculative is {c.speculative!r}: set it to 'off'"
    return ""


def blocks_at_most(spec: RequestSpec, c: EngineConfig) -> int:
    """Blocks that all its beams hold at most, nothing shared, and those that admission keeps free."""
    keep = int(max(c.rules.admission_watermark, c.watermark) * c.num_blocks)
    return (
        spec.sampling.beam_width * -(-(len(spec.prompt_token_ids) + spec.max_tokens) // c.block_size) + keep
    )


def num_candidates(sampling: Sampling, stop_ids: frozenset[int]) -> int:
    """So many of a beam's best continuations are looked at, that k remain if all ends of sequence are among
    them.
    """
    return max(2, 1 + len(stop_ids)) * sampling.beam_width if sampling.beam_width > 1 else 0


def root_of(state: ControlState, r: Request) -> Request:
    return state.requests[r.spec.parent] if r.spec.parent else r


def decide(
    state: ControlState, root: Request
) -> tuple[ev.BeamStep | ev.BeamsEnded, list[tuple[float, list[int]]]] | None:
    """Choose the next beams and the finished hypotheses, best first.

    Returns None while a beam has no candidates yet. Has no side effects.
    """
    ids = sequence_ids(root.spec)
    beams = (
        [state.requests[i] for i in ids] if root.num_output_tokens else [root]
    )  # at first all are the same
    k, penalty, stops = root.sampling.beam_width, root.sampling.length_penalty, root.stop_ids
    found: list[tuple[float, int, int]] = []
    for i, b in enumerate(beams):
        if b.candidates is None:
            return None
        found += [(b.beam_score + logprob, i, t) for t, logprob in b.candidates]
    found.sort(key=_worst_last)
    length = root.num_output_tokens + 1
    last = length >= root.max_tokens or root.num_prompt_tokens + length >= state.max_model_len
    done = root.hypotheses + [
        (score / length**penalty, [*beams[i].output_token_ids, t])
        for score, i, t in found[:k]
        if last or t in stops
    ]
    done = sorted(done, key=_worst_last)[:k]
    go_on = [x for x in found if x[2] not in stops][:k]
    if last or (
        len(done) == k and (root.sampling.early_stopping or go_on[0][0] / length**penalty <= done[-1][0])
    ):
        return ev.BeamsEnded(
            root.request_id, ids, [tokens for _, tokens in done], [score for score, _ in done]
        ), done
    rows: dict[int, tuple[float, int, int]] = {}
    moved = []
    for x in (
        go_on
    ):  # a beam's best continuation keeps its row; the others take the rows of those that are dropped
        if x[1] in rows:
            moved.append(x)
        else:
            rows[x[1]] = x
    rows.update(zip([i for i in range(k) if i not in rows], moved, strict=True))
    chosen = [rows[i] for i in range(k)]
    return ev.BeamStep(
        root.request_id,
        ids,
        [i for _, i, _ in chosen],
        [t for _, _, t in chosen],
        [score for score, _, _ in chosen],
        len(done),
    ), done


def go_on(state: ControlState, root: Request, e: ev.BeamStep, done: list[tuple[float, list[int]]]) -> None:
    """Each beam continues its parent: a dropped one gives back its blocks and takes its parent's table by
    reference.
    """
    beams = [state.requests[i] for i in e.beam_ids]
    before = [list(b.token_ids) for b in beams]
    root.hypotheses = done
    for b, parent, token, score in zip(beams, e.parents, e.token_ids, e.scores, strict=True):
        p = beams[parent]
        state.take_table_of(b, p)
        b.token_ids[:] = [*before[parent], token]
        b.beam_score, b.candidates, b.shares_tail = score, None, True


def end(state: ControlState, e: ev.BeamsEnded) -> list[Request]:
    """The hypotheses take the beams' rows, best first. The beams are still to be finished."""
    beams = [state.requests[i] for i in e.beam_ids]
    for b, tokens, score in zip(beams, e.outputs, e.scores, strict=True):
        b.token_ids[b.num_prompt_tokens :] = tokens
        b.beam_score, b.candidates, b.hypotheses = score, None, []
    return beams


def _worst_last(x: tuple[float, object] | tuple[float, int, int]) -> float:
    return -x[0]
