"""What vLLM's own Prometheus registry would hold after the steps of a trace.

Owns vLLM's names, what each means, and the rules by which each counts. The rules are those of vLLM 0.32
(`vllm/v1/metrics/stats.py` and `loggers.py`), so the figures differ from `trace.metrics` in places:

* The unit is the sequence: n = 3 counts as three requests, except in `request_params_n` and
  `request_max_num_generation_tokens`.
* Values are observed when a sequence gives output or finishes by itself. A sequence that is aborted never
  counts as finished. A preemption counts with the next output, so it never counts if the sequence is aborted
  before.
* Nothing is taken back: counters and histograms only grow.

`NAMES` is the table in docs/metrics.md; tests compare every count with a real vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from cbviz import events as ev
from cbviz.messages import ChunkRecord, Gauges, RequestSpec, StepRecord
from cbviz.trace.metrics import caches_prefixes
from cbviz.trace.state import NORMAL_ENDS
from cbviz.trace.trace import Cursor, Trace


class Definition(NamedTuple):
    """One of vLLM's metrics. `here`: how cbviz differs; '' means that it counts the same."""

    kind: str
    """`gauge`, `counter` or `histogram`."""
    vllm: str
    """What vLLM 0.32 counts."""
    here: str = ""
    buckets: str = ""
    """A histogram: the family of its bucket bounds (`BUCKETS`)."""


_FORKED = (
    "n > 1: vLLM looks up and computes each sequence; cbviz computes the prompt once and forks, so the "
    "other sequences count as found in the cache"
)
_NO_LOOKUP = "n > 1: vLLM looks up each sequence; in cbviz the forked ones look up nothing"
_CLOCK = "the clock is the trace's, measured or modelled (label `clock`)"
_BEAMS = "beams: a beam counts as a sequence with one token a step; vLLM's engine knows no beams"

NAMES: dict[str, Definition] = {
    "vllm:num_requests_running": Definition("gauge", "Sequences with a seat at the end of the last step."),
    "vllm:num_requests_waiting": Definition(
        "gauge", "Sequences in the queue at the end of the last step, preempted ones included."
    ),
    "vllm:num_requests_waiting_by_reason": Definition(
        "gauge",
        "The same by `reason`: `capacity`, or `deferred` (adapters, transfers of KV).",
        "nothing is ever deferred in cbviz: `deferred` is 0",
    ),
    "vllm:kv_cache_usage_perc": Definition(
        "gauge",
        (
            "Share (0..1) of the pool's blocks that somebody holds at the end of the last step. Cached "
            "blocks "
            "that nobody holds count as free."
        ),
    ),
    "vllm:prefix_cache_queries_total": Definition(
        "counter",
        (
            "Tokens looked up in the cache by first admissions. Look-ups of preempted requests that come "
            "back "
            "are counted apart and not exported."
        ),
        _NO_LOOKUP,
    ),
    "vllm:prefix_cache_hits_total": Definition("counter", "Of these tokens, the ones found.", _NO_LOOKUP),
    "vllm:num_preemptions_total": Definition(
        "counter", "Preemptions, each counted with the sequence's next output."
    ),
    "vllm:prompt_tokens_total": Definition("counter", "Prompt tokens of sequences with a first token."),
    "vllm:prompt_tokens_by_source_total": Definition(
        "counter",
        (
            "The same by `source`: `local_compute`, `local_cache_hit` (found at the first admission), "
            "`external_kv_transfer`."
        ),
        _FORKED,
    ),
    "vllm:prompt_tokens_cached_total": Definition(
        "counter", "Of the prompt tokens, the ones found in the cache.", _FORKED
    ),
    "vllm:prompt_tokens_cached_by_source_total": Definition(
        "counter",
        "Prefix cache hits by `source`; only `device` comes from the engine's own cache.",
        _NO_LOOKUP,
    ),
    "vllm:generation_tokens_total": Definition("counter", "Output tokens.", _BEAMS),
    "vllm:request_success_total": Definition(
        "counter",
        (
            "Finished sequences by `finished_reason`. `length` is max_tokens or max_model_len. Requests "
            "that a "
            "client aborts are not counted, also not as `abort`."
        ),
        (
            "`error` and `repetition` are 0; timeouts, deadlines and shed requests are ends that vLLM does "
            "not "
            "know, and are not counted"
        ),
    ),
    "vllm:spec_decode_num_drafts_total": Definition(
        "counter",
        "Checks of drafts: a sequence in a step, with at least one draft (padding drafts included).",
    ),
    "vllm:spec_decode_num_draft_tokens_total": Definition("counter", "Drafts checked, padding included."),
    "vllm:spec_decode_num_accepted_tokens_total": Definition(
        "counter",
        "Of these, the ones that the model chose too, also those behind the token that ended the request.",
    ),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": Definition(
        "counter", "The same by `position` of the draft, from 0."
    ),
    "vllm:request_prompt_tokens": Definition(
        "histogram", "Prompt tokens of each finished sequence.", "", "request_tokens"
    ),
    "vllm:request_generation_tokens": Definition(
        "histogram", "Output tokens of each finished sequence.", "", "request_tokens"
    ),
    "vllm:iteration_tokens_total": Definition(
        "histogram",
        (
            "For each step with output: prompt tokens computed by the sequences that got their first token, "
            "and output tokens. Not the size of the batch."
        ),
        _FORKED,
        "iteration_tokens",
    ),
    "vllm:request_max_num_generation_tokens": Definition(
        "histogram",
        "Once a request, when all its sequences are finished: output tokens of the longest.",
        "",
        "request_tokens",
    ),
    "vllm:request_params_n": Definition(
        "histogram",
        "Once a request, when all its sequences are finished: n.",
        "beams: the beam width",
        "request_params_n",
    ),
    "vllm:request_params_max_tokens": Definition(
        "histogram", "max_tokens of each finished sequence.", "", "request_tokens"
    ),
    "vllm:time_to_first_token_seconds": Definition(
        "histogram",
        "From arrival to the first token, observed with the first token.",
        _CLOCK,
        "time_to_first_token",
    ),
    "vllm:inter_token_latency_seconds": Definition(
        "histogram",
        "Time between two outputs of a sequence. A step that brings several tokens is one output.",
        _CLOCK,
        "inter_token_latency",
    ),
    "vllm:request_time_per_output_token_seconds": Definition(
        "histogram",
        (
            "For each finished sequence: time from the first to the last output, divided by its tokens less "
            "one; 0 for a single token."
        ),
        _CLOCK,
        "inter_token_latency",
    ),
    "vllm:e2e_request_latency_seconds": Definition(
        "histogram", "For each finished sequence: from arrival to the end.", _CLOCK, "request_latency"
    ),
    "vllm:request_queue_time_seconds": Definition(
        "histogram",
        "For each finished sequence: from joining the queue to the first admission.",
        f"{_CLOCK}; it starts at the arrival",
        "request_latency",
    ),
    "vllm:request_inference_time_seconds": Definition(
        "histogram",
        "For each finished sequence: from the first admission to the last output.",
        _CLOCK,
        "request_latency",
    ),
    "vllm:request_prefill_time_seconds": Definition(
        "histogram",
        "For each finished sequence: from the first admission to the first output.",
        _CLOCK,
        "request_latency",
    ),
    "vllm:request_decode_time_seconds": Definition(
        "histogram",
        "For each finished sequence: from the first output to the last.",
        _CLOCK,
        "request_latency",
    ),
    "vllm:request_num_preemptions": Definition(
        "histogram", "Preemptions of each finished sequence.", "", "request_num_preemptions"
    ),
    "vllm:request_prefill_kv_computed_tokens": Definition(
        "histogram",
        "For each finished sequence: its prompt tokens less those found in the cache at the first admission.",
        _FORKED,
        "request_tokens",
    ),
}
"""vLLM's metric families that cbviz exports, in vLLM's order of kinds."""

NOT_EXPORTED: dict[str, str] = {
    "vllm:admission_rejections_total": (
        "vLLM's limits count everybody in the queue or in prefill; cbviz's `max_waiting_requests` and "
        "`max_waiting_tokens` count the queue"
    ),
    "vllm:cache_config_info": "a trace's configuration is in its header",
    "vllm:engine_sleep_state": "cbviz's engine does not sleep",
    "vllm:estimated_flops_per_gpu_total": "vLLM's own estimate, off by default; cbviz counts or models work in `flops`",
    "vllm:estimated_read_bytes_per_gpu_total": "as above; cbviz has `moved_bytes`",
    "vllm:estimated_write_bytes_per_gpu_total": "as above",
    "vllm:external_prefix_cache_hits_total": "no cache outside the engine",
    "vllm:external_prefix_cache_queries_total": "no cache outside the engine",
    "vllm:kv_block_idle_before_evict_seconds": "sampled by vLLM on request (`--kv-cache-metrics`); cbviz has each block's life in the trace",
    "vllm:kv_block_lifetime_seconds": "as above",
    "vllm:kv_block_reuse_gap_seconds": "as above",
    "vllm:mm_cache_hits_total": "no images or audio",
    "vllm:mm_cache_queries_total": "no images or audio",
}
"""vLLM's other families, and why cbviz has none of that name.

`_created` samples (times of creation) are left out everywhere.
"""

_LATENCY = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
BUCKETS: dict[str, tuple[float, ...]] = {
    "request_latency": _LATENCY,
    "time_to_first_token": (
        0.001,
        0.005,
        0.01,
        0.02,
        0.04,
        0.06,
        0.08,
        0.1,
        0.25,
        0.5,
        0.75,
        1.0,
        2.5,
        5.0,
        7.5,
        10.0,
        20.0,
        40.0,
        80.0,
        160.0,
        640.0,
        2560.0,
    ),
    "inter_token_latency": (
        0.01,
        0.025,
        0.05,
        0.075,
        0.1,
        0.15,
        0.2,
        0.3,
        0.4,
        0.5,
        0.75,
        1.0,
        2.5,
        5.0,
        7.5,
        10.0,
        20.0,
        40.0,
        80.0,
    ),
    "iteration_tokens": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "request_params_n": (1, 2, 5, 10, 20),
    "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
}
"""Upper bounds by family (vllm/v1/metrics/buckets.py).

`request_tokens` is 1, 2, 5, 10, ... up to max_model_len.
"""
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_ENDS = {"stop": "stop", "length": "length", "max_model_len": "length"}


def bucket_bounds(name: str, max_model_len: int) -> tuple[float, ...]:
    """Upper bounds of a histogram's buckets, without +Inf."""
    family = NAMES[name].buckets
    if family != "request_tokens":
        return BUCKETS[family]
    return tuple(
        m * 10**e for e in range(len(str(max_model_len))) for m in (1, 2, 5) if m * 10**e <= max_model_len
    )


class _Sequence:
    """One sequence, as vLLM's front end keeps it."""

    __slots__ = (
        "arrival_s",
        "first_s",
        "group",
        "last_s",
        "max_tokens",
        "num_cached",
        "num_outputs",
        "num_preemptions",
        "num_prompt",
        "scheduled_s",
        "untold_preemptions",
    )

    def __init__(self, num_prompt: int, max_tokens: int, arrival_s: float, group: _Group) -> None:
        self.num_prompt = num_prompt
        self.max_tokens = max_tokens
        self.arrival_s = arrival_s
        self.group = group
        self.scheduled_s: float | None = None
        self.first_s: float | None = None
        self.last_s = 0.0
        self.num_cached = 0
        self.num_outputs = 0
        self.num_preemptions = 0
        self.untold_preemptions = 0
        """Since the last output."""


class _Group:
    """The sequences of one request."""

    __slots__ = ("longest", "num_open", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_open = size
        self.longest = 0


class VllmMetrics:
    """The registry after the records taken so far.

    `values`: samples of counters and gauges. `observed`: the values of each histogram.
    """

    def __init__(self, config: dict[str, Any], num_blocks: int) -> None:
        self.values: dict[str, float] = {}
        self.observed: dict[str, list[float]] = {
            name: [] for name, d in NAMES.items() if d.kind == "histogram"
        }
        self._looks_up = caches_prefixes(config)
        self._num_blocks = num_blocks
        self._sequences: dict[str, _Sequence] = {}
        self._computed = 0
        self._generated = 0
        for name in ("running", "waiting"):
            self.values[f"vllm:num_requests_{name}"] = 0
        for reason in ("capacity", "deferred"):
            self.values[_labelled("vllm:num_requests_waiting_by_reason", "reason", reason)] = 0
        for name in (
            "prefix_cache_queries",
            "prefix_cache_hits",
            "num_preemptions",
            "prompt_tokens",
            "prompt_tokens_cached",
            "generation_tokens",
        ):
            self.values[f"vllm:{name}_total"] = 0
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
            self.values[_labelled("vllm:prompt_tokens_by_source_total", "source", source)] = 0
        for source in ("device", "host", "p2p", "disk", "external_unspecified"):
            self.values[_labelled("vllm:prompt_tokens_cached_by_source_total", "source", source)] = 0
        for reason in FINISH_REASONS:
            self.values[_labelled("vllm:request_success_total", "finished_reason", reason)] = 0
        if str(config.get("speculative", "off")) != "off":
            self._begin_drafts(_whole(config.get("num_speculative_tokens")))

    def take(self, record: StepRecord) -> None:
        """Counts one step. Records come in order, from step 1."""
        self._computed = self._generated = 0
        outputs = 0
        specs = {x.request_id: x for x in record.arrivals}
        for e in record.events:
            if isinstance(e, ev.Arrived):
                self._arrived(e, specs.get(e.request_id), record)
            elif isinstance(e, ev.Admitted):
                self._admitted(e, record)
            elif isinstance(e, ev.Preempted):
                self._sequences[e.request_id].untold_preemptions += 1
            elif isinstance(e, ev.Forked):
                self._forked(e)
            elif isinstance(e, ev.Sampled):
                outputs += 1
                self._output(self._sequences[e.request_id], len(e.token_ids), record)
            elif isinstance(e, (ev.BeamStep, ev.BeamsEnded)):
                outputs += 1
                for beam in e.beam_ids:
                    self._output(self._sequences[beam], 1, record)
            elif isinstance(e, ev.Finished):
                self._finished(e, record)
            elif isinstance(e, ev.Resized):
                self._num_blocks = e.num_blocks
            elif isinstance(e, ev.Configured):
                self._configured(e)
        if outputs:
            self.observed["vllm:iteration_tokens_total"].append(self._computed + self._generated)
        self._check_drafts(
            record.chunks, {e.request_id: e for e in record.events if isinstance(e, ev.Sampled)}
        )
        self._gauges(record.gauges)

    def _arrived(self, e: ev.Arrived, spec: RequestSpec | None, record: StepRecord) -> None:
        arrival_s = record.t0_s if spec is not None and spec.arrival_step is not None else e.arrival_s
        size = max(spec.sampling.n, spec.sampling.beam_width, 1) if spec is not None else 1
        self._sequences[e.request_id] = _Sequence(e.num_prompt_tokens, e.max_tokens, arrival_s, _Group(size))

    def _admitted(self, e: ev.Admitted, record: StepRecord) -> None:
        s = self._sequences[e.request_id]
        if s.scheduled_s is None:
            s.scheduled_s = record.t0_s
        if e.resumed:
            return
        s.num_cached = e.num_cached_tokens
        if self._looks_up:
            self._add("vllm:prefix_cache_queries_total", s.num_prompt)
            self._add("vllm:prefix_cache_hits_total", e.num_cached_tokens)
            self._add(
                _labelled("vllm:prompt_tokens_cached_by_source_total", "source", "device"),
                e.num_cached_tokens,
            )

    def _forked(self, e: ev.Forked) -> None:
        parent = self._sequences[e.request_id]
        for child in e.child_ids:
            s = _Sequence(parent.num_prompt, parent.max_tokens, parent.arrival_s, parent.group)
            s.scheduled_s, s.num_cached = parent.scheduled_s, parent.num_prompt
            self._sequences[child] = s

    def _output(self, s: _Sequence, num_tokens: int, record: StepRecord) -> None:
        """A sequence got tokens."""
        self._add("vllm:generation_tokens_total", num_tokens)
        self._generated += num_tokens
        self._add("vllm:num_preemptions_total", s.untold_preemptions)
        s.num_preemptions, s.untold_preemptions = s.num_preemptions + s.untold_preemptions, 0
        s.num_outputs += num_tokens
        if s.first_s is None:
            computed = s.num_prompt - s.num_cached
            self._computed += computed
            self._add("vllm:prompt_tokens_total", s.num_prompt)
            self._add("vllm:prompt_tokens_cached_total", s.num_cached)
            self._add(_labelled("vllm:prompt_tokens_by_source_total", "source", "local_compute"), computed)
            self._add(
                _labelled("vllm:prompt_tokens_by_source_total", "source", "local_cache_hit"), s.num_cached
            )
            self._observe("time_to_first_token_seconds", record.t1_s - s.arrival_s)
            s.first_s = record.t1_s
        else:
            self._observe("inter_token_latency_seconds", record.t1_s - s.last_s)
        s.last_s = record.t1_s

    def _finished(self, e: ev.Finished, record: StepRecord) -> None:
        s = self._sequences.pop(e.request_id)
        if e.reason not in NORMAL_ENDS or s.first_s is None:
            return
        scheduled_s = s.first_s if s.scheduled_s is None else s.scheduled_s
        decode_s = s.last_s - s.first_s
        self._add(_labelled("vllm:request_success_total", "finished_reason", _ENDS[e.reason]), 1)
        self._observe("e2e_request_latency_seconds", record.t1_s - s.arrival_s)
        self._observe("request_queue_time_seconds", scheduled_s - s.arrival_s)
        self._observe("request_prefill_time_seconds", s.first_s - scheduled_s)
        self._observe("request_inference_time_seconds", s.last_s - scheduled_s)
        self._observe("request_decode_time_seconds", decode_s)
        self._observe(
            "request_time_per_output_token_seconds",
            decode_s / (s.num_outputs - 1) if s.num_outputs > 1 else 0.0,
        )
        self._observe("request_num_preemptions", s.num_preemptions)
        self._observe("request_prefill_kv_computed_tokens", s.num_prompt - s.num_cached)
        self._observe("request_prompt_tokens", s.num_prompt)
        self._observe("request_generation_tokens", s.num_outputs)
        self._observe("request_params_max_tokens", s.max_tokens)
        group = s.group
        group.num_open -= 1
        group.longest = max(group.longest, s.num_outputs)
        if not group.num_open:
            self._observe("request_max_num_generation_tokens", group.longest)
            self._observe("request_params_n", group.size)

    def _check_drafts(self, chunks: Iterable[ChunkRecord], sampled: dict[str, ev.Sampled]) -> None:
        for c in chunks:
            e = sampled.get(c.request_id)
            if not c.num_draft or e is None:
                continue
            self._begin_drafts(0)
            accepted = c.num_draft - e.num_rejected + e.num_past_end
            self._add("vllm:spec_decode_num_drafts_total", 1)
            self._add("vllm:spec_decode_num_draft_tokens_total", c.num_draft)
            self._add("vllm:spec_decode_num_accepted_tokens_total", accepted)
            for i in range(accepted):
                self._add(
                    _labelled("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position", str(i)), 1
                )

    def _begin_drafts(self, num_tokens: int) -> None:
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            self._add(f"vllm:spec_decode_num_{name}_total", 0)
        for i in range(num_tokens):
            self._add(_labelled("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position", str(i)), 0)

    def _configured(self, e: ev.Configured) -> None:
        if e.field == "enable_prefix_caching":
            self._looks_up = e.new != "False"

    def _gauges(self, g: Gauges) -> None:
        self.values["vllm:num_requests_running"] = g.num_running
        self.values["vllm:num_requests_waiting"] = g.num_waiting
        self.values[_labelled("vllm:num_requests_waiting_by_reason", "reason", "capacity")] = g.num_waiting
        if self._num_blocks > 1 and g != Gauges():
            self.values["vllm:kv_cache_usage_perc"] = 1 - g.num_free_blocks / (self._num_blocks - 1)

    def _add(self, sample: str, n: float) -> None:
        self.values[sample] = self.values.get(sample, 0) + n

    def _observe(self, name: str, value: float) -> None:
        self.observed[f"vllm:{name}"].append(value)


def _labelled(name: str, label: str, value: str) -> str:
    return f'{name}{{{label}="{value}"}}'


def _whole(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0


def vllm_metrics(trace: Trace, cursor: Cursor | int | None = None) -> VllmMetrics:
    """The registry after the whole steps up to `cursor` (default: the end)."""
    at = trace.last if cursor is None else Cursor(cursor) if isinstance(cursor, int) else cursor
    out = VllmMetrics(trace.header.config, trace.header.num_blocks)
    for record in trace.records[: at.step if at.event is None else at.step - 1]:
        out.take(record)
    return out


def table() -> str:
    """`NAMES` as the markdown table of docs/metrics.md."""
    lines = ["| name | type | what vLLM 0.32 counts | cbviz |", "| --- | --- | --- | --- |"]
    return "\n".join(
        [
            *lines,
            *(
                f"| `{name}` | {d.kind} | {d.vllm} | {'differs: ' + d.here if d.here else 'equal'} |"
                for name, d in NAMES.items()
            ),
        ]
    )


def left_out_table() -> str:
    """`NOT_EXPORTED` as the second table of docs/metrics.md."""
    return "\n".join(
        [
            "| name | why not |",
            "| --- | --- |",
            *(f"| `{name}` | {why} |" for name, why in NOT_EXPORTED.items()),
        ]
    )
