"""The step under way: what it has found so far, and how it is taken back if it fails or is interrupted."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cbviz.engine.arrivals import Kept
from cbviz.messages import RequestSpec, RunnerOutput, SchedulerOutput, StepCost

if TYPE_CHECKING:
    from cbviz.engine.engine import Engine


class StepUnderWay:
    """A transaction: an error that leaves the block leaves the engine as it was before.

    A class and not a generator: an interrupt inside contextlib would leave a generator half run.
    """

    t0_s: float
    plan: SchedulerOutput
    out: RunnerOutput
    cost: StepCost

    def __init__(self, engine: Engine, duration_s: float | None) -> None:
        self.duration_s = duration_s
        """How long the step took in the run that is being repeated; None: it is not repeated."""
        self.arrivals: list[RequestSpec] = []
        self.inputs: list[dict[str, Any]] = []
        self.control_s = 0.0
        """Seconds that the scheduler took."""
        self.runs = False
        """The runner may have written into blocks."""
        self._engine = engine

    def __enter__(self) -> StepUnderWay:
        engine = self._engine
        engine.settle()
        self._before = engine.now_s, engine.inputs, Kept(engine.arrivals)
        engine.scheduler.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            return
        engine = self._engine
        written = written_blocks(self.plan) if self.runs else set()
        engine.scheduler.rollback()
        engine.now_s, engine.inputs, kept = self._before
        kept.put_back(engine.arrivals)
        engine.num_taken_back += 1
        engine.settle()
        engine.distrust(written)


class timed:
    """Adds the time that its block took to the step's control time, if the block ends well."""

    def __init__(self, now: StepUnderWay) -> None:
        self._now = now

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._now.control_s += perf_counter() - self._began


def written_blocks(plan: SchedulerOutput) -> set[int]:
    """The blocks into which the pass of this plan wrote."""
    size = plan.block_size
    blocks = {
        b for c in plan.chunks for b in c.block_table[c.start // size : -(-(c.start + c.num_tokens) // size)]
    }
    return blocks.union((dst for _, dst in plan.copies), (device for device, _ in plan.swaps_in))
