"""Swapping preempted requests to the host, beside computing them again.

Copying a block costs bytes over the link, twice; computing its tokens again costs a prefill. Both grow with
the length, so what decides is the machine: the bytes that one token's KV has, against the operations that it
takes (PagedAttention paper, section 7.3 and figure 19; there swapping wins with large blocks). One row a
length: a request of that many tokens is preempted and brought back, both ways, on an engine that has nothing
else to do; the same as a formula for an H100 with a large model's KV over PCIe. The last row is a whole run
whose pool is too small.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any

from cbviz.bench.techniques import Check, Context, Row, counted, measured, modelled, same_tokens


def both_ways(ctx: Context, length: int, rounds: int) -> tuple[float, float, float, bool]:
    """Seconds to bring back a request of `length` computed tokens, medians: (computing it again, copying it
    out and in again); bytes copied; did the KV come back bit for bit?
    """
    import numpy as np

    from cbviz.config import EngineConfig
    from cbviz.messages import Chunk, Sampling, SchedulerOutput
    from cbviz.runners.torch_runner import TorchRunner

    size = 16
    n = -(-length // size)
    config = EngineConfig(block_size=size, num_blocks=2 * n + 2, swap_blocks=n, max_model_len=None)
    runner = TorchRunner(ctx.model, config)
    ids, table, other = ctx.ids(length + 1), list(range(1, n + 1)), list(range(n + 1, 2 * n + 1))
    greedy = Sampling()

    def chunks(start: int, stop: int, where: list[int]) -> SchedulerOutput:
        plan = SchedulerOutput(1, size)
        for a in range(start, stop, 512):
            plan.chunks = [Chunk("r", a, min(512, stop - a), ids, where, False, greedy)]
            runner.execute(plan)
        return plan

    again, swap, same, moved = [], [], True, 0.0
    for _ in range(rounds + 1):
        runner.reset()
        t0 = perf_counter()
        chunks(0, length, table)
        again.append(perf_counter() - t0)
        before = [part.select(2, b).clone() for part in runner.kv.parts for b in table]
        out, back = SchedulerOutput(2, size), SchedulerOutput(3, size)
        out.swaps_out = tuple(zip(table, range(n), strict=True))
        back.swaps_in = tuple(zip(other, range(n), strict=True))
        spans = [s for plan in (out, back) for s in runner.execute(plan).spans if s.what != "pass"]
        swap.append(sum(s.end_s - s.start_s for s in spans))
        moved = sum(s.bytes for s in spans)
        after = [part.select(2, b) for part in runner.kv.parts for b in other]
        same = same and all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(before, after, strict=True))
    return median(again[1:]), median(swap[1:]), moved, same


def on_paper(
    length: int, model: str = "Llama-3.1-8B", device: str = "NVIDIA H100 SXM"
) -> tuple[float, float]:
    """Modelled seconds of the same for a large model: (one prefill of `length` tokens, its KV over the link
    and back).
    """
    from cbviz.cost import devices, models
    from cbviz.cost.roofline import price_batch

    spec, d = models.get(model), devices.get(device)
    return price_batch(spec, d, prefill_tokens=length).total_s, 2 * length * models.kv_bytes_per_token(
        spec
    ) / devices.host_link_bytes_s(d)


def measure(ctx: Context) -> Iterator[Row]:
    from cbviz.cost import devices

    for length in (128, 512) if ctx.quick else (64, 256, 1024):
        again, swap, moved, same = both_ways(ctx, length, 1 if ctx.quick else 3)
        theirs = on_paper(length)
        yield Row(
            f"{length} tokens, alone",
            "copied out and back, against computed again",
            measured(again / swap, "x as fast"),
            counted(moved / 1e6, "MB moved"),
            Check("KV equal bit for bit" if same else "the KV that came back differs", same),
            f"{1e3 * swap:.2f} ms against {1e3 * again:.1f} ms (measured); Llama-3.1-8B on an H100, "
            f"modelled: {1e3 * theirs[1]:.2f} ms over PCIe "
            f"against {1e3 * theirs[0]:.2f} ms",
        )
    prefill, link = on_paper(1024)
    moved = (
        2 * 1024 * (32 * 2 * 8 * 128 * 2)
    )  # there and back: layers, keys and values, KV heads, numbers of a head, bytes of a number
    host = devices.host_link_bytes_s(devices.get("NVIDIA H100 SXM"))
    yield Row(
        "1,024 tokens, on paper",
        "the same for Llama-3.1-8B on an H100 over PCIe",
        modelled(prefill / link, "x as fast"),
        counted(moved / 1e6, "MB moved"),
        Check("copies take the time of the bytes counted by hand", abs(link * host - moved) < 1),
        "a lower bound on both sides: the peak rate of the prefill, the peak of the link",
    )
    fields: dict[str, Any] = {
        "num_blocks": 22 if ctx.quick else 65,
        "max_num_seqs": 16,
        "discipline": "vllm",
        "precision": "exact",
        "enable_prefix_caching": False,
    }
    ask = ctx.article(0.3, 6 if ctx.quick else 16)
    ask = [x for x in ask if len(x.prompt_token_ids) + x.max_tokens <= 16 * (fields["num_blocks"] - 1)]
    plain, swapped = ctx.session(ask, **fields), ctx.session(ask, preemption_mode="swap", **fields)
    won = ctx.contest({"recompute": plain, "swap": swapped})
    lost = sum(r.tokens.recomputed for r in plain.trace)
    spans = [s for r in swapped.trace for s in r.spans]
    moved = sum(s.bytes for s in spans)
    copying = sum(s.end_s - s.start_s for s in spans if s.what != "pass")
    yield Row(
        f"pool of {fields['num_blocks'] - 1} blocks, {len(ask)} requests",
        "swap against recompute",
        measured(won.ratio("recompute", "swap"), "x as fast"),
        counted(moved / 1e6, "MB moved"),
        same_tokens(plain, swapped),
        f"{lost:,} tokens computed twice without it; copies took {1e3 * copying:.0f} ms in all (measured)",
    )
