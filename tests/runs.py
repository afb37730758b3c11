"""Real runs of the engine on the simulated runner, small enough to make in a test: what reads traces is tried
on what makes them.
"""

from __future__ import annotations

import random
from typing import Any

from cbviz.config import EngineConfig
from cbviz.cost import devices, make, models
from cbviz.engine.engine import Engine
from cbviz.messages import RequestSpec
from cbviz.runners.sim import SimRunner
from cbviz.trace.schema import TraceHeader
from cbviz.trace.trace import Trace


def specs(num: int = 10, seed: int = 0, shared: int = 12) -> list[RequestSpec]:
    """Requests with a common beginning of `shared` tokens, two of them arriving at every third step."""
    rng = random.Random(seed)
    prefix = tuple(rng.randrange(1000, 2000) for _ in range(shared))
    return [
        RequestSpec(
            f"r{i + 1}",
            prefix + tuple(rng.randrange(1000, 2000) for _ in range(rng.randrange(1, 30))),
            rng.randrange(2, 25),
            arrival_step=1 + 3 * (i // 2),
            priority=i % 3,
        )
        for i in range(num)
    ]


def run(
    requests: list[RequestSpec] | None = None,
    *,
    at: dict[int, tuple[str, Any]] | None = None,
    max_steps: int = 400,
    **fields: Any,
) -> Trace:
    """A run to its end. `at`: step -> ("abort", id) or ("configure", {...}), done just before that step."""
    spec = models.get("SmolLM2-135M")
    config, _ = EngineConfig(
        **(
            {"max_num_seqs": 4, "num_blocks": 25, "block_size": 4, "max_model_len": 80, "clock": "modelled"}
            | fields
        )
    ).resolve(spec.max_context)
    device = devices.get(config.modelled_device)
    engine = Engine(config, SimRunner(spec), make(config.cost, spec, device))
    trace = Trace(
        TraceHeader(
            config=config.to_dict(),
            model=spec.name,
            runner="sim",
            clock="modelled",
            device=device.name,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            peak_bytes_s=device.bandwidth_bytes_s,
            peak_flops_s=device.flops_s,
            capabilities=["schedule", "blocks", "tokens", "reasons", "accounting", "time", "cost", "queue"],
            missing={
                "texts": "the simulated runner has no tokenizer",
                "gaps": "the simulated runner computes no probabilities",
            },
        )
    )
    engine.enqueue(specs() if requests is None else requests)
    for step in range(1, max_steps + 1):
        if at and step in at:
            op, what = at[step]
            if op == "abort":
                engine.abort(what)
            else:
                engine.configure(**what)
        record = engine.step()
        if record is None:
            return trace
        trace.append(record)
    raise AssertionError(f"the run did not end in {max_steps} steps: {engine.stuck}")
