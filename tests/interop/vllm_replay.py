"""Replays a recorded vLLM's workload on the recorded tokens, so that every count can be compared step by
step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cbviz.cost import models
from cbviz.messages import RequestSpec, Sampling
from cbviz.runners.tape import TapeRunner
from cbviz.session import Session
from cbviz.trace import Trace

FOLDER = Path(__file__).parent / "vllm_metrics"
DRAFTS = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _tape(d: dict[str, Any]) -> dict[str, list[int]]:
    """Each sequence's tokens, also those that were right but came after its end."""
    tokens: dict[str, list[int]] = {}
    for row in d["steps"]:
        for name, ids in (*row["appended"].items(), *row.get("beyond", {}).items()):
            tokens.setdefault(name, []).extend(ids)
    return tokens


def replay(d: dict[str, Any]) -> Trace:
    """The recorded requests under cbviz's `vllm` discipline, on the recorded tokens.

    Step k of the recording is step k + 1 here.
    """
    c = d["config"]
    specs = [
        RequestSpec(
            q["id"],
            tuple(q["prompt_token_ids"]),
            q["max_tokens"],
            arrival_step=q["arrival_step"] + 1,
            priority=q.get("priority", 0),
            sampling=Sampling(
                n=q.get("n", 1), ignore_eos=True, stop_token_ids=tuple(q.get("stop_token_ids", ()))
            ),
        )
        for q in d["requests"]
    ]
    tokens = _tape(d)
    lens = {
        name: next(len(x.prompt_token_ids) for x in specs if x.request_id in (name, name.rpartition(".")[0]))
        for name in tokens
    }
    runner = TapeRunner(models.get("smollm2"), tokens, lens)
    drafts = (
        {"speculative": "ngram", **{name: c[name] for name in DRAFTS}}
        if "num_speculative_tokens" in c
        else {}
    )
    s = Session(
        None,
        runner=runner,
        discipline="vllm",
        policy=c["policy"],
        max_num_seqs=c["max_num_seqs"],
        max_num_batched_tokens=c["max_num_batched_tokens"],
        max_model_len=c["max_model_len"],
        block_size=c["block_size"],
        num_blocks=c["num_blocks"],
        enable_prefix_caching=c["enable_prefix_caching"],
        **drafts,
    )
    s.engine.check_request = lambda spec: None  # type: ignore[method-assign]  # vLLM takes a max_tokens that max_model_len cuts short
    s.engine.enqueue(specs)
    for row in d["steps"]:
        for name in row.get("aborted", ()):
            if name in s.state().requests and not s.request(name).finished:
                s.abort(name)
        if s.step() is None:
            break
    return s.trace
