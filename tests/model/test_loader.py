"""Weights from safetensors and GGUF arrive unchanged; the converted copy is used, shared and replaced."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cbviz.model import hub, ops
from cbviz.model.gguf_file import GgufFile
from cbviz.model.hub import ModelError
from cbviz.model.loader import LoadedModel, load

gguf = pytest.importorskip("gguf")
HF_TO_GGUF = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(autouse=True)
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.node.get_closest_marker("model") is None:
        monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logits(model: LoadedModel, feed: Any, sequence: list[int]) -> torch.Tensor:
    (out,) = feed(model.decoder(ops.REFERENCE), [sequence], block_size=8, pieces=lambda rng: 40)
    return out


def write_gguf(path: Path, judge: Any, arch: str, kind: Any, **extra: Any) -> None:
    """A GGUF file of a transformers model as llama.cpp's converter writes it: query and key rows of Llama
    interleaved.
    """
    c = judge.config
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    if getattr(c, "head_dim", None):
        w.add_key_length(c.head_dim)
    for key, value in extra.items():
        w.add_key_value(
            key.replace("__", "."),
            value,
            gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.STRING,
        )
    letters = [chr(i) for i in range(34, 127)] + ["Ġ", "ab", "<s>", "</s>"]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(letters)
    w.add_token_types([1] * 95 + [3, 3])
    w.add_token_merges(["a b"])
    w.add_bos_token_id(95)
    w.add_eos_token_id(96)
    for name, p in judge.state_dict().items():
        x = p.float().numpy()
        module, what = name.removeprefix("model.").rsplit(".", 1)
        if module.startswith("layers."):
            _, i, module = module.split(".", 2)
            if arch == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = c.num_attention_heads if module.endswith("q_proj") else c.num_key_value_heads
                x = (
                    x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:])
                    .swapaxes(1, 2)
                    .reshape(x.shape)
                )
            target = f"blk.{i}.{HF_TO_GGUF[module]}.{what}"
        elif module == "lm_head" and c.tie_word_embeddings:
            continue
        else:
            target = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[
                module
            ] + f".{what}"
        w.add_tensor(target, np.ascontiguousarray(x.astype(kind) if x.ndim == 2 else x))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.mark.parametrize(
    "name, arch", [("llama", "llama"), ("llama-biases", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
def test_gguf_equals_safetensors(name: str, arch: str, tiny: Any, feed: Any, tmp_path: Path) -> None:
    model = tiny(name)
    write_gguf(tmp_path / "m.gguf", model.judge, arch, np.float32)
    ours = load(str(tmp_path / "m.gguf"))
    sequence = [(7 * i) % 97 for i in range(30)]
    torch.testing.assert_close(logits(ours, feed, sequence), model.expected(sequence), atol=1e-4, rtol=1e-4)
    assert ours.eos_token_ids == (96,)
    assert ours.tokenizer is not None and ours.tokenizer.decode(ours.tokenizer.encode("ab c")) == "ab c"


def test_gguf_half_precision_and_linear_scaling(tiny: Any, feed: Any, tmp_path: Path) -> None:
    judge = copy.deepcopy(tiny("llama-linear").judge)
    for p in judge.parameters():
        if p.dim() == 2:
            p.data = p.data.half().float()
    write_gguf(
        tmp_path / "m.gguf",
        judge,
        "llama",
        np.float16,
        llama__rope__scaling__type="linear",
        llama__rope__scaling__factor=3.0,
    )
    sequence = [(5 * i) % 97 for i in range(30)]
    with torch.inference_mode():
        expected = judge(torch.tensor([sequence])).logits[0]
    torch.testing.assert_close(
        logits(load(str(tmp_path / "m.gguf")), feed, sequence), expected, atol=1e-4, rtol=1e-4
    )


def test_gguf_that_is_damaged_says_so(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny("llama").judge, "llama", np.float32)
    whole = path.read_bytes()
    for keep in (10, 200, len(whole) - 1000):
        path.write_bytes(whole[:keep])
        with pytest.raises(ModelError, match=r"damaged|cut short"):
            load(str(path))
    path.write_bytes(b"not a model")
    with pytest.raises(ModelError, match="not a GGUF file"):
        load(str(path))


def test_gguf_of_another_architecture_is_refused(tiny: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny("llama").judge, "gemma", np.float32)
    with pytest.raises(ModelError, match="'gemma'"):
        load(str(tmp_path / "m.gguf"))
    write_gguf(
        tmp_path / "y.gguf", tiny("llama").judge, "llama", np.float32, llama__rope__scaling__type="yarn"
    )
    with pytest.raises(ModelError, match="'yarn'"):
        load(str(tmp_path / "y.gguf"))


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_quantised_tensors_are_read(kind: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    w = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    w.add_tensor("x", gguf.quants.quantize(x, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with GgufFile(tmp_path / "q.gguf") as f:
        assert f.metadata["general.architecture"] == "llama"
        y = f.tensor("x")
        with pytest.raises(ModelError, match="no tensor 'y'"):
            f.tensor("y")
    assert y.shape == (3, 64) and 0 < np.abs(x - y).max() < 0.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_safetensors_in_shards(
    dtype: torch.dtype, tiny: Any, feed: Any, tmp_path: Path
) -> None:
    model = tiny("qwen3")
    copy.deepcopy(model.judge).to(dtype).save_pretrained(tmp_path / "half", max_shard_size="10KB")
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 1
    sequence = [(3 * i) % 97 for i in range(20)]
    with torch.inference_mode():
        expected = (
            type(model.judge)
            .from_pretrained(tmp_path / "half", dtype=torch.float32)(torch.tensor([sequence]))
            .logits[0]
        )
    torch.testing.assert_close(
        logits(load(str(tmp_path / "half")), feed, sequence), expected, atol=1e-4, rtol=1e-4
    )


def test_converted_copy_is_used_again_and_replaced_when_the_source_changes(
    tiny: Any, tmp_path: Path, cache: Path
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny("llama").folder, folder)
    first = load(str(folder))
    (copy,) = (cache / "converted").iterdir()
    before = {f.name: f.stat().st_mtime_ns for f in copy.iterdir()}
    again = load(str(folder))
    assert {f.name: f.stat().st_mtime_ns for f in copy.iterdir()} == before
    assert torch.equal(first.weights.layers[1].qkv, again.weights.layers[1].qkv)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file({k: v * 2 for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    changed = load(str(folder))
    assert torch.equal(changed.weights.layers[1].qkv, first.weights.layers[1].qkv * 2)
    (newer,) = (cache / "converted").iterdir()
    assert newer != copy


def test_converted_copy_is_a_plain_safetensors_file_and_is_never_written(
    tiny: Any, tmp_path: Path, cache: Path
) -> None:
    from safetensors.torch import load_file

    model = load(str(tiny("llama").folder))
    (copy,) = (cache / "converted").iterdir()
    tensors = load_file(copy / "weights.safetensors")
    assert torch.equal(tensors["layers.2.gate_up"], model.weights.layers[2].gate_up)
    assert model.weights.head is model.weights.embed and "head" not in tensors
    (copy / "weights.safetensors").chmod(0o444)
    before = (copy / "weights.safetensors").read_bytes()
    other = load(str(tiny("llama").folder))
    other.weights.norm.add_(1)  # private pages: neither the file nor the other process's mapping changes
    assert (copy / "weights.safetensors").read_bytes() == before


def test_a_conversion_that_fails_leaves_nothing(tiny: Any, tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny("llama").folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 41}))
    with pytest.raises(
        ModelError, match=r"gate_proj.weight' has shape \[40, 24\], the config asks for \[41, 24\]"
    ):
        load(str(folder))
    assert list((cache / "converted").iterdir()) == []
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.3\."):
        load(str(folder))
    (folder / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(ModelError, match="damaged"):
        load(str(folder))
    assert list((cache / "converted").iterdir()) == []


@pytest.mark.model
def test_real_model(real_model: LoadedModel) -> None:
    spec = real_model.spec()
    assert (
        spec.num_layers,
        spec.hidden_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.vocab_size,
        spec.max_context,
    ) == (30, 576, 9, 3, 64, 49152, 8192)
    assert spec.params == 134_515_008 and spec.tied_embeddings
    assert real_model.eos_token_ids == (2,)
    assert hub.pulled_path("smollm2") is not None
