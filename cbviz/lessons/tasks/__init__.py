"""The exercises: question, hints, hidden cases and their marking.

The engine computes what is right; no answer is written down here.

Owns the table `TASKS`. Every case is a simulated run (`SimRunner`), so a check takes a second or two and is
the same on every machine.
"""

from __future__ import annotations

from cbviz.lessons.grading import Task
from cbviz.lessons.tasks.blocks import CountTheBlocks
from cbviz.lessons.tasks.drafts import AcceptTheDrafts
from cbviz.lessons.tasks.fcfs import BeatFcfs
from cbviz.lessons.tasks.hits import CountTheHits
from cbviz.lessons.tasks.pools import FillThePool
from cbviz.lessons.tasks.slo import MeetTheSlo
from cbviz.lessons.tasks.steps import PredictTheStep
from cbviz.lessons.tasks.victims import NameTheVictim

TASKS: dict[str, Task] = {
    t.name: t
    for t in (
        CountTheBlocks(),
        CountTheHits(),
        NameTheVictim(),
        PredictTheStep(),
        MeetTheSlo(),
        BeatFcfs(),
        AcceptTheDrafts(),
        FillThePool(),
    )
}

__all__ = ["TASKS"]
