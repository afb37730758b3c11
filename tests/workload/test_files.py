"""Files of requests: each format, each bad field with its line and limit, and the real traces where they are."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from cbviz.config import ConfigError
from cbviz.messages import RequestError
from cbviz.workload import build
from cbviz.workload.files import FIELDS, load

DATA = Path(os.environ.get("CBVIZ_DATA", Path(__file__).parents[2] / "../shared/data"))
needs_data = pytest.mark.skipif(not (DATA / "traces").exists(), reason=f"no traces at {DATA}; set CBVIZ_DATA")


def write(folder: Path, *lines: object, name: str = "reqs.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return path


def test_requests_of_our_own_with_every_field(tmp_path: Path) -> None:
    full = {
        "request_id": "a",
        "prompt": [5, 6, 7],
        "output_len": 4,
        "max_tokens": 9,
        "arrival_s": 1.5,
        "arrival_step": 3,
        "priority": -2,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "seed": 11,
        "ignore_eos": False,
        "stop_token_ids": [2],
        "deadline_s": 9,
        "ttft_slo_s": 0.5,
        "tpot_slo_s": 0.1,
        "session": "s",
        "n": 2,
    }
    beams = {"prompt": [5], "beam_width": 3, "length_penalty": -0.5, "early_stopping": True}
    path = write(
        tmp_path,
        full,
        "",
        {"prompt": "Hello there, how are you?"},
        {"prompt_len": 40, "output_len": 12},
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
        beams,
    )
    assert set(full) | set(beams) | {"messages", "prompt_len"} == set(FIELDS)
    a, hello, sized, talk, search = build(path)
    assert (
        a.request_id,
        a.prompt_token_ids,
        a.output_len,
        a.max_tokens,
        a.arrival_s,
        a.arrival_step,
        a.priority,
    ) == ("a", (5, 6, 7), 4, 9, 1.5, 3, -2)
    s = a.sampling
    assert (s.temperature, s.top_k, s.top_p, s.seed, s.stop_token_ids, s.ignore_eos, s.n) == (
        0.7,
        5,
        0.9,
        11,
        (2,),
        False,
        2,
    )
    b = search.sampling
    assert (b.beam_width, b.length_penalty, b.early_stopping, b.n, a.sampling.beam_width) == (
        3,
        -0.5,
        True,
        1,
        0,
    )
    assert (a.deadline_s, a.ttft_slo_s, a.tpot_slo_s, a.session) == (9, 0.5, 0.1, "s")
    assert (hello.request_id, hello.prompt, hello.max_tokens, hello.sampling.ignore_eos) == (
        "r2",
        "Hello there, how are you?",
        64,
        False,
    )
    assert 5 <= len(hello.prompt_token_ids) <= 10
    assert (len(sized.prompt_token_ids), sized.max_tokens, sized.output_len, sized.sampling.ignore_eos) == (
        40,
        12,
        12,
        True,
    )
    assert (talk.prompt, talk.max_tokens) == ("Hi", 5)


def test_a_tokenizer_is_used_where_there_is_one(tmp_path: Path) -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(c) for c in text]

        def chat(self, messages: object) -> list[int]:
            return [1, 2, 3]

    path = write(tmp_path, {"prompt": "ab"}, {"messages": [{"role": "user", "content": "x"}]})
    assert [s.prompt_token_ids for s in load(path, tokenizer=Letters())] == [(97, 98), (1, 2, 3)]


def test_limit_and_scale(tmp_path: Path) -> None:
    path = write(tmp_path, *({"prompt_len": 3, "arrival_s": i} for i in range(5)), "not json at all")
    assert [s.arrival_s for s in build(path, limit=3, scale=0.5)] == [0, 0.5, 1.0]
    for params, message in (
        ({"limit": 0}, "limit is 0"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"limt": 1}, "did you mean 'limit'"),
        ({"limit": 1.5}, "limit must be a whole number"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(path, **params)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"promt": "x"}, "unknown field 'promt'; did you mean 'prompt'"),
        ({"prompt": "x", "zzzz": 1}, "unknown field 'zzzz'; known: request_id, prompt"),
        ({"prompt": ""}, "prompt is empty, it needs at least 1 token"),
        ({"prompt": "  "}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, -1]}, "whole numbers of 0 or more"),
        ({"prompt": [1, True]}, "whole numbers of 0 or more"),
        ({"prompt": 5}, "prompt must be text or a list of token ids, got 5"),
        ({}, "needs exactly one of prompt, messages and prompt_len, got none"),
        ({"prompt": "x", "prompt_len": 4}, "got prompt and prompt_len"),
        ({"prompt_len": -4}, r"prompt_len is -4, it must lie in 1\.\.10000000"),
        ({"prompt_len": 0}, "prompt_len is 0"),
        ({"prompt_len": 3.5}, "prompt_len must be a whole number, got 3.5"),
        ('{"prompt_len": NaN}', "prompt_len must be a whole number, got nan"),
        ('{"prompt_len": Infinity}', "prompt_len must be a whole number, got inf"),
        ({"prompt_len": True}, "prompt_len must be a whole number, got True"),
        ({"prompt_len": 10**9}, "prompt_len is 1000000000"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens is 0, it must lie in 1"),
        (
            {"prompt": "x", "output_len": 5, "max_tokens": 4},
            "output_len is 5, it must be at most max_tokens, 4",
        ),
        ('{"prompt": "x", "arrival_s": NaN}', "arrival_s is nan, it must be a finite number, 0 or more"),
        ({"prompt": "x", "arrival_s": -1}, "arrival_s is -1"),
        ({"prompt": "x", "arrival_s": "soon"}, "arrival_s is 'soon'"),
        ({"prompt": "x", "arrival_step": -1}, "arrival_step is -1, it must lie in 0"),
        ({"prompt": "x", "priority": "high"}, "priority must be a whole number, got 'high'"),
        ({"prompt": "x", "temperature": 1000}, "temperature is 1000.0"),
        ({"prompt": "x", "top_p": 0}, "top_p is 0.0, it must lie in"),
        ({"prompt": "x", "top_k": -1}, "top_k is -1"),
        ({"prompt": "x", "n": 0}, "n is 0, it must lie in 1"),
        ({"prompt": "x", "beam_width": 17}, "beam_width is 17, it must lie in 0..16"),
        (
            {"prompt": "x", "beam_width": 2, "temperature": 1},
            "temperature is 1.0 and beam_width 2: beam search draws nothing",
        ),
        ({"prompt": "x", "length_penalty": "long"}, "length_penalty must be a number, got 'long'"),
        ({"prompt": "x", "early_stopping": "never"}, "early_stopping must be true or false, got 'never'"),
        ({"prompt": "x", "ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
        ({"prompt": "x", "stop_token_ids": 2}, "stop_token_ids must be a list"),
        ({"prompt": "x", "request_id": ""}, "request_id must be a text that is not empty"),
        ({"prompt": "x", "request_id": "first"}, "request_id 'first' stands in the file twice"),
        ({"prompt": "x", "session": 3}, "session must be text"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": [{"role": "user"}]}, "messages must be a list"),
        ([1, 2], r"a request is an object \{\.\.\.\}, got \[1, 2\]"),
        ("{oops", "not valid JSON: .* at column"),
        (
            {"input_length": 600, "output_length": 1, "hash_ids": [4]},
            "hash_ids has 1 entries, input_length 600 needs 2 blocks of 512",
        ),
        (
            {"input_length": 600, "output_length": 1, "hash_ids": [4, "x"]},
            "hash_ids must be a list of whole numbers",
        ),
        ({"input_length": 0, "output_length": 1}, "input_length is 0"),
        ({"input_length": 6}, "input_length and output_length are needed"),
    ],
)
def test_a_bad_line_is_named_with_field_and_limit(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(RequestError, match=rf"^reqs\.jsonl line 3: .*{message}"):
        load(write(tmp_path, {"prompt": "fine", "request_id": "first"}, "", line))


def test_ids_must_be_in_the_vocabulary(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": [1, 300]})
    assert len(load(path)) == len(load(path, model_vocab=301)) == 1
    with pytest.raises(RequestError, match=r"line 1: prompt holds token ids outside 0\.\.299"):
        load(path, model_vocab=300)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no request"),
        (b"\n\n", "holds no request"),
        (b"a,b\n1,2\n", "format not recognised"),
        (b"\xff\xfe\x00x", "not a text file in UTF-8"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "absent")


def test_azure_times_count_from_the_first_row(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 23:59:59.5000000,374,44",
        "2023-11-17 00:00:01.2500001,396,109",
        name="a.csv",
    )
    a, b = load(path)
    assert (a.arrival_s, len(a.prompt_token_ids), a.max_tokens, a.output_len) == (0, 374, 44, 44)
    assert b.arrival_s == pytest.approx(1.75)
    assert a.prompt_token_ids[:2] != b.prompt_token_ids[:2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:00:00,-3,44", "contexttokens is -3, it must lie in 1"),
        ("2023-11-16 18:00:00,3,x", "generatedtokens must be a whole number, got 'x'"),
        ("yesterday,3,4", "timestamp is 'yesterday'"),
        ("2023-11-16 18:70:00,3,4", "timestamp is '2023-11-16 18:70:00'"),
        ("2023-11-16 18:00:00,3", "are needed"),
        (",3,4", "timestamp is"),
    ],
)
def test_a_bad_row_of_a_csv(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(RequestError, match=rf"^a\.csv line 3: .*{message}"):
        load(
            write(
                tmp_path,
                "TIMESTAMP,ContextTokens,GeneratedTokens",
                "2023-11-16 18:00:00,5,5",
                row,
                name="a.csv",
            )
        )


def test_burstgpt_leaves_out_failures(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,ChatGPT,472,18,490,Conversation log",
        "45,ChatGPT,100,0,100,Conversation log",
        "118,GPT-4,20,9,29,API log",
        name="b.csv",
    )
    assert [(s.arrival_s, len(s.prompt_token_ids), s.max_tokens) for s in load(path)] == [
        (0, 472, 18),
        (113, 20, 9),
    ]


def test_share_gpt_takes_the_first_two_turns(tmp_path: Path) -> None:
    rows = [
        {
            "id": "x",
            "conversations": [
                {"from": "human", "value": "What is a prime?"},
                {"from": "gpt", "value": "A number with two divisors."},
                {"from": "human", "value": "Thanks"},
            ],
        },
        {"id": "y", "conversations": [{"from": "human", "value": "alone"}]},
    ]
    path = tmp_path / "sg.json"
    path.write_text(json.dumps(rows, indent=1))
    (spec,) = load(path)
    assert spec.prompt == "What is a prime?"
    assert 5 <= spec.max_tokens <= 10
    path.write_text(json.dumps([{"id": "x"}]))
    with pytest.raises(RequestError, match=r"sg\.json entry 1: conversations must be a list"):
        load(path)


def test_mooncake_blocks_with_equal_hashes_are_equal(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"timestamp": 2000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 7, 8]},
        {"timestamp": 3500, "input_length": 600, "output_length": 6, "hash_ids": [0, 9]},
    )
    a, b = load(path)
    assert (a.arrival_s, b.arrival_s) == (0, 1.5)
    assert a.prompt_token_ids[:512] == b.prompt_token_ids[:512]
    assert a.prompt_token_ids[512:528] != b.prompt_token_ids[512:528]
    assert (len(a.prompt_token_ids), len(b.prompt_token_ids)) == (1100, 600)


@needs_data
@pytest.mark.parametrize("name", ["azure_2023_conv.csv", "azure_2023_code.csv"])
def test_a_real_azure_trace(name: str) -> None:
    with open(DATA / "traces" / name) as f:
        rows = list(csv.DictReader(f))[:3000]
    specs = build(DATA / "traces" / name, limit=3000)
    assert [(len(s.prompt_token_ids), s.max_tokens) for s in specs] == [
        (int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in rows
    ]
    times = [s.arrival_s for s in specs]
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] > 600


@needs_data
def test_a_real_mooncake_trace_keeps_what_can_be_reused() -> None:
    with open(DATA / "traces/mooncake_conversation.jsonl") as f:
        rows = [json.loads(line) for _, line in zip(range(300), f)]
    specs = build(DATA / "traces/mooncake_conversation.jsonl", limit=300)
    block_of: dict[int, tuple[int, ...]] = {}
    for row, spec in zip(rows, specs):
        assert len(spec.prompt_token_ids) == row["input_length"]
        for i in range(row["input_length"] // 512):
            ids = spec.prompt_token_ids[512 * i : 512 * i + 512]
            assert block_of.setdefault(row["hash_ids"][i], ids) == ids
    assert len(set(block_of.values())) == len(block_of) > 1000


@needs_data
def test_a_measured_vllm_run_is_a_workload() -> None:
    specs = build(DATA / "runs/rtx4090_llama31_8b.requests.csv")
    assert len(specs) == 300
    assert (specs[0].request_id, len(specs[0].prompt_token_ids), specs[0].max_tokens) == (
        "bench-0",
        2358,
        531,
    )
