"""Records a real vLLM's own metrics on small workloads. Knows the workloads; the worker knows vLLM.

`cbviz bench record FOLDER --metrics` writes one JSON file a workload. It made the test data in
tests/interop/vllm_metrics, which docs/metrics.md is tested with.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cbviz.bench import vllm_metrics_worker
from cbviz.bench.peer import PeerError, Worker, find_python
from cbviz.config import ConfigError

CONFIG = {
    "block_size": 32,
    "num_blocks": 20,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,
    "max_model_len": 256,
    "enable_prefix_caching": True,
    "policy": "fcfs",
}
VOCABULARY = range(5, 500)


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.choice(VOCABULARY) for _ in range(length)]


def _requests(
    seed: int, count: int, prompt: tuple[int, int], outputs: tuple[int, int], every: int = 1, shared: int = 0
) -> list[dict[str, Any]]:
    """`count` requests, one each `every` steps; every prompt begins with the same `shared` tokens."""
    rng = random.Random(seed)
    stem = _prompt(rng, shared)
    return [
        {
            "id": f"r{i}",
            "arrival_step": i * every,
            "prompt_token_ids": stem + _prompt(rng, rng.randint(*prompt)),
            "max_tokens": rng.randint(*outputs),
        }
        for i in range(count)
    ]


def _preemption() -> dict[str, Any]:
    return {"config": CONFIG, "requests": _requests(1, 8, (40, 70), (40, 90))}


def _shared_prefix() -> dict[str, Any]:
    return {"config": CONFIG, "requests": _requests(2, 8, (5, 40), (10, 60), every=3, shared=96)}


def _priority() -> dict[str, Any]:
    requests = _requests(3, 8, (40, 70), (30, 70), every=2)
    for i, q in enumerate(requests):
        q["priority"] = (3 * i) % 4
    return {"config": {**CONFIG, "policy": "priority"}, "requests": requests}


def _aborts() -> dict[str, Any]:
    requests = _requests(4, 10, (40, 70), (40, 90))
    for i, after in ((0, 30), (3, 6), (5, 20), (7, 1), (9, 3)):  # running, in its prefill, preempted, waiting
        requests[i]["abort_step"] = requests[i]["arrival_step"] + after
    return {"config": CONFIG, "requests": requests}


def _ends() -> dict[str, Any]:
    requests = _requests(5, 8, (20, 60), (1, 80), every=4)
    for q in requests[::2]:
        q["max_tokens"] = 200  # more than max_model_len leaves room for
    for q in requests[1::2]:
        q["stop_token_ids"] = list(range(0, 512, 2))
    return {"config": {**CONFIG, "max_model_len": 96, "enable_prefix_caching": False}, "requests": requests}


def _drafts() -> dict[str, Any]:
    rng = random.Random(6)
    requests = _requests(6, 8, (1, 1), (20, 70), every=2)
    for q in requests:
        q["prompt_token_ids"] = _prompt(rng, rng.randint(3, 9)) * 6
    return {
        "config": {
            **CONFIG,
            "num_blocks": 16,
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        },
        "requests": requests,
    }


def _sequences() -> dict[str, Any]:
    requests = _requests(7, 5, (40, 90), (10, 40), every=5)
    for i, q in enumerate(requests):
        q["n"] = 1 + i % 3
        q["stop_token_ids"] = list(range(0, 512, 64))
    return {"config": {**CONFIG, "num_blocks": 60}, "requests": requests}


WORKLOADS: dict[str, Callable[[], dict[str, Any]]] = {
    "preemption": _preemption,
    "shared-prefix": _shared_prefix,
    "priority": _priority,
    "aborts": _aborts,
    "ends": _ends,
    "drafts": _drafts,
    "sequences": _sequences,
}


def record_metrics(
    folder: Path, vllm_python: str | None = None, progress: Callable[[int, int, str], None] | None = None
) -> str:
    """Writes a recording of each workload into `folder` and returns vLLM's version.

    Takes about a minute a workload, most of it vLLM's start. Raises ConfigError where there is no vLLM.
    """
    python = find_python(vllm_python)
    if python is None:
        raise ConfigError("vLLM is not installed here: name a Python that has it with --vllm-python PATH")
    folder.mkdir(parents=True, exist_ok=True)
    tell = progress or (lambda done, total, note: None)
    version = ""
    for i, (name, make) in enumerate(WORKLOADS.items()):
        tell(i, len(WORKLOADS), name)
        with Worker(python, vllm_metrics_worker.__file__) as worker:
            try:
                version = str(worker.ask("hello")["vllm"])
            except PeerError as e:
                raise ConfigError(f"no vLLM can be imported by {python}: {e}") from e
            played = worker.ask("play", **make())
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in played.pop("steps"))
        head = json.dumps({"workload": name, "engine": f"vllm {version}", **played}, separators=(",", ":"))
        (folder / f"{name}.json").write_text(f'{head[:-1]},"steps":[\n{lines}\n]}}\n', encoding="utf-8")
    return version
