"""Text to ids and back: against the recordings, transformers' own rules, and every way of cutting a
character.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, processors

from cbviz.model.hub import ModelError
from cbviz.model.loader import LoadedModel
from cbviz.model.tokenizer import Tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer(**settings: object) -> Tokenizer:
    """One token a byte, and `<s>` 256, `</s>` 257."""
    core = Core(models.BPE(vocab={b: i for i, b in enumerate(BYTES)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(core, **({"eos_token_ids": [257], "bos_token": "<s>", "eos_token": "</s>"} | settings))  # type: ignore[arg-type]


def gguf_metadata(**extra: object) -> dict[str, object]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*BYTES, "ab", "<s>", "</s>", "<tool>"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1] * 257 + [3, 3, 4],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
    } | extra


@pytest.mark.model
def test_recorded_prompts(real_model: LoadedModel, conformance: Path) -> None:
    tokenizer = real_model.tokenizer
    assert tokenizer is not None
    for r in json.loads((conformance / "smollm2-greedy.json").read_text("utf-8"))["requests"]:
        ids = tokenizer.chat(r["text"]) if r["kind"] == "chat" else tokenizer.encode(r["text"])
        assert ids == r["prompt_token_ids"], r["text"]
        assert tokenizer.decode(r["output_token_ids"]) == r["output_text"]
        assert "".join(tokenizer.token_texts(r["output_token_ids"])) == r["output_text"]
        if r["kind"] == "raw":
            assert tokenizer.decode(ids) == r["text"]
    assert tokenizer.vocab_size == 49152 and tokenizer.eos_token_id == 2
    assert tokenizer.encode("12 345") == [
        *tokenizer.encode("1"),
        *tokenizer.encode("2"),
        *tokenizer.encode(" "),
        *(t for d in "345" for t in tokenizer.encode(d)),
    ]


@pytest.mark.model
def test_chat_with_a_system_message(real_model: LoadedModel) -> None:
    tokenizer = real_model.tokenizer
    assert tokenizer is not None
    text = tokenizer.render_chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|>"}]
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi "
        "<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert "named SmolLM" in tokenizer.render_chat("Hi")


def test_detokenizer_never_splits_a_character() -> None:
    tokenizer = byte_tokenizer()
    text = "aé人🙂 b\n🏳️‍🌈"
    ids = tokenizer.encode(text)
    pieces = tokenizer.token_texts(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text
    assert pieces[:10] == ["a", "", "é", "", "", "人", "", "", "", "🙂"]
    assert not any("\ufffd" in p for p in pieces)


def test_detokenizer_equals_decode_on_any_bytes() -> None:
    tokenizer = byte_tokenizer()
    rng = random.Random(5)
    for _ in range(50):
        ids = [rng.randrange(258) if rng.random() < 0.6 else i for i in tokenizer.encode("x🙂é" * 5)]
        assert "".join(tokenizer.token_texts(ids)) == tokenizer.decode(ids)
    assert tokenizer.token_texts([]) == []


def test_detokenizer_streams() -> None:
    tokenizer = byte_tokenizer()
    stream = tokenizer.detokenizer(skip_special_tokens=True)
    a, b, c = tokenizer.encode("人")
    assert [stream.push(i) for i in (256, a, b, c, a, 257)] == ["", "", "", "人", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_special_tokens() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("</s>") == [257]
    assert tokenizer.decode([257, 0]) == "</s>" + tokenizer.decode([0])
    assert tokenizer.decode([257, 0], skip_special_tokens=True) == tokenizer.decode([0])
    assert tokenizer.token(257) == "</s>" and tokenizer.token(9999) == ""
    assert byte_tokenizer(add_bos=True).encode("é")[0] == 256
    assert 256 not in byte_tokenizer(add_bos=True).encode("é", add_special_tokens=False)


def test_gguf_metadata_makes_a_tokenizer() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    assert tokenizer.encode("ab") == [256] and tokenizer.encode("abab") == [256, 256]
    assert tokenizer.decode(tokenizer.encode("ab é 12 <tool></s>")) == "ab é 12 <tool></s>"
    assert tokenizer.decode(tokenizer.encode("ab<tool></s>"), skip_special_tokens=True) == "ab<tool>"
    assert tokenizer.eos_token_ids == (258,) and tokenizer.eos_token == "</s>"
    assert Tokenizer.from_gguf(gguf_metadata(**{"tokenizer.ggml.add_bos_token": True})).encode("a")[0] == 257
    assert Tokenizer.from_gguf(gguf_metadata(**{"tokenizer.ggml.eot_token_id": 257})).eos_token_ids == (
        258,
        257,
    )


@pytest.mark.parametrize(
    "pre, text, pieces",
    [
        ("smollm", "it's 123 go", ["it", "'s", " ", "1", "2", "3", " go"]),
        ("gpt-2", "it's 123 go", ["it", "'s", " 123", " go"]),
        ("llama-bpe", "it's 12345 go", ["it", "'s", " ", "123", "45", " go"]),
        ("qwen2", "it's 123 go", ["it", "'s", " ", "1", "2", "3", " go"]),
    ],
)
def test_gguf_split_rules(pre: str, text: str, pieces: list[str]) -> None:
    """The splits are those of each model's own tokenizer.json."""
    tokenizer = Tokenizer.from_gguf(gguf_metadata(**{"tokenizer.ggml.pre": pre}))
    split = tokenizer._core.pre_tokenizer.pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in split] == pieces


def test_gguf_kinds_that_are_not_read() -> None:
    with pytest.raises(ModelError, match="kind 'llama'"):
        Tokenizer.from_gguf({"tokenizer.ggml.model": "llama"})
    with pytest.raises(ModelError, match="rule 'deepseek-r1'"):
        Tokenizer.from_gguf(gguf_metadata(**{"tokenizer.ggml.pre": "deepseek-r1"}))


def test_save_and_load(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(add_bos=True, chat_template="{{ messages[0].content }}!")
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.encode("é") == tokenizer.encode("é") and again.eos_token_ids == (257,)
    assert again.render_chat("hi") == "hi!"


def test_folder_as_the_hub_has_it(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None
    core = byte_tokenizer()._core
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": {"content": "</s>"},
                "bos_token": "<s>",
                "chat_template": [
                    {"name": "tool", "template": "no"},
                    {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
                ],
            }
        )
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None and tokenizer.eos_token_ids == (3,) and tokenizer.eos_token == "</s>"
    assert tokenizer.encode("a")[0] == 256
    assert tokenizer.chat("a") == [256, *tokenizer.encode("a", add_special_tokens=False)]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 257]}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}")
    again = Tokenizer.from_folder(tmp_path)
    assert again is not None and again.eos_token_ids == (3, 257) and again.render_chat("a") == "1"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "template, said",
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed"),
        ("{{ messages.append(1) }}", "failed"),
        ("{% if %}", "failed"),
    ],
)
def test_templates_that_fail_or_reach_out_are_refused(template: str | None, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        byte_tokenizer(chat_template=template).render_chat("hi")
