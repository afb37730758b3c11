"""What NVIDIA's driver says of a card now: NVML through the optional package nvidia-ml-py. Owns the handle;
knows no step.

Asked at most a few times a second (the driver's own figures move no faster) and never from the path of a step
that is quicker than that: the last sample is kept. Where the package or the driver is missing there is simply
nothing to say.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

EVERY_S = 0.2


class Sampler:
    """The card with this PCI bus id or UUID, else the one at `index` of the driver's list.

    `sample()` is {} where NVML can't be had; `why` says the reason.
    """

    def __init__(self, index: int = 0, uuid: str = "", nvml: Any = None) -> None:
        self.why = ""
        self._last: dict[str, float] = {}
        self._at = float("-inf")
        self._handle: Any = None
        try:
            self._nvml = nvml if nvml is not None else importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = (
                self._nvml.nvmlDeviceGetHandleByUUID(uuid)
                if uuid
                else self._nvml.nvmlDeviceGetHandleByIndex(index)
            )
        except ModuleNotFoundError:
            self.why = "nvidia-ml-py is not installed (pip install 'cbviz[gpu]')"
        except (
            Exception
        ) as e:  # NVML's own errors are made at run time; without a driver there are many kinds
            self.why = f"NVML: {e}"

    def sample(self) -> dict[str, float]:
        """`gpu_share`, `memory_share` (0..1, of the driver's last period), `power_w`, `clock_hz`,
        `memory_bytes`; those that this card tells.
        """
        if self._handle is None or time.monotonic() - self._at < EVERY_S:
            return self._last
        n, h, out = self._nvml, self._handle, dict[str, float]()
        for read in (
            lambda: out.update(
                gpu_share=n.nvmlDeviceGetUtilizationRates(h).gpu / 100,
                memory_share=n.nvmlDeviceGetUtilizationRates(h).memory / 100,
            ),
            lambda: out.update(power_w=n.nvmlDeviceGetPowerUsage(h) / 1000),
            lambda: out.update(clock_hz=n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM) * 1e6),
            lambda: out.update(memory_bytes=float(n.nvmlDeviceGetMemoryInfo(h).used)),
        ):
            try:
                read()
            except Exception:  # a figure that this card or its partition does not tell
                continue
        self._last, self._at = out, time.monotonic()
        return out


class _Nothing:
    """No card of NVIDIA's."""

    why = "no CUDA device"

    def sample(self) -> dict[str, float]:
        return {}


NOTHING = _Nothing()

__all__ = ["EVERY_S", "NOTHING", "Sampler"]
