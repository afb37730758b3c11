"""Parallel sampling (n > 1) and beam search with copy-on-write.

n answers to one prompt: as n requests, or as one request whose sequences share the prompt's blocks. The
PagedAttention paper reports 6.1 to 9.8 % of the blocks saved with n = 2 to 6 on Alpaca's short prompts and
16.2 to 30.5 % on ShareGPT's (section 6.3, figure 15: one sequence's blocks less those shared, averaged over
the run); here the same share is counted, and the time that computing the prompt once saves is measured. Beams
share more, because a beam that is dropped takes another's table (the paper: 37.6 to 55.2 % on Alpaca, 44.3 to
66.3 % on ShareGPT); the check computes each hypothesis again in one pass with a table of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cbviz.bench.techniques import Check, Context, Row, counted, measured


def measure(ctx: Context) -> Iterator[Row]:
    from cbviz import events as ev
    from cbviz.messages import RequestSpec, Sampling

    prompt = tuple(ctx.ids(60 if ctx.quick else 250, 31))
    outputs = 12 if ctx.quick else 60
    for n in (3,) if ctx.quick else (2, 4, 6):
        fields: dict[str, Any] = {
            "num_blocks": 256,
            "max_num_seqs": 16,
            "precision": "exact",
            "enable_prefix_caching": False,
            "max_num_batched_tokens": 512,
        }
        warm: dict[str, Any] = {"temperature": 0.8, "ignore_eos": True}
        together = ctx.session(
            [RequestSpec("a", prompt, outputs, arrival_step=0, sampling=Sampling(n=n, **warm))], **fields
        )
        ids = ["a", *(f"a.{i}" for i in range(1, n))]
        apart = ctx.session(
            [RequestSpec(i, prompt, outputs, arrival_step=0, sampling=Sampling(**warm)) for i in ids],
            **fields,
        )
        won = ctx.contest({"apart": apart, "together": together})
        mine, theirs = together.state().outputs("a"), [apart.request(i).output_token_ids for i in ids]
        equal = sum(x == y for a, b in zip(mine, theirs) for x, y in zip(a, b))
        rows = [r for r in together.trace if r.gauges.num_running]
        held = [together.config.num_usable_blocks - r.gauges.num_free_blocks for r in rows]
        saved = sum(r.gauges.num_saved_blocks for r in rows) / sum(
            h + r.gauges.num_saved_blocks for h, r in zip(held, rows)
        )
        copies = sum(isinstance(e, ev.Copied) for r in together.trace for e in r.events)
        yield Row(
            f"n = {n}, prompt {len(prompt)}, outputs {outputs}",
            "one request of n sequences against n requests",
            measured(won.ratio("apart", "together"), "x as fast"),
            counted(copies, "blocks copied"),
            Check(f"{equal:,} of {n * outputs:,} tokens equal", equal == n * outputs),
            f"{100 * saved:.0f} % fewer blocks than without sharing, mean over the run (counted); "
            f"{sum(r.tokens.total for r in together.trace):,} tokens computed "
            f"instead of {sum(r.tokens.total for r in apart.trace):,}",
        )
    yield _beams(ctx, prompt, outputs)


def _beams(ctx: Context, prompt: tuple[int, ...], outputs: int) -> Row:
    import torch

    from cbviz import events as ev
    from cbviz.messages import RequestSpec, Sampling
    from cbviz.runners.torch_runner import TorchRunner

    k = 4
    s = ctx.session(
        [RequestSpec("a", prompt, outputs, arrival_step=0, sampling=Sampling(beam_width=k, ignore_eos=True))],
        num_blocks=256,
        precision="exact",
        enable_prefix_caching=False,
        max_num_batched_tokens=512,
    )
    s.run()
    runner = s.runner
    assert isinstance(runner, TorchRunner)
    size = runner.kv.block_size
    worst = 0.0
    for said, score in zip(s.outputs("a"), s.scores("a")):
        ids = [*prompt, *said]
        table = list(range(1, len(ids) // size + 2))
        logits = runner._run(
            [(ids[:-1], 0, table)],
            runner.kv.like(len(table) + 1),
            0,
            list(range(len(prompt) - 1, len(ids) - 1)),
        )
        alone = torch.log_softmax(logits.float(), -1).gather(
            -1, torch.tensor(said, device=logits.device)[:, None]
        ).sum().item() / len(said)
        worst = max(worst, abs(alone - score))
    rows = [r for r in s.trace if r.gauges.num_running]
    saved = sum(r.gauges.num_saved_blocks for r in rows)
    held = sum(s.config.num_usable_blocks - r.gauges.num_free_blocks for r in rows)
    steps = [e for r in s.trace for e in r.events if isinstance(e, ev.BeamStep)]
    dropped = sum(k - len(set(e.parents)) for e in steps[1:])
    copies = sum(isinstance(e, ev.Copied) for r in s.trace for e in r.events)
    return Row(
        f"beam search, width {k}, prompt {len(prompt)}, outputs {outputs}",
        "blocks in use against tables that share nothing",
        counted(100 * saved / (held + saved), "% fewer blocks"),
        counted(copies, "blocks copied"),
        Check(f"scores of {k} hypotheses within {worst:.1e} of one pass each", worst < 1e-3),
        f"{dropped} times a beam was dropped and took another's table (counted)",
    )
