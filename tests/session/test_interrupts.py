"""Ctrl-C at any line of anything that changes a session: state, trace and file still go together, and the run
goes on as if nothing had been.

The interrupt is the real signal, raised while a line of cbviz begins, so that what holds interrupts back is
tested and not passed by.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import cbviz as cb
from cbviz.core.check import check
from cbviz.core.policy import POLICIES
from cbviz.core.ranking import Policy
from cbviz.cost import calibrate
from cbviz.engine import interrupts
from cbviz.messages import RequestSpec
from cbviz.runners.sim import SimRunner
from cbviz.session import Session
from cbviz.specs import DeviceSpec
from cbviz.trace.accounting import check_trace
from cbviz.trace.trace import load
from tests.core.fuzz import LedgerRunner, same

HERE = str(Path(cb.__file__).parent)
SMALL = {
    "num_blocks": 25,
    "block_size": 4,
    "max_model_len": 80,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 80,
}
SAMPLED = 25
"""Lines of an operation that are interrupted by default; all of them with `-m slow`."""
PARTS = 3
"""The lines of an operation are dealt out to that many slow tests."""


class Interrupt:
    """Counts the lines of cbviz that run inside it and raises SIGINT `times` times as line number `at`
    begins.
    """

    def __init__(self, at: int | None = None, times: int = 1) -> None:
        self.at, self.times, self.lines, self.sent = at, times, 0, False

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(HERE) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.sent = True
                sys.settrace(None)
                frame.f_trace = None
                for _ in range(self.times):
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
    return [
        RequestSpec(
            f"r{i + 1}",
            tuple(100 + (i % 3) * 50 + j for j in range(9 + 5 * i)),
            6 + 3 * i,
            arrival_step=1 + 2 * i,
        )
        for i in range(num)
    ]


def made(path: Path, **changes: Any) -> Session:
    """A session in the middle of its run, whose runner keeps what each KV slot holds and refuses a read of
    anything else.
    """
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
    same(s.trace.state(), s.engine.scheduler.state)
    assert s.engine.step_count == len(s.trace) and s.config == s.engine.config
    assert s.cursor.step <= len(s.trace)
    check_trace(s.trace)
    if path is not None:
        back = load(path)
        assert not back.header.notes
        assert [(r.step, r.events, r.t1_s) for r in back] == [(r.step, r.events, r.t1_s) for r in s.trace]
        t = Session.from_trace(back, runner=type(s.runner)(s.engine.config))  # type: ignore[call-arg]
        assert t.digest() == s.digest()


def _resize(s: Session) -> None:
    s.fork(num_blocks=31).close()


def _saved_beside(s: Session) -> Path:
    return s.save(s.trace._file.path.with_name("saved.jsonl.gz"))  # type: ignore[union-attr]


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
    "save": _saved_beside,
    "load": lambda s: load(s.trace._file.path),  # type: ignore[union-attr]
}


def spread(lines: int) -> list[int]:
    """Some of an operation's lines, the first and the last among them."""
    return sorted({1 + round(i * (lines - 1) / (SAMPLED - 1)) for i in range(SAMPLED)})


def interrupted(
    make: Callable[[Path], Session],
    do: Callable[[Session], Any],
    folder: Path,
    which: Callable[[int], Iterable[int]] = spread,
    times: int = 1,
) -> int:
    """Interrupts `do` at the lines that `which` picks, given their number; `times` times at each.

    Returns how many lines there are.
    """
    probe = Interrupt()
    s = make(folder / "probe.jsonl")
    probe.run(lambda: do(s))
    s.close()
    assert probe.lines > 0
    came = 0
    for at in which(probe.lines):
        path = folder / f"{at}.jsonl"
        s = make(path)
        told = Interrupt(at, times)
        came += told.run(lambda s=s: do(s))  # type: ignore[misc]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, (
            f"line {at}: the handler was left behind"
        )
        assert not s.turn.mine, f"line {at}: the turn was never given back"
        assert not s.trace._lock._is_owned(), f"line {at}: the trace was left locked for every other thread"  # type: ignore[attr-defined]
        assert not list(folder.glob("*.part")), f"line {at}: half a file was left"
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
        path.unlink()
    assert came or probe.lines < 5, "an interrupt that nobody notices"
    return probe.lines


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_any_line_leaves_a_session_whole(name: str, tmp_path: Path) -> None:
    lines = interrupted(maker(name), OPERATIONS[name], tmp_path)
    print(f"{name}: {lines} lines")


def maker(name: str) -> Callable[[Path], Session]:
    def make(path: Path) -> Session:
        s = made(path)
        if name in ("run_back", "run_on"):
            s.break_on("finished")
            s.seek(3 if name == "run_on" else 12)
        return s

    return make


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_every_line_leaves_a_session_whole(name: str, part: int, tmp_path: Path) -> None:
    lines = interrupted(maker(name), OPERATIONS[name], tmp_path, lambda n: range(1 + part, n + 1, PARTS))
    print(f"{name}: {lines} lines")


@pytest.fixture
def as_if_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second interrupt is judged by the line at which it came, not by the tracer that raises it there."""
    real = interrupts.users_code_runs

    def judge(frame: FrameType | None) -> bool:
        assert frame is not None
        return real(frame.f_back if frame.f_code is Interrupt._line.__code__ else frame)

    monkeypatch.setattr(interrupts, "users_code_runs", judge)


@pytest.mark.usefixtures("as_if_not_traced")
@pytest.mark.parametrize("name", OPERATIONS)
def test_whoever_presses_twice_at_any_line_cuts_no_change_in_half(name: str, tmp_path: Path) -> None:
    interrupted(maker(name), OPERATIONS[name], tmp_path, lambda n: spread(n)[1::2], times=2)


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.usefixtures("as_if_not_traced")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", ["step", "add", "configure", "rewind", "fork", "reset", "autosave", "save"])
def test_whoever_presses_twice_at_every_line_cuts_no_change_in_half(
    name: str, part: int, tmp_path: Path
) -> None:
    interrupted(maker(name), OPERATIONS[name], tmp_path, lambda n: range(1 + part, n + 1, PARTS), times=2)


class Hangs(Policy):
    """Never comes back from its n-th question, unless it is interrupted twice."""

    name = "hangs"
    static = False
    asked, hangs_at = 0, 0

    def rank(self, r: Any, now: float) -> Any:
        Hangs.asked += 1
        if Hangs.asked == Hangs.hangs_at:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("it goes on for ever")
        return r.request_id


@pytest.fixture
def hangs() -> Iterator[None]:
    POLICIES["hangs"] = Hangs()
    Hangs.asked = Hangs.hangs_at = 0
    yield
    del POLICIES["hangs"]


@pytest.mark.usefixtures("hangs")
def test_two_interrupts_end_a_policy_that_never_returns_and_the_step_is_undone(tmp_path: Path) -> None:
    """Given a policy that hangs at any of its questions, when the user presses twice, then the step was not
    made, and another policy makes it.
    """
    for n in range(1, 12):
        s = Session(
            specs(),
            runner=LedgerRunner(made(tmp_path / "probe.jsonl").config),
            autosave=tmp_path / f"{n}.jsonl",
            policy="hangs",
            **SMALL,
        )
        Hangs.asked, Hangs.hangs_at = 0, n
        with pytest.raises(KeyboardInterrupt):
            s.run()
        consistent(s, tmp_path / f"{n}.jsonl")
        assert not s.turn.mine
        s.configure(policy="fcfs")
        s.run()
        assert s.done and all(r.finished for r in s.state().by_index)
        consistent(s, tmp_path / f"{n}.jsonl")


ALL_LINES = pytest.param(
    lambda n: range(1, n + 1), marks=[pytest.mark.slow, pytest.mark.deep], id="all lines"
)


class Measured(LedgerRunner):
    """Its time is measured, and its peaks can be."""

    simulated = False
    peaks_name = "a card of this test"
    best = 1e9

    def measure_peaks(self, progress: Any = None) -> DeviceSpec:
        Measured.best += 1e6
        return DeviceSpec(
            name=self.peaks_name,
            memory_bytes=1e9,
            bandwidth_bytes_s=Measured.best,
            flops_s=10 * Measured.best,
            measured=True,
        )


@pytest.mark.parametrize("which", [pytest.param(spread, id="some lines"), ALL_LINES])
def test_an_interrupted_calibration_leaves_one_set_of_peaks(
    which: Callable[[int], Iterable[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a run under the measured clock, when a new measurement is interrupted, then header, prices and
    file of the peaks are of one measurement, the old one or the new.
    """
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "cache"))
    config = made(tmp_path / "probe.jsonl").config

    def make(path: Path) -> Session:
        s = Session(specs(), runner=Measured(config), autosave=path, clock="measured", **SMALL)
        s.step(5)
        return s

    probe = Interrupt()
    s = make(tmp_path / "run.jsonl")
    probe.run(s.calibrate)
    for at in which(probe.lines):
        path = tmp_path / f"{at}.jsonl"
        s = make(path)
        Interrupt(at).run(s.calibrate)
        h = s.trace.header
        assert (h.peak_bytes_s, h.peak_flops_s) == (s._device.bandwidth_bytes_s, s._device.flops_s)
        assert s.engine.cost.device == s._device  # type: ignore[attr-defined]
        kept = calibrate.load(Measured.peaks_name, 0)
        assert kept is not None and kept.bandwidth_bytes_s >= h.peak_bytes_s
        consistent(s, path)
        s.step()
        consistent(s, path)
        s.calibrate()
        assert s.trace.header.peak_bytes_s == Measured.best


def test_an_interrupted_branch_repeats_its_parent_all_the_same(tmp_path: Path) -> None:
    """What the user did in the parent is given again once, however often the step is tried."""
    whole = forked_session(tmp_path / "whole.jsonl")
    whole.run()
    s = forked_session(tmp_path / "probe.jsonl")
    probe = Interrupt()
    probe.run(lambda: s.step(3))
    for at in spread(probe.lines):
        path = tmp_path / f"{at}.jsonl"
        b = forked_session(path)
        Interrupt(at).run(lambda b=b: b.step(3))  # type: ignore[misc]
        b.run()
        assert [r.events for r in b.trace] == [r.events for r in whole.trace]
        consistent(b, path)


@pytest.mark.parametrize("which", [pytest.param(spread, id="some lines"), ALL_LINES])
@pytest.mark.parametrize("name", ["save", "load"])
def test_an_interrupt_in_a_file_leaves_the_file_whole(
    name: str, which: Callable[[int], Iterable[int]], tmp_path: Path
) -> None:
    s = made(tmp_path / "run.jsonl")
    path = s.save(tmp_path / "saved.jsonl")
    old = len(s.trace)
    s.step(2)
    do: Callable[[], Any] = (lambda: s.save(path)) if name == "save" else lambda: load(path)
    probe = Interrupt()
    probe.run(do)
    for at in which(probe.lines):
        Interrupt(at).run(do)
        assert len(load(path)) in (old, old + 2)
        assert not [x for x in tmp_path.iterdir() if x.suffix == ".part"]
        consistent(s, tmp_path / "run.jsonl")
        if len(load(path)) != old:
            s.trace.share(old).save(path)


class _Watchable(SimRunner):
    profile_next = False


@pytest.mark.parametrize("which", [pytest.param(spread, id="some lines"), ALL_LINES])
def test_an_interrupted_look_inside_a_step_is_not_left_switched_on(
    which: Callable[[int], Iterable[int]],
) -> None:
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
    for at in which(probe.lines):
        s = make()
        Interrupt(at).run(s.profile_step)
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
