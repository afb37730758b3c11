"""Schedules: 400 simulated runs over all knobs together, each rewound, forked, resized or reset."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

import cbviz as cb
from cbviz.messages import StepRecord
from tests.goldens.canonical import split_prose
from tests.strategies import Drawn, draw

NUM_RUNS = 400
MOST_STEPS = 120
"""A longer run is cut here, so that the runs together stay fast."""
DIGEST_EVERY = 8
TIMES = ("t0_s", "t1_s", "cost", "spans", "measured_s")
"""Fields of a record that say how long something took: compared apart from the schedule."""
WALL_CLOCK = ("schedule_s",)
Errors = (cb.ConfigError, cb.RequestError, KeyError, IndexError)
Parts = dict[str, Any]


def names() -> list[str]:
    return [f"schedule-{seed:03}" for seed in range(NUM_RUNS)]


def parts(name: str) -> Parts:
    """What is compared of one run. `inputs` is what was drawn: if that differs, so may all the rest."""
    drawn, rng = _drawn(name)
    out: Parts = {
        "inputs": {"specs": drawn.specs, "knobs": drawn.keywords, "at": sorted(drawn.at.items())},
        "schedule": [],
        "times": [],
        "digests": [],
        "texts": [],
    }
    try:
        s = drawn.session()
    except Errors as e:
        _note(out, "refused", e)
        return out
    _play(drawn, s, out)
    try:
        after = AFTERWARDS[_afterwards(name)](s, rng)
    except Errors as e:
        _note(out, _afterwards(name), e)
        return out
    out["digests"].append(after.digest())
    _play(drawn, after, out)
    return out


def about(name: str) -> str:
    """What the run draws, in one line."""
    drawn, _ = _drawn(name)
    k = drawn.keywords
    words = [f"discipline={k['discipline']}", f"policy={k['policy']}", f"victim={k['victim']}"]
    words += [
        word
        for word, there in {
            "window": k["sliding_window"],
            "sinks": k["attention_sinks"],
            "swap": k["preemption_mode"] == "swap",
            "contiguous": k["kv_allocation"] == "contiguous",
            f"speculative={k['speculative']}": k["speculative"] != "off",
            "caching": k["enable_prefix_caching"],
            "beams": drawn.has_beams,
            "n": any(x.sampling.n > 1 for x in drawn.specs),
        }.items()
        if there
    ]
    words += sorted({op for inputs in drawn.at.values() for op, _ in inputs})
    return " ".join([*words, _afterwards(name)])


def _drawn(name: str) -> tuple[Drawn, random.Random]:
    rng = random.Random(int(name.removeprefix("schedule-")))
    return draw(rng), rng


def _afterwards(name: str) -> str:
    return list(AFTERWARDS)[int(name.removeprefix("schedule-")) % len(AFTERWARDS)]


def _rewind(s: cb.Session, rng: random.Random) -> cb.Session:
    s.rewind(rng.randint(0, len(s.trace)))
    return s


def _fork(s: cb.Session, rng: random.Random) -> cb.Session:
    policy = rng.choice(("fcfs", "sjf", "priority"))
    return s.fork(rng.randint(0, len(s.trace)), policy=policy, add=[{"prompt": [5, 6, 7], "max_tokens": 2}])


def _resize(s: cb.Session, rng: random.Random) -> cb.Session:
    blocks = max(2, round(s.config.num_blocks * rng.choice((0.8, 1.5, 2))))
    return s.fork(rng.randint(1, max(1, len(s.trace))), num_blocks=blocks)


def _fork_at_the_start(s: cb.Session, rng: random.Random) -> cb.Session:
    return s.fork(
        0, remove=[rng.choice(s.workload).request_id], discipline=rng.choice(("vllm", "chunked", "static"))
    )


def _reset(s: cb.Session, rng: random.Random) -> cb.Session:
    s.reset()
    return s


AFTERWARDS: dict[str, Callable[[cb.Session, random.Random], cb.Session]] = {
    "then=rewind": _rewind,
    "then=fork": _fork,
    "then=resize": _resize,
    "then=fork-at-0": _fork_at_the_start,
    "then=reset": _reset,
}
"""What is done when the run has ended, by seed; the run then goes on to its end again."""


def _play(drawn: Drawn, s: cb.Session, out: Parts) -> None:
    """Plays `s` to its end, with the user's inputs, and keeps its records and digests."""
    first = step = len(s.trace) + 1
    given = first - 1
    while step < first + MOST_STEPS:
        step = len(s.trace) + 1
        if s.done:
            step = min((k for k in drawn.at if k > given), default=0)
            if not step:
                break
        if step > given:
            drawn.ask(s, step)
            given = step
        if s.done:
            continue
        record = s.step()
        if record is None:
            continue
        keep(record, out)
        if record.step % DIGEST_EVERY == 0:
            out["digests"].append(s.digest())
    out["digests"].append(s.digest())
    unfinished = [r.request_id for r in s.trace.state().by_index if not r.finish_reason]
    out["schedule"].append({"steps": len(s.trace), "unfinished": unfinished, "refused": len(drawn.refused)})
    out["texts"] += drawn.refused
    drawn.refused.clear()


def keep(record: StepRecord, out: Parts) -> None:
    """Adds a record to the parts: the decisions, their times, and the sentences in them."""
    fields = msgspec.to_builtins(record)
    fields["events"] = [{"kind": type(e).__name__, **msgspec.to_builtins(e)} for e in record.events]
    out["times"].append({f: fields.pop(f, None) for f in TIMES})
    for f in WALL_CLOCK:
        fields.pop(f, None)
    data, sentences = split_prose(fields)
    out["schedule"].append(data)
    out["texts"] += sentences


def _note(out: Parts, what: str, error: Exception) -> None:
    out["schedule"].append({what: type(error).__name__})
    out["texts"].append(str(error))
