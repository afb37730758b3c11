"""What a debugger does, for the explorer's run loop: branches, rewind, breakpoints, comparison, questions.

Knows the player's worker and session, no widget.

Owns the family of branches, why the run stopped, and what the page asked about. A command comes as a message
of the page; the answer goes to the control that sent it (`said`), or is one of `family`, `forkform`,
`breaks`, `stop`, `compared`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cbviz.app import branches, comparing, kept, opening, typed
from cbviz.app.branches import Family
from cbviz.app.later import later
from cbviz.app.opening import Shown
from cbviz.app.wire import event_sentence, reserved, step_account, told
from cbviz.breakpoints import EVENTS, Breakpoint, Stop, Watch, WatchError, as_breakpoint, last_stop, next_stop
from cbviz.config import ConfigError
from cbviz.session import Session
from cbviz.trace import Cursor, Trace, why_block, why_chunk, why_missed, why_preempted, why_waiting
from cbviz.trace.accounting import summary
from cbviz.trace.explain import count

if TYPE_CHECKING:
    from cbviz.app.player import Player

BURST_S = 0.02
"""A branch that is run to its end in the background reports this often."""
FIRST_EVENTS = ("preempted", "evicted", "prefix miss", "finished", "starved")
"""What the page offers first."""
UserErrors = (ValueError, LookupError, OSError, RuntimeError)


class Debugger:
    """The debugger's part of one page."""

    def __init__(self, player: Player) -> None:
        self.p = player
        self.family = Family(None)
        self.stop: Stop | None = None
        self.about: tuple[str, Any] | None = None
        """What the page asks about: ("request", id) or ("block", number)."""
        self.accounting = False
        """The page shows the accounts."""
        self._finishing = False
        self._commands: dict[str, Callable[[Any, dict[str, Any]], Awaitable[None]]] = {
            "forkform": self._form,
            "fork": self._fork,
            "rewind": self._rewind,
            "branch": self._switch,
            "rename": self._rename,
            "drop": self._drop,
            "finish": self._finish,
            "break": self._break,
            "break-set": self._break_set,
            "break-remove": self._break_remove,
            "watch": self._watch,
            "watch-remove": self._watch_remove,
            "run-on": self._run_on,
            "run-back": self._run_back,
            "compare": self._compare,
            "files": self._files,
            "ask": self._ask,
            "account": self._account,
        }

    def knows(self, name: str) -> bool:
        return name in self._commands

    async def command(self, m: dict[str, Any]) -> None:
        """Does what the page asks; what is wrong with the wish is said where it was made."""
        s = self.p.session
        if s is None:
            return
        try:
            await self._commands[m["cmd"]](s, m)
        except UserErrors as e:
            text = str(e.args[0]) if isinstance(e, KeyError) and e.args else str(e)
            self.p.tell(loading=None, progress=-1)
            self.p.post({"type": "said", "cmd": m["cmd"], "error": text or type(e).__name__})

    # what the page is told ----------------------------------------------------------------------------------

    def tell(self) -> None:
        """Branches, breakpoints and why it stopped: after a reload or another session."""
        self.tell_family()
        self.tell_breaks()
        if self.stop is not None:
            self.p.post({"type": "stop", **self.stop.to_dict()})

    def tell_family(self) -> None:
        s = self.p.session
        if s is not None:
            self.p.post({"type": "family", "branches": self.family.rows(s), "name": s.name})

    def tell_breaks(self) -> None:
        s = self.p.session
        if s is not None:
            stops = [as_breakpoint(b) for b in s.breakpoints]
            self.p.post(
                {
                    "type": "breaks",
                    "events": [*FIRST_EVENTS, *(e for e in EVENTS if e not in FIRST_EVENTS)],
                    "watches": [w.name for w in s.watches],
                    "items": [
                        {"name": b.name, "enabled": b.enabled, "hits": b.hits, "error": b.error}
                        for b in stops
                    ],
                }
            )

    def remember(self) -> None:
        """Writes the family down for the next reload, when the worker comes to it."""
        s = self.p.session
        with suppress(RuntimeError):  # the page is closing
            self.p.submit(lambda: self.family.remember(s))

    def halted(self, stop: Stop | None) -> None:
        """A breakpoint holds (or none does any more): the page says which and why."""
        self.stop = stop
        self.p.post({"type": "stop", **(stop.to_dict() if stop is not None else {"step": -1})})
        if stop is not None:
            self.tell_breaks()

    def details(self, s: Shown, trace: Trace, at: Cursor) -> dict[str, Any]:
        """For the why panel, at the cursor: the event that was just walked over, what was asked about, and
        the watches. Called in the worker.
        """
        out = dict[str, Any]()
        if at.step:
            out["num_events"] = len(trace.record(at.step).events)
            if at.event:
                out["moment"] = event_sentence(trace, at.step, at.event - 1)
        if not self.p.playing and self.about is not None:
            with suppress(LookupError):  # a block that another pool had
                out["about"] = answer(trace, at, *self.about)
        out["watched"] = self._watched(s, trace, at)
        return out

    def _watched(self, s: Shown, trace: Trace, at: Cursor) -> list[list[str]]:
        """Name and value of each watch.

        One that costs too much at this step is dropped, and the page says so.
        """
        values = []
        for w in list(s.watches):
            try:
                values.append([w.name, plain_value(w.value(trace, at))])
            except WatchError as e:
                later(self.p.loop, self._drop_watch, s, w, f"At step {at.step} a watch was dropped: {e}.")
        return values

    def _drop_watch(self, s: Shown, w: Watch, why: str) -> None:
        if w in s.watches:
            s.watches.remove(w)
            self.p.notice(why, bad=True)
            self._watches_changed()

    def accounts(self, trace: Trace, at: Cursor, whole: bool) -> dict[str, Any] | None:
        """The accounts of the step at the cursor and of the run up to it; with `whole`, contiguous
        reservation over the recorded run. Called in the worker.
        """
        if not self.accounting or not at.step:
            return None
        if not trace.has("accounting"):
            return {"type": "account", "step": at.step, "missing": "this trace holds no accounts"}
        out = step_account(trace.record(at.step))
        if whole:
            sums = summary(trace, Cursor(at.step))
            out["run"] = {
                "steps": sums["num_steps"],
                "tokens": list(sums["tokens"].items()),
                "slots": list(sums["slot_steps"].items()),
            }
            out["reservation"] = reserved(trace)
        return out

    # branches -----------------------------------------------------------------------------------------------

    def _at(self, s: Shown) -> Cursor:
        return self.p.place(s)[1]

    def _live(self, s: Shown, what: str) -> Session:
        if not isinstance(s, Session):
            raise ConfigError(f"This is a recording, without an engine to {what}: {s.why}")
        return s

    async def _form(self, s: Shown, m: dict[str, Any]) -> None:
        live, at = self._live(s, "fork"), self._at(s).step
        self.p.post(
            {
                "type": "forkform",
                "at": at,
                "fields": await self.p.work(lambda: opening.fork_fields(live, at)),
                "name": live.name,
            }
        )

    async def _fork(self, s: Shown, m: dict[str, Any]) -> None:
        live, p = self._live(s, "fork"), self.p
        await p.stop()
        at = int(m.get("at", self._at(s).step))
        changes = p.allowed.values(
            p.settings, {str(k): v if v != "" else None for k, v in (m.get("changes") or {}).items()}
        )
        add = (
            [{"prompt": str(m["prompt"]), "chat": live.tokenizer is not None, **opening.asked(m)}]
            if m.get("prompt")
            else []
        )
        remove = [str(m["remove"])] if m.get("remove") else []
        if getattr(live.runner, "kv", None) is not None:
            p.tell(
                loading=f"Forking at step {at}: the KV blocks that are needed are computed again …",
                progress=-1,
            )
        new = await p.work(
            lambda: self.family.fork(
                live,
                at,
                name=str(m["name"]).strip() or None if m.get("name") else None,
                add=add,
                remove=remove,
                **changes,
            )
        )
        self._show(new)
        p.post({"type": "said", "cmd": "fork", "name": new.name, "recomputed": new.recomputed_blocks})
        p.tell(
            banner=(
                f"Branch “{new.name}” stands at step {at}{_computed(new)}. Step or play it; “{live.name}” "
                "stays as it is."
            ),
            bad=False,
            offer=None,
        )

    def _show(self, session: Session) -> None:
        """Another branch is looked at."""
        p = self.p
        self.stop = None
        p.show(session)
        p.settings = opening.settings_of(session)
        for name in opening.FORK_LABELS:
            value = opening.config_of(session)[name]
            if value is not None and value != session.trace.header.config.get(name):
                p.settings.config[name] = value
        p.controls()
        self.remember()

    async def _switch(self, s: Shown, m: dict[str, Any]) -> None:
        p, name = self.p, str(m["name"])
        await p.stop()
        if name == s.name:
            return
        found = await p.work(lambda: self.family.wake(s, name, p.progress))
        self._show(found)

    async def _rewind(self, s: Shown, m: dict[str, Any]) -> None:
        live, p = self._live(s, "rewind"), self.p
        await p.stop()
        step = int(m.get("step", self._at(s).step))
        if step == len(live.trace):
            raise ConfigError(f"the engine stands at step {step} already: go back to an earlier step first")
        if getattr(live.runner, "kv", None) is not None:
            p.tell(loading=f"Rewinding to step {step} …", progress=-1)
        kept = await p.work(lambda: self.family.rewind(live, step))
        self.stop = None
        p.tell(
            loading=None,
            progress=-1,
            num_requests=live.num_requests,
            bad=False,
            offer={"text": "Undo", "cmd": "branch", "name": kept} if kept else None,
            banner=(
                f"The engine stands at step {step} again{_computed(live)}. What came later is kept as "
                f"branch “{kept}”."
            ),
        )
        p.controls()
        p.flush()
        self.tell()
        self.remember()

    async def _rename(self, s: Shown, m: dict[str, Any]) -> None:
        self.family.rename(s, str(m["name"]), str(m["new"]))
        self.p.post({"type": "said", "cmd": "rename", "error": ""})
        self.tell_family()
        self.remember()

    async def _drop(self, s: Shown, m: dict[str, Any]) -> None:
        await self.p.stop()
        instead = await self.p.work(lambda: self.family.drop(s, str(m["name"])))
        if instead is not None:
            self._show(instead)
        self.tell_family()
        self.remember()

    async def _finish(self, s: Shown, m: dict[str, Any]) -> None:
        """Runs a branch to its end, whichever is shown; Pause ends it."""
        p = self.p
        await p.stop()
        branch = self.family.find(s, str(m["name"]))
        if not isinstance(branch, Session):
            raise ConfigError(f"{branch.name} has no engine: show it first")
        self._finishing = True

        def burst() -> bool:
            end = time.perf_counter() + BURST_S
            while branch.step() is not None:
                if branch.done or time.perf_counter() > end:
                    return not branch.done
            return False

        try:
            while self._finishing and p.session is s and await p.work(burst):
                n = branch.num_requests
                done = branch.trace.state().num_ended
                p.tell(
                    loading=f"Running {branch.name}: step {len(branch.trace)}, {done} of {n} requests done",
                    progress=done / n if n else -1,
                )
        finally:
            self._finishing = False
            p.tell(loading=None, progress=-1, banner=None, offer=None, bad=False)
            p.flush()
            self.tell_family()
        p.post({"type": "said", "cmd": "finish", "name": branch.name, "error": ""})

    def pause(self) -> None:
        self._finishing = False

    # breakpoints --------------------------------------------------------------------------------------------

    def _enabled(self, s: Shown) -> list[Breakpoint]:
        stops = [as_breakpoint(b) for b in s.breakpoints]
        s.breakpoints[:] = stops
        return [b for b in stops if b.enabled]

    async def _break(self, s: Shown, m: dict[str, Any]) -> None:
        wish = {k: m[k] for k in ("event", "request", "block", "kv_above", "when") if m.get(k) is not None}
        if any(not isinstance(wish.get(k, ""), str) for k in ("event", "request", "when")):
            raise ConfigError("event, request and expression are text")
        when = wish.get("when", "").strip()
        if when.startswith("lambda"):
            if not self.p.allow_code:
                raise ConfigError(
                    "A Python predicate is for a notebook, or a server started with: cbviz explore "
                    "--allow-code. An expression such as kv_usage > 0.9 always goes"
                )
            b = self.family.break_on(s, event=typed.predicate(when))
            del self.family.recipes[b.name]  # code is not written down
        else:
            b = self.family.break_on(s, **wish)
        self.p.post({"type": "said", "cmd": "break", "name": b.name, "error": ""})
        self.tell_breaks()
        self.remember()

    async def _break_set(self, s: Shown, m: dict[str, Any]) -> None:
        for b in s.breakpoints:
            if isinstance(b, Breakpoint) and b.name == m["name"]:
                b.enabled, b.error = bool(m["enabled"]), ""
        self.tell_breaks()
        self.remember()

    async def _break_remove(self, s: Shown, m: dict[str, Any]) -> None:
        s.breakpoints[:] = [b for b in s.breakpoints if as_breakpoint(b).name != m["name"]]
        self.tell_breaks()
        self.remember()

    async def _watch(self, s: Shown, m: dict[str, Any]) -> None:
        at = self._at(s)
        w = await self.p.work(lambda: branches.checked_watch(str(m["expression"]), s.trace, at))
        if w.name in [x.name for x in s.watches]:
            raise ConfigError(f"{w.name} is watched already")
        s.watches.append(w)
        self.p.post({"type": "said", "cmd": "watch", "error": ""})
        self._watches_changed()

    async def _watch_remove(self, s: Shown, m: dict[str, Any]) -> None:
        s.watches[:] = [w for w in s.watches if w.name != m["name"]]
        self._watches_changed()

    def _watches_changed(self) -> None:
        self.tell_breaks()
        self.remember()
        self.p.explain_again()

    async def _run_on(self, s: Shown, m: dict[str, Any]) -> None:
        """To the next stop: over recorded steps by looking, then live, at full speed and with Pause."""
        p = self.p
        await p.stop()
        stops, at = self._enabled(s), self._at(s)
        if not stops:
            raise ConfigError("no breakpoint is on: add one first")
        self.halted(None)
        if at.step < len(s.trace) or at.event is not None:
            found = await p.work(lambda: next_stop(s.trace, stops, at.step - (at.event is not None)))
            if found is not None:
                self.to(found)
                return
            p.go(len(s.trace))
        p.play(fast=True)

    async def _run_back(self, s: Shown, m: dict[str, Any]) -> None:
        p = self.p
        await p.stop()
        stops, at = self._enabled(s), self._at(s)
        if not stops:
            raise ConfigError("no breakpoint is on: add one first")
        found = await p.work(lambda: last_stop(s.trace, stops, at.step))
        if found is None:
            raise ConfigError(f"no breakpoint holds before step {at.step}")
        self.to(found)

    def to(self, stop: Stop) -> None:
        """Shows where a breakpoint holds."""
        self.p.go(stop.step)
        self.halted(stop)

    async def ahead(self, s: Shown) -> int | None:
        """The recorded step at which a run that plays from the cursor stops, None if it has no such step."""
        at, stops = self._at(s), self._enabled(s)
        if not stops or at.step >= len(s.trace):
            return None
        self._next = await self.p.work(lambda: next_stop(s.trace, stops, at.step))
        return self._next.step if self._next is not None else None

    def stopped_ahead(self) -> None:
        self.halted(self._next)

    _next: Stop | None = None

    # comparison and questions -------------------------------------------------------------------------------

    async def _files(self, s: Shown, m: dict[str, Any]) -> None:
        files = await self.p.work(branches.saved) if self.p.alone else []
        self.tell_family()
        self.p.post({"type": "files", "files": files})

    async def _compare(self, s: Shown, m: dict[str, Any]) -> None:
        picks = [str(x) for x in m["picks"]][: comparing.MOST_RUNS + 1]

        def job() -> tuple[dict[str, Any], list[tuple[dict[str, Any], list[bytes]]]]:
            traces: dict[str, Trace] = {}
            for key in picks:
                name, trace = branches.trace_of(self.family, s, key, alone=self.p.alone)
                while name in traces:
                    name += " (saved)"
                traces[name] = trace
            return comparing.compared(traces), comparing.pictures(traces)

        told, pictures = await self.p.work(job)
        self.p.post({"type": "compared", "picks": picks, **told})
        for i, (head, buffers) in enumerate(pictures):
            self.p.post({**head, "type": "comparedrun", "i": i}, buffers)

    async def _ask(self, s: Shown, m: dict[str, Any]) -> None:
        self.about = (
            ("request", str(m["request"]))
            if m.get("request") is not None
            else ("block", int(m["block"]))
            if m.get("block") is not None
            else None
        )
        self.p.explain_again()

    async def _account(self, s: Shown, m: dict[str, Any]) -> None:
        self.accounting = bool(m["on"])
        self.p.explain_again()

    # another session ----------------------------------------------------------------------------------------

    def begin(self, session: Shown, branch: str = kept.MAIN) -> None:
        """A family of its own for `session`, saved where the page's run is saved.

        `branch`: the file of this session there.
        """
        self.family = Family(self.p.writer.held)
        self.family.runs[session] = branch if self.family.home is not None else ""

    def renew(self, old: Shown | None, new: Shown, close: bool) -> None:
        """A session that has nothing to do with the old one takes its place; breakpoints and watches stay.

        `close`: the old one and its branches end.
        """
        recipes = self.family.recipes
        self.begin(new)
        self.family.recipes = recipes
        self.stop = None
        if old is not None:
            new.breakpoints, new.watches = old.breakpoints, old.watches
            for s in (old.root.tree() if isinstance(old, Session) else [old]) if close else ():
                s.close()

    def close(self) -> None:
        """Lets go of all branches."""
        s = self.p.session
        for x in s.root.tree() if isinstance(s, Session) else [s] if s is not None else []:
            x.close()


def answer(trace: Trace, at: Cursor, kind: str, what: Any) -> dict[str, Any]:
    """What there is to say about a request (what a waiting one lacks, what held a running one back) or a
    block, at the cursor. Plain JSON.
    """
    said: list[Any] = []
    if kind == "block":
        w = why_block(trace, at, what)
        return {
            "title": f"Block {what}, step {at.step}",
            "request": None,
            "block": what,
            "items": list(map(told, w.sentences)),
        }
    state = trace.state(at)
    r = state.requests.get(what)
    if r is None:
        return {
            "title": what,
            "request": what,
            "block": None,
            "items": [{"kind": "waits", "text": f"{what} has not arrived yet", "ids": []}],
        }
    waits = what in state.waiting
    said += (
        why_waiting(trace, at, what).sentences
        if waits
        else why_chunk(trace, at.step, what).sentences
        if at.step and not r.finished
        else []
    )
    if r.num_preemptions and trace.has("reasons"):
        said += why_preempted(trace, at, what).sentences
    if not waits and trace.has("reasons"):
        said += why_missed(trace, at, what).sentences
    title = f"{what}: what it would take, step {at.step}" if waits else f"{what}, step {at.step}"
    return {"title": title, "request": what, "block": None, "items": list(map(told, dict.fromkeys(said)))}


MOST_SHOWN = 200
"""A value longer than that many characters is cut on the page."""


def plain_value(value: Any) -> str:
    """A watch's value as the page shows it."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no"}.get(value, "–") if value is not None else "–"
    text = (
        f"{value:,.4g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 1] + "…"


def _computed(s: Session) -> str:
    """How many KV blocks had to be computed again, as the end of a sentence."""
    none = "" if getattr(s.runner, "kv", None) is not None else " (this runner keeps none)"
    return f", {count(s.recomputed_blocks, 'KV block')} computed again{none}"
