"""The command line. Owns the commands, their words and exit codes; everything that computes lies elsewhere and is imported when its command runs.

Exit codes: 0 all is well; 1 what `conform` held against each other differs; 2 a wrong request, in one line on stderr; 130 stopped with Ctrl-C.
With `--json` one JSON object goes to stdout and nothing else does; progress, notes and errors go to stderr.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from cbviz.config import CONFIG_FIELDS, DISCIPLINES, ConfigError, EngineConfig, parse_value

if TYPE_CHECKING:
    from cbviz.interleave import Rows
    from cbviz.messages import StepRecord
    from cbviz.session import Session
    from cbviz.trace.compare import Comparison
    from cbviz.trace.trace import Trace

BAR_AFTER_S = 2.0
"""Only what takes longer gets a progress bar."""
LINE_EVERY_S = 10.0
"""Where stderr is no terminal, a line this often stands for the bar."""
MOST_ROWS = 20
"""Requests of a table for people; `--json` has all."""
DEFAULT_MODEL = "smollm2"
EXPORTS = ("csv", "perfetto")

app = typer.Typer(name="cbviz", help="A debugger for LLM serving: step a real engine through continuous batching, see what each iteration did, and why.", add_completion=False,
                  no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
model_app = typer.Typer(name="model", help="Weights: fetch, list, and plan what fits where.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(model_app)

_debug = False


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The entry point. `--debug` may stand anywhere and shows tracebacks."""
    global _debug
    args = list(sys.argv[1:] if argv is None else argv)
    _debug = "--debug" in args
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a console that lacks a sign shows '?', and nothing fails for it
    app([a for a in args if a != "--debug"])
    raise SystemExit(0)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False, debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")] = False) -> None:
    if version:
        from cbviz import __version__

        typer.echo(f"cbviz {__version__}")
        raise typer.Exit


def _plain_errors(f: Callable[..., None]) -> Callable[..., None]:
    """Known errors become one line on stderr and exit code 2, Ctrl-C exit code 130. Others are bugs and keep their traceback."""

    @functools.wraps(f)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            f(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            _say("stopped")
            raise SystemExit(130) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has seen enough; the interpreter's last flush must not complain
            raise SystemExit(0) from None
        except Exception as e:
            if _debug or not isinstance(e, _known_errors()):
                raise
            _say(f"cbviz: {_one_line(e)}")
            raise SystemExit(2) from None

    return guarded


def _known_errors() -> tuple[type[BaseException], ...]:
    from cbviz.core.policy import PolicyError
    from cbviz.messages import RequestError
    from cbviz.model.hub import ModelError
    from cbviz.runners.base import RunnerError
    from cbviz.runners.tape import TapeError
    from cbviz.session import ReplayError, Stuck
    from cbviz.trace.schema import TraceError

    return ConfigError, RequestError, ModelError, TraceError, PolicyError, RunnerError, TapeError, ReplayError, Stuck, OSError, MemoryError


def _one_line(e: BaseException) -> str:
    if isinstance(e, OSError) and e.filename is not None:
        return f"{e.filename}: {e.strerror or e}"
    if isinstance(e, MemoryError):
        return "out of memory: choose a smaller workload or pool"
    return " ".join(str(e).split()) or type(e).__name__


def _say(text: str) -> None:
    """A line for the person, on stderr."""
    print(text, file=sys.stderr, flush=True)


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, allow_nan=False, default=str))


# progress and stopping --------------------------------------------------------------------------------------------------


class _Bar:
    """Progress on stderr, from the third second on. `total` 0: how long it takes is not known."""

    def __init__(self, title: str, total: float = 0) -> None:
        self.title, self.total, self.done, self.note = title, total, 0.0, ""
        self._lock = threading.Lock()
        self._progress: Any = None
        self._task: Any = None
        self._told = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._timer = threading.Timer(BAR_AFTER_S, self._show)
        self._timer.daemon = True

    def __enter__(self) -> _Bar:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        with self._lock:
            if self._progress is not None:
                self._progress.stop()
                self._progress = None

    def _show(self) -> None:
        if not self._terminal:
            _say(self._line())
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[note]}", markup=False), TimeElapsedColumn())
        with self._lock:
            if self._timer.finished.is_set():
                return
            # Four pictures a second: what is measured beside it should not notice.
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False)
            self._task = self._progress.add_task(self.title, total=self.total or None, completed=self.done, note=self.note)
            self._progress.start()

    def _line(self) -> str:
        share = f" {100 * min(1.0, self.done / self.total):.0f} %" if self.total else ""
        return f"{self.title}{share}{', ' if self.note else ''}{self.note}"

    def update(self, done: float, total: float | None = None, note: str = "", title: str = "") -> None:
        self.done, self.note = done, note
        self.total = self.total if total is None else total
        self.title = title or self.title
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=self.total or None, note=note, description=self.title)
        elif not self._terminal and time.monotonic() - self._told > LINE_EVERY_S:
            self._told = time.monotonic()
            _say(self._line())

    def download(self, done: int, total: int) -> None:
        """Progress of fetching a model, in bytes."""
        self.update(done, total, f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB")


class _Stop:
    """Ctrl-C while steps run: the first lets the step in progress end, so that trace and engine agree; the second breaks it off (the engine takes it back)."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


# what the options mean --------------------------------------------------------------------------------------------------


def _pairs(given: Iterable[str], option: str) -> dict[str, str]:
    out = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{option} {text!r}: write {option} name=value")
        out[name.strip()] = value
    return out


def _explicit(sets: Sequence[str], discipline: str | None, policy: str | None) -> dict[str, Any]:
    """Config fields that the user named, checked. Raises ConfigError for a bad one, or one named twice."""
    fields: dict[str, Any] = {name: parse_value(name, value) for name, value in _pairs(sets, "--set").items()}
    for name, value in (("discipline", discipline), ("policy", policy)):
        if value is not None:
            if name in fields:
                raise ConfigError(f"{name} is given twice, by --{name} and by --set")
            fields[name] = value
    if "seed" in fields:
        raise ConfigError("seed has an option of its own: --seed, which holds for the workload too")
    EngineConfig(**fields)
    return fields


def _params(given: Sequence[str]) -> dict[str, Any]:
    """Parameters of a workload: whole numbers and numbers are read as such."""
    out: dict[str, Any] = {}
    for name, value in _pairs(given, "--param").items():
        for kind in (int, float, str):
            try:
                out[name] = kind(value)
                break
            except ValueError:
                continue
    return out


def _with_preset(workload: str, explicit: dict[str, Any]) -> dict[str, Any]:
    """The fields in force: those under which a preset shows its point, and over them what the user named.

    A preset's token budget is for chunked prefill; another discipline computes whole prompts, and would only have it raised.
    """
    from cbviz.workload import PRESETS

    preset = PRESETS.get(workload)
    suggested = {k: v for k, v in preset.settings.items() if k not in explicit} if preset else {}
    fields = {**suggested, **explicit}
    chunked = fields.get("enable_chunked_prefill")
    if not (DISCIPLINES[fields.get("discipline", "chunked")].chunked if chunked is None else chunked) and "max_num_batched_tokens" in suggested:
        del fields["max_num_batched_tokens"]
    return fields


def _preset_note(workload: str, explicit: dict[str, Any]) -> str:
    """Which settings came from the preset and differ from the defaults."""
    taken = {k: v for k, v in _with_preset(workload, explicit).items() if k not in explicit and v != CONFIG_FIELDS[k].default}
    return f"settings of the preset {workload!r}, unless --set says otherwise: {', '.join(f'{k}={v}' for k, v in taken.items())}" if taken else ""


def _open(runner: str, workload: str, model: str | None, seed: int, explicit: dict[str, Any], params: dict[str, Any], bar: _Bar) -> Session:
    """The session that the options describe. Raises what is wrong with them, before a model is loaded where that can be told."""
    from cbviz.session import RUNNERS, Session
    from cbviz.trace.trace import load

    if runner not in RUNNERS:
        near = difflib.get_close_matches(runner, RUNNERS, n=1)
        raise ConfigError(f"runner is {runner!r}, it must be one of {', '.join(RUNNERS)}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if runner == "tape":
        if model is not None or params:
            raise ConfigError(f"{'--model' if model is not None else '--param'} does not go with --runner tape: model and requests are those of the recording")
        if not Path(workload).is_file():
            raise ConfigError(f"--runner tape runs a recording again under another schedule: --workload must be a trace file, got {workload!r}")
        return Session.from_tape(load(workload), **explicit)
    return Session(workload, runner=runner, model=model or DEFAULT_MODEL, seed=seed, workload_params=params, progress=bar.download, **_with_preset(workload, explicit))


def _expected_tokens(s: Session) -> int:
    """Output tokens of the workload, at most: what a progress bar runs to."""
    return sum(x.output_len if x.output_len is not None and s.runner_name != "torch" else x.max_tokens for x in s.workload)


def _run_note(s: Session, tokens: int, began: float) -> str:
    spent = time.monotonic() - began
    return f"step {len(s.trace):,}, {tokens:,} tokens" + (f", {tokens / spent:,.0f}/s" if spent > 0 else "")


def _sampled(record: StepRecord) -> int:
    from cbviz.events import Sampled

    return sum(len(e.token_ids) for e in record.events if isinstance(e, Sampled))


def _ties(trace: Trace) -> list[dict[str, Any]]:
    """Output positions whose two best tokens were closer than TIE_NATS: there another correct engine may choose the other."""
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


# options that several commands have -------------------------------------------------------------------------------------

Runner = Annotated[str, typer.Option(help="What makes the tokens: torch (the real model), sim (made up, modelled time), tape (those of a recording, given as --workload).")]
Workload = Annotated[str, typer.Option(help="A preset (article, chat, burst, ...) or a file of requests.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="A field of the configuration, e.g. max_num_seqs=4. Repeatable.")]
Params = Annotated[list[str] | None, typer.Option("--param", metavar="NAME=VALUE", help="A parameter of the workload, e.g. num_requests=50; of a file: limit, scale. Repeatable.")]
Seed = Annotated[int, typer.Option(help="Seed of the workload and of sampling.")]
Model = Annotated[str | None, typer.Option(help=f"A known model, a folder, a GGUF file or a hub id; with sim, whose shape is priced. [default: {DEFAULT_MODEL}]", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Port; by default a free one from 8866 on.", show_default=False)]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Don't open a browser.")]


# commands ---------------------------------------------------------------------------------------------------------------


@app.command()
@_plain_errors
def explore(
    scenario: Annotated[str | None, typer.Option(help="A preset or a file of requests to begin with.")] = None,
    model: Model = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    no_browser: NoBrowser = False,
) -> None:
    """The explorer as a dashboard in the browser."""
    from cbviz.app import serve
    from cbviz.workload import check

    if scenario is not None:
        check(scenario)
        scenario = scenario if not Path(scenario).is_file() else str(Path(scenario).resolve())
    raise SystemExit(serve.explore(scenario, model, host=host, port=port, browser=not no_browser))


@app.command()
@_plain_errors
def lab(
    folder: Annotated[Path | None, typer.Argument(help="A folder to open instead of the notebooks.", show_default=False)] = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    no_browser: NoBrowser = False,
) -> None:
    """JupyterLab on the notebooks."""
    from cbviz.app import serve

    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    raise SystemExit(serve.lab(host=host, port=port, browser=not no_browser, folder=folder))


@app.command()
@_plain_errors
def run(
    runner: Runner = "torch",
    workload: Workload = "article",
    discipline: Annotated[str | None, typer.Option(help=f"How batches are formed: {', '.join(DISCIPLINES)}.", show_default=False)] = None,
    policy: Annotated[str | None, typer.Option(help="Who goes first: fcfs, priority, sjf, ...", show_default=False)] = None,
    set_: Sets = None,
    param: Params = None,
    seed: Seed = 0,
    model: Model = None,
    out: Annotated[Path | None, typer.Option(help="Where the trace goes (.jsonl or .jsonl.gz). By default it is kept in the cache, for `cbviz show`.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Run a workload to its end, print the metrics, write the trace. Ctrl-C stops after the step in progress."""
    from cbviz.trace import runs

    explicit, params = _explicit(set_ or (), discipline, policy), _params(param or ())
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file in it, e.g. {out / 'run.jsonl'}")
    with _Bar(f"loading {model or DEFAULT_MODEL}" if runner == "torch" else "preparing") as bar:
        s = _open(runner, workload, model, seed, explicit, params, bar)
    for note in filter(None, [_preset_note(workload, explicit) if runner != "tape" else "", *s.notes]):
        _say(note)
    # Written line by line, so that a crash loses one step at most; a gzip file can't be, it is written at the end.
    zipped = out is not None and out.suffix == ".gz"
    path = out if out is not None and not zipped else runs.new_path(f"{Path(workload).stem}-{s.config.discipline}")
    s.trace.autosave(path)
    stopped = False
    try:
        stopped = _run_to_end(s)
    except BaseException as e:
        if not isinstance(e, KeyboardInterrupt):
            _say(f"the run failed in step {len(s.trace) + 1}; what it did before is in {_finish(s, path, out if zipped else None)}")
            raise
        stopped = True
    where = _finish(s, path, out if zipped else None)
    for reason in _refused(s.trace)[:MOST_ROWS]:
        _say(f"refused: {reason}")
    if as_json:
        _print_json(_run_result(s, where, stopped))
    else:
        _print_run(s, where)
    if stopped:
        _say(f"stopped after step {len(s.trace)}; the trace is in {where} (cbviz show {where})")
        raise SystemExit(130)


def _run_to_end(s: Session) -> bool:
    """Runs with a bar. True if Ctrl-C stopped it before the end."""
    tokens, began = 0, time.monotonic()
    with _Stop() as stop, _Bar(f"{s.workload_name}, {s.config.discipline}", _expected_tokens(s)) as bar:

        def tell(record: StepRecord) -> None:
            nonlocal tokens
            tokens += _sampled(record)
            bar.update(tokens, note=_run_note(s, tokens, began))

        s.run(until=lambda record, state: stop.asked, progress=tell)
        return stop.asked and not s.done


def _finish(s: Session, path: Path, zipped: Path | None) -> Path:
    """Closes the trace's file; for a gzip file writes that and drops the plain one."""
    s.close()
    if zipped is None:
        return path
    s.save(zipped)
    path.unlink(missing_ok=True)
    return zipped


def _run_result(s: Session, where: Path, stopped: bool) -> dict[str, Any]:
    from cbviz.trace.metrics import metrics

    end = s.trace.state()
    m = metrics(s.trace)
    return {
        "workload": s.workload_name, "runner": s.runner_name, "model": s.model, "clock": m["clock"], "device": m["device"], "steps": len(s.trace), "stopped": stopped, "metrics": m,
        "config": s.config.to_dict(), "notes": s.notes, "tokens": {r.request_id: r.output_token_ids for r in end.by_index}, "finish_reasons": {r.request_id: r.finish_reason for r in end.by_index},
        "ties": _ties(s.trace), "trace": str(where),
    }


def _print_run(s: Session, where: Path) -> None:
    from cbviz.trace.metrics import format_metrics, metrics

    c = s.config
    print(f"{s.workload_name}: {s.runner_name}, {s.model}, {c.discipline}, {c.policy}, {c.max_num_seqs} seats, {c.num_blocks} blocks of {c.block_size}\n")
    print(format_metrics(metrics(s.trace)))
    if ties := _ties(s.trace):
        shown = ", ".join(f"{t['request_id']} output {t['position']} ({t['gap_nats']:.1e})" for t in ties[:6])
        print(f"{len(ties)} outputs whose two best tokens are closer than 0.001 nats, where another correct engine may differ: {shown}{', ...' if len(ties) > 6 else ''}")
    print(f"trace: {where}")


@app.command()
@_plain_errors
def compare(
    files: Annotated[list[Path] | None, typer.Argument(metavar="[A B ...]", help="Recorded runs; the first is what the others are held against.", show_default=False)] = None,
    workload: Annotated[str | None, typer.Option(help="Instead of recorded runs: run this workload under each discipline and policy, interleaved in one process.", show_default=False)] = None,
    discipline: Annotated[list[str] | None, typer.Option(help="Repeatable; the first is what the others are held against.", show_default=False)] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Repeatable.", show_default=False)] = None,
    runner: Annotated[str | None, typer.Option(help="torch (default), sim or tape; as in `cbviz run`.", show_default=False)] = None,
    set_: Sets = None,
    param: Params = None,
    seed: Seed = 0,
    model: Model = None,
    rounds: Annotated[int | None, typer.Option(min=1, max=20, help="How often all is run. Each step counts with its best time. By default up to 3 rounds with a measured clock, if they take no longer than 4 minutes.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Runs side by side: metrics, ratios, where the schedules part, and the first token that differs."""
    if workload is None:
        if discipline or policy or runner or set_ or param or model or rounds:
            raise ConfigError("to run something, name what: cbviz compare --workload W --discipline D1 --discipline D2. Two recorded runs: cbviz compare A B")
        if not files or len(files) < 2:
            raise ConfigError("compare needs two recorded runs (cbviz compare A B), or --workload W with two disciplines or policies")
        _compare_files(files, as_json)
        return
    if files:
        raise ConfigError(f"either recorded runs or --workload, not both: {' '.join(map(str, files))}")
    _compare_live(workload, list(dict.fromkeys(discipline or ())), list(dict.fromkeys(policy or ())), runner or "torch", set_ or (), _params(param or ()), seed, model, rounds, as_json)


def _compare_files(files: list[Path], as_json: bool) -> None:
    from cbviz.trace.trace import load

    names: list[str] = []
    for f in files:
        short = f.name.removesuffix(".gz").removesuffix(".jsonl")
        names.append(short if short not in names and sum(g.name == f.name for g in files) == 1 else str(f) if str(f) not in names else f"{f} ({len(names) + 1})")
    with _Bar("reading"):
        traces = dict(zip(names, map(load, files)))
        result = _comparisons(traces)
    if as_json:
        _print_json({"runs": {n: {"file": str(f), **_described(traces[n])} for n, f in zip(names, files)}, **_compared_json(traces, result)})
    else:
        _print_compared(traces, result)


def _compare_live(workload: str, disciplines: list[str], policies: list[str], runner: str, sets: Sequence[str], params: dict[str, Any], seed: int, model: str | None, rounds: int | None, as_json: bool) -> None:
    from cbviz import interleave

    combinations = [(d, p) for d in disciplines or [None] for p in policies or [None]]
    if len(combinations) < 2:
        raise ConfigError(f"compare needs at least two runs: give --discipline twice (of {', '.join(DISCIPLINES)}), or --policy twice")
    explicit = [_explicit(sets, d, p) for d, p in combinations]
    names = ["/".join(x for x, many in ((d, len(disciplines) != 1 or len(policies) < 2), (p, len(policies) > 1)) if x and many) for d, p in combinations]
    sessions = []
    with _Bar(f"loading {model or DEFAULT_MODEL}" if runner == "torch" else "preparing") as bar:
        for fields in explicit:
            sessions.append(_open(runner, workload, model, seed, fields, params, bar))
        if runner == "torch":
            bar.update(0, 0, title="warming up")
            interleave.warm_up(sessions[0])
    notes = [f"{n}: {note}" for n, s in zip(names, sessions) for note in s.notes]
    for note in filter(None, [_preset_note(workload, explicit[0]) if runner != "tape" else "", *notes]):
        _say(note)
    played = _play(sessions, names, rounds)
    if played is None:
        _say(f"stopped after {sum(len(s.trace) for s in sessions)} steps; a comparison needs the whole run")
        raise SystemExit(130)
    measured = all(s.config.clock == "measured" for s in sessions)
    # Shown in the tables: the round that was disturbed least.
    best = min(played, key=lambda traces: sum(t.state().time_s for t in traces))
    traces = dict(zip(names, best))
    result = _comparisons(traces)
    steps = {n: interleave.rows([r[i] for r in played]) for i, n in enumerate(names)} if measured else {}
    timing = _timing(steps, [{n: interleave.total_s(interleave.rows([t])) for n, t in zip(names, r)} for r in played]) if measured else None
    if as_json:
        runs = {n: {**_described(traces[n]), "config": s.config.to_dict(), "tokens": {r.request_id: r.output_token_ids for r in traces[n].state().by_index}} for n, s in zip(names, sessions)}
        _print_json({"workload": workload, "runner": runner, "rounds": len(played), "runs": runs, **_compared_json(traces, result), "timing": timing})
        return
    _print_compared(traces, result)
    if timing is not None:
        _print_timing(timing, steps, len(played))


def _play(sessions: list[Session], names: list[str], rounds: int | None) -> list[list[Trace]] | None:
    """Runs all rounds with a bar. None if Ctrl-C came."""
    from cbviz import interleave

    expected = sum(map(_expected_tokens, sessions))
    tokens, began = 0, time.monotonic()
    with _Stop() as stop, _Bar(", ".join(names), expected) as bar:

        def tell(i: int, record: StepRecord) -> None:
            nonlocal tokens
            tokens += _sampled(record)
            turn = (tokens - 1) // expected + 1 if expected else 1
            bar.update(tokens - (turn - 1) * expected, note=f"round {turn}, {tokens / max(1e-9, time.monotonic() - began):,.0f} tokens/s")

        played = interleave.run_rounds(sessions, rounds, tell, lambda: stop.asked)
        return None if stop.asked else played


def _timing(steps: dict[str, Rows], rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Measured time of each run against the first one's, beside what a cost a step and a cost a token, fitted over all their steps, predict."""
    from cbviz import interleave

    names = list(steps)
    base = names[0]
    fitted = interleave.fit(steps.values())
    ratios: dict[str, Any] = {}
    for n in names[1:]:
        measured = interleave.total_s(steps[n]) / interleave.total_s(steps[base]) if interleave.total_s(steps[base]) else None
        below = fitted.predict(steps[base]) if fitted is not None else 0.0
        predicted = fitted.predict(steps[n]) / below if fitted is not None and below > 0 else None
        ratios[n] = {"measured": measured, "predicted": predicted, "deviation": measured / predicted - 1 if measured is not None and predicted else None,
                     "rounds": [r[n] / r[base] for r in rounds if r[base]]}
    return {
        "base": base, "clock": "measured", "fit": dataclasses.asdict(fitted) if fitted is not None else None,
        "runs": {n: {"steps": len(x), "tokens": sum(k for k, _ in x), "measured_s": interleave.total_s(x)} for n, x in steps.items()}, "ratios": ratios,
    }


def _print_timing(timing: dict[str, Any], steps: dict[str, Rows], rounds: int) -> None:
    from cbviz.trace.metrics import seconds

    base, fitted = timing["base"], timing["fit"]
    first = timing["runs"][base]
    print()
    for n, r in timing["ratios"].items():
        if r["measured"] is None:
            continue
        alone = f"; the rounds alone: {', '.join(f'{x:.3f}' for x in r['rounds'])}" if rounds > 1 else ""
        print(f"measured:  {n} takes {r['measured']:.3f} of the time of {base}{f' (each step at its best of {rounds} rounds{alone})' if rounds > 1 else ''}")
        if r["predicted"] is not None:
            mine = timing["runs"][n]
            print(f"predicted: {r['predicted']:.3f}, from {mine['steps']:,} steps and {mine['tokens']:,} tokens against {first['steps']:,} and {first['tokens']:,}; "
                  f"the measured ratio is {abs(100 * r['deviation']):.1f} % {'above' if r['deviation'] >= 0 else 'below'} it")
    if fitted is not None:
        explained = f", which explains {100 * fitted['r2']:.0f} % of their variance" if fitted["r2"] is not None else ""
        print(f"fitted:    {seconds(fitted['cost_per_step_s'])} a step and {seconds(fitted['cost_per_token_s'])} a token, least squares over {fitted['num_steps']:,} measured steps of all runs{explained}")


def _described(trace: Trace) -> dict[str, Any]:
    from cbviz.trace.metrics import metrics

    h = trace.header
    return {"workload": h.workload, "runner": h.runner, "model": h.model, "clock": h.clock, "device": h.device, "steps": len(trace), "metrics": metrics(trace),
            "finish_reasons": {r.request_id: r.finish_reason for r in trace.state().by_index}}


def _comparisons(traces: dict[str, Trace]) -> dict[str, Comparison]:
    """Each run but the first, held against the first."""
    from cbviz.trace.compare import compare as hold_against

    base, *rest = traces
    return {n: hold_against(traces[base], traces[n], (base, n)) for n in rest}


_ALIGNED = ("first_scheduled_step", "first_token_step", "finish_step", "num_preemptions", "output_tokens", "ttft_s", "e2e_s")


def _aligned(a: Trace, b: Trace) -> list[dict[str, Any]]:
    """Request by request, what went differently: `{"request_id": ..., field: [in a, in b]}`, only those that differ. Times count only where the schedule differs as well."""
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
        "base": base, "equal": all(c.equal for c in result.values()), "tokens_equal": all(c.tokens_equal for c in result.values()),
        "tokens_equal_up_to_ties": all(c.tokens_equal_up_to_ties for c in result.values()),
        "comparisons": {n: {**c.to_dict(), "requests": _aligned(traces[base], traces[n])} for n, c in result.items()},
    }


def _print_compared(traces: dict[str, Trace], result: dict[str, Comparison]) -> None:
    from cbviz.trace.compare import metrics_table, text_table
    from cbviz.trace.metrics import format_value, metrics

    base = next(iter(traces))
    print(metrics_table({n: metrics(t) for n, t in traces.items()}))
    for n, c in result.items():
        print(f"\n{n} against {base}: " + ("schedules and blocks are equal" if c.schedules_equal and c.blocks_equal else f"schedules {'are equal' if c.schedules_equal else 'differ'}, "
                                          f"blocks {'are equal' if c.blocks_equal else 'differ'}"))
        if c.first_difference is not None:
            print(f"first difference: {c.first_difference}")
        if aligned := _aligned(traces[base], traces[n]):
            short = {"first_scheduled_step": "scheduled", "first_token_step": "first token", "finish_step": "finished", "num_preemptions": "preempted", "output_tokens": "outputs", "ttft_s": "TTFT", "e2e_s": "E2E"}
            rows = [[r["request_id"], *(_change(f, *r[f], format_value) for f in _ALIGNED)] for r in aligned[:MOST_ROWS]]
            print(text_table(["step / time", *(short[f] for f in _ALIGNED)], rows))
            if len(aligned) > MOST_ROWS:
                print(f"and {len(aligned) - MOST_ROWS} more requests (--json has all)")
        if c.tokens_equal:
            print(f"outputs are equal: the same tokens for all {len(traces[base].state().by_index)} requests")
        else:
            print(f"first differing token: {c.first_token_difference} ({len(c.token_differences)} requests differ, {len(c.ties)} of them first at a tie)")
        for note in c.notes:
            if "compar" in note:
                print(note)


def _change(field: str, a: Any, b: Any, show_value: Callable[[str, Any], str]) -> str:
    if field.endswith("_s"):
        return f"{show_value('makespan_s', a)} > {show_value('makespan_s', b)}"
    return f"{'-' if a is None else a}" if a == b else f"{'-' if a is None else a} > {'-' if b is None else b}"


@app.command()
@_plain_errors
def show(
    run_file: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A recorded run; by default the newest of those that were kept.", show_default=False)] = None,
    step: Annotated[int | None, typer.Option(help="The step to show; by default the last.", show_default=False)] = None,
) -> None:
    """One moment of a recorded run as text: the explorer's twin."""
    from cbviz.trace import runs
    from cbviz.trace.show import show as text_of
    from cbviz.trace.trace import load

    path = run_file if run_file is not None else runs.last()
    if path is None:
        raise ConfigError(f"no run is kept in {runs.folder()} yet: name a file, or make one with cbviz run --runner sim")
    with _Bar(f"reading {path.name}"):
        trace = load(path)
    if run_file is None:
        _say(f"the newest run: {path}")
    state = trace.state()
    left = len(state.waiting) + sum(1 for rid in state.running if not state.requests[rid].finished)
    if left:
        _say(f"this run was not finished: {left} requests were left after step {len(trace)}")
    for note in trace.header.notes:
        _say(note)
    try:
        print(text_of(trace, step, shutil.get_terminal_size((120, 40)).columns))
    except IndexError as e:
        raise ConfigError(str(e)) from None


@app.command()
@_plain_errors
def export(
    run_file: Annotated[Path, typer.Argument(metavar="RUN", help="A recorded run.")],
    to: Annotated[str, typer.Option(help=f"One of {', '.join(EXPORTS)}.")],
    out: Annotated[Path | None, typer.Option(help="File to write; csv writes two, NAME.requests.csv and NAME.steps.csv. By default beside RUN.", show_default=False)] = None,
) -> None:
    """A recorded run for other programs: tables, or a timeline for Perfetto."""
    from cbviz.interop import perfetto, tables
    from cbviz.trace.trace import load

    if to not in EXPORTS:
        near = difflib.get_close_matches(to, EXPORTS, n=1)
        raise ConfigError(f"--to is {to!r}, it must be one of {', '.join(EXPORTS)}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    with _Bar(f"writing {to}"):
        trace = load(run_file)
        stem = run_file.with_name(run_file.name.removesuffix(".gz").removesuffix(".jsonl")) if out is None else out.with_name(out.name.removesuffix(".csv"))
        if to == "csv":
            files = {stem.with_name(stem.name + ".requests.csv"): tables.requests_csv(trace), stem.with_name(stem.name + ".steps.csv"): tables.steps_csv(trace)}
        else:
            files = {out or stem.with_name(stem.name + ".perfetto.json"): json.dumps(perfetto.to_perfetto(trace), allow_nan=False)}
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="")
    for path in files:
        print(path)


@app.command()
@_plain_errors
def conform(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Recordings of vLLM, or folders of them.")],
    as_json: Json = False,
) -> None:
    """Replay recordings of vLLM's scheduler and compare every key of every step. Exit code 0 only if all are equal."""
    from cbviz import conform as judge

    at = ""
    with _Bar("replaying") as bar:

        def tell(done: int, total: int, name: str = "") -> None:
            nonlocal at
            at = name
            bar.update(done, total, note=name)

        try:
            outcomes = judge.conform(list(paths), tell)
        except (KeyError, TypeError, ValueError, EOFError) as e:
            if isinstance(e, _known_errors()):
                raise
            raise ConfigError(f"{at or paths[0]} is not a recording that can be replayed: {type(e).__name__}: {e}") from e
    played = [o for o in outcomes if not o.skipped]
    skipped = [o for o in outcomes if o.skipped]
    equal = [o for o in played if o.equal]
    if not outcomes:
        raise ConfigError(f"no recording in {', '.join(map(str, paths))}")
    if as_json:
        _print_json({"equal": len(equal), "total": len(played), "scenarios": [{k: v for k, v in dataclasses.asdict(o).items() if k != "skipped"} for o in played],
                     "skipped": [{"name": o.name, "why": o.skipped} for o in skipped]})
    else:
        for o in played:
            if not o.equal:
                print(f"{o.name}: step {o.step}, {o.key}\n  ours    {_clipped(o.ours)}\n  theirs  {_clipped(o.theirs)}")
        print(f"{len(equal)} of {len(played)} scenarios equal" + (f", {sum(o.steps for o in equal):,} steps" if equal else ""))
        for why in dict.fromkeys(o.skipped for o in skipped):
            names = [o.name for o in skipped if o.skipped == why]
            print(f"{len(names)} skipped, {why}: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}")
    if not played or len(equal) < len(played):
        raise SystemExit(1)


def _clipped(value: Any, most: int = 400) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= most else text[:most] + f" ... ({len(text):,} characters; --json has all)"


@app.command()
@_plain_errors
def calibrate(as_json: Json = False) -> None:
    """Measure this machine's memory bandwidth and float32 arithmetic, and keep the figures in the cache."""
    from cbviz.cost import calibrate as gauge

    with _Bar("measuring", 1.0) as bar:
        d = gauge.measure(lambda share, text: bar.update(share, note=text))
    kept = gauge.cache_dir() / gauge.FILE
    if as_json:
        _print_json({**dataclasses.asdict(d), "file": str(kept) if kept.exists() else None})
        return
    print(f"{d.name}\nmemory bandwidth    {d.bandwidth_bytes_s / 1e9:,.1f} GB/s    measured\nfloat32 arithmetic  {d.flops_s / 1e9:,.1f} GFLOP/s  measured\nmemory              {d.memory_bytes / 2**30:,.1f} GiB")
    print(f"{d.source}\n{f'kept in {kept}' if kept.exists() else f'could not be kept in {kept}'}")


@app.command()
@_plain_errors
def doctor(as_json: Json = False) -> None:
    """What works on this machine, what each missing thing costs, and what to do about it."""
    from cbviz import doctor as examiner

    with _Bar("looking"):
        report = examiner.examine()
    if as_json:
        _print_json(report.to_dict())
    else:
        print(report)


@model_app.command("pull")
@_plain_errors
def model_pull(name: Annotated[str, typer.Argument(help="A known model, or a hub id org/name.")] = DEFAULT_MODEL) -> None:
    """Fetch weights into the cache and verify them. Does nothing if they are there."""
    from cbviz.model import hub

    with _Bar(f"fetching {name}") as bar:
        source = hub.resolve(name, bar.download)
    print(f"{source.title}: {source.path}")


@model_app.command("list")
@_plain_errors
def model_list(as_json: Json = False) -> None:
    """Which models can be pulled, and which are here."""
    from cbviz.model import hub

    models = hub.list_models()
    if as_json:
        _print_json({"models": [{**dataclasses.asdict(m), "path": str(m.path) if m.path else None} for m in models]})
        return
    for m in models:
        print(f"{m.name}  {m.title}, {m.license}, {m.file_bytes / 1e6:,.0f} MB  " + (str(m.path) if m.path else f"not here: cbviz model pull {m.name} (downloads {m.download_bytes / 1e6:,.0f} MB)"))
    print("A folder with config.json and *.safetensors, a GGUF file, or a hub id org/name can be given to --model as well.")


@model_app.command("plan")
@_plain_errors
def model_plan(
    model: Annotated[str, typer.Argument(help="A model of the table, e.g. llama-3.1-8b.")],
    device: Annotated[str, typer.Argument(help="A device of the table, e.g. h100, or `here`: this machine's memory and measured peaks.")],
    context: Annotated[int | None, typer.Option(help="Tokens of one request, prompt and output. [default: the model's greatest, at most 8192]", show_default=False)] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in one KV block.")] = 16,
    utilisation: Annotated[float, typer.Option(help="Share of the memory for weights and KV.")] = 0.9,
    as_json: Json = False,
) -> None:
    """Does a model fit a device, and how many requests at once. Figures are modelled from the tables, not measured."""
    from cbviz.cost import calibrate as gauge
    from cbviz.cost import devices, models
    from cbviz.cost import plan as planner
    from cbviz.trace.metrics import seconds

    with _Bar("measuring this machine"):
        d = (gauge.load() or gauge.measure()) if device == "here" else devices.get(device)
    spec = models.get(model)
    p = planner.plan(spec, d, context=context, block_size=block_size, utilisation=utilisation)
    if as_json:
        _print_json({**dataclasses.asdict(p), "fits": p.fits, "source": "modelled", "model_source": spec.source, "device_source": d.source})
        return
    gib = 2**30
    print(f"{p.model} on {p.device}  (modelled from the tables, not measured)")
    print(f"memory         {p.memory_bytes / gib:>10,.1f} GiB     {100 * utilisation:.0f} % of it usable: {p.usable_bytes / gib:,.1f} GiB")
    print(f"weights        {p.weight_bytes / gib:>10,.1f} GiB")
    print(f"KV cache       {p.kv_bytes / gib:>10,.1f} GiB     {p.kv_bytes_per_token / 1024:,.1f} KiB a token over all layers")
    print(f"blocks         {p.num_blocks:>10,}         of {p.block_size} tokens, {p.num_blocks * p.block_size:,} tokens")
    print(f"concurrency    {p.max_concurrency:>10,}         requests of {p.context:,} tokens ({p.kv_bytes_per_request / gib:,.2f} GiB each)")
    if p.decode_s is not None:
        print(f"a decode step  {seconds(p.decode_s):>10}         at least, with that many requests at full context ({p.max_concurrency / p.decode_s:,.0f} tokens/s at most)")
    elif not p.kv_bytes:
        print("the weights alone do not fit: quantise them, or take several devices")
    else:
        print(f"not one request of {p.context:,} tokens fits beside the weights: lower --context or take a larger device")
    print("Left out: activations, graphs and the runtime's own memory (the share that is not usable), and anything split over several devices.")


__all__ = ["app", "main"]
