"""Sliding window and attention sinks: what a window saves, and the first tokens it must not drop.

A window bounds what a request holds: blocks left of it are given back. But a model that was trained without
one puts much of its attention on the very first tokens, whatever they say; once they leave the window, its
words fall apart. Keeping four of them in sight mends that (StreamingLLM, arXiv 2309.17453, figure 3 and table
1). Measured here as the paper does it, on a text longer than the window. Different from the paper: keys keep
the positions they have in the text, so the text may not be longer than the model's context; the paper gives
them positions within the cache, which needs keys kept before their rotation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from cbviz.bench.techniques import Check, Context, Row, counted, measured


def long_text(ctx: Context, length: int) -> list[int]:
    """Token ids of the project's own texts, one after the other."""
    from cbviz.workload.texts import CHAT, LONG, SYSTEM

    if ctx.model.tokenizer is None:
        return [(7 * i * i + 3 * i) % ctx.model.config.vocab_size for i in range(length)]
    ids = ctx.model.tokenizer.encode("\n\n".join((LONG, SYSTEM, *CHAT)))
    return list(ids[:length])


def measure(ctx: Context) -> Iterator[Row]:
    from cbviz.messages import RequestSpec, Sampling
    from cbviz.model.quality import surprise

    window, text = (64, long_text(ctx, 300)) if ctx.quick else (128, long_text(ctx, 2048))
    full = surprise(ctx.model, text)
    behind = slice(window, None)  # tokens before which something has left the window
    base = float(full[behind].mean())
    blocks = -(-len(text) // 16)
    for sinks in (0, 1, 4) if ctx.quick else (0, 1, 4, 16):
        ctx.tell(f"window {window}, {sinks} sinks")
        seen = surprise(ctx.model, text, window=window, sinks=sinks)
        mean = float(seen[behind].mean())
        held = -(-(window - 1) // 16) + 1 + -(-sinks // 16)
        same = bool((seen[: window - 1] - full[: window - 1]).abs().max() < 1e-3)
        yield Row(
            f"window {window}, {sinks} sinks, {len(text):,} tokens",
            "against full attention",
            counted(blocks / held, "x fewer blocks held at the end"),
            measured(mean - base, "nats a token more surprised"),
            Check("equal until the window is full", same),
            (
                f"perplexity {math.exp(mean):,.1f} against {math.exp(base):,.1f} behind the window's first "
                f"{window} tokens (measured)"
            ),
        )
    num, length, more = (2, 200, 8) if ctx.quick else (4, 600, 32)
    ask = [
        RequestSpec(
            f"r{i}", tuple(text[i : i + length]), more, arrival_step=1, sampling=Sampling(ignore_eos=True)
        )
        for i in range(num)
    ]
    fields: dict[str, Any] = {
        "num_blocks": 200,
        "discipline": "chunked",
        "max_num_batched_tokens": 128,
        "enable_prefix_caching": False,
    }
    most = {}
    ways: dict[str, dict[str, Any]] = {
        "full": {},
        "window": {"sliding_window": window},
        "sinks": {"sliding_window": window, "attention_sinks": 4},
    }
    for name, how in ways.items():
        ctx.tell(f"{num} requests, {name}")
        s = ctx.session(ask, **{**fields, **how})
        s.run()
        most[name] = max((r.slots.total - r.slots.free - r.slots.cached) // 16 for r in s.trace)
    yield Row(
        f"{num} requests of {length} tokens, window {window}, 4 sinks",
        "most blocks held at once, against full attention",
        counted(most["full"] / most["sinks"], "x fewer blocks"),
        counted(most["sinks"] - most["window"], "blocks more than without sinks"),
        Check("sinks hold no fewer than the window alone", most["sinks"] >= most["window"]),
        (
            f"{most['full']} with full attention, {most['window']} with the window, {most['sinks']} with "
            "sinks "
            "(counted)"
        ),
    )
