"""Files of runs: one that grows as the run goes, and one that is written whole.

Knows lines and steps, not what is in them.

Every state of the file is a trace that loads. A new file is written beside its place under a name of its own
and then renamed. A step is appended in one go, and what a failed write leaves is taken away again. A rewind
shortens the file where the step ends, which needs no room. Where the disk is full, the folder can't be
written or the limit is reached, writing stops, `problem` says so, and the run goes on.
"""

from __future__ import annotations

import gzip
import os
import secrets
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

from cbviz.config import whole_number
from cbviz.engine import interrupts
from cbviz.trace.schema import encode

if TYPE_CHECKING:
    from cbviz.messages import StepRecord
    from cbviz.trace.schema import TraceHeader
    from cbviz.trace.trace import Trace

DEFAULT_LIMIT_BYTES = 100_000_000
LIMIT_VARIABLE = "CBVIZ_AUTOSAVE_BYTES"
KEYFRAME_SHARE = 8
"""A keyframe is written once the steps since the last one take this many times its bytes: a run of a large
pool is mostly steps then.
"""


def default_limit() -> int:
    """The limit of an autosaved file in bytes: $CBVIZ_AUTOSAVE_BYTES, else 100 MB. 0: no limit."""
    named = whole_number(os.environ.get(LIMIT_VARIABLE, ""))
    return DEFAULT_LIMIT_BYTES if named is None else named


class replacing:
    """A file to write beside `target`; when the block ends it takes the place of `target`, or it vanishes if
    the block raised.

    The temporary name is its own, so two writers of one target don't meet. A class, because an interrupt may
    leave a generator half run.
    """

    _file: IO[bytes] | None = None  # also where an interrupt ends __init__ before its first line

    def __init__(self, target: Path) -> None:
        self.target = target
        self.part = target.with_name(f".{target.name[:60]}.{os.getpid()}-{secrets.token_hex(4)}.part")

    def __enter__(self) -> IO[bytes]:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with interrupts.held():
                self._file = self.part.open("xb")
            return self._file
        except BaseException:
            self._drop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        assert self._file is not None
        try:
            if kind is None:
                self._file.close()  # what is buffered may fail here
                with interrupts.held():
                    os.replace(self.part, self.target)
        finally:
            self._drop()

    def __del__(self) -> None:
        self._drop()  # an interrupt before the block began or as it ended

    def _drop(self) -> None:
        if self._file is None:
            return
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self.part.unlink(missing_ok=True)


def step_line(record: StepRecord) -> bytes:
    """The line of a step."""
    return b'{"type":"step",' + encode(record)[1:] + b"\n"


def header_line(trace: Trace) -> bytes:
    """The first line of a trace's file."""
    return encode(trace.header) + b"\n"


class Thinning:
    """Says which keyframes are worth their bytes in a file."""

    def __init__(self) -> None:
        self._since = 0

    def step(self, num_bytes: int) -> None:
        self._since += num_bytes

    def wants(self, num_bytes: int) -> bool:
        """Whether a keyframe of `num_bytes` is to be written now."""
        if num_bytes * KEYFRAME_SHARE > self._since:
            return False
        self._since = 0
        return True


def body(trace: Trace, thinning: Thinning, steps: int | None = None) -> Iterator[bytes]:
    """For each step its line, with the keyframe that follows it, if any. `steps`: only for so many."""
    for record in trace.records[:steps]:
        line = step_line(record)
        thinning.step(len(line))
        frame = trace.digests.get(record.step)
        if frame is not None:
            told = encode(frame) + b"\n"
            if thinning.wants(len(told)):
                line += told
        yield line


def write_whole(
    trace: Trace, out: IO[bytes] | gzip.GzipFile, header: TraceHeader | None = None, steps: int | None = None
) -> None:
    """Writes the header (`header`, if it is not the trace's own) and all steps (only `steps` of them)."""
    out.write(encode(header) + b"\n" if header is not None else header_line(trace))
    for lines in body(trace, Thinning(), steps):
        out.write(lines)


class Autosave:
    """The file that a run writes step by step.

    No method raises OSError: `problem` says why nothing is written any more, '' while all is well.
    """

    def __init__(self, path: str | Path, limit_bytes: int | None = None) -> None:
        self._file: IO[bytes] | None = None
        self.path = Path(path)
        self.limit_bytes = default_limit() if limit_bytes is None else limit_bytes
        """The most bytes of the file, 0 for no limit."""
        self.problem = ""
        self.reason = ""
        """The cause alone, in a few words: for a page, which has a sentence of its own."""
        self._header = b""
        self._ends: array[int] = array("Q")
        """For each step in the file, the offset where it ends, its keyframe included."""
        self._start = 0
        self._thinning = Thinning()

    @property
    def num_steps(self) -> int:
        """Steps that the file holds."""
        return len(self._ends)

    @property
    def num_bytes(self) -> int:
        return self._ends[-1] if self._ends else self._start

    def begin(self, trace: Trace) -> None:
        """Writes what there is, in place of whatever stands there; an older file stays whole until the new
        one is.
        """
        new = Autosave(self.path, self.limit_bytes)
        try:
            new._write_beside(trace)
        except OSError as e:
            new.reason = _cause(e)
            new.problem = (
                f"Autosave is off: {self.path} can't be written ({e.strerror or e}). The run goes on; save "
                "it under another name to keep it."
            )
        self._become(new)

    def _become(self, new: Autosave) -> None:
        with interrupts.held():
            self.close()
            self.__dict__.update(new.__dict__)
            new._file = None

    def _write_beside(self, trace: Trace) -> None:
        header = header_line(trace)
        with replacing(self.path) as out:
            out.write(header)
            end, ends = len(header), array("Q")
            for lines in body(trace, self._thinning):
                if self._too_long(end + len(lines)):
                    self._reached_limit(len(ends))
                    break
                out.write(lines)
                end += len(lines)
                ends.append(end)
            out.flush()
            # The open file is kept through the renaming, so that another writer of this name never shares it
            # with us.
            kept = os.dup(out.fileno()) if os.name != "nt" else -1
        try:
            self._file = open(kept, "wb", buffering=0) if kept >= 0 else open(self.path, "r+b", buffering=0)  # noqa: SIM115
        except BaseException:
            if kept >= 0:
                os.close(kept)
            raise
        self._header, self._start, self._ends = header, len(header), ends
        self._file.seek(end)

    def append(self, step: int, line: bytes) -> None:
        """Adds step `step`, if the file holds all steps before it."""
        if self.problem or self._file is None or step != self.num_steps + 1:
            return
        if self._too_long(self.num_bytes + len(line)):
            self._reached_limit(self.num_steps)
            return
        with interrupts.held():
            if self._write(line):
                self._thinning.step(len(line))
                self._ends.append(self.num_bytes + len(line))

    def keyframe(self, step: int, line: bytes) -> None:
        """Adds the keyframe of the last step, if it is worth its bytes."""
        if (
            self.problem
            or self._file is None
            or step != self.num_steps
            or self._too_long(self.num_bytes + len(line))
        ):
            return
        if not self._thinning.wants(len(line)):
            return
        with interrupts.held():
            if self._write(line):
                self._ends[-1] += len(line)

    def cut(self, step: int, trace: Trace) -> None:
        """Takes away what comes after step `step`; `trace` is what is left of the run."""
        if self._file is None:
            self.begin(trace)  # it could not be made before: perhaps it can now
            return
        if header_line(trace) != self._header:
            new = Autosave(self.path, self.limit_bytes)
            with suppress(OSError):  # no room to write it anew: shortened, it still holds the right steps
                new._write_beside(trace)
                self._become(new)
                return
        if step > self.num_steps:
            return  # the file ended before that step
        with interrupts.held():
            end = self._ends[step - 1] if step else self._start
            try:
                self._file.truncate(end)
                self._file.seek(end)
            except OSError as e:
                self._failed(e)
                return
            del self._ends[step:]
            self.problem = ""

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Writes no more."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _write(self, line: bytes) -> bool:
        """All of `line`, or none of it and False."""
        assert self._file is not None
        before, rest = self.num_bytes, memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as e:
            with suppress(OSError):
                self._file.truncate(before)
                self._file.seek(before)
            self._failed(e)
            return False
        return True

    def _too_long(self, num_bytes: int) -> bool:
        return 0 < self.limit_bytes < num_bytes

    def _reached_limit(self, steps: int) -> None:
        self.reason = f"it has reached its limit of {self.limit_bytes / 1e6:,.6g} MB"
        self.problem = (
            f"Autosave stopped after step {steps}: {self.path.name} has reached its limit of "
            f"{self.limit_bytes / 1e6:,.6g} MB. The run goes on. "
            f"Save the run to keep all of it, or set {LIMIT_VARIABLE} to more bytes (0: no limit)."
        )

    def _failed(self, e: OSError) -> None:
        self.reason = _cause(e)
        self.problem = (
            f"Autosave stopped after step {self.num_steps}: {self.path} can't be written "
            f"({e.strerror or e}). The run goes on, and the file keeps the steps "
            "before. Save the run under another name to keep all of it."
        )


def _cause(e: OSError) -> str:
    """The system's words for an error, as the middle of a sentence."""
    words = e.strerror or str(e) or "no file can be written"
    return words[0].lower() + words[1:]


def write_text(target: Path, text: str) -> None:
    """Puts a small text file in place, whole or not at all. Raises OSError."""
    with replacing(target) as out:
        out.write(text.encode("utf-8"))
