"""Parallel sampling (n > 1): one prompt, computed once, its blocks shared and copied when somebody writes;
under preemption, prefix caching, swapping and abort.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from cbviz import events as ev
from cbviz.config import ConfigError
from cbviz.core.request import Status
from cbviz.cost import models
from cbviz.messages import RequestError, RequestSpec, Sampling
from cbviz.runners.sim import SimRunner
from cbviz.session import Session
from cbviz.trace.accounting import check_trace
from cbviz.trace.compare import compare
from cbviz.trace.explain import explain
from cbviz.trace.intervals import NOT_RECORDED, spent
from cbviz.trace.reservation import reservation
from cbviz.trace.trace import Cursor
from cbviz.trace.why import _hits, why_block, why_missed, why_waiting
from tests.core.byhand import byhand, found, run, spec
from tests.core.fuzz import DISCIPLINE_NAMES, Case, LedgerRunner, case, make_engine, play
from tests.engine.test_replay import follow


def several(x: RequestSpec, n: int) -> RequestSpec:
    return msgspec.structs.replace(x, sampling=msgspec.structs.replace(x.sampling, n=n))


def wide(seed: int, **fields: Any) -> Case:
    """A case in which half of the requests want up to three sequences."""
    c = case(seed, block_size=4, num_blocks=18, max_model_len=40, max_num_seqs=5, **fields)
    rng = random.Random(seed)
    c.specs = [several(x, rng.randint(1, 3)) for x in c.specs]
    return c


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("discipline", DISCIPLINE_NAMES)
def test_any_workload_under_any_discipline(discipline: str, mode: str) -> None:
    """Each sequence says what it says alone; every slot read holds what it should; the accounts close; a
    mirror that is only told follows.
    """
    copies = 0
    for seed in range(4):
        c = wide(seed, discipline=discipline, preemption_mode=mode)
        engine, _, trace = follow(c)
        check_trace(trace)
        copies += len(found(trace, ev.Copied))
        assert engine.runner.healed == 0  # type: ignore[attr-defined]
    assert copies


def test_swapped_out_in_the_step_that_copied_for_it() -> None:
    """A victim that had its share, and its copy on write, taken back: its block holds nothing yet, so what
    goes to the host is the block it would have been copied from.
    """
    specs = [several(spec("a", 10, 6, priority=5), 3), spec("b", 4, 6, first=50), spec("c", 4, 6, first=70)]
    # 7 blocks of 4. Step 1: 3 for a, shared by three, 1 each for b and c. Step 2: a and a.1 copy the
    # half-full one, then b and c each take one from a.2 and a.1
    engine, _, trace = follow(
        byhand(
            specs,
            discipline="vllm",
            victim="lowest-priority",
            preemption_mode="swap",
            num_blocks=8,
            max_model_len=28,
        )
    )
    assert engine.runner.healed == 0  # type: ignore[attr-defined]
    for kind in (ev.Copied, ev.Unscheduled, ev.SwappedOut):
        assert "a.1" in {e.request_id for e in found(trace, kind, 2)}, kind
    for seed in range(60):
        c = wide(
            seed,
            discipline="vllm",
            policy="fcfs",
            preemption_mode="swap",
            victim=("lowest-priority", "fewest-outputs")[seed % 2],
            sliding_window=0,
        )
        c.specs = [
            msgspec.structs.replace(x, priority=-i) for i, x in enumerate(c.specs)
        ]  # so that those who had their share lose it to later ones
        engine, _, trace = follow(c)
        assert engine.runner.healed == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(12))
def test_a_step_that_fails_leaves_everything_as_it_was(seed: int) -> None:
    c, rng = wide(seed, preemption_mode="swap"), random.Random(seed)
    play(
        c,
        make_engine(
            c.config, LedgerRunner(c.config, lambda plan: OSError("power") if rng.random() < 0.3 else None)
        ),
        faults=(OSError,),
    )


def test_by_hand() -> None:
    """Ten prompt tokens in blocks of 4: two full blocks and a half-full one, shared by three.

    The first two that write copy the half-full one, the last writes in place.
    """
    t = run([several(spec("a", 10, 4), 3)], max_num_seqs=3)
    fork = found(t, ev.Forked, 1)[0]
    assert (fork.child_ids, fork.block_ids, fork.num_tokens) == (["a.1", "a.2"], [1, 2, 3], 10)
    assert t.record(1).tokens.total == 10  # the prompt once, not three times
    assert t.record(1).gauges.num_saved_blocks == 6
    assert [(e.request_id, e.src, e.dst, e.place) for e in found(t, ev.Copied, 2)] == [
        ("a", 3, 4, 2),
        ("a.1", 3, 5, 2),
    ]
    s = t.state(2)
    assert [s.requests[i].block_ids for i in ("a", "a.1", "a.2")] == [[1, 2, 4], [1, 2, 5], [1, 2, 3]]
    assert [s.ref_count(b) for b in (1, 2, 3, 4, 5)] == [3, 3, 1, 1, 1]
    assert any(
        x
        == (
            "a goes on as 3 sequences (a, a.1 and a.2): they share 3 blocks of its prompt, computed once; "
            "6 blocks saved"
        )
        for x in explain(t, 1)
    )
    assert any(
        x == "a copied block 3 to 4 before writing: others hold block 3 too (copy-on-write)"
        for x in explain(t, 2)
    )
    outs = t.state().outputs("a")
    assert len(outs) == 3 and all(len(x) == 4 for x in outs) and len({tuple(x) for x in outs}) == 3


def test_a_prompt_that_fills_its_blocks_needs_no_copy() -> None:
    assert not found(run([several(spec("a", 8, 3), 3)]), ev.Copied)


def test_sequences_say_what_requests_of_their_ids_say() -> None:
    one = run([several(spec("a", 10, 6), 3)])
    each = run([spec("a", 10, 6), spec("a.1", 10, 6), spec("a.2", 10, 6)])
    assert one.state().outputs("a") == [each.state().request(i).output_token_ids for i in ("a", "a.1", "a.2")]


def test_seats_are_kept_for_the_sequences_to_come() -> None:
    """Five seats; a has four sequences, so b finds one free while a's prompt is still being computed, and c
    none.
    """
    t = run(
        [several(spec("a", 20, 4), 4), spec("b", 3, 8), several(spec("c", 3, 2), 2)],
        max_num_seqs=5,
        max_num_batched_tokens=12,
    )
    assert found(t, ev.NotAdmitted)[0].reason in ("budget", "seats")
    waits = [e for e in found(t, ev.NotAdmitted) if e.request_id == "c" and e.reason == "seats"]
    assert waits and waits[0].need == 2
    assert max(r.gauges.num_running for r in t) == 5


def test_abort_ends_all_sequences() -> None:
    s = Session([several(spec("a", 10, 20), 3), spec("b", 5, 8)], runner="sim", block_size=4, num_blocks=40)
    s.step(4)
    s.abort("a.1")
    s.step()
    assert s.request("a.1").finish_reason == "abort" and s.request("a").status == "running"
    s.abort("a")
    s.step()
    assert {s.request(i).finish_reason for i in ("a", "a.2")} == {"abort"}
    s.run()
    assert s.engine.scheduler.state.pool.num_free == 39 and s.request("b").finish_reason == "length"


def test_a_parent_that_ended_is_aborted_with_its_children() -> None:
    x = several(spec("a", 6, 12), 2)
    s = Session([x], runner="sim", block_size=4, num_blocks=40)
    s.step(2)
    stop = s.engine.runner.token("a", 9)  # type: ignore[attr-defined]
    s = Session(
        [msgspec.structs.replace(x, sampling=Sampling(n=2, stop_token_ids=(stop,)))],
        runner="sim",
        block_size=4,
        num_blocks=40,
    )
    while not s.done and (not len(s.trace) or s.request("a").status != "finished"):
        s.step()
    assert s.engine.scheduler.state.requests["a.1"].status is Status.RUNNING
    s.abort("a")
    s.step()
    assert s.request("a.1").finish_reason == "abort"


def test_rewind_fork_and_keyframes() -> None:
    s = Session(
        [several(spec("a", 10, 150), 3), spec("b", 5, 150)],
        runner="sim",
        block_size=4,
        num_blocks=200,
        max_model_len=180,
    )
    s.run()
    outputs, digest = {i: s.request(i).output_token_ids for i in s.request_ids}, s.digest()
    s.rewind(120)  # from the keyframe at step 100: children are made from their parent's spec
    b = s.fork()
    s.run()
    b.run()
    assert {
        i: s.request(i).output_token_ids for i in s.request_ids
    } == outputs and s.digest() == digest == b.digest()


@pytest.mark.parametrize(
    ("bad", "fields", "said"),
    [
        (several(spec("a", 4, 4), 9), {"max_num_seqs": 8}, "n is 9, but there are 8 seats"),
        (several(spec("a", 4, 4), 2), {"kv_allocation": "contiguous"}, "nobody shares blocks"),
    ],
)
def test_what_can_not_be(bad: RequestSpec, fields: dict[str, Any], said: str) -> None:
    s = Session(None, runner="sim", **fields)
    with pytest.raises(RequestError, match=said):
        s.engine.add(bad)


def test_seats_can_not_be_taken_from_sequences_to_come() -> None:
    s = Session([several(spec("a", 40, 4), 3)], runner="sim", max_num_batched_tokens=16)
    s.step()
    with pytest.raises(
        ConfigError, match="max_num_seqs is 2, but the 3 sequences of a need a seat each: the least is 3"
    ):
        s.configure(max_num_seqs=2)
    s.step(2)
    s.configure(max_num_seqs=2)  # they are there, and keep their seats
    s.engine.add(several(spec("b", 4, 4), 2))
    with pytest.raises(ConfigError, match="the 2 sequences of b"):
        s.configure(max_num_seqs=1)
    s.run()
    assert s.done and s.request("b.1").finish_reason == "length"


@pytest.mark.parametrize("stops", ["a", "a.1"])
def test_on_a_tape_each_sequence_has_its_own_length(stops: str) -> None:
    """One of three ends early: under another schedule, on the recorded tokens, it does so again, and the
    others do not.
    """
    ends = SimRunner(models.get("smollm2"), 0).token(stops, 10 + 5)
    asked = spec("a", 10, 20, sampling=Sampling(n=3, stop_token_ids=(ends,)))
    s = Session([asked], runner="sim")
    s.run()
    assert sorted(map(len, s.outputs("a"))) == [6, 20, 20]
    tape = Session.from_tape(s.trace, max_num_batched_tokens=3)
    tape.run()
    assert tape.outputs("a") == s.outputs("a")
    with pytest.raises(RequestError, match="output_lens has 1 lengths, n is 3"):
        msgspec.structs.replace(asked, output_lens=(4,))


def test_sequences_in_what_is_told_of_a_run() -> None:
    """Their steps are counted from the fork on, two runs with them are compared, and without paging each
    would have had a piece of its own.
    """
    s = Session(
        [several(spec(i, 30, 12), n) for i, n in (("a", 3), ("b", 2), ("c", 1))],
        runner="sim",
        discipline="chunked",
        num_blocks=40,
        block_size=4,
        max_num_seqs=6,
    )
    t = s.fork(max_num_seqs=3, num_blocks=24)
    s.run()
    t.run()
    for trace in (s.trace, t.trace):
        for rid, x in spent(trace).items():
            r = trace.state().request(rid)
            assert x.steps == r.finish_step - r.first_step + 1, (rid, x)
            assert NOT_RECORDED not in {**x.waiting, **x.preempted, **x.skipped}, (rid, x)
            computed = sum(c.request_id == rid for record in trace for c in record.chunks)
            assert sum(n for n, _ in x.ran.values()) == computed + bool(r.parent)
        assert {"a.1", "a.2", "b.1"} < set(spent(trace))
        found = reservation(trace)
        for step, (record, held) in enumerate(zip(trace, found.steps["exact"]), 1):
            assert sum(held[:5]) == found.total_slots
            if step > 2 and not any(isinstance(e, (ev.Admitted, ev.Preempted)) for e in record.events):
                assert held.num_running == len(trace.state(step - 1).running)
    assert compare(s.trace, t.trace).causes


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_why_knows_blocks_that_sequences_share(mode: str) -> None:
    """Who holds a block follows from its life at every step, also where the pool gets smaller; what an
    admission will find in the cache is foretold.
    """
    s = Session(
        [several(spec(i, 30, 12), n) for i, n in (("a", 3), ("b", 2), ("c", 1), ("d", 3))],
        runner="sim",
        discipline="vllm",
        num_blocks=40,
        block_size=4,
        max_num_seqs=6,
        preemption_mode=mode,
        swap_blocks=20,
    )
    s.run(max_steps=6)
    s = s.fork(num_blocks=24)
    s.run()
    whats = set()
    hits = 0
    for step in range(1, len(s.trace) + 1):
        state = s.trace.state(step)
        for b in range(1, state.num_blocks):
            found = why_block(s.trace, step, b)
            held = 0
            for x in found.facts["life"]:
                whats.add(x["what"])
                held = (
                    1 if x["what"] == "allocated" else 0 if x["what"] == "evicted" else x.get("holders", held)
                )
            assert held == len(found.facts["holders"]) == state.ref_count(b), (step, b, found.facts)
        for rid in state.requests:
            why_waiting(s.trace, step, rid)
            why_missed(s.trace, step, rid)
        for i, e in enumerate(s.trace.record(step).events):
            if isinstance(e, ev.PrefixHit):
                at = Cursor(step, i)
                assert len(_hits(s.trace, s.trace.state(at), at, e.request_id)) == len(e.block_ids)
                hits += 1
    assert hits and {"allocated", "forked", "copied", "freed", "cached", "evicted"} <= whats


def test_ids_of_sequences_are_taken() -> None:
    s = Session(None, runner="sim")
    s.engine.add(several(spec("a", 4, 4), 2))
    with pytest.raises(RequestError, match=r"request id 'a\.1' was used before"):
        s.engine.add(spec("a.1", 4, 4))
    with pytest.raises(RequestError, match="n is 0, the least is 1"):
        Sampling(n=0)
