"""vLLM's own v1 scheduler behind pipes: plays scenarios with the recordings' fake model, and times decode
steps.

Run by the Python that has vLLM, which need not have cbviz: this file imports nothing of it. Reads one JSON
object a line from stdin and answers each with one on the real stdout (whatever else is printed goes to
stderr):

    {"op": "hello"}                                   -> {"vllm": version}
    {"op": "play", "config": ..., "requests": ...}    -> a recording: the two, and `steps`, `finish`, `num_preemptions`
    {"op": "decode", "config": ..., "context": c}     -> {}: `max_num_seqs` requests, prefilled (`decode_prompts`)
    {"op": "time", "steps": k}                        -> {"schedule_s": [...], "update_s": [...], "wall_s": [...]}, k decode steps of these, CPU time of the thread, and
                                                         wall time of both

An exception is answered with {"error": text}. Formats are those of the recordings (`cbviz.conform`).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from time import perf_counter, thread_time
from typing import Any

if __package__:
    from cbviz.bench.pipe import serve
else:  # run as a script, by a Python that need not have cbviz: its own folder is where Python looks first
    from pipe import serve  # type: ignore[import-not-found, no-redef]

    sys.path.pop(0)  # this folder has a `kernels`, which transformers would take for the package of that name

QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


class Peer:
    """One vLLM in this process: its classes, and a model configuration that never loads a model."""

    def __init__(self) -> None:
        import vllm
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        self.version = vllm.__version__
        self.sampling = SamplingParams
        init_none_hash(sha256)
        self.hasher = lambda size: get_request_block_hasher(size, sha256)
        self.folder = tempfile.TemporaryDirectory(prefix="cbviz-vllm-")
        shape = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "num_hidden_layers": 1,
            "vocab_size": 4096,
            "max_position_embeddings": 1 << 20,
            "torch_dtype": "float32",
        }
        with open(os.path.join(self.folder.name, "config.json"), "w", encoding="utf-8") as f:
            json.dump(shape, f)
        self._model: dict[int, Any] = {}

    def scheduler(self, c: dict[str, Any]) -> Any:
        """A Scheduler with a recording's config."""
        import torch
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            SlidingWindowSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        limit, size = c["max_model_len"], c["block_size"]
        if limit not in self._model:
            self._model[limit] = ModelConfig(
                model=self.folder.name, skip_tokenizer_init=True, dtype="float32", max_model_len=limit
            )
        settings = SchedulerConfig(
            max_num_seqs=c["max_num_seqs"],
            max_num_batched_tokens=c["max_num_batched_tokens"],
            max_model_len=limit,
            is_encoder_decoder=False,
            policy=c["policy"],
            enable_chunked_prefill=c["enable_chunked_prefill"],
            long_prefill_token_threshold=c["long_prefill_token_threshold"],
            scheduler_reserve_full_isl=c["scheduler_reserve_full_isl"],
            watermark=c["watermark"],
            async_scheduling=False,
        )
        cache = CacheConfig(
            block_size=32, enable_prefix_caching=c["enable_prefix_caching"]
        )  # 32: the CPU platform would have an opinion on others
        config = VllmConfig(
            model_config=self._model[limit],
            cache_config=cache,
            scheduler_config=settings,
            device_config=DeviceConfig("cpu"),
        )
        for name in (
            "max_num_batched_tokens",
            "long_prefill_token_threshold",
            "scheduler_reserve_full_isl",
            "enable_chunked_prefill",
            "watermark",
            "max_num_seqs",
        ):
            setattr(settings, name, c[name])  # VllmConfig may have adapted them to the platform
        cache.enable_prefix_caching = c["enable_prefix_caching"]
        cache.block_size, cache.num_gpu_blocks = size, c["num_blocks"]
        shape = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        spec = (
            SlidingWindowSpec(**shape, sliding_window=c["sliding_window"])
            if c["sliding_window"]
            else FullAttentionSpec(**shape)
        )
        kv = KVCacheConfig(
            num_blocks=c["num_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        s = Scheduler(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=size,
        )
        # Set here and not by a SpeculativeConfig, which would want a drafting model to be there.
        s.num_spec_tokens, s.num_lookahead_tokens = (
            c.get("num_spec_tokens", 0),
            c.get("num_lookahead_tokens", 0),
        )
        return s

    def request(self, s: Any, number: int, q: dict[str, Any]) -> Any:
        from vllm.v1.request import Request

        params = self.sampling(max_tokens=q["max_tokens"], ignore_eos=True)
        return Request(
            request_id=q["id"],
            prompt_token_ids=q["prompt_token_ids"],
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(number),
            priority=q.get("priority", 0),
            block_hasher=self.hasher(s.block_size) if s.cache_config.enable_prefix_caching else None,
        )


def token(i: int, k: int) -> int:
    """The fake model: output token k of request number i."""
    return 1000 + (i * 131 + k * 17) % 499


def execute(s: Any, plan: Any, order: dict[str, int]) -> Any:
    """What the model runner would return for the plan: the drafts that are right, and one token more."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(plan.num_scheduled_tokens)
    sampled: list[list[int]] = []
    for i in ids:
        r = s.requests[i]
        drafts = plan.scheduled_spec_decode_tokens.get(i, ())
        if r.num_computed_tokens < r.num_tokens:
            sampled.append([])
            continue
        p = r.num_output_tokens
        right = 0
        while right < len(drafts) and drafts[right] == token(order[i], p + right):
            right += 1
        sampled.append([token(order[i], p + j) for j in range(right + 1)])
    return ModelRunnerOutput(
        req_ids=ids, req_id_to_index={i: n for n, i in enumerate(ids)}, sampled_token_ids=sampled
    )


def propose(s: Any, sampled: list[str], order: dict[str, int], config: dict[str, Any]) -> Any:
    """The fake proposer's drafts for the requests that sampled and go on: how many and how many of them are
    right follows from a formula.
    """
    from vllm.v1.outputs import DraftTokenIds

    k, ids, drafts = config["num_spec_tokens"], [], []
    for rid in sampled:
        r = s.requests.get(rid)
        if r is None:
            continue
        i, p = order[rid], r.num_output_tokens
        n = (
            0
            if r.num_tokens >= config["max_model_len"]
            else k
            if config["proposer"] == "fixed"
            else (i * 5 + p * 3) % (k + 1)
        )
        ids.append(rid)
        drafts.append([token(i, p + j) if j < (i * 7 + p * 3) % (k + 1) else 999 for j in range(n)])
    return DraftTokenIds(ids, drafts)


def play(
    peer: Peer, config: dict[str, Any], requests: list[dict[str, Any]], max_steps: int = 5000
) -> dict[str, Any]:
    """Plays a scenario, recording every step.

    `complete` is False where `max_steps` were not enough (a scenario that can get stuck).
    """
    from vllm.v1.request import RequestStatus

    s = peer.scheduler(config)
    order = {q["id"]: i for i, q in enumerate(requests)}
    known: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    finish: dict[str, str] = {}
    last_input = max(max(q["arrival_step"], q.get("abort_step", 0)) for q in requests)
    pool = s.kv_cache_manager.block_pool
    for step in range(max_steps):
        if step > last_input and not s.has_unfinished_requests():
            break
        added, aborted = [], []
        for q in requests:
            if q["arrival_step"] == step:
                known[q["id"]] = peer.request(s, order[q["id"]], q)
                s.add_request(known[q["id"]])
                added.append(q["id"])
        for q in requests:
            if q.get("abort_step") == step and q["id"] in s.requests:
                s.finish_requests(q["id"], RequestStatus.FINISHED_ABORTED)
                finish[q["id"]] = RequestStatus.FINISHED_ABORTED.name
                aborted.append(q["id"])
        before = {i: r.num_preemptions for i, r in s.requests.items()}
        plan = s.schedule()
        resumed = set(plan.scheduled_cached_reqs.resumed_req_ids)
        new = [r.req_id for r in plan.scheduled_new_reqs if r.req_id not in resumed and not before[r.req_id]]
        resumed |= {
            r.req_id for r in plan.scheduled_new_reqs if before[r.req_id]
        }  # model runner V2 puts resumed requests there
        row: dict[str, Any] = {
            "step": step,
            "added": added,
            "aborted": aborted,
            "scheduled": [
                [i, n, s.requests[i].num_computed_tokens - n] for i, n in plan.num_scheduled_tokens.items()
            ],
            "new": new,
            "resumed": sorted(resumed, key=order.__getitem__),
            "preempted": sorted(
                (i for i, n in before.items() if s.requests[i].num_preemptions > n), key=order.__getitem__
            ),
            "running": [r.request_id for r in s.running],
            "waiting": [r.request_id for r in s.waiting],
            "blocks": {
                r.request_id: list(s.kv_cache_manager.get_block_ids(r.request_id)[0]) for r in s.running
            },
            "free_blocks": pool.get_num_free_blocks(),
        }
        out = execute(s, plan, order)
        full = [list(ids) for ids in out.sampled_token_ids]
        s.update_from_output(plan, out)
        row["sampled"] = [i for i, ids in zip(out.req_ids, out.sampled_token_ids) if ids]
        row["finished"] = [i for i in order if i in known and known[i].is_finished() and i not in finish]
        finish.update((i, known[i].status.name) for i in row["finished"])
        row["free_blocks_after"] = pool.get_num_free_blocks()
        if config.get("num_spec_tokens"):
            lengths = dict(zip(out.req_ids, map(len, full)))
            row["drafts"] = {i: list(ids) for i, ids in plan.scheduled_spec_decode_tokens.items()}
            row["accepted"] = {i: lengths[i] - 1 for i in row["drafts"]}
            row["tokens"] = {
                i: ids for i, ids in zip(out.req_ids, out.sampled_token_ids) if ids
            }  # cut in place by vLLM
            s.update_draft_token_ids(propose(s, row["sampled"], order, config))
            row["proposed"] = {i: list(r.spec_token_ids) for i, r in s.requests.items() if r.spec_token_ids}
            row["computed_after"] = {
                i: s.requests[i].num_computed_tokens for i in out.req_ids if i in s.requests
            }
        steps.append(row)
    preemptions = {i: r.num_preemptions for i, r in known.items() if r.num_preemptions}
    return {
        "engine": f"vllm {peer.version}",
        "config": config,
        "requests": requests,
        "finish": finish,
        "num_preemptions": preemptions,
        "complete": not s.has_unfinished_requests(),
        "steps": steps,
    }


def decode_config(num_seqs: int, context: int, num_blocks: int, block_size: int) -> dict[str, Any]:
    """What the decode measurement runs under: one step prefills everybody, and nobody ends."""
    return {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": num_seqs * (context + block_size),
        "max_model_len": context + 4096,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "policy": "fcfs",
        "long_prefill_token_threshold": 0,
        "scheduler_reserve_full_isl": True,
        "sliding_window": 0,
        "watermark": 0.0,
    }


def decode_prompts(num_seqs: int, context: int, block_size: int) -> list[list[int]]:
    """Prompts around `context` tokens.

    They share their first quarter, as under one system prompt, and their lengths are spread over a block, so
    that each step fills 1 / block_size of the blocks.
    """
    return [
        [
            (p * 31) % 4096 if p < context // 4 else (i * 7919 + p) % 4096
            for p in range(context - block_size // 2 + i % block_size)
        ]
        for i in range(num_seqs)
    ]


class Decode:
    """All seats running, every request at about `context` tokens, ready for decode steps."""

    def __init__(self, peer: Peer, config: dict[str, Any], context: int) -> None:
        self.scheduler = s = peer.scheduler(config)
        self.order: dict[str, int] = {}
        for i, prompt in enumerate(decode_prompts(config["max_num_seqs"], context, config["block_size"])):
            self.order[f"r{i}"] = i
            s.add_request(peer.request(s, i, {"id": f"r{i}", "prompt_token_ids": prompt, "max_tokens": 4000}))
        plan = s.schedule()
        s.update_from_output(plan, execute(s, plan, self.order))
        assert len(s.running) == len(self.order), f"{len(s.running)} of {len(self.order)} requests run"

    def time(self, steps: int) -> dict[str, list[float]]:
        s = self.scheduler
        schedule_s, update_s, wall_s = [], [], []
        gc.collect()
        gc.freeze()  # as vLLM's engine does after its start
        for _ in range(steps):
            w0, t0 = perf_counter(), thread_time()
            plan = s.schedule()
            t1, w1 = thread_time(), perf_counter()
            out = execute(s, plan, self.order)
            w2, t2 = perf_counter(), thread_time()
            s.update_from_output(plan, out)
            t3, w3 = thread_time(), perf_counter()
            assert len(plan.num_scheduled_tokens) == plan.total_num_scheduled_tokens == len(self.order), (
                "not a decode-only step of all requests"
            )
            schedule_s.append(t1 - t0)
            update_s.append(t3 - t2)
            wall_s.append(w1 - w0 + w3 - w2)
        return {"schedule_s": schedule_s, "update_s": update_s, "wall_s": wall_s}


def main() -> None:
    os.environ.update(QUIET)
    peer: Peer | None = None
    decode: Decode | None = None

    def answer(m: dict[str, Any]) -> dict[str, Any]:
        nonlocal peer, decode
        peer = peer or Peer()
        if m["op"] == "hello":
            return {"vllm": peer.version}
        if m["op"] == "play":
            return play(peer, m["config"], m["requests"], m.get("max_steps", 5000))
        if m["op"] == "decode":
            decode = None
            decode = Decode(peer, m["config"], m["context"])
            return {}
        if m["op"] == "time":
            assert decode is not None, "'decode' comes before 'time'"
            return decode.time(m["steps"])
        return {"error": f"unknown op {m['op']!r}"}

    serve(answer)


if __name__ == "__main__":
    main()
