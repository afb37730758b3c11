"""The calibration is kept, found again, and given up when the machine is another. Speeds are only checked for being possible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbviz.cost import calibrate


def test_measured_kept_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "new"))
    assert calibrate.load() is None
    seen: list[float] = []
    spec = calibrate.measure(lambda share, text: seen.append(share))
    assert seen[0] == 0
    assert seen == sorted(seen)
    assert seen[-1] == 1
    assert spec.measured
    assert spec.kind == "cpu"
    assert 1e8 < spec.bandwidth_bytes_s < 1e13
    assert 1e8 < spec.flops_s < 1e15
    assert spec.source.startswith("measured ")
    assert calibrate.load() == spec
    assert [p.name for p in (tmp_path / "new").iterdir()] == [calibrate.FILE]


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"version": 1, "cpu": 3}'])
def test_an_unreadable_file_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path))
    (tmp_path / calibrate.FILE).write_text(text)
    assert calibrate.load() is None


@pytest.mark.parametrize(("field", "value"), [("cpu", "another"), ("threads", 10_000), ("version", 0)])
def test_another_machine_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: object) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path))
    device = {"name": "x", "memory_bytes": 1.0, "bandwidth_bytes_s": 1e9, "flops_s": 1e9, "kind": "cpu", "measured": True, "source": "s"}
    kept = {"version": calibrate.VERSION, "cpu": calibrate.cpu_name(), "threads": calibrate.num_threads(), "device": device}
    (tmp_path / calibrate.FILE).write_text(json.dumps(kept))
    assert calibrate.load() is not None
    (tmp_path / calibrate.FILE).write_text(json.dumps({**kept, field: value}))
    assert calibrate.load() is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(calibrate, "_LEAST_S", 0.0)
    assert calibrate.measure().bandwidth_bytes_s > 0
    assert calibrate.load() is None


def test_a_slower_pass_does_not_replace_a_quicker_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "_LEAST_S", 0.0)
    first = calibrate.measure()
    kept = json.loads((tmp_path / calibrate.FILE).read_text())
    kept["device"]["bandwidth_bytes_s"] = 1e15
    (tmp_path / calibrate.FILE).write_text(json.dumps(kept))
    second = calibrate.measure()
    assert second.bandwidth_bytes_s == 1e15
    assert second.flops_s >= first.flops_s
