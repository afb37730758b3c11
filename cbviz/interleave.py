"""Runs several sessions side by side in one process, whole steps in turn, and explains their times by steps
and tokens.

Owns who steps next, the rounds and the fit. A slow moment of the machine then hits every session alike: all
are equally far at any time, so the ratio of their times is one of the same minutes. Knows sessions and
traces; no command line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cbviz.messages import StepRecord
from cbviz.session import Session
from cbviz.trace.trace import Trace

MOST_ROUNDS = 3
ROUNDS_WITHIN_S = 420.0
"""Where the number of rounds is not given: at most so many, and none is begun that would not end within so
many seconds.
"""

Rows = list[tuple[int, float]]
"""(tokens computed, seconds measured) of each step that computed something."""


def run_interleaved(
    sessions: Sequence[Session],
    progress: Callable[[int, StepRecord], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Runs all sessions to their end.

    The next step goes to the session with the fewest useful tokens computed so far, then the fewest steps.

    `progress(i, record)` is called after each step of session i; `stop()` True ends the runs where they
    stand. Raises Stuck as `Session.run` does.
    """
    useful = [sum(r.tokens.useful for r in s.trace) for s in sessions]
    unfinished = [i for i, s in enumerate(sessions) if not s.done]
    while unfinished and not stop():
        i = min(unfinished, key=lambda k: (useful[k], len(sessions[k].trace), k))
        record = sessions[i].run(max_steps=1)
        if record is None or sessions[i].done:
            unfinished.remove(i)
        if record is not None:
            useful[i] += record.tokens.useful
            if progress is not None:
                progress(i, record)


def run_rounds(
    sessions: Sequence[Session],
    rounds: int | None = None,
    progress: Callable[[int, StepRecord], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[list[Trace]]:
    """Runs the sessions interleaved, again and again from the start: `[round][session]` -> its trace. The
    sessions stand at the end of the last round.

    `rounds` None: one under the modelled clock, where a second is the same; else up to MOST_ROUNDS within
    ROUNDS_WITHIN_S.
    """
    measured = any(s.config.clock == "measured" for s in sessions)
    most = rounds or (MOST_ROUNDS if measured else 1)
    out: list[list[Trace]] = []
    begin = time.perf_counter()
    while True:
        run_interleaved(sessions, progress, stop)
        out.append([s.trace for s in sessions])
        spent = time.perf_counter() - begin
        if (
            len(out) >= most
            or stop()
            or (rounds is None and spent * (len(out) + 1) / len(out) > ROUNDS_WITHIN_S)
        ):
            return out
        for s in sessions:
            s.reset()


def warm_up(session: Session) -> None:
    """Runs two steps of a small request on a session of the same model and throws them away: the first read
    of the weights would count as the time of a step.
    """
    fields = session.config.replace(
        num_blocks=8, block_size=16, max_model_len=64, max_num_batched_tokens=64
    ).to_dict()
    trial = Session(None, runner=session.runner_name, model=session.model, **fields)
    trial.add(list(range(1, 9)), max_tokens=2, ignore_eos=True)
    trial.run()


def rows(rounds: Sequence[Trace]) -> Rows:
    """The steps of one session over its rounds, each with its best time: other work can only slow a step
    down. Empty if nothing was measured.

    Where a round took other steps (requests that arrive by the clock), the rounds can't be laid over one
    another, and the first one counts alone.
    """
    kept = [
        [(r.tokens.total, r.measured_s) for r in t if r.measured_s is not None and r.tokens.total]
        for t in rounds
    ]
    same = [steps for steps in kept if [n for n, _ in steps] == [n for n, _ in kept[0]]]
    return [(steps[0][0], min(s for _, s in steps)) for steps in zip(*same)]


@dataclass(frozen=True)
class Fit:
    """Least squares over measured steps: seconds = cost_per_step_s + cost_per_token_s x tokens computed.

    `r2`: share of the weighted variance that it explains; None: there is none.
    """

    cost_per_step_s: float
    cost_per_token_s: float
    num_steps: int
    r2: float | None

    def predict(self, steps: Rows) -> float:
        """Seconds of a run, from the numbers of its steps and tokens alone."""
        return self.cost_per_step_s * len(steps) + self.cost_per_token_s * sum(n for n, _ in steps)


def total_s(steps: Rows) -> float:
    """Measured seconds of all steps."""
    return math.fsum(s for _, s in steps)


def fit(runs: Iterable[Rows]) -> Fit | None:
    """Cost of a step and of a token from the measured steps of all runs together.

    None if fewer than three steps were measured.

    The fit does not know which run a step belongs to: that is what makes a ratio that it predicts a check of
    one that was measured. A step weighs 1 / tokens: the time of one that computes a hundred tokens varies
    more than that of a decode, and a few prompts would otherwise outvote hundreds of decodes.
    """
    steps = [step for run in runs for step in run]
    if len(steps) < 3:
        return None
    tokens, seconds = (
        np.array([n for n, _ in steps], dtype=float),
        np.array([s for _, s in steps], dtype=float),
    )
    a = np.stack([np.ones_like(tokens), tokens], axis=1)
    weight = 1 / tokens
    found, *_ = np.linalg.lstsq(a * np.sqrt(weight)[:, None], seconds * np.sqrt(weight), rcond=None)
    left = float((weight * (seconds - a @ found) ** 2).sum())
    spread = float((weight * (seconds - np.average(seconds, weights=weight)) ** 2).sum())
    return Fit(float(found[0]), float(found[1]), len(steps), 1 - left / spread if spread > 0 else None)


__all__ = ["Fit", "Rows", "fit", "rows", "run_interleaved", "run_rounds", "total_s", "warm_up"]
