"""Decode steps like for like, floors and their profile, what recording costs, memory of a kernel.

No figure is asserted but those that are made up here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from cbviz import events
from cbviz.bench import decode, floors, memory, recording
from cbviz.bench.peer import PeerError, Worker
from cbviz.cost import calibrate, models
from cbviz.runners.sim import SimRunner
from tests.bench.test_engine import made


class Clockwork:
    """Another engine: every step takes a tenth of a second."""

    name = "llama.cpp (made up)"

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        assert all(len(p) == decode.CONTEXT for p in prompts)
        self.asked.append((len(prompts), steps))
        return [0.1] * steps


def test_decode_steps_in_turn_with_parts_and_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "bandwidth_now", lambda: 1e9)
    other = Clockwork()
    cases = decode.measure(made(), ["exact", "int8"], [other], 2, lambda note: None, batches=(1, 3), steps=5)
    assert other.asked == [(1, 2), (1, 5), (1, 5), (3, 2), (3, 5), (3, 5)]
    for c in cases:
        assert (
            0 < sum(s for v in c.pass_s["exact"] for s in v) < sum(c.step_s["exact"])
        )  # the pass is a part of the step
    rows = decode.data(cases, ["exact", "int8"])
    assert [r["batch"] for r in rows] == [1, 3]
    for r in rows:
        mine = r["contenders"]["int8"]
        assert mine["median_s"] > 0
        assert mine["floor_share"] > 0
        assert (
            min(0.1 / s for s in mine["pass_s"])
            <= r["ratios"]["int8"][other.name]
            <= max(0.1 / s for s in mine["pass_s"])
        )
        if mine["parts_s"]:
            assert set(mine["parts_s"]) == {
                "embedding",
                "QKV product",
                "rotary and KV write",
                "attention",
                "output product",
                "gate and up product",
                "down product",
                "output head",
            }
            assert any("reads" in line for line in decode.profile_lines(r, "int8"))
    # Eight bits are read in a quarter of the bytes and a scale a row.
    assert (
        rows[0]["contenders"]["int8"]["part_bytes"]["QKV product"]
        < rows[0]["contenders"]["exact"]["part_bytes"]["QKV product"] / 2
    )
    text = "\n".join(decode.table(rows, [other.name]))
    assert "batch 3" in text and "/ llama.cpp" in text


def result(share: float, ratio: float) -> dict[str, Any]:
    mine = {
        "floor_share": share,
        "parts_s": {"attention": 0.001, "QKV product": 0.003},
        "part_bytes": {"QKV product": 6e6},
        "median_s": 0.004,
        "step_s": 0.005,
    }
    return {
        "loads": [
            {
                "name": "article",
                "seats": 8,
                "contenders": {"fast": {}, "vLLM 1": {}},
                "ratios": {"fast": {"vLLM 1": ratio}, "exact": {"vLLM 1": ratio}},
            }
        ],
        "decode": [
            {"batch": b, "contenders": dict.fromkeys(("exact", "fast", "int8"), mine), "ratios": {}}
            for b in (1, 8)
        ],
    }


def test_a_missed_floor_comes_with_its_profile() -> None:
    good = floors.lines(result(0.7, 2.5))
    assert (
        sum("reached" in x for x in good) == 5
    )  # two against vLLM, three of the bandwidth; the others were not measured
    assert not any("MISSED" in x or "attention" in x for x in good)
    bad = "\n".join(floors.lines(result(0.3, 2.5)))
    assert bad.count("MISSED") == 3
    assert "int8, batch 1: where the time of a pass goes" in bad
    assert "QKV product" in bad and "75%, reads 2.0 GB/s" in bad
    assert floors.lines({"loads": [], "decode": []}) == []


def test_with_and_without_recording_make_the_same_tokens_and_leave_the_events_alone() -> None:
    row = recording.compare(lambda: SimRunner(models.get("smollm2")), 3, rounds=2, steps=4)
    assert row["with_ms"] > 0 and row["without_ms"] > 0 and row["requests"] == 3
    assert all(module.ev is events for module in recording.WRITERS)  # type: ignore[attr-defined]
    rows = [
        {"runner": "real", **row, "ratio": 1.02},
        {"runner": "real", **row, "ratio": 1.2},
        {"runner": "sim", **row},
    ]
    told = recording.table({"model": "m", "precision": "fast", "rounds": 2, "most": 0.03, "rows": rows})
    assert told.count("within 3%") == 1 and told.count("MORE than 3%") == 1


def test_memory_of_a_process_is_told_in_parts() -> None:
    m = memory.memory_of(psutil.Process())
    assert m["resident"] > 1e6
    if sys.platform == "linux":
        assert m["private"] <= m["share"] <= m["resident"]
    each = [{"resident": 5e8, "private": 2e8, "share": 3e8}] * 2
    rows = [{"kernels": 1, "each": each[:1]}, {"kernels": 2, "each": each}]
    text = memory.table(
        {"model": "m", "precision": "fast", "num_blocks": 512, "steps": 2, "most_bytes": 900e6, "rows": rows}
    )
    assert "together 600" in text and "one kernel takes 500 MB, at most 900: reached" in text


def test_a_pipe_answers_and_says_what_went_wrong(tmp_path: Path) -> None:
    script = tmp_path / "w.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\nfrom pipe import serve\nserve(lambda m: "
        "print('noise') or {'twice': 2 * m['n']})\n"
    )
    with Worker(sys.executable, str(script), str(Path(decode.__file__).parent)) as w:
        assert w.ask("x", n=21) == {"twice": 42}
        with pytest.raises(PeerError, match="KeyError: 'n'"):
            w.ask("x")
        assert w.ask("x", n=1) == {"twice": 2}
