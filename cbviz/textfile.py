"""Files of text as people have them: plain, gzip or Zstandard, read as a stream, with limits.

Knows no format.

What a file is packed with is recognised by its first bytes, not by its name. A packed file may unpack to at
most `MOST_UNPACKED` bytes, or to what the environment variable CBVIZ_MAX_UNPACKED_BYTES says: a few megabytes
can hold gigabytes.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from cbviz.config import ConfigError, whole_number

MOST_UNPACKED = 1 << 30
"""Bytes that a packed file may unpack to."""
LIMIT_VARIABLE = "CBVIZ_MAX_UNPACKED_BYTES"
MOST_LINE_BYTES = 256 << 20
_MAGIC_GZIP, _MAGIC_ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_BOM_UTF8 = b"\xef\xbb\xbf"
_BOMS_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_MOST_ZSTD_WINDOW = 1 << 27
_BUFFER = 1 << 18


class Unreadable(ConfigError):
    """A file cannot be read as text. The message names the file and says what is wrong."""


def is_file(path: str | Path) -> bool:
    """Whether there is a regular file at `path`; False, too, for a name that no file can have."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def unpacked_limit() -> int:
    """Bytes that a packed file may unpack to.

    Raises ConfigError if CBVIZ_MAX_UNPACKED_BYTES is no whole number above 0.
    """
    text = os.environ.get(LIMIT_VARIABLE)
    if not text:
        return MOST_UNPACKED
    limit = whole_number(text)
    if not limit:
        raise ConfigError(f"{LIMIT_VARIABLE} is {text!r:.40}, it must be a whole number of bytes, 1 or more")
    return limit


def open_bytes(path: str | Path) -> io.BufferedReader:
    """The unpacked bytes of a file, as a stream. Opening and reading raise Unreadable."""
    path = Path(path)
    most = unpacked_limit()
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise Unreadable(f"{path}: cannot be read: it is not a regular file")
        raw = open_raw(path)
    except OSError as e:
        raise Unreadable(f"{path}: cannot be read: {e.strerror or e}") from None
    except ValueError as e:  # a name with a NUL in it
        raise Unreadable(f"{str(path)!r:.80}: cannot be read: {e}") from None
    try:
        head = raw.peek(4)[:4]
    except OSError as e:
        raw.close()
        raise Unreadable(f"{path}: cannot be read: {e.strerror or e}") from None
    if head.startswith(_MAGIC_GZIP):
        return io.BufferedReader(_Guarded(path, raw, gzip.GzipFile(fileobj=raw), "gzip", most), _BUFFER)
    if head == _MAGIC_ZSTD:
        import zstandard

        unpacker = zstandard.ZstdDecompressor(max_window_size=_MOST_ZSTD_WINDOW)
        return io.BufferedReader(
            _Guarded(path, raw, unpacker.stream_reader(raw, read_across_frames=True), "Zstandard", most),
            _BUFFER,
        )
    return io.BufferedReader(_Guarded(path, raw, raw), _BUFFER)


def open_raw(path: Path) -> io.BufferedReader:
    """The bytes on the disk. Tests put a file that counts in its place."""
    return path.open("rb")


class _Guarded(io.RawIOBase):
    """A stream whose errors name the file, and that ends in an error where a packed file unpacks to too much."""

    def __init__(self, path: Path, raw: IO[bytes], stream: Any, packing: str = "", most: int = 0) -> None:
        self._path = path
        self._raw = raw
        self._stream = stream
        self._packing = packing
        self._most = most
        self._done = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except (OSError, EOFError, zlib.error) as e:
            raise self._broken(e) from None
        except Exception as e:
            if not self._packing:
                raise
            raise self._broken(e) from None  # zstandard's own error, a plain Exception
        self._done += len(data)
        if self._packing and self._done > self._most:
            raise Unreadable(
                f"{self._path} unpacks to more than {self._most:,} bytes, the most that is read. If you "
                f"trust the file, set {LIMIT_VARIABLE} to a higher number"
            )
        buffer[: len(data)] = data
        return len(data)

    def _broken(self, e: Exception) -> Unreadable:
        if self._packing:
            return Unreadable(f"{self._path} is not a complete {self._packing} file: {e}")
        return Unreadable(f"{self._path}: cannot be read: {getattr(e, 'strerror', None) or e}")

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


def lines(
    stream: io.BufferedReader, path: str | Path, most: int = MOST_LINE_BYTES
) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes with their line end) of each line.

    Raises Unreadable for a line of more than `most` bytes.
    """
    number = 0
    while raw := stream.readline(most + 1):
        number += 1
        if len(raw) > most:
            raise Unreadable(f"{path}, line {number}: has more than {most:,} bytes, the most of one line")
        yield number, raw


def skip_bom(stream: io.BufferedReader, path: str | Path) -> None:
    """Steps over a UTF-8 byte order mark. Raises Unreadable for one of UTF-16."""
    head = stream.peek(4)[:4]
    if head.startswith(_BOMS_UTF16):
        raise Unreadable(f"{path}: not a text file in UTF-8: it begins as UTF-16 does; save it as UTF-8")
    if head.startswith(_BOM_UTF8):
        stream.read(3)


def text_of(raw: bytes, path: str | Path, number: int) -> str:
    """A line as text. Raises Unreadable naming the line if it is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise Unreadable(
            f"{path}, line {number}: not a text file in UTF-8: byte {raw[e.start]:#04x} at place "
            f"{e.start + 1}; save it as UTF-8"
        ) from None


def chunks(stream: io.BufferedReader, path: str | Path) -> Callable[[int], str]:
    """Return a reader: each call returns about `size` bytes of text, and '' at the end.

    It raises Unreadable where the bytes are not UTF-8.
    """
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0

    def more(size: int) -> str:
        nonlocal done
        while True:
            raw = stream.read(size)
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as e:
                raise Unreadable(
                    f"{path}: not a text file in UTF-8: byte {e.object[e.start]:#04x} at place "
                    f"{done + e.start + 1}; save it as UTF-8"
                ) from None
            done += len(raw)
            if text or not raw:
                return text

    return more


__all__ = [
    "LIMIT_VARIABLE",
    "MOST_LINE_BYTES",
    "MOST_UNPACKED",
    "Unreadable",
    "chunks",
    "is_file",
    "lines",
    "open_bytes",
    "skip_bom",
    "text_of",
    "unpacked_limit",
]
