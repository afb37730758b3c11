"""Windows, sinks and codes under the whole engine: whoever shares the pool, whatever is preempted, hit or
aborted, the words are those of dense attention alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cbviz as cb
from cbviz import events as ev
from cbviz.config import ConfigError, EngineConfig
from cbviz.core.check import check
from cbviz.messages import RequestSpec, Sampling
from cbviz.model import ops
from cbviz.model.kv_store import STORAGE
from cbviz.model.loader import LoadedModel, load
from cbviz.model.ops import Batch
from cbviz.runners.torch_runner import TorchRunner
from cbviz.trace.accounting import check_trace
from tests.model.test_precision import model
from tests.runners.test_mixture_runs import MODELS as MIXTURES

VOCAB = 61
MODEL = model(hidden=32, heads=4, kv_heads=2, dim=8, inter=40, vocab=VOCAB, windows=(0, 0, 0), seed=5)
FIELDS: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 80,
    "precision": "exact",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "clock": "modelled",
}


def session(requests: list[RequestSpec], m: LoadedModel = MODEL, **config: Any) -> cb.Session:
    fields = {**FIELDS, **config}
    runner = TorchRunner(m, EngineConfig(**fields))
    return cb.Session(requests, runner=runner, **fields)


def asked(seed: int, num: int = 7) -> list[RequestSpec]:
    """Some begin alike, so that they share blocks; two arrive at every second step."""
    rng = random.Random(seed)
    common = rng.choices(range(VOCAB), k=19)
    return [
        RequestSpec(
            f"r{i}",
            tuple(common[: rng.choice((0, 9, 19))] + rng.choices(range(VOCAB), k=rng.randint(1, 9))),
            rng.randint(3, 16),
            arrival_step=1 + i // 2 * 2,
            priority=i % 3,
            sampling=Sampling(ignore_eos=True),
        )
        for i in range(num)
    ]


def dense(
    m: LoadedModel, ids: list[int], num: int, window: int = 0, sinks: int = 0, stored: str = "float32"
) -> tuple[list[int], float]:
    """Greedy words by the reference operators: the whole sequence computed anew for every word, in a store of
    its own. And the smallest lead of a word.
    """
    d, ids, n, lead = m.decoder(ops.REFERENCE, window, "exact", sinks), list(ids), len(ids), float("inf")
    for _ in range(num):
        kv, every = m.config.store(1, len(ids), dtype=STORAGE[stored]), torch.arange(len(ids))
        best = d.forward(
            torch.tensor(ids), every, Batch.build([[0]], [len(ids)], [len(ids)], len(ids)), kv, every[-1:]
        )[0].topk(2)
        lead = min(lead, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return ids[n:], lead


def play(s: cb.Session, abort: str = "", at: int = 0) -> None:
    while not s.done:
        if abort and s.engine.scheduler.step == at and abort in s.engine.scheduler.state.requests:
            s.abort(abort)
        if s.step() is None:
            break
        check(s.engine.scheduler)
    check_trace(s.trace)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 300),
    blocks=st.integers(16, 24),
    policy=st.sampled_from(["fcfs", "priority", "sjf"]),
    stored=st.sampled_from(["auto", "float16", "int8", "int4"]),
    mask=st.sampled_from([(0, 0), (7, 0), (7, 3), (12, 9)]),
    abort=st.integers(0, 6),
    at=st.integers(2, 9),
    kernels=st.sampled_from(["cpu", "torch"]),
)
def test_the_words_are_those_of_dense_attention(
    seed: int, blocks: int, policy: str, stored: str, mask: tuple[int, int], abort: int, at: int, kernels: str
) -> None:
    """Preemption, prefix caching and an abort together with a window, sinks and codes."""
    window, sinks = mask
    requests = asked(seed)
    s = session(
        requests,
        num_blocks=blocks,
        policy=policy,
        kernels=kernels,
        kv_cache_dtype=stored,
        sliding_window=window,
        attention_sinks=sinks,
        max_model_len=48,
    )
    play(s, f"r{abort}", at)
    for x in requests:
        got = list(s.request(x.request_id).output_token_ids)
        want, lead = dense(
            MODEL, list(x.prompt_token_ids), len(got), window, sinks, {"auto": "float32"}.get(stored, stored)
        )
        if (
            stored in ("auto", "float16") or lead > 0.05
        ):  # a number between two codes may become the other, and then close words may change places
            assert got == want, (x.request_id, lead)
        assert x.request_id == f"r{abort}" or len(got) == x.max_tokens


@pytest.mark.parametrize("stored, window, sinks", [("int8", 0, 0), ("int4", 9, 6), ("auto", 9, 6)])
def test_everything_happens_and_going_back_is_exact(stored: str, window: int, sinks: int) -> None:
    fields: dict[str, Any] = {
        "num_blocks": 14,
        "max_model_len": 40,
        "kv_cache_dtype": stored,
        "sliding_window": window,
        "attention_sinks": sinks,
    }
    s = session(asked(4, 9), **fields)
    play(s)
    m = cb.metrics(s.trace)
    assert m["num_preemptions"] > 0 and m["prefix_hit_tokens"] > 0
    left = [e for r in s.trace for e in r.events if isinstance(e, ev.OutOfWindow)]
    assert bool(left) == bool(window) and all(e.first_index >= -(-sinks // 4) for e in left)
    ends = {i: list(s.request(i).output_token_ids) for i in s.request_ids}
    kv = [p.clone() for p in s.runner.kv.parts]  # type: ignore[attr-defined]
    ledger = s.runner.kv.ledger.copy()  # type: ignore[attr-defined]
    for step in (len(s.trace) // 3, len(s.trace) // 2):
        s.rewind(step)
        s.run()
        assert {i: list(s.request(i).output_token_ids) for i in s.request_ids} == ends
    after = s.runner.kv  # type: ignore[attr-defined]
    held = (ledger == after.ledger) & (ledger != 0)
    assert held.sum() > 20
    for a, b in zip(kv, after.parts, strict=True):
        for block, offset in zip(*held.nonzero(), strict=True):
            assert torch.equal(a[:, :, block, :, offset], b[:, :, block, :, offset]), (
                "what was computed again has other bits"
            )


def test_the_same_bytes_hold_more_blocks() -> None:
    """And so fewer requests are preempted. The header, the store and the plan agree on what a token takes."""
    per_token = {
        "float32": 3 * 2 * 2 * 8 * 4,
        "float16": 3 * 2 * 2 * 8 * 2,
        "int8": 3 * 2 * 2 * (8 + 2),
        "int4": 3 * 2 * 2 * (4 + 4),
    }
    preempted = {}
    for name, each in per_token.items():
        s = session(asked(3, 9), kv_cache_memory_bytes=21_000, kv_cache_dtype=name, max_model_len=40)
        assert s.config.num_blocks == 21_000 // (4 * each) == s.runner.kv.num_blocks  # type: ignore[attr-defined]
        assert (
            s.runner.kv.bytes_per_token == each == s.trace.header.kv_bytes_per_token
            and s.runner.kv.num_bytes <= 21_000
        )  # type: ignore[attr-defined]
        assert any("21,000 bytes" in n for n in s.notes)
        play(s)
        preempted[name] = cb.metrics(s.trace)["num_preemptions"]
        first = s.trace.record(1)
        seen = sum(
            c.num_tokens for c in first.chunks
        )  # written and read; the model of a step counts them once
        assert (
            first.counted is not None
            and first.counted["kv_bytes"] == 2 * each * seen
            and first.cost is not None
            and first.cost.kv_bytes == each * seen
        )
    assert preempted["float32"] > 0 == preempted["int8"] == preempted["int4"], preempted


def test_a_fork_takes_another_type_from_the_start_only() -> None:
    s = session(asked(3), kv_cache_memory_bytes=21_000)
    s.runner_name = "torch"
    play(s)
    b = s.fork(at=0, kv_cache_dtype="int8")
    assert (
        b.config.num_blocks == 21_000 // (4 * 120)
        and b.runner.kv.quantised
        and b.trace.header.kv_bytes_per_token == 120
    )  # type: ignore[attr-defined]
    b.run()
    with pytest.raises(
        ConfigError, match="kv_cache_dtype can't change in the middle of a run: fork at step 0"
    ):
        s.fork(at=5, kv_cache_dtype="int8")
    named = s.fork(at=0, num_blocks=30)
    assert named.config.num_blocks == 30 and named.config.kv_cache_memory_bytes is None


def test_what_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_memory_bytes is 100, the least is 3,072: two blocks of 4 tokens"
    ):
        session([], kv_cache_memory_bytes=100)
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int8', but Tiny has MLA"):
        session([], MIXTURES["mla"], kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="attention_sinks is 4, but there is no window"):
        session([], attention_sinks=4)
    with pytest.raises(
        ConfigError, match="kv_cache_dtype is 'fp8', it must be one of auto, float32, float16, int8, int4"
    ):
        EngineConfig(kv_cache_dtype="fp8")


# models with windows of their own, as transformers has them

TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, LoadedModel]]:
    transformers = pytest.importorskip("transformers")

    def make(kind: str, **extra: Any) -> tuple[Any, LoadedModel]:
        torch.manual_seed(7)
        config = getattr(transformers, f"{kind}Config")(**TINY, **extra)
        config._attn_implementation = "eager"
        judge = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        folder: Path = tmp_path_factory.mktemp(kind)
        judge.save_pretrained(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CBVIZ_CACHE", str(tmp_path_factory.mktemp("cache")))
            return judge, load(str(folder))

    return make


def words(judge: Any, ids: list[int], num: int) -> list[int]:
    ids, n = list(ids), len(ids)
    with torch.inference_mode():
        for _ in range(num):
            ids.append(int(judge(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[n:]


def test_mistral_end_to_end(judged: Callable[..., tuple[Any, LoadedModel]]) -> None:
    """The window is the model's own config's: nobody sets a knob, blocks are given back, words are
    transformers'.
    """
    judge, m = judged("Mistral", sliding_window=9)
    requests = asked(11)
    s = session(requests, m, num_blocks=13, max_model_len=48)
    assert s.config.sliding_window == 9 and s.notes == [
        "sliding_window is 9: the model's own, no layer sees further"
    ]
    play(s)
    left = sum(len(e.block_ids) for r in s.trace for e in r.events if isinstance(e, ev.OutOfWindow))
    assert left > 15 and cb.metrics(s.trace)["num_preemptions"] > 0
    for x in requests:
        assert list(s.request(x.request_id).output_token_ids) == words(
            judge, list(x.prompt_token_ids), x.max_tokens
        ), x.request_id
    narrow, wide = (session(requests, m, sliding_window=w) for w in (5, 30))
    assert narrow.config.sliding_window == 5 and wide.config.sliding_window == 9


def test_layers_of_both_kinds_keep_their_blocks(judged: Callable[..., tuple[Any, LoadedModel]]) -> None:
    judge, m = judged("Qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1)
    assert 0 in m.config.windows and 6 in m.config.windows
    requests = asked(12)
    s = session(requests, m, num_blocks=40, max_model_len=48)
    assert s.config.sliding_window == 0
    play(s)
    assert not any(isinstance(e, ev.OutOfWindow) for r in s.trace for e in r.events)
    for x in requests:
        assert list(s.request(x.request_id).output_token_ids) == words(
            judge, list(x.prompt_token_ids), x.max_tokens
        ), x.request_id
