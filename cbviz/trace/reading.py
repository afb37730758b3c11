"""What is asked of a trace file before it is believed: how much it unpacks to, what its header claims, that
each step fits those before it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cbviz import textfile
from cbviz.config import CONFIG_FIELDS, shown
from cbviz.events import Resized
from cbviz.messages import StepRecord
from cbviz.trace.schema import VERSION, TraceError, TraceHeader

MOST_BLOCKS = int(CONFIG_FIELDS["num_blocks"].metadata["max"])
MOST_BLOCK_SIZE = 1 << 20
CONTRADICTION = (
    "contradicts itself; was the file changed? If not, this is a fault of cbviz: --debug shows where"
)
CONTRADICTS = f"cannot be shown: what it says {CONTRADICTION}"
T = TypeVar("T")


def lines_of(path: Path) -> list[bytes]:
    """The lines of a trace file, plain or packed.

    Raises TraceError naming the file; a packed one may unpack to 1 GiB, or CBVIZ_MAX_UNPACKED_BYTES.
    """
    try:
        with textfile.open_bytes(path) as stream:
            return [raw.rstrip(b"\r\n") for _, raw in textfile.lines(stream, path)]
    except textfile.Unreadable as e:
        raise TraceError(f"cannot open {e}" if "cannot be read" in str(e) else str(e)) from None
    except MemoryError:
        raise TraceError(f"{path} is larger than the memory that is left") from None


def check_header(name: Path, header: TraceHeader) -> None:
    """Raises TraceError for a version or a size that no trace of ours has."""
    if header.version > VERSION:
        raise TraceError(
            f"{name} is of version {header.version}; this cbviz reads up to {VERSION}: upgrade cbviz"
        )
    if header.version < 1:
        raise TraceError(
            f"{name} is of version {header.version}, the least is 1: this is not a trace, or it was changed"
        )
    if not 0 <= header.num_blocks <= MOST_BLOCKS:
        raise TraceError(f"{name}: num_blocks is {header.num_blocks}, it must lie in 0..{MOST_BLOCKS}")
    if not 0 <= header.block_size <= MOST_BLOCK_SIZE:
        raise TraceError(f"{name}: block_size is {header.block_size}, it must lie in 0..{MOST_BLOCK_SIZE}")
    if not header.num_blocks and not header.block_size:
        return
    if not header.block_size:
        raise TraceError(f"{name}: block_size is 0, but the pool has {header.num_blocks} blocks")


def fold(append: Callable[[StepRecord], None], record: StepRecord, name: Path, number: int) -> None:
    """Appends the step of line `number`. Raises TraceError where it contradicts what came before."""
    for e in record.events:
        if isinstance(e, Resized) and not 2 <= e.num_blocks <= MOST_BLOCKS:
            raise TraceError(
                f"{name}, line {number}: num_blocks is {shown(e.num_blocks)}, it must lie in 2..{MOST_BLOCKS}"
            )
    believed(
        lambda: append(record),
        f"{name}, line {number}: step {record.step} does not fit what stands before it",
    )


def believed(make: Callable[[], T], complaint: str, *, passing: tuple[type[Exception], ...] = ()) -> T:
    """What `make` returns.

    Any error but `passing` means that the file contradicts itself: raises TraceError that begins with
    `complaint`.

    A trace can be wrong in more ways than can be listed: an unknown request, a block twice, a place beyond a
    list's end.
    """
    kept: tuple[type[Exception], ...] = (TraceError, BrokenPipeError, *passing)
    try:
        return make()
    except kept:
        raise
    except Exception as e:
        raise TraceError(f"{complaint} ({type(e).__name__}: {_first_line(e)})") from e


def _first_line(e: Exception) -> Any:
    return str(e).partition("\n")[0][:200]
