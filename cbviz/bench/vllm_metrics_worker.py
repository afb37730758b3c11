"""A whole vLLM with a tiny random model, behind pipes.

It plays a workload and reports its own Prometheus registry.

The Python that has vLLM runs this file and need not have cbviz: the file imports nothing of it. It reads one
JSON object a line from stdin and answers each with one on the real stdout. Anything else that is printed goes
to stderr.

    {"op": "hello"}                                   -> {"vllm": version}
    {"op": "play", "config": ..., "requests": ...}    -> a recording: the two, `bounds`, `before`, `buckets`, `steps`

One engine a process: vLLM's registry is global. The model has random weights, so its tokens mean nothing; the
counts do.

`steps`: one object for each call of `LLMEngine.step()`. It has `aborted` (ids, just before the step),
`appended` (tokens by sequence), `beyond` (tokens that were right but came after the end of a sequence), and
`metrics`: the samples that changed, `name{label="value"}` -> value. Seconds and creation times are left out;
counts of histograms are not. `before`: all samples before the first step. `buckets`: the buckets of
histograms after the last step. `bounds`: their upper bounds as text. Sequence i of a request `a` with n > 1
is called `a` for i = 0, else `a.i`, as in cbviz.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
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
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LEFT_OUT = ("model_name", "engine")
"""Labels that say nothing about the workload."""
MAX_STEPS = 2000


def samples() -> dict[str, float]:
    """What vLLM's registry holds now, without times: `name{label="value"}` -> value."""
    from prometheus_client import REGISTRY

    out: dict[str, float] = {}
    for family in REGISTRY.collect():
        if not family.name.startswith("vllm:") or family.name == "vllm:cache_config_info":
            continue
        timed = family.name.endswith("_seconds")
        for s in family.samples:
            if s.name.endswith("_created") or (timed and not s.name.endswith("_count")):
                continue
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(s.labels.items()) if k not in LEFT_OUT)
            out[s.name + (f"{{{labels}}}" if labels else "")] = s.value
    return out


def bounds() -> dict[str, list[str]]:
    """For each histogram the upper bounds of its buckets, as its text form writes them."""
    from prometheus_client import REGISTRY, generate_latest

    out: dict[str, list[str]] = {}
    for name, bound in re.findall(
        r'^(vllm:\w+)_bucket\{[^}]*le="([^"]+)"', generate_latest(REGISTRY).decode(), re.MULTILINE
    ):
        out.setdefault(name, []).append(bound)
    return out


def engine(c: dict[str, Any]) -> Any:
    """An engine in this process; its model is made up."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    folder = tempfile.mkdtemp(prefix="cbviz-vllm-")
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(SHAPE, f)
    drafts = (
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": c["num_speculative_tokens"],
                "prompt_lookup_min": c["prompt_lookup_min"],
                "prompt_lookup_max": c["prompt_lookup_max"],
            }
        }
        if c.get("num_speculative_tokens")
        else {}
    )
    args = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        block_size=c["block_size"],
        num_gpu_blocks_override=c["num_blocks"],
        max_num_seqs=c["max_num_seqs"],
        max_num_batched_tokens=c["max_num_batched_tokens"],
        max_model_len=c["max_model_len"],
        enable_prefix_caching=c["enable_prefix_caching"],
        enable_chunked_prefill=True,
        scheduling_policy=c["policy"],
        async_scheduling=False,
        disable_log_stats=False,
        seed=0,
        **drafts,
    )
    return LLMEngine.from_engine_args(args)


def play(c: dict[str, Any], requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Plays the workload to its end and records each step."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    e = engine(c)
    core = e.engine_core.engine_core
    first = last = samples()
    steps: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    last_input = max(max(q["arrival_step"], q.get("abort_step", 0)) for q in requests)
    step = 0
    while step <= last_input or e.has_unfinished_requests():
        if step == MAX_STEPS:
            raise RuntimeError(f"the workload has not ended after {MAX_STEPS} steps")
        row: dict[str, Any] = {}
        for q in requests:
            if q["arrival_step"] == step:
                params = SamplingParams(
                    n=q.get("n", 1),
                    temperature=0.0 if q.get("n", 1) == 1 else 1.0,
                    seed=step,
                    max_tokens=q["max_tokens"],
                    ignore_eos=True,
                    detokenize=False,
                    stop_token_ids=q.get("stop_token_ids") or None,
                    output_kind=RequestOutputKind.DELTA,
                )
                inner = e.add_request(
                    q["id"],
                    TokensPrompt(prompt_token_ids=q["prompt_token_ids"]),
                    params,
                    priority=q.get("priority", 0),
                )
                names[inner] = q["id"]
                names.update({f"{i}_{inner}": q["id"] + (f".{i}" if i else "") for i in range(q.get("n", 1))})
        gone = [q["id"] for q in requests if q.get("abort_step") == step]
        if gone:
            e.abort_request(gone)
            row["aborted"] = gone
        said: dict[str, list[int]] = {}
        beyond: dict[str, list[int]] = {}
        update = core.scheduler.update_from_output

        def watched(
            plan: Any,
            out: Any,
            said: dict[str, list[int]] = said,
            beyond: dict[str, list[int]] = beyond,
            update: Any = update,
        ) -> Any:
            sampled = {rid: list(ids) for rid, ids in zip(out.req_ids, out.sampled_token_ids)}
            done = update(plan, out)
            for client in done.values():
                for x in client.outputs:
                    name, kept = names[x.request_id], list(x.new_token_ids)
                    said[name] = kept
                    if len(sampled[x.request_id]) > len(kept):
                        beyond[name] = sampled[x.request_id][len(kept) :]
            return done

        core.scheduler.update_from_output = watched
        try:
            e.step()
        finally:
            core.scheduler.update_from_output = update
        now = samples()
        row["appended"] = said
        if beyond:
            row["beyond"] = beyond
        row["metrics"] = {k: v for k, v in now.items() if last.get(k) != v and "_bucket" not in k}
        steps.append(row)
        last = now
        step += 1
    return {
        "config": c,
        "requests": requests,
        "bounds": bounds(),
        "before": {k: v for k, v in first.items() if "_bucket" not in k},
        "buckets": {k: v for k, v in last.items() if "_bucket" in k},
        "steps": steps,
    }


def main() -> None:
    os.environ.update(QUIET)

    def answer(m: dict[str, Any]) -> dict[str, Any]:
        if m["op"] == "hello":
            import vllm

            return {"vllm": vllm.__version__}
        if m["op"] == "play":
            return play(m["config"], m["requests"])
        return {"error": f"unknown op {m['op']!r}"}

    serve(answer)


if __name__ == "__main__":
    main()
