"""Files of requests.

Owns the formats and their detection by content; knows no scheduler and no model beyond a tokenizer.

| format | recognised by |
| --- | --- |
| requests, JSON lines or one array | an object with `prompt` (text or ids), `messages` or `prompt_len`;
beside it what `FIELDS` names, as in RequestSpec and Sampling |
| Mooncake, JSON lines (kvcache-ai/Mooncake, FAST 2025) | `input_length`; `timestamp` in ms, `hash_ids`: equal
id, equal block of `block_size` tokens (512) |
| ShareGPT, one JSON array or JSON lines | objects with `conversations`; the first two turns are prompt and
answer, as `vllm bench serve` takes them |
| Azure 2023 CSV (Splitwise, ISCA 2024) | columns `TIMESTAMP`, `ContextTokens`, `GeneratedTokens` |
| BurstGPT CSV (Wang et al., 2024) | columns `Timestamp`, `Request tokens`, `Response tokens` |
| vLLM run CSV | columns `input_tokens`, `output_tokens`, `arrival_s` |
| a run of ours, CSV (`cbviz export RUN --to csv`, the requests) | columns `request_id`, `prompt_tokens`,
`output_tokens`, `arrival_s` |

A file is read as a stream, as far as `limit` needs; `.gz` and `.zst` are unpacked on the way
(`cbviz.textfile`). A trace without texts gets made-up token ids. Where a file gives the output's length,
`max_tokens` is that length and the end-of-sequence token is ignored (unless the line says otherwise), so that
a real model writes as much as the recorded one did. Times count from the earliest request that is read, also
where rows are not in order of time.

A bad request of our own format, of Mooncake or of Azure ends the reading with an error. Two kinds are left
out, and a note says how many: entries of ShareGPT without a prompt and an answer, and rows of a measured run
in which nothing was asked or answered (failures).
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from cbviz import textfile
from cbviz.config import ConfigError, clean_text
from cbviz.messages import MAX_BEAM_WIDTH, MAX_SEQUENCES, RequestError, RequestSpec, Sampling
from cbviz.workload.json_stream import array_entries, parse
from cbviz.workload.prompts import Encoder, MadeUp, chat, encode
from cbviz.workload.rows import MOST_ID, Row, short

MOST_TOTAL_TOKENS = 64_000_000
"""Prompt tokens that are held in memory at once: 8 bytes each."""
MOST_SEQUENCES = 1_000_000
"""Sequences of one run: `n` of all its requests together."""
MOST_LINE_BYTES = 64 << 20
"""Bytes of one line of a file of requests."""
MOONCAKE_BLOCK = 512
MOST_BLOCK = 1 << 20
DEFAULT_MAX_TOKENS = 64
FIELDS = (
    "request_id",
    "prompt",
    "messages",
    "prompt_len",
    "output_len",
    "max_tokens",
    "arrival_s",
    "arrival_step",
    "priority",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "n",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "ignore_eos",
    "stop_token_ids",
    "deadline_s",
    "ttft_slo_s",
    "tpot_slo_s",
    "session",
)
_PROMPTS = ("prompt", "messages", "prompt_len")


@dataclass(frozen=True)
class _Table:
    """A kind of CSV file. Columns in lower case."""

    arrival: str
    prompt: str
    output: str
    others: tuple[str, ...] = ()
    """Columns that it must have, too."""
    request_id: str = ""
    has_failures: bool = False
    """Rows in which nothing was asked or answered are failures of the measured run, and left out."""

    @property
    def columns(self) -> tuple[str, ...]:
        return self.arrival, self.prompt, self.output, *self.others


_TABLES = {
    "azure": _Table("timestamp", "contexttokens", "generatedtokens"),
    "burstgpt": _Table("timestamp", "request tokens", "response tokens", has_failures=True),
    "vllm-run": _Table("arrival_s", "input_tokens", "output_tokens", request_id="request", has_failures=True),
    "cbviz": _Table(
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
        ("request_id",),
        request_id="request_id",
        has_failures=True,
    ),
}


@dataclass
class _Found:
    """One request of a file.

    Its `arrival_s` is as the file has it until the earliest is known, if `timed`.
    """

    row: Row
    spec: RequestSpec
    timed: bool = False
    time_s: float = 0.0


@dataclass
class _Reading:
    """One file being read."""

    name: str
    made_up: MadeUp
    tokenizer: Encoder | None
    block_size: int | None = None
    uses_block_size: bool = False
    blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    seen: int = 0
    """Entries looked at so far."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Why entries were left out, and how many for each reason."""
    first_bad: RequestError | None = None

    def leave_out(self, reason: str, error: RequestError | None = None) -> None:
        self.left_out[reason] += 1
        self.first_bad = self.first_bad or error

    @property
    def note(self) -> str:
        """How many entries were left out, and why; '' if none was."""
        if not self.left_out:
            return ""
        why = "; ".join(f"{n:,} {reason}" for reason, n in self.left_out.items())
        first = f" (the first: {self.first_bad})" if self.first_bad is not None else ""
        return f"{self.left_out.total():,} of {self.seen:,} entries of {self.name} were skipped: {why}{first}"


def load(
    path: str | Path,
    *,
    seed: int = 0,
    model_vocab: int | None = None,
    tokenizer: Encoder | None = None,
    limit: int | None = None,
    scale: float = 1.0,
    block_size: int | None = None,
    notes: list[str] | None = None,
) -> list[RequestSpec]:
    """The requests of a file, in its order.

    `limit`: only the first so many; no more of the file is read than they need. `scale`: multiplies arrival
    times (0.5: twice the load). `block_size`: tokens of one block of a Mooncake trace. `notes` is given what
    a user should know: how many entries were skipped, and why. Raises ConfigError for a bad parameter or an
    unreadable file, RequestError naming line, field and limit for a bad request.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}, the least is 1")
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"scale is {scale}, it must be a finite number above 0")
    if block_size is not None and not 1 <= block_size <= MOST_BLOCK:
        raise ConfigError(f"block_size is {short(block_size)}, it must lie in 1..{MOST_BLOCK}")
    path = Path(path)
    reading = _Reading(path.name, MadeUp(seed, model_vocab), tokenizer, block_size)
    with textfile.open_bytes(path) as stream:
        found = _checked(itertools.islice(_parse(stream, reading), limit), model_vocab)
    told = [reading.note] if reading.note else []
    if not found:
        if reading.first_bad is not None:
            raise reading.first_bad
        raise ConfigError(f"{path}: holds no request{': ' if told else ''}{''.join(told)}")
    if block_size is not None and not reading.uses_block_size:
        raise ConfigError(
            f"block_size is {block_size}, but {path.name} is no Mooncake trace with hash_ids: leave it out"
        )
    times = [x.time_s for x in found if x.timed]
    if any(b < a for a, b in itertools.pairwise(times)):
        told.append(f"the rows of {path.name} are not in order of time: times count from the earliest")
    if notes is not None:
        notes += told
    begin = min(times, default=0.0)
    return [_arriving(x, begin, scale) for x in found]


def _arriving(x: _Found, begin: float, scale: float) -> RequestSpec:
    """The request with its time from the earliest one on."""
    when = (round(x.time_s - begin, 6) if x.timed else x.spec.arrival_s) * scale
    if when == x.spec.arrival_s:
        return x.spec
    if not math.isfinite(when):
        raise x.row.fail(f"arrival_s is {x.spec.arrival_s} and scale {scale}: their product must be finite")
    return msgspec.structs.replace(x.spec, arrival_s=when)


def _checked(found: Iterator[_Found], model_vocab: int | None) -> list[_Found]:
    """The requests of a file as a list, held against each other and against the limits of one run."""
    out: list[_Found] = []
    ids: set[str] = set()
    tokens = sequences = 0
    for x in found:
        line, spec = x.row, x.spec
        if (
            model_vocab is not None
            and not 0 <= min(spec.prompt_token_ids) <= max(spec.prompt_token_ids) < model_vocab
        ):
            raise line.fail(f"prompt holds token ids outside 0..{model_vocab - 1}, the model's vocabulary")
        if spec.request_id in ids:
            raise line.fail(f"request_id {short(spec.request_id)} stands in the file twice")
        ids.add(spec.request_id)
        tokens += len(spec.prompt_token_ids)
        if tokens > MOST_TOTAL_TOKENS:
            raise line.fail(
                f"the prompts up to here hold {tokens} tokens, the most in one run is {MOST_TOTAL_TOKENS}; "
                f"read fewer requests with limit={len(out)}"
            )
        sequences += max(spec.sampling.n, spec.sampling.beam_width)
        if sequences > MOST_SEQUENCES:
            raise line.fail(
                f"the requests up to here have {sequences} sequences, the most in one run is "
                f"{MOST_SEQUENCES}; read fewer requests with limit={len(out)}"
            )
        line.data = {}  # read by now; only where it stands is still needed
        out.append(x)
    return out


def _parse(stream: io.BufferedReader, reading: _Reading) -> Iterator[_Found]:
    """The requests of a file whose format its first sign tells."""
    textfile.skip_bom(stream, reading.name)
    first = _first_sign(stream, reading.name)
    if first == b"[":
        yield from _json_array(stream, reading)
    elif first == b"{":
        yield from _json_lines(stream, reading)
    elif first:
        yield from _csv(stream, reading)


def _first_sign(stream: io.BufferedReader, name: str) -> bytes:
    """The first byte that is no space, b'' if there is none.

    It and what stands before it on its line stay unread.
    """
    while head := stream.peek(1):
        text = head.lstrip(b" \t\r\n\f\v")
        if text:
            return text[:1]
        stream.read(len(head))  # nothing but spaces
    return b""


def _json_array(stream: io.BufferedReader, reading: _Reading) -> Iterator[_Found]:
    for number, entry in array_entries(textfile.chunks(stream, reading.name), reading.name):
        where = f"{reading.name} entry {number}"
        yield from _entry(
            where,
            entry,
            reading,
            share_gpt=not isinstance(entry, dict) or not any(f in entry for f in (*_PROMPTS, "input_length")),
        )


def _json_lines(stream: io.BufferedReader, reading: _Reading) -> Iterator[_Found]:
    share_gpt = False
    for number, raw in textfile.lines(stream, reading.name, MOST_LINE_BYTES):
        if not raw.strip():
            continue
        where = f"{reading.name} line {number}"
        try:
            entry = parse(textfile.text_of(raw, reading.name, number), where)
        except RequestError as e:
            if not share_gpt:
                raise
            reading.seen += 1
            reading.leave_out("that cannot be read", e)
            continue
        share_gpt = share_gpt or (isinstance(entry, dict) and "conversations" in entry)
        yield from _entry(where, entry, reading, share_gpt)


def _entry(where: str, entry: Any, reading: _Reading, share_gpt: bool) -> Iterator[_Found]:
    """The request of one JSON entry; none if it is an entry of ShareGPT that is left out."""
    index = reading.seen - reading.left_out.total()
    reading.seen += 1
    if share_gpt:
        yield from _share_gpt(where, entry, index, reading)
        return
    row = Row(where, entry)
    if "input_length" in row.data:
        yield _mooncake(row, index, reading)
    else:
        yield _Found(row, _native(row, index, reading.made_up, reading.tokenizer))


def _native(line: Row, index: int, made_up: MadeUp, tokenizer: Encoder | None) -> RequestSpec:
    line.known(FIELDS)
    d = line.data
    given = [f for f in ("prompt", "messages", "prompt_len") if d.get(f) is not None]
    if len(given) != 1:
        raise line.fail(
            f"needs exactly one of prompt, messages and prompt_len, got {' and '.join(given) or 'none'}"
        )
    text: str | None = None
    if given == ["prompt_len"]:
        prompt_len = line.size("prompt_len")
        assert prompt_len is not None
        ids = made_up.ids(index, prompt_len)
    elif given == ["messages"]:
        messages = d["messages"]
        if not (
            isinstance(messages, list)
            and messages
            and all(
                isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
                for m in messages
            )
        ):
            raise line.fail(
                'messages must be a list of {"role": text, "content": text} with at least 1 entry'
            )
        messages = [
            {**m, "role": clean_text(m["role"]), "content": clean_text(m["content"])} for m in messages
        ]
        text = messages[-1]["content"]
        ids = chat(messages, tokenizer, made_up)
    else:
        prompt = d["prompt"]
        if isinstance(prompt, str):
            text = prompt = clean_text(prompt)
            ids = encode(prompt, tokenizer, made_up) if prompt.strip() else ()
        elif isinstance(prompt, list):
            ids = tuple(
                line.ids("prompt", "prompt as a list must hold token ids, whole numbers of 0 or more") or ()
            )
        else:
            raise line.fail(f"prompt must be text or a list of token ids, got {short(prompt)}")
        if not ids:
            raise line.fail("prompt is empty, it needs at least 1 token")
    output_len, max_tokens = line.size("output_len"), line.size("max_tokens")
    if output_len is not None and max_tokens is not None and output_len > max_tokens:
        raise line.fail(f"output_len is {output_len}, it must be at most max_tokens, {max_tokens}")
    request_id = d.get("request_id", f"r{index + 1}")
    if not isinstance(request_id, str) or not request_id:
        raise line.fail(f"request_id must be a text that is not empty, got {short(request_id)}")
    ignore_eos = d.get("ignore_eos", output_len is not None)
    if not isinstance(ignore_eos, bool):
        raise line.fail(f"ignore_eos must be true or false, got {short(ignore_eos)}")
    stops = line.ids("stop_token_ids", "stop_token_ids must be a list of whole numbers of 0 or more") or []
    session = line.text("session")
    temperature, top_p = line.seconds("temperature"), line.seconds("top_p")
    try:
        sampling = Sampling(
            temperature=temperature or 0.0,
            top_k=line.whole("top_k", 0, 1_000_000) or 0,
            top_p=1.0 if top_p is None else top_p,
            seed=line.whole("seed", 0, 2**63 - 1),
            stop_token_ids=tuple(stops),
            ignore_eos=ignore_eos,
            n=1 if (n := line.whole("n", 1, MAX_SEQUENCES)) is None else n,
            beam_width=line.whole("beam_width", 0, MAX_BEAM_WIDTH) or 0,
            length_penalty=d.get("length_penalty", 1.0),
            early_stopping=d.get("early_stopping", False),
        )
        return RequestSpec(
            request_id,
            ids,
            max_tokens or output_len or DEFAULT_MAX_TOKENS,
            arrival_s=line.seconds("arrival_s") or 0.0,
            arrival_step=line.whole("arrival_step", 0, 2**31 - 1),
            priority=line.whole("priority", -(2**31), 2**31 - 1) or 0,
            sampling=sampling,
            output_len=output_len,
            prompt=text,
            deadline_s=line.seconds("deadline_s"),
            ttft_slo_s=line.seconds("ttft_slo_s"),
            tpot_slo_s=line.seconds("tpot_slo_s"),
            session=session,
        )
    except RequestError as e:
        raise e if str(e).startswith(line.where) else line.fail(str(e)) from None


def _mooncake(line: Row, index: int, reading: _Reading) -> _Found:
    line.known(("timestamp", "input_length", "output_length", "hash_ids"))
    prompt_len, output_len = line.size("input_length"), line.size("output_length")
    if prompt_len is None or output_len is None:
        raise line.fail("input_length and output_length are needed")
    hash_ids = line.ids("hash_ids", "hash_ids must be a list of whole numbers of 0 or more")
    if hash_ids is None:
        ids = reading.made_up.ids(index, prompt_len)
    else:
        reading.uses_block_size = True
        ids = _from_blocks(line, hash_ids, prompt_len, reading)
    spec = RequestSpec(
        f"r{index + 1}", ids, output_len, sampling=Sampling(ignore_eos=True), output_len=output_len
    )
    return _Found(line, spec, timed=True, time_s=(line.seconds("timestamp") or 0.0) / 1000)


def _from_blocks(line: Row, hash_ids: list[int], prompt_len: int, reading: _Reading) -> tuple[int, ...]:
    """The prompt whose blocks carry these ids: equal id, equal block.

    Raises RequestError if the ids are of blocks of another size.
    """
    size = reading.block_size or MOONCAKE_BLOCK
    need = -(-prompt_len // size)
    if len(hash_ids) != need:
        raise line.fail(
            f"hash_ids has {len(hash_ids)} entries, input_length {prompt_len} needs {need} blocks of "
            f"{size}: {_other_size(prompt_len, len(hash_ids))}"
        )
    for h in hash_ids:
        if h not in reading.blocks:
            reading.blocks[h] = reading.made_up.ids(h, size)
    return tuple(itertools.chain.from_iterable(reading.blocks[h] for h in hash_ids))[:prompt_len]


def _other_size(num_tokens: int, num_blocks: int) -> str:
    """What to do about so many blocks for so many tokens."""
    if not 0 < num_blocks <= num_tokens:
        return "no block size fits"
    least = -(-num_tokens // num_blocks)
    most = (num_tokens - 1) // (num_blocks - 1) if num_blocks > 1 else MOST_BLOCK
    likely = next((2**i for i in range(21) if least <= 2**i <= most), least)
    return (
        (
            f"if the file's blocks have another size, give it with block_size (block_size={likely} would fit "
            "this row)"
        )
        if least <= most
        else "no block size fits"
    )


def _share_gpt(where: str, entry: Any, index: int, reading: _Reading) -> Iterator[_Found]:
    """The request of one conversation; none if it lacks a prompt or an answer."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not all(
        isinstance(t, dict) and isinstance(t.get("value"), str) for t in turns[:2]
    ):
        error = RequestError(f'{where}: conversations must be a list of {{"from": text, "value": text}}')
        reading.leave_out("without a list of texts", error)
        return
    if len(turns) < 2:
        reading.leave_out("without an answer, whose length is needed")  # as vLLM's benchmark does
        return
    prompt, answer = clean_text(turns[0]["value"]), clean_text(turns[1]["value"])
    ids, output = (
        encode(prompt, reading.tokenizer, reading.made_up),
        encode(answer, reading.tokenizer, reading.made_up),
    )
    if not ids or not output:
        reading.leave_out("with an empty prompt or answer")
        return
    yield _Found(
        Row(where, entry),
        RequestSpec(
            f"r{index + 1}",
            ids,
            len(output),
            sampling=Sampling(ignore_eos=True),
            output_len=len(output),
            prompt=prompt,
        ),
    )


def _csv(stream: io.BufferedReader, reading: _Reading) -> Iterator[_Found]:
    name = reading.name
    rows = csv.reader(
        textfile.text_of(raw, name, number) for number, raw in textfile.lines(stream, name, MOST_LINE_BYTES)
    )
    following = _csv_rows(rows, name)
    _, header = next(following, (0, []))
    columns = [c.strip().lower() for c in header]
    kind = next((k for k, t in _TABLES.items() if set(t.columns) <= set(columns)), None)
    if kind is None:
        known = " or ".join("/".join(t.columns) for t in _TABLES.values())
        raise ConfigError(
            f"{name}: format not recognised. It is neither JSON nor a CSV file with the columns {known}"
        )
    table = _TABLES[kind]
    index = 0
    for number, cells in following:
        row = Row(f"{name} line {number}", dict(zip(columns, cells)))
        reading.seen += 1
        if table.has_failures and (_nothing(row, table.prompt) or _nothing(row, table.output)):
            reading.leave_out("in which nothing was asked or answered (failures)")
            continue
        yield _from_table(row, index, table, reading.made_up)
        index += 1


def _csv_rows(rows: Any, name: str) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of each row that is not empty. Raises RequestError for a row that is no CSV."""
    while True:
        try:
            cells = next(rows, None)
        except csv.Error as e:  # a NUL, a cell of more than 131,072 characters, a line end of its own kind
            raise RequestError(f"{name} line {rows.line_num}: not a row of a CSV file: {e}") from None
        if cells is None:
            return
        if any(cells):
            yield rows.line_num, cells


def _nothing(row: Row, column: str) -> bool:
    """Whether a number of tokens is absent or 0."""
    return row.blank(column) or row.whole(column, 0, MOST_ID) == 0


def _from_table(line: Row, index: int, table: _Table, made_up: MadeUp) -> _Found:
    if line.blank(table.prompt) or line.blank(table.output):
        raise line.fail(f"{table.prompt} and {table.output} are needed")
    prompt_len, output_len = line.size(table.prompt), line.size(table.output)
    assert prompt_len is not None and output_len is not None
    now = _timestamp(line, table.arrival)
    request_id = (line.text(table.request_id) or "").strip() if table.request_id else ""
    if request_id[:1] == "'" and request_id[1:2] in ("=", "+", "-", "@"):
        request_id = request_id[1:]  # our tables protect spreadsheets from it
    try:
        spec = RequestSpec(
            request_id or f"r{index + 1}",
            made_up.ids(index, prompt_len),
            output_len,
            sampling=Sampling(ignore_eos=True),
            output_len=output_len,
        )
    except RequestError as e:
        raise line.fail(str(e)) from None
    return _Found(line, spec, timed=True, time_s=now)


_DATE = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?)(\.\d{1,12})?(Z|[+-]\d\d:?\d\d)?")


def _timestamp(line: Row, name: str) -> float:
    """Seconds: a plain number, or a date and time with any number of digits in its fraction (Azure writes
    seven).
    """
    text = str(line.data.get(name) or "").strip()
    if ":" not in text:
        if line.blank(name):
            raise line.fail(f"{name} is empty, it must be a number of seconds or a date and time")
        seconds = line.seconds(name)
        assert seconds is not None
        return seconds
    found = _DATE.fullmatch(text)
    try:
        if found is None:
            raise ValueError
        whole, fraction, zone = found.groups()
        offset = 0
        if zone and zone != "Z":
            offset = (1 if zone[0] == "+" else -1) * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
        return (
            (datetime.fromisoformat(whole) - datetime(1970, 1, 1)).total_seconds()
            + float(fraction or 0)
            - offset
        )
    except ValueError:
        raise line.fail(
            f"{name} is {short(text)}, it must be a date and time like 2023-11-16 18:15:46.6805900"
        ) from None


__all__ = ["DEFAULT_MAX_TOKENS", "FIELDS", "load"]
