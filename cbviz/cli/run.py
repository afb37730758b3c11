"""`cbviz run`, and what is done with a recorded run: `show`, `export`, `import`. Owns how a run is kept,
stopped and told; the session owns the run.
"""

from __future__ import annotations

import difflib
import json
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cbviz.cli.options import (
    DEFAULT_MODEL,
    Json,
    Model,
    Params,
    Runner,
    Seed,
    Sets,
    Workload,
    explicit_fields,
    open_session,
    preset_note,
    workload_params,
)
from cbviz.cli.terminal import Bar, Stop, plain_errors, print_json, say
from cbviz.config import ConfigError
from cbviz.disciplines import DISCIPLINES

if TYPE_CHECKING:
    from cbviz.messages import StepRecord
    from cbviz.model.tokenizer import Tokenizer
    from cbviz.session import Session
    from cbviz.trace.trace import Trace

MOST_LINES = 20
"""Refusals that are told one by one."""
EXPORTS = ("html", "csv", "perfetto", "prometheus")


@plain_errors
def run(
    runner: Runner = "torch",
    workload: Workload = "article",
    discipline: Annotated[
        str | None,
        typer.Option(help=f"How batches are formed: {', '.join(DISCIPLINES)}.", show_default=False),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Who goes first: fcfs, priority, sjf, ...", show_default=False)
    ] = None,
    kernels: Annotated[
        str | None,
        typer.Option(
            help="Which operators the real model uses: auto, reference, torch, cpu, triton.",
            show_default=False,
        ),
    ] = None,
    set_: Sets = None,
    param: Params = None,
    seed: Seed = 0,
    model: Model = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Where the trace goes (.jsonl or .jsonl.gz). By default it is kept in the cache, for "
                "`cbviz show`."
            ),
            show_default=False,
        ),
    ] = None,
    profile_step: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Watch what runs inside this step (then: show --step N); may be repeated.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a workload to its end, print the metrics, write the trace.

    Ctrl-C stops after the step in progress.
    """
    named, params = explicit_fields(set_ or (), discipline, policy, kernels), workload_params(param or ())
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file in it, e.g. {out / 'run.jsonl'}")
    with Bar(f"loading {model or DEFAULT_MODEL}" if runner == "torch" else "preparing") as bar:
        s = open_session(runner, workload, model, seed, named, params, bar)
    if profile_step and not hasattr(s.runner, "profile_next"):
        raise ConfigError(
            f"--profile-step: runner {runner} computes nothing that could be watched; leave it out, or run "
            "the real model"
        )
    for note in filter(None, [preset_note(workload, named) if runner != "tape" else "", *s.notes]):
        say(note)
    # Written line by line, so that a crash loses one step at most; a gzip file can't be, it is written at the
    # end.
    zipped = out is not None and out.suffix == ".gz"
    path = (
        out
        if out is not None and not zipped
        else _kept_path(f"{Path(workload).stem}-{s.config.discipline}", quiet=zipped)
    )
    s.trace.keyframes = out is not None  # a run kept for `show` is never rewound here
    if path is not None:
        s.trace.autosave(
            path, 0 if out is not None else None
        )  # a file that was named holds the whole run, however long
    if out is not None and not zipped and s.trace.autosave_problem:
        raise ConfigError(f"--out: {s.trace.autosave_problem}")
    stopped = False
    try:
        stopped = _run_to_end(s, profile_step or ())
    except BaseException as e:
        if not isinstance(e, KeyboardInterrupt):
            failed = f"the run failed in step {len(s.trace) + 1}"
            where = _finish(s, path, out if zipped else None)
            say(
                f"{failed}; what it did before is in {where}"
                if where is not None
                else f"{failed}; what it did before was not kept"
            )
            raise
        stopped = True
    where = _finish(s, path, out if zipped else None)
    for reason in _refused(s.trace)[:MOST_LINES]:
        say(f"refused: {reason}")
    if as_json:
        print_json(_run_result(s, where, stopped))
    else:
        _print_run(s, where)
    if stopped:
        say(
            f"stopped after step {len(s.trace)}"
            + (
                f"; the trace is in {where} (cbviz show {where})"
                if where is not None
                else "; the run was not kept"
            )
        )
        raise SystemExit(130)


def _run_to_end(s: Session, watched: Collection[int] = ()) -> bool:
    """Runs with a bar, the steps of `watched` under the profiler.

    True if Ctrl-C stopped it before the end.
    """
    tokens, began = 0, time.monotonic()
    with Stop() as stop, Bar(f"{s.workload_name}, {s.config.discipline}", expected_tokens(s)) as bar:

        def tell(record: StepRecord) -> None:
            nonlocal tokens
            tokens += sampled(record)
            bar.update(
                tokens,
                note=(
                    f"step {record.step:,}, {tokens:,} tokens, "
                    f"{tokens / max(1e-9, time.monotonic() - began):,.0f}/s"
                ),
            )

        for step in sorted(set(watched)):
            s.run(until=lambda record, state: stop.asked, progress=tell, max_steps=step - 1 - len(s.trace))
            if stop.asked:
                break
            if (record := s.profile_step()) is None:
                say(
                    f"--profile-step: the run ended after step {len(s.trace)}, so step {step} was not watched"
                )
                break
            tell(record)
        if not stop.asked:
            s.run(until=lambda record, state: stop.asked, progress=tell)
        return stop.asked and not s.done


def _kept_path(label: str, quiet: bool) -> Path | None:
    """A place in the cache for a run, None where there can be none, which is said unless `quiet`."""
    from cbviz.model.hub import ModelError
    from cbviz.trace import runs

    try:
        return runs.new_path(label)
    except (OSError, ModelError) as e:
        if not quiet:
            why = f"{runs.folder()} can't be made ({e.strerror or e})" if isinstance(e, OSError) else str(e)
            say(f"this run is not kept: {why}; --out names a file for it")
        return None


def _finish(s: Session, path: Path | None, zipped: Path | None) -> Path | None:
    """Closes the trace's file; for a gzip file writes that and drops the plain one.

    Returns where the run is, None if it is nowhere.
    """
    if (problem := s.trace.autosave_problem) and zipped is None:
        say(problem)
    s.close()
    if zipped is None:
        return path if path is not None and path.exists() else None
    s.save(zipped)
    if path is not None:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return zipped


def _run_result(s: Session, where: Path | None, stopped: bool) -> dict[str, Any]:
    from cbviz.trace.metrics import metrics

    end = s.trace.state()
    m = metrics(s.trace)
    return {
        "workload": s.workload_name,
        "runner": s.runner_name,
        "model": s.model,
        "clock": m["clock"],
        "device": m["device"],
        "steps": len(s.trace),
        "stopped": stopped,
        "metrics": m,
        "config": s.config.to_dict(),
        "notes": s.notes,
        "tokens": {r.request_id: r.output_token_ids for r in end.by_index},
        "finish_reasons": {r.request_id: r.finish_reason for r in end.by_index},
        "ties": _ties(s.trace),
        "trace": str(where) if where is not None else None,
    }


def _print_run(s: Session, where: Path | None) -> None:
    from cbviz.trace.metrics import format_metrics, metrics

    c = s.config
    print(
        f"{s.workload_name}: {s.runner_name}, {s.model}, {c.discipline}, {c.policy}, {c.max_num_seqs} "
        f"seats, {c.num_blocks} blocks of {c.block_size}\n"
    )
    print(format_metrics(metrics(s.trace)))
    if ties := _ties(s.trace):
        shown = ", ".join(f"{t['request_id']} output {t['position']} ({t['gap_nats']:.1e})" for t in ties[:6])
        print(
            f"{len(ties)} outputs whose two best tokens are closer than 0.001 nats, where another correct "
            f"engine may differ: {shown}{', ...' if len(ties) > 6 else ''}"
        )
    print(f"trace: {where if where is not None else 'not kept'}")


def expected_tokens(s: Session) -> int:
    """Output tokens of the workload, at most: what a progress bar runs to."""
    return sum(
        x.output_len if x.output_len is not None and s.runner_name != "torch" else x.max_tokens
        for x in s.workload
    )


def sampled(record: StepRecord) -> int:
    from cbviz.events import Sampled

    return sum(len(e.token_ids) for e in record.events if isinstance(e, Sampled))


def _ties(trace: Trace) -> list[dict[str, Any]]:
    """Output positions whose two best tokens were closer than TIE_NATS: there another correct engine may
    choose the other.
    """
    from cbviz.trace.compare import TIE_NATS

    out, done = [], dict.fromkeys(trace.state().requests, 0)
    for record in trace:
        for rid, gaps in (record.gaps or {}).items():
            for i, gap in enumerate(gaps):
                if gap < TIE_NATS:
                    out.append({"request_id": rid, "position": done[rid] + i, "gap_nats": gap})
            done[rid] += len(gaps)
    return out


def _refused(trace: Trace) -> list[str]:
    from cbviz.events import Refused

    return [e.reason for record in trace for e in record.events if isinstance(e, Refused)]


@plain_errors
def show(
    run_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            help="A recorded run; by default the newest of those that were kept.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="The step to show; by default the last.", show_default=False)
    ] = None,
) -> None:
    """One moment of a recorded run as text: the explorer's twin."""
    from cbviz.trace import runs
    from cbviz.trace.reading import CONTRADICTS, believed
    from cbviz.trace.show import show as text_of
    from cbviz.trace.trace import load

    path = run_file if run_file is not None else runs.last()
    if path is None:
        raise ConfigError(
            f"no run is kept in {runs.folder()} yet: name a file, or make one with cbviz run --runner sim"
        )
    with Bar(f"reading {path.name}"):
        trace = load(path)
    if run_file is None:
        say(f"the newest run: {path}")
    state = trace.state()
    left = len(state.waiting) + sum(1 for rid in state.running if not state.requests[rid].finished)
    if left:
        say(f"this run was not finished: {left} requests were left after step {len(trace)}")
    for note in trace.header.notes:
        say(note)
    width = shutil.get_terminal_size((120, 40)).columns
    if step is not None:
        try:
            trace.state(step)
        except IndexError as e:
            raise ConfigError(str(e)) from None
    print(believed(lambda: text_of(trace, step, width), f"{path} {CONTRADICTS}"))


@plain_errors
def export(
    run_file: Annotated[Path, typer.Argument(metavar="RUN", help="A recorded run.")],
    to: Annotated[str, typer.Option(help=f"One of {', '.join(EXPORTS)}.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help=(
                "File to write; csv writes two, NAME.requests.csv and NAME.steps.csv. By default beside RUN."
            ),
            show_default=False,
        ),
    ] = None,
) -> None:
    """A recorded run for others: a page that opens from disk, tables, a timeline for Perfetto, or its figures
    under vLLM's metric names.
    """
    from cbviz.trace.reading import CONTRADICTS, believed
    from cbviz.trace.trace import load

    if to not in EXPORTS:
        near = difflib.get_close_matches(to, EXPORTS, n=1)
        raise ConfigError(
            f"--to is {to!r}, it must be one of {', '.join(EXPORTS)}"
            + (f" (did you mean {near[0]!r}?)" if near else "")
        )
    with Bar(f"writing {to}"):
        trace = load(run_file)
        stem = (
            run_file.with_name(run_file.name.removesuffix(".gz").removesuffix(".jsonl"))
            if out is None
            else out.with_name(out.name.removesuffix(".csv"))
        )
        files = believed(lambda: _exported(trace, to, stem, out), f"{run_file} {CONTRADICTS}")
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="")
    for path in files:
        print(path)


def _exported(trace: Trace, to: str, stem: Path, out: Path | None) -> dict[Path, str]:
    """The files of an export, by path."""
    from cbviz.interop import perfetto, prometheus, tables

    if to == "html":
        from cbviz.app.export import page

        return {
            out or stem.with_name(stem.name + ".html"): page(
                trace, title=None if trace.header.workload not in ("", "requests") else stem.name
            )
        }
    if to == "csv":
        return {
            stem.with_name(stem.name + ".requests.csv"): tables.requests_csv(trace),
            stem.with_name(stem.name + ".steps.csv"): tables.steps_csv(trace),
        }
    if to == "prometheus":
        return {out or stem.with_name(stem.name + ".prom"): prometheus.to_prometheus(trace)}
    return {
        out or stem.with_name(stem.name + ".perfetto.json"): json.dumps(
            perfetto.to_perfetto(trace), allow_nan=False
        )
    }


@plain_errors
def import_(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Recordings of a vLLM, step by step (.jsonl or .jsonl.gz)."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The trace to write; with several files a folder. By default NAME.cbviz.jsonl.gz here.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(
            help="The file of the recorded requests; by default the one that the recording names.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model on this machine whose tokenizer turns the tokens into words.", show_default=False
        ),
    ] = None,
) -> None:
    """Recorded runs of a real vLLM as traces, for show, compare, export and the explorer."""
    from cbviz.interop.vllm_recording import import_recording

    if out is not None and len(files) > 1 and out.suffix in (".jsonl", ".gz"):
        raise ConfigError(f"--out {out} is one file, {len(files)} are to be imported: name a folder")
    tokenizer = _tokenizer(model) if model is not None else None
    for file in files:
        name = file.name.removesuffix(".gz").removesuffix(".jsonl") + ".cbviz.jsonl.gz"
        path = Path(name) if out is None else out / name if out.is_dir() or len(files) > 1 else out
        trace = import_recording(file, tokenizer=tokenizer, workload=requests)
        trace.save(path)
        for note in trace.header.notes:
            say(f"{file.name}: {note}")
        for what, why in trace.header.missing.items():
            say(f"{file.name}: no {what}: {why}")
        print(path)


def _tokenizer(model: str) -> Tokenizer:
    """A model's tokenizer without its weights. Raises ModelError."""
    from cbviz.model import hub
    from cbviz.model.gguf_file import GgufFile
    from cbviz.model.tokenizer import Tokenizer

    source = hub.resolve(model)
    if source.kind == "gguf":
        with GgufFile(source.path) as f:
            return Tokenizer.from_gguf(f.metadata)
    found = Tokenizer.from_folder(source.path)
    if found is None:
        raise hub.ModelError(f"{source.path} has no tokenizer.json")
    return found
