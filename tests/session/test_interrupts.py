"""Ctrl-C at any line of anything that changes a session: state, trace and file still go together, and the run goes on as if nothing had been.

The interrupt is the real signal, raised while a line of cbviz begins, so that what holds interrupts back is tested and not passed by.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import cbviz as cb
from cbviz.core.check import check
from cbviz.messages import RequestSpec
from cbviz.runners.sim import SimRunner
from cbviz.session import Session
from cbviz.trace.accounting import check_trace
from cbviz.trace.trace import load
from tests.core.fuzz import LedgerRunner, same

HERE = str(Path(cb.__file__).parent)
SMALL = {"num_blocks": 25, "block_size": 4, "max_model_len": 80, "max_num_seqs": 4, "max_num_batched_tokens": 80}
SAMPLED = 25
"""Lines of an operation that are interrupted by default; all of them with `-m slow`."""


class Interrupt:
    """Counts the lines of cbviz that run inside it and raises SIGINT as line number `at` begins."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.lines, self.sent = at, 0, False

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(HERE) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.sent = True
                sys.settrace(None)
                frame.f_trace = None
                signal.raise_signal(signal.SIGINT)
        return self._line

    def run(self, f: Callable[[], Any]) -> bool:
        """True if KeyboardInterrupt came out of `f`."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            f()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def specs(num: int = 6) -> list[RequestSpec]:
    return [RequestSpec(f"r{i + 1}", tuple(100 + (i % 3) * 50 + j for j in range(9 + 5 * i)), 6 + 3 * i, arrival_step=1 + 2 * i) for i in range(num)]


def made(path: Path, **changes: Any) -> Session:
    """A session in the middle of its run, whose runner keeps what each KV slot holds and refuses a read of anything else."""
    fields = {**SMALL, **changes}
    probe = Session(specs(), runner="sim", **fields)
    s = Session(specs(), runner=LedgerRunner(probe.config), autosave=path, **fields)
    s.step(14)
    return s


def forked_session(path: Path) -> Session:
    """A branch that repeats its parent, to whose third step from there belong two inputs."""
    s = made(path.with_name("parent.jsonl"))
    s.add([1, 2, 3], max_tokens=5, request_id="late")
    s.configure(max_num_seqs=3)
    s.step(9)
    b = s.fork(at=13)
    b.autosave(path)
    s.close()
    return b


def consistent(s: Session, path: Path | None) -> None:
    """Engine, trace and file say the same."""
    check(s.engine.scheduler)
    same(s.trace.state(), s.engine.scheduler)
    assert s.engine.step_count == len(s.trace) and s.config == s.engine.config
    assert s.cursor.step <= len(s.trace)
    check_trace(s.trace)
    if path is not None:
        back = load(path)
        assert not back.header.notes
        assert [(r.step, r.events, r.t1_s) for r in back] == [(r.step, r.events, r.t1_s) for r in s.trace]
        t = Session.from_trace(back, runner=LedgerRunner(s.engine.config))
        assert t.digest() == s.digest()


def _resize(s: Session) -> None:
    s.fork(num_blocks=31).close()


OPERATIONS: dict[str, Callable[[Session], Any]] = {
    "step": lambda s: s.step(),
    "run": lambda s: s.run(max_steps=3),
    "run_to": lambda s: s.run_to(17),
    "run_back": lambda s: s.run_back(),
    "run_on": lambda s: s.run_on(),
    "add": lambda s: s.add([1, 2, 3], max_tokens=4),
    "abort": lambda s: s.abort("r3"),
    "configure": lambda s: s.configure(max_num_seqs=3, policy="sjf"),
    "seek": lambda s: s.seek(5),
    "rewind": lambda s: s.rewind(6),
    "rewind to the start": lambda s: s.rewind(0),
    "fork": lambda s: s.fork(at=6, policy="sjf"),
    "fork with another pool": _resize,
    "reset": lambda s: s.reset(),
    "autosave": lambda s: s.autosave(s.trace._file.path),  # type: ignore[union-attr]
    "drop": lambda s: s.fork().drop(),
    "rename": lambda s: s.rename("other"),
}


def interrupted(make: Callable[[Path], Session], do: Callable[[Session], Any], folder: Path, most: int) -> int:
    """Interrupts `do` at each line, or at `most` lines spread over it. Returns how many lines there are."""
    probe = Interrupt()
    s = make(folder / "probe.jsonl")
    probe.run(lambda: do(s))
    s.close()
    assert probe.lines > 0
    places = range(1, probe.lines + 1) if probe.lines <= most else sorted({1 + round(i * (probe.lines - 1) / (most - 1)) for i in range(most)})
    came = 0
    for at in places:
        path = folder / f"{at}.jsonl"
        s = make(path)
        told = Interrupt(at)
        came += told.run(lambda s=s: do(s))  # type: ignore[misc]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, f"line {at}: the handler was left behind"
        assert not s.turn.mine, f"line {at}: the turn was never given back"
        consistent(s, path)
        n = len(s.trace)
        if s.step() is not None:
            assert len(s.trace) == n + 1
        consistent(s, path)
        s.clear()
        s.run()
        assert s.done and all(r.finished for r in s.state().by_index)
        consistent(s, path)
        s.close()
    assert came or probe.lines < 5, "an interrupt that nobody notices"
    return probe.lines


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_any_line_leaves_a_session_whole(name: str, tmp_path: Path) -> None:
    def make(path: Path) -> Session:
        s = made(path)
        if name in ("run_back", "run_on"):
            s.break_on("finished")
            s.seek(3 if name == "run_on" else 12)
        return s

    lines = interrupted(make, OPERATIONS[name], tmp_path, SAMPLED)
    print(f"{name}: {lines} lines")


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_every_line_leaves_a_session_whole(name: str, tmp_path: Path) -> None:
    lines = interrupted(made, OPERATIONS[name], tmp_path, 2_000)
    print(f"{name}: {lines} lines")


def test_an_interrupted_branch_repeats_its_parent_all_the_same(tmp_path: Path) -> None:
    """What the user did in the parent is given again once, however often the step is tried."""
    whole = forked_session(tmp_path / "whole.jsonl")
    whole.run()
    s = forked_session(tmp_path / "probe.jsonl")
    probe = Interrupt()
    probe.run(lambda: s.step(3))
    for i in range(SAMPLED):
        at = 1 + i * (probe.lines - 1) // (SAMPLED - 1)
        path = tmp_path / f"{at}.jsonl"
        b = forked_session(path)
        Interrupt(at).run(lambda b=b: b.step(3))  # type: ignore[misc]
        b.run()
        assert [r.events for r in b.trace] == [r.events for r in whole.trace]
        consistent(b, path)


@pytest.mark.parametrize("name", ["save", "load"])
def test_an_interrupt_in_a_file_leaves_the_file_whole(name: str, tmp_path: Path) -> None:
    s = made(tmp_path / "run.jsonl")
    path = s.save(tmp_path / "saved.jsonl")
    old = len(s.trace)
    s.step(2)
    do: Callable[[], Any] = (lambda: s.save(path)) if name == "save" else lambda: load(path)
    probe = Interrupt()
    probe.run(do)
    for i in range(SAMPLED):
        Interrupt(1 + i * (probe.lines - 1) // (SAMPLED - 1)).run(do)
        assert len(load(path)) in (old, old + 2)
        assert not [x for x in tmp_path.iterdir() if x.suffix == ".part"]
        consistent(s, tmp_path / "run.jsonl")
        if len(load(path)) != old:
            s.trace.share(old).save(path)


class _Watchable(SimRunner):
    profile_next = False


def test_an_interrupted_look_inside_a_step_is_not_left_switched_on() -> None:
    """And a step that is looked into is one step, as any other."""
    from cbviz.cost import models

    def make() -> Session:
        s = Session(specs(), runner=_Watchable(models.get("smollm2")), **SMALL)
        s.step(5)
        return s

    s = make()
    probe = Interrupt()
    probe.run(s.profile_step)
    assert len(s.trace) == 6
    for i in range(SAMPLED):
        s = make()
        Interrupt(1 + i * (probe.lines - 1) // (SAMPLED - 1)).run(s.profile_step)
        assert s.runner.profile_next is False
        consistent(s, None)


def test_the_listeners_hear_of_a_change_that_was_made_though_it_was_interrupted(tmp_path: Path) -> None:
    s = made(tmp_path / "run.jsonl")
    heard: list[str] = []
    s.on_change(heard.append)
    add = s.engine.add
    s.engine.add = lambda spec: (signal.raise_signal(signal.SIGINT), add(spec))[1]  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        s.add([1, 2], max_tokens=2, request_id="new")
    assert heard == ["request"] and "new" in s.request_ids
