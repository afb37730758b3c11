"""What several tasks need: requests, a run of them, and a tally of cases."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from cbviz import events as ev
from cbviz.lessons.grading import Part
from cbviz.messages import RequestSpec, Sampling
from cbviz.session import Session
from cbviz.trace.trace import Trace

TO_THE_END = Sampling(ignore_eos=True)


def make_spec(rid: str, rng: random.Random, prompt: int, output: int, **more: Any) -> RequestSpec:
    return RequestSpec(
        rid,
        tuple(rng.randrange(1000, 40_000) for _ in range(prompt)),
        more.pop("max_tokens", output),
        sampling=TO_THE_END,
        output_len=output,
        **more,
    )


def run_simulated(specs: list[RequestSpec], model: str = "smollm2", **config: Any) -> Trace:
    s = Session(specs, runner="sim", model=model, **config)
    s.run()
    return s.trace


def events_of(trace: Trace, kind: type[ev.Event]) -> Iterator[Any]:
    return (e for record in trace for e in record.events if isinstance(e, kind))


class Tally:
    """Rights and wrongs of one part; keeps the first wrong case to show."""

    def __init__(self, name: str, points: int) -> None:
        self.name, self.points, self.right, self.asked, self.fault = name, points, 0, 0, ""
        self.wrong: dict[str, Any] | None = None

    def add(self, case: dict[str, Any], truth: Any, said: Any, fault: str) -> None:
        self.asked += 1
        if not fault and said == truth:
            self.right += 1
        elif self.wrong is None:
            self.wrong, self.fault = {"case": case, "engine": truth, "said": said}, fault

    def part(self) -> Part:
        # A part without a case would be free points: the draws see to it that there is none.
        share = self.right / self.asked if self.asked else 0.0
        return Part(
            self.name,
            self.points,
            share,
            f"{self.right} of {self.asked} right" + (f"; {self.fault}" if self.fault else ""),
            self.wrong,
        )
