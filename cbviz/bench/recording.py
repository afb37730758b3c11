"""What recording costs: a step with recorder and reasons against the same step without, in turn, on the real
model and on the simulator.

With: `Session.step`, as everybody uses it: events with their reasons, accounts, the step's record, the fold
of the trace, words, keyframes. Without: the scheduler, the runner and the update alone; events are not even
made (the event types that the scheduler builds are replaced by one that holds nothing), no record, no trace,
no words. Both run the same requests to the same tokens. One round is some steps of the one, then of the
other; what is told is the median over rounds of the ratio of the rounds' medians. The runner's own time is in
both.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

from cbviz import events
from cbviz.bench.decode import CONTEXT, prompts
from cbviz.config import EngineConfig
from cbviz.core import accounts, admission, endings, outputs, preemption, queue, running, scheduler
from cbviz.core.kv import kv_manager
from cbviz.core.scheduler import Scheduler
from cbviz.cost import models
from cbviz.messages import RequestSpec, Sampling
from cbviz.runners.base import Runner
from cbviz.runners.sim import SimRunner
from cbviz.session import Session

MOST = 0.03
"""What a step may be slower by with recording, on the real model."""


WRITERS = (
    accounts,
    admission,
    endings,
    kv_manager,
    outputs,
    preemption,
    queue,
    running,
    scheduler,
)
"""The modules of the control plane that make events."""


class _NoEvents:
    """Stands for the module of event types: each of them takes anything and is nothing."""

    def __getattr__(self, name: str) -> Any:
        return _nothing if isinstance(getattr(events, name), type) else getattr(events, name)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


@contextmanager
def _no_events() -> Iterator[None]:
    none = _NoEvents()
    try:
        for module in WRITERS:
            setattr(module, "ev", none)  # noqa: B010
        yield
    finally:
        for module in WRITERS:
            setattr(module, "ev", events)  # noqa: B010


def _specs(count: int, tokens: int, vocab: int) -> list[RequestSpec]:
    greedy = Sampling(ignore_eos=True)
    return [
        RequestSpec(f"r{j}", tuple(ids), tokens, arrival_step=0, sampling=greedy)
        for j, ids in enumerate(prompts(count, vocab))
    ]


class _Bare:
    """The loop without recording."""

    def __init__(self, runner: Runner, specs: list[RequestSpec], config: EngineConfig) -> None:
        self._runner = runner
        self._scheduler = Scheduler(config)
        with _no_events():
            for s in specs:
                self._scheduler.add(s)

    def step(self) -> list[int]:
        s = self._scheduler
        s.begin()
        plan = s.schedule()
        out = self._runner.execute(plan)
        s.update(plan, out)
        s.state.journal.clear()
        return [t for v in out.token_ids.values() for t in v]


def compare(
    make: Callable[[], Runner],
    num_requests: int,
    *,
    rounds: int,
    steps: int,
    tell: Callable[[str], None] = lambda note: None,
    **fields: Any,
) -> dict[str, Any]:
    """Milliseconds of a step with and without, medians, and the ratio's median and quarters over rounds.

    `make` gives each side a runner of its own.
    """
    vocab = make().spec.vocab_size
    specs = _specs(num_requests, rounds * steps + 8, vocab)
    blocks = num_requests * ((CONTEXT + rounds * steps + 24) // 16 + 1) + 1
    config = {
        "max_num_seqs": num_requests,
        "num_blocks": blocks,
        "block_size": 16,
        "max_model_len": CONTEXT + rounds * steps + 16,
        "max_num_batched_tokens": num_requests * CONTEXT,
        "enable_prefix_caching": True,
        **fields,
    }
    with_it = Session(specs, runner=make(), **config)
    bare = _Bare(make(), specs, with_it.config)
    on: list[float] = []
    off: list[float] = []
    said: list[int] = []

    def one() -> None:
        record = with_it.step()
        assert record is not None
        said[:] = [t for e in record.events if isinstance(e, events.Sampled) for t in e.token_ids]

    for _ in range(3):  # the prompts, and the first decodes
        one()
        with _no_events():
            bare.step()
    gc.collect()
    for i in range(rounds):
        tell(f"{num_requests} requests, round {i + 1}")
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(steps):  # step by step in turn: the machine's moods last longer than a step
            t0 = perf_counter()
            one()
            t1 = perf_counter()
            with _no_events():
                t2 = perf_counter()
                tokens = bare.step()
                t3 = perf_counter()
            if sorted(tokens) != sorted(said):
                raise RuntimeError("the two sides made different tokens")
            times[0].append(t1 - t0)
            times[1].append(t3 - t2)
        on.append(median(times[0]))
        off.append(median(times[1]))
    ratios = sorted(a / b for a, b in zip(on, off))
    return {
        "requests": num_requests,
        "with_ms": 1e3 * median(on),
        "without_ms": 1e3 * median(off),
        "ratio": median(ratios),
        "ratio_quarters": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "costs_ms": 1e3 * median(a - b for a, b in zip(on, off)),
    }


def run(
    model: str = "smollm2",
    precision: str = "fast",
    *,
    rounds: int = 12,
    steps: int = 8,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """The real model with 1 and 8 requests, the simulator with 8 and 32, as plain data.

    Raises ModelError for a model that cannot be had.
    """
    from cbviz.model import hub
    from cbviz.model.loader import load
    from cbviz.runners.torch_runner import TorchRunner

    tell = progress or (lambda done, total, note: None)
    loaded = load(hub.resolve(model))
    rows = []
    cases = (("real", 1), ("real", 8), ("sim", 8), ("sim", 32))
    for n, (kind, requests) in enumerate(cases):
        blocks = requests * ((CONTEXT + rounds * steps + 24) // 16 + 1) + 1
        note = functools.partial(_told, tell, n, len(cases), kind)
        if kind == "real":
            make = functools.partial(
                TorchRunner, loaded, EngineConfig(precision=precision, num_blocks=blocks, block_size=16)
            )
            row = compare(
                make, requests, rounds=rounds, steps=steps, tell=note, precision=precision, clock="measured"
            )
        else:
            row = compare(
                functools.partial(SimRunner, models.get("smollm2")),
                requests,
                rounds=rounds,
                steps=steps,
                tell=note,
            )
        rows.append({"runner": kind, **row})
    return {
        "model": loaded.title,
        "precision": precision,
        "rounds": rounds,
        "steps": steps,
        "most": MOST,
        "clock": "measured",
        "rows": rows,
    }


def _told(tell: Callable[[int, int, str], None], n: int, total: int, kind: str, text: str) -> None:
    tell(n, total, f"{kind}: {text}")


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = [
        (
            f"{result['model']}, {result['precision']}: a decode step with recorder and reasons, and "
            "without; "
            f"in turn, medians of {result['rounds']} rounds, measured here"
        ),
        f"{'':<24}{'with':>12}{'without':>12}{'costs':>12}{'slower by':>12}{'quarters':>20}",
    ]
    for r in result["rows"]:
        a, b = r["ratio_quarters"]
        name = (
            f"{'real model' if r['runner'] == 'real' else 'simulator'}, {r['requests']} "
            f"request{'s' if r['requests'] > 1 else ''}"
        )
        judged = (
            ""
            if r["runner"] != "real"
            else "   within"
            if r["ratio"] <= 1 + result["most"]
            else "   MORE than"
        )
        lines.append(
            (
                f"{name:<24}{r['with_ms']:>9.3f} ms{r['without_ms']:>9.3f} ms{r['costs_ms']:>9.3f} "
                f"ms{r['ratio'] - 1:>12.1%}{f'{a - 1:.1%} .. {b - 1:.1%}':>20}"
            )
            + (f"{judged} {result['most']:.0%}" if judged else "")
        )
    lines.append(
        "The simulator computes nothing: there the recording is a large part of a step, and the "
        "milliseconds are what counts."
    )
    return "\n".join(lines)


__all__ = ["MOST", "compare", "run", "table"]
