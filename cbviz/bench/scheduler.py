"""What the control plane costs: schedule() and update() of decode steps, ours and vLLM's own, in turn in one
run.

Ours is timed as the engine calls it: begin, schedule, update, and the journal drained, so reasons and
accounts are paid for. vLLM's is `Scheduler.schedule()` and `update_from_output()` in a process of its own. No
model runs in either; making up the tokens is not timed. All figures are measured, on this machine, as CPU
time of the one thread that runs: on a machine that others use too, wall time would count their turns, and
longer calls are interrupted more often than short ones. Wall time stands beside it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter, thread_time
from typing import Any

from cbviz.bench.peer import VllmPeer, find_python
from cbviz.bench.vllm_worker import decode_config, decode_prompts, token
from cbviz.config import EngineConfig
from cbviz.core.scheduler import Scheduler
from cbviz.messages import RequestSpec, RunnerOutput, Sampling

CASES = ((256, 256), (256, 1024), (32, 256), (32, 1024))
"""(running requests, their contexts in tokens)."""
NUM_BLOCKS = 16_384
BLOCK_SIZE = 16
ROUNDS = 9
"""Blocks of steps for each side; the first is not counted."""
STEPS = 16
"""Steps in a block: one block_size, so that every request fills exactly one block."""


@dataclass(frozen=True)
class Timing:
    """Medians over all counted steps, milliseconds of CPU time a step, and the spread: the median of each
    block of steps.
    """

    schedule_ms: float
    update_ms: float
    total_ms: float
    wall_ms: float
    """Of both, as wall time: more than `total_ms` where others had the CPU meanwhile."""
    num_steps: int
    block_medians_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    num_running: int
    context: int
    ours: Timing
    vllm: Timing | None

    @property
    def ratio(self) -> float | None:
        """Ours over vLLM's; below 1 ours is quicker."""
        return self.ours.total_ms / self.vllm.total_ms if self.vllm is not None else None


class OurDecode:
    """The counterpart of the worker's `Decode`."""

    def __init__(self, config: dict[str, Any], context: int) -> None:
        self.scheduler = s = Scheduler(EngineConfig(discipline="vllm", **config))
        for i, prompt in enumerate(decode_prompts(config["max_num_seqs"], context, config["block_size"])):
            s.add(RequestSpec(f"r{i}", tuple(prompt), 4000, sampling=Sampling(ignore_eos=True)))
        self.order = {rid: i for i, rid in enumerate(s.state.requests)}
        self.step()
        if len(s.state.running) != len(self.order):
            raise RuntimeError(f"{len(s.state.running)} of {len(self.order)} requests run")

    def step(self) -> tuple[float, float, float]:
        """One step; CPU seconds in begin and schedule, CPU seconds in update and drain, wall seconds of both."""
        s = self.scheduler
        w0, t0 = perf_counter(), thread_time()
        s.begin()
        plan = s.schedule()
        t1, w1 = thread_time(), perf_counter()
        out = RunnerOutput(
            {
                c.request_id: [
                    token(self.order[c.request_id], s.state.requests[c.request_id].num_output_tokens)
                ]
                for c in plan.chunks
            }
        )
        w2, t2 = perf_counter(), thread_time()
        s.update(plan, out)
        s.drain()
        t3, w3 = thread_time(), perf_counter()
        return t1 - t0, t3 - t2, w1 - w0 + w3 - w2

    def time(self, steps: int) -> list[tuple[float, float, float]]:
        gc.collect()
        out = []
        for _ in range(steps):
            out.append(self.step())
            if self.scheduler.it.tokens.total != len(self.order):
                raise RuntimeError("not a decode-only step of all requests")
        return out


def measure(
    num_running: int, context: int, peer: VllmPeer | None, *, rounds: int = ROUNDS, steps: int = STEPS
) -> Case:
    """Both sides in turn, `steps` steps at a time.

    The context lies around `context` on average over the counted steps.
    """
    start = context - rounds * steps // 2
    config = decode_config(num_running, start, NUM_BLOCKS, BLOCK_SIZE)
    ours = OurDecode(config, start)
    if peer is not None:
        peer.ask("decode", config=config, context=start)
    blocks: list[list[tuple[float, float, float]]] = []
    theirs: list[list[tuple[float, float, float]]] = []
    for _ in range(rounds):
        blocks.append(ours.time(steps))
        if peer is not None:
            answer = peer.ask("time", steps=steps)
            theirs.append(list(zip(answer["schedule_s"], answer["update_s"], answer["wall_s"])))
    return Case(num_running, context, _timing(blocks[1:]), _timing(theirs[1:]) if theirs else None)


def _timing(blocks: list[list[tuple[float, float, float]]]) -> Timing:
    rows = [row for block in blocks for row in block]
    schedule, update, wall = (1e3 * median(column) for column in zip(*rows))
    return Timing(
        schedule,
        update,
        1e3 * median(a + b for a, b, _ in rows),
        wall,
        len(rows),
        [1e3 * median(a + b for a, b, _ in block) for block in blocks],
    )


def run(
    vllm_python: str | None = None, progress: Callable[[int, int, str], None] | None = None
) -> dict[str, Any]:
    """All cases as plain data: `vllm` (version or None), `cases` with `ours`, `vllm`, `ratio`. Raises
    ConfigError if `vllm_python` is given and has no vLLM.
    """
    python = find_python(vllm_python)
    tell = progress or (lambda done, total, note: None)
    tell(0, len(CASES), "starting vLLM" if python else "")
    peer = VllmPeer(python) if python else None
    try:
        cases = []
        for n, (num_running, context) in enumerate(CASES):
            tell(n, len(CASES), f"{num_running} running at {context:,} tokens")
            case = measure(num_running, context, peer)
            cases.append({**asdict(case), "ratio": case.ratio})
        return {
            "vllm": peer.version if peer else None,
            "num_blocks": NUM_BLOCKS,
            "block_size": BLOCK_SIZE,
            "prefix_caching": True,
            "clock": "measured, CPU time of the thread",
            "cases": cases,
        }
    finally:
        if peer is not None:
            peer.close()


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    version = result["vllm"]
    head = f"{'running':>8}{'context':>9}   {'cbviz':>7} = {'schedule':>8} + {'update':>6} {'(wall)':>9}   "
    if version is not None:
        head += (
            f"{'vLLM ' + version:>11} = {'schedule':>8} + {'update':>6} {'(wall)':>9}   {'cbviz / vLLM':>12}"
        )
    lines = [
        (
            f"Decode steps, prefix caching on, {result['num_blocks']:,} blocks of {result['block_size']}; "
            "CPU "
            "milliseconds a step, medians, measured here"
        ),
        head.rstrip(),
    ]
    for c in result["cases"]:
        a, b = c["ours"], c["vllm"]
        line = (
            f"{c['num_running']:>8}{c['context']:>9,}   {a['total_ms']:>7.2f} = {a['schedule_ms']:>8.2f} + "
            f"{a['update_ms']:>6.2f} {_wall(a):>9}   "
        )
        if b is not None:
            line += (
                f"{b['total_ms']:>11.2f} = {b['schedule_ms']:>8.2f} + {b['update_ms']:>6.2f} {_wall(b):>9} "
                f"  {c['ratio']:>12.2f}"
            )
        lines.append(line.rstrip())
    if version is None:
        lines.append(
            "vLLM is not installed here: only ours was measured. --vllm-python PATH names a Python that "
            "has it."
        )
    else:
        lines.append(
            "Both in turn, a block of steps at a time. Ours includes the reasons, the accounts and the "
            "undo log; neither includes a model."
        )
    return "\n".join(lines)


def _wall(timing: dict[str, Any]) -> str:
    return f"({timing['wall_ms']:.2f})"
