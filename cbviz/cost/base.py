"""What a cost model is. Owns the protocol; knows no device and no arithmetic."""

from __future__ import annotations

from typing import Protocol

from cbviz.messages import SchedulerOutput, StepCost


class CostModel(Protocol):
    """Turns one step's plan into work and time.

    It is asked every step, so it costs O(chunks) and keeps no state between steps.
    """

    @property
    def name(self) -> str:
        """How the model is called in a config and beside a figure."""

    def price(self, plan: SchedulerOutput) -> StepCost:
        """Work and time of one step, SI units. Reads the plan, never changes it."""


__all__ = ["CostModel"]
