"""Quantised KV: more blocks in the same bytes, at the price of some other words.

A pool of so many bytes holds more blocks the fewer bits a number has, so fewer requests wait or are
preempted; and a decoding step that reads fewer bytes of keys and values may be quicker at long contexts. The
price is exactness: log-probabilities move, and now and then another token is said. Codes have a scale for
each token and head (vLLM's `int8_per_token_head`); with 4 bits keys are turned by a Hadamard matrix first
(QuaRot, arXiv 2404.00456). `model/kv_store.py` has the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cbviz.bench.techniques import Check, Context, Row, counted, measured
from cbviz.specs import kv_bytes_per_element

KINDS = ("float16", "int8", "int4")


def words(ctx: Context, num: int, length: int) -> list[tuple[list[int], list[int]]]:
    """Pairs (prompt, what float32 says to it), greedy."""
    from cbviz.messages import RequestSpec
    from cbviz.workload.texts import CHAT

    ask: list[RequestSpec]
    if ctx.model.tokenizer is None:
        ask = ctx.article(0.2, num)
    else:
        ask = [ctx.text(CHAT[i], length, f"r{i}", chat=True) for i in range(num)]
    s = ctx.session(ask, precision="exact", max_num_seqs=8)
    s.run()
    return [(list(x.prompt_token_ids), list(s.request(x.request_id).output_token_ids)) for x in ask]


def steps_at(ctx: Context, kind: str, length: int, num: int) -> Any:
    """A function that runs `num` decoding steps of four equal requests of `length` tokens, over a cache of
    that kind, and returns what they say last.
    """
    from cbviz.config import EngineConfig
    from cbviz.messages import Chunk, Sampling, SchedulerOutput
    from cbviz.runners.torch_runner import TorchRunner

    size, seats = 16, 4
    each = -(-(length + num) // size)
    runner = TorchRunner(
        ctx.model, EngineConfig(block_size=size, num_blocks=seats * each + 1, kv_cache_dtype=kind)
    )
    ids = ctx.ids(length + num)
    tables = [list(range(1 + k * each, 1 + (k + 1) * each)) for k in range(seats)]
    plan, greedy = SchedulerOutput(1, size), Sampling()
    for k, table in enumerate(tables):
        for a in range(0, length, 512):
            plan.chunks = [Chunk(f"r{k}", a, min(512, length - a), ids, table, False, greedy)]
            runner.execute(plan)

    def go() -> list[int]:
        said: list[int] = []
        for at in range(length, length + num):
            plan.chunks = [Chunk(f"r{k}", at, 1, ids, table, True, greedy) for k, table in enumerate(tables)]
            said = [t for new in runner.execute(plan).token_ids.values() for t in new]
        return said

    return go


def measure(ctx: Context) -> Iterator[Row]:
    from cbviz.model.quality import kv_quality

    c = ctx.model.config
    ctx.tell("float32 says what the others are held against")
    said = words(ctx, 2 if ctx.quick else 8, 24 if ctx.quick else 64)
    half = kv_bytes_per_element("float16", c.head_dim)
    for kind in KINDS:
        ctx.tell(f"quality of {kind}")
        q = kv_quality(ctx.model, kind, said)
        again = kv_quality(ctx.model, kind, said[:1])
        fits = counted(4.0 / kv_bytes_per_element(kind, c.head_dim), "x the blocks in the same bytes")
        yield Row(
            f"{kind}, {q.bytes_per_token:,} bytes a token",
            "against float32 keys and values",
            fits,
            measured(-q.logprob_change, "nats a token less likely"),
            Check("the same figure when computed again", again == kv_quality(ctx.model, kind, said[:1])),
            f"same best token at {100 * q.agreement:.1f} % of {q.positions} positions, Kullback-Leibler "
            f"distance {q.divergence:.4f} nats (measured); "
            f"{half / kv_bytes_per_element(kind, c.head_dim):.2f} x the blocks of float16",
        )
    length, num = (256, 4) if ctx.quick else (2048, 16)
    won = ctx.contest({k: steps_at(ctx, k, length, num) for k in KINDS})
    per_step = {k: 1e3 * won.median(k) / num for k in KINDS}
    for kind in KINDS[1:]:
        last = won.results[kind]
        yield Row(
            f"decode, 4 requests of {length:,} tokens",
            f"{kind} against float16",
            measured(won.ratio("float16", kind), "x as fast"),
            None,
            Check("four equal requests say the same", len(last) == 4 and len(set(last)) == 1),
            f"{per_step[kind]:.1f} ms a step against {per_step['float16']:.1f} ms (measured)",
        )
    ask = ctx.article(0.3, 6 if ctx.quick else 16)
    each = 2 * c.num_layers * c.num_kv_heads * c.head_dim * 16 * half
    least = max(-(-(len(x.prompt_token_ids) + x.max_tokens) // 16) for x in ask) + 1
    room = int(each * max(least, 20 if ctx.quick else 64))
    fields: dict[str, Any] = {
        "kv_cache_memory_bytes": room,
        "max_num_seqs": 16,
        "discipline": "vllm",
        "enable_prefix_caching": False,
    }
    runs = {k: ctx.session(ask, kv_cache_dtype=k, **fields) for k in KINDS}
    won = ctx.contest(runs, rounds=1 if ctx.quick else 2)
    lost = {k: sum(r.tokens.recomputed for r in s.trace) for k, s in runs.items()}
    for kind in KINDS[1:]:
        a, b = runs["float16"], runs[kind]
        same = sum(a.request(i).output_token_ids == b.request(i).output_token_ids for i in a.request_ids)
        done = all(len(b.request(x.request_id).output_token_ids) == x.max_tokens for x in ask)
        yield Row(
            f"a pool of {room / 1e6:.0f} MB, {len(ask)} requests",
            f"{kind} against float16",
            measured(won.ratio("float16", kind), "x as fast"),
            counted(len(ask) - same, f"of {len(ask)} requests say other words"),
            Check("every request ended", done),
            f"{b.config.num_blocks - 1} blocks against {a.config.num_blocks - 1}; {lost[kind]:,} tokens "
            f"computed twice against {lost['float16']:,} (counted); the prompts "
            "are random tokens, where the best two words lie close",
        )
