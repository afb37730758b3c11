"""The driver's figures, read through a made-up driver: what it tells, what it does not, and how often it is
asked.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cbviz.model import nvml


class Driver:
    """Tells everything but the power."""

    NVML_CLOCK_SM = 1

    def __init__(self) -> None:
        self.asked = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return index

    def nvmlDeviceGetUtilizationRates(self, h: Any) -> Any:
        self.asked += 1
        return SimpleNamespace(gpu=87, memory=41)

    def nvmlDeviceGetPowerUsage(self, h: Any) -> int:
        raise RuntimeError("Not Supported")

    def nvmlDeviceGetClockInfo(self, h: Any, kind: int) -> int:
        return 1980

    def nvmlDeviceGetMemoryInfo(self, h: Any) -> Any:
        return SimpleNamespace(used=3 << 30)


def test_what_the_driver_tells_and_not_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(nvml.time, "monotonic", lambda: now[0])
    driver = Driver()
    s = nvml.Sampler(nvml=driver)
    want = {"gpu_share": 0.87, "memory_share": 0.41, "clock_hz": 1.98e9, "memory_bytes": float(3 << 30)}
    assert s.sample() == want
    asked = driver.asked
    now[0] += nvml.EVERY_S / 2
    assert s.sample() == want and driver.asked == asked
    now[0] += nvml.EVERY_S
    assert s.sample() == want and driver.asked > asked


def test_without_package_or_driver_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(nvml.importlib, "import_module", absent)
    s = nvml.Sampler()
    assert s.sample() == {} and "pip install" in s.why
    monkeypatch.setattr(
        nvml.importlib,
        "import_module",
        lambda name: SimpleNamespace(nvmlInit=lambda: (_ for _ in ()).throw(OSError("no driver"))),
    )
    s = nvml.Sampler()
    assert s.sample() == {} and s.why == "NVML: no driver"
