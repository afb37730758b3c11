"""The explorer's run loop: plays a session, keeps the page's picture up to date, and does what the page asks.

Knows no widget class.

Everything here runs on the kernel's event loop; only the engine's work (a step, loading a model, an input)
runs in one worker thread, one job at a time, so that a step of two seconds leaves the page answering.
Messages of the page may come on any thread.

Flow control: each picture has a number and the page acknowledges it when it starts to draw. With 4
unacknowledged nothing is sent; steps go on, and what has gathered is merged into the next picture.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from cbviz.app import kept, opening, typed
from cbviz.app.allowed import Allowed
from cbviz.app.alone import alone_message
from cbviz.app.debugger import Debugger
from cbviz.app.inbox import Inbox
from cbviz.app.later import later
from cbviz.app.opening import Recording, Settings, Shown
from cbviz.app.room import Room
from cbviz.app.wire import Wire, inside_message, metrics_message, why_message
from cbviz.app.writer import COPY, Writer, read, stopped_saving
from cbviz.breakpoints import BreakpointError
from cbviz.config import CONFIG_FIELDS, ConfigError
from cbviz.engine import interrupts
from cbviz.model import hub
from cbviz.session import Session
from cbviz.trace import Cursor, Trace
from cbviz.trace.autosave import write_whole

WINDOW = 4
BURST_S = 0.006
"""At full speed the worker runs steps for this long before it reports: one step of a real model, several of a
simulated one.
"""
PATIENCE_S = 0.1
"""How long a step at full speed waits for a page that is behind by the whole window."""
EXPLAIN_S = 0.25
"""While a run plays, its steps are explained no more often than that: nobody reads faster."""
DESERTED_S = 30.0
"""A run that nobody has acknowledged for so long pauses itself: its page is gone."""
DEFAULT_SPEED = 10.0

Send = Callable[[dict[str, Any], list[bytes]], None]
UserErrors = (ValueError, LookupError, OSError, RuntimeError)
"""What a wrong wish raises: of config, request, workload or model, all of them with a message for the user.
"""


class Player:
    """One page and its session.

    `send(message, buffers)` reaches the page; `receive(message)` is what it sends.
    """

    def __init__(
        self,
        send: Send,
        settings: Settings,
        *,
        session: Shown | None = None,
        run: str | None = None,
        at_step: int | None = None,
        address: bool = False,
        allow_code: bool = False,
        note: str = "",
        loop: asyncio.AbstractEventLoop | None = None,
        browser: str = "",
        alone: bool = True,
        host: Settings | None = None,
    ) -> None:
        self._send = send
        self._inbox = Inbox()
        self.room = Room() if address else None
        """Watches the memory of a page's kernel; a notebook's kernel is the user's own."""
        self.loop = loop or asyncio.get_running_loop()
        self.settings = settings
        self._first = settings.copy()
        self.allowed = Allowed((host or settings).copy(), alone)
        """What messages of the page may ask for."""
        self.allow_code = allow_code
        """The page may send a policy's code. Without it no message makes the kernel run any."""
        self.note = note
        """Said beside the settings, whatever session is shown."""
        self.session: Shown | None = None
        self.alone = alone
        """Whoever reaches this page is the user of this machine: the page may list what else the user keeps
        here.
        """
        self.attached = asyncio.Event()
        """The page is there: it said that it is ready."""
        self.writer = Writer(self, browser)
        self._asked_run = run
        self.address = address
        """The page's address carries the run's name (a Voilà page, whose kernel ends with it)."""
        self.playing = False
        self.speed = DEFAULT_SPEED
        self.own = session is None
        self._at_step = at_step
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cbviz-engine", initializer=self._begin_worker)
        self._worker = 0
        """The worker's thread: a change made in another one is somebody else's, a cell's or another page's.
        """
        self._halt: int | None = None
        """The recorded step at which a run that plays over recorded steps stops."""
        self._wire = Wire()
        self._sent = self._acked = 0
        self._heard = time.monotonic()
        self._credit = asyncio.Event()
        self.wanted: Cursor | None = None
        """Where the user went while a job was running: the job's end must not take the cursor away."""
        self._jobs: set[asyncio.Future[Any]] = set()
        """What the worker does for somebody who waits.

        One that is done counts no more, even if an interrupt kept it here.
        """
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Future[Any]] = set()
        self._explained: tuple[Any, ...] | None = None
        self._explained_at = self._metrics_at = 0.0
        self._metrics_cost = 0.0
        self._live: dict[str, Any] = {
            "loading": "Starting the engine …",
            "progress": -1,
            "playing": False,
            "speed": self.speed,
            "num_requests": 0,
        }
        self._notices: list[dict[str, Any]] = []
        """What the user must know and may close: id, text, bad."""
        self.debugger = Debugger(self)
        self._unsubscribe: Callable[[], None] = lambda: None
        if session is not None:
            self.show(session)
        else:
            self.spawn(self._open_first())
        if address:
            self.spawn(self.writer.watch())

    @property
    def run(self) -> str:
        """The name under which the run is saved; '' while it is saved nowhere."""
        return self.writer.name

    def _begin_worker(self) -> None:
        self._worker = threading.get_ident()

    # the page -----------------------------------------------------------------------------------------------

    def receive(self, message: dict[str, Any]) -> None:
        """A message of the page, on any thread."""
        if (problem := self._inbox.problem(message)) is not None:
            cmd = message.get("cmd") if isinstance(message, dict) else None
            later(
                self.loop,
                self.post,
                {"type": "said", "cmd": cmd if isinstance(cmd, str) else None, "error": problem},
            )
            return
        if message["type"] == "ack":
            self._acked = max(
                self._acked, int(message["seq"])
            )  # at once: a cell that runs the session keeps the loop from us
            self._heard = time.monotonic()
        later(self.loop, self._handle, message)

    def _handle(self, m: dict[str, Any]) -> None:
        kind = m.get("type")
        self.writer.heard(m)
        if kind == "ready":
            self.attached.set()
            self._sent = self._acked = 0
            self._heard = time.monotonic()
            self._wire.forget()
            self._explained = None
            self.debugger.about, self.debugger.accounting = (
                None,
                False,
            )  # what this page will ask, it has not asked yet
            self.controls()
            self.tell()
            self.debugger.tell()
            self.flush()
        elif kind == "ack":
            self._credit.set()
            self.flush()
        elif kind == "cmd":
            self.spawn(self._command(m))
        elif kind == "error":
            print(f"cbviz explorer, in the page: {m.get('msg')}")

    def post(self, message: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        if self.attached.is_set():
            self._send(message, buffers or [])

    def tell(self, **changes: Any) -> None:
        """Sends what is not part of a picture: playing, loading, titles."""
        self._live.update(changes)
        s = self.session
        self._live["open"] = s is not None
        if s is not None:
            h = s.trace.header
            model = (
                "simulator"
                if h.runner == "sim"
                else f"{h.model}, recorded tokens"
                if h.runner == "tape"
                else h.model or h.runner
            )
            config = opening.config_of(s) if isinstance(s, Session) else h.config
            self._live["title"] = [
                model,
                f"{h.device}, {h.clock}",
                str(config.get("discipline", "")),
                str(config.get("policy", "")),
            ]
            self._live["recording"] = s.why if isinstance(s, Recording) else None
            self._live["max_model_len"] = config.get("max_model_len")
            self._live["can_watch"] = isinstance(s, Session) and hasattr(s.runner, "profile_next")
            self._live["can_calibrate"] = isinstance(s, Session) and s.config.clock == "measured"
            self._live["beams"] = isinstance(s, Session) and getattr(s.runner, "gives_candidates", False)
            self._live["alone"] = isinstance(s, Session) and hasattr(s.runner, "step_difference")
        if self.address:
            self._live["run"] = self.run
        self._live["notices"] = self._notices
        self._live["allow_code"] = self.allow_code
        self.post({"type": "live", "live": self._live})

    def controls(self) -> None:
        notes = [
            *filter(None, [self.note]),
            *map(self.writer.without_folder, self.session.notes if self.session is not None else []),
        ]
        fields = opening.controls(self.settings, self.session)
        may = {*self.allowed.models(), self.allowed.host.model, self.settings.model}
        for row in fields:
            if row["name"] == "model":
                row["options"] = [o for o in row["options"] if o[0] in may]
        self.post(
            {"type": "controls", "fields": fields, "notes": notes, "locked": bool(self._live.get("loading"))}
        )

    def place(self, s: Shown) -> tuple[Trace, Cursor]:
        """The trace of `s` and where the page stands or wants to stand in it; a moment that somebody rewound
        away is its end.
        """
        trace, at = s.trace, self.wanted or s.cursor
        return trace, at if at.step <= len(trace) else trace.last

    def flush(self) -> None:
        """Sends the page what it lacks, unless it is behind by the window."""
        s = self.session
        if s is None or not self.attached.is_set() or self._sent - self._acked >= WINDOW:
            return
        with (
            interrupts.held()
        ):  # a picture that is counted as sent is sent: the next one holds only what changes from it
            made = self._wire.message(*self.place(s))
            if made is not None:
                head, buffers = made
                self._sent += 1
                head["seq"] = self._sent
                if head.get("reset"):
                    head["live"] = self._live
                self.post(head, buffers)
        self._explain()

    def _explain(self) -> None:
        """Sentences and figures of the step that is shown: made by the worker, after whatever it does now."""
        s, at = self.session, self._wire.cursor
        if s is None or at is None:
            return
        trace = s.trace
        if at.step > len(trace):
            return  # somebody rewound it in this moment: the next picture is on its way
        key = (s, trace, at)
        now = time.monotonic()
        if key == self._explained or (self.playing and now - self._explained_at < EXPLAIN_S):
            return
        self._explained, self._explained_at = key, now
        figures = not self.playing or now - self._metrics_at > max(0.5, 20 * self._metrics_cost)

        def job() -> list[dict[str, Any] | None]:
            out: list[dict[str, Any] | None] = [
                {**why_message(trace, at.step), "event": at.event, **self.debugger.details(s, trace, at)}
            ]
            t0 = time.perf_counter()
            out.append(inside_message(trace, at.step))
            out.append(self.debugger.accounts(trace, at, figures and not self.playing))
            if figures and at.step:
                out.append(metrics_message(trace, at))
                self._metrics_cost = time.perf_counter() - t0
            return out

        def show(f: Future[list[dict[str, Any] | None]]) -> None:
            if f.cancelled() or self.session is not s or s.trace is not trace:
                return
            if (e := f.exception()) is not None:
                self.post({"type": "said", "error": f"Step {at.step} could not be explained: {e}"})
                return
            for message in f.result():
                if message is not None:
                    self.post(message)

        if figures:
            self._metrics_at = now
        self._pool.submit(job).add_done_callback(lambda f: later(self.loop, show, f))

    def explain_again(self) -> None:
        """The page wants to know more about what it shows."""
        self._explained = None
        self._explain()

    def submit(self, f: Callable[[], Any]) -> None:
        """Has the worker do `f` when it comes to it; nobody waits."""
        self._pool.submit(f)

    # jobs ---------------------------------------------------------------------------------------------------

    def spawn(self, coroutine: Any) -> None:
        """Runs a coroutine on the loop and keeps it alive; an error that nobody expected is shown on the
        page, not lost.
        """
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (e := task.exception()) is not None:
            traceback.print_exception(e)
            self.tell(playing=False, loading=None, banner=f"{type(e).__name__}: {e}", bad=True)

    async def work(self, f: Callable[[], Any]) -> Any:
        """Runs `f` in the worker; the cursor stays where the user put it meanwhile."""
        job = self.loop.run_in_executor(self._pool, f)
        self._jobs.add(job)
        try:
            return await job
        finally:
            self._jobs.discard(job)
            if self.wanted is not None and self.session is not None and not self.busy:
                at, self.wanted = self.wanted, None
                with suppress(IndexError):  # a place that is not there any more
                    self.session.seek(at.step, at.event)

    @property
    def busy(self) -> bool:
        """The worker does something for somebody who waits."""
        return any(not job.done() for job in self._jobs)

    def progress(self, share: float, what: str) -> None:
        later(self.loop, lambda: self.tell(loading=what, progress=share))

    # sessions -----------------------------------------------------------------------------------------------

    def show(self, session: Shown) -> None:
        """Makes `session` the one that is shown."""
        self._unsubscribe()
        self.session = session
        self._unsubscribe = session.on_change(self._changed)
        self._wire.forget()
        self._explained = None
        self.wanted = None
        self._live.update(
            loading=None, progress=-1, banner=None, bad=False, offer=None, num_requests=session.num_requests
        )
        if isinstance(session, Recording):
            self._live.update(
                banner=f"This is a recording: {session.why}. You can look at every step of it.",
                offer={"text": "Run again from the start", "cmd": "again"},
            )
        if not self.own:
            self.settings = opening.settings_of(session)
        self.tell()
        self.controls()
        if self.address:
            self._warn_unsaved(session)
        self.debugger.tell()
        self.flush()

    def _changed(self, what: str) -> None:
        """The session changed, on whatever thread."""
        mine = threading.get_ident() == self._worker
        if not mine:
            self._live_cell(what)
        later(self.loop, self._after_change, what, mine)

    def _live_cell(self, what: str) -> None:
        """A cell steps the session: the loop is busy with the cell, so the picture goes out from here, within
        the window.
        """
        try:
            if asyncio.get_running_loop() is self.loop:
                self._forget_after(what)
                self.flush()
        except RuntimeError:
            pass

    def _forget_after(self, what: str) -> None:
        """What the page has is not true any more."""
        if what in ("reset", "peaks"):
            self._wire.forget()
            self._explained = None

    def _after_change(self, what: str, mine: bool) -> None:
        s = self.session
        self._forget_after(what)
        if s is not None and what == "autosave":
            self._tell_autosave(s)
        if s is not None and not mine:
            self._live["num_requests"] = s.num_requests
            if what == "reset":
                self._follow(s)
            if what in ("config", "request", "reset"):
                self.tell()
                if what != "request":
                    self.controls()
            if (
                what in ("step", "seek")
                and s.stopped_by is not None
                and s.stopped_by is not self.debugger.stop
                and s.stopped_by.step == s.cursor.step
            ):
                self.debugger.halted(s.stopped_by)  # a cell ran it
            if what == "branch":
                self.debugger.tell_family()
            elif what in ("breakpoints", "watches"):
                self.debugger.tell_breaks()
                self.explain_again()
        self.flush()

    def _follow(self, s: Shown) -> None:
        """Somebody else rewound the session or began it again: what the page wanted in the old run is gone."""
        self.wanted = self._halt = None
        self.debugger.halted(None)
        self._live.update(
            banner=f"The run was taken back to step {len(s.trace)} outside this page.", bad=False, offer=None
        )
        self.debugger.tell_family()

    def _tell_autosave(self, s: Shown) -> None:
        """Autosave ended, or goes on again."""
        self._warn_unsaved(s)
        self.controls()

    def _warn_unsaved(self, s: Shown) -> None:
        """A notice, if the steps of `s` are not written any more."""
        stop = s.trace.autosave_stop
        if stop is None:
            return
        text = stopped_saving(*stop) if self.address else s.trace.autosave_problem
        self.notice(self.writer.without_folder(text), bad=True)

    async def _open_first(self) -> None:
        found = await self.writer.claim(self._asked_run)
        held = self.writer.held
        notices = [found.notice]

        def job() -> Shown:
            kept.tidy()
            trace, branch, lost = read(found.folder) if found.folder is not None else (None, kept.MAIN, "")
            notices.append(lost)
            if trace is None:
                home = (
                    self.writer.begin() if lost else held
                )  # what cannot be read is kept, and nothing is written over it
                shown: Shown = opening.open_session(
                    self.settings, home.path(kept.MAIN) if home is not None else None, self.progress
                )
                self.debugger.begin(shown)
                return shown
            shown = opening.reopen(trace, held.path(branch) if held is not None else None, self.progress)
            if self._at_step is not None:
                shown.seek(min(max(0, self._at_step), len(shown.trace)))
            self.settings = opening.settings_of(shown)
            self.debugger.begin(shown, branch)
            assert found.folder is not None
            notices.extend(self.debugger.family.recall(shown, branch, found.folder))
            return shown

        await self._open(job)
        for text in filter(None, notices):
            self.notice(text, bad=text != COPY)

    def notice(self, text: str, *, bad: bool = False) -> None:
        """Tell the user something that stays on the page until it is closed. May be called on any thread."""

        def add() -> None:
            if text not in [n["text"] for n in self._notices]:
                self._notices.append({"id": self._next_notice, "text": text, "bad": bad})
                self._next_notice += 1
            self.tell()

        later(self.loop, add)

    _next_notice = 1

    async def _open(self, job: Callable[[], Shown]) -> bool:
        self.tell(loading="Starting the engine …", progress=-1, banner=None, bad=False, offer=None)
        self.controls()
        try:
            session = await self.work(job)
        except UserErrors as e:
            self._refuse(e)
            return False
        self.show(session)
        return True

    def _refuse(self, e: Exception, field: str | None = None) -> None:
        """Says each thing that is wrong at the field it names, else in the banner."""
        text = _text(e)
        self.tell(loading=None, progress=-1)
        for line in text.split("\n"):
            named = field or next(
                (f for f in opening.LABELS if line.startswith((f"{f} ", f"unknown {f} "))), None
            )
            self.post({"type": "said", "field": named, "error": line})
        if self.session is None:
            self.tell(banner=text, bad=True, offer={"text": "Try again", "cmd": "again"})
        self.controls()

    async def _restart(self, settings: Settings, anew: bool = False) -> None:
        """A new session in place of this one; with `anew`, one that owes the old one nothing.

        The old one is closed only when the new one is there: a mistake loses nothing.
        """
        old = self.session
        await self.stop()
        if (
            old is not None
            and not anew
            and not self.own
            and isinstance(old, Session)
            and (settings.scenario, settings.model) == (self.settings.scenario, self.settings.model)
        ):
            changes = {k: v for k, v in settings.config.items() if v != self.settings.config.get(k)}
            made = await self._open(lambda: self.debugger.family.fork(old, 0, name=None, **changes))
        else:
            try:
                home = kept.create(self.writer.browser)
            except (OSError, hub.ModelError) as e:
                home = None
                self.writer.unsaved(e)
            path = home.path(kept.MAIN) if home is not None else None
            made = await self._open(lambda: opening.open_session(settings, path, self.progress))
            if made:
                mine, self.own = self.own, True
                self.writer.swap(home)
                assert self.session is not None
                self.debugger.renew(old, self.session, close=mine)
            elif home is not None:
                home.discard()
        if made:
            self.settings = settings
            self.debugger.tell()
            self.tell()
            self.controls()
            self.post({"type": "clear"})

    # commands -----------------------------------------------------------------------------------------------

    async def _command(self, m: dict[str, Any]) -> None:
        name = m["cmd"]
        s = self.session
        if name == "seen":
            self._notices = [n for n in self._notices if n["id"] != m.get("id")]
            self.tell()
            return
        if name == "again":
            await self._restart(self.settings)
            return
        if name == "lesson":
            if self.address:
                await self._restart(self._first.copy(), anew=True)
            return
        if name == "policy":
            await self._policy(str(m.get("source", "")))
            return
        if name == "restart":
            try:
                await self._restart(self.allowed.change(self.settings, m["changes"]))
            except UserErrors as e:
                self._refuse(e)
            return
        if s is None:
            return
        if self.debugger.knows(name):
            await self.debugger.command(m)
        elif name == "seek":
            await self.stop(wait=False)
            self.go(int(m["step"]))
        elif name == "back":
            await self.stop(wait=False)
            _, at = self.place(s)
            self.go(at.step - (at.event is None))
        elif name == "end":
            self.go(len(s.trace))
        elif name == "event":
            await self.stop(wait=False)
            self._go_event(1 if m.get("by", 1) > 0 else -1)
        elif name == "step":
            await self.stop()
            await self._advance()
        elif name == "play":
            self.play()
        elif name == "pause":
            self.debugger.pause()
            await self.stop(wait=False)
        elif name == "speed":
            self.speed = max(0.0, float(m["value"]))
            self.tell(speed=m["value"])
        elif name == "reset":
            await self.stop()
            if isinstance(s, Session):
                await self.work(s.reset)
                self.tell(num_requests=s.num_requests)
            else:
                self.go(0)
            self.flush()
        elif name == "watch-inside":
            await self._watch_inside(s)
        elif name == "calibrate":
            await self._calibrate(s)
        elif name == "add":
            await self._add(m)
        elif name == "abort":
            await self._input(
                "abort", lambda: s.abort(str(m["id"])) if isinstance(s, Session) else None, id=m["id"]
            )
        elif name == "alone":
            await self._alone(str(m["id"]))
        elif name == "set":
            await self._set(str(m["field"]), m["value"])
        elif name == "save":
            await self._save(s)

    def go(self, step: int) -> None:
        """Moves what is shown; never waits for the engine."""
        s = self.session
        assert s is not None
        self._move(s, Cursor(min(max(0, step), len(s.trace))))
        if self._live.get("banner") and not self._live.get("bad") and not self._live.get("offer"):
            self.tell(banner=None)  # it spoke of the end; we look elsewhere
        self.flush()

    def _move(self, s: Shown, at: Cursor) -> None:
        self.wanted = at if self.busy else None
        if self.wanted is not None:
            return
        with suppress(IndexError):  # somebody rewound it in this moment
            s.seek(*at)

    def _go_event(self, by: int) -> None:
        """One event on or back.

        Inside step N the cursor is (N, k), k events of it done; all of them done is (N, None).
        """
        s = self.session
        assert s is not None
        trace, (step, event) = self.place(s)
        if by > 0:
            if event is None:
                if step >= len(trace):
                    return
                step, event = step + 1, 0
            event += 1
        else:
            if event is None:
                if step == 0:
                    return
                event = len(trace.record(step).events)
            event -= 1
        count = len(trace.record(step).events)
        self._move(
            s, Cursor(step, event) if 0 < event < count else Cursor(step if event >= count else step - 1)
        )
        self.flush()

    async def _advance(self, until: float | None = None, watched: bool = False) -> bool:
        """One step on: a recorded one if there is, else a new one (with `until`, new ones until that moment;
        with `watched`, one whose inside is looked at).

        False if there is none.
        """
        s = self.session
        assert s is not None
        trace, at = self.place(s)
        if not watched and (at.event is not None or at.step < len(trace)):
            self.go(at.step if at.event is not None else at.step + 1)
            return True
        make = s.profile_step if watched and isinstance(s, Session) else s.step
        count, before = 0, (trace, len(trace))
        old = self._live.get("banner")

        def job() -> int:
            nonlocal count, before
            while True:
                before = s.trace, len(s.trace)
                if make() is None:
                    break
                count += 1
                if until is None or time.perf_counter() >= until or s.done or s.stopped_by is not None:
                    break
            return s.num_requests

        try:
            n = await self.work(job)
        except BreakpointError as e:  # the step itself is done and kept
            self.tell(playing=False, banner=f"{e}.", bad=True, offer=None)
            self.debugger.tell_breaks()
            self.flush()
            return False
        except (
            Exception
        ) as e:  # whatever the runner or a policy raised: the engine is as it was before that step
            same = before == (s.trace, len(s.trace))
            after = (
                "Nothing was changed by it."
                if same
                else f"Meanwhile somebody else changed the run: it stands at step {len(s.trace)}."
            )
            self.tell(
                playing=False,
                banner=f"Step {before[1] + 1} failed: {_text(e)}. {after}",
                bad=True,
                offer=None,
            )
            self.flush()
            return False
        if n != self._live["num_requests"]:
            self.tell(num_requests=n)
        self.flush()
        if stuck := s.engine.stuck if isinstance(s, Session) else "":
            self.tell(playing=False, banner=f"This run is stuck. {stuck}.", bad=True, offer=None)
            return False
        if not count:
            said = "All requests have ended. Add a prompt, restart, or look back with the slider."
            if isinstance(s, Recording):
                said = "This is a recording, and this was its last step."
            self.tell(
                banner=said, bad=False, offer=None if isinstance(s, Session) else self._live.get("offer")
            )
        elif old and self._live.get("banner") == old and not isinstance(s, Recording):
            self.tell(banner=None, bad=False, offer=None)
        if s.stopped_by is not None and count:
            self.debugger.halted(s.stopped_by)
            return False
        return count > 0

    def play(self, fast: bool = False) -> None:
        """Plays from the cursor on, unless it plays already. `fast`: at full speed, whatever is chosen."""
        if self._task is None or self._task.done():
            self._task = self.loop.create_task(self._play(fast))
            self._task.add_done_callback(self._ended)

    async def _play(self, fast: bool) -> None:
        s = self.session
        assert s is not None
        self._heard = time.monotonic()
        self.tell(playing=True)
        self.playing = True
        due = time.perf_counter()
        try:
            self._halt = await self.debugger.ahead(s)
            while self.playing:
                speed = 0.0 if fast else self.speed
                if not await self._advance(time.perf_counter() + BURST_S if not speed else None):
                    break
                if self._halt is not None and self.place(s)[1].step == self._halt:
                    self.debugger.stopped_ahead()
                    break
                if (
                    self.attached.is_set()
                    and self._sent > self._acked
                    and time.monotonic() - self._heard > DESERTED_S
                ):
                    break
                if self.room is not None and (full := self.room.problem()) is not None:
                    self.tell(banner=full, bad=True)
                    break
                if not speed:
                    await self._breathe()
                    continue
                now = time.perf_counter()
                due = max(due + 1 / speed, now)
                while self.playing and (left := due - time.perf_counter()) > 0:
                    await asyncio.sleep(min(left, 0.05))
        finally:
            self.playing = False
            self.tell(playing=False)
            self._explained = None
            self.debugger.tell_family()
            self.flush()

    async def _breathe(self) -> None:
        """At full speed a simulated engine would leave the page no processor to draw with: it waits a moment
        for a page that is behind.
        """
        if not self.attached.is_set() or self._sent - self._acked < WINDOW:
            await asyncio.sleep(0)
            return
        self._credit.clear()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._credit.wait(), PATIENCE_S)

    async def stop(self, wait: bool = True) -> None:
        """Pauses; with `wait`, until the step under way is done."""
        self.playing = False
        task = self._task
        if task is None or task.done():
            return
        self.tell(playing=False)
        if wait:
            await asyncio.wait([task])

    # inputs -------------------------------------------------------------------------------------------------

    async def _input(self, cmd: str, f: Callable[[], Any], **more: Any) -> Any:
        """An input of the user: taken between two steps. The answer goes back to where it was typed."""
        try:
            result = await self.work(f)
        except UserErrors as e:
            self.post({"type": "said", "cmd": cmd, "error": _text(e), **more})
            return None
        s = self.session
        if s is not None:
            self.tell(
                num_requests=s.num_requests if not self.busy else self._live["num_requests"],
                banner=None if not isinstance(s, Recording) else self._live.get("banner"),
            )
        return result

    async def _add(self, m: dict[str, Any]) -> None:
        s = self.session
        if not isinstance(s, Session):
            self.post(
                {"type": "said", "cmd": "add", "error": "This is a recording: run it again to add requests."}
            )
            return
        rid = await self._input(
            "add", lambda: s.add(str(m.get("prompt", "")), chat=s.tokenizer is not None, **opening.asked(m))
        )
        if rid is not None:
            self.post({"type": "said", "cmd": "add", "id": rid})

    async def _alone(self, request_id: str) -> None:
        """Computes a request once more, alone; the run stands meanwhile."""
        s = self.session
        if not isinstance(s, Session):
            self.post(
                {
                    "type": "said",
                    "cmd": "alone",
                    "error": "This is a recording: run it again to compute a request alone.",
                }
            )
            return
        await self.stop()
        what = f"Computing {request_id} alone …"
        self.tell(loading=what, progress=0.0, banner=None, bad=False)
        try:
            found = await self.work(
                lambda: s.alone(request_id, progress=lambda share: self.progress(share, what))
            )
        except UserErrors as e:
            self.post({"type": "said", "cmd": "alone", "error": _text(e)})
            return
        finally:
            await asyncio.sleep(0)  # the progress that is on its way comes first
            self.tell(loading=None, progress=-1)
        self.post(alone_message(found))

    async def _set(self, field: str, value: Any) -> None:
        s = self.session
        if not isinstance(s, Session):
            return
        try:
            value = typed = self.allowed.values(self.settings, {field: value})[field]
            if not CONFIG_FIELDS[field].metadata["live"]:
                raise ConfigError(f"{field} takes a restart")
            await self.work(lambda: s.configure(**{field: typed}))
        except UserErrors as e:
            self._refuse(e, field)
            return
        self.settings.config[field] = value
        self.tell()
        self.post({"type": "said", "field": field, "error": ""})
        self.post({"type": "said", "cmd": "set", "field": field, "error": ""})

    async def _policy(self, source: str) -> None:
        """Runs a policy's code and ranks by it from the next step on.

        Refused unless the server was started with code allowed.
        """
        s = self.session
        refused = (
            "This server takes no code; it has to be started with: cbviz explore --allow-code"
            if not self.allow_code
            else (
                "This is a recording: run it again to change its policy."
                if not isinstance(s, Session)
                else ""
            )
        )
        if refused:
            self.post({"type": "said", "cmd": "policy", "error": refused})
            return
        assert isinstance(s, Session)

        def job() -> str:
            name = typed.register(source)
            s.configure(policy=name)
            return name

        try:
            name = await self.work(job)
        except UserErrors as e:
            self.post({"type": "said", "cmd": "policy", "error": _text(e)})
            return
        self.settings.config["policy"] = name
        self.tell()
        self.post({"type": "said", "cmd": "policy", "policy": name})
        self.controls()

    async def _watch_inside(self, s: Shown) -> None:
        """One new step, watched from inside."""
        if not isinstance(s, Session) or not hasattr(s.runner, "profile_next"):
            why = (
                "This is a recording: run it again to watch a step."
                if not isinstance(s, Session)
                else "Nothing is computed here that could be watched: choose the real model."
            )
            self.post({"type": "said", "cmd": "watch-inside", "error": why})
            return
        await self.stop()
        self.go(len(s.trace))
        await self._advance(watched=True)

    async def _calibrate(self, s: Shown) -> None:
        """Measures the peaks that utilisation is told against."""
        if not isinstance(s, Session):
            self.post(
                {
                    "type": "said",
                    "cmd": "calibrate",
                    "error": "This is a recording: its peaks are those of the machine that made it.",
                }
            )
            return
        await self.stop()
        self.tell(loading="Measuring this machine …", progress=0.0)
        try:
            d = await self.work(lambda: s.calibrate(self.progress))
        except UserErrors as e:
            self.tell(loading=None, progress=-1)
            self.post({"type": "said", "cmd": "calibrate", "error": _text(e)})
            return
        self.tell(loading=None, progress=-1, bad=False, offer=None, banner=f"Peaks of {d.name}: {d.source}.")
        self.controls()
        self.flush()

    async def _save(self, s: Shown) -> None:
        def job() -> tuple[bytes, int]:
            trace, header, steps = s.trace_now() if isinstance(s, Session) else (s.trace, None, len(s.trace))
            whole = io.BytesIO()  # no file: the disk may be full
            with gzip.GzipFile(filename="", fileobj=whole, mode="wb", mtime=0) as z:
                write_whole(trace, z, header, steps)
            return whole.getvalue(), steps

        data, steps = await self.work(job)
        self.post(
            {"type": "save", "name": f"cbviz-{s.workload_name or 'run'}-{steps}-steps.jsonl.gz"}, [data]
        )

    def close(self) -> None:
        """Stops playing and lets go of the session (which lives on if it came from outside)."""
        self.playing = False
        self._unsubscribe()
        for task in list(self._tasks):
            task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.own:
            self.debugger.close()
        self.writer.swap(None)


def _text(e: BaseException) -> str:
    text = str(e.args[0]) if isinstance(e, KeyError) and e.args else str(e)
    return text or type(e).__name__
