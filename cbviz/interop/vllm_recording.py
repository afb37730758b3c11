"""A recorded run of a real vLLM as a trace of ours: the same events, rebuilt from what its rows say.

Knows the recording's format and the trace's; runs no scheduler.

A recording is JSON lines: `config`, one `step` a call of `LLMEngine.step()`, `result`; the requests stand in
a file beside it, which `config` names. Rows say who was scheduled, with how many tokens, on which blocks, and
the queues after `schedule()`. From that follow the order of events and most reasons. What does not follow is
left out and named in the header:

    shared / allocated   a table's leading `num_computed` tokens at admission were found, the rest is new
    cached, evicted      a block is findable once its tokens are known and computed; it is evicted when it is handed out again
    preempted, for whom  who needed more blocks than were free, taken in running order
    waits for            a preemption in the step, the budget used up, no seat, else blocks (vLLM asks in this order)

After every step the folded state is held against the row: tables, both queues, free blocks before and after,
tokens computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import msgspec

from cbviz import events as ev
from cbviz.config import ConfigError, EngineConfig
from cbviz.core.kv.block_pool import ROOT, hash_block
from cbviz.cost import models
from cbviz.messages import ChunkRecord, Gauges, RequestError, RequestSpec, Sampling, StepRecord, TokenAccount
from cbviz.trace.accounting import count_slots, executed_at
from cbviz.trace.reading import believed, lines_of
from cbviz.trace.schema import TraceError, TraceHeader
from cbviz.trace.state import State
from cbviz.trace.trace import Trace

_MS = 1e-3
_NEEDED = (
    "added",
    "scheduled",
    "new",
    "resumed",
    "preempted",
    "running",
    "waiting",
    "blocks",
    "free_blocks",
    "appended",
    "finished",
    "free_blocks_after",
    "ms",
    "t",
)
_STATUS = {"FINISHED_STOPPED": "stop", "FINISHED_LENGTH_CAPPED": "length", "FINISHED_ABORTED": "abort"}


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Tokenizer(Protocol):
    """What turns tokens into words: `cbviz.model.tokenizer.Tokenizer`, or anything like it."""

    def detokenizer(self, *, skip_special_tokens: bool = False) -> Any: ...


def import_recording(
    path: str | Path, *, tokenizer: Tokenizer | None = None, workload: str | Path | None = None
) -> Trace:
    """Opens a recording (`.jsonl`, `.jsonl.gz`) as a trace.

    `workload`: the file of its requests (default: the one its first line names, beside it).

    Times are the recording's own wall times. With a tokenizer the trace has texts. Raises TraceError naming
    the file, the line and what is wrong, also where the events rebuilt from a row do not lead to the tables,
    queues or free blocks that the row says.
    """
    file = Path(path)
    lines = _lines(file)
    return believed(
        lambda: _imported(file, lines, tokenizer, workload), f"{file} is not a recording that can be imported"
    )


def _imported(
    file: Path, lines: list[dict[str, Any]], tokenizer: Tokenizer | None, workload: str | Path | None
) -> Trace:
    head = lines[0]
    if head.get("kind") != "config" or "engine_args" not in head:
        raise TraceError(
            f"{file}, line 1: not the config line of a recorded vLLM (kind 'config' with engine_args)"
        )
    requests = _requests(file, head, workload)
    result = next((x for x in lines if x.get("kind") == "result"), {})
    importer = _Importer(file, head, requests, result, tokenizer)
    for number, row in enumerate(lines[1:], 2):
        if row.get("kind") == "step":
            importer.take(number, row)
    if not len(importer.trace):
        raise TraceError(f"{file}: it holds no step")
    importer.finish(result)
    return importer.trace


def _lines(file: Path) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for number, line in enumerate(lines_of(file), 1):
        if not line.strip():
            continue
        try:
            out.append(msgspec.json.decode(line, type=dict[str, Any]))
        except (msgspec.DecodeError, RecursionError) as e:
            raise TraceError(f"{file}, line {number}: not a line of a recording ({e})") from None
    if not out:
        raise TraceError(f"{file} is empty")
    return out


def _requests(file: Path, head: dict[str, Any], workload: str | Path | None) -> dict[str, dict[str, Any]]:
    source = (
        Path(workload) if workload is not None else file.with_name(str(head.get("workload", "workload.json")))
    )
    try:
        data = msgspec.json.decode(source.read_bytes(), type=dict[str, Any])
        return {"": data, **{q["id"]: q for q in data["requests"]}}
    except OSError as e:
        raise TraceError(
            f"{file} names its requests in {source}, which can't be opened ({e.strerror or e}): name the "
            "file of requests"
        ) from None
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError) as e:
        raise TraceError(f"{source} is not a file of requests ({e})") from None


class _Rebuilt:
    """One request while its rows are read."""

    def __init__(self, spec: RequestSpec, seq: int, step: int) -> None:
        self.spec = spec
        self.seq = seq
        self.tokens = list(spec.prompt_token_ids)
        self.computed = 0
        self.max_computed = 0
        self.table: list[int] = []
        self.hashes: list[bytes] = []
        self.num_cached_blocks = 0
        self.queued_step = step
        self.preempted = False
        self.last_wait: tuple[str, int, int] | None = None


class _Importer:
    """Keeps what a scheduler would know of the past, and writes a record for each row."""

    def __init__(
        self,
        file: Path,
        head: dict[str, Any],
        requests: dict[str, dict[str, Any]],
        result: dict[str, Any],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.file = file
        self.wishes = requests
        self.tokenizer = tokenizer
        self.config, self.priority = _config(file, head)
        self.bs = self.config.block_size
        self.logprobs: dict[str, list[list[float]]] = result.get("logprobs_top2") or {}
        self.trace = Trace(
            _header(file, head, requests[""], self.config, tokenizer is not None, bool(self.logprobs))
        )
        self.state = State(self.config.num_blocks, self.bs, self.config.to_dict())
        self.requests: dict[str, _Rebuilt] = {}
        self.waiting: list[_Rebuilt] = []
        self.running: list[_Rebuilt] = []
        self.ref = [0] * self.config.num_blocks
        self.hash_of: list[bytes | None] = [None] * self.config.num_blocks
        self.blocks_of: dict[bytes, dict[int, None]] = {}
        self.last_owner = [""] * self.config.num_blocks
        self.freed_step = [0] * self.config.num_blocks
        self.gone: dict[bytes, tuple[int, str]] = {}
        """Hash -> (step, by whom) of its last eviction."""
        self.num_finished = 0
        self.proposed: dict[str, int] = {}
        """How many drafts a request holds for its next step."""
        self.streams: dict[str, Detokenizer] = {}
        self.step = 0
        self.line = 0
        self.events: list[ev.AnyEvent] = []

    def wrong(self, what: str) -> TraceError:
        return TraceError(f"{self.file}, line {self.line} (step {self.step}): {what}")

    # one row ------------------------------------------------------------------------------------------------

    def take(self, line: int, row: dict[str, Any]) -> None:
        self.line, self.step = line, self.step + 1
        if missing := [k for k in _NEEDED if k not in row]:
            raise self.wrong(f"the row lacks {', '.join(missing)}")
        self.events = []
        try:
            record = self._record(row)
        except (KeyError, IndexError, TypeError, ValueError) as e:
            if isinstance(e, TraceError):
                raise
            raise self.wrong(f"the row does not fit those before it ({type(e).__name__}: {e})") from None
        self.proposed = {rid: len(ids) for rid, ids in (row.get("proposed") or {}).items()}
        self.trace.append(record)

    def _record(self, row: dict[str, Any]) -> StepRecord:
        arrivals = [self._arrive(rid, row["t"]) for rid in row["added"]]
        shares = {rid: (n, start) for rid, n, start in row["scheduled"]}
        drafts: dict[str, list[int]] = row.get("drafts") or {}
        chunks = self._run(row, shares, drafts)
        chunks += self._admit(row, shares, drafts)
        self._waits(row, shares)
        for rid, (n, start) in shares.items():
            self.requests[rid].computed = start + n
        self.events.append(ev.Executed())
        self._update(row, drafts)
        total, again = sum(c.num_tokens for c in chunks), sum(c.num_recomputed for c in chunks)
        rejected = sum(e.num_rejected for e in self.events if isinstance(e, ev.Sampled))
        seconds = row["ms"]["step"] * _MS
        record = StepRecord(
            step=self.step,
            t0_s=row["t"],
            t1_s=row["t"] + seconds,
            clock="measured",
            chunks=chunks,
            events=self.events,
            tokens=TokenAccount(total, total - again - rejected, again, 0, rejected),
            measured_s=row["ms"]["exec"] * _MS,
            schedule_s=(row["ms"]["schedule"] + row["ms"]["update"]) * _MS,
            arrivals=arrivals,
        )
        self._probabilities(record)
        self._texts(record)
        self._check(record, row)
        return record

    def _arrive(self, rid: str, now_s: float) -> RequestSpec:
        q = self.wishes.get(rid)
        if q is None:
            raise self.wrong(f"{rid} was added, but the file of requests does not name it")
        try:
            spec = RequestSpec(
                rid,
                tuple(q["prompt_token_ids"]),
                q["max_tokens"],
                arrival_s=now_s,
                arrival_step=self.step,
                priority=q.get("priority", 0),
                prompt=q.get("question"),
                sampling=Sampling(ignore_eos=bool(q.get("ignore_eos", False))),
            )
        except (RequestError, KeyError) as e:
            raise self.wrong(f"request {rid} can't be read: {e}") from None
        r = self.requests[rid] = _Rebuilt(spec, len(self.requests), self.step)
        self.events.append(
            ev.Arrived(rid, self._queue(r), len(spec.prompt_token_ids), spec.max_tokens, now_s, spec.priority)
        )
        return spec

    def _queue(self, r: _Rebuilt) -> int:
        """Puts the request into the waiting queue: by arrival, or by priority and then arrival.

        Returns its place.
        """
        place = next(
            (i for i, w in enumerate(self.waiting) if self._key(w) > self._key(r)), len(self.waiting)
        )
        self.waiting.insert(place, r)
        return place

    def _key(self, r: _Rebuilt) -> tuple[int, int]:
        return (r.spec.priority if self.priority else 0), r.seq

    # schedule() ---------------------------------------------------------------------------------------------

    def _run(
        self, row: dict[str, Any], shares: dict[str, tuple[int, int]], drafts: dict[str, list[int]]
    ) -> list[ChunkRecord]:
        """Running requests in order; whoever needs more blocks than are free takes those of the row's
        preempted ones.
        """
        victims = {self.requests[rid] for rid in row["preempted"]}
        order = list(self.running)
        chunks: list[ChunkRecord] = []
        i, ended = 0, False
        while i < len(order) and not ended:
            r = order[i]
            rid = r.spec.request_id
            if rid not in shares and r not in victims:
                i += 1
                continue
            if rid in shares:
                need = len(row["blocks"][rid]) - len(r.table)
            # it lost its blocks in this step, asking for what it had not computed and its drafts, as far as
            # the budget went
            else:
                wanted = min(
                    len(r.tokens) + self.proposed.get(rid, 0) - r.computed,
                    (self.config.max_num_batched_tokens or 0) - sum(c.num_tokens for c in chunks),
                )
                need = -(-(r.computed + wanted) // self.bs) - len(r.table)
            while need > self._num_free() and not ended:
                lost = self._preempt(order, victims, r, need)
                place = order.index(lost)
                del order[place]
                i -= place < i
                ended = lost is r
            if ended:
                break
            if rid in shares:
                self._grow(r, row["blocks"][rid])
                chunks.append(self._share(r, *shares[rid], drafts.get(rid, []), row, self._spent(shares)))
            i += 1
        if victims:
            raise self.wrong(
                f"{', '.join(sorted(r.spec.request_id for r in victims))} lost its blocks, but nobody in "
                "the row needed them"
            )
        left = [r for r in order if r.spec.request_id not in shares]
        reason = (
            "blocks"
            if ended
            else "budget"
            if self._spent(shares) >= (self.config.max_num_batched_tokens or 0)
            else "max_model_len"
        )
        self.events.extend(ev.Skipped(r.spec.request_id, reason) for r in left)
        return chunks

    def _preempt(self, order: list[_Rebuilt], victims: set[_Rebuilt], for_r: _Rebuilt, need: int) -> _Rebuilt:
        candidates = sorted(order, key=self._key, reverse=True) if self.priority else order[::-1]
        victim = next((r for r in candidates if r in victims), None)
        if victim is None:
            raise self.wrong(
                f"{for_r.spec.request_id} takes {need} blocks, {self._num_free()} are free, and nobody was "
                "preempted"
            )
        rank = (lambda r: f"{r.spec.priority}, {r.seq}") if self.priority else (lambda r: str(order.index(r)))
        ranking = [(r.spec.request_id, rank(r)) for r in candidates]
        have, ids, lost = self._num_free(), list(victim.table), victim.computed
        self._free(victim)
        victims.discard(victim)
        self.running.remove(victim)
        victim.max_computed = max(victim.max_computed, lost)
        victim.computed, victim.preempted, victim.queued_step, victim.last_wait = 0, True, self.step, None
        rule = "rank" if self.priority else "last"
        self.events.append(
            ev.Preempted(
                victim.spec.request_id,
                for_r.spec.request_id,
                rule,
                lost,
                ids,
                ranking,
                self._queue(victim),
                need,
                have,
            )
        )
        return victim

    def _admit(
        self, row: dict[str, Any], shares: dict[str, tuple[int, int]], drafts: dict[str, list[int]]
    ) -> list[ChunkRecord]:
        chunks = []
        seated = set(row["new"]) | set(row["resumed"])
        for rid in [x for x in shares if x in seated]:
            r = self.requests[rid]
            n, start = shares[rid]
            num_hit, rest = divmod(start, self.bs)
            if rest:
                raise self.wrong(
                    f"{rid} starts at token {start}, in the middle of a block: a prefix hit is made of "
                    "whole blocks"
                )
            table = row["blocks"][rid]
            hits = table[:num_hit]
            if hits:
                self.events.append(ev.PrefixHit(rid, start, hits))
            if (miss := self._miss(r, num_hit)) is not None:
                self.events.append(miss)
            self.waiting.remove(r)
            self.running.append(r)
            self.events.append(
                ev.Admitted(rid, r.preempted, start, self.step - r.queued_step, len(self.running) - 1)
            )
            r.last_wait, r.num_cached_blocks, r.computed = None, num_hit, start
            if hits:
                for b in hits:
                    self.ref[b] += 1
                    self.last_owner[b] = rid
                r.table = list(hits)
                self.events.append(ev.Shared(rid, hits))
            self._grow(r, table)
            chunks.append(self._share(r, n, start, drafts.get(rid, []), row, self._spent(shares)))
        return chunks

    def _spent(self, shares: dict[str, tuple[int, int]]) -> int:
        return sum(n for n, _ in shares.values())

    def _grow(self, r: _Rebuilt, table: list[int]) -> None:
        """Blocks beyond those that the request holds are new; a findable one among them is evicted."""
        rid = r.spec.request_id
        if table[: len(r.table)] != r.table:
            raise self.wrong(f"the table of {rid} was {r.table} and is {table}: blocks in it changed")
        new = table[len(r.table) :]
        for b in new:
            if self.ref[b]:
                raise self.wrong(f"{rid} takes block {b}, which {self.last_owner[b]} holds")
            if self.hash_of[b] is not None:
                self.events.append(ev.Evicted(b, self.last_owner[b], rid, self.step - self.freed_step[b]))
                self._forget(b, rid)
            self.ref[b] = 1
            self.last_owner[b] = rid
        r.table += new
        if new:
            self.events.append(ev.Allocated(rid, new))

    def _share(
        self, r: _Rebuilt, n: int, start: int, drafts: list[int], row: dict[str, Any], spent: int
    ) -> ChunkRecord:
        rid = r.spec.request_id
        known = len(r.tokens)
        if self.config.enable_prefix_caching:
            self._cache(r, min(start + n, known) // self.bs)
        wanted = known + len(drafts) - start
        limit = self.config.max_num_batched_tokens or 0
        cap = (
            ""
            if n >= wanted
            else "budget"
            if spent >= limit
            else "max_model_len"
            if start + n >= (self.config.max_model_len or 0) - 1
            else ""
        )
        self.events.append(
            ev.Scheduled(
                rid,
                start,
                n,
                num_draft=len(drafts),
                wanted=wanted,
                cap=cap,
                draft_padding=bool(drafts) and min(drafts) < 0,
            )
        )
        again = max(0, min(start + n, r.max_computed) - start)
        decode = start == known - 1 and known > len(r.spec.prompt_token_ids)
        return ChunkRecord(
            rid,
            start,
            n,
            "decode" if decode else "prefill",
            len(drafts),
            bool(row["appended"].get(rid)),
            again,
        )

    def _waits(self, row: dict[str, Any], shares: dict[str, tuple[int, int]]) -> None:
        """Why the head of the queue was not admitted, as vLLM asks: preemption, budget, seats, blocks."""
        if not self.waiting:
            return
        head = self.waiting[0]
        num_preempted = sum(isinstance(e, ev.Preempted) for e in self.events)
        if num_preempted:
            why = ("preempted", 0, num_preempted)
        elif self._spent(shares) >= (self.config.max_num_batched_tokens or 0):
            why = ("budget", 1, 0)
        elif len(self.running) >= self.config.max_num_seqs:
            why = ("seats", 1, 0)
        else:
            hits = self._hits(head)
            why = (
                "blocks",
                max(0, -(-len(head.tokens) // self.bs) - len(hits)) + sum(1 for b in hits if not self.ref[b]),
                self._num_free(),
            )
        if head.last_wait != why:
            head.last_wait = why
            self.events.append(ev.NotAdmitted(head.spec.request_id, *why))

    # update_from_output() -----------------------------------------------------------------------------------

    def _update(self, row: dict[str, Any], drafts: dict[str, list[int]]) -> None:
        accepted: dict[str, int] = row.get("accepted") or {}
        for rid, _, _ in row["scheduled"]:
            ids = row["appended"].get(rid)
            if not ids:
                continue
            r = self.requests[rid]
            rejected = len(drafts.get(rid, ())) - accepted.get(rid, 0)
            r.tokens += ids
            r.computed -= rejected
            past_end = max(
                0, accepted.get(rid, 0) - len(ids) + 1
            )  # right, but behind the token that ended the request
            self.events.append(ev.Sampled(rid, ids, rejected + past_end, past_end))
            if (proposed := (row.get("proposed") or {}).get(rid)) and rid not in row["finished"]:
                self.events.append(ev.Proposed(rid, proposed))
            if rid in row["finished"]:
                self._end(r, *row["finished"][rid])
        if strange := [
            rid for rid in row["finished"] if rid in self.requests and self.requests[rid] in self.running
        ]:
            raise self.wrong(f"{', '.join(strange)} finished without a token")

    def _end(self, r: _Rebuilt, status: str, stop: int | str | None) -> None:
        rid = r.spec.request_id
        reason = _STATUS.get(status, status)
        if reason == "length" and len(r.tokens) - len(r.spec.prompt_token_ids) < r.spec.max_tokens:
            reason = "max_model_len"
        self.events.append(
            ev.Finished(
                rid, reason, stop if isinstance(stop, int) else r.tokens[-1] if reason == "stop" else -1
            )
        )
        ids = list(r.table)
        self._free(r)
        self.running.remove(r)
        self.num_finished += 1
        if ids:
            self.events.append(ev.Freed(rid, ids))

    # blocks -------------------------------------------------------------------------------------------------

    def _num_free(self) -> int:
        return self.config.num_blocks - 1 - sum(1 for n in self.ref if n)

    def _free(self, r: _Rebuilt) -> None:
        for b in r.table:
            self.ref[b] -= 1
            self.last_owner[b] = r.spec.request_id
            if not self.ref[b]:
                self.freed_step[b] = self.step
        r.table, r.num_cached_blocks = [], 0

    def _hashes(self, r: _Rebuilt, n: int) -> list[bytes]:
        while len(r.hashes) < n:
            i = len(r.hashes)
            r.hashes.append(
                hash_block(r.hashes[-1] if r.hashes else ROOT, r.tokens[i * self.bs : (i + 1) * self.bs])
            )
        return r.hashes[:n]

    def _cache(self, r: _Rebuilt, full: int) -> None:
        hashes = self._hashes(r, full)
        for i in range(r.num_cached_blocks, full):
            b = r.table[i]
            self.hash_of[b] = hashes[i]
            self.blocks_of.setdefault(hashes[i], {})[b] = None
            self.events.append(ev.BlockCached(r.spec.request_id, b, hashes[i].hex()[:16]))
        r.num_cached_blocks = max(full, r.num_cached_blocks)

    def _forget(self, b: int, by: str) -> None:
        h = self.hash_of[b]
        assert h is not None
        self.hash_of[b] = None
        del self.blocks_of[h][b]
        self.gone[h] = (self.step, by)

    def _hits(self, r: _Rebuilt) -> list[int]:
        out: list[int] = []
        if self.config.enable_prefix_caching:
            for h in self._hashes(r, (len(r.tokens) - 1) // self.bs):
                found = self.blocks_of.get(h)
                if not found:
                    break
                out.append(next(iter(found)))
        return out

    def _miss(self, r: _Rebuilt, num_hit: int) -> ev.PrefixMiss | None:
        if not self.config.enable_prefix_caching:
            return None
        rid = r.spec.request_id
        full, rest = divmod(len(r.tokens), self.bs)
        if num_hit >= (len(r.tokens) - 1) // self.bs:
            if not rest and self.blocks_of.get(self._hashes(r, full)[full - 1]):
                return ev.PrefixMiss(rid, full - 1, "last-token")
            return ev.PrefixMiss(rid, num_hit, "partial") if num_hit else None
        gone = self.gone.get(self._hashes(r, num_hit + 1)[num_hit])
        return (
            ev.PrefixMiss(rid, num_hit, "evicted", *gone)
            if gone is not None
            else ev.PrefixMiss(rid, num_hit, "new")
        )

    # words, probabilities, checks ---------------------------------------------------------------------------

    def _probabilities(self, record: StepRecord) -> None:
        """The two best log-probabilities of each token, where the recording has them."""
        for e in record.events:
            if isinstance(e, ev.Sampled) and e.request_id in self.logprobs:
                r = self.requests[e.request_id]
                end = len(r.tokens) - len(r.spec.prompt_token_ids)
                pairs = self.logprobs[e.request_id][end - len(e.token_ids) : end]
                record.logprobs = {**(record.logprobs or {}), e.request_id: [p[0] for p in pairs]}
                record.gaps = {**(record.gaps or {}), e.request_id: [round(p[0] - p[1], 4) for p in pairs]}

    def _texts(self, record: StepRecord) -> None:
        if self.tokenizer is None:
            return
        record.texts = {}
        for e in record.events:
            if isinstance(e, ev.Sampled):
                stream = self.streams.get(e.request_id)
                if stream is None:
                    stream = self.streams[e.request_id] = self.tokenizer.detokenizer(skip_special_tokens=True)
                record.texts[e.request_id] = [stream.push(t) for t in e.token_ids]
            elif isinstance(e, ev.Finished) and e.request_id in self.streams:
                rest = self.streams.pop(e.request_id).flush()
                if rest and record.texts.get(e.request_id):
                    record.texts[e.request_id][-1] += rest

    def _check(self, record: StepRecord, row: dict[str, Any]) -> None:
        """Folds the record and holds the state against the row, at the forward pass and at the end; fills in
        what is counted from the state.
        """
        inside = self.state.clone()
        inside.apply(record, upto=executed_at(record))
        tables = {rid: inside.requests[rid].block_ids for rid in inside.running}
        for what, ours, theirs in (
            ("running", inside.running, row["running"]),
            ("waiting", inside.waiting, row["waiting"]),
            ("blocks", tables, row["blocks"]),
            ("free_blocks", inside.num_free_blocks, row["free_blocks"]),
        ):
            if ours != theirs:
                raise self.wrong(f"{what} is {theirs} in the row; the events rebuilt from it lead to {ours}")
        record.slots = count_slots(inside)
        self.state.apply(record)
        computed = {
            rid: self.state.requests[rid].num_computed_tokens for rid in row.get("computed_after", {})
        }
        for what, after, told in (
            ("free_blocks_after", self.state.num_free_blocks, row["free_blocks_after"]),
            ("computed_after", computed, row.get("computed_after", {})),
        ):
            if after != told:
                raise self.wrong(f"{what} is {told} in the row; the events rebuilt from it lead to {after}")
        cached = sum(
            1 for b in range(1, self.config.num_blocks) if self.hash_of[b] is not None and not self.ref[b]
        )
        record.gauges = Gauges(
            len(self.running), len(self.waiting), self.num_finished, self.state.num_free_blocks, cached
        )

    def finish(self, result: dict[str, Any]) -> None:
        """Holds the tokens against the last line."""
        for rid, ids in (result.get("tokens") or {}).items():
            ours = self.state.requests[rid].output_token_ids if rid in self.state.requests else None
            if ours != ids:
                raise TraceError(
                    f"{self.file}, last line: {rid} has {len(ids)} tokens there, the steps gave it "
                    f"{len(ours) if ours is not None else 'none'}, or other ones"
                )
        if not result:
            self.trace.header.notes.append("the recording has no last line: it was cut short")


def _config(file: Path, head: dict[str, Any]) -> tuple[EngineConfig, bool]:
    a, r = head["engine_args"], head.get("resolved", {})
    try:
        config = EngineConfig(
            discipline="vllm",
            policy=a["scheduling_policy"],
            max_num_seqs=a["max_num_seqs"],
            max_num_batched_tokens=r.get("max_num_scheduled_tokens", a["max_num_batched_tokens"]),
            max_model_len=a["max_model_len"],
            block_size=a["block_size"],
            num_blocks=r.get("num_blocks", a["num_gpu_blocks_override"]),
            enable_prefix_caching=a["enable_prefix_caching"],
            enable_chunked_prefill=a["enable_chunked_prefill"],
            scheduler_reserve_full_isl=r.get("reserve_full_isl", True),
            seed=a.get("seed", 0),
            clock="measured",
        )
    except KeyError as e:
        raise TraceError(f"{file}, line 1: engine_args lacks {e}") from None
    except ConfigError as e:
        raise TraceError(f"{file}, line 1: {e}") from None
    return config, a["scheduling_policy"] == "priority"


def _header(
    file: Path, head: dict[str, Any], workload: dict[str, Any], config: EngineConfig, texts: bool, gaps: bool
) -> TraceHeader:
    engine = str(head.get("engine", "vllm"))
    names = ["schedule", "blocks", "tokens", "reasons", "accounting", "time", "queue"]
    missing = {"cost": f"{engine} recorded no counts of its work"}
    if texts:
        names.append("texts")
    else:
        missing["texts"] = (
            "the recording holds token ids by the step: import it with a tokenizer to have their words"
        )
    if gaps:
        names.append("gaps")
    else:
        missing["gaps"] = "no log-probabilities were recorded"
    notes = [
        (
            f"recorded from {engine}: its times are measured by it (t0 when a step began, t1 after ms.step), "
            "on a machine that the recording does not name"
        ),
        (
            "reasons are rebuilt from the rows: for whom somebody was preempted, why the head of the queue "
            "waits, what held a chunk back, why a prefix stopped matching"
        ),
    ]
    if config.policy == "priority":
        notes.append(
            "a chunk that a priority preemption took back within its step does not stand in the recording, "
            "and neither does what it did to the cache"
        )
    if (spec := head["engine_args"].get("speculative_config")) is not None:
        notes.append(
            f"speculative decoding ({spec.get('method', '?')}, up to "
            f"{spec.get('num_speculative_tokens', '?')} drafts): rejected drafts are counted "
            "where they were sampled; our engine does not draft, so this run can't be compared with one of "
            "ours step by step"
        )
    name = str(workload.get("model", "")).split(" ")[0]
    try:
        model = models.get(name).name
    except ConfigError:
        model = name
    return TraceHeader(
        producer=engine,
        capabilities=names,
        config=config.to_dict(),
        model=model,
        runner="vllm",
        clock="measured",
        device=f"the machine that {engine} was recorded on",
        workload="requests",
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        notes=notes,
        missing=missing,
    )


__all__ = ["Tokenizer", "import_recording"]
