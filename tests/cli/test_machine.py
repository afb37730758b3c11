"""`conform`, `doctor`, `calibrate` and `model`."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbviz import doctor
from cbviz.config import ConfigError
from cbviz.cost import devices, models
from cbviz.cost.plan import plan, weight_bytes
from cbviz.model import hub
from tests.cli.conftest import Call


@pytest.fixture
def recordings(conformance: Path, tmp_path: Path) -> Path:
    """Three scenarios, the last one falsified in one place."""
    folder = tmp_path / "recordings"
    folder.mkdir()
    files = sorted((conformance / "vllm-0.32").glob("*.json.gz"))[:3]
    for f in files[:2]:
        shutil.copy(f, folder)
    d = json.loads(gzip.decompress(files[2].read_bytes()))
    d["steps"][3]["free_blocks"] += 1
    (folder / "wrong.json").write_text(json.dumps(d))
    return folder


def test_conform(cbviz: Call, recordings: Path) -> None:
    r = cbviz("conform", recordings)
    assert r.code == 1
    lines = r.out.splitlines()
    assert lines[0] == "wrong: step 3, free_blocks"
    ours, theirs = (int(line.split()[1]) for line in lines[1:3])
    assert theirs == ours + 1
    assert lines[3].startswith("2 of 3 scenarios equal")
    d = cbviz("conform", recordings, "--json").json
    assert (d["equal"], d["total"], d["skipped"]) == (2, 3, [])
    assert [s["key"] for s in d["scenarios"] if not s["equal"]] == ["free_blocks"]
    (recordings / "wrong.json").unlink()
    assert cbviz("conform", recordings).code == 0
    assert cbviz("conform", *sorted(recordings.iterdir())).out.startswith("2 of 2 scenarios equal")


def test_an_empty_folder_conforms_to_nothing(cbviz: Call, tmp_path: Path) -> None:
    r = cbviz("conform", tmp_path)
    assert r.code == 2
    assert "no recording in" in r.err


def test_plan_by_hand(cbviz: Call) -> None:
    d = cbviz("model", "plan", "llama-3-8b", "h100", "--context", "4096", "--json").json
    assert d["source"] == "modelled"
    assert d["kv_bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    spec = models.get("llama-3-8b")
    room = 0.9 * 80 * 2**30 - 2 * spec.params
    assert d["weight_bytes"] == 2 * spec.params
    assert d["num_blocks"] == int(room // (16 * 131072))
    assert d["max_concurrency"] == (d["num_blocks"] - 1) // 256
    assert d["fits"] is True
    words = cbviz("model", "plan", "llama-3-8b", "h100", "--context", "4096").out
    assert "modelled from the tables, not measured" in words
    assert f"{d['num_blocks']:,}" in words


def test_plan_says_what_does_not_fit(cbviz: Call) -> None:
    r = cbviz("model", "plan", "llama-3-70b", "h100")
    assert r.code == 0
    assert "the weights alone do not fit" in r.out
    assert (
        "not one request of 8,192 tokens fits"
        in cbviz("model", "plan", "llama-3-8b", "t4", "--context", "8192", "--utilisation", "0.95").out
    )
    with pytest.raises(ConfigError, match="block_size is 0"):
        plan(models.get("llama-3-8b"), devices.get("h100"), block_size=0)


def test_experts_and_windows_are_planned_as_they_are_held() -> None:
    oss = models.get("gpt-oss-20b")
    assert 0.5 < weight_bytes(oss) / oss.params < 0.8  # nearly all are experts of 0.53 bytes
    dense = models.get("llama-3-8b")
    assert weight_bytes(dense) == 2 * dense.params
    gemma, device = models.get("gemma-3-27b"), devices.get("h200")
    full = plan(gemma, device, context=32768)
    all_layers = 32768 * full.kv_bytes_per_token
    # 10 of 62 layers keep everything, the others a window of 1,024 tokens: 65 blocks of 16 at most.
    assert full.kv_bytes_per_request == pytest.approx(all_layers * (10 + 52 * 65 * 16 / 32768) / 62)


def test_models(cbviz: Call, cache: Path) -> None:
    r = cbviz("model", "list")
    assert "smollm2" in r.out
    assert "cbviz model pull smollm2" in r.out
    assert cbviz("model", "list", "--json").json["models"][0]["path"] is None


def test_calibrate(cbviz: Call, cache: Path) -> None:
    d = cbviz("calibrate", "--json").json
    assert d["measured"] is True
    assert d["bandwidth_bytes_s"] > 1e8
    assert Path(d["file"]).exists()
    assert cbviz("calibrate", "--device", "auto").out.count("measured") >= 2
    assert "it must be auto, cpu or cuda" in cbviz("calibrate", "--device", "gpu").err


def test_doctor(cbviz: Call, cache: Path) -> None:
    d = cbviz("doctor", "--json").json
    found = {f["name"]: f for f in d["findings"]}
    assert found["python"]["status"] == "ok"
    assert found["torch"]["status"] == "ok"
    assert found["model"]["status"] == "missing"  # the cache is empty
    assert "cbviz model pull" in found["model"]["advice"]
    assert str(cache) in found["cache"]["found"]
    assert d["works"] == {"simulator": True, "real_model": False, "explorer": True, "lab": True}
    assert {f["status"] for f in d["findings"]} <= set(doctor.STATUSES)
    assert all(f["advice"] for f in d["findings"] if f["status"] == "missing")
    for kind in ("float16", "int8", "int4"):  # the price beside the saving
        assert (
            "bytes a token" in found[f"KV {kind}"]["found"]
            and "same best token at" in found[f"KV {kind}"]["cost"]
        )
    assert (
        "6,480 bytes a token, 3.56 x the blocks of float16" in found["KV int4"]["found"]
        and "89.1 %" in found["KV int4"]["cost"]
    )
    assert "1,012 positions" in found["KV int4"]["advice"]
    words = cbviz("doctor").out
    assert "works here:   simulator (cbviz run --runner sim), explorer" in words
    assert "does not yet: real model" in words


def report(monkeypatch: pytest.MonkeyPatch, **patches: Any) -> dict[str, doctor.Finding]:
    for name, value in patches.items():
        monkeypatch.setattr(doctor, name, value)
    return {f.name: f for f in doctor.examine().findings}


def test_doctor_elsewhere(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "system", lambda: "Darwin")
    monkeypatch.setenv("OMP_NUM_THREADS", "512")
    real = doctor._version
    version: Callable[[str], str | None] = lambda p: None if p in ("torch", "voila") else real(p)  # noqa: E731
    found = report(monkeypatch, _version=version)
    assert found["system"].status == "limited"
    assert "reference path" in found["system"].cost
    assert found["torch"].status == found["Voilà"].status == "missing"
    assert found["threads"].status == "limited"
    assert "set OMP_NUM_THREADS=" in found["threads"].advice


def test_doctor_survives_a_broken_part(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(hub, "pulled_path", broken)
    found = {f.name: f for f in doctor.examine().findings}
    assert found["model"].status == "missing"
    assert "the disk is gone" in found["model"].found
