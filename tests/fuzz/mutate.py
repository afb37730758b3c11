"""Hostile versions of good files and values: cut, flipped, doubled, reordered, nested deeply, with values
swapped for others. A draw follows from its seed alone.
"""

from __future__ import annotations

import copy
import gzip
import json
import math
import random
from typing import Any

DEEP = "@deep@"
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    7,
    255,
    4096,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**30,
    0.5,
    -0.0,
    1e308,
    1e-300,
    math.nan,
    math.inf,
    "",
    "x",
    "0",
    "-1",
    "r1",
    "x" * 3000,
    "half \ud83d",
    "\0",
    "\u2028",
    [],
    {},
    [[]],
    [1],
    [-1],
    ["x"],
    [None],
    {"a": 1},
    [1] * 300,
    DEEP,
)
"""What stands in place of a good value."""


def swapped(rng: random.Random, value: Any, times: int = 1) -> Any:
    """JSON data with values somewhere inside replaced, dropped or doubled."""
    value = copy.deepcopy(value)
    for _ in range(times):
        at = value
        while isinstance(at, (dict, list)) and at:
            key: Any = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
            inner = at[key]
            if isinstance(inner, (dict, list)) and inner and rng.random() < 0.8:
                at = inner
                continue
            how = rng.random()
            if how < 0.75:
                at[key] = copy.deepcopy(rng.choice(VALUES))
            elif how < 0.85 and isinstance(inner, (int, float)) and not isinstance(inner, bool):
                at[key] = inner + rng.choice((-1, 1, 1000))
            elif how < 0.95:
                del at[key]
            elif isinstance(at, list):
                at.append(copy.deepcopy(inner))
            break
    return value


def text_of(value: Any) -> bytes:
    """As JSON; DEEP becomes a list in lists, deeper than any parser goes."""
    return json.dumps(value).replace(json.dumps(DEEP), "[" * 60_000).encode()


def bytes_changed(rng: random.Random, raw: bytes, head: int = 0) -> bytes:
    """Bytes cut, flipped, doubled or dropped; `head`: rather among so many at the beginning."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if not data:
            break
        at = rng.randrange(min(len(data), head) if head and rng.random() < 0.8 else len(data))
        how = rng.randrange(6)
        if how == 0:
            del data[at:]
        elif how == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 2:
            data[at] = rng.choice((0, 0x7F, 0xFF, ord("["), ord("{"), ord('"'), ord("\n"), ord(",")))
        elif how == 3:
            del data[at : at + rng.randrange(1, 40)]
        elif how == 4:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
        else:
            data[at : at + 8] = rng.choice((b"\xff" * 8, b"\0" * 8, b"\xff" * 4, b"\0\0\0\0\0\0\0\x40"))
    return bytes(data)


def lines_changed(rng: random.Random, raw: bytes) -> bytes:
    """Lines doubled, dropped, exchanged or cut; or a value inside one of them swapped."""
    lines = raw.split(b"\n")
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not lines:
            break
        at = rng.randrange(len(lines))
        how = rng.randrange(8)
        if how == 0:
            lines.insert(at, lines[at])
        elif how == 1:
            del lines[at]
        elif how == 2:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif how == 3:
            lines[at] = bytes_changed(rng, lines[at])
        else:
            try:
                lines[at] = text_of(swapped(rng, json.loads(lines[at]), rng.choice((1, 1, 3))))
            except (ValueError, RecursionError):
                cells = lines[at].split(b",")
                cells[rng.randrange(len(cells))] = str(rng.choice(VALUES)).encode("utf-8", "replace")
                lines[at] = b",".join(cells)
    return b"\n".join(lines)


def file_changed(rng: random.Random, raw: bytes) -> bytes:
    """A file of lines, changed by line or by byte, sometimes packed, and the packed form sometimes changed as
    well.
    """
    out = lines_changed(rng, raw) if rng.random() < 0.75 else bytes_changed(rng, raw)
    if rng.random() < 0.15:
        out = gzip.compress(out, 1)
        if rng.random() < 0.7:
            out = bytes_changed(rng, out)
    return out
