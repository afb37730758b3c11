"""What the panel says: basis, shares of the peaks, what limits each phase, what was measured on an
accelerator, what ran inside; and in a saved file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cbviz.messages import StepProfile
from cbviz.trace import load
from cbviz.trace.show import show
from cbviz.trace.utilisation import device_sentences, profiled_steps, rate, roof, sentences, totals
from tests.golden import golden
from tests.runs import run

PROFILE = StepProfile(
    "a clock",
    ["product", "attention"],
    [0, 1, 0],
    [0.0, 0.002, 0.003],
    [0.002, 0.001, 0.004],
    [0, 0, 0],
    ["pass"],
    0.0075,
)


def test_modelled_says_modelled() -> None:
    trace = run(discipline="chunked")
    said = sentences(trace, 2)
    assert said[0] == f"modelled work, modelled time, data-sheet peaks of {trace.header.device}"
    assert any(s.endswith("(MBU)") for s in said)
    assert not any("measured" in s for s in said)


def test_counted_and_measured_says_so_and_reckons() -> None:
    trace = golden()
    h, r = trace.header, trace.records[3]
    h.peak_bytes_s, h.peak_flops_s, h.peaks_measured, h.device = 10e9, 100e9, True, "a desk"
    r.clock, r.measured_s, r.counted = "measured", 0.002, {"flops": 4e7, "weight_bytes": 6e6, "kv_bytes": 4e6}
    said = sentences(trace, 4)
    assert said == [
        "counted work, measured time, measured peaks of a desk",
        "5.00 GB/s = 50% of the peak 10.0 GB/s (MBU)",
        "20.0 GFLOP/s = 20.0% of the peak 100 GFLOP/s (MFU)",
        "decode: 4 operations a byte, so reading memory is the limit; 50% of the roof there",
    ]
    assert "UTILISATION" in show(trace, 4)
    h.peak_bytes_s = 0.0
    assert "measure them: cbviz calibrate" in sentences(trace, 4)[1]


def test_a_step_without_work_says_so() -> None:
    trace = golden()
    trace.records[0].cost = None
    assert sentences(trace, 1) == ["the work or the time of this step is not known"]


def test_a_cost_model_of_time_alone_says_so() -> None:
    trace = run(discipline="chunked", cost="article")
    assert sentences(trace, 1) == [
        "the cost model of this run prices time alone: it counts no bytes and no operations"
    ]


def test_an_accelerators_figures() -> None:
    r = golden().records[0]
    assert device_sentences(r) == []
    r.device = {
        "busy_s": 0.006,
        "gap_s": 0.002,
        "gpu_share": 0.9,
        "memory_share": 0.4,
        "power_w": 312.4,
        "clock_hz": 1.98e9,
        "memory_bytes": 3 * 2**30,
    }
    assert device_sentences(r) == [
        "kernels ran 6 ms = 75% of the step (measured, CUDA events); 2 ms it waited for the host",
        (
            "NVML: a kernel ran in 90% of the driver's last period, memory was read or written in 40%, 312 "
            "W, "
            "1.98 GHz, 3.0 GiB in use"
        ),
    ]


def test_a_profile_is_kept_in_the_file_and_listed(tmp_path: Path) -> None:
    trace = golden()
    trace.records[2].profile, trace.records[2].device = PROFILE, {"busy_s": 0.5}
    again = load(trace.save(tmp_path / "run.jsonl"))
    assert again.records[2].profile == PROFILE
    assert again.records[2].device == {"busy_s": 0.5}
    assert profiled_steps(again) == [3]
    assert [(t.name, t.times, t.total_s) for t in totals(PROFILE)] == [
        ("product", 2, pytest.approx(0.006)),
        ("attention", 1, pytest.approx(0.001)),
    ]
    text = show(again, 3)
    assert "INSIDE THE STEP (measured: a clock)" in text
    assert "in all 7 ms of the 7.5 ms" in text


def test_rates_and_the_roof() -> None:
    assert [rate(v, "B/s") for v in (0.5, 999.0, 2.45e10, 1.2e12, 3.35e12)] == [
        "0.50 B/s",
        "999 B/s",
        "24.5 GB/s",
        "1.20 TB/s",
        "3.35 TB/s",
    ]
    assert roof(2.0, 10.0, 100.0) == 20.0
    assert roof(50.0, 10.0, 100.0) == 100.0
