"""Tokens of the real model in four small workloads, greedy and exact."""

from __future__ import annotations

from functools import cache
from typing import Any

import cbviz as cb

PROMPTS = (
    "The capital of France is",
    "The capital of France is a city. It",
    "Once upon a time there was a small",
    "One, two, three, one, two, three, one,",
    "Water boils at",
)
BASE: dict[str, Any] = {
    "discipline": "vllm",
    "precision": "exact",
    "clock": "modelled",
    "block_size": 4,
    "num_blocks": 64,
    "max_model_len": 40,
    "max_num_seqs": 4,
}
WORKLOADS: dict[str, dict[str, Any]] = {
    "cached-prefixes": {"enable_prefix_caching": True, "max_num_batched_tokens": 12},
    "tight-pool": {"num_blocks": 12},
    "drafts": {"speculative": "ngram", "num_speculative_tokens": 3},
    "window": {"sliding_window": 8, "discipline": "chunked", "max_num_batched_tokens": 10},
}
MAX_TOKENS = 12


def names() -> list[str]:
    return [f"tokens-{name}" for name in WORKLOADS]


@cache
def parts(name: str) -> dict[str, Any]:
    """The tokens of each request, and how many steps they took."""
    s = cb.Session(None, runner="torch", **{**BASE, **WORKLOADS[name.removeprefix("tokens-")]})
    ids = [s.add(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    s.run(max_steps=300)
    outputs = {i: s.outputs(i)[0] for i in ids}
    s.close()
    return {"tokens": outputs, "steps": len(s.trace)}


def about(name: str) -> str:
    return " ".join(f"{k}={v}" for k, v in WORKLOADS[name.removeprefix("tokens-")].items())
