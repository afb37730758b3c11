"""Trace files that were changed or made to do harm: each ends in one sentence that names file, line and
limit.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cbviz as cb
from cbviz.trace.schema import TraceError
from tests.runs import run, specs


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    run(specs(3)).save(tmp_path / "good.jsonl")
    return [json.loads(x) for x in (tmp_path / "good.jsonl").read_text().splitlines()]


def written(tmp_path: Path, items: list[dict[str, Any]]) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(x) for x in items))
    return path


def header(**fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda items: items[0].update(fields)


def strange_chunk(items: list[dict[str, Any]]) -> None:
    items[3]["chunks"][0]["request_id"] = "nobody"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (header(version=-1), "is of version -1, the least is 1"),
        (header(version=0), "version 0"),
        (header(version=99), "upgrade cbviz"),
        (header(num_blocks=10**12), r"num_blocks is 1000000000000, it must lie in 0\.\.4000000"),
        (header(num_blocks=-4), "num_blocks is -4"),
        (header(num_blocks=10**30), r"num_blocks is 10+, it must lie in"),
        (header(block_size=0), "block_size is 0, but the pool has"),
        (strange_chunk, "line 4: step 3 does not fit what stands before it .*nobody"),
    ],
)
def test_a_changed_trace_is_named(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], None], says: str
) -> None:
    items = lines(tmp_path)
    change(items)
    with pytest.raises(TraceError, match=says):
        cb.load(written(tmp_path, items))


def test_a_pool_that_grows_beyond_the_limit_is_refused_before_it_is_made(tmp_path: Path) -> None:
    items = lines(tmp_path)
    kind = next(e for e in items[1]["events"])
    tag = next(k for k in kind if kind[k] == "Arrived" or kind[k] == "arrived")
    items[2]["events"].append(
        {
            tag: "Resized" if kind[tag][0].isupper() else "resized",
            "num_blocks": 10**12,
            "moved": [],
            "dropped": [],
        }
    )
    with pytest.raises(TraceError, match=r"line 3: num_blocks is 1000000000000, it must lie in 2\.\.4000000"):
        cb.load(written(tmp_path, items))


def test_a_packed_trace_unpacks_to_a_limit_that_can_be_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(specs(3)).save(tmp_path / "good.jsonl")
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress((tmp_path / "good.jsonl").read_bytes() + b" " * 2_000_000))
    monkeypatch.setenv("CBVIZ_MAX_UNPACKED_BYTES", "1000000")
    with pytest.raises(
        TraceError,
        match=r"t\.jsonl\.gz unpacks to more than 1,000,000 bytes.*set CBVIZ_MAX_UNPACKED_BYTES to a higher number",
    ):
        cb.load(path)
    monkeypatch.setenv("CBVIZ_MAX_UNPACKED_BYTES", "9000000")
    assert len(cb.load(path)) > 5


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[" * 100_000,
        gzip.compress(b"x" * 9000)[:60],
        b"\x1f\x8b" + bytes(range(200)),
        b"\x28\xb5\x2f\xfd" + bytes(90),
        b'"half \\ud83d"',
    ],
)
def test_what_is_no_trace_is_said(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "t").write_bytes(raw)
    with pytest.raises(TraceError, match=r"t( |,|:)"):
        cb.load(tmp_path / "t")
    for other in (tmp_path, tmp_path / "absent", Path("a\0b")):
        with pytest.raises(TraceError, match="cannot be read"):
            cb.load(other)
