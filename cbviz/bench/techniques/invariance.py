"""Batch invariance: a request's numbers do not depend on its batch-mates.

The benefit is what drifts without it: how far log-probabilities of the same tokens lie from those of the same
request alone. The cost is the time of the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from cbviz.bench.techniques import Check, Context, Row, counted, measured
from cbviz.messages import RequestSpec, Sampling

if TYPE_CHECKING:
    from cbviz.session import Session


def measure(ctx: Context) -> Iterator[Row]:
    num, prompt, output = (3, 6, 3) if ctx.quick else (6, 20, 10)
    vocab = ctx.model.config.vocab_size
    ask = [
        RequestSpec(
            f"r{i}",
            tuple((37 * i + 11 * k) % (vocab - 2) + 1 for k in range(prompt + i)),
            output + i,
            arrival_step=i // 2,
            sampling=Sampling(ignore_eos=True),
        )
        for i in range(num)
    ]
    company: dict[str, Any] = {
        "num_blocks": 64,
        "max_num_seqs": num,
        "max_num_batched_tokens": prompt + 4,
        "precision": "exact",
    }
    for kernels, title, rounds in (("auto", "the compiled pass", None), ("reference", "plain torch", 1)):
        off = ctx.session(ask, kernels=kernels, **company)
        on = ctx.session(ask, kernels=kernels, batch_invariant=True, **company)
        won = ctx.contest({"off": off, "on": on}, rounds)
        before, _ = _drift(ctx, off, "off")
        after, check = _drift(ctx, on, "on")
        name = on.runner.ops.name  # type: ignore[attr-defined]
        note = {
            "compiled": "The same operators serve both: their sums are split alike whatever the number of rows.",
            "row by row": (
                "On, the reference computes a row at a time. Kernels of fixed tile and split sizes cost "
                "far less; the compiled pass is of that kind."
            ),
        }
        yield Row(
            f"{num} requests, {title}",
            f"on ({name}) against off ({off.runner.ops.name})",  # type: ignore[attr-defined]
            counted(before - after, "nats of drift gone, at most a token"),
            measured(won.ratio("on", "off"), "x the time"),
            check,
            note.get(name, ""),
        )


def _drift(ctx: Context, s: Session, what: str) -> tuple[float, Check]:
    """The largest distance of a token's log-probability from that of the same request alone; and whether all
    is equal, to the bit.
    """
    apart, same, total = 0.0, 0, 0
    for rid in s.request_ids[: 2 if ctx.quick else 4]:
        ctx.tell(f"{what}: {rid} alone")
        found = s.alone(rid)
        apart = max([apart, *(t.apart for t in found.tokens)])
        total += len(found.tokens) + int((~np.isnan(found.apart)).sum())  # what the cache still holds
        same += sum(t.apart == 0 and t.said == t.alone for t in found.tokens) + int((found.apart == 0).sum())
    return apart, Check(f"{same:,} of {total:,} tokens and cache entries bit for bit as alone", same == total)
