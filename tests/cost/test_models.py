"""The tables of models and devices, against the data files they were copied from."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from cbviz.config import ConfigError, EngineConfig
from cbviz.cost import devices, models
from cbviz.specs import ModelSpec

DATA = Path(os.environ.get("CBVIZ_DATA", Path(__file__).parents[2] / "../shared/data"))
needs_data = pytest.mark.skipif(
    not (DATA / "models.json").exists(), reason=f"no data at {DATA}; set CBVIZ_DATA"
)


@needs_data
def test_every_model_of_the_data_counts_right() -> None:
    rows = json.loads((DATA / "models.json").read_text())["models"]
    assert len(rows) == len(models.MODELS) == 47
    for row in rows:
        spec = models.get(re.sub(r" (\(.*\)|/.*)", "", row["id"]))
        sizes = (spec.params, spec.active_params, models.kv_bytes_per_token(spec))
        assert sizes == (
            row["params_computed"],
            row["active_params_computed"],
            row["kv_bytes_per_token_bf16"],
        ), spec.name
        assert (spec.max_context, spec.attention, spec.tied_embeddings) == (
            row["max_context"],
            row["attention"],
            row["tied_embeddings"],
        ), spec.name
        assert spec.sliding_window == row.get("sliding_window", row.get("attention_chunk", 0)), spec.name
        if "global_attention_layers" in row:
            assert spec.num_global_layers == len(row["global_attention_layers"]), spec.name
        assert spec.params == pytest.approx(row["published_params_b"] * 1e9, rel=0.005), spec.name
        assert spec.source


@needs_data
def test_every_device_of_the_data() -> None:
    rows = json.loads((DATA / "devices.json").read_text())["devices"]
    assert len(rows) == len(devices.DEVICES) == 33
    for row in rows:
        spec = devices.DEVICES[row["name"]]
        assert spec.memory_bytes == row["memory_gib"] * 2**30
        assert spec.bandwidth_bytes_s == pytest.approx(row["bandwidth_gb_s"] * 1e9)
        if row["bf16_dense_tflops"] is not None:
            assert spec.flops_s == pytest.approx(row["bf16_dense_tflops"] * 1e12)
        assert spec.link_bytes_s == pytest.approx(row.get("gpu_link_gb_s_one_way", 0) * 1e9)
        assert spec.kind == row["kind"]
        assert not spec.measured
        assert spec.source
        assert ("certainty" in spec.source) == (row["confidence"] != "high")


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("h100", "NVIDIA H100 SXM"),
        ("A100", "NVIDIA A100 80GB SXM"),
        ("a100 pcie", "NVIDIA A100 80GB PCIe"),
        ("h200", "NVIDIA H200 SXM"),
        ("b200", "NVIDIA B200 SXM"),
        ("l40s", "NVIDIA L40S"),
        ("t4", "NVIDIA T4"),
        ("4090", "NVIDIA RTX 4090"),
        ("RTX 4090", "NVIDIA RTX 4090"),
        ("NVIDIA H100 SXM", "NVIDIA H100 SXM"),
        ("H100_PCIe", "NVIDIA H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB SXM"),
    ],
)
def test_device_aliases(alias: str, name: str) -> None:
    assert devices.get(alias).name == name


def test_the_configs_default_device_is_in_the_table() -> None:
    assert EngineConfig().modelled_device in devices.DEVICES


def test_unknown_names_are_answered_with_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown device 'h101'; nearest: .*NVIDIA H100 SXM"):
        devices.get("h101")
    with pytest.raises(ConfigError, match=r"unknown model 'qwen3-9b'; nearest: .*Qwen3-8B"):
        models.get("qwen3-9b")
    with pytest.raises(ConfigError, match="known: SmolLM2-135M"):
        models.get("")


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("smollm2", "SmolLM2-135M"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3-8B"),
        ("google/gemma-3-4b-it", "Gemma-3-4B"),
        ("llama-3.3-70b", "Llama-3.1-70B"),
        ("qwen3-0.6b", "Qwen3-0.6B"),
    ],
)
def test_model_aliases(alias: str, name: str) -> None:
    assert models.get(alias).name == name


def test_complete_fills_in_a_bare_shape() -> None:
    known = models.get("Llama-3-8B")
    bare = dataclasses.replace(known, params=0, active_params=0)
    assert models.complete(bare) == known
    counted = models.complete(dataclasses.replace(known, active_params=0))
    assert counted.active_params == known.params - known.vocab_size * known.hidden_size
    tiny = models.complete(ModelSpec("tiny", 2, 8, 2, 1, 4, 16, 32, 64))
    assert tiny.params == tiny.active_params == 32 * 8 + 2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16)


def test_kv_of_the_same_heads_cached_otherwise() -> None:
    """By hand: DeepSeek-V3 keeps 512 + 64 numbers a layer; all heads apart would be 128 x (192 + 128), 8
    shared ones a sixteenth of that.
    """
    v3 = models.kv_variants(models.get("deepseek-v3"))
    assert v3 == {"mha": 61 * 128 * 320 * 2.0, "gqa": 61 * 8 * 320 * 2.0, "mla": 61 * 576 * 2.0}
    llama = models.get("llama-3.1-8b")
    assert models.kv_variants(llama) == {"mha": 32 * 32 * 256 * 2.0, "gqa": models.kv_bytes_per_token(llama)}
    assert models.kv_variants(models.get("olmoe-1b-7b")) == {
        "mha": models.kv_bytes_per_token(models.get("olmoe-1b-7b")),
        "gqa": 16 * 8 * 256 * 2.0,
    }


def test_models_that_ship_are_known_by_name() -> None:
    spec = models.get("tiny-moe")
    assert (
        spec.name == "Tiny-MoE"
        and (spec.num_experts, spec.num_experts_per_tok) == (8, 2)
        and "Tiny-MoE" not in models.MODELS
    )
