"""Multi-head latent attention.

DeepSeek's MLA keeps one latent a token in place of keys and values of every head: how many bytes that is
beside MHA and GQA (real shapes, counted), and what a decode step of attention then takes on this machine, in
the latent space, with every latent expanded first, and over full keys and values of as many heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cbviz.bench.techniques import Check, Context, Row, counted, measured


def measure(ctx: Context) -> Iterator[Row]:
    from cbviz.cost import models

    for name in ("DeepSeek-V2-Lite", "DeepSeek-V3"):
        spec = models.get(name)
        kinds = models.kv_variants(spec)
        by_hand = spec.num_layers * (spec.kv_lora_rank + spec.qk_rope_head_dim) * 2
        for other in ("mha", "gqa"):
            yield Row(
                f"{name}, bytes a token",
                f"the latent against {other.upper()} of the same heads",
                benefit=counted(kinds[other] / kinds["mla"], "x fewer bytes"),
                cost=counted(
                    (2 * spec.kv_lora_rank + spec.qk_rope_head_dim)
                    / (2 * spec.head_dim - spec.qk_rope_head_dim),
                    "x the operations a pair, decoding",
                ),
                check=Check(
                    f"{kinds['mla']:,.0f} bytes = layers x (d_c + d_rope) x 2", kinds["mla"] == by_hand
                ),
                note=f"{kinds[other] / 1024:,.1f} KiB against {kinds['mla'] / 1024:,.1f} KiB",
            )
    yield from _attention(ctx)


def _attention(ctx: Context) -> Iterator[Row]:
    """One layer's decode step with DeepSeek-V2-Lite's heads (16 of 128 + 64, latent 512), float32."""
    import torch

    from cbviz.model import cpu_ops
    from cbviz.model.kv_store import KVLayer
    from cbviz.model.ops import Batch

    heads, plain, rope, rank, size = 16, 128, 64, 512, 16
    g = torch.Generator().manual_seed(ctx.seed)
    kv_b = torch.randn(heads, 2 * plain, rank, generator=g) * rank**-0.5
    scale = (plain + rope) ** -0.5
    for batch, length in ((2, 128),) if ctx.quick else ((1, 1024), (8, 1024), (8, 128)):
        blocks = -(-length // size)
        cache = torch.randn(batch * blocks + 1, 1, size, rank + rope, generator=g)
        latent = KVLayer(cache, cache[..., :rank])
        expanded = torch.einsum("bosc,hnc->bhsn", cache[..., :rank], kv_b)
        keys = torch.cat(
            (expanded[..., :plain], cache[..., rank:].expand(-1, heads, -1, -1)), dim=-1
        ).contiguous()
        # The full cache's kernel has one width for keys and values: values are padded with zeros, as engines
        # without MLA do it.
        full = KVLayer(keys, torch.nn.functional.pad(expanded[..., plain:], (0, rope)).contiguous())
        tables = [list(range(1 + i * blocks, 1 + (i + 1) * blocks)) for i in range(batch)]
        q = torch.randn(batch, heads, plain + rope, generator=g)

        def fresh(tables: Any = tables, batch: int = batch, length: int = length) -> Batch:
            return Batch.build(tables, [1] * batch, [length] * batch, size)

        def times(f: Any, repeat: int = 1 if ctx.quick else 5) -> Any:
            for _ in range(repeat):
                y = f()
            return y

        def expanding(cache: Any = cache, q: Any = q, batch: int = batch, length: int = length) -> Any:
            kept = cache[1:].reshape(batch, -1, rank + rope)[:, :length]
            apart = (
                (kept[..., :rank] @ kv_b.reshape(-1, rank).T).view(batch, length, heads, -1).transpose(1, 2)
            )
            k = torch.cat((apart[..., :plain], kept[:, None, :, rank:].expand(-1, heads, -1, -1)), dim=-1)
            return torch.nn.functional.scaled_dot_product_attention(
                q[:, :, None], k, apart[..., plain:], scale=scale
            )[:, :, 0]

        won = ctx.contest(
            {
                "absorbed": lambda: times(lambda: cpu_ops.latent_attention(q, kv_b, latent, fresh(), scale)),  # noqa: B023 - called at once
                "expanding": lambda: times(expanding),
                "mha": lambda: times(lambda: cpu_ops.attention(q, full, fresh(), scale, 0)[..., :plain]),  # noqa: B023
            }
        )
        far = max(float((won.results["absorbed"] - won.results[n]).abs().max()) for n in ("expanding", "mha"))
        check = Check(f"largest difference {far:.1e}", far < 1e-4)
        kept = counted(4 * (rank + rope) * length * batch / 1e6, "MB of cache in the layer")
        setting = f"decode, {batch} x {length:,} tokens, one layer"
        yield Row(
            setting,
            "latents as they are against latents expanded",
            benefit=measured(won.ratio("expanding", "absorbed"), "x as fast"),
            cost=kept,
            check=check,
        )
        yield Row(
            setting,
            "latents against full keys and values",
            benefit=measured(won.ratio("mha", "absorbed"), "x as fast"),
            cost=kept,
            check=check,
            note=(
                "full keys and values would be "
                f"{4 * heads * (2 * plain + rope) * length * batch / 1e6:,.0f} MB"
            ),
        )
