"""Contiguous reservation, paging's opponent.

Before paging, a request's KV was one piece of memory, large enough for prompt + max_tokens. Three wastes
follow (Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP
2023, section 3.1 and figure 2): slots reserved for tokens to come, slots never filled, and free slots in
pieces too small for whoever waits. Here both modes run on the same engine, with the same kernels, so that
memory is all that differs; the table's last row sets what `cbviz.trace.reservation` models from a paged run
beside what the contiguous run really did.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cbviz.bench.techniques import Context, Row, counted, measured, modelled, same_tokens

if TYPE_CHECKING:
    from cbviz.messages import RequestSpec
    from cbviz.session import Session


def uneven(ctx: Context, num_requests: int, **fields: Any) -> list[RequestSpec]:
    """Requests that end before their max_tokens, as most do: short and long prompts, outputs of a fifth to
    all of what was reserved for them.

    The model decides where to stop, so a run without limits is made first, and each request gets as its stop
    id a token of its own output.
    """
    from msgspec.structs import replace

    from cbviz.messages import RequestSpec, Sampling

    rng, vocab = random.Random(ctx.seed), ctx.model.config.vocab_size
    asked = [
        RequestSpec(
            f"r{i}",
            tuple(rng.randrange(min(1000, vocab // 2), vocab) for _ in range(rng.choice((16, 40, 96)))),
            rng.choice((24, 48, 96)),
            arrival_step=0,
            sampling=Sampling(ignore_eos=True),
        )
        for i in range(num_requests)
    ]
    free = ctx.session(asked, **(fields | {"num_blocks": 512}))
    free.run()
    out = []
    for x in asked:
        ids = free.request(x.request_id).output_token_ids
        places = [i for i, t in enumerate(ids) if i >= len(ids) // 5 and t not in ids[:i]] or [len(ids) - 1]
        out.append(replace(x, sampling=Sampling(ignore_eos=True, stop_token_ids=(ids[rng.choice(places)],))))
    return out


def shares(s: Session) -> dict[str, float]:
    """Mean share of the pool, over the steps in which somebody ran, of each part of the slot account; and the
    most requests that ran at once.
    """
    rows = [r for r in s.trace if r.chunks]
    parts: dict[str, float] = {
        p: sum(getattr(r.slots, p) / r.slots.total for r in rows) / len(rows)
        for p in ("used", "partly_empty", "reserved", "fragmented", "cached", "free")
    }
    return parts | {"most": max(len({c.request_id for c in r.chunks}) for r in rows)}


def measure(ctx: Context) -> Iterator[Row]:
    from cbviz.trace.reservation import reservation

    fields: dict[str, Any] = {
        "discipline": "vllm",
        "num_blocks": 41 if ctx.quick else 121,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "max_model_len": 256,
        "enable_prefix_caching": False,
        "precision": "exact",
    }
    ask = uneven(ctx, 8 if ctx.quick else 32, **fields)
    runs = {
        "paged": ctx.session(ask, **fields),
        "first-fit": ctx.session(ask, kv_allocation="contiguous", **fields),
        "best-fit": ctx.session(ask, kv_allocation="contiguous", contiguous_fit="best-fit", **fields),
    }
    won = ctx.contest(runs)
    paged = shares(runs["paged"])
    for fit in ("first-fit", "best-fit"):
        s = shares(runs[fit])
        waited = sum(1 for r in runs[fit].trace if r.slots.fragmented)
        yield Row(
            f"pool of {fields['num_blocks'] - 1} blocks, {fit}",
            "one run of blocks for prompt + max_tokens, against paging",
            measured(won.ratio("paged", fit), "x as fast"),
            counted(
                100 * (s["reserved"] + s["partly_empty"] + s["fragmented"]),
                "% of the pool taken or barred without a token",
            ),
            same_tokens(runs["paged"], runs[fit]),
            f"slots that held a token: {100 * s['used']:.0f} % of the pool, with paging "
            f"{100 * paged['used']:.0f} %; at most {s['most']:.0f} requests at once, with paging "
            f"{paged['most']:.0f}; {100 * s['fragmented']:.1f} % barred by fragments, in {waited} of "
            f"{len(runs[fit].trace)} steps",
        )
    told = reservation(runs["paged"].trace).shares["exact"]
    real = shares(runs["first-fit"])
    yield Row(
        "the same, as modelled from the paged run",
        "first-fit model of trace/reservation.py, in slots, against the real contiguous run, in blocks",
        modelled(100 * told["used"], "% of the pool holds tokens"),
        counted(100 * real["used"], "% really did"),
        same_tokens(runs["paged"], runs["first-fit"]),
        (
            "the model asks how much of the paged run's batch would have had room, and lets nobody wait; the "
            "real run admits fewer and goes on longer"
        ),
    )
