"""The work of a step, counted from its plan, and the least time that work can take on a device.

Owns the counting (`count`) and the roofline (`Roofline`). Knows shapes and peak figures; no tensors, no
measurement, no queue.

What is counted, for T computed tokens in a step (one multiply and one add are two operations):

* linear layers: 2 x active parameters x T. The input embedding is a lookup and costs nothing; the output head
  is charged for sampled rows alone.
* attention: a query at position p sees p + 1 positions, at most the window: 4 x heads x head size operations
  for each of them in each layer.
* weights: read once a step whatever the batch, which is why batching pays. The head is read only if a row is
  sampled. Of a mixture's experts those are read that some token picks: E (1 - (1 - k/E)^T) of E under even
  routing, an expectation (uneven routing touches fewer).
* KV: a chunk reads the positions before it once (a prefill tile shares them among its queries; a decode row
  reads its whole context) and writes its own: start + num_tokens positions in all; in a layer with a window
  only the last window - 1 before it are read.

Left out: activations, norms, rotary embedding, softmax, sampling, the looked-up embedding rows,
communication, attention of padding. Each only adds, so the times are **lower bounds**: max(operations / peak
rate, bytes / peak bandwidth), and no step can be faster on that device.

Sources: S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009; R. Pope et al., "Efficiently
Scaling Transformer Inference", MLSys 2023 (the PaLM inference paper); C. Chen, "Transformer Inference
Arithmetic", kipply.com, 2022. MLA as DeepSeek-V2, section 2.1: decodes attend in the latent space (absorbed
weights), prefills with expanded keys and values.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec

from cbviz.config import ConfigError
from cbviz.cost.devices import host_link_bytes_s
from cbviz.cost.models import complete, kv_bytes_per_token, kv_elements_per_layer
from cbviz.messages import Chunk, Drafting, Sampling, SchedulerOutput, StepCost
from cbviz.specs import DeviceSpec, ModelSpec


class Work(NamedTuple):
    """Counted work of one step: operations, bytes of weights read, bytes of KV read and written."""

    flops: float
    weight_bytes: float
    kv_bytes: float
    decode_flops: float = 0.0
    decode_kv_bytes: float = 0.0
    """Of these, the share of chunks of one position (drafts aside)."""

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes


class _Counter:
    """The coefficients of one model, worked out once, and the count itself."""

    __slots__ = (
        "decode_pair",
        "dense_bytes",
        "expert_bytes",
        "head_bytes",
        "head_flops",
        "kv_full",
        "kv_windowed",
        "linear_flops",
        "miss",
        "num_full",
        "num_windowed",
        "pair",
        "spec_layers",
        "window",
    )

    def __init__(self, spec: ModelSpec) -> None:
        m = complete(spec)
        head = m.vocab_size * m.hidden_size
        looked_up = 0 if m.tied_embeddings else head
        self.linear_flops = 2.0 * (m.active_params - head)
        self.head_flops = 2.0 * head
        self.head_bytes = head * m.weight_bytes_per_param
        # All parameters and those of one token differ by the experts that it does not pick, E - k of E, and
        # by what is only looked up.
        spread = m.num_experts - m.num_experts_per_tok
        experts = (m.params - m.active_params - looked_up) * m.num_experts / spread if spread > 0 else 0.0
        self.dense_bytes = (
            m.active_params - head - experts * (m.num_experts_per_tok / m.num_experts if experts else 0.0)
        ) * m.weight_bytes_per_param
        self.expert_bytes = experts * (m.expert_bytes_per_param or m.weight_bytes_per_param)
        self.miss = 1.0 - m.num_experts_per_tok / m.num_experts if experts else 0.0
        # A query at position p sees min(p + 1, window) positions, and of the sinks those that lie before
        # them: min(p + 1, window + sinks) in all.
        self.window = m.sliding_window + m.attention_sinks if m.sliding_window else 0
        windowed = m.num_layers - m.num_global_layers if m.sliding_window else 0
        full = m.num_layers - windowed
        kv = kv_elements_per_layer(m) * m.kv_bytes_per_element
        self.kv_full, self.kv_windowed = full * kv, windowed * kv
        if m.attention == "mla":
            self.pair = 2.0 * m.num_heads * (2 * m.head_dim - m.qk_rope_head_dim)
            self.decode_pair = 2.0 * m.num_heads * (2 * m.kv_lora_rank + m.qk_rope_head_dim)
        else:
            self.pair = self.decode_pair = 4.0 * m.num_heads * m.head_dim
        self.num_full, self.num_windowed = full, windowed
        self.spec_layers = m.num_layers

    def count(self, plan: SchedulerOutput) -> Work:
        num_tokens = plan.num_padding_tokens
        rows = 0
        kv_bytes = decode_kv = 0.0
        attention = decode_flops = 0.0
        window = self.window
        for c in plan.chunks:
            n, start = c.num_tokens, c.start
            num_tokens += n
            if c.sample:
                rows += 1 + c.num_draft
            pairs = n * start + n * (n + 1) // 2
            layer_pairs = self.num_full * pairs
            kv = self.kv_full * (start + n)
            if window:
                layer_pairs += self.num_windowed * windowed_pairs(start, n, window)
                kv += self.kv_windowed * (min(start, window - 1) + n)
            kv_bytes += kv
            pair_flops = layer_pairs * (self.decode_pair if n == 1 else self.pair)
            attention += pair_flops
            if n == 1 + c.num_draft:
                decode_kv += kv
                decode_flops += (
                    pair_flops + self.linear_flops * n + (self.head_flops * n if c.sample else 0.0)
                )
        if not num_tokens:
            return Work(0.0, 0.0, 0.0)
        weights = self.dense_bytes
        if self.expert_bytes:
            weights += self.expert_bytes * (1.0 - self.miss**num_tokens)
        if rows:
            weights += self.head_bytes
        flops = self.linear_flops * num_tokens + self.head_flops * rows + attention
        if plan.drafting is not None and plan.drafting.method in ("self-draft", "draft-model"):
            more = self._drafts(plan, plan.drafting)
            flops, weights, kv_bytes = flops + more[0], weights + more[1], kv_bytes + more[2]
        return Work(flops, weights, kv_bytes, decode_flops, decode_kv)

    def _drafts(self, plan: SchedulerOutput, drafting: Drafting) -> tuple[float, float, float]:
        """(operations, weight bytes, KV bytes) of the passes that draft after the step: one for each draft,
        of a token a request, through `num_layers` layers (left out: a third) and the head. A second model is
        priced as that many layers of this one. Attention's operations, small beside the matrices', are left
        out.
        """
        rows = [c.start + c.num_tokens for c in plan.chunks if c.sample]
        if not rows:
            return 0.0, 0.0, 0.0
        layers = (
            max(1, self.spec_layers // 3)
            if not drafting.num_layers
            else min(drafting.num_layers, self.spec_layers)
        )
        share, k = layers / self.spec_layers, drafting.num_tokens
        kv = k * sum(rows) * share * (self.kv_full + self.kv_windowed)
        return (
            k * len(rows) * (share * self.linear_flops + self.head_flops),
            k * (share * self.dense_bytes + self.head_bytes),
            kv,
        )


def windowed_pairs(start: int, num_tokens: int, window: int) -> int:
    """Pairs of query and key for queries at start .. start + num_tokens - 1 that each see the last `window`
    positions, their own included.
    """
    short = min(max(window - start, 0), num_tokens)  # queries that still see everything before them
    return short * start + short * (short + 1) // 2 + (num_tokens - short) * window


@lru_cache(maxsize=64)
def _counter(spec: ModelSpec) -> _Counter:
    return _Counter(spec)


def count(plan: SchedulerOutput, spec: ModelSpec) -> Work:
    """The work of `plan` on a model of shape `spec`: counted, not measured.

    Divided by a measured time it gives achieved operations and bytes a second.
    """
    return _counter(spec).count(plan)


class Roofline:
    """Least time of a step: the larger of compute time and memory time at the device's peaks, plus
    `overhead_s` (0 keeps it a lower bound).
    """

    name = "roofline"

    def __init__(self, spec: ModelSpec, device: DeviceSpec, overhead_s: float = 0.0) -> None:
        """Raises ConfigError if a peak is not positive or `overhead_s` is negative."""
        if not (device.flops_s > 0 and device.bandwidth_bytes_s > 0):
            raise ConfigError(
                f"{device.name}: flops_s is {device.flops_s} and bandwidth_bytes_s is "
                f"{device.bandwidth_bytes_s}; both must be above 0"
            )
        if not overhead_s >= 0:
            raise ConfigError(f"overhead_s is {overhead_s}, the least is 0")
        self.spec = complete(spec)
        self.device = device
        self.overhead_s = overhead_s
        self._counter = _counter(self.spec)

    def price(self, plan: SchedulerOutput) -> StepCost:
        """Counted work and lower-bound times of one step. A plan without tokens costs nothing."""
        if plan.swaps_in or plan.swaps_out:
            return self._with_swaps(plan)
        return self._compute(plan)

    def _with_swaps(self, plan: SchedulerOutput) -> StepCost:
        """Blocks cross the link to the host once each way: what comes in is waited for, what goes out goes
        beside the pass.
        """
        cost = self._compute(plan)
        link = host_link_bytes_s(self.device)
        block_bytes = plan.block_size * kv_bytes_per_token(self.spec)
        swap_in_s, swap_out_s = (
            len(plan.swaps_in) * block_bytes / link,
            len(plan.swaps_out) * block_bytes / link,
        )
        return msgspec.structs.replace(
            cost,
            swap_in_s=swap_in_s,
            swap_out_s=swap_out_s,
            total_s=swap_in_s + max(cost.total_s, swap_out_s),
        )

    def _compute(self, plan: SchedulerOutput) -> StepCost:
        work = self._counter.count(plan)
        if not work.weight_bytes:
            return StepCost()
        compute_s = work.flops / self.device.flops_s
        memory_s = (work.weight_bytes + work.kv_bytes) / self.device.bandwidth_bytes_s
        return StepCost(
            flops=work.flops,
            weight_bytes=work.weight_bytes,
            kv_bytes=work.kv_bytes,
            decode_flops=work.decode_flops,
            decode_kv_bytes=work.decode_kv_bytes,
            compute_s=compute_s,
            memory_s=memory_s,
            overhead_s=self.overhead_s,
            total_s=max(compute_s, memory_s) + self.overhead_s,
        )


def price_batch(
    spec: ModelSpec,
    device: DeviceSpec,
    num_decodes: int = 0,
    context: int = 0,
    prefill_tokens: int = 0,
    *,
    overhead_s: float = 0.0,
) -> StepCost:
    """What-if: one step of `num_decodes` decoding rows with `context` positions each before them, and one
    whole prompt of `prefill_tokens`.
    """
    for field, value in (
        ("num_decodes", num_decodes),
        ("context", context),
        ("prefill_tokens", prefill_tokens),
    ):
        if value < 0:
            raise ConfigError(f"{field} is {value}, the least is 0")
    plan = SchedulerOutput(0)
    greedy = Sampling()
    plan.chunks = [Chunk(f"decode-{i}", context, 1, [], [], True, greedy) for i in range(num_decodes)]
    if prefill_tokens:
        plan.chunks.append(Chunk("prefill", 0, prefill_tokens, [], [], True, greedy))
    return Roofline(spec, device, overhead_s).price(plan)


__all__ = ["Roofline", "Work", "count", "price_batch", "windowed_pairs"]
