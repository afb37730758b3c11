"""Reads a GGUF file: its metadata, and its tensors one by one as float32.

Owns the container format (version 3 and 2, little-endian; the format's own specification is the source). What
the block formats mean is the `gguf` package's business: its `dequantize` does the arithmetic. Its reader is
not used: it takes 2 s and a lot of memory for a vocabulary of 49,152 entries, 20 times what this does.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from cbviz.config import shown
from cbviz.model.hub import ModelError

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
MOST_NESTED = 4
"""Depth of lists in lists in the metadata."""
MOST_DIMENSIONS = 8
MOST_ALIGNMENT = 1 << 20


@dataclass(frozen=True, slots=True)
class _Info:
    shape: tuple[int, ...]
    """Outermost first, as numpy has it; the file has it the other way round."""
    kind: int
    offset: int


class GgufFile:
    """An open GGUF file.

    `metadata`: key to value (numbers, text, lists). Use as a context manager. Raises ModelError if the file
    is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as f:
                self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as e:  # a folder; an empty file
            raise ModelError(f"{path} is damaged or not a GGUF file: {e}") from None
        self._at = 0
        try:
            self.metadata, self._infos = self._read_header()
        except (struct.error, ValueError, KeyError, IndexError, OverflowError, MemoryError) as e:
            self._map.close()
            raise ModelError(f"{path} is damaged or not a GGUF file: {e or type(e).__name__}") from e

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._map.close()

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def shape(self, name: str) -> tuple[int, ...]:
        return self._infos[name].shape

    def tensor(self, name: str) -> np.ndarray:
        """A float32 copy of one tensor, outermost dimension first.

        Raises ModelError if it is absent, cut short or of an unknown format.
        """
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        if name not in self._infos:
            raise ModelError(f"{self.path} has no tensor {name!r}")
        info = self._infos[name]
        try:
            kind = GGMLQuantizationType(info.kind)
            per_block, block_bytes = GGML_QUANT_SIZES[kind]
            *outer, last = info.shape
            row_bytes = last // per_block * block_bytes
            size = row_bytes * math.prod(outer)
            if last % per_block:
                raise ValueError(f"rows of {last} numbers are no whole blocks of {per_block}")
            if info.offset + size > len(self._map):
                raise ModelError(
                    f"{self.path} is cut short: tensor {name!r} ends after the file does. Fetch it again."
                )
            raw = self._map[info.offset : info.offset + size]  # a copy: no view may outlive the map
            if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
                data = np.frombuffer(
                    raw, dtype=np.float32 if kind == GGMLQuantizationType.F32 else np.float16
                )
            else:
                data = dequantize(np.frombuffer(raw, dtype=np.uint8).reshape(*outer, row_bytes), kind)
        except (ValueError, KeyError, NotImplementedError, OverflowError, MemoryError) as e:
            raise ModelError(
                f"{self.path}: tensor {name!r} has format {info.kind}, which cannot be read: {e}"
            ) from e
        return np.asarray(data, dtype=np.float32).reshape(info.shape)

    def _scalar(self, form: str) -> Any:
        value = struct.unpack_from(form, self._map, self._at)[0]
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        n = self._scalar("<Q")
        self._ask(n)
        self._at += n
        return self._map[self._at - n : self._at].decode("utf-8")

    def _ask(self, num_bytes: int) -> None:
        """Raises IndexError if the file does not hold so many more bytes: before anything of that size is
        made.
        """
        if num_bytes > len(self._map) - self._at:
            raise IndexError(
                f"{num_bytes:,} bytes are announced at place {self._at:,}, {len(self._map) - self._at:,} "
                "are there"
            )

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            if depth >= MOST_NESTED:
                raise IndexError(f"lists are nested more than {MOST_NESTED} deep")
            inner, n = self._scalar("<I"), self._scalar("<Q")
            if inner in _SCALARS:
                self._ask(n * struct.calcsize(_SCALARS[inner]))
                form = f"<{n}{_SCALARS[inner][1]}"
                values = list(struct.unpack_from(form, self._map, self._at))
                self._at += struct.calcsize(form)
                return values
            if inner not in (_STRING, _ARRAY):
                raise IndexError(f"a list of kind {inner} is unknown")
            self._ask(8 * n)
            return [self._value(inner, depth + 1) for _ in range(n)]
        if kind not in _SCALARS:
            raise IndexError(f"a value of kind {kind} is unknown")
        return self._scalar(_SCALARS[kind])

    def _read_header(self) -> tuple[dict[str, Any], dict[str, _Info]]:
        magic, version = self._map[:4], struct.unpack_from("<I", self._map, 4)[0]
        if magic != b"GGUF" or version not in (2, 3):
            raise IndexError(f"magic {magic!r}, version {version}; versions 2 and 3 are read, little-endian")
        self._at = 8
        num_tensors, num_keys = self._scalar("<Q"), self._scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("<I"))
        infos: dict[str, _Info] = {}
        for _ in range(num_tensors):
            name = self._string()
            dimensions = self._scalar("<I")
            if dimensions > MOST_DIMENSIONS:
                raise IndexError(f"a tensor of {dimensions} dimensions, the most is {MOST_DIMENSIONS}")
            shape = tuple(self._scalar("<Q") for _ in range(dimensions))
            infos[name] = _Info(shape[::-1], self._scalar("<I"), self._scalar("<Q"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= MOST_ALIGNMENT:
            raise IndexError(f"general.alignment is {shown(alignment)}, it must lie in 1..{MOST_ALIGNMENT}")
        start = -(-self._at // alignment) * alignment
        return metadata, {name: _Info(i.shape, i.kind, start + i.offset) for name, i in infos.items()}
