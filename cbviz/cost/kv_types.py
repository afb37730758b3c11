"""What a type of KV saves and what it costs: bytes by the model's shape (counted), quality as it was measured
on one model.

Owns the measured figures, the only place where they stand, and the sentences about them. Knows no tensor and
no engine; measures nothing.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from cbviz.cost import models
from cbviz.specs import ModelSpec, kv_bytes_per_element


class Quality(NamedTuple):
    """Against float32 keys and values: change of the tokens' mean log-probability and mean Kullback-Leibler
    distance, nats; share of places with the same best token.
    """

    logprob_change: float
    divergence: float
    agreement: float


NAME, MODEL = "smollm2", "SmolLM2-135M"
"""The model that was measured. The figures hold for no other: the smaller a model, the dearer its bits."""
MEASURED = {
    "float16": Quality(-0.0001, 0.0000004, 1.0),
    "int8": Quality(-0.0010, 0.0009, 0.990),
    "int4": Quality(-0.0745, 0.0558, 0.891),
}
POSITIONS = 1012
SOURCE = f"measured 2026-11-30 on {MODEL}, {POSITIONS:,} positions"
TEXTS = (
    "the tokens of 20 greedy continuations by transformers, arithmetic in float32: "
    "cbviz.model.quality.kv_quality"
)
AGAIN = "cbviz bench techniques --only kvquant"


def saving(spec: ModelSpec, kv_cache_dtype: str) -> str:
    """Bytes of a token, scales included, and the blocks that fit in the bytes of one of float16.

    Not for MLA, whose latent is not kept as codes.
    """
    size = models.kv_bytes_per_token(
        dataclasses.replace(spec, kv_bytes_per_element=kv_bytes_per_element(kv_cache_dtype, spec.head_dim))
    )
    times = kv_bytes_per_element("float16", spec.head_dim) / kv_bytes_per_element(
        kv_cache_dtype, spec.head_dim
    )
    return f"{size:,.0f} bytes a token" + (
        "" if kv_cache_dtype == "float16" else f", {times:.3g} x the blocks of float16 in the same bytes"
    )


def price(kv_cache_dtype: str) -> str:
    """What was measured of that type's quality; float32 is what the others are held against. Of `MODEL`."""
    q = MEASURED.get(kv_cache_dtype)
    if q is None:
        return "nothing is lost"
    apart = f"{q.divergence:.7f}" if q.divergence < 1e-4 else f"{q.divergence:.4f}"
    return (
        f"tokens {-q.logprob_change:.4f} nats less likely, Kullback-Leibler distance {apart} nats, same "
        f"best token at {100 * q.agreement:.1f} % of places"
    )


def choice(name: str, spec: ModelSpec | None, kv_cache_dtype: str, *, computes: bool = True) -> str:
    """What one should know before choosing that type for the model called `name`: what it saves and what it
    costs. `computes`: real numbers are kept.
    """
    if kv_cache_dtype == "auto":
        return "Follows `precision`: float32 for exact, float16 for fast and int8."
    if spec is None or spec.attention == "mla":
        return ""
    saved = saving(spec, kv_cache_dtype)
    if not computes:
        return f"{saved} (counted). Nothing is computed here: the words stay the same."
    if name != NAME:
        return (
            f"{saved} (counted). Its cost in quality was not measured for this model: {AGAIN} --model {name}"
        )
    return f"{saved} (counted). Against float32: {price(kv_cache_dtype)} ({SOURCE})."
