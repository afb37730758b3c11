"""What ran inside a step: the compiled pass by its own clock, any other by torch's profiler; tokens are the
same, and nothing is watched that nobody asked for.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cbviz.config import ConfigError, EngineConfig
from cbviz.messages import RequestSpec, Sampling
from cbviz.model import native, profile
from cbviz.runners.torch_runner import TorchRunner
from cbviz.session import Session
from tests.bench.test_engine import made

SPECS = [
    RequestSpec(f"r{i}", tuple(range(5, 12 + i)), 6, arrival_step=0, sampling=Sampling(ignore_eos=True))
    for i in range(2)
]


def session(kernels: str) -> Session:
    return Session(
        SPECS,
        runner=TorchRunner(made(), EngineConfig(kernels=kernels, precision="exact", num_blocks=16)),
        kernels=kernels,
        precision="exact",
        num_blocks=16,
    )


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_a_step_is_watched_once_and_says_the_same(kernels: str) -> None:
    plain, watched = session(kernels), session(kernels)
    plain.run()
    watched.step(2)
    record = watched.profile_step()
    watched.run()
    assert record is not None and record.step == 3 and record.profile is not None
    p = record.profile
    assert [r.profile is not None for r in watched.trace] == [r.step == 3 for r in watched.trace]
    assert [watched.request(r).output_token_ids for r in watched.request_ids] == [
        plain.request(r).output_token_ids for r in plain.request_ids
    ]
    assert len(p.name) == len(p.start_s) == len(p.duration_s) == len(p.lane) > 5
    assert p.start_s == sorted(p.start_s) and all(d >= 0 for d in p.duration_s) and p.total_s > 0
    if kernels == "cpu" and native.library().lib is not None:
        assert p.source == "the compiled pass's own clock"
        assert sum(p.duration_s) == pytest.approx(p.total_s)  # the parts leave nothing out
        assert sum(p.names[n] == "attention" for n in p.name) == 2  # once a layer
    elif kernels == "reference":
        assert "torch.profiler" in p.source
        assert any(n.startswith("aten::") for n in p.names)


def test_what_computes_nothing_cannot_be_watched() -> None:
    s = Session("article", runner="sim")
    with pytest.raises(ConfigError, match="computes nothing that could be watched"):
        s.profile_step()
    assert len(s.trace) == 0


def event(
    name: str, start: float, end: float, device: str = "DeviceType.CPU", thread: int = 1, stream: int = 0
) -> Any:
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=device,
        thread=thread,
        device_resource_id=stream,
    )


def test_kernels_stand_in_the_lane_of_their_stream_and_inner_operators_are_left_out() -> None:
    spans, lanes = profile.from_events(
        [
            event("cbviz pass", 100, 200),
            event("aten::linear", 110, 130),
            event("aten::mm", 112, 128),
            event("aten::add", 140, 141),
            event("other thread", 120, 125, thread=2),
            event("gemm", 150, 180, "DeviceType.CUDA", stream=7),
            event("copy", 160, 165, "DeviceType.CUDA", stream=9),
            event("behind it", 210, 220),
        ]
    )
    assert lanes == [
        "Operators, as the host calls them",
        "Kernels on the device, stream 7",
        "Kernels on the device, stream 9",
    ]
    assert [(n, round(1e6 * s), round(1e6 * d), lane) for n, s, d, lane in spans] == [
        ("aten::linear", 10, 20, 0),
        ("aten::add", 40, 1, 0),
        ("gemm", 50, 30, 1),
        ("copy", 60, 5, 2),
    ]


def test_too_many_spans_keep_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "MOST_SPANS", 2)
    p = profile.profile(
        "a clock", [("a", 0.0, 1.0, 0), ("b", 1.0, 0.1, 0), ("c", 2.0, 3.0, 0)], ["lane"], 5.0
    )
    assert [p.names[n] for n in p.name] == ["a", "c"] and "2 longest" in p.source
