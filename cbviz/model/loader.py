"""GGUF and safetensors -> weights in the engine's layout, and the tokenizer. No `transformers`.

Owns the translation of names and layouts, and the converted copy in the cache: `weights.safetensors` holds
float32 tensors, query, key and value fused, gate and up fused, laid out so that the file is memory-mapped and
used as it is. Kernels on one machine share its pages; loading again takes no conversion. The copy is keyed by
the source's files and `LAYOUT`, written beside and renamed. Other precisions are files of the same kind
beside it, `weights-fast.safetensors` and `weights-int8.safetensors`, made from it on first use. A file that
is shorter than its header says is made anew.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cbviz.config import shown
from cbviz.model import hub
from cbviz.model.decoder import Decoder, DecoderConfig, LayerWeights, Weights
from cbviz.model.gguf_file import GgufFile
from cbviz.model.hub import ModelError, ModelSource, Progress
from cbviz.model.matrix import Int8Matrix, Matrix, convert, to_device
from cbviz.model.ops import OpSet
from cbviz.model.tokenizer import Tokenizer
from cbviz.specs import ModelSpec

LAYOUT = 1
"""Raised whenever the converted file's contents would differ: older copies are then not found, and removed.
"""
_ALIGN = 4096
_EXACT = "weights.safetensors"
_SCALE = ".scale"
_TYPES: dict[str, tuple[str, torch.dtype]] = {
    "F32": ("<f4", torch.float32),
    "F16": ("<f2", torch.float16),
    "I8": ("i1", torch.int8),
}
"""How safetensors names a type, and what it is here."""

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
Read = Callable[[str], Array]
"""The float32 tensor of a Hugging Face name below `model.`. Raises ModelError if there is none."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights, shape and tokenizer of one model, before operators are chosen.

    `tokenizer` is None where the source has none.

    `weights`: the exact ones, mapped; no page of them is read until somebody uses them. `folder`: the
    converted copy, None for a model made by hand.
    """

    name: str
    title: str
    config: DecoderConfig
    weights: Weights
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    folder: Path | None = None
    _other: dict[str, Weights] = field(init=False, default_factory=dict, repr=False, compare=False)

    def decoder(
        self,
        ops: OpSet,
        window: int = 0,
        precision: str = "exact",
        sinks: int = 0,
        device: torch.device | str | None = None,
    ) -> Decoder:
        """`device`: where its weights lie; None: where `weights` do."""
        return Decoder(self.config, self.weights_in(precision, device), ops, window, sinks)

    def weights_in(self, precision: str, device: torch.device | str | None = None) -> Weights:
        """The weights as `precision` holds them; every caller gets the same tensors. Raises ModelError."""
        home = self.weights.norm.device
        device = torch.device(device) if device is not None else home
        if (
            device.type != home.type
        ):  # "cuda" is whatever card is current; other cards are named by a model of their own
            name = f"{precision} on {device}"
            if name not in self._other:
                self._other[name] = _weights(self.config, dict(_named(self.weights_in(precision))), device)
            return self._other[name]
        if precision == "exact":
            return self.weights
        if precision not in self._other:
            if self.folder is not None:
                self._other[precision] = _weights(
                    self.config, _matrices(_in_precision(self.folder, precision)), home
                )
            else:
                exact = {name: t for name, t in _named(self.weights) if isinstance(t, torch.Tensor)}
                self._other[precision] = _weights(
                    self.config,
                    {n: convert(t, precision) if _is_converted(n, t) else t for n, t in exact.items()},
                    home,
                )
        return self._other[precision]

    def spec(self, precision: str = "exact") -> ModelSpec:
        from cbviz.model.ops import REFERENCE

        return self.config.spec(self.title, self.decoder(REFERENCE).num_params, precision)


def load(
    model: str | ModelSource = "smollm2",
    *,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> LoadedModel:
    """Loads a model: what `hub.resolve` takes, or a source it returned.

    Converts on first use. Raises ModelError.
    """
    source = hub.resolve(model, progress) if isinstance(model, str) else model
    folder = _converted(source)
    about = json.loads((folder / "model.json").read_text("utf-8"))
    config = DecoderConfig.from_dict(about["config"])
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
    weights = _weights(config, dict(_map(folder / _EXACT)), device)
    return LoadedModel(
        source.name, source.title, config, weights, tokenizer, tuple(about["eos_token_ids"]), folder
    )


def _weights(config: DecoderConfig, tensors: dict[str, Matrix], device: torch.device | str) -> Weights:
    on = {name: to_device(t, device) for name, t in tensors.items()}
    layers = [
        LayerWeights(
            **{  # type: ignore[arg-type]
                slot: on[f"layers.{i}.{slot}"]
                for slot in LayerWeights.__slots__
                if f"layers.{i}.{slot}" in on
            }
        )
        for i in range(config.num_layers)
    ]
    norm, frequencies = on["norm"], on["inverse_frequencies"]
    assert isinstance(norm, torch.Tensor) and isinstance(frequencies, torch.Tensor)
    return Weights(
        on["embed"], layers, norm, on["embed"] if config.tied_embeddings else on["head"], frequencies
    )


def _named(w: Weights) -> Iterator[tuple[str, Matrix]]:
    """All tensors by their names in the file."""
    yield "inverse_frequencies", w.inverse_frequencies
    yield "embed", w.embed
    for i, layer in enumerate(w.layers):
        for slot in LayerWeights.__slots__:
            if (t := getattr(layer, slot)) is not None:
                yield f"layers.{i}.{slot}", t
    yield "norm", w.norm
    if w.head is not w.embed:
        yield "head", w.head


def _converted(source: ModelSource) -> Path:
    """The folder of the converted copy, made if it is not there."""
    stem = "".join(ch if ch.isalnum() or ch in "._-" else "_" for ch in source.name)
    name = f"{stem}-{source.fingerprint()}-v{LAYOUT}"
    kept = hub.cache_path() / "converted" / name
    if _is_converted_copy(kept):
        return kept
    try:
        root = hub.writable("converted")
        folder = root / name
        if folder != kept and _is_converted_copy(folder):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(dir=root, prefix="partial-"))
    except OSError as e:
        raise ModelError(
            f"{source.title} cannot be converted: neither the cache {kept.parent} nor a temporary folder "
            "can be written "
            f"({e.strerror or e}); set CBVIZ_CACHE to another folder"
        ) from e
    try:
        with hub.reading(source.path), ExitStack() as stack:
            config, tokenizer, eos, tensors = (_open_gguf if source.kind == "gguf" else _open_folder)(
                source.path, stack
            )
            _write(scratch / _EXACT, tensors)
        if tokenizer is not None:
            tokenizer.save(scratch)
        about = {"config": config.to_dict(), "eos_token_ids": eos, "source": str(source.path)}
        (scratch / "model.json").write_text(json.dumps(about), "utf-8")
        for old in root.glob(f"{stem}-*"):  # copies of an earlier state of the same source
            if old != folder and _source_of(old) == str(source.path):
                shutil.rmtree(old, ignore_errors=True)
        try:
            os.rename(scratch, folder)
        except OSError:
            if not (folder / "model.json").exists():  # else another process was quicker
                raise
    except OSError as e:
        raise ModelError(
            f"{source.title} could not be converted into {root}: {e.strerror or e}. Its float32 weights "
            "need room there; set CBVIZ_CACHE to another folder."
        ) from e
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _is_converted_copy(folder: Path) -> bool:
    """Whether `folder` holds a whole converted copy."""
    return (folder / "model.json").exists() and _is_whole(folder / _EXACT)


def _in_precision(folder: Path, precision: str) -> Path:
    """The file of these weights in another precision, made from the float32 one if it is not there or cut
    short.
    """
    path = folder / f"weights-{precision}.safetensors"
    if _is_whole(path):
        return path
    home = hub.writable("converted") / folder.name  # elsewhere than `folder` if the cache can't be written
    home.mkdir(exist_ok=True)
    path = home / path.name
    if _is_whole(path):
        return path
    exact = _map(folder / _EXACT)
    matrix = [(name, t) for name, t in exact.items() if _is_converted(name, t)]

    def both(name: str, t: torch.Tensor) -> Iterator[tuple[str, Shape, str, Callable[[], Array]]]:
        made: list[Int8Matrix] = []  # quantised when its scales are written, kept until its numbers are

        def scales() -> Array:
            m = convert(t, precision)
            assert isinstance(m, Int8Matrix)
            made.append(m)
            return m.scale.numpy()

        yield f"{name}{_SCALE}", (t.shape[0],), "F32", scales
        yield name, tuple(t.shape), "I8", lambda: made.pop().q.numpy()

    def halves(t: torch.Tensor) -> Array:
        m = convert(t, precision)
        assert isinstance(m, torch.Tensor)
        return m.numpy()

    tensors: list[tuple[str, Shape, str, Callable[[], Array]]] = [
        (name, tuple(t.shape), "F32", t.numpy) for name, t in exact.items() if not _is_converted(name, t)
    ]
    for name, t in matrix:
        tensors += (
            [(name, tuple(t.shape), "F16", partial(halves, t))] if precision == "fast" else both(name, t)
        )
    handle, part = tempfile.mkstemp(dir=home, prefix="partial-")
    os.close(handle)
    try:
        _write_as(Path(part), tensors)
        os.replace(part, path)
    except OSError as e:
        raise ModelError(
            f"the weights in precision {precision!r} could not be written into {home}: {e.strerror or e}. "
            "Make room there, set CBVIZ_CACHE to another folder, "
            "or precision to 'exact'."
        ) from e
    finally:
        Path(part).unlink(missing_ok=True)
    return path


def _is_converted(name: str, t: torch.Tensor) -> bool:
    """Matrices follow the precision; vectors stay float32, and routers, whose rounding could choose another
    expert.
    """
    return t.dim() == 2 and not name.endswith(".router")


def _matrices(path: Path) -> dict[str, Matrix]:
    """The tensors of a file, a matrix of 8 bits together with its scales."""
    tensors = _map(path)
    return {
        n: Int8Matrix(t, tensors[f"{n}{_SCALE}"]) if t.dtype == torch.int8 else t
        for n, t in tensors.items()
        if not n.endswith(_SCALE)
    }


def _source_of(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / "model.json").read_text("utf-8"))["source"])
    except (OSError, ValueError, KeyError):
        return None


Tensors = Iterator[tuple[str, tuple[int, ...], Callable[[], Array]]]
"""(engine's name, shape, how to read it): shapes are known before anything is read, so that the file's header
can be written first.
"""


def _open_gguf(path: Path, stack: ExitStack) -> tuple[DecoderConfig, Tokenizer | None, list[int], Tensors]:
    f = stack.enter_context(GgufFile(path))
    if "token_embd.weight" not in f:
        raise ModelError(f"{path} has no tensor 'token_embd.weight'")
    config = DecoderConfig.from_gguf(
        f.metadata, tied="output.weight" not in f, vocab_size=f.shape("token_embd.weight")[0]
    )
    tokenizer = Tokenizer.from_gguf(f.metadata)
    names = {
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }

    def gguf_name(name: str) -> str:
        module, kind = name.rsplit(".", 1)
        if module.startswith("layers."):
            _, i, module = module.split(".", 2)
            return f"blk.{i}.{names[module]}.{kind}"
        return f"{names[module]}.{kind}"

    def read(name: str) -> Array:
        x = f.tensor(gguf_name(name))
        # llama.cpp keeps Llama's rotated pairs beside one another; the halves of a head stand apart here, as
        # in the original.
        if config.architecture == "llama" and ".self_attn.q_proj." in name:
            x = _unpermute(x, config.num_heads)
        elif config.architecture == "llama" and ".self_attn.k_proj." in name:
            x = _unpermute(x, config.num_kv_heads)
        return x

    _check_ends(tokenizer.eos_token_ids, config)
    frequencies = config.inverse_frequencies().numpy()
    if "rope_freqs.weight" in f:  # llama3's scaling, as one divisor a frequency
        frequencies = frequencies / f.tensor("rope_freqs.weight")
    return (
        config,
        tokenizer,
        list(tokenizer.eos_token_ids),
        _tensors(config, lambda n: gguf_name(n) in f, read, frequencies),
    )


def _check_ends(ids: Iterable[Any], config: DecoderConfig) -> None:
    """Raises ModelError for an end-of-sequence id that the model cannot write."""
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < config.vocab_size:
            raise ModelError(
                f"eos_token_id is {shown(i)}, it must lie in 0..{config.vocab_size - 1}, the vocabulary"
            )


def _unpermute(x: Array, heads: int) -> Array:
    """[heads * D, ...] with rows of a head as (0, D/2, 1, D/2+1, ...) -> (0, 1, ..., D-1)."""
    return x.reshape(heads, x.shape[0] // heads // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _open_folder(path: Path, stack: ExitStack) -> tuple[DecoderConfig, Tokenizer | None, list[int], Tensors]:
    from safetensors import SafetensorError, safe_open

    try:
        raw = json.loads((path / "config.json").read_text("utf-8"))
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path / 'config.json'} is not JSON: {e}") from e
    if not isinstance(raw, dict):
        raise ModelError(f"{path / 'config.json'} holds no object {{...}}")
    with hub.reading(path / "config.json"):
        config = DecoderConfig.from_hf(raw)
    tokenizer = Tokenizer.from_folder(path)
    where: dict[str, Any] = {}
    try:
        for file in sorted(path.glob("*.safetensors")):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            where.update(dict.fromkeys(opened.keys(), opened))
    except SafetensorError as e:
        raise ModelError(f"{path} holds a damaged safetensors file: {e}. Fetch it again.") from e

    def full(name: str) -> str:
        return name if name.startswith("lm_head") else f"model.{name}"

    def read(name: str) -> Array:
        if full(name) not in where:
            raise ModelError(f"{path} has no tensor {full(name)!r}")
        tensor: torch.Tensor = where[full(name)].get_tensor(full(name))
        if not tensor.is_floating_point():
            raise ModelError(
                f"{path}: tensor {full(name)!r} is {tensor.dtype}; float32, float16 and bfloat16 are read"
            )
        return tensor.float().numpy()

    eos = raw.get("eos_token_id")
    ids = (
        list(tokenizer.eos_token_ids)
        if tokenizer is not None
        else [eos]
        if isinstance(eos, int)
        else list(eos or [])
    )
    _check_ends(ids, config)
    return (
        config,
        tokenizer,
        ids,
        _tensors(config, lambda n: full(n) in where, read, config.inverse_frequencies().numpy()),
    )


def _tensors(c: DecoderConfig, has: Callable[[str], bool], read: Read, frequencies: Array) -> Tensors:
    """All tensors of the engine's layout, in the order in which a forward pass needs them."""

    def checked(name: str, shape: tuple[int, ...]) -> Array:
        x = read(name)
        if x.shape != shape:
            raise ModelError(f"tensor {name!r} has shape {list(x.shape)}, the config asks for {list(shape)}")
        return x

    def one(name: str, *shape: int) -> tuple[tuple[int, ...], Callable[[], Array]]:
        return shape, lambda: checked(name, shape)

    def stacked(sizes: dict[str, int], *rest: int) -> tuple[tuple[int, ...], Callable[[], Array]]:
        return (sum(sizes.values()), *rest), lambda: np.concatenate(
            [checked(n, (size, *rest)) for n, size in sizes.items()]
        )

    yield "inverse_frequencies", frequencies.shape, lambda: frequencies
    yield "embed", *one("embed_tokens.weight", c.vocab_size, c.hidden_size)
    for i in range(c.num_layers):
        a, m = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        yield f"layers.{i}.attn_norm", *one(f"layers.{i}.input_layernorm.weight", c.hidden_size)
        if c.kv_lora_rank:
            yield from _latent(c, i, a, checked, one)
        else:
            qkv = {f"{a}.q_proj": c.q_size, f"{a}.k_proj": c.kv_size, f"{a}.v_proj": c.kv_size}
            yield f"layers.{i}.qkv", *stacked({f"{n}.weight": s for n, s in qkv.items()}, c.hidden_size)
            if has(f"{a}.q_proj.bias"):
                yield f"layers.{i}.qkv_bias", *stacked({f"{n}.bias": s for n, s in qkv.items()})
            if c.qk_norm or c.qk_norm_whole:
                yield (
                    f"layers.{i}.q_norm",
                    *one(f"{a}.q_norm.weight", c.q_size if c.qk_norm_whole else c.head_dim),
                )
                yield (
                    f"layers.{i}.k_norm",
                    *one(f"{a}.k_norm.weight", c.kv_size if c.qk_norm_whole else c.head_dim),
                )
        yield f"layers.{i}.o", *one(f"{a}.o_proj.weight", c.hidden_size, c.out_size)
        if has(f"{a}.o_proj.bias"):
            yield f"layers.{i}.o_bias", *one(f"{a}.o_proj.bias", c.hidden_size)
        yield f"layers.{i}.mlp_norm", *one(f"layers.{i}.post_attention_layernorm.weight", c.hidden_size)
        if i in c.sparse_layers:
            m = f"layers.{i}.block_sparse_moe" if c.architecture == "mixtral" else m
            gate, up, down = (
                ("w1", "w3", "w2") if c.architecture == "mixtral" else ("gate_proj", "up_proj", "down_proj")
            )
            width, each = c.moe_intermediate_size, [f"{m}.experts.{e}" for e in range(c.num_experts)]
            yield f"layers.{i}.router", *one(f"{m}.gate.weight", c.num_experts, c.hidden_size)
            if has(f"{m}.gate.e_score_correction_bias"):
                yield f"layers.{i}.router_bias", *one(f"{m}.gate.e_score_correction_bias", c.num_experts)
            yield (
                f"layers.{i}.gate_up",
                *stacked({f"{x}.{n}.weight": width for x in each for n in (gate, up)}, c.hidden_size),
            )
            yield f"layers.{i}.down", *stacked({f"{x}.{down}.weight": c.hidden_size for x in each}, width)
            if c.shared_intermediate_size:
                s, width = f"{m}.shared_experts", c.shared_intermediate_size
                yield (
                    f"layers.{i}.shared_gate_up",
                    *stacked({f"{s}.gate_proj.weight": width, f"{s}.up_proj.weight": width}, c.hidden_size),
                )
                yield f"layers.{i}.shared_down", *one(f"{s}.down_proj.weight", c.hidden_size, width)
            continue
        gate_up = {f"{m}.gate_proj": c.intermediate_size, f"{m}.up_proj": c.intermediate_size}
        yield f"layers.{i}.gate_up", *stacked({f"{n}.weight": s for n, s in gate_up.items()}, c.hidden_size)
        if has(f"{m}.gate_proj.bias"):
            yield f"layers.{i}.gate_up_bias", *stacked({f"{n}.bias": s for n, s in gate_up.items()})
        yield f"layers.{i}.down", *one(f"{m}.down_proj.weight", c.hidden_size, c.intermediate_size)
        if has(f"{m}.down_proj.bias"):
            yield f"layers.{i}.down_bias", *one(f"{m}.down_proj.bias", c.hidden_size)
    yield "norm", *one("norm.weight", c.hidden_size)
    if not c.tied_embeddings:
        yield "head", *one("lm_head.weight", c.vocab_size, c.hidden_size)


def _latent(
    c: DecoderConfig,
    i: int,
    a: str,
    checked: Callable[..., Array],
    one: Callable[..., tuple[Shape, Callable[[], Array]]],
) -> Tensors:
    """MLA's projections: what is taken from the hidden state in one matrix, the rest as it stands.

    Rotated parts get their halves apart, as everywhere in the engine; queries and the shared key alike, so
    that their products stay what they are.
    """

    def apart(x: Array, heads: int) -> Array:
        """The last qk_rope_head_dim rows of each head, from pairs to halves."""
        if not c.rope_interleave:
            return x
        by_head = x.reshape(heads, -1, x.shape[1])
        plain, turned = np.split(by_head, [by_head.shape[1] - c.qk_rope_head_dim], axis=1)
        return np.concatenate((plain, turned[:, 0::2], turned[:, 1::2]), axis=1).reshape(x.shape)

    def queries(name: str, width: int) -> Array:
        return apart(checked(name, (c.q_size, width)), c.num_heads)

    def down() -> Array:
        q = (
            checked(f"{a}.q_a_proj.weight", (c.q_lora_rank, c.hidden_size))
            if c.q_lora_rank
            else queries(f"{a}.q_proj.weight", c.hidden_size)
        )
        return np.concatenate(
            (q, apart(checked(f"{a}.kv_a_proj_with_mqa.weight", (c.latent_size, c.hidden_size)), 1))
        )

    yield f"layers.{i}.qkv", ((c.q_lora_rank or c.q_size) + c.latent_size, c.hidden_size), down
    if c.q_lora_rank:
        yield f"layers.{i}.q_a_norm", *one(f"{a}.q_a_layernorm.weight", c.q_lora_rank)
        yield (
            f"layers.{i}.q_b",
            (c.q_size, c.q_lora_rank),
            lambda: queries(f"{a}.q_b_proj.weight", c.q_lora_rank),
        )
    yield f"layers.{i}.kv_a_norm", *one(f"{a}.kv_a_layernorm.weight", c.kv_lora_rank)
    yield (
        f"layers.{i}.kv_b",
        *one(f"{a}.kv_b_proj.weight", c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
    )


def _write(path: Path, tensors: Tensors) -> None:
    """As `_write_as`, all float32."""
    _write_as(path, [(name, shape, "F32", read) for name, shape, read in tensors])


def _write_as(path: Path, todo: list[tuple[str, Shape, str, Callable[[], Array]]]) -> None:
    """A safetensors file of (name, shape, type, how to make it) whose data starts on a page.

    One tensor in memory at a time.

    8-bit tensors stand behind all others, so that every number lies on a multiple of its size.
    """
    header: dict[str, Any] = {}
    at = 0
    places: dict[str, int] = {}
    for name, shape, kind, _ in sorted(todo, key=lambda t: (t[2] == "I8", t[2] == "F16")):
        size = np.dtype(_TYPES[kind][0]).itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        places[name] = at
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)  # the format allows spaces after the header
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        begin = f.tell()
        for name, _, kind, read in todo:
            f.seek(begin + places[name])
            f.write(np.ascontiguousarray(read(), dtype=_TYPES[kind][0]).data)
        f.flush()
        os.fsync(f.fileno())


def _map(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file of `_write`, memory-mapped: private pages, shared with every process until
    somebody writes, which nobody does.
    """
    begin, header = _header(path)
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)[begin:]
    return {
        name: data[slice(*h["data_offsets"])].view(_TYPES[h["dtype"]][1]).view(h["shape"])
        for name, h in header.items()
    }


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and the tensors' descriptions."""
    with path.open("rb") as f:
        length = struct.unpack("<Q", f.read(8))[0]
        return 8 + length, json.loads(f.read(length))


def _is_whole(path: Path) -> bool:
    """Whether the file is there and as long as its header says."""
    try:
        begin, header = _header(path)
        return path.stat().st_size == begin + max(h["data_offsets"][1] for h in header.values())
    except (OSError, ValueError, KeyError, struct.error):
        return False
