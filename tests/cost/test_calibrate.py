"""The calibration is kept, found again, and given up when the machine is another.

Speeds are only checked for being possible.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbviz.cost import calibrate
from cbviz.specs import DeviceSpec


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
def test_an_unreadable_file_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path))
    (tmp_path / calibrate.FILE).write_text(text)
    assert calibrate.load() is None


@pytest.mark.parametrize(("field", "value"), [("cpu", "another"), ("threads", 10_000), ("version", 0)])
def test_another_machine_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: object
) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path))
    device = {
        "name": "x",
        "memory_bytes": 1.0,
        "bandwidth_bytes_s": 1e9,
        "flops_s": 1e9,
        "kind": "cpu",
        "measured": True,
        "source": "s",
    }
    kept = {
        "version": calibrate.VERSION,
        "cpu": calibrate.cpu_name(),
        "threads": calibrate.num_threads(),
        "device": device,
    }
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


def test_a_slower_pass_does_not_replace_a_quicker_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "_LEAST_S", 0.0)
    first = calibrate.measure()
    kept = json.loads((tmp_path / calibrate.FILE).read_text())
    kept["device"]["bandwidth_bytes_s"] = 1e15
    (tmp_path / calibrate.FILE).write_text(json.dumps(kept))
    second = calibrate.measure()
    assert second.bandwidth_bytes_s == 1e15
    assert second.flops_s >= first.flops_s


def test_a_fresh_measurement_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "_LEAST_S", 0.0)
    calibrate.measure()
    kept = json.loads((tmp_path / calibrate.FILE).read_text())
    kept["device"]["flops_s"] = 1e18
    (tmp_path / calibrate.FILE).write_text(json.dumps(kept))
    again = calibrate.measure()
    assert again.flops_s == 1e18
    assert "the best so far, now " in again.source
    fresh = calibrate.measure(fresh=True)
    assert fresh.flops_s < 1e18
    assert "best so far" not in fresh.source


def test_an_accelerator_is_kept_beside_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path))
    card = DeviceSpec("Card X 100", 1e11, 3e12, 9e14, measured=True, source="how")
    assert calibrate.load("Card X 100", 0) is None
    calibrate.keep(card, "Card X 100")
    assert calibrate.load() is None
    slower = calibrate.keep(
        DeviceSpec("Card X 100", 1e11, 2e12, 9.5e14, measured=True, source="how"), "Card X 100"
    )
    assert (slower.bandwidth_bytes_s, slower.flops_s) == (3e12, 9.5e14)
    assert slower.source.endswith("now 2,000.0 GB/s, 950,000 GFLOP/s")
    assert calibrate.load("Card X 100", 0) == slower
    assert calibrate.file_of("Card X 100").name == "calibration-card-x-100.json"


def test_the_array_is_far_larger_than_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_last_level_cache_bytes", lambda: 32 << 20)
    assert calibrate.array_bytes() == 512 << 20
    monkeypatch.setattr(calibrate, "_last_level_cache_bytes", lambda: 0)
    assert calibrate.array_bytes() == 256 << 20


def test_an_accelerators_peaks_by_torch_are_possible() -> None:
    import torch

    from cbviz.model import device_peaks

    told: list[float] = []
    d = device_peaks.measure(
        torch.device("cpu"), torch.float32, lambda share, text: told.append(share), num_bytes=1 << 22, side=64
    )
    assert 1e6 < d.bandwidth_bytes_s < 1e13
    assert 1e6 < d.flops_s < 1e15
    assert d.measured
    assert told[-1] == 1.0
