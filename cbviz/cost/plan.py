"""Does a model fit a device, and how many requests at once: weights, KV cache, blocks.

Figures are modelled from the tables, nothing is measured.

Owns the arithmetic of `cbviz model plan`. Knows shapes and sizes; no tensors, no files.
"""

from __future__ import annotations

from dataclasses import dataclass

from cbviz.config import ConfigError
from cbviz.cost.models import complete, kv_bytes_per_token
from cbviz.cost.roofline import price_batch
from cbviz.specs import DeviceSpec, ModelSpec

DEFAULT_UTILISATION = 0.9
"""Share of the memory that weights and KV may take together; the rest is for activations and the runtime.
vLLM's --gpu-memory-utilization by default.
"""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, blocks and requests.

    `max_concurrency`: requests of `context` tokens whose KV fits at once, 0 if not one does.

    `decode_s`: least time of one decode step of that many requests at full context on that device (None if
    none fits): weights and KV read once at peak bandwidth.
    """

    model: str
    device: str
    memory_bytes: float
    usable_bytes: float
    weight_bytes: float
    kv_bytes_per_token: float
    kv_bytes: float
    """What is left for KV, 0 if the weights alone don't fit."""
    block_size: int
    num_blocks: int
    """Blocks of all layers that fit, vLLM's null block included."""
    context: int
    kv_bytes_per_request: float
    """KV of one request of `context` tokens, in whole blocks; layers with a sliding window keep that much
    only.
    """
    max_concurrency: int
    decode_s: float | None

    @property
    def fits(self) -> bool:
        """At least one request of `context` tokens fits beside the weights."""
        return self.max_concurrency > 0


def weight_bytes(spec: ModelSpec) -> float:
    """Bytes of all weights: parameters x bytes a parameter, a mixture's routed experts at their own size."""
    m = complete(spec)
    spread = m.num_experts - m.num_experts_per_tok
    experts = 0.0
    if m.num_experts and spread > 0 and m.expert_bytes_per_param:
        # All parameters and those of one token differ by the experts it does not pick, and by the embedding
        # that is only looked up.
        looked_up = 0 if m.tied_embeddings else m.vocab_size * m.hidden_size
        experts = (m.params - m.active_params - looked_up) * m.num_experts / spread
    return (m.params - experts) * m.weight_bytes_per_param + experts * m.expert_bytes_per_param


def plan(
    spec: ModelSpec,
    device: DeviceSpec,
    *,
    context: int | None = None,
    block_size: int = 16,
    utilisation: float = DEFAULT_UTILISATION,
) -> MemoryPlan:
    """The memory plan of one model on one device.

    `context` None: the model's greatest, at most 8,192. Raises ConfigError naming field and limit.
    """
    context = min(spec.max_context, 8192) if context is None else context
    if not 1 <= context <= spec.max_context:
        raise ConfigError(
            f"context is {context}, it must lie in 1..{spec.max_context}, the positions of {spec.name}"
        )
    if not 1 <= block_size <= 1024:
        raise ConfigError(f"block_size is {block_size}, it must lie in 1..1024")
    if not 0 < utilisation <= 1:
        raise ConfigError(f"utilisation is {utilisation}, it must lie in (0, 1]")
    if not device.memory_bytes > 0:
        raise ConfigError(f"the memory of {device.name} is not known")
    weights, per_token = weight_bytes(spec), kv_bytes_per_token(spec)
    usable = device.memory_bytes * utilisation
    room = max(0.0, usable - weights)
    num_blocks = int(room // (per_token * block_size))
    blocks = -(-context // block_size)
    windowed = spec.num_layers - spec.num_global_layers if spec.sliding_window else 0
    # A window of w tokens lies in at most ceil((w - 1) / block_size) + 1 blocks; sinks in blocks of their
    # own.
    blocks_in_window = (
        min(blocks, -(-(spec.sliding_window - 1) // block_size) + 1 - (-spec.attention_sinks // block_size))
        if windowed
        else 0
    )
    per_layer_block = per_token / spec.num_layers * block_size
    per_request = per_layer_block * ((spec.num_layers - windowed) * blocks + windowed * blocks_in_window)
    free = room - per_token * block_size  # the null block
    fit = int(free // per_request) if free >= per_request else 0
    decode_s = (
        price_batch(spec, device, fit, context - 1).total_s
        if fit and device.bandwidth_bytes_s > 0 and device.flops_s > 0
        else None
    )
    return MemoryPlan(
        spec.name,
        device.name,
        device.memory_bytes,
        usable,
        weights,
        per_token,
        room,
        block_size,
        num_blocks,
        context,
        per_request,
        fit,
        decode_s,
    )


__all__ = ["DEFAULT_UTILISATION", "MemoryPlan", "plan", "weight_bytes"]
