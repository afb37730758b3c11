"""Counted work against sums written out by hand, position by position."""

from __future__ import annotations

import dataclasses

import pytest

from cbviz.config import ConfigError
from cbviz.cost import devices, make, models
from cbviz.cost.roofline import Roofline, count, price_batch, windowed_pairs
from cbviz.messages import Chunk, Sampling, SchedulerOutput
from cbviz.specs import DeviceSpec, ModelSpec

TINY = ModelSpec("tiny", 3, 8, 2, 1, 4, 16, 32, 64)
LINEAR = 3 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16)
HEAD = 32 * 8


def plan_of(*chunks: tuple[int, int, bool], padding: int = 0, drafts: int = 0) -> SchedulerOutput:
    plan = SchedulerOutput(0)
    plan.chunks = [
        Chunk(f"r{i}", s, n, [], [], sample, Sampling(), num_draft=drafts)
        for i, (s, n, sample) in enumerate(chunks)
    ]
    plan.num_padding_tokens = padding
    return plan


def test_70_gigaparameters_take_70_milliseconds_on_an_a100_not_microseconds() -> None:
    """The article: 'A100 at 2 TB/s reads 140 GB in about 70 microseconds'."""
    weights_bytes = 70e9 * 2
    assert weights_bytes == 140e9
    assert weights_bytes / 2e12 == pytest.approx(0.070)
    cost = price_batch(models.get("Llama-3-70B"), devices.get("A100"), num_decodes=1, context=0)
    assert cost.weight_bytes == pytest.approx(139e9, rel=0.01)
    assert cost.total_s == cost.memory_s == pytest.approx(0.068, abs=0.001)
    assert cost.compute_s < cost.memory_s / 100


def test_a_decode_and_a_prefill_by_hand() -> None:
    work = count(plan_of((0, 5, True), (9, 1, True)), TINY)
    seen = (1 + 2 + 3 + 4 + 5) + 10
    assert work.flops == 2 * LINEAR * 6 + 2 * HEAD * 2 + 3 * 4 * 2 * 4 * seen
    assert work.weight_bytes == 2 * (LINEAR + HEAD)
    assert work.kv_bytes == 3 * 2 * 1 * 4 * 2 * (5 + 10)
    assert work.bytes == work.weight_bytes + work.kv_bytes


def test_the_head_is_read_only_for_sampled_rows() -> None:
    assert count(plan_of((0, 5, False)), TINY).weight_bytes == 2 * LINEAR
    with_drafts = count(plan_of((9, 3, True), drafts=2), TINY)
    assert with_drafts.flops - count(plan_of((9, 3, False)), TINY).flops == 2 * HEAD * 3


def test_weights_are_read_once_whatever_the_batch() -> None:
    spec, h100 = models.get("Llama-3-8B"), devices.get("h100")
    one, many = price_batch(spec, h100, 1, 512), price_batch(spec, h100, 64, 512)
    assert one.weight_bytes == many.weight_bytes
    assert many.kv_bytes == pytest.approx(64 * one.kv_bytes)
    assert many.flops == pytest.approx(64 * one.flops)
    assert many.total_s < 2 * one.total_s


def test_prefill_is_bound_by_compute_and_decode_by_memory() -> None:
    spec, h100 = models.get("Llama-3-8B"), devices.get("h100")
    assert (p := price_batch(spec, h100, prefill_tokens=2048)).compute_s > p.memory_s
    assert (d := price_batch(spec, h100, 8, 1024)).memory_s > d.compute_s


def test_chunking_a_prompt_keeps_its_operations() -> None:
    spec = models.get("Qwen3-0.6B")
    whole = count(plan_of((0, 100, True)), spec)
    a, b = count(plan_of((0, 60, False)), spec), count(plan_of((60, 40, True)), spec)
    assert a.flops + b.flops == pytest.approx(whole.flops, rel=1e-12)
    assert a.weight_bytes + b.weight_bytes > 1.5 * whole.weight_bytes


@pytest.mark.parametrize("window", [1, 3, 8])
def test_windowed_pairs_equal_the_sum(window: int) -> None:
    for start in range(12):
        for n in range(1, 12):
            assert windowed_pairs(start, n, window) == sum(
                min(p + 1, window) for p in range(start, start + n)
            )


def test_a_window_limits_kv_and_attention_but_not_in_global_layers() -> None:
    windowed = dataclasses.replace(TINY, sliding_window=4, num_global_layers=1)
    work = count(plan_of((9, 2, False)), windowed)
    per_position = 2 * 1 * 4 * 2
    assert work.kv_bytes == 1 * per_position * 11 + 2 * per_position * (3 + 2)
    assert work.flops == 2 * LINEAR * 2 + 4 * 2 * 4 * (1 * (10 + 11) + 2 * (4 + 4))


def test_experts_touched_grow_with_the_batch() -> None:
    spec = models.get("Mixtral-8x7B-v0.1")
    head = spec.vocab_size * spec.hidden_size
    experts = 32 * 8 * 3 * 4096 * 14336
    dense = spec.params - 2 * head - experts
    one = count(plan_of((9, 1, True)), spec)
    assert one.weight_bytes == pytest.approx(2 * (dense + head + experts * 2 / 8))
    assert one.weight_bytes == pytest.approx(2 * spec.active_params)
    two = count(plan_of((9, 1, True), (9, 1, True)), spec)
    assert two.weight_bytes == pytest.approx(2 * (dense + head + experts * (1 - 0.75**2)))
    many = count(plan_of((0, 4096, True)), spec)
    assert many.weight_bytes == pytest.approx(2 * (spec.params - head))


def test_mxfp4_experts_weigh_what_they_weigh() -> None:
    spec = models.get("GPT-OSS-120B")
    read = count(plan_of((0, 8192, True)), spec).weight_bytes
    experts = 36 * 128 * 3 * 2880 * 2880
    assert read == pytest.approx(
        0.53 * experts + 2 * (spec.params - spec.vocab_size * spec.hidden_size - experts), rel=1e-6
    )


def test_mla_reads_its_latent_and_attends_in_it() -> None:
    spec = models.get("DeepSeek-V2-Lite")
    decode = count(plan_of((999, 1, False)), spec)
    assert decode.kv_bytes == 27 * (512 + 64) * 2 * 1000
    head = spec.vocab_size * spec.hidden_size
    assert decode.flops == pytest.approx(
        2 * (spec.active_params - head) + 27 * 2 * 16 * (2 * 512 + 64) * 1000
    )
    prefill = count(plan_of((0, 2, False)), spec)
    assert prefill.flops == pytest.approx(4 * (spec.active_params - head) + 27 * 2 * 16 * (192 + 128) * 3)


def test_padding_costs_linear_work() -> None:
    assert (
        count(plan_of((0, 5, False), padding=3), TINY).flops - count(plan_of((0, 5, False)), TINY).flops
        == 2 * LINEAR * 3
    )


def test_float32_doubles_the_bytes() -> None:
    f32 = dataclasses.replace(TINY, weight_bytes_per_param=4.0, kv_bytes_per_element=4.0)
    assert count(plan_of((3, 1, True)), f32).bytes == 2 * count(plan_of((3, 1, True)), TINY).bytes


def test_total_is_the_larger_bound_plus_overhead() -> None:
    device = DeviceSpec("d", 1e9, 1e6, 1e6)
    cost = Roofline(TINY, device, overhead_s=0.5).price(plan_of((0, 5, True)))
    assert cost.total_s == max(cost.flops / 1e6, (cost.weight_bytes + cost.kv_bytes) / 1e6) + 0.5
    assert Roofline(TINY, device, overhead_s=0.5).price(SchedulerOutput(0)).total_s == 0


def test_bad_input_names_the_field() -> None:
    with pytest.raises(ConfigError, match="bandwidth_bytes_s is 0"):
        Roofline(TINY, DeviceSpec("d", 1, 0, 1))
    with pytest.raises(ConfigError, match="overhead_s is nan"):
        Roofline(TINY, devices.get("t4"), float("nan"))
    with pytest.raises(ConfigError, match="num_decodes is -1"):
        price_batch(TINY, devices.get("t4"), -1)
    with pytest.raises(ConfigError, match="cost is 'x'"):
        make("x", TINY, devices.get("t4"))


@pytest.mark.parametrize("name", ["roofline", "article", "article-shared"])
def test_make_by_name(name: str) -> None:
    cost = make(name, TINY, devices.get("h100"))
    assert cost.name == name
    assert cost.price(plan_of((0, 5, True))).total_s > 0


def test_swaps_are_priced_by_the_link_to_the_host() -> None:
    """What comes in is waited for; what goes out goes beside the pass, and counts only where it takes longer."""
    from cbviz.cost import devices, models

    device = devices.get("NVIDIA H100 SXM")
    cost = Roofline(TINY, device)
    block = 16 * models.kv_bytes_per_token(TINY)
    plan = SchedulerOutput(1, 16)
    plan.chunks = [Chunk("a", 0, 8, [1] * 8, [1], True, Sampling())]
    alone = cost.price(plan).total_s
    plan.swaps_in, plan.swaps_out = ((1, 0), (2, 1)), ((3, 2),)
    priced = cost.price(plan)
    assert priced.swap_in_s == pytest.approx(2 * block / 63e9) and priced.swap_out_s == pytest.approx(
        block / 63e9
    )
    assert priced.total_s == pytest.approx(priced.swap_in_s + max(alone, priced.swap_out_s))
    assert devices.host_link_bytes_s(devices.get("Apple M1")) == 34e9
