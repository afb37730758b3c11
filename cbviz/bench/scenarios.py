"""Random scenarios for a scheduler, in the format of the recordings: a config, and requests with arrival and
abort steps.

Knows the format alone. Ranges follow the recordings of vLLM 0.32; the corners where schedulers differ (tiny
pools, priority, shared prefixes, windows, aborts) are drawn more often than chance would.
"""

from __future__ import annotations

import random
from typing import Any


def scenario(seed: int, speculative: bool = False) -> dict[str, Any]:
    """`{"name", "seed", "config", "requests"}`; equal seeds, equal scenarios.

    Every request fits into the pool alone, so that all finish.

    `speculative`: the same, with drafts by the recordings' fake proposer.
    """
    rng = random.Random(seed)
    chunked = rng.random() < 0.8
    size = rng.choice((1, 2, 4, 4, 8, 16, 16, 32))
    window = rng.choice((8, 12, 16, 24, 40, 64)) if rng.random() < 0.25 else 0
    limit = 2048 if rng.random() < 0.8 else rng.choice((48, 100, 160))
    config: dict[str, Any] = {
        "block_size": size,
        "num_blocks": 0,
        "max_num_seqs": rng.choice((1, 2, 4, 4, 8, 8, 16)),
        "max_num_batched_tokens": rng.choice((16, 32, 64, 128, 512))
        if chunked
        else max(limit, 2048 if rng.random() < 0.5 else limit),
        "max_model_len": limit,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": rng.random() < 0.7,
        "policy": rng.choice(("fcfs", "priority")),
        "long_prefill_token_threshold": rng.choice((0, 0, 5, 24, 40)),
        "scheduler_reserve_full_isl": rng.random() < 0.6,
        "sliding_window": window,
        "watermark": rng.choice((0.0, 0.0, 0.0, 0.0, 0.05, 0.2)),
    }
    n = rng.randint(2, 24)
    longest = min(limit - 2, rng.choice((12, 40, 60, 100, 300)))
    most_out = rng.choice((4, 20, 60, 120))
    stems = [[rng.randrange(999) for _ in range(longest)] for _ in range(rng.randint(1, 3))]
    shared = rng.choice((0.0, 0.5, 0.9))
    urgent_last = config["policy"] == "priority" and rng.random() < 0.4
    """Later requests are more urgent: they take the blocks of half-done prefills that stand before them in
    the running queue.
    """
    requests: list[dict[str, Any]] = []
    step = 0
    for i in range(n):
        if i and rng.random() < 0.5:
            step += rng.choice((1, 1, 2, 5, 20))
        length = rng.randint(1, longest)
        prompt = [rng.randrange(999) for _ in range(length)]
        if rng.random() < shared:
            part = rng.randint(1, length)
            prompt[:part] = rng.choice(stems)[:part]
        q: dict[str, Any] = {
            "id": f"r{i}",
            "arrival_step": step,
            "prompt_token_ids": prompt,
            "max_tokens": rng.randint(1, most_out),
        }
        if config["policy"] == "priority":
            q["priority"] = n - i if urgent_last else rng.choice((-1, 0, 0, 1, 2))
        if rng.random() < 0.15:
            q["abort_step"] = step + rng.choice((1, 2, 5, 10, 30))
        requests.append(q)
    need = max(-(-min(len(q["prompt_token_ids"]) + q["max_tokens"], limit) // size) for q in requests)
    if window:
        need = min(need, -(-min(window - 1 + config["max_num_batched_tokens"], limit) // size) + 1)
    if speculative:
        extra = random.Random(f"drafts {seed}")
        k = extra.choice((1, 1, 2, 3, 3, 4, 5, 7))
        config |= {
            "num_spec_tokens": k,
            "num_lookahead_tokens": extra.choice((0, k)),
            "proposer": extra.choice(("fixed", "varied")),
        }
        if 0 < config["long_prefill_token_threshold"] <= k:
            config["long_prefill_token_threshold"] = (
                k + 1
            )  # vLLM fails an assertion where the threshold cuts padding drafts
        need += -(-(k + config["num_lookahead_tokens"]) // size)
        for q in requests:
            if extra.random() < 0.15:
                q["prompt_token_ids"] = q["prompt_token_ids"][:1]  # one token to compute: the padding rule
    config["num_blocks"] = 1 + need + rng.choice((0, 1, 2, need // 2, need, 3 * need))
    config["num_blocks"] += int(2 * config["watermark"] * config["num_blocks"])  # room above the watermark
    return {"name": f"s{seed}", "seed": seed, "config": config, "requests": requests}
