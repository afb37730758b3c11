"""A run as a list of step records, with the folds that views need. Knows neither engine nor widgets; live and opened traces are the same thing.

Owns `Trace`, `Cursor`, saving and opening. Seeking costs at most 100 folds: a copy of the state is kept every 100 steps. Where the
copies grow too large they stand further apart (`trace.keyframes`).
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from cbviz.events import Resized
from cbviz.messages import RequestSpec, StepRecord
from cbviz.trace import reading
from cbviz.trace.keyframes import MOST_KEYFRAME_BYTES, MOST_STATE_NUMBERS, Spacing
from cbviz.trace.schema import Keyframe, StepLine, TraceError, TraceHeader, decode_line, encode
from cbviz.trace.state import CODE, State


class Cursor(NamedTuple):
    """A moment of a trace: after `step` steps; with `event`, inside step `step`, after its first `event` events.

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
    """Step records in order, from step 1. Iterates over them; `trace[n]` is the record at place n (step n + 1)."""

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
        self._frame_spacing, self._keyframe_spacing = Spacing(MOST_STATE_NUMBERS), Spacing(MOST_KEYFRAME_BYTES)
        self._cache: tuple[Cursor, State] | None = None
        self._sink: IO[bytes] | None = None

    # reading ------------------------------------------------------------------------------------------------------------

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
        """The state at `cursor` (default: the end). Read only: it may be shared with other callers."""
        at = self.last if cursor is None else Cursor(cursor) if isinstance(cursor, int) else cursor
        if not 0 <= at.step <= len(self.records):
            raise IndexError(f"step {at.step} is not in this trace: it has steps 0..{len(self.records)}")
        if at.event is None and at.step == len(self.records):
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
        if self._cache is not None and self._cache[0].event is None and frame.step < self._cache[0].step <= step:
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

    # writing ------------------------------------------------------------------------------------------------------------

    def append(self, record: StepRecord) -> None:
        """Adds the next step and folds it. With `autosave` on, the line is on disk before this returns."""
        if record.step != len(self.records) + 1:
            raise TraceError(f"step {record.step} cannot follow step {len(self.records)}")
        live = self._live
        self.records.append(record)
        for spec in record.arrivals:
            self.specs.setdefault(spec.request_id, spec)  # an id that comes twice is refused the second time
        live.apply(record)
        self.resizes += [(record.step, i, e.num_blocks) for i, e in enumerate(record.events) if isinstance(e, Resized)]
        for index in live.changed:
            self._note(index, record.step)
        live.changed.clear()
        if self.keyframes and self._frame_spacing.wants(record.step):
            self._frames[record.step] = live.clone()
            for step in self._frame_spacing.keep(record.step, live.size):
                del self._frames[step]
        if self._sink is not None:
            self._sink.write(_line(record))
            self._sink.flush()

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
        for step in self._keyframe_spacing.keep(frame.step, len(encode(frame))):
            self.digests.pop(step, None)
        if self._sink is not None:
            self._sink.write(encode(frame) + b"\n")
            self._sink.flush()

    def truncate(self, step: int) -> None:
        """Forgets everything after `step` steps (a rewind that goes on differently)."""
        if not 0 <= step <= len(self.records):
            raise IndexError(f"step {step} is not in this trace: it has steps 0..{len(self.records)}")
        self._rebuild(self.records[:step], {k: v for k, v in self.digests.items() if k <= step})

    def share(self, step: int, header: TraceHeader | None = None) -> Trace:
        """A new trace that begins with this one's first `step` records (the records themselves are shared)."""
        new = Trace(header or self.header)
        new._rebuild(self.records[:step], {k: v for k, v in self.digests.items() if k <= step})
        return new

    def _rebuild(self, records: list[StepRecord], digests: dict[int, Keyframe]) -> None:
        sink, self._sink = self._sink, None
        self.__init__(self.header)  # type: ignore[misc]
        for record in records:
            self.append(record)
        self.digests = dict(digests)
        self._sink = sink
        if sink is not None:
            sink.seek(0)
            sink.truncate()
            self._write(sink)
            sink.flush()

    def autosave(self, path: str | Path) -> None:
        """Writes what there is to `path` and each further step as it comes, so that a crash loses at most one step."""
        self.close()
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        sink = target.open("wb")
        self._write(sink)
        sink.flush()
        self._sink = sink

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    def save(self, path: str | Path) -> Path:
        """Writes the whole trace as JSON lines, gzipped if the name ends in `.gz`. The file appears complete or not at all."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        with part.open("wb") as raw:
            if target.suffix == ".gz":
                with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as z:
                    self._write(z)
            else:
                self._write(raw)
        os.replace(part, target)
        return target

    def _write(self, out: IO[bytes] | gzip.GzipFile) -> None:
        out.write(encode(self.header) + b"\n")
        for record in self.records:
            out.write(_line(record))
            if record.step in self.digests:
                out.write(encode(self.digests[record.step]) + b"\n")


def _line(record: StepRecord) -> bytes:
    body = encode(record)
    return b'{"type":"step",' + body[1:] + b"\n"


def load(path: str | Path) -> Trace:
    """Opens a saved trace (`.jsonl`, `.jsonl.gz`). A last line cut short by a crash is left out and noted in the header.

    Raises TraceError naming the line for anything else that is not a trace.
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
            if trace is not None and number == len(lines):
                trace.header.notes.append(f"line {number} was cut short and left out: the run ended there")
                break
            raise TraceError(f"{name}, line {number}: not a trace line ({e})") from None
        if isinstance(item, TraceHeader):
            reading.check_header(name, item)
            trace = Trace(item)
        elif trace is None:
            raise TraceError(f"{name}, line {number}: the first line must be the header")
        elif isinstance(item, Keyframe):
            trace.digests[item.step] = item
        else:
            reading.fold(trace.append, _plain(item), name, number)
    if trace is None:
        raise TraceError(f"{name} is empty: no header line")
    return trace


def _plain(line: StepLine) -> StepRecord:
    return StepRecord(**{f: getattr(line, f) for f in StepRecord.__struct_fields__})
