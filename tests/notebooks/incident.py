"""Makes the recording that notebook 08 reads: `python tests/notebooks/incident.py` writes it again. A
simulated run with two knobs turned on the way; one did harm.

Deterministic: the test holds the shipped file against what this makes. Do not read on before you have solved
notebook 08.
"""

from __future__ import annotations

import random
from pathlib import Path

import cbviz as cb

FILE = Path(__file__).resolve().parents[2] / "notebooks" / "data" / "incident.jsonl.gz"
BUDGET_STEP, WATERMARK_STEP = 130, 200


def requests() -> list[cb.RequestSpec]:
    rng = random.Random(11)
    specs, now = [], 0.0
    for i in range(60):
        now += rng.expovariate(15.0)
        prompt, output = rng.randint(150, 450), rng.randint(60, 120)
        start = 1000 + i
        specs.append(
            cb.RequestSpec(
                f"r{i + 1}",
                tuple(range(start, start + prompt)),
                200,
                arrival_s=now,
                output_len=output,
                sampling=cb.Sampling(ignore_eos=True),
            )
        )
    return specs


def make() -> cb.Trace:
    s = cb.Session(
        requests(),
        runner="sim",
        model="Llama-3.1-8B",
        modelled_device="NVIDIA A100 80GB SXM",
        discipline="vllm",
        max_num_seqs=32,
        num_blocks=400,
        block_size=16,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
    )
    s.run(max_steps=BUDGET_STEP)
    s.configure(max_num_batched_tokens=384)
    s.run(max_steps=WATERMARK_STEP - BUDGET_STEP)
    s.configure(watermark=0.5)
    s.run()
    return s.trace


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    print(make().save(FILE), FILE.stat().st_size)
