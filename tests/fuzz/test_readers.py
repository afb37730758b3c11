"""Whatever a file holds, its reader takes it or raises an error of ours: nothing else comes out, and nothing
huge is made first.
"""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cbviz as cb
from cbviz.config import CONFIG_FIELDS, ConfigError, EngineConfig
from cbviz.messages import RequestError, RequestSpec, Sampling
from cbviz.trace.schema import TraceError
from cbviz.workload import build
from tests.cli.conftest import Call, cache, cbviz  # noqa: F401
from tests.fuzz.mutate import VALUES, bytes_changed, file_changed, swapped, text_of
from tests.runs import run, specs

OURS = (ConfigError, RequestError, TraceError)
DRAWS = [
    pytest.param(500, id="500"),
    pytest.param(10_000, id="10000", marks=[pytest.mark.slow, pytest.mark.deep]),
]
Changed = Callable[[random.Random], bytes]


def hold(
    draws: int, read: Callable[[random.Random], object], ours: tuple[type[BaseException], ...] = OURS
) -> int:
    """Calls `read` with each seed; an error that is not ours is told with its seed.

    Returns how many draws were refused.
    """
    refused = 0
    for seed in range(draws):
        try:
            read(random.Random(seed))
        except ours as e:
            refused += 1
            if not 1 <= len(str(e).strip()) < 4000:
                raise AssertionError(
                    f"seed {seed}: {type(e).__name__} says nothing, or too much: {str(e)[:200]!r}"
                ) from e
        except BaseException as e:
            raise AssertionError(f"seed {seed}: {type(e).__name__} came out: {e}") from e
    return refused


@pytest.mark.parametrize("draws", DRAWS)
def test_traces(tmp_path: Path, draws: int) -> None:
    good = []
    for fields in ({}, {"num_blocks": 14, "preemption_mode": "swap"}, {"speculative": "ngram"}):
        out = tmp_path / "good.jsonl"
        run(specs(5), **fields).save(out)
        good.append(out.read_bytes())
    path = tmp_path / "t.jsonl"

    shortened = 0

    def read(rng: random.Random) -> None:
        nonlocal shortened
        path.write_bytes(file_changed(rng, rng.choice(good)))
        notes = cb.load(path).header.notes
        shortened += any("left out" in note for note in notes)

    refused = hold(draws, read, (TraceError,))
    assert refused > draws / 10
    assert (
        refused + shortened > draws / 4
    )  # what stands before a damaged line loads, and a note says what is left out


REQUESTS = {
    "own": "\n".join(
        json.dumps(x)
        for x in (
            {"prompt": "Hello there", "max_tokens": 3},
            {
                "request_id": "a",
                "prompt": [5, 6, 7],
                "output_len": 4,
                "max_tokens": 9,
                "arrival_s": 1.5,
                "priority": -2,
                "temperature": 0.7,
                "top_k": 5,
                "top_p": 0.9,
                "seed": 11,
                "stop_token_ids": [2],
                "ignore_eos": False,
                "n": 2,
                "deadline_s": 9,
                "session": "s",
            },
            {"messages": [{"role": "user", "content": "Hi"}]},
            {"prompt_len": 40, "output_len": 12, "arrival_step": 4},
            {"prompt": [5], "beam_width": 3, "length_penalty": 0.5},
        )
    ),
    "mooncake": "\n".join(
        json.dumps({"timestamp": i, "input_length": 600, "output_length": 3, "hash_ids": [0, i]})
        for i in range(4)
    ),
    "share-gpt": json.dumps(
        [
            {
                "id": str(i),
                "conversations": [
                    {"from": "human", "value": "Question?"},
                    {"from": "gpt", "value": "Answer."},
                ],
            }
            for i in range(3)
        ],
        indent=1,
    ),
    "share-gpt lines": "\n".join(
        json.dumps({"conversations": [{"value": "Question?"}, {"value": "Answer."}]}) for _ in range(3)
    ),
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.25,374,44\n2023-11-16 18:00:01,3,4",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens\n5,m,472.0,18.0\n6,m,11.0,\n9,m,1,1",
    "table": "request_id,prompt_tokens,output_tokens,arrival_s\na,5,3,0.5\nb,6,4,0.75",
}


@pytest.mark.parametrize("draws", DRAWS)
def test_files_of_requests(tmp_path: Path, draws: int) -> None:
    path = tmp_path / "w"

    def read(rng: random.Random) -> None:
        path.write_bytes(file_changed(rng, rng.choice(list(REQUESTS.values())).encode()))
        for spec in build(path, model_vocab=rng.choice((None, 49_152))):
            spec.request_id.encode()
            (spec.prompt or "").encode()

    assert hold(draws, read, (ConfigError, RequestError)) > draws / 4


@pytest.mark.parametrize("draws", DRAWS)
def test_values_of_requests_and_configs(draws: int) -> None:
    good: list[tuple[type, dict[str, Any]]] = [
        (Sampling, {f: getattr(Sampling(), f) for f in Sampling.__struct_fields__}),
        (RequestSpec, {f: getattr(RequestSpec("a", (1, 2), 3), f) for f in RequestSpec.__struct_fields__}),
        (EngineConfig, {f: x.default for f, x in CONFIG_FIELDS.items()}),
    ]
    more = (
        *VALUES,
        10**5000,
        b"bytes",
        object(),
        (1,),
        ("x",),
        (1, None),
        (2**70,),
        (True,),
        2.0**70,
        complex(1, 2),
        range(3),
        Sampling,
        lambda: 1,
    )

    def make(rng: random.Random) -> None:
        kind, fields = rng.choice(good)
        for name in rng.sample(list(fields), rng.choice((1, 1, 2))):
            fields = {**fields, name: rng.choice(more)}
        made = kind(**fields)
        if isinstance(made, RequestSpec):
            s = cb.Session([made], runner="sim", num_blocks=32)
            s.run(max_steps=40)

    assert hold(draws, make, (ConfigError, RequestError)) > draws / 3


# models -----------------------------------------------------------------------------------------------------


def small_gguf(folder: Path) -> bytes:
    """A Llama of one layer, written as the reference implementation does."""
    gguf = pytest.importorskip("gguf")
    np = pytest.importorskip("numpy")
    w = gguf.GGUFWriter(folder / "good.gguf", "llama")
    for add, value in (
        (w.add_block_count, 1),
        (w.add_embedding_length, 8),
        (w.add_head_count, 2),
        (w.add_head_count_kv, 1),
        (w.add_feed_forward_length, 8),
        (w.add_context_length, 64),
        (w.add_layer_norm_rms_eps, 1e-5),
    ):
        add(value)
    letters = [*(chr(c) for c in range(33, 127)), "ab"]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(letters)
    w.add_token_types([1] * len(letters))
    w.add_token_merges(["a b"])
    w.add_eos_token_id(2)
    w.add_bos_token_id(1)
    shapes = {
        "token_embd": (95, 8),
        "output_norm": (8,),
        "blk.0.attn_norm": (8,),
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_norm": (8,),
        "blk.0.ffn_gate": (8, 8),
        "blk.0.ffn_up": (8, 8),
        "blk.0.ffn_down": (8, 8),
    }
    for name, shape in shapes.items():
        w.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return (folder / "good.gguf").read_bytes()


@pytest.fixture
def opened(cache: Path) -> Callable[[str, Path], object]:  # noqa: F811
    """Loads a model as the engine does, its converted copy in a cache of its own."""
    from cbviz.model import hub, loader

    def load(kind: Any, path: Path) -> object:
        return loader.load(hub.ModelSource("m", kind, path, "M"))

    return load


@pytest.mark.parametrize("draws", DRAWS)
def test_gguf_files(tmp_path: Path, opened: Callable[[str, Path], object], draws: int) -> None:
    from cbviz.model.hub import ModelError

    good = small_gguf(tmp_path)
    path = tmp_path / "m.gguf"
    path.write_bytes(good)
    opened("gguf", path)

    def read(rng: random.Random) -> None:
        path.write_bytes(bytes_changed(rng, good, head=2600))
        opened("gguf", path)

    assert hold(draws, read, (ModelError,)) > draws / 4


def gguf_with(**values: tuple[int, bytes]) -> bytes:
    """A GGUF file that holds only metadata: key -> (kind, bytes of the value)."""
    out = io.BytesIO()
    out.write(b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)))
    for key, (kind, raw) in values.items():
        name = key.replace("__", ".").encode()
        out.write(struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + raw)
    return out.getvalue()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (
            gguf_with(general__alignment=(4, struct.pack("<I", 0))),
            r"general\.alignment is 0, it must lie in 1",
        ),
        (gguf_with(x=(9, struct.pack("<IQ", 9, 1) * 200_000)), "lists are nested more than 4 deep"),
        (gguf_with(x=(9, struct.pack("<IQ", 4, 2**40))), "bytes are announced"),
        (gguf_with(x=(9, struct.pack("<IQ", 8, 2**60))), "bytes are announced"),
        (gguf_with(x=(8, struct.pack("<Q", 2**63))), "bytes are announced"),
        (gguf_with(x=(99, b"")), "kind 99 is unknown"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "damaged"),
        (b"", "damaged"),
    ],
)
def test_a_gguf_file_is_asked_before_anything_is_made(tmp_path: Path, raw: bytes, says: str) -> None:
    from cbviz.model.gguf_file import GgufFile
    from cbviz.model.hub import ModelError

    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match=says):
        GgufFile(tmp_path / "m.gguf")


def test_an_end_of_sequence_id_beyond_the_vocabulary_is_refused(
    tmp_path: Path, opened: Callable[[str, Path], object]
) -> None:
    from cbviz.model.hub import ModelError

    raw = small_gguf(tmp_path)
    key = b"tokenizer.ggml.eos_token_id" + struct.pack("<II", 4, 2)
    assert raw.count(key) == 1
    (tmp_path / "m.gguf").write_bytes(raw.replace(key, key[:-4] + struct.pack("<I", 10**9)))
    with pytest.raises(ModelError, match=r"eos_token_id is 1000000000, it must lie in 0\.\.94"):
        opened("gguf", tmp_path / "m.gguf")


@pytest.mark.parametrize("draws", DRAWS)
def test_model_folders(tmp_path: Path, opened: Callable[[str, Path], object], draws: int) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    from cbviz.model.hub import ModelError

    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
    }
    shapes = {
        "embed_tokens": (16, 8),
        "norm": (8,),
        "layers.0.input_layernorm": (8,),
        "layers.0.post_attention_layernorm": (8,),
        "layers.0.self_attn.q_proj": (8, 8),
        "layers.0.self_attn.k_proj": (4, 8),
        "layers.0.self_attn.v_proj": (4, 8),
        "layers.0.self_attn.o_proj": (8, 8),
        "layers.0.mlp.gate_proj": (8, 8),
        "layers.0.mlp.up_proj": (8, 8),
        "layers.0.mlp.down_proj": (8, 8),
    }
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({f"model.{n}.weight": torch.ones(s) for n, s in shapes.items()}, folder / "model.safetensors")
    Tokenizer(models.BPE(vocab={chr(97 + i): i for i in range(16)}, merges=[])).save(
        str(folder / "tokenizer.json")
    )
    weights, words = (folder / "model.safetensors").read_bytes(), (folder / "tokenizer.json").read_bytes()
    settings: dict[str, Any] = {"eos_token": "b", "bos_token": "a", "chat_template": "{{ messages }}"}

    def read(rng: random.Random) -> None:
        which = rng.randrange(4)
        (folder / "config.json").write_bytes(
            text_of(swapped(rng, config, rng.choice((1, 1, 2)))) if which == 0 else text_of(config)
        )
        (folder / "model.safetensors").write_bytes(
            bytes_changed(rng, weights, head=1100) if which == 1 else weights
        )
        tokenizer = (
            text_of(swapped(rng, json.loads(words))) if rng.random() < 0.5 else bytes_changed(rng, words)
        )
        (folder / "tokenizer.json").write_bytes(tokenizer if which == 2 else words)
        (folder / "tokenizer_config.json").write_bytes(
            text_of(swapped(rng, settings)) if which == 3 else text_of(settings)
        )
        opened("folder", folder)

    assert hold(draws, read, (ModelError,)) > draws / 5


# recordings of vLLM, and the command line -------------------------------------------------------------------


@pytest.mark.parametrize("draws", DRAWS)
def test_recordings_on_the_command_line(
    cbviz: Call,  # noqa: F811
    cache: Path,  # noqa: F811
    conformance: Path,
    tmp_path: Path,
    draws: int,
) -> None:
    import gzip

    def loaded(path: Path) -> Any:
        raw = path.read_bytes()
        return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)

    files = sorted(
        (
            p
            for p in (conformance / "vllm-0.32").rglob("*.json*")
            if ".jsonl" not in p.name and p.stat().st_size < 60_000
        ),
        key=lambda p: p.stat().st_size,
    )
    good = [x for x in map(loaded, files[:6]) if isinstance(x, dict) and "steps" in x]
    assert good
    for x in good:
        x["steps"] = x["steps"][:12]
    path = tmp_path / "r.json"

    def read(rng: random.Random) -> None:
        raw = text_of(swapped(rng, rng.choice(good), rng.choice((1, 2))))
        path.write_bytes(raw if rng.random() < 0.8 else bytes_changed(rng, raw))
        r = cbviz("conform", path)
        assert r.code in (0, 1, 2), r.err
        if r.code == 2:
            assert len(r.err.splitlines()) == 1, r.err

    hold(draws // 2, read, ())


@pytest.mark.parametrize("draws", DRAWS)
def test_the_command_line(
    cbviz: Call,  # noqa: F811
    cache: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    draws: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    run(specs(3)).save(tmp_path / "good.jsonl")
    good = (tmp_path / "good.jsonl").read_bytes()
    words = [
        "",
        "x",
        "-1",
        "0",
        "1",
        "7",
        "nan",
        "1e999",
        "9" * 30,
        "9" * 5000,
        "half \udcff",
        "a\u2028b",
        "t.jsonl",
        "w.jsonl",
        ".",
        "/dev/null",
        "vllm",
        "fcfs",
        "max_num_seqs=0",
        "num_blocks=4",
        "num_blocks=9999999999",
        "block_size=0",
        "seed=3",
        "limit=2",
        "limit=x",
        "num_requests=2",
        "scale=0",
        "=",
        "a=b",
    ]
    options = {
        "run": ("--workload", "--discipline", "--policy", "--set", "--param", "--seed", "--model"),
        "show": ("--step",),
        "export": ("--to",),
        "compare": ("--json",),
        "tape": ("--discipline", "--policy", "--set"),
        "import": ("--out", "--requests"),
    }

    def read(rng: random.Random) -> None:
        (tmp_path / "t.jsonl").write_bytes(file_changed(rng, good))
        (tmp_path / "w.jsonl").write_bytes(file_changed(rng, rng.choice(list(REQUESTS.values())).encode()))
        command = rng.choice(("run", "run", "tape", "import", "show", "show", "export", "compare"))
        args: list[object] = [command]
        if command == "run":
            args += (
                ["--runner", "sim", "--workload", "w.jsonl", "--param", "limit=3"]
                if rng.random() < 0.7
                else ["--runner", "sim", "--param", "num_requests=2"]
            )
        elif command == "tape":
            args = ["run", "--runner", "tape", "--workload", "t.jsonl"]
        elif command == "compare":
            args += ["good.jsonl", "t.jsonl"]
        else:
            args += [
                "t.jsonl",
                *(
                    ("--to", rng.choice(("csv", "csv", "html", "perfetto", "perfetto", "prometheus")))
                    if command == "export"
                    else ()
                ),
            ]
        for _ in range(rng.choice((0, 0, 1, 2))):
            args += [rng.choice(options[command]), rng.choice(words)]
        r = cbviz(*args)
        assert r.code in (0, 2), (args, r)
        assert "Traceback" not in r.err, (args, r.err)
        if r.code == 2 and r.err.startswith("cbviz: "):
            assert len([x for x in r.err.splitlines() if x.startswith("cbviz: ")]) == 1

    hold(draws, read, ())
