"""`cbviz compare`: recorded runs, or a workload run under several disciplines in turn.

Owns the report; comparing, interleaving and fitting lie below.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cbviz.cli.options import (
    DEFAULT_MODEL,
    Json,
    Model,
    Params,
    Seed,
    Sets,
    explicit_fields,
    open_session,
    preset_note,
    workload_params,
)
from cbviz.cli.run import expected_tokens, sampled
from cbviz.cli.terminal import Bar, Stop, plain_errors, print_json, say
from cbviz.config import ConfigError
from cbviz.disciplines import DISCIPLINES

if TYPE_CHECKING:
    from cbviz.interleave import Rows
    from cbviz.messages import StepRecord
    from cbviz.session import Session
    from cbviz.trace.compare import Comparison
    from cbviz.trace.trace import Trace

MOST_ROWS = 20
"""Requests of a table for people; `--json` has all."""
ROUNDS_HELP = (
    "How often all is run; each step counts with its best time. By default up to 3 times with a measured "
    "clock, if that takes no more than 7 minutes."
)


@plain_errors
def compare(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[A B ...]",
            help="Recorded runs; the first is what the others are held against.",
            show_default=False,
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help=(
                "Instead of recorded runs: this under each discipline and policy, interleaved in one process."
            ),
            show_default=False,
        ),
    ] = None,
    discipline: Annotated[
        list[str] | None,
        typer.Option(help="Repeatable; the first is what the others are held against.", show_default=False),
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Repeatable.", show_default=False)] = None,
    runner: Annotated[
        str | None, typer.Option(help="torch (default), sim or tape; as in `cbviz run`.", show_default=False)
    ] = None,
    set_: Sets = None,
    param: Params = None,
    seed: Seed = 0,
    model: Model = None,
    rounds: Annotated[int | None, typer.Option(min=1, max=20, help=ROUNDS_HELP, show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Runs side by side: metrics, ratios, where the schedules part, and the first token that differs."""
    if workload is None:
        if discipline or policy or runner or set_ or param or model or rounds:
            raise ConfigError(
                "to run something, name what: cbviz compare --workload W --discipline D1 --discipline D2. "
                "Two recorded runs: cbviz compare A B"
            )
        if not files or len(files) < 2:
            raise ConfigError(
                "compare needs two recorded runs (cbviz compare A B), or --workload W with two disciplines "
                "or policies"
            )
        _compare_files(files, as_json)
        return
    if files:
        raise ConfigError(f"either recorded runs or --workload, not both: {' '.join(map(str, files))}")
    disciplines, policies = list(dict.fromkeys(discipline or ())), list(dict.fromkeys(policy or ()))
    asked = _Asked(
        workload,
        disciplines,
        policies,
        runner or "torch",
        set_ or (),
        workload_params(param or ()),
        seed,
        model,
        rounds,
    )
    _compare_live(asked, as_json)


def _compare_files(files: list[Path], as_json: bool) -> None:
    from cbviz.trace.reading import CONTRADICTION, believed
    from cbviz.trace.trace import load

    names: list[str] = []
    for f in files:
        short = f.name.removesuffix(".gz").removesuffix(".jsonl")
        names.append(
            short
            if short not in names and sum(g.name == f.name for g in files) == 1
            else str(f)
            if str(f) not in names
            else f"{f} ({len(names) + 1})"
        )
    with Bar("reading"):
        traces = dict(zip(names, map(load, files)))
        complaint = (
            f"{' and '.join(map(str, files))} cannot be compared: what a recorded run says {CONTRADICTION}"
        )
        result = believed(lambda: _comparisons(traces), complaint)
    if as_json:
        print_json(
            believed(
                lambda: {
                    "runs": {n: {"file": str(f), **_described(traces[n])} for n, f in zip(names, files)},
                    **_compared_json(traces, result),
                },
                complaint,
            )
        )
    else:
        believed(lambda: _print_compared(traces, result), complaint)


@dataclasses.dataclass
class _Asked:
    """What the second form of `compare` was given."""

    workload: str
    disciplines: list[str]
    policies: list[str]
    runner: str
    sets: Sequence[str]
    params: dict[str, Any]
    seed: int
    model: str | None
    rounds: int | None

    def combinations(self) -> dict[str, dict[str, Any]]:
        """A name for each run, and the config fields that the user named for it: every discipline with every
        policy. Raises ConfigError.
        """
        pairs = [(d, p) for d in self.disciplines or [""] for p in self.policies or [""]]
        if len(pairs) < 2:
            raise ConfigError(
                f"compare needs at least two runs: give --discipline twice (of {', '.join(DISCIPLINES)}), "
                "or --policy twice"
            )
        shown = ((len(self.disciplines) > 1), (len(self.policies) > 1))
        return {
            "/".join(x for x, varies in zip(pair, shown) if varies): explicit_fields(
                self.sets, pair[0] or None, pair[1] or None
            )
            for pair in pairs
        }


def _compare_live(asked: _Asked, as_json: bool) -> None:
    from cbviz import interleave

    named = asked.combinations()
    names = list(named)
    sessions = []
    with Bar(f"loading {asked.model or DEFAULT_MODEL}" if asked.runner == "torch" else "preparing") as bar:
        for fields in named.values():
            sessions.append(
                open_session(asked.runner, asked.workload, asked.model, asked.seed, fields, asked.params, bar)
            )
        if asked.runner == "torch":
            bar.update(0, 0, title="warming up")
            interleave.warm_up(sessions[0])
    preset = preset_note(asked.workload, named[names[0]]) if asked.runner != "tape" else ""
    for note in filter(
        None, [preset, *(f"{n}: {note}" for n, s in zip(names, sessions) for note in s.notes)]
    ):
        say(note)
    played = _play(sessions, names, asked.rounds)
    if played is None:
        say(f"stopped after {sum(len(s.trace) for s in sessions)} steps; a comparison needs the whole run")
        raise SystemExit(130)
    # The tables show the round that was disturbed least.
    best = min(played, key=lambda traces: sum(t.state().time_s for t in traces))
    traces = dict(zip(names, best))
    result = _comparisons(traces)
    timing = None
    if all(s.config.clock == "measured" for s in sessions):
        steps = {n: interleave.rows([r[i] for r in played]) for i, n in enumerate(names)}
        timing = _timing(
            steps, [{n: interleave.total_s(interleave.rows([t])) for n, t in zip(names, r)} for r in played]
        )
    if as_json:
        tokens = {n: {r.request_id: r.output_token_ids for r in traces[n].state().by_index} for n in names}
        runs = {
            n: {**_described(traces[n]), "config": s.config.to_dict(), "tokens": tokens[n]}
            for n, s in zip(names, sessions)
        }
        print_json(
            {
                "workload": asked.workload,
                "runner": asked.runner,
                "rounds": len(played),
                "runs": runs,
                **_compared_json(traces, result),
                "timing": timing,
            }
        )
        return
    _print_compared(traces, result)
    if timing is not None:
        _print_timing(timing, len(played))


def _play(sessions: list[Session], names: list[str], rounds: int | None) -> list[list[Trace]] | None:
    """Runs all rounds with a bar. None if Ctrl-C came."""
    from cbviz import interleave

    expected = sum(map(expected_tokens, sessions))
    tokens, began = 0, time.monotonic()
    with Stop() as stop, Bar(", ".join(names), expected) as bar:

        def tell(i: int, record: StepRecord) -> None:
            nonlocal tokens
            tokens += sampled(record)
            turn = (tokens - 1) // expected + 1 if expected else 1
            bar.update(
                tokens - (turn - 1) * expected,
                note=f"round {turn}, {tokens / max(1e-9, time.monotonic() - began):,.0f} tokens/s",
            )

        played = interleave.run_rounds(sessions, rounds, tell, lambda: stop.asked)
        return None if stop.asked else played


def _timing(steps: dict[str, Rows], rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Measured time of each run against the first one's, beside what a cost a step and a cost a token, fitted
    over all their steps, predict.
    """
    from cbviz import interleave

    names = list(steps)
    base = names[0]
    fitted = interleave.fit(steps.values())
    ratios: dict[str, Any] = {}
    for n in names[1:]:
        measured = (
            interleave.total_s(steps[n]) / interleave.total_s(steps[base])
            if interleave.total_s(steps[base])
            else None
        )
        below = fitted.predict(steps[base]) if fitted is not None else 0.0
        predicted = fitted.predict(steps[n]) / below if fitted is not None and below > 0 else None
        ratios[n] = {
            "measured": measured,
            "predicted": predicted,
            "deviation": measured / predicted - 1 if measured is not None and predicted else None,
            "rounds": [r[n] / r[base] for r in rounds if r[base]],
        }
    return {
        "base": base,
        "clock": "measured",
        "fit": dataclasses.asdict(fitted) if fitted is not None else None,
        "runs": {
            n: {"steps": len(x), "tokens": sum(k for k, _ in x), "measured_s": interleave.total_s(x)}
            for n, x in steps.items()
        },
        "ratios": ratios,
    }


def _print_timing(timing: dict[str, Any], rounds: int) -> None:
    from cbviz.trace.metrics import seconds

    base, fitted = timing["base"], timing["fit"]
    first = timing["runs"][base]
    print()
    for n, r in timing["ratios"].items():
        if r["measured"] is None:
            continue
        alone = f"; the rounds alone: {', '.join(f'{x:.3f}' for x in r['rounds'])}" if rounds > 1 else ""
        print(
            f"measured:  {n} takes {r['measured']:.3f} of the time of "
            f"{base}{f' (each step at its best of {rounds} rounds{alone})' if rounds > 1 else ''}"
        )
        if r["predicted"] is not None:
            mine = timing["runs"][n]
            print(
                f"predicted: {r['predicted']:.3f}, from {mine['steps']:,} steps and {mine['tokens']:,} "
                f"tokens against {first['steps']:,} and {first['tokens']:,}; "
                f"the measured ratio is {abs(100 * r['deviation']):.1f} % "
                f"{'above' if r['deviation'] >= 0 else 'below'} it"
            )
    if fitted is not None:
        explained = (
            f", which explains {100 * fitted['r2']:.0f} % of their variance"
            if fitted["r2"] is not None
            else ""
        )
        print(
            f"fitted:    {seconds(fitted['cost_per_step_s'])} a step and "
            f"{seconds(fitted['cost_per_token_s'])} a token, "
            f"weighted least squares over {fitted['num_steps']:,} measured steps of all runs{explained}"
        )


def _described(trace: Trace) -> dict[str, Any]:
    from cbviz.trace.metrics import metrics

    h = trace.header
    return {
        "workload": h.workload,
        "runner": h.runner,
        "model": h.model,
        "clock": h.clock,
        "device": h.device,
        "steps": len(trace),
        "metrics": metrics(trace),
        "finish_reasons": {r.request_id: r.finish_reason for r in trace.state().by_index},
    }


def _comparisons(traces: dict[str, Trace]) -> dict[str, Comparison]:
    """Each run but the first, held against the first."""
    from cbviz.trace.compare import compare as hold_against

    base, *rest = traces
    return {n: hold_against(traces[base], traces[n], (base, n)) for n in rest}


_ALIGNED = {
    "first_scheduled_step": "scheduled",
    "first_token_step": "first token",
    "finish_step": "finished",
    "num_preemptions": "preempted",
    "output_tokens": "outputs",
    "ttft_s": "TTFT",
    "e2e_s": "E2E",
}
"""Fields of a request's metrics that are laid side by side, and their heads in the table."""


def _aligned(a: Trace, b: Trace) -> list[dict[str, Any]]:
    """Request by request, what went differently: `{"request_id": ..., field: [in a, in b]}`, only those that
    differ. Times count only where the schedule differs as well.
    """
    from cbviz.trace.metrics import request_metrics

    left, right = ({r["request_id"]: r for r in request_metrics(t)} for t in (a, b))
    out = []
    for rid in [*left, *(x for x in right if x not in left)]:
        x, y = left.get(rid, {}), right.get(rid, {})
        if any(x.get(f) != y.get(f) for f in _ALIGNED if not f.endswith("_s")):
            out.append({"request_id": rid, **{f: [x.get(f), y.get(f)] for f in _ALIGNED}})
    return out


def _compared_json(traces: dict[str, Trace], result: dict[str, Comparison]) -> dict[str, Any]:
    base = next(iter(traces))
    return {
        "base": base,
        "equal": all(c.equal for c in result.values()),
        "tokens_equal": all(c.tokens_equal for c in result.values()),
        "tokens_equal_up_to_ties": all(c.tokens_equal_up_to_ties for c in result.values()),
        "comparisons": {
            n: {**c.to_dict(), "requests": _aligned(traces[base], traces[n])} for n, c in result.items()
        },
    }


def _print_compared(traces: dict[str, Trace], result: dict[str, Comparison]) -> None:
    from cbviz.trace.compare import metrics_table, text_table, whose_outputs
    from cbviz.trace.metrics import metrics

    base = next(iter(traces))
    print(metrics_table({n: metrics(t) for n, t in traces.items()}))
    for n, c in result.items():
        print(
            f"\n{n} against {base}: schedules {'are equal' if c.schedules_equal else 'differ'}, blocks "
            f"{'are equal' if c.blocks_equal else 'differ'}"
        )
        if c.first_difference is not None:
            print(f"first difference: {c.first_difference}")
        if c.parting is not None:
            print(c.parting)
            for cause in c.causes:
                print(f"  {cause}")
        if aligned := _aligned(traces[base], traces[n]):
            rows = [[r["request_id"], *(_change(f, *r[f]) for f in _ALIGNED)] for r in aligned[:MOST_ROWS]]
            print(text_table(["step / time", *_ALIGNED.values()], rows))
            if len(aligned) > MOST_ROWS:
                print(f"and {len(aligned) - MOST_ROWS} more rows (--json has all)")
        if c.tokens_equal:
            print(f"outputs are equal: the same tokens for all {whose_outputs(traces[base].state())}")
        else:
            print(
                f"first differing token: {c.first_token_difference} ({len(c.token_differences)} outputs "
                f"differ, {len(c.ties)} of them first at a tie)"
            )
        for note in c.notes:
            if "compar" in note:
                print(note)


def _change(field: str, a: Any, b: Any) -> str:
    from cbviz.trace.metrics import format_value as show_value

    if field.endswith("_s"):
        return f"{show_value('makespan_s', a)} > {show_value('makespan_s', b)}"
    return (
        f"{'-' if a is None else a}" if a == b else f"{'-' if a is None else a} > {'-' if b is None else b}"
    )
