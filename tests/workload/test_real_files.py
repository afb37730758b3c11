"""Files as people have them: what programs write for a gap, other orders and encodings, one bad entry among
good ones, packed files.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tracemalloc
from pathlib import Path

import pytest
import zstandard

import cbviz as cb
from cbviz import textfile
from cbviz.config import ConfigError
from cbviz.messages import RequestError, RequestSpec
from cbviz.workload import build, files
from tests.cli.conftest import Call, cache, cbviz  # noqa: F401

BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(folder: Path, *lines: object, name: str = "reqs.jsonl", end: str = "\n") -> Path:
    path = folder / name
    path.write_bytes(end.join(x if isinstance(x, str) else json.dumps(x) for x in lines).encode())
    return path


def sizes(specs: list[RequestSpec]) -> list[tuple[float, int, int]]:
    return [(s.arrival_s, len(s.prompt_token_ids), s.max_tokens) for s in specs]


class Counting(io.BufferedReader):
    """A file that counts the bytes read from it."""

    total = 0

    def read(self, size: int | None = -1) -> bytes:  # type: ignore[override]
        data = super().read(size)
        Counting.total += len(data)
        return data


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counting]:
    Counting.total = 0
    monkeypatch.setattr(textfile, "open_raw", lambda path: Counting(io.FileIO(path)))
    return Counting


# as much as is needed, and no more --------------------------------------------------------------------------


def talk(i: int) -> dict[str, object]:
    return {
        "id": str(i),
        "conversations": [
            {"from": "human", "value": f"Question {i}, please? " * 20},
            {"from": "gpt", "value": "An answer. " * 40},
        ],
    }


BIG = {
    "json array": lambda n: "[" + ",\n".join(json.dumps(talk(i)) for i in range(n)) + "]",
    "json array on one line": lambda n: json.dumps([talk(i) for i in range(n)]),
    "json lines": lambda n: "\n".join(json.dumps(talk(i)) for i in range(n)),
    "requests": lambda n: "\n".join(json.dumps({"prompt": "word " * 100, "max_tokens": 3}) for _ in range(n)),
    "table": lambda n: (
        AZURE + "\n" + "\n".join(f"2023-11-16 18:17:03.{i % 1000:03},{480 + i % 9},10" for i in range(20 * n))
    ),
}


@pytest.mark.parametrize("form", BIG)
@pytest.mark.parametrize("packing", ["plain", "gzip", "zstd"])
def test_a_limit_bounds_what_is_read_and_held(
    tmp_path: Path, counted: type[Counting], form: str, packing: str
) -> None:
    raw = BIG[form](12_000).encode()
    path = tmp_path / "big"
    path.write_bytes(
        raw
        if packing == "plain"
        else gzip.compress(raw, 0)
        if packing == "gzip"
        else zstandard.ZstdCompressor(level=-5).compress(raw)
    )
    del raw
    size = path.stat().st_size
    tracemalloc.start()
    try:
        specs = build(path, limit=10)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(specs) == 10
    assert counted.total < 1_500_000, f"{counted.total:,} of {size:,} bytes"
    assert peak < 8_000_000  # a pool of made-up ids is 3 MB of it


def test_all_of_a_big_array_is_read_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "sg.json"
    path.write_text(BIG["json array"](3000))
    specs = build(path)
    assert len(specs) == 3000
    assert specs[-1].prompt is not None and specs[-1].prompt.startswith("Question 2999,")


@pytest.mark.parametrize("name", ["r.csv", "r.csv.gz", "r.csv.zst", "gzip under another name.txt"])
def test_packed_files_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    raw = f"{AZURE}\n2023-11-16 18:00:00.5,374,44\n2023-11-16 18:00:02.75,396,109\n".encode()
    packed = (
        raw
        if name.endswith("csv")
        else zstandard.compress(raw)
        if name.endswith("zst")
        else gzip.compress(raw[:60]) + gzip.compress(raw[60:])
    )
    (tmp_path / name).write_bytes(packed)
    assert sizes(build(tmp_path / name)) == [(0, 374, 44), (2.25, 396, 109)]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_what_unpacks_to_too_much_is_refused_with_the_knob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: object
) -> None:
    path = tmp_path / "bomb.jsonl"
    path.write_bytes(pack(b'{"prompt_len": 4}\n' + b" " * 4_000_000))  # type: ignore[operator]
    monkeypatch.setenv("CBVIZ_MAX_UNPACKED_BYTES", "1000000")
    with pytest.raises(
        ConfigError, match=r"bomb\.jsonl unpacks to more than 1,000,000 bytes.* set CBVIZ_MAX_UNPACKED_BYTES"
    ):
        build(path)
    monkeypatch.setenv("CBVIZ_MAX_UNPACKED_BYTES", "5000000")
    assert len(build(path)) == 1
    monkeypatch.setenv("CBVIZ_MAX_UNPACKED_BYTES", "much")
    with pytest.raises(ConfigError, match="CBVIZ_MAX_UNPACKED_BYTES is 'much'"):
        build(path)


@pytest.mark.parametrize(
    ("content", "packing"),
    [
        (gzip.compress(b"x" * 9999)[:-9], "gzip"),
        (gzip.compress(os.urandom(999))[:40] + b"\0" * 400, "gzip"),
        (zstandard.compress(os.urandom(99_999))[:-500] + b"\1" * 500, "Zstandard"),
    ],
)
def test_a_damaged_packed_file_is_named(tmp_path: Path, content: bytes, packing: str) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(
        ConfigError, match=f"is not a complete {packing} file|format not recognised|not a text file"
    ):
        build(tmp_path / "f")


# numbers, gaps, order ---------------------------------------------------------------------------------------


def test_what_pandas_writes_for_whole_numbers_and_gaps(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        BURST,
        "5,ChatGPT,472.0,18.0,490.0,Conversation log",
        "6,ChatGPT,11.0,0.0,11.0,Conversation log",
        "8,ChatGPT,,,,Conversation log",
        "9,ChatGPT,11.0,4.0,15.0,API log",
        name="b.csv",
    )
    notes: list[str] = []
    assert sizes(build(path, notes=notes)) == [(0, 472, 18), (4, 11, 4)]
    assert notes == [
        "2 of 4 entries of b.csv were skipped: 2 in which nothing was asked or answered (failures)"
    ]


@pytest.mark.parametrize(
    ("cell", "number"), [("472.0", 472), ("1e3", 1000), ('"1,024"', 1024), (" 7 ", 7), ("7.", 7), ("+7", 7)]
)
def test_a_cell_may_write_a_whole_number_in_its_way(tmp_path: Path, cell: str, number: int) -> None:
    assert sizes(build(write(tmp_path, AZURE, f"2023-11-16 18:00:00,{cell},3", name="a.csv"))) == [
        (0, number, 3)
    ]


@pytest.mark.parametrize(
    "cell",
    ["1.5", "-3", "-0", "inf", "1e99", "1e999", "True", "0x10", "1_000", '"1,02"', "٣x", "9" * 5000, "1e-3"],
)
def test_other_numbers_are_refused_with_line_and_field(tmp_path: Path, cell: str) -> None:
    with pytest.raises(RequestError, match=r"^a\.csv line 2: contexttokens ") as e:
        build(write(tmp_path, AZURE, f"2023-11-16 18:00:00,{cell},3", name="a.csv"))
    assert len(str(e.value)) < 200


@pytest.mark.parametrize("cell", ["", "nan", "NaN", "None", "<NA>"])
def test_a_gap_is_a_failure_in_a_measured_run_and_an_error_elsewhere(tmp_path: Path, cell: str) -> None:
    assert len(build(write(tmp_path, BURST, f"5,m,{cell},18,9,x", "5,m,3,18,9,x", name="b.csv"))) == 1
    with pytest.raises(RequestError, match=r"a\.csv line 2: contexttokens and generatedtokens are needed"):
        build(write(tmp_path, AZURE, f"2023-11-16 18:00:00,{cell},3", name="a.csv"))


@pytest.mark.parametrize(
    ("end", "start"), [("\n", ""), ("\r\n", ""), ("\n", "\ufeff"), ("\r\n", "\ufeff\n\n")]
)
def test_byte_order_marks_line_ends_order_and_case_of_columns(tmp_path: Path, end: str, start: str) -> None:
    table = write(
        tmp_path,
        start + " generatedTOKENS ,other,ContextTokens,timestamp",
        "5,x,9,2023-11-16 18:00:00Z",
        "",
        "6,x,10,2023-11-16 18:00:01+00:00",
        name="a.csv",
        end=end,
    )
    assert sizes(build(table)) == [(0, 9, 5), (1, 10, 6)]
    lines = write(
        tmp_path,
        start + '{"prompt_len": 4, "max_tokens": 2}',
        "",
        '{"prompt_len": 5, "max_tokens": 3}',
        name="r.jsonl",
        end=end,
    )
    assert sizes(build(lines)) == [(0, 4, 2), (0, 5, 3)]


@pytest.mark.parametrize(
    "lines",
    [
        (AZURE, "2023-11-16 18:00:05,3,4", "2023-11-16 18:00:03,5,6", "2023-11-16 18:00:09,7,8"),
        (BURST, "5,m,3,4,7,x", "3,m,5,6,11,x", "9,m,7,8,15,x"),
        tuple(
            {"timestamp": t, "input_length": n, "output_length": n + 1}
            for t, n in ((5000, 3), (3000, 5), (9000, 7))
        ),
    ],
)
def test_rows_out_of_order_count_from_the_earliest(tmp_path: Path, lines: tuple[object, ...]) -> None:
    notes: list[str] = []
    assert sizes(build(write(tmp_path, *lines, name="f"), notes=notes)) == [(2, 3, 4), (0, 5, 6), (6, 7, 8)]
    assert notes == ["the rows of f are not in order of time: times count from the earliest"]


# Mooncake with blocks of another size -----------------------------------------------------------------------


def blocks_of_64(folder: Path, num: int = 4) -> Path:
    return write(
        folder,
        *(
            {
                "timestamp": 10 * r,
                "input_length": 1024,
                "output_length": 3,
                "hash_ids": [0, *range(100 * r + 1, 100 * r + 16)],
            }
            for r in range(num)
        ),
    )


def test_mooncake_with_blocks_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError,
        match=r"line 1: hash_ids has 16 entries, input_length 1024 needs 2 blocks of 512: .*block_size=64 would fit",
    ):
        build(blocks_of_64(tmp_path))


def test_mooncake_reads_rightly_with_the_block_size_given(tmp_path: Path) -> None:
    path = blocks_of_64(tmp_path)
    specs = build(path, block_size=64)
    first = specs[0].prompt_token_ids
    for s in specs[1:]:
        assert s.prompt_token_ids[:64] == first[:64]
        assert s.prompt_token_ids[64:80] != first[64:80]
    s = cb.Session(
        path,
        runner="sim",
        workload_params={"block_size": 64},
        num_blocks=512,
        block_size=16,
        max_num_batched_tokens=1024,
    )
    s.run()
    assert sum(r.num_cached_tokens for r in s.trace.state().by_index) == 3 * 64


@pytest.mark.parametrize(
    ("length", "num", "says"),
    [
        (1024, 3, "block_size=512 would|no block size|block_size"),
        (10, 11, "no block size fits"),
        (1024, 0, "no block size fits"),
        (513, 1, "block_size=1024 would fit"),
    ],
)
def test_the_size_that_fits_is_named(tmp_path: Path, length: int, num: int, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        build(write(tmp_path, {"input_length": length, "output_length": 1, "hash_ids": list(range(num))}))


def test_a_block_size_is_for_mooncake_traces(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"block_size is 64, but reqs\.jsonl is no Mooncake trace"):
        build(write(tmp_path, {"prompt_len": 4}), block_size=64)
    with pytest.raises(ConfigError, match="block_size is 0, it must lie in 1"):
        build(blocks_of_64(tmp_path), block_size=0)


# ShareGPT ---------------------------------------------------------------------------------------------------

GOOD = {
    "id": "g",
    "conversations": [
        {"from": "human", "value": "What is a prime?"},
        {"from": "gpt", "value": "A number with two divisors."},
    ],
}
BAD: list[object] = [
    {"id": "b"},
    {"id": "b", "conversations": 5},
    {"id": "b", "conversations": [1, 2]},
    {"id": "b", "conversations": [{"from": "human"}, {"value": 5}]},
    [],
    5,
    None,
]


@pytest.mark.parametrize("bad", BAD, ids=repr)
@pytest.mark.parametrize("form", ["array", "lines"])
def test_a_bad_entry_among_good_ones_is_skipped_and_said(tmp_path: Path, bad: object, form: str) -> None:
    rows = [GOOD, bad, GOOD, {"id": "y", "conversations": [{"from": "human", "value": "alone"}]}]
    path = (
        write(tmp_path, rows, name="sg.json") if form == "array" else write(tmp_path, *rows, name="sg.json")
    )
    notes: list[str] = []
    specs = build(path, notes=notes)
    assert [s.request_id for s in specs] == ["r1", "r2"]
    (note,) = notes
    assert note.startswith(
        "2 of 4 entries of sg.json were skipped: 1 without a list of texts; 1 without an answer, whose "
        "length is needed (the first: sg.json "
    )
    assert f"{'entry' if form == 'array' else 'line'} 2: conversations must be a list" in note


def test_a_line_that_is_no_json_is_skipped_in_json_lines_of_share_gpt(tmp_path: Path) -> None:
    notes: list[str] = []
    assert len(build(write(tmp_path, GOOD, "{oops", GOOD, name="sg.jsonl"), notes=notes)) == 2
    assert notes == [
        "1 of 3 entries of sg.jsonl were skipped: 1 that cannot be read (the first: sg.jsonl line 2: not "
        "valid JSON: "
        "Expecting property name enclosed in double quotes at column 2)"
    ]


def test_a_file_of_bad_entries_alone_is_refused_with_the_first(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"sg\.json entry 1: conversations must be a list"):
        build(write(tmp_path, [{"id": "x"}], name="sg.json"))


def test_a_skipped_entry_is_a_note_of_the_session_and_of_its_trace(tmp_path: Path) -> None:
    s = cb.Session(write(tmp_path, [GOOD, {"id": "x"}], name="sg.json"), runner="sim", num_blocks=64)
    assert any(n.startswith("1 of 2 entries of sg.json were skipped") for n in s.notes)
    assert any(n.startswith("1 of 2 entries") for n in s.trace.header.notes)
    s.reset()
    assert sum("were skipped" in n for n in s.notes) == 1


def test_a_skipped_entry_is_said_on_the_command_line(cbviz: Call, cache: Path, tmp_path: Path) -> None:  # noqa: F811
    r = cbviz("run", "--runner", "sim", "--workload", write(tmp_path, GOOD, {"id": "x"}, name="sg.jsonl"))
    assert r.code == 0
    assert "1 of 2 entries of sg.jsonl were skipped" in r.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '[{"id": "a", "conversations": [{"value": "x"}, {"val',
            r"sg\.json line 1: the file ends in the middle of entry 1",
        ),
        (json.dumps([GOOD])[:-1], "the file ends in the middle of entry 1"),
        (json.dumps([GOOD])[:-1] + ",\n ", "line 2: the file ends in the middle of entry 2"),
        (
            json.dumps([GOOD])[:-1] + ",\n\n  oops and more text behind it]",
            "line 3: not valid JSON: Expecting value at column 3",
        ),
        (json.dumps([GOOD]) + " more", "line 1: not valid JSON: Extra text after the list"),
        (json.dumps([GOOD])[:-1] + " 5]", "Expecting ',' or ']' after entry 1"),
        ("[" * 200_000, "entry 1: it is nested too deeply"),
        ("[" + "1" * 5000 + "]", "thousands of digits"),
        ("[", "ends in the middle of entry 1"),
        ("[]", "holds no request"),
    ],
)
def test_an_array_that_is_none(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises((ConfigError, RequestError), match=says):
        build(write(tmp_path, text, name="sg.json"))


def test_an_array_may_hold_requests_of_our_own(tmp_path: Path) -> None:
    assert sizes(
        build(
            write(
                tmp_path,
                [{"prompt_len": 4, "max_tokens": 2}, {"prompt": [1, 2], "max_tokens": 3, "arrival_s": 4}],
                name="r.json",
            )
        )
    ) == [(0, 4, 2), (4, 2, 3)]


# half characters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "hi \\ud83d there", "max_tokens": 4}',
        '{"messages": [{"role": "user", "content": "hi \\ud83d there"}], "max_tokens": 4}',
        '{"prompt_len": 4, "request_id": "a\\udc00", "session": "\\ud800", "max_tokens": 4}',
        (
            '[{"id": "a", "conversations": [{"from": "human", "value": "hi \\ud83d there"}, {"from": "gpt", '
            '"value": "\\udfff"}]}]'
        ),
    ],
)
def test_half_a_character_becomes_the_replacement_character(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, line)
    (spec,) = build(path)
    text = f"{spec.request_id}{spec.prompt}{spec.session}"
    assert "\ufffd" in text
    text.encode()
    s = cb.Session(path, runner="sim", num_blocks=64)
    s.run()
    s.save(tmp_path / "run.jsonl")
    assert len(cb.load(tmp_path / "run.jsonl")) == len(s.trace)


def test_half_a_character_typed_or_named_becomes_the_replacement_character(tmp_path: Path) -> None:
    s = cb.Session(None, runner="sim", num_blocks=64)
    assert s.add("hi \ud83d there", request_id="a\udc00", max_tokens=2) == "a\ufffd"
    assert s.add("two\ude00\ud83d", max_tokens=2) == "r1"
    s.run()
    assert s.request("a\ufffd").spec.prompt == "hi \ufffd there"  # type: ignore[union-attr]
    branch = s.fork(0, name="n\ud800")
    assert branch.name == "n\ufffd"
    branch.rename("m\udfff")
    assert branch.name == "m\ufffd"
    s.save(tmp_path / "run.jsonl")
    assert [r.request_id for r in cb.load(tmp_path / "run.jsonl").state().by_index] == ["a\ufffd", "r1"]
    assert cb.Session([RequestSpec("\ud83d", (5,), 2, prompt="\ud83d")], runner="sim").request_ids == [
        "\ufffd"
    ]


def test_half_a_character_on_the_command_line_ends_in_one_line(
    cbviz: Call,  # noqa: F811
    cache: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    strange = tmp_path / "w\udcff.jsonl"
    strange.write_text('{"prompt": "hi \\ud83d", "max_tokens": 3}\n')
    assert cbviz("run", "--runner", "sim", "--workload", strange).code == 0
    for args in (
        ("--policy", "\udcff"),
        ("--workload", "\udcff"),
        ("--model", "\udcff"),
        ("--set", "policy=\udcff"),
        ("--set", "\udcff=1"),
        ("--param", "\udcff=1"),
        ("--discipline", "\udcff"),
    ):
        r = cbviz("run", "--runner", "sim", *args)
        assert (r.code, len(r.err.splitlines())) == (2, 1)


# the exporter's own table -----------------------------------------------------------------------------------


def test_the_table_of_a_run_of_ours_is_a_workload(cbviz: Call, cache: Path, tmp_path: Path) -> None:  # noqa: F811
    asked = [
        RequestSpec("=first", (5,) * 30, 7, arrival_s=1.5),
        RequestSpec("b", (6,) * 12, 3, arrival_s=2.0),
        RequestSpec("too long", (6,) * 12, 3000, arrival_s=3.0),
    ]
    s = cb.Session(asked, runner="sim", num_blocks=64)
    s.run()
    s.save(tmp_path / "run.jsonl")
    assert cbviz("export", tmp_path / "run.jsonl", "--to", "csv").code == 0
    notes: list[str] = []
    specs = build(tmp_path / "run.requests.csv", notes=notes)
    assert [(x.request_id, len(x.prompt_token_ids), x.max_tokens, x.arrival_s) for x in specs] == [
        ("=first", 30, 7, 0),
        ("b", 12, 3, 0.5),
    ]
    assert notes == [
        "1 of 3 entries of run.requests.csv were skipped: 1 in which nothing was asked or answered (failures)"
    ]


# what is no file of requests --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no request"),
        (b"\xef\xbb\xbf", "holds no request"),
        (f"{AZURE}\n".encode(), "holds no request"),
        (f"{AZURE}".encode(), "holds no request"),
        ("TIMESTAMP,x\n".encode("utf-16"), "begins as UTF-16 does"),
        (
            f"{AZURE}\n2023-11-16 18:00:00,3,4\n".encode() + b"\xe9,3,4\n",
            "line 3: not a text file in UTF-8: byte 0xe9",
        ),
        (
            f"{AZURE}\n2023-11-16 18:00:00,3,4\n2023-11-16 18:00:0".encode(),
            "line 3: .*(are needed|timestamp)",
        ),
        (f"{AZURE}\n2023-11-16 18:00:00,3\0,4\n".encode(), "line 2"),
        (
            f"{AZURE}\n2023-11-16 18:00:00,{'3' * 140_000},4\n".encode(),
            "line 2: not a row of a CSV file: field larger",
        ),
        (b'{"prompt_len": 4}\n{"prompt_len": 5', "line 2: not valid JSON"),
        (b'{"prompt": [1' + b"1" * 5000 + b"]}", "thousands of digits"),
        (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"prompt_len": 4, "n": 2000000000}', r"n is 2000000000, it must lie in 1\.\.4096"),
        (
            b'{"prompt_len": 4, "request_id": "' + b"x" * 2000 + b'"}',
            "request_id has 2000 characters, the most is 1000",
        ),
        (
            b'{"prompt_len": 4, "length_penalty": 1' + b"0" * 400 + b"}",
            "length_penalty is a number of more than 40 digits",
        ),
        (
            b'{"prompt_len": 4, "arrival_s": 1' + b"0" * 400 + b"}",
            "arrival_s is a number of more than 40 digits",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises((ConfigError, RequestError), match=says):
        build(tmp_path / "f")


def test_a_folder_or_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "absent", Path("a" * 5000), Path("a\0b")):
        with pytest.raises(ConfigError, match="neither a preset nor a file"):
            build(path)
        with pytest.raises(ConfigError, match="cannot be read"):
            files.load(path)


def test_ids_that_come_twice_are_refused(tmp_path: Path) -> None:
    table = write(
        tmp_path, "request,input_tokens,output_tokens,arrival_s", "a,3,4,0", "a,3,4,1", name="v.csv"
    )
    with pytest.raises(RequestError, match=r"v\.csv line 3: request_id 'a' stands in the file twice"):
        build(table)


def test_sequences_are_counted_before_they_are_made(tmp_path: Path) -> None:
    path = write(tmp_path, *({"prompt_len": 4, "n": 4096} for _ in range(300)))
    with pytest.raises(
        RequestError,
        match=r"line 245: the requests up to here have 1003520 sequences, the most in one run is 1000000; read fewer requests with limit=244",
    ):
        build(path)


# the real ones ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num", "first"),
    [
        ("traces/azure_2023_code.csv", 8819, (0, 4808, 10)),
        ("runs/rtx4090_llama31_8b.requests.csv", 300, (0, 2358, 531)),
    ],
)
def test_a_real_file_is_read_whole(data: Path, name: str, num: int, first: tuple[float, int, int]) -> None:
    notes: list[str] = []
    specs = build(data / name, notes=notes)
    assert len(specs) == num
    assert sizes(specs)[0] == first
    assert notes == []


def test_each_real_trace_is_read_or_refused_for_what_it_is(data: Path) -> None:
    for path in sorted((data / "traces").iterdir()):
        if path.name == "prefix_cache_hit_curves.csv":
            with pytest.raises(ConfigError, match="format not recognised"):
                build(path)
        else:
            notes: list[str] = []
            assert len(build(path, limit=2000, notes=notes)) == 2000
            assert notes == []
