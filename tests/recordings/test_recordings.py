"""The recordings that come with the package: small, whole, of the real model, and run again without torch."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from cbviz import events as ev
from cbviz import recordings
from cbviz.config import ConfigError
from cbviz.messages import RequestError
from cbviz.recordings import make
from cbviz.session import Session
from cbviz.trace import Trace
from cbviz.workload import PRESETS

MOST_BYTES = 2_000_000


def words(trace: Trace) -> dict[str, list[str]]:
    return {r.request_id: r.output_texts for r in trace.state().by_index}


def test_size_and_names() -> None:
    files = sorted(p.name for p in recordings.FOLDER.glob("*.gz"))
    assert files == sorted(f"{n}.jsonl.gz" for n in recordings.NAMES)
    assert sum((recordings.FOLDER / f).stat().st_size for f in files) < MOST_BYTES
    assert set(recordings.NAMES) <= set(PRESETS)


def timeless(e: ev.Event) -> ev.Event:
    """Without the time of the clock, and without the id at which the model stopped: a tape stops where the
    recording did.
    """
    if isinstance(e, ev.Arrived):
        return msgspec.structs.replace(e, arrival_s=0.0)
    return msgspec.structs.replace(e, stop_id=-1) if isinstance(e, ev.Finished) else e


@pytest.mark.parametrize("name", recordings.NAMES)
def test_the_schedule_comes_out_again_with_the_recorded_words(name: str) -> None:
    """Classroom scenarios arrive by step: under the recorded settings our engine must make the recorded
    steps, plans and events again.
    """
    r = recordings.load(name)
    assert (r.header.runner, r.header.clock, r.header.workload) == ("torch", "measured", name)
    assert all(q.finished for q in r.state().by_index)
    s = recordings.open_session(name)
    s.run()
    assert [x.chunks for x in s.trace.records] == [x.chunks for x in r.records]
    assert [[timeless(e) for e in x.events] for x in s.trace.records] == [
        [timeless(e) for e in x.events] for x in r.records
    ]
    assert words(s.trace) == words(r)
    assert any(any(t) for t in words(s.trace).values())
    assert s.trace.header.clock == "modelled"
    assert s.trace.header.workload == name


def test_another_schedule_says_the_same() -> None:
    s = recordings.open_session("preemption", discipline="static", num_blocks=64)
    s.run()
    assert len(s.trace) != len(recordings.load("preemption"))
    assert words(s.trace) == words(recordings.load("preemption"))


def test_rewind_and_fork_keep_the_words() -> None:
    s = recordings.open_session("preemption")
    s.run(max_steps=60)
    s.rewind(30)
    b = s.fork(policy="sjf")
    s.run()
    b.run()
    assert words(s.trace) == words(b.trace) == words(recordings.load("preemption"))


def test_goes_on_from_its_own_trace() -> None:
    """A page that is loaded again: the run so far, and the same tape behind it."""
    s = recordings.open_session("chat", max_num_seqs=4)
    s.run(max_steps=40)
    t = Session.from_trace(s.trace, runner=recordings.runner("chat"))
    s.run()
    t.run()
    assert [x.events for x in t.trace.records] == [x.events for x in s.trace.records]
    assert words(t.trace) == words(s.trace)


def test_no_model_answers() -> None:
    s = recordings.open_session("chat")
    with pytest.raises(RequestError, match="no model that could answer"):
        s.add("Hello?")
    assert any("seed=3" in n for n in recordings.open_session("chat", seed=3).notes)


@pytest.mark.parametrize("name", ["burst", "../secret", ""])
def test_no_such_recording(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no recording"):
        recordings.load(name)
    with pytest.raises(ConfigError, match="there is no recording"):
        make.main([name])


def test_without_torch() -> None:
    """In a process that can import neither torch nor a tokenizer."""
    code = (
        "import sys\n"
        "for m in ('torch', 'tokenizers', 'transformers'): sys.modules[m] = None\n"
        "from cbviz import recordings\n"
        "s = recordings.open_session('shared-prefix'); s.run(); print(s.text('r1'))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert (
        done.stdout.strip()
        == "".join(recordings.load("shared-prefix").state().request("r1").output_texts).strip()
    )
