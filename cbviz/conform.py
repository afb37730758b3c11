"""Replays recordings of vLLM's own scheduler through ours and compares every key of every step. Behind `cbviz conform`.

Knows the recordings' format and the control plane; needs no model, unless a recording is of a whole engine with real tokens.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbviz import events as ev
from cbviz.config import EngineConfig
from cbviz.core.check import check
from cbviz.core.scheduler import Scheduler
from cbviz.messages import RequestSpec, RunnerOutput, Sampling

STEP_KEYS = ("added", "aborted", "scheduled", "new", "resumed", "preempted", "running", "waiting", "blocks", "free_blocks", "sampled", "finished", "free_blocks_after")


@dataclass(frozen=True)
class Outcome:
    """What came of one recording. `step` and `key` say where it first differed; both are None if it is equal."""

    name: str
    equal: bool
    steps: int
    step: int | None = None
    key: str | None = None
    ours: Any = None
    theirs: Any = None
    skipped: str = ""


def find(paths: list[str | Path]) -> list[Path]:
    """The recordings in files and folders, sorted. Raises FileNotFoundError naming a path that is not there."""
    out: list[Path] = []
    for p in map(Path, paths):
        if p.is_dir():
            out += sorted(x for pattern in ("*.json.gz", "*.json", "*.jsonl.gz", "*.jsonl") for x in p.rglob(pattern) if x.name not in ("workload.json", "smollm2-greedy.json"))
        elif p.exists():
            out.append(p)
        else:
            raise FileNotFoundError(f"no recording at {p}")
    return out


def read(path: Path) -> Any:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    return json.loads(text) if ".jsonl" not in path.name else [json.loads(line) for line in text.splitlines() if line.strip()]


def scheduler_config(c: dict[str, Any]) -> EngineConfig:
    """A recording's config as ours: the `vllm` discipline with its knobs."""
    return EngineConfig(
        discipline="vllm", policy=c["policy"], max_num_seqs=c["max_num_seqs"], max_num_batched_tokens=c["max_num_batched_tokens"], max_model_len=c["max_model_len"],
        block_size=c["block_size"], num_blocks=c["num_blocks"], enable_prefix_caching=c["enable_prefix_caching"], enable_chunked_prefill=c["enable_chunked_prefill"],
        long_prefill_token_threshold=c["long_prefill_token_threshold"], scheduler_reserve_full_isl=c["scheduler_reserve_full_isl"], sliding_window=c["sliding_window"],
        watermark=c["watermark"],
    )


def replay(d: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Plays a scenario through our scheduler with the recording's fake model; yields one object a step, keyed as the recording."""
    s = Scheduler(scheduler_config(d["config"]))
    order = {q["id"]: i for i, q in enumerate(d["requests"])}
    outputs = dict.fromkeys(order, 0)
    open_ids = set(order)
    last_input = max(max(q["arrival_step"], q.get("abort_step", 0)) for q in d["requests"])
    for step in range(10**9):
        if not open_ids and step > last_input:
            return
        s.begin()
        added, aborted = [], []
        for q in d["requests"]:
            if q["arrival_step"] == step:
                s.add(RequestSpec(q["id"], tuple(q["prompt_token_ids"]), q["max_tokens"], priority=q.get("priority", 0), sampling=Sampling(ignore_eos=True)))
                added.append(q["id"])
        for q in d["requests"]:
            if q.get("abort_step") == step and s.abort(q["id"]):
                aborted.append(q["id"])
        s.drain()
        plan = s.schedule()
        check(s)
        events = s.drain()
        row: dict[str, Any] = {
            "step": step,
            "added": added,
            "aborted": aborted,
            "scheduled": [[c.request_id, c.num_tokens, c.start] for c in plan.chunks],
            "new": [e.request_id for e in events if isinstance(e, ev.Admitted) and not e.resumed],
            "resumed": sorted((e.request_id for e in events if isinstance(e, ev.Admitted) and e.resumed), key=order.__getitem__),
            "preempted": sorted((e.request_id for e in events if isinstance(e, ev.Preempted)), key=order.__getitem__),
            "running": [r.request_id for r in s.running],
            "waiting": [r.request_id for r in s.waiting],
            "blocks": {r.request_id: list(r.block_ids) for r in s.running},
            "free_blocks": s.pool.num_free,
        }
        tokens: dict[str, list[int]] = {}
        for c in plan.chunks:
            if c.sample:
                i, k = order[c.request_id], outputs[c.request_id]
                tokens[c.request_id] = [1000 + (i * 131 + k * 17) % 499]
                outputs[c.request_id] += 1
        s.update(plan, RunnerOutput(tokens))
        check(s)
        done = {e.request_id for e in s.drain() if isinstance(e, ev.Finished)}
        open_ids -= done | set(aborted)
        row["sampled"] = list(tokens)
        row["finished"] = sorted(done, key=order.__getitem__)
        row["free_blocks_after"] = s.pool.num_free
        yield row


def conform_scenario(name: str, d: dict[str, Any]) -> Outcome:
    """Replays one fake-model scenario and finds the first step and key that differ."""
    theirs = d["steps"]
    n = 0
    for n, ours in enumerate(replay(d), 1):
        if n > len(theirs):
            return Outcome(name, False, len(theirs), n - 1, "steps", f"step {n - 1} runs", "the recording has ended")
        for key in STEP_KEYS:
            if ours[key] != theirs[n - 1][key]:
                return Outcome(name, False, len(theirs), n - 1, key, ours[key], theirs[n - 1][key])
    if n < len(theirs):
        return Outcome(name, False, len(theirs), n, "steps", "everything has finished", f"{len(theirs)} steps")
    return Outcome(name, True, n)


def conform(paths: list[str | Path], progress: Callable[[int, int], None] | None = None) -> list[Outcome]:
    """Replays all recordings under `paths`."""
    files = find(paths)
    out = []
    for i, path in enumerate(files):
        if progress is not None:
            progress(i, len(files))
        d = read(path)
        name = path.name.split(".")[0]
        if isinstance(d, dict) and "steps" in d and "num_spec_tokens" not in d["config"]:
            out.append(conform_scenario(name, d))
        else:
            out.append(Outcome(name, False, 0, skipped="a kind of recording that this version does not replay"))
    return out
