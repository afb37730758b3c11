"""A session: one live engine, its trace and a cursor.

Plain Python; what a notebook, the explorer and the command line all call.

Owns the run (steps, inputs, rewind, forks), the cursor and change callbacks. Knows no widget: whoever draws
asks `state()` and listens with `on_change`. A runner is found by name and imported only when asked for, so a
simulated run loads no torch.
"""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

import msgspec
import numpy as np

from cbviz import checks
from cbviz import cost as costs
from cbviz import events as ev
from cbviz import workload as workloads
from cbviz.breakpoints import (
    Breakpoint,
    BreakpointError,
    Predicate,
    Stop,
    Watch,
    as_breakpoint,
    held,
    last_stop,
    next_stop,
    on,
    stop_of,
)
from cbviz.config import CONFIG_FIELDS, ConfigError, EngineConfig, as_run, check_names, clean_text
from cbviz.core.plain import DIGEST_FORM
from cbviz.core.replay import ReplayError
from cbviz.cost import calibrate, devices, models
from cbviz.engine import interrupts
from cbviz.engine.engine import Engine
from cbviz.engine.plain import plain_digest, without_pending
from cbviz.engine.turns import Turn
from cbviz.messages import RequestError, RequestSpec, Sampling, StepRecord, sequence_ids
from cbviz.runners.base import Runner
from cbviz.specs import DeviceSpec, ModelSpec
from cbviz.trace import alone
from cbviz.trace.alone import AgainstAlone
from cbviz.trace.schema import Keyframe, TraceHeader
from cbviz.trace.state import RequestState, State
from cbviz.trace.trace import Cursor, Trace

if TYPE_CHECKING:
    from cbviz.runners.tape import TapeRunner

RUNNERS = ("torch", "sim", "tape")
DEFAULT_MAX_TOKENS = 64


class Stuck(RuntimeError):
    """Requests wait and nothing will ever change: names the request and what it would need."""


class Session:
    """Steps a real engine one iteration at a time and keeps everything it did.

    `workload`: a preset's name, a file of requests, a list of RequestSpec, or None for an empty start.
    `runner`: `torch` (a real model), `sim` (made-up tokens, modelled time), or a Runner. `model`: what the
    runner runs (for `sim`: whose shape is priced). `autosave`: a file that the steps are written to as they
    are made, at most `autosave_bytes` of it (see `autosave`). Other keywords are fields of EngineConfig. Any
    thread may call any method: what changes the run waits for the step under way. Raises ConfigError,
    RequestError or ModelError with what to do.

    >>> import cbviz as cb
    >>> s = cb.Session("article", runner="sim", discipline="static", max_num_seqs=4)
    >>> s.step().step, len(s.state().running)
    (1, 4)
    >>> last = s.run()
    >>> last.step
    815
    >>> branch = s.fork(at=0, discipline="chunked")
    >>> branch.run().step
    581
    """

    def __init__(
        self,
        workload: str | Path | Sequence[RequestSpec] | None = "article",
        *,
        runner: str | Runner = "torch",
        model: str = "smollm2",
        seed: int = 0,
        autosave: str | Path | None = None,
        autosave_bytes: int | None = None,
        progress: Callable[..., None] | None = None,
        workload_params: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        asked = checks.config_of({"seed": seed, **config})
        self.model = clean_text(model) if isinstance(model, str) else model
        self.runner_name = (
            runner if isinstance(runner, str) else getattr(runner, "name", type(runner).__name__)
        )
        self.workload_params = dict(workload_params or {})
        # What can be known to be wrong is said before a model is loaded.
        if asked.clock == "measured" and (runner == "sim" or getattr(runner, "simulated", False)):
            raise ConfigError(
                f"clock is 'measured', but runner {self.runner_name} computes nothing whose time could be "
                "measured: leave clock empty or 'modelled'"
            )
        if not isinstance(model, str):
            raise ConfigError(f"model must be a name or a path, got {model!r:.80}")
        if isinstance(workload, (str, Path)):
            workloads.check(workload, **self.workload_params)
        elif workload is not None and not isinstance(workload, Sequence):
            raise ConfigError(
                f"workload is {workload!r:.80}, it must be a preset's name, a file, a list of RequestSpec, "
                "or None"
            )
        loaded: Any = None
        if runner == "torch":
            loaded = _load_model(model, asked.device, progress)
            spec: ModelSpec = as_run(loaded.spec(asked.precision), asked)
        elif runner == "sim":
            spec = as_run(models.get(model), asked)
        elif isinstance(runner, str):
            raise ConfigError(
                f"runner is {runner!r}, it must be one of {', '.join(RUNNERS[:2])} (a taped run: "
                "Session.from_tape)"
            )
        elif not hasattr(runner, "execute"):
            raise ConfigError(f"runner must be {', '.join(RUNNERS[:2])} or a Runner, got {runner!r:.80}")
        else:
            spec = runner.spec
        if asked.clock is None:
            asked = asked.replace(clock="measured" if runner == "torch" else "modelled")
        self.config, self.notes = _resolve(asked, spec)
        if runner == "torch":
            from cbviz.runners.torch_runner import TorchRunner

            made = TorchRunner(loaded, self.config)
            self.runner: Runner = made
            if made.decoder.fallback:
                self.notes.append(made.decoder.fallback)
            if self.config.batch_invariant:
                self.notes.append(f"batch_invariant is on: operators {made.ops.name} ({made.ops.about})")
        elif runner == "sim":
            from cbviz.runners.sim import SimRunner

            self.runner = SimRunner(spec, self.config.seed)
        else:
            assert not isinstance(runner, str)
            self.runner = runner
        self._start_config, self._start_notes = self.config, list(self.notes)
        self.workload_name = (
            ""
            if workload is None
            else clean_text(str(workload))
            if isinstance(workload, (str, Path))
            else "requests"
        )
        if isinstance(workload, (str, Path)):
            told: list[str] = []
            specs = workloads.build(
                workload,
                seed=seed,
                model_vocab=spec.vocab_size,
                tokenizer=self.tokenizer,
                notes=told,
                **self.workload_params,
            )
            self.notes += told
            self._start_notes += told
        else:
            specs = list(workload or ())
            if strange := next((x for x in specs if not isinstance(x, RequestSpec)), None):
                raise RequestError(
                    "a workload is a preset's name, a file, or a list of RequestSpec; the list holds "
                    f"{strange!r:.80}"
                )
        self.workload: list[RequestSpec] = specs
        self.breakpoints: list[Breakpoint | Predicate] = []
        """Where `step`, `run` and `run_to` stop; see `break_on`. Plain predicates may be appended too."""
        self.watches: list[Watch] = []
        self.stopped_by: Stop | None = None
        """Why the last `step`, `run`, `run_to` or `run_back` stopped where it did; None if no breakpoint
        held.
        """
        self.name = "main"
        self.parent: Session | None = None
        self.branches: list[Session] = []
        self.forked_at = 0
        self._forked: dict[int, list[dict[str, Any]]] = {}
        """The changes that made this branch, and those it descends from, by the step after which they were made.
        """
        self.recomputed_blocks = 0
        """KV blocks that the last rewind or fork had to compute again."""
        self.turn = Turn()
        """`with s.turn:` no other thread changes this run or its branches; whoever only looks does not wait.
        """
        self._redone = 0
        """The step whose inputs of the script were given already, though it was not made yet."""
        self._autosave_note = ""
        self._listeners: list[Callable[[str], None]] = []
        self._device = self._pick_device()
        self.trace = Trace()
        self._begin()
        if autosave is not None:
            self.autosave(autosave, autosave_bytes)

    @classmethod
    def from_tape(cls, trace: Trace, **changes: Any) -> Session:
        """A what-if on recorded tokens: the requests, outputs and words of `trace` under another schedule.

        Needs no model; time is modelled.
        """
        end = trace.state()
        runner = tape_runner(trace)
        tokens = runner.tokens
        limits = ("length",) if "max_model_len" in changes else ("length", "max_model_len")
        specs = [
            _taped(
                s,
                [
                    (len(tokens[i]), end.requests[i].finish_reason in limits)
                    for i in sequence_ids(s)[: s.sampling.n]
                ],
            )
            for s in trace.specs.values()
            if tokens.get(s.request_id)
        ]
        if not specs:
            raise ConfigError("this trace holds no request with tokens: there is nothing to run again")
        first = EngineConfig(**{k: v for k, v in trace.header.config.items() if k in CONFIG_FIELDS})
        s = cls(
            specs,
            runner=runner,
            model=trace.header.model or "smollm2",
            **first.changed(**{"clock": "modelled", **changes}).to_dict(),
        )
        s.workload_name = s.trace.header.workload = trace.header.workload or s.workload_name
        return s

    @classmethod
    def from_trace(
        cls,
        trace: Trace,
        *,
        runner: str | Runner | None = None,
        progress: Callable[..., None] | None = None,
        autosave: str | Path | None = None,
    ) -> Session:
        """A live session that stands where `trace` ends: its inputs, plans, tokens and times are applied
        again without asking the model, then only the KV blocks still needed are computed. Raises ReplayError
        where a recorded step does not come out again.
        """
        h = trace.header
        config = {k: v for k, v in h.config.items() if k in CONFIG_FIELDS and k != "seed"}
        workload = h.workload if _made_by_name(h.workload, h.runner) and not h.requests else list(h.requests)
        if runner is None:
            runner = _tape_of(trace) if h.runner == "tape" else h.runner
        s = cls(
            workload,
            runner=runner,
            model=h.model,
            seed=h.config.get("seed", 0),
            progress=progress,
            workload_params=h.workload_params,
            **config,
        )
        s.workload_name = h.workload
        s._forked = {k: inputs for k, inputs in h.forked.items() if k <= len(trace)}
        s._adopt(trace, len(trace))
        s._ask_again(h.inputs, _added(h.inputs))
        s._set_prices()
        s.notes += [note for note in h.notes if note not in s.notes]
        if autosave is not None:
            s.autosave(autosave)
        return s

    # what there is ------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None where tokens stand for no text."""
        return self.runner.tokenizer

    @property
    def request_ids(self) -> list[str]:
        """Ids of all requests ever added, those still to arrive included, and of the sequences forked from
        them.
        """
        return self._ids_and_forks()[0]

    def _ids_and_forks(self) -> tuple[list[str], int]:
        """All ids, and how many of them are forked sequences.

        Whole also while another thread makes a step, for which it does not wait.
        """
        while True:
            engine = self.engine
            coming = engine.coming_ids  # before the trace, to which they move
            state = self.trace.state()
            if engine is self.engine:  # nobody went back meanwhile
                return list(
                    dict.fromkeys([*(r.request_id for r in state.by_index), *coming])
                ), state.num_forked

    @property
    def num_requests(self) -> int:
        """All requests ever added, those still to arrive included; each counts once, whatever the number of
        its sequences.
        """
        ids, num_forked = self._ids_and_forks()
        return len(ids) - num_forked

    @property
    def done(self) -> bool:
        """Nothing is left to do (requests may still be added)."""
        return (not self.engine.has_work and not self._repeats) or bool(self.engine.stuck)

    def state(self) -> State:
        """What is drawn: the state at the cursor. Read only."""
        trace, at = self.here()
        return trace.state(at)

    def here(self) -> tuple[Trace, Cursor]:
        """The trace and the cursor, which go together also while another thread rewinds."""
        trace, at = self.trace, self.cursor
        return trace, at if at.step <= len(trace) else trace.last

    def request(self, request_id: str) -> RequestState:
        """The request at the cursor: status, output_token_ids, block_ids, ... Raises KeyError naming it."""
        return self.state().request(request_id)

    def outputs(self, request_id: str) -> list[list[int]]:
        """The output token ids of all the request's sequences (`Sampling.n`) at the cursor, its own first; of
        beams (`Sampling.beam_width`) the best first. Raises KeyError.
        """
        return self.state().outputs(request_id)

    def scores(self, request_id: str) -> list[float]:
        """Of a beam search (`Sampling.beam_width`), beside `outputs`, best first: log-probabilities, at the
        end with the length penalty. Empty for others.
        """
        return self.state().scores(request_id)

    def text(self, request_id: str) -> str:
        """The request's output in words; '' where tokens stand for no text."""
        return "".join(self.request(request_id).output_texts)

    def digest(self) -> str:
        """sha256 of the control plane now, times excluded. Waits for a step under way."""
        with self.turn:
            return self.engine.digest()

    def on_change(self, f: Callable[[str], None]) -> Callable[[], None]:
        """Calls `f(what)` after each change, in the thread that made it, when others may change the run
        again. Returns a function that stops it.

        `what` is step, seek, reset, config, request, branch, breakpoints, watches, peaks or autosave.
        """
        self._listeners.append(f)
        return lambda: self._listeners.remove(f) if f in self._listeners else None

    def _changed(self, what: str) -> None:
        self.turn.after(lambda: self._tell(what))

    def _tell(self, what: str) -> None:
        for f in list(self._listeners):
            f(what)

    # running ------------------------------------------------------------------------------------------------

    def step(self, n: int = 1) -> StepRecord | None:
        """Runs `n` iterations, fewer if a breakpoint stops it (`stopped_by`), and shows the last.

        None if nothing was left to do.

        An error of the engine leaves it as it was before the step; a breakpoint that fails raises
        BreakpointError after the step.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ConfigError(f"n is {n!r}, it must be a whole number of steps, 1 or more")
        return self._go(None, n, None, stuck=False)

    def profile_step(self) -> StepRecord | None:
        """Run one step under the profiler.

        The record's `profile` lists the operators or kernels with their times. None if there is nothing to
        do.

        Raises ConfigError for a runner that computes nothing.
        """
        if not hasattr(self.runner, "profile_next"):
            raise ConfigError(
                f"runner {self.runner_name} computes nothing that could be watched: profile a step of the "
                "real model (runner='torch')"
            )
        with self.turn:
            self.runner.profile_next = True
            try:
                return self.step()
            finally:
                self.runner.profile_next = False

    @property
    def _repeats(self) -> bool:
        """The run that this one repeats has a next step, which is made even if nothing is left to do."""
        return self.engine.step_count + 1 in self._script

    def _step(self) -> StepRecord | None:
        """One step of the engine and its place in the trace; both, or neither."""
        again = self._script.get(self.engine.step_count + 1)
        if again is not None and self._redone != again.step:
            try:
                self._do_again(again)
            except Exception:
                self._script.clear()  # it can't be repeated: from here on it is another run
                raise
            self._redone = again.step
        record = self.engine.step(again.measured_s if again is not None else None, idle=again is not None)
        if record is not None:
            self._keep(record)
            self._script.pop(record.step, None)
            if again is not None and record.chunks != again.chunks:
                self._script.clear()  # it has become another run: from here on its own times count
        return record

    def _do_again(self, record: StepRecord | None) -> None:
        """What the user did before this step in the run that this one was forked from."""
        if record is None:
            return
        self._ask_again(record.inputs, {x.request_id: x for x in record.arrivals})

    def _ask_again(self, inputs: list[dict[str, Any]], specs: dict[str, RequestSpec]) -> None:
        for i in inputs:
            if i["op"] == "add":
                self.engine.add(specs[i["request_id"]])
            elif i["op"] == "abort":
                self.engine.abort(i["request_id"])
            elif i["op"] == "resize":
                self.engine.resize(i["num_blocks"])
                self._sync()
            elif "modelled_device" in i["changes"] or "cost" in i["changes"]:
                self.engine.reprice(self.engine.config.replace(**i["changes"]))
                self._set_prices()
            else:
                self.engine.configure(**i["changes"])

    def _keep(self, record: StepRecord) -> None:
        try:
            tokenizer = self.tokenizer
            if tokenizer is not None:
                record.texts = self._texts_of(record, tokenizer)
            elif self._taped_texts:
                record.texts = self._recorded_texts(record)
        # the engine has made the step, so it is kept even if a runner's own tokenizer fails on its words
        finally:
            self.config = self.engine.config
            self.trace.append(record)
            self.engine.settle()
        if self.trace.wants_keyframe(record.step):
            self.trace.add_keyframe(
                Keyframe(record.step, self.engine.digest(), self.engine.snapshot(), DIGEST_FORM)
            )
        self._note_autosave()

    def _note_autosave(self) -> None:
        """Says in `notes`, and once as a warning, that steps are not written to the file any more."""
        problem, before = self.trace.autosave_problem, self._autosave_note
        if problem == before:
            return
        self._autosave_note = problem
        self.notes = [note for note in self.notes if note != before] + [problem] * bool(problem)
        self._changed("autosave")
        if problem:
            self.turn.after(lambda: _warn(problem))

    def _texts_of(self, record: StepRecord, tokenizer: Any) -> dict[str, list[str]]:
        texts: dict[str, list[str]] = {}
        for e in record.events:
            if isinstance(e, ev.Sampled):
                stream = self._streams.get(e.request_id)
                if stream is None:
                    stream = self._streams[e.request_id] = tokenizer.detokenizer(skip_special_tokens=True)
                texts[e.request_id] = [stream.push(t) for t in e.token_ids]
            elif isinstance(e, ev.BeamStep):
                before = self.trace.state().requests  # the record is not in the trace yet
                for i, parent, t in zip(e.beam_ids, e.parents, e.token_ids, strict=True):
                    known = before.get(e.beam_ids[parent])
                    texts[i] = _pieces(
                        tokenizer, [*(known.output_token_ids if known is not None else ()), t]
                    )[-1:]
            elif isinstance(e, ev.BeamsEnded):
                texts.update(
                    (i, _pieces(tokenizer, ids, True)) for i, ids in zip(e.beam_ids, e.outputs, strict=True)
                )
            elif isinstance(e, ev.Finished):
                stream = self._streams.pop(e.request_id, None)
                if stream is not None and (rest := stream.flush()) and texts.get(e.request_id):
                    texts[e.request_id][-1] += rest
        return texts

    @property
    def _taped_texts(self) -> dict[str, list[str]]:
        """The words of a taped run's tokens, in the order of each request's outputs; empty for any other
        runner.
        """
        return getattr(self.runner, "texts", {})

    def _recorded_texts(self, record: StepRecord) -> dict[str, list[str]]:
        before = self.trace.state().requests  # the record is not in the trace yet
        texts: dict[str, list[str]] = {}
        for e in record.events:
            if isinstance(e, ev.Sampled):
                known = before.get(e.request_id)
                done = len(known.output_token_ids) if known is not None else 0
                texts[e.request_id] = self._taped_texts.get(e.request_id, [])[done : done + len(e.token_ids)]
        return texts

    def run(
        self,
        until: Predicate | None = None,
        max_steps: int | None = None,
        progress: Callable[[StepRecord], None] | None = None,
    ) -> StepRecord | None:
        """Steps until `until(record, state)` holds (see `on`), a breakpoint does (`stopped_by` says which and
        why), `max_steps` are done, or nothing is left.

        Raises Stuck if requests wait that can never be admitted, and BreakpointError for a condition that
        fails: the step is done and kept by then.
        """
        return self._go(until, max_steps, progress)

    def _go(
        self,
        until: Predicate | None,
        max_steps: int | None,
        progress: Callable[[StepRecord], None] | None,
        stuck: bool = True,
    ) -> StepRecord | None:
        self.stopped_by = None
        stops = self._enabled()
        wanted = None if until is None else as_breakpoint(until)
        before: dict[Breakpoint, bool] = {}
        trace = self.trace
        if stops and (length := len(trace)):
            held([b for b in stops if b.level], trace[length - 1], trace.state(length), before)
        record, done = None, 0
        if stuck:
            self.cursor = self.trace.last
        try:
            while max_steps is None or done < max_steps:
                stopped, failed = False, None
                with self.turn:
                    now = self._step()
                    if now is None:
                        break
                    record, done = now, done + 1
                    self.cursor = self.trace.last
                    hopeless = self.engine.stuck if stuck else ""
                    if not hopeless and (stops or wanted is not None):
                        with interrupts.let_in():
                            try:
                                stopped = self._stops_at(record, stops, wanted, before)
                            except BreakpointError as e:
                                failed = e
                if progress is not None:
                    progress(record)
                if hopeless:
                    raise Stuck(hopeless)
                if failed is not None:
                    raise failed
                if stopped:
                    break
        finally:
            if done:
                self._changed("step")
        return record

    def _stops_at(
        self,
        record: StepRecord,
        stops: list[Breakpoint],
        wanted: Breakpoint | None,
        before: dict[Breakpoint, bool],
    ) -> bool:
        state = self.trace.state()
        found = held(stops, record, state, before) if stops else []
        for b in found:
            b.hits += 1
        if wanted is not None:
            found += held([wanted], record, state)
        if found:
            self.stopped_by = stop_of(found, self.trace, record, state)
        return bool(found)

    def _enabled(self) -> list[Breakpoint]:
        for i, b in enumerate(self.breakpoints):
            if not isinstance(b, Breakpoint):
                self.breakpoints[i] = as_breakpoint(b)
        return [b for b in self.breakpoints if isinstance(b, Breakpoint) and b.enabled]

    # breakpoints and watches --------------------------------------------------------------------------------

    def break_on(
        self,
        event: str | Predicate | None = None,
        *,
        request: str | None = None,
        block: int | None = None,
        kv_above: float | None = None,
        when: str | None = None,
        name: str | None = None,
    ) -> Breakpoint:
        """Sets a breakpoint (see `cbviz.on` for what it may be set on); its `enabled` switches it, `clear`
        removes it. Raises ConfigError, WatchError.
        """
        b = (
            event
            if isinstance(event, Breakpoint)
            else on(event, request=request, block=block, kv_above=kv_above, when=when, name=name)
        )
        if b.when is not None:
            b.when.value(
                self.trace, self.cursor
            )  # an expression that costs too much is refused now, not in the middle of a run
        used = {x.name for x in self.breakpoints if isinstance(x, Breakpoint)}
        wish, n = b.name, 2
        while b.name in used:
            b.name, n = f"{wish} ({n})", n + 1
        self.breakpoints.append(b)
        self._changed("breakpoints")
        return b

    def clear(self, name: str | None = None) -> None:
        """Removes the breakpoint of that name, or all. Raises KeyError if there is none."""
        keep = [] if name is None else [b for b in self.breakpoints if as_breakpoint(b).name != name]
        if name is not None and len(keep) == len(self.breakpoints):
            raise KeyError(f"no breakpoint {name!r}")
        self.breakpoints[:] = keep
        self._changed("breakpoints")

    def run_back(self) -> Stop | None:
        """Moves the cursor (only the cursor) back to the last step before it at which a breakpoint stops;
        without one it stays, and None is returned.

        `Stop.cursor` is the moment inside the step. Raises BreakpointError.
        """
        trace, at = self.here()
        self.stopped_by = last_stop(trace, self._enabled(), at.step)
        if self.stopped_by is not None:
            self.seek(self.stopped_by.step)
        return self.stopped_by

    def run_on(self, progress: Callable[[StepRecord], None] | None = None) -> Stop | None:
        """From the cursor to the next stop: over recorded steps first, then live.

        Returns why it stopped, None if the run came to its end. Raises as `run`.
        """
        trace, at = self.here()
        self.stopped_by = next_stop(trace, self._enabled(), at.step)
        if self.stopped_by is not None:
            self.seek(self.stopped_by.step)
        else:
            if self.cursor != self.trace.last:
                self.seek(len(self.trace))
            self.run(progress=progress)
        return self.stopped_by

    def run_to(self, step: int) -> Stop | None:
        """Shows step `step`: a recorded one by moving the cursor, a later one by running until it is there, a
        breakpoint stops it, or nothing is left.
        """
        if step < 0:
            raise IndexError(f"step {step}: the first is 0, before anything happened")
        self.stopped_by = None
        if step <= len(self.trace):
            self.seek(step)
        else:
            self.run(max_steps=step - len(self.trace))
        return self.stopped_by

    def watch(self, expression: str, name: str | None = None) -> Watch:
        """Adds an expression whose value `watched` tells (see `cbviz.watch`). Raises WatchError."""
        w = Watch(expression, name)
        w.value(self.trace, self.cursor)
        self.watches.append(w)
        self._changed("watches")
        return w

    def watched(self) -> dict[str, Any]:
        """The values of the watches at the cursor."""
        trace, at = self.here()
        return {w.name: w.value(trace, at) for w in self.watches}

    def alone(
        self,
        request_id: str,
        step: int | None = None,
        *,
        progress: Callable[[float], None] = lambda share: None,
    ) -> AgainstAlone:
        """Computes the request once more, alone and cut into the same chunks, and holds it against what was
        computed among others, bit for bit.

        `step`: the step to look into, operator by operator; left out: its last one up to the cursor. The run
        itself is not touched. Takes as long as the request takes alone. Raises KeyError for an unknown
        request, ValueError for one that nothing was computed of, ConfigError where nothing is really
        computed.
        """
        if not hasattr(self.runner, "step_difference"):
            raise ConfigError(
                f"runner {self.runner_name} computes no numbers that could differ: take the real model"
            )
        with self.turn, interrupts.let_in():
            return self._alone(request_id, step, progress)

    def _alone(self, request_id: str, step: int | None, progress: Callable[[float], None]) -> AgainstAlone:
        runner: Any = self.runner
        told = alone.life(self.trace, request_id)
        at = alone.last_step_of(self.trace, request_id, self.cursor.step if step is None else step) or next(
            s for s in told.origin if s
        )
        r = self.trace.state().request(request_id)
        assert r.spec is not None
        found = runner.alone(
            request_id, told.token_ids, told.cuts, r.spec.sampling, list(told.places), told.table, progress
        )
        end = sum(told.cuts[-1])
        parts, which, ids = alone.parts_of(self.trace, request_id, at)
        tokens = []
        for i, (place, made) in enumerate((p, s) for p, s in told.places.items() if p <= end):
            t, record = found.tokens[i], self.trace.record(made)
            first = r.output_steps.index(made)
            said = (record.logprobs or {}).get(request_id) or []
            k = place - r.num_prompt_tokens
            tokens.append(
                alone.TokenPair(
                    place,
                    made,
                    r.output_token_ids[k],
                    t.token_id,
                    said[k - first] if k - first < len(said) else None,
                    t.logprob,
                    t.gap,
                    *(self._word(x) for x in (r.output_token_ids[k], t.token_id)),
                )
            )
        gone = int(np.isnan(found.keys[0]).sum())
        notes = (
            [
                (
                    f"The cache no longer holds {gone} of its {found.keys.shape[1]} positions: they are not "
                    "compared."
                )
            ]
            if gone
            else []
        )
        if r.spec.sampling.beam_width > 1:
            notes.append("Its tokens were chosen among beams: what it would say alone is not asked.")
        return alone.AgainstAlone(
            told,
            found.keys,
            found.values,
            found.ulps,
            tokens,
            at,
            [i for i in ids if i != request_id],
            runner.step_difference(parts, which),
            runner.ops.about,
            runner.decoder.batch_invariant,
            notes,
        )

    def _word(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id])) if self.tokenizer is not None else str(token_id)

    # inputs -------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        chat: bool = False,
        priority: int = 0,
        ignore_eos: bool = False,
        sampling: Sampling | None = None,
        deadline_s: float | None = None,
        request_id: str | None = None,
    ) -> str:
        """A request that joins the next step.

        `prompt`: text (`chat`: put through the model's chat template) or token ids.

        `max_tokens` None: 64, or what still fits. Returns the request's id. Raises RequestError naming the
        field and the limit.
        """
        with self.turn:
            spec = self._asked(
                prompt, max_tokens, chat, priority, ignore_eos, sampling, deadline_s, request_id
            )
            self.engine.add(spec)
            self._changed("request")
        return spec.request_id

    def _asked(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None,
        chat: bool,
        priority: int,
        ignore_eos: bool,
        sampling: Sampling | None,
        deadline_s: float | None,
        request_id: str | None,
    ) -> RequestSpec:
        """The request that `add` describes. Raises RequestError."""
        self._refuse_on_tape()
        text = clean_text(prompt) if isinstance(prompt, str) else None
        if text is not None:
            if not text.strip():
                raise RequestError("the prompt is empty: type some text")
            ids = self._encode(text, chat)
        else:
            if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
                raise RequestError(f"a prompt is text or a list of token ids, got {prompt!r:.80}")
            ids = [self._token_id(t) for t in prompt]
        if not ids:
            raise RequestError("the prompt is empty; it needs at least 1 token")
        limit = min(self.config.max_model_len or 0, self.config.pool_tokens)
        if max_tokens is None:
            max_tokens = max(1, min(DEFAULT_MAX_TOKENS, limit - len(ids)))
        elif isinstance(max_tokens, bool) or not isinstance(max_tokens, int):
            raise RequestError(f"max_tokens must be a whole number, got {max_tokens!r}")
        sampling = Sampling() if sampling is None else sampling
        if ignore_eos and isinstance(sampling, Sampling):
            sampling = msgspec.structs.replace(sampling, ignore_eos=True)
        return RequestSpec(
            request_id or self._next_id(),
            tuple(ids),
            max_tokens,
            arrival_s=self.engine.now_s,
            priority=priority,
            sampling=sampling,
            prompt=text,
            deadline_s=deadline_s,
        )

    def _refuse_on_tape(self) -> None:
        if self.runner_name == "tape":
            raise RequestError(
                "a taped run has no model that could answer a prompt: its tokens were recorded. Take the "
                "real model or the simulator for prompts of your own"
            )

    def _token_id(self, t: Any) -> int:
        if isinstance(t, bool) or not isinstance(t, int):
            raise RequestError(f"a prompt is text or a list of token ids, got {t!r} among the ids")
        return t

    def _encode(self, text: str, chat: bool) -> list[int]:
        tokenizer = self.tokenizer
        if tokenizer is not None:
            return list(tokenizer.chat(text) if chat else tokenizer.encode(text))
        vocab = self.runner.spec.vocab_size
        return [256 + crc32(word.encode()) % max(1, vocab - 256) for word in text.split()]

    def _next_id(self) -> str:
        used = set(self.request_ids)
        n = len(used)
        while f"r{n}" in used:
            n += 1
        return f"r{n}"

    def abort(self, request_id: str) -> None:
        """Ends a request just before the next step, in whatever state it is.

        Raises KeyError if there is none of that id.
        """
        with self.turn:
            if request_id not in self.request_ids:
                raise KeyError(f"no request {request_id!r}")
            self.engine.abort(request_id)
            self._changed("request")

    def configure(self, **changes: Any) -> None:
        """Changes knobs of the running engine; they hold from the next step's admission on.

        Raises ConfigError.
        """
        with self.turn:
            self.engine.configure(**changes)
            self._changed("config")

    # time ---------------------------------------------------------------------------------------------------

    def seek(self, step: int, event: int | None = None) -> None:
        """Moves the cursor: only what is shown changes.

        `event`: stop inside step `step`, after its first events. Raises IndexError.
        """
        at, trace = Cursor(step, event), self.trace
        if event is not None and not 0 <= event <= len(trace.record(step).events):
            raise IndexError(
                f"event {event} is not in step {step}: it has events 0..{len(trace.record(step).events)}"
            )
        trace.state(at)
        self.cursor = at
        self._changed("seek")

    def back(self) -> None:
        """Shows the recorded step before."""
        self.seek(max(0, self.cursor.step - (0 if self.cursor.event is not None else 1)))

    def rewind(self, step: int) -> None:
        """Makes the live engine what it was after `step` steps, and forgets what came later.

        At the step where a branch begins, the changes that made the branch are asked for again.

        Raises IndexError, ReplayError.
        """
        with self.turn:
            self._check_step(step)
            aside = self._aside()
            with interrupts.let_in():
                aside._forked = {k: inputs for k, inputs in self._forked.items() if k <= step}
                aside._adopt(
                    self.trace,
                    step,
                    header=msgspec.structs.replace(self.trace.header, forked=aside._forked),
                )
                changes = aside._forked.get(step, [])
                aside._ask_again(changes, _added(changes))
                aside._set_prices()
            self._become(aside)

    def _check_step(self, step: int) -> None:
        if not 0 <= step <= len(self.trace):
            raise IndexError(f"step {step} is not in this run: it has steps 0..{len(self.trace)}")

    def _aside(self) -> Session:
        """A session that shares everything with this one but stands at the start: what is made of it changes
        nothing here until `_become`.
        """
        aside: Session = object.__new__(Session)
        aside.__dict__.update(self.__dict__)
        aside.config, aside.notes, aside._listeners = self._start_config, list(self.notes), []
        aside._begin()
        return aside

    def _become(self, other: Session) -> None:
        """Takes the run of `other`, all at once; the file follows."""
        old = self.trace
        self.__dict__.update({name: other.__dict__[name] for name in _RUN})
        old.hand_over(self.trace)
        self._note_autosave()
        self._changed("reset")

    def fork(
        self,
        at: int | None = None,
        *,
        name: str | None = None,
        add: Sequence[dict[str, Any]] = (),
        remove: Sequence[str] = (),
        prompts: dict[str, str | Sequence[int]] | None = None,
        **changes: Any,
    ) -> Session:
        """A branch from after step `at` (default: the cursor) with something changed.

        The parent goes on unchanged and shares its records.

        `changes`: config fields; those that hold from the start (block size, prefix caching, ...) need
        `at=0`. Another `num_blocks` in the middle moves the blocks that would lie beyond the end; another
        `modelled_device` or `cost` prices the branch's own steps. `add`: keywords of `Session.add`, one dict
        a request, joining the branch's first step. `remove`: requests that are aborted then, or never arrive.
        `prompts`: other prompts for requests that have not arrived by then. With no change at all the branch
        equals its parent to its last step. Raises ConfigError, RequestError, IndexError, KeyError.
        """
        with self.turn:
            step = self.here()[1].step if at is None else at
            self._check_step(step)
            with interrupts.let_in():
                new = self._fork(step, name, add, remove, prompts, changes)
            self.branches.append(new)
            self._changed("branch")
        return new

    def _fork(
        self,
        step: int,
        name: str | None,
        add: Sequence[dict[str, Any]],
        remove: Sequence[str],
        prompts: dict[str, str | Sequence[int]] | None,
        changes: dict[str, Any],
    ) -> Session:
        """The branch, of which this session does not know yet."""
        check_names(changes)
        fixed = [
            f
            for f in changes
            if not CONFIG_FIELDS[f].metadata["live"]
            and f not in ("num_blocks", "modelled_device", "cost")
            and changes[f] != getattr(self.config, f)
        ]
        if fixed and step:
            raise ConfigError(
                f"{', '.join(fixed)} can't change in the middle of a run: fork at step 0 with it"
            )
        new: Session = object.__new__(Session)
        new.__dict__.update(self.__dict__)
        new._listeners, new.breakpoints, new.branches, new.stopped_by = [], [], [], None
        new.watches = list(self.watches)
        new.parent, new.forked_at = self, step
        told = (
            [f"{k}={v}" for k, v in changes.items()]
            + [f"+{len(add)} requests"] * bool(add)
            + [f"without {', '.join(remove)}"] * bool(remove)
        )
        told += [f"other prompt for {', '.join(prompts)}"] if prompts else []
        new.name = self._branch_name(clean_text(name or "") or ", ".join(told) or "fork")
        new.notes = []
        base = self._start_config
        if step == 0:
            sized = {"num_blocks", "block_size", "kv_cache_memory_bytes"} | (
                {"kv_cache_dtype"} if base.kv_cache_memory_bytes else set()
            )
            if sized & changes.keys() and "max_model_len" not in changes:
                changes = {
                    "max_model_len": None,
                    "max_num_batched_tokens": base.max_num_batched_tokens if base.chunked else None,
                    **changes,
                }
            base = base.changed(**changes)
            base, new.notes = _resolve(base, self._spec_under(base))
            new._start_notes = list(new.notes)
        new.config = new._start_config = base
        new._device = new._pick_device()
        new.runner = self._clone_runner(base)
        new._begin()
        if step:
            new._adopt(self.trace, step, changes)
            live = {f: v for f, v in changes.items() if CONFIG_FIELDS[f].metadata["live"]}
            if live:
                new.engine.configure(**live)
        if not (changes or add or remove or prompts):
            new._script = {r.step: r for r in self.trace.records[step:]}
        for rid in remove:
            new._remove(rid)
        for rid, prompt in (prompts or {}).items():
            new._reprompt(rid, prompt)
        for wish in add:
            new.add(**wish)
        unchanged = not (changes or add or remove or prompts)
        new._forked = {k: i for k, i in self._forked.items() if k < step or (k == step and unchanged)}
        if asked := new.engine.asked():
            new._forked[step] = asked
        new.trace.header.forked = new._forked
        return new

    def _branch_name(self, wish: str) -> str:
        used = {b.name for b in self.root.tree()}
        name, n = wish, 2
        while name in used:
            name, n = f"{wish} ({n})", n + 1
        return name

    def _remove(self, rid: str) -> None:
        if rid in self.engine.pending_ids:
            spec = self._specs()[rid]
            self.engine.discard(rid)
            self._own([x for x in self.workload if x.request_id != rid])
            for step, frame in self.trace.digests.items():
                state = without_pending(frame.state, spec)
                self.trace.digests[step] = Keyframe(step, plain_digest(state), state, DIGEST_FORM)
        else:
            self.abort(rid)

    def _reprompt(self, rid: str, prompt: str | Sequence[int]) -> None:
        self._refuse_on_tape()
        old = self._specs().get(rid)
        if old is None:
            raise KeyError(f"no request {rid!r}")
        if rid not in self.engine.pending_ids:
            raise RequestError(
                f"{rid} arrived at step {self.trace.state().request(rid).arrival_step}: fork before that "
                "step to give it another prompt"
            )
        text = clean_text(prompt) if isinstance(prompt, str) else None
        ids = self._encode(text, False) if text is not None else [self._token_id(t) for t in prompt]
        spec = msgspec.structs.replace(old, prompt_token_ids=tuple(ids), prompt=text)
        self.engine.check_request(spec)
        self.engine.revise(spec)
        self._own([spec if x.request_id == rid else x for x in self.workload])

    def _own(self, workload: list[RequestSpec]) -> None:
        """A workload that no preset makes: the trace carries it."""
        self.workload, self.workload_name, self.workload_params = workload, "requests", {}
        h = self.trace.header
        h.workload, h.workload_params, h.requests = self.workload_name, self.workload_params, self.workload

    @property
    def root(self) -> Session:
        """The session that all branches come from."""
        s = self
        while s.parent is not None:
            s = s.parent
        return s

    def tree(self) -> list[Session]:
        """This session and all branches below it, parents first."""
        return [self, *(x for b in self.branches for x in b.tree())]

    def rename(self, name: str) -> None:
        """Gives the branch another name. Raises ConfigError if it is empty or taken."""
        name = clean_text(name)
        if not name.strip():
            raise ConfigError("a branch's name is empty: type one")
        with self.turn:
            if any(b.name == name for b in self.root.tree() if b is not self):
                raise ConfigError(f"a branch named {name!r} exists already")
            self.name = name.strip()
            self._changed("branch")

    def drop(self) -> None:
        """Forgets this branch and those below it. Raises ConfigError for the root."""
        if self.parent is None:
            raise ConfigError("the first run can't be dropped; reset it, or drop its branches")
        with self.turn:
            if self in self.parent.branches:
                self.parent.branches.remove(self)
            for b in self.tree():
                b.close()
            self.parent._changed("branch")

    def _adopt(
        self,
        source: Trace,
        step: int,
        changes: dict[str, Any] | None = None,
        header: TraceHeader | None = None,
    ) -> None:
        """Stands where `source` stood after `step` steps: from the nearest keyframe on the records are
        applied, then the KV that differs is computed.
        """
        own = (
            source.digests.get(frame)
            if (frame := max((k for k in source.digests if k <= step), default=0))
            else None
        )
        if own is not None:
            self.engine.restore(own.state, {**self._specs(), **source.specs}, sync=False)
        self._replay(source.records[frame:step], source.digests)
        changes = changes or {}
        if changes.get("num_blocks", self.engine.config.num_blocks) != self.engine.config.num_blocks:
            self.engine.resize(changes["num_blocks"])
        price: dict[str, Any] = {
            f: changes[f]
            for f in ("modelled_device", "cost")
            if f in changes and changes[f] != getattr(self.engine.config, f)
        }
        if price:
            self._price_anew(price, step)
        if header is not None:
            self.trace = Trace(header)
        self._set_prices()
        self.trace = source.share(step, header or self._header())
        self._sync()
        self._restream()
        self.cursor = self.trace.last

    def reset(self) -> None:
        """Starts again with the same workload and the config of the start."""
        with self.turn:
            aside = self._aside()
            with interrupts.let_in():
                aside.notes = self._start_notes + [self._autosave_note] * bool(self._autosave_note)
                aside._device = aside._pick_device()
                aside._fit_runner(aside.config)
                aside._forked = {}
                aside._begin()
            aside.engine.claim_runner()  # whatever comes of this, the engine of now looks at its KV again
            aside.runner.reset()
            self._become(aside)

    def save(self, path: str | Path) -> Path:
        """Writes the trace (`.jsonl`, `.jsonl.gz`), and what was asked for since its last step.

        Raises OSError, and then leaves the file that was there.
        """
        trace, header, steps = self.trace_now()
        return trace.save(path, header, steps)

    def trace_now(self) -> tuple[Trace, TraceHeader, int]:
        """The trace, its header with what was asked for since the last step, and its number of steps, all of
        one moment between two steps.
        """
        with self.turn:
            return (
                self.trace,
                msgspec.structs.replace(self.trace.header, inputs=self.engine.asked()),
                len(self.trace),
            )

    def autosave(self, path: str | Path, limit_bytes: int | None = None) -> None:
        """Writes the trace to `path` now and each step as it is made; a rewind shortens the file, a reset
        begins it anew.

        `limit_bytes`: the most bytes of the file (None: $CBVIZ_AUTOSAVE_BYTES, else 100 MB; 0: no limit).
        Raises nothing where the file can't be written or has reached its limit: the run goes on, `notes` says
        why, and so does one warning.
        """
        with self.turn:
            self.trace.autosave(path, limit_bytes)
            self._note_autosave()

    def close(self) -> None:
        """Ends autosaving."""
        with self.turn:
            self.trace.close()

    # inside -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.engine = Engine(
            self.config, self.runner, costs.make(self.config.cost, self.runner.spec, self._device)
        )
        self.engine.enqueue(self.workload)
        self._script: dict[int, StepRecord] = {}
        """For a branch that repeats its parent: the records whose inputs and times are still to be repeated,
        by step.
        """
        self._redone = 0
        self._streams: dict[str, Any] = {}
        self._autosave_note = ""
        self.trace = Trace(self._header())
        self.cursor = Cursor(0)

    def _pick_device(self) -> DeviceSpec:
        """Whose peaks the steps are held against: this machine's measured ones under a measured clock, else
        the modelled device's.
        """
        if self.config.clock == "measured":
            return self._peaks(fresh=False, again=False)
        return devices.get(self.config.modelled_device)

    def _peaks(
        self, progress: Callable[[float, str], None] | None = None, *, fresh: bool, again: bool
    ) -> DeviceSpec:
        """Measured peaks of what the model runs on, kept ones unless `again`: the accelerator's where the
        runner has one, else this machine's processor's.
        """
        name = getattr(self.runner, "peaks_name", None)
        if name is None:
            return (None if again else calibrate.load()) or calibrate.measure(progress, fresh=fresh)
        assert not isinstance(self.runner, str)
        return (None if again else calibrate.load(name, 0)) or calibrate.keep(
            self.runner.measure_peaks(progress),  # type: ignore[attr-defined]
            name,
            0,
            fresh=fresh,
        )

    def calibrate(
        self, progress: Callable[[float, str], None] | None = None, *, fresh: bool = False
    ) -> DeviceSpec:
        """Measures the peaks again that utilisation is told against, and holds this run against them from
        here on (best so far; `fresh`: this measurement alone).

        Raises ConfigError under a modelled clock, whose device stands in a table.
        """
        if self.config.clock != "measured":
            raise ConfigError(
                f"time is modelled here, for {self._device.name}: its peaks come from a table, there is "
                "nothing to measure"
            )
        with self.turn:
            with interrupts.let_in():
                d = self._peaks(progress, fresh=fresh, again=True)
            self._hold_against(d)
            self._changed("peaks")
        return d

    def _price_anew(self, changes: dict[str, Any], step: int) -> None:
        if self.engine.config.clock == "measured":
            raise ConfigError(
                f"{', '.join(changes)} has no effect on measured time: fork a run under the modelled clock "
                "with it"
            )
        before = self._device.name
        self.engine.reprice(self.engine.config.replace(**changes))
        self._set_prices()
        self.notes.append(
            f"steps 1..{step} were priced for {before}, the rest by {self.config.cost} for "
            f"{self._device.name}"
        )

    def _set_prices(self) -> None:
        """The engine's cost model and the device whose peaks are shown follow its config (a branch may price
        its steps for another device).
        """
        self.config = self.engine.config
        self._hold_against(self._pick_device())

    def _hold_against(self, d: DeviceSpec) -> None:
        self._device = d
        self.engine.cost = costs.make(self.config.cost, self.runner.spec, d)
        h = self.trace.header
        h.device, h.peak_bytes_s, h.peak_flops_s, h.peaks_measured = (
            _device_name(d),
            d.bandwidth_bytes_s,
            d.flops_s,
            d.measured,
        )

    def _header(self) -> TraceHeader:
        """Describes the run from its first step: the config is the start's."""
        spec, d, start = self.runner.spec, self._device, self._start_config
        names = ["schedule", "blocks", "tokens", "reasons", "accounting", "time", "cost", "queue"]
        missing: dict[str, str] = {}
        if self.tokenizer is not None or self._taped_texts:
            names.append("texts")
        else:
            missing["texts"] = "this runner's tokens are made up: they stand for no words"
        if self.runner_name == "torch":
            names.append("gaps")
        else:
            missing["gaps"] = "no logits were computed"
        full = models.complete(spec)
        made_by_name = _made_by_name(self.workload_name, self.runner_name)
        taped = self.runner_name == "tape"
        return TraceHeader(
            capabilities=names,
            config=start.to_dict(),
            model=self.model,
            runner=self.runner_name,
            clock=start.clock or "modelled",
            device=_device_name(d),
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            workload=self.workload_name,
            workload_params=self.workload_params,
            requests=[] if made_by_name else self.workload,
            forked=self._forked,
            tape=getattr(self.runner, "tokens", {}) if taped else {},
            tape_texts=self._taped_texts if taped else {},
            block_size=start.block_size,
            num_blocks=start.num_blocks,
            peak_bytes_s=d.bandwidth_bytes_s,
            peak_flops_s=d.flops_s,
            peaks_measured=d.measured,
            weight_bytes=full.params * spec.weight_bytes_per_param,
            kv_bytes_per_token=models.kv_bytes_per_token(spec),
            notes=list(self.notes),
            missing=missing,
        )

    def _specs(self) -> dict[str, RequestSpec]:
        return {**{s.request_id: s for s in self.workload}, **self.trace.specs}

    def _clone_runner(self, config: EngineConfig) -> Runner:
        """A runner of the branch's own.

        One that we don't know how to make is shared: each branch then has it computed again what another has
        overwritten.
        """
        kind: Any = type(self.runner)
        if kind.__module__ == "cbviz.runners.torch_runner":
            return cast("Runner", kind(self.runner.model, config))  # type: ignore[attr-defined]
        if kind.__module__ == "cbviz.runners.sim":
            return cast("Runner", kind(self._spec_under(config), config.seed))
        return self.runner

    def _spec_under(self, config: EngineConfig) -> ModelSpec:
        """The model as `config` has it run."""
        if self.runner_name == "torch":
            return as_run(self.runner.model.spec(config.precision), config)  # type: ignore[attr-defined]
        return as_run(models.get(self.model), config) if self.runner_name == "sim" else self.runner.spec

    def _replay(self, records: Iterable[StepRecord], digests: dict[int, Keyframe] | None = None) -> None:
        """Applies recorded steps to the engine from the records alone; the policy, the model and the clock
        are not asked. Leaves the KV to `_sync`.

        Digests are compared wherever the trace has one. Raises ReplayError.
        """
        for record in records:
            self.engine.apply(record)
            frame = (digests or {}).get(record.step)
            if frame is not None and frame.form > DIGEST_FORM:
                raise ReplayError(
                    f"the digest after step {record.step} has form {frame.form}; this cbviz knows up to "
                    f"{DIGEST_FORM}: upgrade cbviz"
                )
            if frame is not None and frame.digest != self.engine.digest(frame.form):
                raise ReplayError(
                    f"the state after step {record.step} is not what it was when it was recorded: the "
                    "trace comes from another version or was changed"
                )
        self.config = self.engine.config

    def _restream(self) -> None:
        """Detokenisers of unfinished requests, brought to where the trace ends."""
        self._streams = {}
        if self.tokenizer is None:
            return
        for r in self.trace.state().by_index:
            if not r.finished and r.output_token_ids:
                stream = self._streams[r.request_id] = self.tokenizer.detokenizer(skip_special_tokens=True)
                for t in r.output_token_ids:
                    stream.push(t)

    def _sync(self) -> None:
        self._fit_runner(self.engine.config)
        self.engine.runner = self.runner
        self.recomputed_blocks = self.engine.sync()

    def _fit_runner(self, config: EngineConfig) -> None:
        """The pool may have another size at the moment of the run that comes: then another runner."""
        have = getattr(getattr(self.runner, "config", None), "num_blocks", None)
        if have is not None and have != config.num_blocks:
            self.runner = self._clone_runner(config)


_RUN = (
    "engine",
    "runner",
    "config",
    "notes",
    "trace",
    "cursor",
    "recomputed_blocks",
    "_device",
    "_forked",
    "_script",
    "_redone",
    "_streams",
)
"""What a rewind and a reset replace."""


def _added(inputs: list[dict[str, Any]]) -> dict[str, RequestSpec]:
    """The requests that the inputs of a header add."""
    return {i["request_id"]: msgspec.convert(i["spec"], RequestSpec) for i in inputs if i["op"] == "add"}


def _warn(problem: str) -> None:
    with suppress(Warning):  # where warnings are errors: the step was made all the same
        warnings.warn(problem, stacklevel=2)


_LOADED: dict[tuple[str, str], Any] = {}
"""Models loaded in this process, so that sessions and forks share one copy of the weights."""


def _load_model(model: str, device: str, progress: Callable[..., None] | None) -> Any:
    from cbviz.model import loader
    from cbviz.runners import torch_runner

    key = (model, device)
    if key not in _LOADED:
        torch_runner.pick_device(device)
        _LOADED[key] = loader.load(
            model, progress=progress
        )  # mapped; a runner on a card takes there what its precision needs
    return _LOADED[key]


def _resolve(config: EngineConfig, spec: ModelSpec) -> tuple[EngineConfig, list[str]]:
    """`spec`: the model as `config` has it run."""
    return config.resolve(
        spec.max_context,
        kv_bytes_per_token=models.kv_bytes_per_token(spec),
        window=0 if spec.num_global_layers else spec.sliding_window,
    )


def _device_name(d: DeviceSpec) -> str:
    return "this machine's CPU" if d.measured and d.kind == "cpu" else d.name


def _made_by_name(workload: str, runner: str) -> bool:
    """Does the workload's name make its requests again?"""
    return workload in workloads.PRESETS and runner != "tape"


def _tape_of(trace: Trace) -> TapeRunner:
    """The tape of a taped run: the one that its header holds, else (recorded by earlier versions) what the
    run itself has repeated of it.
    """
    h = trace.header
    if not h.tape:
        return tape_runner(trace)
    from cbviz.runners.tape import TapeRunner

    lengths = {i: len(x.prompt_token_ids) for x in h.requests for i in sequence_ids(x)}
    return TapeRunner(models.get(h.model or "smollm2"), h.tape, lengths, texts=h.tape_texts)


def tape_runner(trace: Trace) -> TapeRunner:
    """A runner that answers the requests of `trace` with the tokens and words recorded there."""
    from cbviz.runners.tape import TapeRunner

    end = trace.state().by_index
    texts = {r.request_id: r.output_texts for r in end if len(r.output_texts) == len(r.output_token_ids)}
    return TapeRunner(
        models.get(trace.header.model or "smollm2"),
        {r.request_id: r.output_token_ids for r in end},
        {r.request_id: r.num_prompt_tokens for r in end},
        texts=texts,
    )


def _taped(spec: RequestSpec, recorded: list[tuple[int, bool]]) -> RequestSpec:
    """The request with its recorded output's length, of each sequence (length, did it end at a limit?); one
    that ended at a limit will meet that limit again.
    """
    first, *others = [None if at_limit else n for n, at_limit in recorded]
    return msgspec.structs.replace(
        spec,
        max_tokens=max(spec.max_tokens, *(n for n, _ in recorded)),
        output_len=first,
        output_lens=tuple(others),
    )


def _pieces(tokenizer: Any, token_ids: Sequence[int], ended: bool = False) -> list[str]:
    """What each token adds to the text of a beam, whose earlier tokens may be new to it."""
    stream = tokenizer.detokenizer(skip_special_tokens=True)
    out = [stream.push(t) for t in token_ids]
    if ended and (rest := stream.flush()):
        out[-1] += rest
    return out
