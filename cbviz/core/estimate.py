"""SGLang's new-token ratio (`reserve="estimate"`): how many tokens running requests are expected to use still.

The share of their open max_tokens starts at 0.7 (and again whenever nothing is left to do) and falls to 0.14
of that in 600 decode steps. After a retraction it is what the others have decoded and 20 steps more, of their
max_tokens. Source: SGLang, schedule_policy.py and schedule_batch.py, with its defaults. Left out: after a
refusal SGLang asks no more until a request has gone; here the head is asked in every step.
"""

from __future__ import annotations

from cbviz.core.iteration import Iteration
from cbviz.core.plain import INIT_NEW_TOKEN_RATIO
from cbviz.core.request import Request
from cbviz.core.state import ControlState

MIN_NEW_TOKEN_RATIO = INIT_NEW_TOKEN_RATIO * 0.14
NEW_TOKEN_RATIO_DECAY = (INIT_NEW_TOKEN_RATIO - MIN_NEW_TOKEN_RATIO) / 600
RETRACT_DECODE_STEPS = 20
MOST_EXPECTED_TOKENS = 4096
"""Of one request's open max_tokens, the estimate counts no more than these (SGLang's CLIP_MAX_NEW_TOKENS)."""


def open_tokens(r: Request) -> int:
    """Tokens that the request may still put out, as far as the estimate counts them."""
    return min(r.max_tokens - r.num_output_tokens, MOST_EXPECTED_TOKENS)


def expected_tokens(state: ControlState, it: Iteration) -> float:
    """Tokens that the running requests are expected to use; those in this step's plan use all of theirs."""
    expected = 0.0
    for r in state.running:
        if not r.seat_held:
            rest = open_tokens(r)
            expected += rest if r in it.shares else rest * state.new_token_ratio
    return expected


def adapt(state: ControlState, it: Iteration) -> None:
    """After a decode step: a little lower; after a retraction, from what those that stay have decoded."""
    if state.rules.reserve != "estimate":
        return
    if not it.num_preempted:
        state.new_token_ratio = max(MIN_NEW_TOKEN_RATIO, state.new_token_ratio - NEW_TOKEN_RATIO_DECAY)
        return
    rows = [r for r in state.running if not r.seat_held]
    decoded = sum(r.num_output_tokens for r in rows)
    most = sum(r.max_tokens for r in rows) + 1
    state.new_token_ratio = min(1.0, (decoded + RETRACT_DECODE_STEPS * len(rows)) / most)
