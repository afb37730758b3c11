"""A small run written by hand, event by event, for tests that read traces: every figure in it was worked out
on paper.

Pool of 7 usable blocks of 4 tokens, 3 seats, 12 tokens a step, prefix caching on. r1 and r2 share their first
8 prompt tokens; r3's prompt is taken in two chunks; r3 loses its blocks to r1 and comes back; cached blocks
are evicted; r4 is aborted while it waits, r5 while it runs; r6 is refused. Step 8 computes nothing.
"""

from __future__ import annotations

from typing import Any

from cbviz import events as ev
from cbviz.messages import ChunkRecord, Gauges, RequestSpec, SlotAccount, StepCost, StepRecord, TokenAccount
from cbviz.trace.schema import CAPABILITIES, TraceHeader
from cbviz.trace.trace import Trace

NUM_STEPS = 8
SPECS = {
    "r1": RequestSpec("r1", tuple(range(101, 111)), 4, arrival_s=0.0, ttft_slo_s=0.010, tpot_slo_s=0.020),
    "r2": RequestSpec("r2", (*range(101, 109), 201, 202), 8, arrival_s=0.005, ttft_slo_s=0.010),
    "r3": RequestSpec("r3", tuple(range(301, 313)), 2, arrival_s=0.008),
    "r4": RequestSpec("r4", (401, 402, 403), 5, arrival_s=0.020),
    "r5": RequestSpec("r5", tuple(range(501, 507)), 9, arrival_s=0.100),
    "r6": RequestSpec("r6", tuple(range(601, 641)), 9, arrival_s=0.100),
}
TEXTS = {
    11: "Once",
    12: " <b>upon</b>",
    13: " a",
    14: " $time$",
    21: "Hello",
    22: " &",
    23: "\n",
    24: "",
    31: "The",
    32: " end",
    51: "No",
}
"""Words of the outputs, among them some that a careless picture would take for markup."""


def header(**changes: Any) -> TraceHeader:
    config = {
        "discipline": "vllm",
        "policy": "fcfs",
        "max_num_seqs": 3,
        "max_num_batched_tokens": 12,
        "max_model_len": 28,
        "block_size": 4,
        "num_blocks": 8,
        "enable_prefix_caching": True,
        "clock": "modelled",
        "seed": 0,
    }
    fields: dict[str, Any] = {
        "config": config,
        "model": "paper",
        "runner": "sim",
        "clock": "modelled",
        "device": "a device of 1 GB/s and 1 GFLOP/s",
        "block_size": 4,
        "num_blocks": 8,
        "peak_bytes_s": 1e9,
        "peak_flops_s": 1e9,
        "capabilities": list(CAPABILITIES),
    }
    return TraceHeader(**(fields | changes))


def _cost(flops: float, kv_bytes: float) -> StepCost:
    return StepCost(
        flops=flops,
        weight_bytes=4e6,
        kv_bytes=kv_bytes,
        compute_s=flops / 1e9,
        memory_s=(4e6 + kv_bytes) / 1e9,
        total_s=max(flops, 4e6 + kv_bytes) / 1e9,
    )


def _texts(sampled: dict[str, list[int]]) -> dict[str, list[str]]:
    return {rid: [TEXTS[t] for t in ids] for rid, ids in sampled.items()}


def records() -> list[StepRecord]:
    """New records, step 1 to 8."""
    R, C = StepRecord, ChunkRecord
    out = [
        R(
            1,
            0.0,
            0.010,
            "modelled",
            arrivals=[SPECS["r1"]],
            chunks=[C("r1", 0, 10, "prefill", sample=True)],
            events=[
                ev.Arrived("r1", 0, 10, 4, 0.0),
                ev.PrefixMiss("r1", 0, "new"),
                ev.Admitted("r1", False, 0, 0, 0),
                ev.Allocated("r1", [1, 2, 3]),
                ev.Scheduled("r1", 0, 10, wanted=10),
                ev.Executed(),
                ev.BlockCached("r1", 1, "h1"),
                ev.BlockCached("r1", 2, "h2"),
                ev.Sampled("r1", [11]),
            ],
            tokens=TokenAccount(10, 10),
            slots=SlotAccount(28, used=10, partly_empty=2, free=16),
            gauges=Gauges(1, 0, 0, 4, 0),
            cost=_cost(8e6, 1e6),
            gaps={"r1": [0.5]},
        ),
        R(
            2,
            0.010,
            0.020,
            "modelled",
            arrivals=[SPECS["r2"], SPECS["r3"]],
            chunks=[
                C("r1", 10, 1, "decode", sample=True),
                C("r2", 8, 2, "prefill", sample=True),
                C("r3", 0, 9, "prefill"),
            ],
            events=[
                ev.Arrived("r2", 0, 10, 8, 0.005),
                ev.Arrived("r3", 1, 12, 2, 0.008),
                ev.Scheduled("r1", 10, 1, wanted=1),
                ev.PrefixHit("r2", 8, [1, 2]),
                ev.PrefixMiss("r2", 2, "partial"),
                ev.Admitted("r2", False, 8, 0, 1),
                ev.Shared("r2", [1, 2]),
                ev.Allocated("r2", [4]),
                ev.Scheduled("r2", 8, 2, wanted=2),
                ev.PrefixMiss("r3", 0, "new"),
                ev.Admitted("r3", False, 0, 0, 2),
                ev.Allocated("r3", [5, 6, 7]),
                ev.Scheduled("r3", 0, 9, wanted=12, cap="budget"),
                ev.Executed(),
                ev.Sampled("r1", [12]),
                ev.Sampled("r2", [21]),
                ev.BlockCached("r3", 5, "h5"),
                ev.BlockCached("r3", 6, "h6"),
            ],
            tokens=TokenAccount(12, 12),
            slots=SlotAccount(28, used=22, partly_empty=6),
            gauges=Gauges(3, 0, 0, 0, 0),
            cost=_cost(9e6, 2e6),
            gaps={"r1": [0.0004], "r2": [0.7]},
        ),
        R(
            3,
            0.020,
            0.032,
            "modelled",
            arrivals=[SPECS["r4"]],
            chunks=[
                C("r1", 11, 1, "decode", sample=True),
                C("r2", 10, 1, "decode", sample=True),
                C("r3", 9, 3, "prefill", sample=True),
            ],
            events=[
                ev.Arrived("r4", 0, 3, 5, 0.020),
                ev.Scheduled("r1", 11, 1, wanted=1),
                ev.Scheduled("r2", 10, 1, wanted=1),
                ev.Scheduled("r3", 9, 3, wanted=3),
                ev.NotAdmitted("r4", "seats", 1, 0),
                ev.Executed(),
                ev.BlockCached("r1", 3, "h3"),
                ev.Sampled("r1", [13]),
                ev.Sampled("r2", [22]),
                ev.BlockCached("r3", 7, "h7"),
                ev.Sampled("r3", [31]),
            ],
            tokens=TokenAccount(5, 5),
            slots=SlotAccount(28, used=27, partly_empty=1),
            gauges=Gauges(3, 1, 0, 0, 0),
            cost=_cost(6e6, 3e6),
            gaps={"r1": [0.2], "r2": [0.3], "r3": [0.4]},
        ),
        R(
            4,
            0.032,
            0.044,
            "modelled",
            chunks=[C("r1", 12, 1, "decode", sample=True), C("r2", 11, 1, "decode", sample=True)],
            events=[
                ev.Preempted(
                    "r3",
                    "r1",
                    "last",
                    12,
                    [5, 6, 7],
                    [("r3", "came last"), ("r2", "came second"), ("r1", "came first")],
                    0,
                    1,
                    0,
                ),
                ev.Evicted(7, "r3", "r1", 0),
                ev.Allocated("r1", [7]),
                ev.Scheduled("r1", 12, 1, wanted=1),
                ev.Scheduled("r2", 11, 1, wanted=1),
                ev.NotAdmitted("r3", "preempted", 0, 0),
                ev.Executed(),
                ev.Sampled("r1", [14]),
                ev.Finished("r1", "length"),
                ev.Freed("r1", [7, 3, 2, 1]),
                ev.BlockCached("r2", 4, "h4"),
                ev.Sampled("r2", [23]),
            ],
            tokens=TokenAccount(2, 2),
            slots=SlotAccount(28, used=17, partly_empty=3, cached=8),
            gauges=Gauges(1, 2, 1, 4, 3),
            cost=_cost(3e6, 2e6),
            gaps={"r1": [0.1], "r2": [0.1]},
        ),
        R(
            5,
            0.044,
            0.060,
            "modelled",
            chunks=[C("r2", 12, 1, "decode", sample=True)],
            events=[
                ev.Evicted(6, "r3", "r2", 1),
                ev.Allocated("r2", [6]),
                ev.Scheduled("r2", 12, 1, wanted=1),
                ev.NotAdmitted("r3", "blocks", 3, 2),
                ev.Executed(),
                ev.Sampled("r2", [24]),
                ev.Finished("r2", "stop", 24),
                ev.Freed("r2", [6, 4, 2, 1]),
            ],
            tokens=TokenAccount(1, 1),
            slots=SlotAccount(28, used=13, partly_empty=3, cached=8, free=4),
            gauges=Gauges(0, 2, 2, 7, 5),
            cost=_cost(2e6, 1e6),
            gaps={"r2": [0.6]},
        ),
        R(
            6,
            0.060,
            0.072,
            "modelled",
            inputs=[{"op": "abort", "request_id": "r4"}, {"op": "configure", "max_num_seqs": 2}],
            chunks=[C("r3", 4, 9, "prefill", sample=True, num_recomputed=8)],
            events=[
                ev.Finished("r4", "abort"),
                ev.Configured("max_num_seqs", "3", "2"),
                ev.PrefixHit("r3", 4, [5]),
                ev.PrefixMiss("r3", 1, "evicted", 5, "r2"),
                ev.Admitted("r3", True, 4, 2, 0),
                ev.Shared("r3", [5]),
                ev.Evicted(3, "r1", "r3", 2),
                ev.Allocated("r3", [7, 3, 6]),
                ev.Scheduled("r3", 4, 9, wanted=9),
                ev.Executed(),
                ev.BlockCached("r3", 7, "h6"),
                ev.BlockCached("r3", 3, "h7"),
                ev.Sampled("r3", [32]),
                ev.Finished("r3", "length"),
                ev.Freed("r3", [6, 3, 7, 5]),
            ],
            tokens=TokenAccount(9, 1, 8),
            slots=SlotAccount(28, used=13, partly_empty=3, cached=12),
            gauges=Gauges(0, 0, 4, 7, 6),
            cost=_cost(10e6, 1e6),
            gaps={"r3": [0.9]},
        ),
        R(
            7,
            0.100,
            0.110,
            "modelled",
            arrivals=[SPECS["r5"], SPECS["r6"]],
            chunks=[C("r5", 0, 6, "prefill", sample=True)],
            events=[
                ev.Refused("r6", "its prompt of 40 tokens is longer than the pool of 28"),
                ev.Arrived("r5", 0, 6, 9, 0.100),
                ev.PrefixMiss("r5", 0, "new"),
                ev.Admitted("r5", False, 0, 0, 0),
                ev.Evicted(4, "r2", "r5", 2),
                ev.Evicted(2, "r2", "r5", 2),
                ev.Allocated("r5", [4, 2]),
                ev.Scheduled("r5", 0, 6, wanted=6),
                ev.Executed(),
                ev.BlockCached("r5", 4, "h8"),
                ev.Sampled("r5", [51]),
            ],
            tokens=TokenAccount(6, 6),
            slots=SlotAccount(28, used=6, partly_empty=2, cached=16, free=4),
            gauges=Gauges(1, 0, 4, 5, 4),
            cost=_cost(6e6, 1e6),
            gaps={"r5": [0.8]},
        ),
        R(
            8,
            0.110,
            0.110,
            "modelled",
            inputs=[{"op": "abort", "request_id": "r5"}],
            chunks=[],
            events=[ev.Finished("r5", "abort"), ev.Freed("r5", [2, 4])],
            slots=SlotAccount(28, cached=20, free=8),
            gauges=Gauges(0, 0, 5, 7, 5),
        ),
    ]
    for record in out:
        sampled = {e.request_id: e.token_ids for e in record.events if isinstance(e, ev.Sampled)}
        record.texts = _texts(sampled)
    return out


def golden(**changes: Any) -> Trace:
    """The run as a trace; `changes` are fields of its header."""
    trace = Trace(header(**changes))
    for record in records():
        trace.append(record)
    return trace
