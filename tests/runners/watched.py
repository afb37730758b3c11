"""A simulated runner whose steps can be watched from inside: what they consisted of is made up."""

from __future__ import annotations

from cbviz.messages import RunnerOutput, SchedulerOutput, StepProfile
from cbviz.runners.sim import SimRunner


class WatchedSim(SimRunner):
    """Watches the next step when it is told to, as the real runner does."""

    profile_next = False

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        out = super().execute(plan)
        if self.profile_next:
            self.profile_next = False
            out.profile = StepProfile(
                "a clock", ["one", "two"], [0, 1], [0.0, 0.5], [0.5, 0.25], [0, 0], ["lane"], 0.75
            )
        return out
