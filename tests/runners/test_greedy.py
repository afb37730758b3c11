"""The real model under every discipline says what transformers says, one request at a time: the recorded
greedy continuations.

Batch size, block size, chunking, prefix hits and preemption may not change a token, except from a first
position on where the two best candidates are closer than 0.001 nats: there a float32 engine may choose the
other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbviz.messages import RequestSpec
from cbviz.session import Session
from cbviz.trace.metrics import metrics

TIE = 0.001

CASES: dict[str, dict[str, Any]] = {
    "static": {"max_num_seqs": 8},
    "static-padded": {"max_num_seqs": 4, "block_size": 7},
    "orca": {"max_num_seqs": 8, "block_size": 32, "num_blocks": 80},
    "paged": {"max_num_seqs": 8, "block_size": 4, "num_blocks": 150},
    "chunked": {"max_num_seqs": 8, "max_num_batched_tokens": 24, "enable_prefix_caching": False},
    "vllm": {"max_num_seqs": 8, "block_size": 1, "num_blocks": 400, "max_num_batched_tokens": 64},
    "no-evict": {"max_num_seqs": 3},
    "max-util": {"max_num_seqs": 8, "num_blocks": 40},
    "retract": {"max_num_seqs": 8, "num_blocks": 40, "max_num_batched_tokens": 48},
    "vllm alone": {"max_num_seqs": 1},
}
PREEMPTS = ("paged", "vllm", "max-util")
"""Cases whose pool is too small on purpose: a run without a preemption would prove nothing there."""


def recorded(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "smollm2-greedy.json").read_text("utf-8"))["requests"])


@pytest.mark.model
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_the_recorded_ones(name: str, conformance: Path) -> None:
    requests = recorded(conformance)
    if name == "vllm alone":
        requests = requests[:4]
    specs = [
        RequestSpec(f"q{i}", tuple(q["prompt_token_ids"]), q["max_tokens"], arrival_step=1 + i // 3)
        for i, q in enumerate(requests)
    ]
    s = Session(
        specs, runner="torch", discipline=name.split()[0], precision="exact", clock="modelled", **CASES[name]
    )
    s.run()
    for i, q in enumerate(requests):
        ours, theirs = s.request(f"q{i}").output_token_ids, q["output_token_ids"]
        same = next(
            (k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
            min(len(ours), len(theirs)),
        )
        tie = same < len(theirs) and q["gap_to_second"][same] < TIE
        assert ours == theirs or tie, (
            f"q{i} differs at output token {same}: {ours[same : same + 3]} against {theirs[same : same + 3]}"
        )
    found = metrics(s.trace)
    if name in PREEMPTS:
        assert found["num_preemptions"] > 0
    if CASES[name].get("enable_prefix_caching", True) and name != "vllm alone":
        assert found["prefix_hit_tokens"] > 0
    s.close()
