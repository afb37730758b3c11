"""A run can be left and taken up again: saved and loaded, rewound, forked.

Whatever it began with and whatever it uses, the same steps follow.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cbviz as cb
from cbviz.config import ConfigError, EngineConfig
from cbviz.messages import RequestError, RequestSpec, Sampling
from cbviz.runners.sim import SimRunner
from cbviz.session import Session
from cbviz.trace.trace import Trace
from tests.core.fuzz import LedgerRunner
from tests.strategies import MODEL, Drawn, draw

MOST_STEPS = 40
SMALL_KEYFRAMES = 7
"""Steps between two keyframes in these tests, so that short runs have some."""
REFUSED = (ConfigError, RequestError, KeyError)


def lines(trace: Trace) -> list[bytes]:
    return [msgspec.json.encode(r) for r in trace]


def written(s: Session) -> str:
    """The control plane as text, in the order in which it stands; of `by_hash` alone the order decides
    nothing.
    """
    plain = s.engine.snapshot()
    pool = plain["scheduler"]["pool"]
    pool["by_hash"] = dict(sorted(pool["by_hash"].items()))
    return json.dumps(plain)


def go_on(s: Session, ask: Callable[[Session], object], to: int) -> None:
    """Steps until `to` steps are made or nothing is left, with the user's inputs before each step."""
    while len(s.trace) < to:
        ask(s)
        if s.step() is None:
            return


def taken_up(s: Session, path: Path) -> Session:
    """Saved, loaded and live again."""
    ours = type(s.runner) is SimRunner or s.runner_name == "tape"
    return Session.from_trace(cb.load(s.save(path)), runner=None if ours else s.runner)


def same_run(
    s: Session, ask: Callable[[Session], object], rng: random.Random, path: Path, most: int = MOST_STEPS
) -> None:
    """Whatever is done with the run `s` at whatever step, it goes on as it went."""
    start = len(s.trace)
    early = taken_up(s, path)
    go_on(s, ask, most)
    whole, end = lines(s.trace), written(s)

    def equal(other: Session) -> None:
        assert lines(other.trace) == whole
        assert written(other) == end

    go_on(early, ask, most)
    equal(early)
    late = taken_up(s, path)
    equal(late)
    if s.engine.asked():
        # nothing was left to do, so no step took a fork's own changes, and whatever goes back forgets them
        return
    fork = s.fork(at=rng.randint(0, len(s.trace)))
    fork.run(max_steps=max(0, len(whole) - len(fork.trace)))
    equal(fork)
    back = rng.randint(min(start, len(s.trace)), len(s.trace))
    s.rewind(back)
    again = taken_up(s, path)
    for x in (s, again):
        go_on(x, ask, most)
        equal(x)
    s.rewind(rng.randint(0, len(s.trace)))
    equal(fork)


def from_list(d: Drawn, rng: random.Random, path: Path) -> Session:
    return d.session()


def from_nothing(d: Drawn, rng: random.Random, path: Path) -> Session:
    """An empty start: the requests are typed one by one."""
    for x in d.specs:
        d.at.setdefault(x.arrival_step or 1, []).append(("add", x))
    return Session(rng.choice((None, [])), runner=d.runner(), model=MODEL, **d.keywords)


def from_preset(d: Drawn, rng: random.Random, path: Path) -> Session:
    return Session(
        rng.choice(("article", "chat", "answers", "preemption")),
        runner="sim",
        **{k: d.keywords[k] for k in ("discipline", "policy", "victim", "seed", "cost")},
    )


def from_file(d: Drawn, rng: random.Random, path: Path) -> Session:
    file = path.with_name("workload.jsonl")
    file.write_text(
        "".join(
            json.dumps({"prompt_len": len(x.prompt_token_ids), "max_tokens": x.max_tokens, "n": x.sampling.n})
            + "\n"
            for x in d.specs
        )
    )
    return Session(file, runner="sim", model=MODEL, **d.keywords)


def from_tape(d: Drawn, rng: random.Random, path: Path) -> Session:
    """Recorded tokens under another schedule."""
    s = d.session()
    s.run(max_steps=200)
    changes = {
        k: v
        for k, v in draw(rng).keywords.items()
        if k in ("discipline", "policy", "victim", "max_num_seqs", "enable_prefix_caching", "cost")
    }
    return Session.from_tape(s.trace, **changes)


def from_saved(d: Drawn, rng: random.Random, path: Path) -> Session:
    s = d.session()
    go_on(s, d.ask, rng.randint(0, 9))
    return taken_up(s, path)


def from_fork(d: Drawn, rng: random.Random, path: Path) -> Session:
    """A fork in which requests are gone, new, or ask something else, or the pool or the price changes."""
    s = d.session()
    go_on(s, d.ask, rng.randint(0, 20))
    at = rng.randint(0, len(s.trace))
    ids = rng.sample([x.request_id for x in d.specs], min(len(d.specs), rng.randint(0, 2)))
    waiting = [i for i in s.fork(at=at).engine.pending_ids if i not in ids]
    changes: dict[str, Any] = rng.choice(
        (
            {},
            {},
            {"num_blocks": s.config.num_blocks + rng.randint(-3, 9)},
            {"modelled_device": "NVIDIA A100 SXM 80GB"},
            {"cost": "article"},
            {"policy": "sjf", "max_num_seqs": 2},
            {"discipline": "vllm"},
            {"seed": 7} if not at else {},
        )
    )
    add = [{"prompt": [1, 2, 3], "max_tokens": 2}] * rng.randint(0, 1)
    prompts = {i: [4, 5] for i in waiting[:1]} if rng.random() < 0.3 else {}
    if not (ids or add or prompts or changes):
        changes = {
            "policy": "sjf"
            # an unchanged fork does by itself what the user did in its parent, and `go_on` would ask for it a
            # second time
        }
    return s.fork(at=at, remove=ids, add=add, prompts=prompts, **changes)


BEGINNINGS = (from_list, from_nothing, from_preset, from_file, from_tape, from_saved, from_fork)


def try_one(begin: Callable[[Drawn, random.Random, Path], Session], seed: int, folder: Path) -> bool:
    rng = random.Random(seed)
    drawn = draw(rng)
    with drawn.named(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("cbviz.trace.keyframes.KEYFRAME_EVERY", SMALL_KEYFRAMES)
        try:
            s = begin(drawn, rng, folder / "begin.jsonl")
        except REFUSED:
            return False
        same_run(s, drawn.ask, rng, folder / "run.jsonl.gz")
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("begin", BEGINNINGS)
@settings(max_examples=25)
@given(seed=st.integers(0, 10**9))
def test_a_run_goes_on_as_it_went(
    begin: Callable[[Drawn, random.Random, Path], Session], folder: Path, seed: int
) -> None:
    try_one(begin, seed, folder)


@pytest.mark.deep
@pytest.mark.parametrize("begin", BEGINNINGS)
@settings(max_examples=1500)
@given(seed=st.integers(0, 10**9))
def test_a_run_goes_on_as_it_went_more(
    begin: Callable[[Drawn, random.Random, Path], Session], folder: Path, seed: int
) -> None:
    try_one(begin, seed, folder)


@pytest.mark.parametrize("seed", [469, 8457, 22639, 30399])
def test_idle_steps_are_made_again(folder: Path, seed: int) -> None:
    """The only request to come was removed: nothing is left to do, or nothing until the user adds another."""
    assert try_one(from_fork, seed, folder)


@pytest.mark.parametrize("begin", BEGINNINGS)
def test_most_drawn_runs_are_not_refused(
    begin: Callable[[Drawn, random.Random, Path], Session], folder: Path
) -> None:
    assert sum(try_one(begin, seed, folder) for seed in range(10)) >= 3


def test_an_empty_start_goes_on(tmp_path: Path) -> None:
    """Given a run that began with no requests, or whose only request was removed, when it is taken up from
    its trace, then nothing asks for a workload's name.
    """
    typed = Session([], runner="sim")
    typed.add("hello there", max_tokens=3)
    emptied = Session([RequestSpec("a", (1, 2, 3), 2)], runner="sim").fork(at=0, remove=["a"])
    emptied.add("x y", max_tokens=2)
    for s in (typed, emptied):
        s.run()
        again = taken_up(s, tmp_path / "run.jsonl")
        assert lines(again.trace) == lines(s.trace) and again.workload == []


def test_a_removed_request_stays_removed_after_a_rewind() -> None:
    """Given a branch without a request that had not arrived, when it goes back, also beyond a keyframe, then
    the request does not come back, and its id is free.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cbviz.trace.keyframes.KEYFRAME_EVERY", 3)
        s = Session(
            [RequestSpec("a", (1, 2, 3), 20), RequestSpec("late", (1, 2), 4, arrival_step=12)], runner="sim"
        )
        s.run(max_steps=8)
        branch = s.fork(remove=["late"])
        branch.run()
        for step in (10, 7, 1, 0):
            branch.rewind(step)
            assert branch.engine.pending_ids == (["a"] if step == 0 else [])
        branch.add([1, 2], request_id="late")
        branch.run()
        assert branch.request("late").finished


def test_a_run_whose_last_request_was_removed_is_not_stuck_when_it_is_loaded(tmp_path: Path) -> None:
    """Given many steps that only waited for an arrival, when that request is removed and the branch is
    loaded, then nobody is said to get nowhere.
    """
    s = Session([RequestSpec("late", (1, 2), 2, arrival_step=400)], runner="sim")
    s.step(300)
    branch = s.fork(remove=["late"])
    again = taken_up(branch, tmp_path / "run.jsonl")
    for x in (branch, again):
        assert x.done and x.engine.stuck == ""
    assert written(again) == written(branch)


def test_what_was_asked_for_since_the_last_step_is_saved(tmp_path: Path) -> None:
    """Given inputs that no step has taken yet, when the run is saved and taken up, then the next step takes
    them.
    """
    s = Session([RequestSpec("a", (1, 2, 3), 9)], runner="sim", num_blocks=40)
    s.run(max_steps=2)
    branch = s.fork(num_blocks=30, add=[{"prompt": [4, 5], "max_tokens": 3}], policy="sjf")
    again = taken_up(branch, tmp_path / "run.jsonl")
    assert again.config.num_blocks == branch.config.num_blocks == 30
    for x in (branch, again):
        x.run()
    assert lines(again.trace) == lines(branch.trace) and again.config.policy == "sjf"
    assert branch.trace.header.inputs == []


def test_a_taped_run_goes_on_where_it_was_left(tmp_path: Path) -> None:
    """Given a what-if on recorded tokens that was left half way, when it is taken up, then the rest of the
    tape is there.
    """
    s = Session("preemption", runner="sim")
    s.run()
    tape = Session.from_tape(s.trace, discipline="static")
    tape.run(max_steps=5)
    again = taken_up(tape, tmp_path / "run.jsonl")
    tape.run()
    again.run()
    assert lines(again.trace) == lines(tape.trace)


class Shared(LedgerRunner):
    """A user's runner with a KV cache: nobody here knows how to make a second one.

    It refuses to read a slot that holds something else.
    """

    simulated = False


def test_branches_that_share_a_runner_do_not_read_each_others_kv() -> None:
    """Given a runner that a session and its fork share, when both go on in turns, then each has computed
    again what the other overwrote.
    """
    knobs: dict[str, Any] = {"block_size": 4, "num_blocks": 30, "max_model_len": 64, "clock": "modelled"}
    requests = [
        RequestSpec(f"r{i}", tuple(range(i, i + 9)), 12, sampling=Sampling(ignore_eos=True)) for i in range(4)
    ]
    s = Session(requests, runner=Shared(EngineConfig(**knobs)), model=MODEL, **knobs)
    s.run(max_steps=3)
    branch = s.fork(add=[{"prompt": [7] * 9, "max_tokens": 9}])
    assert branch.runner is s.runner
    while not (s.done and branch.done):
        s.step()
        branch.step()
    assert all(r.finished for x in (s, branch) for r in x.state().by_index)
