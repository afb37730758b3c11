"""Replays recordings of vLLM's own scheduler through ours and compares every key of every step.

Behind `cbviz conform`.

Knows the recordings' format and the control plane; needs no model, unless a recording is of a whole engine
with real tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbviz import events as ev
from cbviz import textfile
from cbviz.config import ConfigError, EngineConfig
from cbviz.core.check import check
from cbviz.core.scheduler import Scheduler
from cbviz.messages import RequestSpec, RunnerOutput, Sampling, SchedulerOutput
from cbviz.runners.base import Runner

LISTS: dict[str, tuple[bool, str]] = {
    "added": (True, "the order in which add_request was called"),
    "aborted": (True, "the order in which finish_requests was called: blocks come back in it"),
    "scheduled": (
        True,
        "num_scheduled_tokens, a dict filled as requests are scheduled: the order of the batch",
    ),
    "new": (True, "scheduled_new_reqs, a list in order of admission"),
    "resumed": (False, "resumed_req_ids is a set"),
    "preempted": (False, "preempted_req_ids is a set; the waiting queue and the free blocks show the order"),
    "finished_told": (False, "finished_req_ids is a set, whose order changes from run to run"),
    "running": (
        True,
        "a list: the order in which requests get their tokens, and in which they are preempted",
    ),
    "waiting": (True, "a queue"),
    "sampled": (True, "requests that sampled, in the order of the batch"),
    "finished": (False, "put together from the requests' statuses, by whoever recorded"),
}
"""Each compared key that is a list, or may be one: whether vLLM orders it, and why.

Of the unordered ones the members are compared.

The other keys are numbers, or objects by request id, which Python compares without regard to their order.
Tables of block ids and lists of tokens inside an object are always compared in order.
"""
ENGINE_KEYS = (
    "added",
    "scheduled",
    "new",
    "resumed",
    "preempted",
    "finished_told",
    "running",
    "waiting",
    "blocks",
    "new_blocks",
    "free_blocks",
    "sampled",
    "appended",
    "finished",
    "computed_after",
    "free_blocks_after",
)
SPEC_KEYS = ("drafts", "accepted", "proposed")
STEP_KEYS = (
    "added",
    "aborted",
    "scheduled",
    "new",
    "resumed",
    "preempted",
    "running",
    "waiting",
    "blocks",
    "free_blocks",
    "sampled",
    "finished",
    "free_blocks_after",
)


@dataclass(frozen=True)
class Outcome:
    """What came of one recording.

    `step` and `key` say where it first differed; both are None if it is equal.
    """

    name: str
    equal: bool
    steps: int
    step: int | None = None
    key: str | None = None
    ours: Any = None
    theirs: Any = None
    skipped: str = ""


def find(paths: list[str | Path]) -> list[Path]:
    """The recordings in files and folders, sorted.

    Raises FileNotFoundError naming a path that is not there.
    """
    out: list[Path] = []
    for p in map(Path, paths):
        if p.is_dir():
            out += sorted(
                x
                for pattern in ("*.json.gz", "*.json", "*.jsonl.gz", "*.jsonl")
                for x in p.rglob(pattern)
                if x.name not in ("workload.json", "smollm2-greedy.json")
            )
        elif p.exists():
            out.append(p)
        else:
            raise FileNotFoundError(f"no recording at {p}")
    return out


def read(path: Path) -> Any:
    """A recording as JSON has it.

    Raises ConfigError naming a file that is none; a packed one may unpack to 1 GiB, or
    CBVIZ_MAX_UNPACKED_BYTES.
    """
    with textfile.open_bytes(path) as stream:
        text = textfile.text_of(stream.read(), path, 1)
    try:
        return (
            json.loads(text)
            if ".jsonl" not in path.name
            else [json.loads(line) for line in text.split("\n") if line.strip()]
        )
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path.name} is not a recording that can be replayed: {str(e)[:200]}") from None


def scheduler_config(c: dict[str, Any]) -> EngineConfig:
    """A recording's config as ours: the `vllm` discipline with its knobs."""
    return EngineConfig(
        discipline="vllm",
        policy=c["policy"],
        max_num_seqs=c["max_num_seqs"],
        max_num_batched_tokens=c["max_num_batched_tokens"],
        max_model_len=c["max_model_len"],
        block_size=c["block_size"],
        num_blocks=c["num_blocks"],
        enable_prefix_caching=c["enable_prefix_caching"],
        enable_chunked_prefill=c["enable_chunked_prefill"],
        long_prefill_token_threshold=c["long_prefill_token_threshold"],
        scheduler_reserve_full_isl=c["scheduler_reserve_full_isl"],
        sliding_window=c["sliding_window"],
        watermark=c.get("watermark", 0.0),
        speculative=_method(c.get("num_spec_tokens", 0), c.get("num_lookahead_tokens", 0)),
        num_speculative_tokens=c.get("num_spec_tokens") or 3,
    )


def _method(num_drafts: int, num_lookahead: int) -> str:
    """A proposer of ours that takes as many slots ahead as the recorded one."""
    if num_lookahead not in (0, num_drafts):
        raise ValueError(
            f"num_lookahead_tokens is {num_lookahead}; 0 and num_spec_tokens, {num_drafts}, are known"
        )
    return "off" if not num_drafts else "self-draft" if num_lookahead else "ngram"


def replay(d: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Plays a scenario through our scheduler with the recording's fake model; yields one object a step, keyed
    as the recording.
    """
    s = Scheduler(scheduler_config(d["config"]), keep_planned_hashes=True)
    requests = d["requests"]
    order = {q["id"]: i for i, q in enumerate(requests)}
    k, limit, fixed = (
        d["config"].get("num_spec_tokens", 0),
        d["config"]["max_model_len"],
        d["config"].get("proposer") == "fixed",
    )

    def token(i: int, p: int) -> int:
        return 1000 + (i * 131 + p * 17) % 499

    def fake_model(plan: SchedulerOutput) -> RunnerOutput:
        """Each request has one fixed output; a proposal is right as far as a formula says."""
        tokens: dict[str, list[int]] = {}
        drafts: dict[str, list[int]] = {}
        for c in plan.chunks:
            if not c.sample:
                continue
            i, r = order[c.request_id], s.state.requests[c.request_id]
            p = r.num_output_tokens
            right = 0
            while (
                right < c.num_draft
                and c.draft_token_ids is not None
                and c.draft_token_ids[right] == token(i, p + right)
            ):
                right += 1
            tokens[c.request_id] = [token(i, p + j) for j in range(right + 1)]
            after = min(p + right + 1, r.max_tokens, limit - r.num_prompt_tokens)
            n = 0 if r.num_prompt_tokens + after >= limit else k if fixed else (i * 5 + after * 3) % (k + 1)
            drafts[c.request_id] = [
                token(i, after + j) if j < (i * 7 + after * 3) % (k + 1) else 999 for j in range(n)
            ]
        return RunnerOutput(tokens, draft_ids=drafts if k else None)

    last_input = max(max(q["arrival_step"], q.get("abort_step", 0)) for q in requests)
    step = 0
    while step <= last_input or s.has_unfinished:
        added = [q for q in requests if q["arrival_step"] == step]
        aborted = [q["id"] for q in requests if q.get("abort_step") == step]
        row = _play(s, step, added, aborted, fake_model, ignore_eos=True)
        row["tokens"] = row["appended"]
        row["sampled"], row["finished"] = list(row["sampled"]), list(row["finished"])
        yield row
        step += 1


def _play(
    s: Scheduler,
    step: int,
    added: list[dict[str, Any]],
    aborted: list[str],
    execute: Callable[[SchedulerOutput], RunnerOutput],
    ignore_eos: bool,
) -> dict[str, Any]:
    """One step of ours, described in the recordings' keys."""
    s.begin()
    for q in added:
        s.add(
            RequestSpec(
                q["id"],
                tuple(q["prompt_token_ids"]),
                q["max_tokens"],
                priority=q.get("priority", 0),
                sampling=Sampling(ignore_eos=ignore_eos),
            )
        )
    gone = [i for i in aborted if s.abort(i)]
    s.drain()
    plan = s.schedule()
    check(s)
    events = s.drain()
    new_blocks: dict[str, list[int]] = {}
    for e in events:
        if isinstance(e, (ev.Shared, ev.Allocated)):
            new_blocks.setdefault(e.request_id, []).extend(e.block_ids)
        elif isinstance(e, ev.Preempted):
            new_blocks.pop(e.request_id, None)
    row: dict[str, Any] = {
        "step": step,
        "added": [q["id"] for q in added],
        "aborted": gone,
        "scheduled": [[c.request_id, c.num_tokens, c.start] for c in plan.chunks],
        "new": [e.request_id for e in events if isinstance(e, ev.Admitted) and not e.resumed],
        "resumed": [e.request_id for e in events if isinstance(e, ev.Admitted) and e.resumed],
        "preempted": [e.request_id for e in events if isinstance(e, ev.Preempted)],
        "finished_told": list(plan.finished_ids),
        "running": [r.request_id for r in s.state.running],
        "waiting": [r.request_id for r in s.state.waiting],
        "blocks": {r.request_id: list(r.block_ids) for r in s.state.running},
        "new_blocks": new_blocks,
        "free_blocks": s.state.pool.num_free,
    }
    row["drafts"] = {c.request_id: c.draft_token_ids for c in plan.chunks if c.num_draft}
    out = execute(plan)
    s.update(plan, out)
    check(s)
    after = s.drain()
    row["sampled"] = {c.request_id: out.token_ids[c.request_id] for c in plan.chunks if c.sample}
    row["appended"] = {e.request_id: list(e.token_ids) for e in after if isinstance(e, ev.Sampled)}
    row["finished"] = {
        e.request_id: [
            _STATUS[e.reason],
            e.stop_id if e.stop_id >= 0 and e.stop_id not in s.state.eos_token_ids else None,
        ]
        for e in after
        if isinstance(e, ev.Finished)
    }
    row["computed_after"] = {
        c.request_id: s.state.requests[c.request_id].num_computed_tokens
        for c in plan.chunks
        if c.request_id in s.state.requests
    }
    row["free_blocks_after"] = s.state.pool.num_free
    row["accepted"] = {c.request_id: len(out.token_ids[c.request_id]) - 1 for c in plan.chunks if c.num_draft}
    row["proposed"] = {
        r.request_id: r.draft_token_ids for r in s.state.requests.values() if r.draft_token_ids
    }
    return row


_STATUS = {
    "length": "FINISHED_LENGTH_CAPPED",
    "max_model_len": "FINISHED_LENGTH_CAPPED",
    "stop": "FINISHED_STOPPED",
}


def replay_engine(
    lines: list[dict[str, Any]], requests: list[dict[str, Any]], runner: Runner
) -> Iterator[dict[str, Any]]:
    """Plays a recording of a whole vLLM with a real model through our scheduler and runner; yields one object
    a step.
    """
    head = lines[0]
    s = Scheduler(engine_config(head), eos_token_ids=runner.eos_token_ids, keep_planned_hashes=True)
    runner.reset()
    by_id = {q["id"]: q for q in requests}
    theirs = [x["added"] for x in lines if x["kind"] == "step"] if head["options"].get("alone") else None
    last = max(q["arrival_step"] for q in requests)
    step = 0
    while (step < len(theirs) if theirs is not None else step <= last) or s.has_unfinished:
        if theirs is not None:
            added = [by_id[i] for i in theirs[step]] if step < len(theirs) else []
        else:
            added = [q for q in requests if q["arrival_step"] == step]
        yield _play(s, step, added, [], runner.execute, ignore_eos=False)
        step += 1


def engine_config(head: dict[str, Any]) -> EngineConfig:
    """The config line of an in-process recording as ours, in exact precision."""
    a, r = head["engine_args"], head["resolved"]
    drafts: dict[str, Any] = {}
    if asked := a.get("speculative_config"):
        if asked["method"] != "ngram":
            raise ValueError(
                f"speculative_config has method {asked['method']!r}; of whole engines 'ngram' is replayed"
            )
        drafts = {
            "speculative": "ngram",
            **{k: asked[k] for k in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")},
        }
    return EngineConfig(
        discipline="vllm",
        policy=a["scheduling_policy"],
        max_num_seqs=a["max_num_seqs"],
        max_num_batched_tokens=a["max_num_batched_tokens"],
        max_model_len=a["max_model_len"],
        block_size=a["block_size"],
        num_blocks=r["num_blocks"],
        enable_prefix_caching=a["enable_prefix_caching"],
        enable_chunked_prefill=a["enable_chunked_prefill"],
        scheduler_reserve_full_isl=r["reserve_full_isl"],
        precision="exact",
        seed=a["seed"],
        **drafts,
    )


def same(key: str, ours: Any, theirs: Any) -> bool:
    """Whether a key's two values are equal, in order only where vLLM has one."""
    if isinstance(ours, list) and isinstance(theirs, list) and not LISTS[key][0]:
        return sorted(ours) == sorted(theirs)
    return bool(ours == theirs)


def _compare(
    name: str, rows: Iterator[dict[str, Any]], theirs: list[dict[str, Any]], keys: tuple[str, ...]
) -> Outcome:
    """The first step and key that differ, in the recording's own step numbers (from 0)."""
    n = 0
    for n, ours in enumerate(rows, 1):
        if n > len(theirs):
            return Outcome(
                name, False, len(theirs), n - 1, "steps", f"step {n - 1} runs", "the recording has ended"
            )
        for key in keys:
            if not same(key, ours[key], theirs[n - 1][key]):
                return Outcome(name, False, len(theirs), n - 1, key, ours[key], theirs[n - 1][key])
    if n < len(theirs):
        return Outcome(
            name, False, len(theirs), n, "steps", "everything has finished", f"{len(theirs)} steps"
        )
    return Outcome(name, True, n)


def conform_scenario(name: str, d: dict[str, Any]) -> Outcome:
    """Replays one fake-model scenario and finds the first step and key that differ."""
    keys = (
        (*STEP_KEYS, *SPEC_KEYS, "tokens", "computed_after")
        if d["config"].get("num_spec_tokens")
        else STEP_KEYS
    )
    return _compare(name, replay(d), d["steps"], keys)


def conform_engine(
    name: str,
    lines: list[dict[str, Any]],
    requests: list[dict[str, Any]],
    runner_for: Callable[[EngineConfig], Runner],
) -> Outcome:
    """Replay one in-process recording with the real model and compare the tokens too."""
    theirs = [x for x in lines if x["kind"] == "step"]
    keys = (*ENGINE_KEYS, *SPEC_KEYS) if lines[0]["options"].get("spec") else ENGINE_KEYS
    return _compare(name, replay_engine(lines, requests, runner_for(engine_config(lines[0]))), theirs, keys)


def conform(
    paths: list[str | Path], progress: Callable[[int, int, str], None] | None = None
) -> list[Outcome]:
    """Replays all recordings under `paths`. `progress(done, total, name)` is called before each.

    Recordings of a whole engine need the real model (SmolLM2-135M-Instruct); it is loaded when the first one
    comes.
    """
    files = find(paths)
    out = []
    model: list[Any] = []

    def runner_for(config: EngineConfig) -> Runner:
        from cbviz.model import loader
        from cbviz.runners.torch_runner import TorchRunner

        if not model:
            model.append(loader.load("smollm2"))
        return TorchRunner(model[0], config)

    for i, path in enumerate(files):
        name = path.name.split(".")[0]
        if progress is not None:
            progress(i, len(files), name)
        d = read(path)
        if isinstance(d, dict) and "steps" in d:
            out.append(conform_scenario(name, d))
        elif isinstance(d, list) and d and d[0].get("kind") == "config":
            out.append(
                conform_engine(name, d, read(path.with_name(d[0]["workload"]))["requests"], runner_for)
            )
        else:
            out.append(Outcome(name, False, 0, skipped="not a recording"))
    return out
