"""The branches of a run, and the saved runs beside them, as the explorer lists them.

Knows sessions and files, no page.

A branch either has an engine (a Session) or is asleep: its records, from which an engine is made again when
somebody wants to go on with it. What a rewind drops stays as a branch asleep, and so does every branch but
the shown one after a page was loaded again. Everything here is called from the player's worker.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cbviz.app import kept, opening
from cbviz.app.kept import Held
from cbviz.app.opening import Recording, Shown
from cbviz.breakpoints import Breakpoint, Watch, on
from cbviz.config import ConfigError
from cbviz.session import Session
from cbviz.trace import Cursor, Trace, load, runs
from cbviz.trace.autosave import write_text

MOST_ENGINES = 4
"""Live engines of a real model: each keeps a KV pool of its own."""
MOST_FILE_BYTES = 100_000_000
"""Larger recordings are for the command line."""


@dataclass
class Asleep:
    """A branch without an engine."""

    name: str
    trace: Trace
    parent: str
    at: int
    run: str = ""
    runner: Any = None
    """Whoever computes its tokens, where that can't be found by name."""


@dataclass
class Family:
    """All branches of one run.

    `home`: where they are saved, None if nowhere. `runs[session]`: its file there ('' if it has none).
    `recipes`: how breakpoints were made.
    """

    home: Held | None
    runs: dict[Shown, str] = field(default_factory=dict)
    origin: dict[Session, tuple[str, int]] = field(default_factory=dict)
    """Parent and step of sessions whose parent is asleep, or was."""
    asleep: list[Asleep] = field(default_factory=list)
    recipes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def sessions(self, shown: Shown | None) -> list[Session]:
        return shown.root.tree() if isinstance(shown, Session) else []

    def rows(self, shown: Shown | None) -> list[dict[str, Any]]:
        """What the page lists.

        Plain JSON: name, parent, at (the step it was forked at), steps, shown, live (it has an engine), done,
        root.
        """
        out = []
        for s in self.sessions(shown):
            parent, at = self.origin.get(s) or (s.parent.name if s.parent is not None else "", s.forked_at)
            out.append(
                {
                    "name": s.name,
                    "parent": parent,
                    "at": at,
                    "steps": len(s.trace),
                    "shown": s is shown,
                    "live": True,
                    "done": s.done,
                    "root": s.parent is None,
                }
            )
        out += [
            {
                "name": a.name,
                "parent": a.parent,
                "at": a.at,
                "steps": len(a.trace),
                "shown": False,
                "live": False,
                "done": False,
                "root": False,
            }
            for a in self.asleep
        ]
        if isinstance(shown, Recording):
            out.insert(
                0,
                {
                    "name": shown.name,
                    "parent": "",
                    "at": 0,
                    "steps": len(shown.trace),
                    "shown": True,
                    "live": False,
                    "done": True,
                    "root": True,
                },
            )
        return out

    def find(self, shown: Shown | None, name: str) -> Session | Asleep:
        """Raises KeyError."""
        known: list[Session | Asleep] = [*self.sessions(shown), *self.asleep]
        for x in known:
            if x.name == name:
                return x
        raise KeyError(f"no branch {name!r}")

    def free_name(self, shown: Shown, wish: str) -> str:
        used = {r["name"] for r in self.rows(shown)}
        name, n = wish, 2
        while name in used:
            name, n = f"{wish} ({n})", n + 1
        return name

    # engines ------------------------------------------------------------------------------------------------

    def check_room(self, shown: Session) -> None:
        """Raises ConfigError with the figures if another engine of the real model would be one too many."""
        pools = [
            kv.num_bytes for s in self.sessions(shown) if (kv := getattr(s.runner, "kv", None)) is not None
        ]
        if getattr(shown.runner, "kv", None) is not None and len(pools) >= MOST_ENGINES:
            raise ConfigError(
                f"{len(pools)} branches have a live engine of the real model, the most is {MOST_ENGINES}: "
                "each keeps a KV pool of its own, "
                f"{max(pools) / 1e6:.0f} MB here, {sum(pools) / 1e6:.0f} MB together (the weights are "
                "shared). Drop a branch first."
            )

    def fork(
        self,
        shown: Session,
        at: int,
        *,
        name: str | None,
        add: Sequence[dict[str, Any]] = (),
        remove: Sequence[str] = (),
        **changes: Any,
    ) -> Session:
        """A new branch from step `at` of the shown one, with its breakpoints and watches.

        Raises what `Session.fork` does, and ConfigError for one engine too many.
        """
        self.check_room(shown)
        if name is not None and name != self.free_name(shown, name):
            raise ConfigError(f"a branch named {name!r} exists already")
        with shown.turn:
            return self._fork(shown, at, name, add, remove, changes)

    def _fork(
        self,
        shown: Session,
        at: int,
        name: str | None,
        add: Sequence[dict[str, Any]],
        remove: Sequence[str],
        changes: dict[str, Any],
    ) -> Session:
        # What the user did since the last step stands in no record yet: the branch takes it along.
        waiting = shown.engine.inputs if at == len(shown.trace) else []
        added = [i["spec"] for i in waiting if i["op"] == "add"]
        if name is None and waiting and changes:
            name = self.free_name(
                shown, ", ".join(f"{k}={v}" for k, v in changes.items())
            )  # by what is changed now
        gone = [*(i["request_id"] for i in waiting if i["op"] == "abort"), *remove]
        for i in waiting:
            if i["op"] == "configure":
                changes = {**i["changes"], **changes}
        new = shown.fork(
            at,
            name=name,
            add=add,
            remove=[r for r in dict.fromkeys(gone) if r not in {x.request_id for x in added}],
            **changes,
        )
        for spec in added:
            if spec.request_id not in gone:
                new.engine.add(spec)
        new.name = self.free_name_of(shown, new)
        self._adopt(new, shown, self.home.new_branch() if self.home is not None else "")
        return new

    def free_name_of(self, shown: Shown, new: Session) -> str:
        taken = {a.name for a in self.asleep}
        return new.name if new.name not in taken else self.free_name(shown, new.name)

    def _adopt(self, new: Session, shown: Session, run: str) -> None:
        new.breakpoints, new.watches = shown.breakpoints, shown.watches
        self.runs[new] = run
        if run and self.home is not None:
            new.autosave(self.home.path(run))

    def wake(self, shown: Shown, name: str, progress: opening.Progress) -> Session:
        """The branch `name` with an engine of its own, made from its records if it was asleep.

        Raises ConfigError, ReplayError, KeyError.
        """
        found = self.find(shown, name)
        if isinstance(found, Session):
            return found
        if isinstance(shown, Session):
            self.check_room(shown)
        progress(-1, f"Bringing back {name}: its {len(found.trace)} steps are applied again …")
        new = Session.from_trace(found.trace, runner=found.runner)
        self.asleep.remove(found)
        new.name = found.name
        if isinstance(shown, Session):
            root = shown.root
            new.parent, new.forked_at = root, found.at
            root.branches.append(new)
            self.origin[new] = found.parent, found.at
            self._adopt(new, shown, found.run)
        return new

    def rewind(self, s: Session, step: int) -> str | None:
        """Rewinds `s`; what comes later stays as a branch asleep, whose name is returned (None if nothing
        did). Raises IndexError, ReplayError.
        """
        with s.turn:
            old, end = s.trace, len(s.trace)
            if not 0 <= step < end:
                s.rewind(step)
                return None
            later = Asleep(
                self.free_name(s, f"{s.name} to step {end}"),
                old,
                s.name,
                step,
                runner=None if s.runner_name in ("sim", "torch") else s.runner,
            )
            problem = self._save_asleep(
                later
            )  # before the run's own file is shortened: a crash in between loses nothing
            try:
                s.rewind(step)
            except BaseException:
                if later.run and self.home is not None:
                    self.home.path(later.run).unlink(missing_ok=True)
                raise
            if problem:
                s.notes.append(problem)
        self.asleep.append(later)
        return later.name

    def _save_asleep(self, branch: Asleep) -> str:
        """Writes a branch asleep into a file of its own, if branches are saved.

        Returns why that was not possible; '' otherwise.
        """
        if self.home is None:
            return ""
        try:
            branch.run = self.home.new_branch()
            branch.trace.save(self.home.path(branch.run))
        except OSError as e:
            branch.run = ""
            return (
                f"Branch “{branch.name}” is not saved ({e.strerror or e}). It is lost when the page is "
                "loaded again."
            )
        return ""

    def rename(self, shown: Shown, name: str, new: str) -> None:
        """Raises ConfigError if the new name is empty or taken, KeyError."""
        found = self.find(shown, name)
        new = " ".join(new.split())[:80]
        if not new:
            raise ConfigError("a branch's name is empty: type one")
        if new != name and new != self.free_name(shown, new):
            raise ConfigError(f"a branch named {new!r} exists already")
        if isinstance(found, Session):
            found.rename(new)
        else:
            found.name = new
        for a in self.asleep:
            a.parent = new if a.parent == name else a.parent
        self.origin = {s: (new if p == name else p, at) for s, (p, at) in self.origin.items()}

    def drop(self, shown: Shown, name: str) -> Session | None:
        """Forgets a branch, and those with an engine that come from it.

        Returns the session to show instead if the shown one went. Raises ConfigError, KeyError.
        """
        found = self.find(shown, name)
        if isinstance(found, Asleep):
            self.asleep.remove(found)
            return None
        gone, parent = found.tree(), found.parent
        found.drop()
        for s in gone:
            self.runs.pop(s, None)
            self.origin.pop(s, None)
        return parent if shown in gone else None

    # breakpoints --------------------------------------------------------------------------------------------

    def break_on(self, shown: Shown, **wish: Any) -> Breakpoint:
        """Sets a breakpoint for all branches. Raises ConfigError, WatchError."""
        b = on(**wish)
        if b.when is not None:
            b.when.value(shown.trace, shown.cursor)
        used = {x.name for x in shown.breakpoints if isinstance(x, Breakpoint)}
        if b.name in used:
            raise ConfigError(f"there is a breakpoint {b.name!r} already")
        shown.breakpoints.append(b)
        self.recipes[b.name] = wish
        return b

    # files --------------------------------------------------------------------------------------------------

    def remember(self, shown: Shown | None) -> None:
        """Write down, beside the autosaved branches, what the family is, so that a page that is loaded again
        finds it.
        """
        if self.home is None or shown is None:
            return
        members: list[dict[str, Any]] = [
            {"run": a.run, "name": a.name, "parent": a.parent, "at": a.at} for a in self.asleep if a.run
        ]
        for s, row in zip(self.sessions(shown), self.rows(shown)):
            if mine := self.runs.get(s, ""):
                members.append({"run": mine, "name": row["name"], "parent": row["parent"], "at": row["at"]})
        if isinstance(shown, Recording) and (mine := self.runs.get(shown, "")):
            members.append({"run": mine, "name": shown.name, "parent": "", "at": 0})
        stops = [
            {"on": self.recipes[b.name], "enabled": b.enabled}
            for b in shown.breakpoints
            if isinstance(b, Breakpoint) and b.name in self.recipes
        ]
        watches = [w.expression for w in shown.watches]
        path = kept.family_path(self.home.folder)
        if len(members) < 2 and not stops and not watches and not path.exists():
            return
        with suppress(OSError):
            write_text(
                path,
                json.dumps(
                    {
                        "shown": self.runs.get(shown, kept.MAIN),
                        "members": members,
                        "breakpoints": stops,
                        "watches": watches,
                    }
                ),
            )

    def recall(self, shown: Shown, run: str, folder: Path) -> list[str]:
        """Undo a reload: names, branches (asleep), breakpoints and watches as they were written down in
        `folder`. `run`: the file of the shown branch.

        Returns a sentence for each that is left out.
        """
        told = kept.family(folder)
        dropped: list[str] = []
        for m in told.get("members", []):
            if m["run"] == run:
                shown.name = m["name"]
                if isinstance(shown, Session) and m["parent"]:
                    self.origin[shown] = m["parent"], m["at"]
                continue
            try:
                self.asleep.append(
                    Asleep(
                        m["name"], load(kept.branch_path(folder, m["run"])), m["parent"], m["at"], m["run"]
                    )
                )
            except (OSError, ValueError):
                dropped.append(f"Branch “{m['name']}” cannot be read and is missing.")
        for b in told.get("breakpoints", []):
            try:
                self.break_on(shown, **b["on"]).enabled = b["enabled"]
            except ValueError as e:
                dropped.append(f"A breakpoint was dropped: {e}.")
        for text in told.get("watches", []):
            try:
                shown.watches.append(checked_watch(text, shown.trace, shown.cursor))
            except ValueError as e:
                dropped.append(f"A watch was dropped: {e}.")
        return dropped

    def move(self, shown: Shown, home: Held) -> None:
        """Save all branches in another place from here on."""
        self.home = home
        for s in self.sessions(shown):
            self.runs[s] = home.new_branch() if s.parent is not None else kept.MAIN
            s.autosave(home.path(self.runs[s]))
        for a in self.asleep:
            a.run = home.new_branch()
            a.trace.save(home.path(a.run))
        self.remember(shown)


def checked_watch(expression: str, trace: Trace, at: Cursor) -> Watch:
    """A watch that has a value at the cursor within its budget. Raises WatchError."""
    watch = Watch(expression)
    watch.value(trace, at)
    return watch


def saved() -> list[dict[str, Any]]:
    """Saved runs of the command line, which a page may list where nobody but the user of this machine reaches
    it. Plain JSON: id, label.
    """
    out = []
    with suppress(OSError, ValueError):
        for path in runs.recent():
            if path.name.startswith("run-") and path.stat().st_size <= MOST_FILE_BYTES:
                out.append({"id": path.stem, "label": path.stem.removeprefix("run-")})
    return out


def trace_of(family: Family, shown: Shown, key: str, *, alone: bool) -> tuple[str, Trace]:
    """Name and trace of what the page picked: `branch:NAME`, or `file:ID` where the user of this machine is
    alone with it. Raises KeyError, TraceError.
    """
    kind, _, name = key.partition(":")
    if kind == "branch":
        if isinstance(shown, Recording) and name == shown.name:
            return name, shown.trace
        return name, family.find(shown, name).trace
    known = {f["id"]: f["label"] for f in saved()} if alone else {}
    if name not in known:
        raise KeyError(f"no saved run {name!r}")
    return known[name], load(runs.folder() / f"{name}.jsonl")
