"""A run as a list of step records, with the folds that views need.

Knows neither engine nor widgets; live and opened traces are the same thing.

Owns `Trace`, `Cursor`, saving and opening. Seeking costs at most 100 folds: a copy of the state is kept every
100 steps. Where the copies grow too large they stand further apart (`trace.keyframes`).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from threading import RLock, get_ident
from typing import NamedTuple

import msgspec

from cbviz.engine import interrupts
from cbviz.events import Resized
from cbviz.messages import RequestSpec, StepRecord
from cbviz.trace import reading
from cbviz.trace.autosave import Autosave, replacing, step_line, write_whole
from cbviz.trace.keyframes import MOST_KEYFRAME_BYTES, MOST_STATE_NUMBERS, Spacing
from cbviz.trace.schema import Keyframe, StepLine, TraceError, TraceHeader, decode_line, encode
from cbviz.trace.state import CODE, State


class Cursor(NamedTuple):
    """A moment of a trace: after `step` steps; with `event`, inside step `step`, after its first `event`
    events.

    >>> Cursor(12)
    Cursor(step=12, event=None)
    """

    step: int
    event: int | None = None


class Segment(NamedTuple):
    """From `step` on the request was `code` (index into `state.STATES`), until its next segment."""

    step: int
    code: int


class Trace:
    """Step records in order, from step 1.

    Iterates over them; `trace[n]` is the record at place n (step n + 1).
    """

    def __init__(self, header: TraceHeader | None = None) -> None:
        self.header = header or TraceHeader()
        self.records: list[StepRecord] = []
        self.digests: dict[int, Keyframe] = {}
        """Keyframes of the control plane by step, if the producer gave them."""
        self.specs: dict[str, RequestSpec] = {}
        self.resizes: list[tuple[int, int, int]] = []
        """Where the pool got another size: (step, event of the step, blocks from there on)."""
        self.segments: list[list[Segment]] = []
        """For each request, in order of arrival, what it was from which step on. Adjacent segments differ."""
        self._live = State(self.header.num_blocks, self.header.block_size, self.header.config)
        self.keyframes = True
        """Keep states to seek from, and ask for keyframes? False: this run is only run to its end."""
        self._frames: dict[int, State] = {0: self._live.clone()}
        self._frame_spacing, self._keyframe_spacing = (
            Spacing(MOST_STATE_NUMBERS),
            Spacing(MOST_KEYFRAME_BYTES),
        )
        self._cache: tuple[Cursor, State] | None = None
        self._file: Autosave | None = None
        self._lock = RLock()
        """Held while a step is folded in or a state is made, never for longer: the run may go on in one
        thread while others look. Interrupts wait meanwhile: a lock that one leaves behind stops every other
        thread for good.
        """
        self._lent: set[int] = set()
        """Threads that were given the state at the end."""

    # reading ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.records)

    def __getitem__(self, place: int) -> StepRecord:
        return self.records[place]

    def record(self, step: int) -> StepRecord:
        """The record of step `step` (the first is 1)."""
        if not 1 <= step <= len(self.records):
            raise IndexError(f"step {step} is not in this trace: it has steps 1..{len(self.records)}")
        return self.records[step - 1]

    def has(self, capability: str) -> bool:
        return capability in self.header.capabilities

    @property
    def last(self) -> Cursor:
        return Cursor(len(self.records))

    def state(self, cursor: Cursor | int | None = None) -> State:
        """The state at `cursor` (default: the end). Read only: it may be shared with other callers.

        The state at the end follows the run while the thread that asked for it makes the steps; a step of
        another thread leaves it as it was.
        """
        with interrupts.held(), self._lock:
            return self._state_at(cursor)

    def _state_at(self, cursor: Cursor | int | None) -> State:
        at = self.last if cursor is None else Cursor(cursor) if isinstance(cursor, int) else cursor
        if not 0 <= at.step <= len(self.records):
            raise IndexError(f"step {at.step} is not in this trace: it has steps 0..{len(self.records)}")
        if at.event is None and at.step == len(self.records):
            self._lent.add(get_ident())
            return self._live
        if self._cache is not None and self._cache[0] == at:
            return self._cache[1]
        base = at.step if at.event is None else at.step - 1
        state = self._base(base)
        for record in self.records[state.step : base]:
            state.apply(record)
        if at.event is not None:
            state.apply(self.record(at.step), upto=at.event)
        self._cache = (at, state)
        return state

    def _base(self, step: int) -> State:
        """A private copy of the nearest state at or before `step`."""
        nearest = self._frame_spacing.before(step)
        while nearest not in self._frames:
            nearest -= self._frame_spacing.every
        frame = self._frames[nearest]
        if (
            self._cache is not None
            and self._cache[0].event is None
            and frame.step < self._cache[0].step <= step
        ):
            frame = self._cache[1]
        return frame.clone()

    def num_blocks_at(self, cursor: Cursor) -> int:
        """Blocks of the pool at `cursor`, the null block included."""
        n = self.header.num_blocks
        for step, event, size in self.resizes:
            if step < cursor.step or (step == cursor.step and (cursor.event is None or event < cursor.event)):
                n = size
        return n

    def segments_until(self, index: int, step: int) -> list[Segment]:
        """The request's segments that began at or before `step`."""
        return [s for s in self.segments[index] if s.step <= step]

    # writing ------------------------------------------------------------------------------------------------

    def append(self, record: StepRecord) -> None:
        """Adds the next step and folds it. With `autosave` on, the line is on disk before this returns."""
        with interrupts.held(), self._lock:
            self._append(record)
        if self._file is not None:
            self._file.append(record.step, step_line(record))

    def _append(self, record: StepRecord) -> None:
        if record.step != len(self.records) + 1:
            raise TraceError(f"step {record.step} cannot follow step {len(self.records)}")
        if self._lent and self._lent != {get_ident()}:
            self._live = self._live.clone()  # another thread looks at the one there was
            self._lent.clear()
        live = self._live
        self.records.append(record)
        for spec in record.arrivals:
            self.specs.setdefault(spec.request_id, spec)  # an id that comes twice is refused the second time
        live.apply(record)
        self.resizes += [
            (record.step, i, e.num_blocks) for i, e in enumerate(record.events) if isinstance(e, Resized)
        ]
        for index in live.changed:
            self._note(index, record.step)
        live.changed.clear()
        if self.keyframes and self._frame_spacing.wants(record.step):
            self._frames[record.step] = live.clone()
            for step in self._frame_spacing.keep(record.step, live.size):
                del self._frames[step]

    def _note(self, index: int, step: int) -> None:
        while len(self.segments) <= index:
            self.segments.append([])
        r, mine = self._live.by_index[index], self.segments[index]
        if not mine or mine[-1].code != r.code:
            if mine and mine[-1].step == step:
                mine.pop()
            if not mine or mine[-1].code != r.code:
                mine.append(Segment(step, r.code))
        if r.finished and not r.seat_held:
            code = CODE[r.state]
            if r.code == code and mine[-1].step == step:
                return
            if mine[-1].code != code:
                mine.append(Segment(step + 1, code))
            r.code = code

    def wants_keyframe(self, step: int) -> bool:
        """Should the producer give a keyframe after this step?"""
        return self.keyframes and self._keyframe_spacing.wants(step)

    def add_keyframe(self, frame: Keyframe) -> None:
        """Keeps a keyframe; where all together grow too large, every second one is dropped."""
        self.digests[frame.step] = frame
        told = encode(frame)
        for step in self._keyframe_spacing.keep(frame.step, len(told)):
            self.digests.pop(step, None)
        if self._file is not None:
            self._file.keyframe(frame.step, told + b"\n")

    def truncate(self, step: int) -> None:
        """Forgets everything after `step` steps. A file that is written along is shortened too."""
        new = self.share(step)
        new._lock, new._file = self._lock, self._file
        with interrupts.held(), self._lock:
            self.__dict__.update(new.__dict__)
        if self._file is not None:
            self._file.cut(step, self)

    def share(self, step: int, header: TraceHeader | None = None) -> Trace:
        """A new trace that begins with this one's first `step` records (the records themselves are shared)."""
        if not 0 <= step <= len(self.records):
            raise IndexError(f"step {step} is not in this trace: it has steps 0..{len(self.records)}")
        new = Trace(header or self.header)
        for record in self.records[:step]:
            new._append(record)
        new.digests = {k: v for k, v in self.digests.items() if k <= step}
        return new

    # files --------------------------------------------------------------------------------------------------

    def autosave(self, path: str | Path, limit_bytes: int | None = None) -> None:
        """Writes what there is to `path` and each further step as it comes, so that a crash loses at most one
        step.

        `limit_bytes`: the most bytes of the file (None: $CBVIZ_AUTOSAVE_BYTES, else 100 MB; 0: no limit).
        Raises nothing where the file can't be written: `autosave_problem` says why, and the run goes on
        without.
        """
        self.close()
        file = Autosave(path, limit_bytes)
        file.begin(self)
        self._file = file

    @property
    def autosave_problem(self) -> str:
        """Why the steps are not written to the autosaved file any more; '' while they are, or if none was
        asked for.
        """
        return self._file.problem if self._file is not None else ""

    @property
    def autosave_stop(self) -> tuple[int, str] | None:
        """The last step in the autosaved file and why none follows; None while all are written."""
        if self._file is None or not self._file.problem:
            return None
        return self._file.num_steps, self._file.reason

    def hand_over(self, to: Trace) -> None:
        """Gives the autosaved file to `to`, which begins as this trace does and may be shorter."""
        file, self._file = self._file, None
        if file is not None:
            to._file = file
            file.cut(len(to), to)

    def close(self) -> None:
        """Ends autosaving."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def save(self, path: str | Path, header: TraceHeader | None = None, steps: int | None = None) -> Path:
        """Writes the trace as JSON lines, gzipped if the name ends in `.gz`.

        The file appears complete or not at all. Raises OSError.

        `header`: in place of the trace's own. `steps`: only so many.
        """
        target = Path(path)
        with replacing(target) as raw:
            if target.suffix == ".gz":
                with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as z:
                    write_whole(self, z, header, steps)
            else:
                write_whole(self, raw, header, steps)
        return target


def load(path: str | Path) -> Trace:
    """Opens a saved trace (`.jsonl`, `.jsonl.gz`).

    Where a crash or a full disk left a line that can't be read, or steps that are not there, the run is
    loaded up to that place, and a note in the header says what is left out.

    Raises TraceError naming the line for a file that is not a trace.
    """
    name = Path(path)
    lines = reading.lines_of(name)
    trace: Trace | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = decode_line(line)
        except msgspec.DecodeError as e:
            if trace is not None:
                _leave_out(trace, number, lines, "can't be read")
                break
            raise TraceError(f"{name}, line {number}: not a trace line ({e})") from None
        if isinstance(item, TraceHeader):
            reading.check_header(name, item)
            trace = Trace(item)
        elif trace is None:
            raise TraceError(f"{name}, line {number}: the first line must be the header")
        elif isinstance(item, Keyframe):
            trace.digests[item.step] = item
        elif item.step != len(trace) + 1:
            _leave_out(trace, number, lines, f"is step {item.step}, which cannot follow step {len(trace)}")
            break
        else:
            reading.fold(trace.append, _plain(item), name, number)
    if trace is None:
        raise TraceError(f"{name} is empty: no header line")
    return trace


def _leave_out(trace: Trace, number: int, lines: list[bytes], why: str) -> None:
    """Notes that the trace ends before line `number`, and how much comes after it."""
    after = sum(bool(x.strip()) for x in lines[number:])
    if not after and why == "can't be read":
        trace.header.notes.append(f"line {number} was cut short and left out: the run ended there")
        return
    more = f" and {after:,} more line{'s' * (after > 1)}" if after else ""
    trace.header.notes.append(
        f"line {number} {why}: the run is loaded up to step {len(trace)}; this line{more} are left out"
        if after
        else f"line {number} {why}: the run is loaded up to step {len(trace)}, and this line is left out"
    )


def _plain(line: StepLine) -> StepRecord:
    return StepRecord(**{f: getattr(line, f) for f in StepRecord.__struct_fields__})
