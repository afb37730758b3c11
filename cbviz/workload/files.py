"""Files of requests. Owns the formats and their detection by content; knows no scheduler and no model beyond a tokenizer.

| format | recognised by |
| --- | --- |
| requests, JSON lines | an object a line with `prompt` (text or ids), `messages` or `prompt_len`; beside it what `FIELDS` names, as in RequestSpec and Sampling |
| Mooncake, JSON lines (kvcache-ai/Mooncake, FAST 2025) | `input_length`; `timestamp` in ms, `hash_ids`: equal id, equal 512-token block |
| ShareGPT, one JSON array | objects with `conversations`; the first two turns are prompt and answer, as `vllm bench serve` takes them |
| Azure 2023 CSV (Splitwise, ISCA 2024) | columns `TIMESTAMP`, `ContextTokens`, `GeneratedTokens` |
| BurstGPT CSV (Wang et al., 2024) | columns `Timestamp`, `Request tokens`, `Response tokens`; rows with an empty response are failures and left out |
| vLLM run CSV | columns `input_tokens`, `output_tokens`, `arrival_s` |

A trace without texts gets made-up token ids. Where a file gives the output's length, `max_tokens` is that length and the end-of-sequence token is
ignored (unless the line says otherwise), so that a real model writes as much as the recorded one did. Times count from the file's first request.
"""

from __future__ import annotations

import csv
import difflib
import io
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from cbviz.config import ConfigError
from cbviz.messages import MAX_BEAM_WIDTH, RequestError, RequestSpec, Sampling
from cbviz.workload.prompts import Encoder, MadeUp, chat, encode

MOST_TOKENS = 10_000_000
"""Greatest prompt_len, output_len and max_tokens of one request."""
MOST_TOTAL_TOKENS = 64_000_000
"""Prompt tokens that are held in memory at once: 8 bytes each."""
MOONCAKE_BLOCK = 512
DEFAULT_MAX_TOKENS = 64
FIELDS = ("request_id", "prompt", "messages", "prompt_len", "output_len", "max_tokens", "arrival_s", "arrival_step", "priority", "temperature", "top_k", "top_p", "seed",
          "n", "beam_width", "length_penalty", "early_stopping", "ignore_eos", "stop_token_ids", "deadline_s", "ttft_slo_s", "tpot_slo_s", "session")
_CSV = {  # columns in lower case: (arrival, prompt length, output length)
    "azure": ("timestamp", "contexttokens", "generatedtokens"),
    "burstgpt": ("timestamp", "request tokens", "response tokens"),
    "vllm-run": ("arrival_s", "input_tokens", "output_tokens"),
}


class _Line:
    """One request of a file: reads fields and says where a bad one stands."""

    def __init__(self, where: str, data: Any) -> None:
        if not isinstance(data, dict):
            raise RequestError(f"{where}: a request is an object {{...}}, got {_short(data)}")
        self.where = where
        self.data: dict[str, Any] = data

    def fail(self, message: str) -> RequestError:
        return RequestError(f"{self.where}: {message}")

    def known(self, fields: Iterable[str]) -> None:
        for name in self.data:
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1)
                raise self.fail(f"unknown field {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(fields)}"))

    def whole(self, field: str, low: int, high: int) -> int | None:
        value = self.data.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise self.fail(f"{field} must be a whole number, got {_short(value)}")
        try:
            number = int(value) if not isinstance(value, float) or value.is_integer() else None
        except ValueError:
            number = None
        if number is None or (isinstance(value, str) and not value.strip().lstrip("-").isdigit()):
            raise self.fail(f"{field} must be a whole number, got {_short(value)}")
        if not low <= number <= high:
            raise self.fail(f"{field} is {number}, it must lie in {low}..{high}")
        return number

    def size(self, field: str) -> int | None:
        return self.whole(field, 1, MOST_TOKENS)

    def seconds(self, field: str) -> float | None:
        value = self.data.get(field)
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or number < 0:
            raise self.fail(f"{field} is {_short(value)}, it must be a finite number, 0 or more")
        return number


def load(path: str | Path, *, seed: int = 0, model_vocab: int | None = None, tokenizer: Encoder | None = None, limit: int | None = None, scale: float = 1.0) -> list[RequestSpec]:
    """The requests of a file, in its order.

    `limit`: only the first so many. `scale`: multiplies arrival times (0.5: twice the load). Raises ConfigError for a bad parameter or an unreadable
    file, RequestError naming line, field and limit for a bad request.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}, the least is 1")
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"scale is {scale}, it must be a finite number above 0")
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    made_up = MadeUp(seed, model_vocab)
    specs: list[RequestSpec] = []
    ids: set[str] = set()
    total = 0
    for line, spec in itertools.islice(_parse(text, path.name, made_up, tokenizer), limit):
        if model_vocab is not None and not 0 <= min(spec.prompt_token_ids) <= max(spec.prompt_token_ids) < model_vocab:
            raise line.fail(f"prompt holds token ids outside 0..{model_vocab - 1}, the model's vocabulary")
        if spec.request_id in ids:
            raise line.fail(f"request_id {spec.request_id!r} stands in the file twice")
        ids.add(spec.request_id)
        total += len(spec.prompt_token_ids)
        if total > MOST_TOTAL_TOKENS:
            raise line.fail(f"the prompts up to here hold {total} tokens, the most in one run is {MOST_TOTAL_TOKENS}; read fewer requests with limit={len(specs)}")
        specs.append(spec)
    if not specs:
        raise ConfigError(f"{path}: holds no request")
    return specs if scale == 1.0 else [msgspec.structs.replace(s, arrival_s=s.arrival_s * scale) for s in specs]


def _parse(text: str, name: str, made_up: MadeUp, tokenizer: Encoder | None) -> Iterator[tuple[_Line, RequestSpec]]:
    first = text.lstrip()[:1]
    if first == "[":
        yield from _share_gpt(text, name, made_up, tokenizer)
    elif first == "{":
        yield from _json_lines(text, name, made_up, tokenizer)
    elif first:
        yield from _csv(text, name, made_up)


def _json_lines(text: str, name: str, made_up: MadeUp, tokenizer: Encoder | None) -> Iterator[tuple[_Line, RequestSpec]]:
    blocks: dict[int, tuple[int, ...]] = {}
    begin_ms: float | None = None
    index = 0
    # Not splitlines(): a text may hold U+2028, which JSON does not treat as an end of line.
    for number, raw in enumerate(text.split("\n"), 1):
        if not raw.strip():
            continue
        where = f"{name} line {number}"
        try:
            line = _Line(where, json.loads(raw))
        except json.JSONDecodeError as e:
            raise RequestError(f"{where}: not valid JSON: {e.msg} at column {e.colno}") from None
        if "input_length" in line.data:
            if begin_ms is None:
                begin_ms = line.seconds("timestamp") or 0.0
            yield line, _mooncake(line, index, begin_ms, blocks, made_up)
        else:
            yield line, _native(line, index, made_up, tokenizer)
        index += 1


def _native(line: _Line, index: int, made_up: MadeUp, tokenizer: Encoder | None) -> RequestSpec:
    line.known(FIELDS)
    d = line.data
    given = [f for f in ("prompt", "messages", "prompt_len") if d.get(f) is not None]
    if len(given) != 1:
        raise line.fail(f"needs exactly one of prompt, messages and prompt_len, got {' and '.join(given) or 'none'}")
    text: str | None = None
    if given == ["prompt_len"]:
        prompt_len = line.size("prompt_len")
        assert prompt_len is not None
        ids = made_up.ids(index, prompt_len)
    elif given == ["messages"]:
        messages = d["messages"]
        if not (isinstance(messages, list) and messages and all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages)):
            raise line.fail('messages must be a list of {"role": text, "content": text} with at least 1 entry')
        text = messages[-1]["content"]
        ids = chat(messages, tokenizer, made_up)
    else:
        prompt = d["prompt"]
        if isinstance(prompt, str):
            text = prompt
            ids = encode(prompt, tokenizer, made_up) if prompt.strip() else ()
        elif isinstance(prompt, list):
            if any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in prompt):
                raise line.fail("prompt as a list must hold token ids, whole numbers of 0 or more")
            ids = tuple(prompt)
        else:
            raise line.fail(f"prompt must be text or a list of token ids, got {_short(prompt)}")
        if not ids:
            raise line.fail("prompt is empty, it needs at least 1 token")
    output_len, max_tokens = line.size("output_len"), line.size("max_tokens")
    if output_len is not None and max_tokens is not None and output_len > max_tokens:
        raise line.fail(f"output_len is {output_len}, it must be at most max_tokens, {max_tokens}")
    request_id = d.get("request_id", f"r{index + 1}")
    if not isinstance(request_id, str) or not request_id:
        raise line.fail(f"request_id must be a text that is not empty, got {_short(request_id)}")
    ignore_eos = d.get("ignore_eos", output_len is not None)
    if not isinstance(ignore_eos, bool):
        raise line.fail(f"ignore_eos must be true or false, got {_short(ignore_eos)}")
    stops = d.get("stop_token_ids") or []
    if not isinstance(stops, list) or any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in stops):
        raise line.fail("stop_token_ids must be a list of whole numbers of 0 or more")
    session = d.get("session")
    if session is not None and not isinstance(session, str):
        raise line.fail(f"session must be text, got {_short(session)}")
    temperature, top_p = line.seconds("temperature"), line.seconds("top_p")
    try:
        sampling = Sampling(temperature=temperature or 0.0, top_k=line.whole("top_k", 0, 1_000_000) or 0, top_p=1.0 if top_p is None else top_p,
                            seed=line.whole("seed", 0, 2**63 - 1), stop_token_ids=tuple(stops), ignore_eos=ignore_eos,
                            n=1 if (n := line.whole("n", 1, 2**31 - 1)) is None else n, beam_width=line.whole("beam_width", 0, MAX_BEAM_WIDTH) or 0,
                            length_penalty=d.get("length_penalty", 1.0), early_stopping=d.get("early_stopping", False))
        return RequestSpec(request_id, ids, max_tokens or output_len or DEFAULT_MAX_TOKENS, arrival_s=line.seconds("arrival_s") or 0.0,
                           arrival_step=line.whole("arrival_step", 0, 2**31 - 1), priority=line.whole("priority", -(2**31), 2**31 - 1) or 0, sampling=sampling,
                           output_len=output_len, prompt=text, deadline_s=line.seconds("deadline_s"), ttft_slo_s=line.seconds("ttft_slo_s"),
                           tpot_slo_s=line.seconds("tpot_slo_s"), session=session)
    except RequestError as e:
        raise e if str(e).startswith(line.where) else line.fail(str(e)) from None


def _mooncake(line: _Line, index: int, begin_ms: float, blocks: dict[int, tuple[int, ...]], made_up: MadeUp) -> RequestSpec:
    line.known(("timestamp", "input_length", "output_length", "hash_ids"))
    prompt_len, output_len = line.size("input_length"), line.size("output_length")
    if prompt_len is None or output_len is None:
        raise line.fail("input_length and output_length are needed")
    hash_ids = line.data.get("hash_ids")
    if hash_ids is None:
        ids = made_up.ids(index, prompt_len)
    else:
        if not isinstance(hash_ids, list) or any(isinstance(h, bool) or not isinstance(h, int) or h < 0 for h in hash_ids):
            raise line.fail("hash_ids must be a list of whole numbers of 0 or more")
        need = -(-prompt_len // MOONCAKE_BLOCK)
        if len(hash_ids) < need:
            raise line.fail(f"hash_ids has {len(hash_ids)} entries, input_length {prompt_len} needs {need} blocks of {MOONCAKE_BLOCK}")
        for h in hash_ids:
            if h not in blocks:
                blocks[h] = made_up.ids(h, MOONCAKE_BLOCK)
        ids = tuple(itertools.chain.from_iterable(blocks[h] for h in hash_ids))[:prompt_len]
    arrival_s = max(0.0, (line.seconds("timestamp") or 0.0) - begin_ms) / 1000
    return RequestSpec(f"r{index + 1}", ids, output_len, arrival_s=arrival_s, sampling=Sampling(ignore_eos=True), output_len=output_len)


def _share_gpt(text: str, name: str, made_up: MadeUp, tokenizer: Encoder | None) -> Iterator[tuple[_Line, RequestSpec]]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as e:
        raise RequestError(f"{name} line {e.lineno}: not valid JSON: {e.msg} at column {e.colno}") from None
    index = 0
    for number, row in enumerate(rows, 1):
        line = _Line(f"{name} entry {number}", row)
        turns = line.data.get("conversations")
        if not isinstance(turns, list) or not all(isinstance(t, dict) and isinstance(t.get("value"), str) for t in turns):
            raise line.fail('conversations must be a list of {"from": text, "value": text}')
        if len(turns) < 2:
            continue  # no answer to take the length from, as in vLLM's benchmark
        prompt, answer = turns[0]["value"], turns[1]["value"]
        ids, output = encode(prompt, tokenizer, made_up), encode(answer, tokenizer, made_up)
        if not ids or not output:
            continue
        yield line, RequestSpec(f"r{index + 1}", ids, len(output), sampling=Sampling(ignore_eos=True), output_len=len(output), prompt=prompt)
        index += 1


def _csv(text: str, name: str, made_up: MadeUp) -> Iterator[tuple[_Line, RequestSpec]]:
    reader = csv.DictReader(io.StringIO(text))
    reader.fieldnames = columns = [c.strip().lower() for c in reader.fieldnames or []]
    kind = next((k for k, needed in _CSV.items() if set(needed) <= set(columns)), None)
    if kind is None:
        raise ConfigError(f"{name}: format not recognised. It is neither JSON nor a CSV file with the columns " + " or ".join("/".join(c) for c in _CSV.values()))
    when, prompt, output = _CSV[kind]
    begin: float | None = None
    index = 0
    for row in reader:
        line = _Line(f"{name} line {reader.line_num}", {k: v for k, v in row.items() if k})
        now = _timestamp(line, when)
        begin = now if begin is None else begin
        if kind == "burstgpt" and (row.get(output) or "").strip() == "0":
            continue
        prompt_len, output_len = line.size(prompt), line.size(output)
        if prompt_len is None or output_len is None:
            raise line.fail(f"{prompt} and {output} are needed")
        if now < begin:
            raise line.fail(f"{when} is {_short(row[when])}, before the first row's")
        request_id = row.get("request") or f"r{index + 1}"
        yield line, RequestSpec(request_id, made_up.ids(index, prompt_len), output_len, arrival_s=round(now - begin, 6), sampling=Sampling(ignore_eos=True), output_len=output_len)
        index += 1


def _timestamp(line: _Line, field: str) -> float:
    """Seconds: a plain number, or a date and time with any number of digits in its fraction (Azure writes seven)."""
    text = str(line.data.get(field) or "").strip()
    if "-" not in text[1:] or ":" not in text:
        seconds = line.seconds(field)
        if seconds is None:
            raise line.fail(f"{field} is needed")
        return seconds
    whole, _, fraction = text.removesuffix("+00:00").removesuffix("Z").partition(".")
    try:
        return (datetime.fromisoformat(whole) - datetime(1970, 1, 1)).total_seconds() + (float(f"0.{fraction}") if fraction else 0.0)
    except (TypeError, ValueError):
        raise line.fail(f"{field} is {_short(text)}, it must be a date and time like 2023-11-16 18:15:46.6805900") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


__all__ = ["DEFAULT_MAX_TOKENS", "FIELDS", "load"]
