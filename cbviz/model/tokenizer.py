"""Text to token ids and back, and the chat template.

Owns the meaning of token ids as text. Reads `tokenizer.json`, or builds the same thing from a GGUF file's
metadata (byte-level BPE only). Knows nothing of weights; loads no torch. Templates come with downloaded
models, so they run in jinja2's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as _Tokenizer

from cbviz.config import clean_text, shown
from cbviz.model.hub import ModelError, reading

Message = Mapping[str, str]
"""`{"role": "system" | "user" | "assistant", "content": text}`"""

_LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_GGUF_SPECIAL, _GGUF_USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


class Tokenizer:
    """Encodes and decodes one model's text.

    `bos_token`, `eos_token`: as text, for the template. `eos_token_ids`: every id that ends a sequence.
    """

    def __init__(
        self,
        core: _Tokenizer,
        *,
        eos_token_ids: Sequence[int],
        bos_token: str = "",
        eos_token: str = "",
        chat_template: str | None = None,
        add_bos: bool = False,
    ) -> None:
        self._core = core
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token = bos_token
        self.eos_token = eos_token
        if chat_template is not None and not isinstance(chat_template, str):
            raise ModelError(f"chat_template must be text, got {shown(chat_template)}")
        self.chat_template = None if chat_template is None else clean_text(chat_template)
        self._bos_id = core.token_to_id(bos_token) if add_bos and bos_token else None
        """Put before every plain text; None where tokenizer.json's own post-processor does it, or the model
        wants none.
        """

    @property
    def eos_token_id(self) -> int | None:
        """The first of `eos_token_ids`, None if the model has none."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def vocab_size(self) -> int:
        """Ids that stand for text, added tokens included. The model's logits may be padded beyond it."""
        return int(self._core.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain text.

        `add_special_tokens`: with what the model expects in front of a text (often nothing).
        """
        ids = list(self._core.encode(text, add_special_tokens=add_special_tokens).ids)
        return [self._bos_id, *ids] if add_special_tokens and self._bos_id is not None else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of some ids. An incomplete UTF-8 character becomes U+FFFD."""
        return str(self._core.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str:
        """How the vocabulary writes one id (byte-level: a space is 'Ġ'); '' for an id without a token."""
        return self._core.id_to_token(token_id) or ""

    def detokenizer(self, *, skip_special_tokens: bool = False) -> Detokenizer:
        return Detokenizer(self, skip_special_tokens=skip_special_tokens)

    def token_texts(self, ids: Iterable[int]) -> list[str]:
        """One text a token; joined they are `decode(ids)`.

        A character made of several tokens stands with the token that completes it.
        """
        stream = self.detokenizer()
        texts = [stream.push(i) for i in ids]
        if texts:
            texts[-1] += stream.flush()
        return texts

    def render_chat(self, messages: str | Sequence[Message]) -> str:
        """The prompt that the model's template makes of a conversation, up to where the assistant speaks.

        A text is one user message.

        Raises ModelError if the model has no template or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ModelError("this model has no chat template; give it a plain prompt")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        def tojson(x: Any, indent: int | None = None) -> str:
            return json.dumps(x, ensure_ascii=False, indent=indent)

        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = tojson
        env.globals["raise_exception"] = refuse
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        try:
            return env.from_string(self.chat_template).render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=True,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
        except (TemplateError, TypeError, KeyError) as e:
            raise ModelError(f"the model's chat template failed: {e}") from e

    def chat(self, messages: str | Sequence[Message]) -> list[int]:
        """Ids of `render_chat(messages)`; the template writes the special tokens itself."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_settings.json`, which `Tokenizer.load` reads back."""
        self._core.save(str(folder / "tokenizer.json"), pretty=False)
        settings = {
            "eos_token_ids": self.eos_token_ids,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "chat_template": self.chat_template,
            "add_bos": self._bos_id is not None,
        }
        (folder / "tokenizer_settings.json").write_text(json.dumps(settings, ensure_ascii=False), "utf-8")

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """What `save` wrote."""
        return cls(
            _Tokenizer.from_file(str(folder / "tokenizer.json")),
            **json.loads((folder / "tokenizer_settings.json").read_text("utf-8")),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """From a model folder as the hub has it; None if there is no tokenizer.json.

        Raises ModelError if it is damaged.
        """
        if not (folder / "tokenizer.json").is_file():
            return None
        with reading(folder):
            return cls._from_folder(folder)

    @classmethod
    def _from_folder(cls, folder: Path) -> Tokenizer:
        try:
            core = _Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as e:  # the binding raises plain Exception
            raise ModelError(f"{folder / 'tokenizer.json'} cannot be read: {e}") from e
        config, generation, model = (
            _read_json(folder / f) for f in ("tokenizer_config.json", "generation_config.json", "config.json")
        )
        eos_token = _token_text(config.get("eos_token"))
        eos = generation.get("eos_token_id", model.get("eos_token_id"))
        if eos is None:
            eos = core.token_to_id(eos_token) if eos_token else None
        template = config.get("chat_template")
        if isinstance(template, list):  # several named ones
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
        if (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text("utf-8")
        return cls(
            core,
            eos_token_ids=[eos] if isinstance(eos, int) else eos or [],
            bos_token=_token_text(config.get("bos_token")),
            eos_token=eos_token,
            chat_template=template,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From a GGUF file's metadata.

        Raises ModelError for a kind that is not byte-level BPE or a split rule that is not known here.
        """
        with reading("the tokenizer in this GGUF file"):
            return cls._from_gguf(metadata)

    @classmethod
    def _from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
        if kind != "gpt2":
            raise ModelError(
                f"this GGUF file's tokenizer is of kind {kind!r}; only byte-level BPE ('gpt2') is read "
                "from GGUF. Use the model's folder with tokenizer.json instead."
            )
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        splitters: dict[str, Any] = {
            "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            "smollm": pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            ),
            "llama-bpe": pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"), byte_level]
            ),
            "qwen2": pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"), byte_level]
            ),
        }
        if pre not in splitters:
            raise ModelError(
                f"this GGUF file splits text by rule {pre!r}; known are {', '.join(splitters)}. Use the "
                "model's folder with tokenizer.json instead."
            )
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(m.split(" ", 1)) for m in metadata["tokenizer.ggml.merges"]]
        core = _Tokenizer(
            models.BPE(
                vocab={t: i for i, t in enumerate(tokens)}, merges=merges, ignore_merges=pre == "llama-bpe"
            )
        )
        core.pre_tokenizer = splitters[pre]
        core.decoder = decoders.ByteLevel()
        if pre == "qwen2":
            core.normalizer = normalizers.NFC()
        types = metadata["tokenizer.ggml.token_type"]
        core.add_special_tokens(
            [
                AddedToken(t, normalized=False, special=True)
                for t, k in zip(tokens, types, strict=True)
                if k == _GGUF_SPECIAL
            ]
        )
        core.add_tokens(
            [
                AddedToken(t, normalized=False, special=False)
                for t, k in zip(tokens, types, strict=True)
                if k == _GGUF_USER_DEFINED
            ]
        )

        def text(key: str) -> str:
            i = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if i is not None and not (isinstance(i, int) and 0 <= i < len(tokens)):
                raise ModelError(
                    f"tokenizer.ggml.{key}_token_id is {shown(i)}, it must lie in 0..{len(tokens) - 1}, "
                    "the vocabulary"
                )
            return tokens[i] if i is not None else ""

        eos = [
            metadata[k]
            for k in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
            if k in metadata
        ]
        return cls(
            core,
            eos_token_ids=list(dict.fromkeys(eos)),
            bos_token=text("bos"),
            eos_token=text("eos"),
            chat_template=metadata.get("tokenizer.chat_template"),
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        )


class Detokenizer:
    """Turns a stream of ids into a stream of text that never splits a character.

    Decodes from the last place known to be a character's end, so a token costs a few tokens' decoding,
    however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        """The ids shown last and those pending: some decoders drop a space at the very start, so pending ids
        are decoded behind shown ones.
        """
        self._num_shown = 0
        self._shown = ""
        """Text of `_ids[:_num_shown]`, which ends where a character ends."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; '' while a character is incomplete."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        if text.endswith("\ufffd"):
            return ""
        new = text[len(self._shown) :]
        self._ids = self._ids[self._num_shown :]
        self._num_shown = len(self._ids)
        self._shown = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        return new

    def flush(self) -> str:
        """What was held back when the stream ends, incomplete characters as U+FFFD."""
        new = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)[len(self._shown) :]
        self._ids, self._num_shown, self._shown = [], 0, ""
        return new


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    data = json.loads(path.read_text("utf-8"))
    return data if isinstance(data, dict) else {}


def _token_text(token: Any) -> str:
    """tokenizer_config.json holds a token as text or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return clean_text(token) if isinstance(token, str) else ""
