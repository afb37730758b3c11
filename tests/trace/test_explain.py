"""Sentences: the golden run word for word, and every event and reason once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbviz import events as ev
from cbviz.messages import ChunkRecord, RequestSpec, StepRecord
from cbviz.trace import Sentence, Trace, explain
from cbviz.trace.explain import ENDS, KINDS, RULES, count, explain_record, listed
from cbviz.trace.schema import TraceHeader
from tests.golden import NUM_STEPS, golden

GOLDEN = {
    1: [
        "r1 got a seat at once",
        "r1 found nothing in the cache: its first block was never seen, or is forgotten by now",
        "r1 got its first token, 10 ms after it arrived",
        "r1 prefills 10 tokens, positions 0 to 9, the last of its prompt",
        "r1 arrived with 10 prompt tokens and asks for at most 4 tokens",
        "r1 takes 3 new blocks (1, 2, 3)",
        "2 blocks of r1 are full and can be found by their hash from now on",
        "The step computed 10 tokens of 1 request in 10 ms (modelled)",
    ],
    3: [
        "r4 waits: all 3 seats are taken",
        "r3 got its first token, 24 ms after it arrived",
        "r3 prefills 3 tokens, positions 9 to 11, the last of its prompt",
        "r1 and r2 decode one token each",
        "r4 arrived with 3 prompt tokens and asks for at most 5 tokens",
        "2 blocks of r1 and r3 are full and can be found by their hash from now on",
        "The step computed 5 tokens of 3 requests in 12 ms (modelled)",
    ],
    4: [
        (
            "r3, last to arrive, was preempted for r1: r1 needs 1 block, 0 are free; r3 will recompute 12 "
            "tokens, less what the cache still has"
        ),
        (
            "Candidates to lose their blocks for r1 (by place in the running order), first to lose first: r3 "
            "(came last), r2 (came second) and r1 (came first)"
        ),
        "r3 waits: nobody is admitted in a step that preempted a request; 1 more request waits behind it",
        "r1 finished: it has its 4 tokens (max_tokens)",
        "Cached block 7 went to r1: r3 used it last, up to this step",
        "r1 and r2 decode one token each",
        "r1 takes 1 new block (7)",
        "1 block of r2 is full and can be found by its hash from now on",
        "r1 gave back 4 blocks (7, 3, 2, 1)",
        "The step computed 2 tokens of 2 requests in 12 ms (modelled)",
    ],
    5: [
        "r3 waits: it needs 3 blocks, 2 are free; 1 more request waits behind it",
        "r2 finished: it sampled the stop token 24 after 4 tokens",
        "Cached block 6 went to r2: r3 used it last, 1 step ago",
        "r2 decodes one token",
        "r2 takes 1 new block (6)",
        "r2 gave back 4 blocks (6, 4, 2, 1)",
        "The step computed 1 token of 1 request in 16 ms (modelled)",
    ],
    8: [
        "r5 was aborted after 1 of 9 tokens",
        "r5 gave back 2 blocks (2, 4)",
        "Nothing was computed in this step",
    ],
}


@pytest.mark.parametrize("step", GOLDEN)
def test_golden_steps_word_for_word(step: int) -> None:
    assert explain(golden(), step) == GOLDEN[step]


def test_chunk_cap_and_cache() -> None:
    two, six, seven = (explain(golden(), n) for n in (2, 6, 7))
    assert (
        "r3's prefill takes 9 of 12 tokens: 1 decode and 1 prefill took 3 of the step's budget of 12" in two
    )
    assert "r2 found 8 of its 10 prompt tokens in the cache (2 blocks)" in two
    assert "The prefix of r2 stopped matching at block 2: the rest does not fill a block" in two
    assert "r2 shares 2 blocks that are already there (1, 2)" in two
    assert "r3 has a seat again, 2 steps after its preemption" in six
    assert "r3 found 4 of its 13 tokens of prompt and output in the cache (1 block)" in six
    assert (
        "The prefix of r3 stopped matching at block 1: it was cached until step 5, when r2 took the block"
        in six
    )
    assert "r3 computes 8 tokens again that it had before its preemption, and 1 more" in six
    assert "r4 was aborted after 0 of 5 tokens" in six
    assert "max_num_seqs was changed from 3 to 2; it holds from this step's admission on" in six
    assert seven[0] == "r6 was refused: its prompt of 40 tokens is longer than the pool of 28"
    assert "2 cached blocks went to r5 (4, 2): what r2 left there can no longer be found" in seven


def test_sentences_know_what_they_speak_of() -> None:
    first = explain(golden(), 4)[0]
    assert isinstance(first, Sentence) and first.text == first
    assert (first.kind, first.request_ids, first.block_ids) == ("preempted", ("r3", "r1"), (5, 6, 7))
    assert json.loads(json.dumps(first.to_dict()))["block_ids"] == [5, 6, 7]
    order = [KINDS.index(s.kind) for s in explain(golden(), 4)]
    assert order == sorted(order)


def test_start_and_beyond() -> None:
    assert explain(golden(), 0) == []
    with pytest.raises(IndexError, match=r"steps 1\.\.8"):
        explain(golden(), 9)


def test_a_step_is_told_without_what_came_later() -> None:
    """The sentences of a step are the same whether or not the trace goes on."""
    whole = golden()
    for step in range(1, NUM_STEPS + 1):
        assert explain(whole.share(step), step) == explain(whole, step)


def run(
    *events: ev.Event,
    chunks: list[ChunkRecord] | None = None,
    config: dict[str, Any] | None = None,
    waiting: int = 0,
    **fields: Any,
) -> list[Sentence]:
    """One step after one in which a, b, c hold seats and `waiting` requests w1.. wait."""
    trace = Trace(
        TraceHeader(
            num_blocks=32,
            block_size=4,
            config={
                "max_num_seqs": 3,
                "max_num_batched_tokens": 64,
                "max_model_len": 99,
                "policy": "sjf",
                "long_prefill_token_threshold": 8,
            }
            | (config or {}),
        )
    )
    arrivals: list[ev.Event] = []
    for i, rid in enumerate(("a", "b", "c")):
        arrivals += [
            ev.Arrived(rid, 0, 9, 20),
            ev.Admitted(rid, False, 0, 0, i),
            ev.Allocated(rid, [3 * i + 1, 3 * i + 2, 3 * i + 3]),
            ev.Scheduled(rid, 0, 9, wanted=9),
        ]
    arrivals += [ev.Arrived(f"w{i + 1}", i, 9, 20) for i in range(waiting)]
    trace.append(
        StepRecord(
            1, 0.0, 1.0, "measured", [ChunkRecord(rid, 0, 9, "prefill") for rid in ("a", "b", "c")], arrivals
        )
    )
    trace.append(StepRecord(2, 1.0, 2.5, "measured", chunks or [], list(events), **fields))
    return explain(trace, 2)


WAITS = {
    ("seats", 1, 0): "w1 waits: all 3 seats are taken",
    ("blocks", 4, 2): "w1 waits: it needs 4 blocks, 2 are free",
    ("blocks", 1, 1): "w1 waits: it needs 1 block, 1 is free",
    ("budget", 12, 3): "w1 waits: it needs 12 tokens of this step, 3 are left of 64",
    ("budget", 12, 0): "w1 waits: the step's budget of 64 tokens is used up",
    ("batch", 0, 3): "w1 waits: the last batch has not ended, 3 requests of it are still running",
    ("batch", 0, 1): "w1 waits: the last batch has not ended, 1 request of it is still running",
    ("preempted", 0, 0): "w1 waits: nobody is admitted in a step that preempted a request",
    ("decode-step", 0, 0): "w1 waits: this step only decodes",
    (
        "watermark",
        4,
        2,
    ): "w1 waits: it needs 4 blocks, and 2 are free above the watermark that an admission leaves",
    ("reserve", 10, 4): "w1 waits: 10 blocks must be set aside for its prompt and longest output, 4 are free",
    (
        "fragments",
        9,
        4,
    ): (
        "w1 waits: it needs 9 blocks side by side for its prompt and longest output; enough are free, but "
        "the longest free run has 4 (external fragmentation)"
    ),
    (
        "guarantee",
        9,
        4,
    ): "w1 waits: with it, the prompts and longest outputs of all would need 9 more blocks, 4 are free",
    (
        "estimate",
        9,
        1,
    ): "w1 waits: with it, what is still expected of all would need 9 more blocks, 1 is free",
    (
        "degraded",
        0,
        1,
    ): "w1 waits: under overload the batch class goes one at a time, 1 request of it is running",
    ("policy", 0, 0): "w1 waits: policy sjf does not admit it now",
}


@pytest.mark.parametrize("case", WAITS)
def test_reasons_to_wait(case: tuple[str, int, int]) -> None:
    assert run(ev.NotAdmitted("w1", *case), waiting=1)[0] == WAITS[case]


def test_a_wait_that_goes_on_is_told_at_every_step_with_those_behind() -> None:
    trace = Trace(TraceHeader(num_blocks=8))
    trace.append(
        StepRecord(
            1,
            0.0,
            1.0,
            "measured",
            [],
            [
                ev.Arrived("x", 0, 4, 4),
                ev.Arrived("y", 1, 4, 4),
                ev.Arrived("z", 2, 4, 4),
                ev.NotAdmitted("x", "blocks", 4, 2),
            ],
        )
    )
    trace.append(StepRecord(2, 1.0, 2.0, "measured", [], []))
    assert explain(trace, 1)[0] == "x waits: it needs 4 blocks, 2 are free; 2 more requests wait behind it"
    assert (
        explain(trace, 2)[0] == "x still waits: it needs 4 blocks, 2 are free; 2 more requests wait behind it"
    )


MISSES = {
    (
        "new",
        6,
    ): "The prefix of a stopped matching at block 6: this content was never seen, or is forgotten by now",
    ("new", 0): "a found nothing in the cache: its first block was never seen, or is forgotten by now",
    (
        "last-token",
        2,
    ): (
        "The prefix of a stopped matching at block 2: all of it is cached, but one token must be computed "
        "to get logits"
    ),
    ("partial", 2): "The prefix of a stopped matching at block 2: the rest does not fill a block",
    (
        "window",
        3,
    ): "The prefix of a stopped matching at block 3: the cached blocks do not cover its attention window",
    ("evicted", 3): "The prefix of a stopped matching at block 3: it was cached and evicted",
}


@pytest.mark.parametrize("case", MISSES)
def test_causes_of_a_miss(case: tuple[str, int]) -> None:
    assert run(ev.PrefixMiss("a", case[1], case[0]))[0] == MISSES[case]


FINISHES = {
    "length": "a finished: it has its 20 tokens (max_tokens)",
    "stop": "a finished: it sampled the stop token 2 after 1 token",
    "max_model_len": "a finished after 1 token: prompt and output reached max_model_len, 99",
    "abort": "a was aborted after 1 of 20 tokens",
    "timeout": "a timed out after 1 of 20 tokens: it took longer than timeout_s",
    "deadline": "a ended after 1 of 20 tokens: its deadline has passed",
    "shed": "a was shed to relieve the overload: it waited too long without ever running",
}


@pytest.mark.parametrize("reason", FINISHES)
def test_ends(reason: str) -> None:
    assert FINISHES.keys() == ENDS.keys()
    said = run(
        ev.Scheduled("a", 9, 1),
        ev.Sampled("a", [7]),
        ev.Finished("a", reason, 2 if reason == "stop" else -1),
        chunks=[ChunkRecord("a", 9, 1, "decode")],
    )
    assert said[0] == FINISHES[reason]


CAPS = {
    "budget": "a's prefill takes 5 of 40 tokens: it is all of the step's budget of 64",
    "threshold": "a's prefill takes 5 of 40 tokens: long_prefill_token_threshold is 8",
    "max_model_len": "a's prefill takes 5 of 40 tokens: max_model_len is 99",
}


@pytest.mark.parametrize("cap", CAPS)
def test_caps(cap: str) -> None:
    assert (
        run(ev.Scheduled("a", 9, 5, wanted=40, cap=cap), chunks=[ChunkRecord("a", 9, 5, "prefill")])[0]
        == CAPS[cap]
    )


OTHERS: list[tuple[list[ev.Event], dict[str, Any], str]] = [
    (
        [ev.Preempted("a", "a", "last", 1, [1], [("a", "")], 0, 2, 1)],
        {},
        (
            "a, last to arrive, was preempted for want of blocks: it needs 2 blocks, 1 is free; it will "
            "recompute 1 token"
        ),
    ),
    (
        [ev.Preempted("a", "b", "coin", 5, [1], [], 0, 1, 0)],
        {},
        (
            "a, chosen by the rule 'coin', was preempted for b: b needs 1 block, 0 are free; a will "
            "recompute "
            "5 tokens"
        ),
    ),
    ([ev.Scheduled("a", 9, 1), ev.Unscheduled("a")], {}, "a had a share of this step; it was taken back"),
    (
        [ev.Starving("w1", 8, 30, 4, 2)],
        {"waiting": 1},
        (
            "w1 is starving: 8 later requests were admitted in its 30 steps of waiting; its admission would "
            "take 4 blocks, 2 are free"
        ),
    ),
    (
        [ev.Skipped("a", "budget"), ev.Skipped("b", "budget")],
        {},
        "a and b get no token in this step: the step's token budget is used up",
    ),
    ([ev.Skipped("a", "blocks")], {}, "a gets no token in this step: the preemption ended the round"),
    ([ev.Skipped("a", "prefill-step")], {}, "a gets no token in this step: a step of prefills goes first"),
    ([ev.Skipped("a", "max_model_len")], {}, "a gets no token in this step: max_model_len is reached"),
    (
        [ev.Resized(6, [(6, 2)], [3])],
        {},
        (
            "The pool has 5 blocks to give out from here on; 1 block in use beyond its end moved: 6 to 2; 1 "
            "cached block can no longer be found"
        ),
    ),
    ([ev.Reordered(["w2", "w1"])], {"waiting": 2}, "The policy put the queue into another order: w2 and w1"),
    ([ev.OutOfWindow("a", [1, 2], 0)], {}, "a gave back 2 blocks left of its attention window (1, 2)"),
    ([ev.Shared("a", [0, 5])], {}, "a shares 1 block that is already there (5)"),
    ([ev.Finished("a", "length"), ev.SeatHeld("a", 0)], {}, "a keeps its seat until the batch ends"),
    (
        [
            ev.Finished("a", "length"),
            ev.SeatHeld("a", 0),
            ev.Finished("b", "length"),
            ev.SeatHeld("b", 1),
            ev.SeatsFreed(["a", "b"]),
        ],
        {},
        "The batch ended: 2 seats are free again",
    ),
    (
        [ev.Scheduled("a", 9, 4, 3), ev.Sampled("a", [1, 2], 2)],
        {"chunks": [ChunkRecord("a", 9, 4, "decode", num_draft=3)]},
        (
            "a proposed 3 drafts, 1 accepted, 2 are thrown away: the model chose another token; it got 2 "
            "tokens in one step"
        ),
    ),
    (
        [ev.Scheduled("a", 9, 4, 3), ev.Sampled("a", [1], 3)],
        {"chunks": [ChunkRecord("a", 9, 4, "decode", num_draft=3)]},
        (
            "a proposed 3 drafts, none accepted, 3 are thrown away: the model chose another token at once; "
            "it "
            "got 1 token in one step"
        ),
    ),
    (
        [ev.Scheduled("a", 9, 3, 2), ev.Sampled("a", [1, 2, 3])],
        {"chunks": [ChunkRecord("a", 9, 3, "decode", num_draft=2)]},
        "a proposed 2 drafts, 2 accepted; it got 3 tokens in one step",
    ),
    (
        [ev.Scheduled("a", 9, 4, 3), ev.Sampled("a", [1], 2), ev.Finished("a", "length")],
        {"chunks": [ChunkRecord("a", 9, 4, "decode", num_draft=3)]},
        "a proposed 3 drafts, 1 accepted, 2 are thrown away: it has ended; it got 1 token in one step",
    ),
    (
        [ev.Proposed("a", [1, 2], "ngram"), ev.Proposed("b", [5], "ngram")],
        {},
        "ngram proposes 3 drafts for a and b, to be checked in their next step",
    ),
    (
        [ev.Scheduled("a", 9, 4, 3, draft_padding=True)],
        {"chunks": [ChunkRecord("a", 9, 4, "prefill", num_draft=3)]},
        "a has one token to compute and is made as long as the decodes, with 3 drafts that stand for nothing",
    ),
    (
        [ev.Scheduled("a", 9, 4, 3)],
        {"chunks": [ChunkRecord("a", 9, 4, "decode", num_draft=3)]},
        "a decodes one token and checks 3 drafts",
    ),
    (
        [ev.Scheduled("a", 9, 1, padding=True)],
        {"chunks": [ChunkRecord("a", 9, 1, "decode", padding=True)]},
        "a is finished and computed on, the result thrown away: the batch has not ended",
    ),
    (
        [],
        {"num_padding_tokens": 12, "chunks": [ChunkRecord("a", 9, 4, "prefill")]},
        "12 tokens are computed only to bring the prompts to one length",
    ),
    (
        [ev.Evicted(20, "a", "b", 3), ev.Evicted(21, "c", "b", 3)],
        {},
        "2 cached blocks went to b (20, 21): what a and c left there can no longer be found",
    ),
    ([ev.Arrived(f"n{i}", i, 5, 5) for i in range(5)], {}, "5 requests arrived: n0, n1, n2, n3 and n4"),
    (
        [ev.Allocated("a", [20]), ev.Allocated("b", [21]), ev.Allocated("c", [22, 23])],
        {},
        "a and b take 1 new block each",
    ),
    (
        [ev.SwappedOut("a", [3, 4], [0, 1], 30)],
        {},
        "a was swapped out: 2 blocks (30 tokens) to the host; it comes back when 2 blocks are free at once",
    ),
    (
        [ev.SwappedIn("a", [5], [1], 1)],
        {},
        (
            "a was swapped in: 1 block from the host; 1 block is still here, in the prefix cache; nothing is "
            "computed again"
        ),
    ),
    (
        [ev.Allocated("a", [2, 3]), ev.Copied("a", 3, 4, 1)],
        {},
        "a copied block 3 to 4 before writing: others hold block 3 too (copy-on-write)",
    ),
    (
        [ev.Forked("a", ["a.1"], [3, 4], 30)],
        {},
        (
            "a goes on as 2 sequences (a and a.1): they share 2 blocks of its prompt, computed once; 2 "
            "blocks "
            "saved"
        ),
    ),
    ([ev.Scored("a", [5, 6], [-0.5, -1.0])], {}, "Beam a has its 2 candidates and waits for the other beams"),
    (
        [ev.BeamStep("a", ["a", "b"], [0, 0], [5, 6], [-0.5, -1.0])],
        {},
        "Beams of a: each takes another of a's best first tokens; best log-probability -0.50, worst -1.00",
    ),
    (
        [ev.BeamsEnded("a", ["a", "b"], [[5], [6]], [-0.5, -1.0])],
        {},
        "Beam search of a ended with 2 hypotheses, a's the best; scores -0.50 (best) to -1.00",
    ),
    ([ev.HostFreed("a", [0, 1])], {}, "a ended while it was swapped out: 2 host blocks are free"),
    (
        [ev.Executed()],
        {"chunks": [ChunkRecord("a", 9, 1, "decode")]},
        "The step computed 1 token of 1 request in 1.5 s (measured)",
    ),
    ([], {"chunks": [ChunkRecord(x, 9, 1, "decode") for x in "abc"]}, "a, b and c decode one token each"),
]


@pytest.mark.parametrize("case", range(len(OTHERS)))
def test_every_other_event(case: int) -> None:
    events, fields, sentence = OTHERS[case]
    assert sentence in run(*events, **fields)


def test_victim_rules_have_words() -> None:
    from cbviz.core.policy import VICTIMS

    assert set(RULES) == {*VICTIMS, "rank", "idle-beam"} - {
        "policy"
    }  # `policy` is resolved to `rank` or `last` before it is written


def test_every_event_type_is_told() -> None:
    """A step with an event leaves a sentence that a step without it does not have; Executed is the sum at the
    end.
    """
    tried = {type(e) for r in golden() for e in r.events} | {
        type(e) for events, _, _ in OTHERS for e in events
    }
    assert tried == set(ev.AnyEvent.__args__)


def test_many_at_once_are_one_sentence() -> None:
    trace = Trace(TraceHeader(num_blocks=64))
    ids = [f"q{i}" for i in range(8)]
    specs = [RequestSpec(r, (1, 2), 5) for r in ids]
    trace.append(
        StepRecord(
            1,
            0.0,
            1.0,
            "measured",
            [ChunkRecord(r, 0, 2, "prefill") for r in ids],
            [
                *(ev.Arrived(r, i, 2, 5) for i, r in enumerate(ids)),
                *(ev.Admitted(r, False, 0, 0, i) for i, r in enumerate(ids)),
                *(ev.Sampled(r, [1]) for r in ids),
            ],
            arrivals=specs,
        )
    )
    trace.append(
        StepRecord(
            2,
            1.0,
            2.0,
            "measured",
            [ChunkRecord(r, 2, 1, "decode") for r in ids],
            [ev.Executed(), *(ev.Sampled(r, [1]) for r in ids)],
        )
    )
    assert explain(trace, 2) == [
        "8 requests decode one token each",
        "The step computed 8 tokens of 8 requests in 1 s (measured)",
    ]
    assert "8 requests got a seat at once: q0, q1, q2, q3, q4, q5, q6 and q7" in explain(trace, 1)


def test_words() -> None:
    assert [count(n, "block") for n in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]
    assert listed(["a"]) == "a" and listed([]) == "" and listed("abcdef") == "a, b, c and 3 more"


def test_a_state_can_be_given() -> None:
    trace = golden()
    assert explain_record(trace, trace.record(4), trace.state(4)) == explain(trace, 4)


def documented(kind: type, after: str = "`reason`") -> set[str]:
    """The values that an event's docstring names for its reason."""
    import re

    text = (kind.__doc__ or "").split(after, 1)[1].split("`for_id`")[0]
    return set(re.findall(r"`([a-z_-]+)`", text))


def written(*callables: str) -> set[str]:
    """Texts that the control plane hands to these calls, read from its source."""
    import ast

    import cbviz.core

    found = set()
    for path in Path(cbviz.core.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and _name(node.func) in callables:
                found |= {
                    a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
                }
    return found


def _name(f: object) -> str:
    import ast

    return f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else ""


def test_every_reason_to_wait_has_words_of_its_own() -> None:
    reasons = documented(ev.NotAdmitted) | written("wait", "Wait", "lacks")
    assert {
        "seats",
        "blocks",
        "budget",
        "batch",
        "preempted",
        "watermark",
        "reserve",
        "guarantee",
        "estimate",
        "degraded",
        "policy",
    } <= reasons
    for reason in reasons:
        said = run(ev.NotAdmitted("w1", reason, 4, 2), waiting=1)[0]
        assert said != f"w1 waits: {reason}" and said.startswith("w1 waits: "), reason
    assert {reason for reason, _, _ in WAITS} >= reasons


def test_every_end_and_every_skip_has_words() -> None:
    from cbviz.trace.explain import SKIPS

    assert documented(ev.Finished) - {"stop_id"} == set(ENDS) | {"abort"}
    assert documented(ev.Skipped) == set(SKIPS)
    assert written("Skipped") <= set(SKIPS)


def test_every_event_alone_has_words() -> None:
    """A cursor inside a step can tell each event: of the golden run, of real runs of all disciplines, and of
    every type that there is.
    """
    from cbviz.disciplines import DISCIPLINES
    from cbviz.trace.explain import explain_event
    from tests.runs import run as simulate

    traces = [
        golden(),
        *(simulate(discipline=d, num_blocks=22) for d in DISCIPLINES),
        simulate(sliding_window=8),
    ]
    told: dict[type, str] = {}
    for trace in traces:
        for record in trace:
            for i, e in enumerate(record.events):
                s = explain_event(trace, record, i)
                assert (
                    s
                    and s.kind in KINDS
                    and (not getattr(e, "request_id", "") or e.request_id in s or isinstance(e, ev.SeatHeld))
                )
                told[type(e)] = s
    for events, fields, _ in OTHERS:
        for e in events:
            if type(e) not in told:
                trace = Trace(TraceHeader(num_blocks=32, block_size=4, config={"max_num_seqs": 3}))
                first: list[ev.Event] = [
                    ev.Arrived(rid, i, 9, 20) for i, rid in enumerate(("a", "b", "c", "w1", "w2"))
                ]
                first += [ev.Admitted(rid, False, 0, 0, i) for i, rid in enumerate(("a", "b", "c"))]
                trace.append(StepRecord(1, 0.0, 1.0, "measured", [], first))
                trace.append(
                    StepRecord(
                        2,
                        1.0,
                        2.0,
                        "measured",
                        [],
                        list(events),
                        **{k: v for k, v in fields.items() if k == "chunks"},
                    )
                )
                told[type(e)] = explain_event(trace, trace.record(2), events.index(e))
    assert set(told) == set(ev.AnyEvent.__args__)
    with pytest.raises(IndexError):
        explain_event(golden(), golden().record(8), 2)


def test_a_step_event_by_event() -> None:
    from cbviz.trace.explain import explain_event

    trace = golden()
    record = trace.record(4)
    assert [explain_event(trace, record, i) for i in range(9)] == [
        (
            "r3, last to arrive, was preempted for r1: r1 needs 1 block, 0 are free; r3 will recompute 12 "
            "tokens, less what the cache still has"
        ),
        "Cached block 7 went to r1: r3 used it last, up to this step",
        "r1 takes 1 new block (7)",
        "r1 takes 1 token of this step, position 12",
        "r2 takes 1 token of this step, position 11",
        "r3 waits: nobody is admitted in a step that preempted a request; 1 more request waits behind it",
        "All is decided: the forward pass computes 2 tokens of 2 requests",
        "r1 got token 14",
        "r1 finished: it has its 4 tokens (max_tokens)",
    ]
