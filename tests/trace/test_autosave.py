"""The file that a run writes as it goes: a trace that loads at every moment, whatever the disk, another
writer or a signal does to it.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cbviz.messages import RequestSpec
from cbviz.session import Session
from cbviz.trace import autosave
from cbviz.trace.autosave import Autosave, replacing
from cbviz.trace.schema import TraceError
from cbviz.trace.trace import Trace, load

SMALL = {
    "runner": "sim",
    "num_blocks": 25,
    "block_size": 4,
    "max_model_len": 80,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 80,
}


def small(num: int = 8, **changes: Any) -> Session:
    specs = [
        RequestSpec(
            f"r{i + 1}", tuple(range(100, 109 + 5 * (i % 8))), 6 + 3 * (i % 8), arrival_step=1 + 8 * i
        )
        for i in range(num)
    ]
    return Session(specs, **{**SMALL, **changes})


def steps(trace: Trace) -> list[Any]:
    return [(r.step, r.chunks, r.events, r.t1_s) for r in trace]


class FullDisk:
    """A file that takes `room` more bytes, also half a line, and then says that the disk is full."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self.room = file, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(self.room, len(data), 700)  # a short write is no error: the rest is asked for again
        self.room -= taken
        return int(self._file.write(data[:taken]))


def fill_disk(s: Session, room: int) -> None:
    file = s.trace._file
    assert file is not None
    file._file = FullDisk(file._file, room)  # type: ignore[assignment]


@pytest.mark.parametrize("room", [0, 1, 400, 1_000, 5_000, 20_000])
def test_a_full_disk_ends_autosaving_and_not_the_run(tmp_path: Path, room: int) -> None:
    path = tmp_path / "run.jsonl"
    s, heard = small(autosave=path), list[str]()
    s.step(3)
    s.on_change(heard.append)
    fill_disk(s, room)
    with pytest.warns(UserWarning, match="Autosave stopped after step"):
        s.run()
    assert s.done and heard.count("autosave") == 1
    assert [n for n in s.notes if "No space left on device" in n] == [s.trace.autosave_problem]
    kept = load(path)
    assert not kept.header.notes, "no hole and no half line is left behind"
    assert 3 <= len(kept) < len(s.trace) and steps(kept) == steps(s.trace)[: len(kept)]


def test_a_rewind_on_a_full_disk_shortens_the_file_and_autosaving_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    s = small(autosave=path)
    s.step(9)
    fill_disk(s, 300)
    with pytest.warns(UserWarning, match="Autosave stopped"):
        s.step(5)
    s.rewind(4)
    assert steps(load(path)) == steps(s.trace)
    s.trace._file._file.room = 10**9  # type: ignore[union-attr]
    s.step(6)
    assert len(s.trace) == 10 and steps(load(path)) == steps(s.trace)
    assert not s.notes and not s.trace.autosave_problem


def test_a_folder_that_cannot_be_written_leaves_the_run_without_autosave(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.warns(UserWarning, match="Autosave is off"):
        s = small(autosave=tmp_path / "file" / "run.jsonl")
    s.run()
    s.reset()
    s.step()
    assert len([n for n in s.notes if n.startswith("Autosave is off")]) == 1
    with pytest.raises(OSError):
        s.save(tmp_path / "file" / "run.jsonl")


def test_warnings_as_errors_do_not_fail_a_step(tmp_path: Path) -> None:
    s = small(autosave=tmp_path / "run.jsonl")
    fill_disk(s, 0)
    assert s.step() is not None and s.step() is not None
    assert len(s.trace) == s.engine.step_count == 2


@pytest.mark.parametrize("limit", [9_000, 20_000, 60_000])
def test_the_file_stays_below_its_limit_and_loads(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "run.jsonl"
    s = small(20, autosave=path, autosave_bytes=limit)
    with pytest.warns(UserWarning, match=rf"limit of {limit / 1e6:g} MB.*{autosave.LIMIT_VARIABLE}"):
        s.run()
    assert limit - 4_000 < path.stat().st_size <= limit
    kept = load(path)
    assert not kept.header.notes and steps(kept) == steps(s.trace)[: len(kept)]
    s.rewind(1)
    s.step()
    assert steps(load(path)) == steps(s.trace), "below the limit again, it goes on"


def test_the_limit_holds_for_what_there_is_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autosave.LIMIT_VARIABLE, "10000")
    s = small()
    s.run()
    with pytest.warns(UserWarning, match="limit of 0.01 MB"):
        s.autosave(tmp_path / "run.jsonl")
    assert 0 < len(load(tmp_path / "run.jsonl")) < len(s.trace)
    s.autosave(tmp_path / "run.jsonl", 0)
    assert steps(load(tmp_path / "run.jsonl")) == steps(s.trace) and not s.notes


def test_keyframes_are_the_smaller_part_of_a_file(tmp_path: Path) -> None:
    s = Session("random", runner="sim", autosave=tmp_path / "run.jsonl")
    s.run(max_steps=3_000)
    s.save(tmp_path / "saved.jsonl")
    for name in ("run.jsonl", "saved.jsonl"):
        kinds = {"step": 0, "keyframe": 0, "header": 0}
        for line in (tmp_path / name).read_bytes().splitlines():
            kinds[json.loads(line)["type"]] += len(line)
        assert 0 < kinds["keyframe"] < kinds["step"] / 6
    assert (tmp_path / "run.jsonl").read_bytes() == (tmp_path / "saved.jsonl").read_bytes()
    assert Session.from_trace(load(tmp_path / "run.jsonl")).digest() == s.digest()


@pytest.mark.parametrize("where", ["header", "start", "middle", "zeros", "missing line", "twice"])
def test_what_stands_before_a_hole_loads(tmp_path: Path, where: str) -> None:
    s = small()
    s.step(20)
    lines = s.save(tmp_path / "run.jsonl").read_bytes().splitlines(keepends=True)
    if where == "header":
        lines[0] = lines[0][:50] + b"\n"
        (tmp_path / "run.jsonl").write_bytes(b"".join(lines))
        with pytest.raises(TraceError, match="line 1: not a trace line"):
            load(tmp_path / "run.jsonl")
        return
    line = {"start": 1, "middle": 12, "zeros": 12, "missing line": 12, "twice": 12}[where]
    changed = {
        "start": [b"x" + lines[line]],
        "middle": [lines[line][:40] + b"\n"],
        "zeros": [b"\0" * 4096 + lines[line]],
        "missing line": [],
        "twice": [lines[line]] * 2,
    }
    lines[line : line + 1] = changed[where]
    (tmp_path / "run.jsonl").write_bytes(b"".join(lines))
    back = load(tmp_path / "run.jsonl")
    whole = line if where == "twice" else line - 1
    assert len(back) == whole and steps(back) == steps(s.trace)[:whole]
    assert [n for n in back.header.notes if f"the run is loaded up to step {whole}" in n and "left out" in n]
    t = Session.from_trace(back)
    t.run(max_steps=20 - whole)
    assert steps(t.trace) == steps(s.trace) and t.notes == back.header.notes


# other writers ----------------------------------------------------------------------------------------------


def test_two_savers_of_one_name_leave_one_whole_file(tmp_path: Path) -> None:
    runs = [small(3), small(8)]
    for s in runs:
        s.run()
    failed: list[BaseException] = []

    def save(s: Session) -> None:
        try:
            for _ in range(15):
                s.save(tmp_path / "run.jsonl")
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=save, args=(s,)) for s in runs for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not failed
    assert steps(load(tmp_path / "run.jsonl")) in [steps(s.trace) for s in runs]
    assert os.listdir(tmp_path) == ["run.jsonl"]


def test_two_autosaves_of_one_name_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first, second = small(3, autosave=path), small(8, autosave=path)
    for _ in range(10):
        first.step()
        second.step()
    first.rewind(2)
    assert steps(load(path)) == steps(second.trace)


def test_a_save_that_fails_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = small()
    s.step(5)
    path = s.save(tmp_path / "run.jsonl")
    s.step(5)
    before = path.read_bytes()

    class Broken:
        def __init__(self, fail_at: int) -> None:
            self.left = fail_at

        def __call__(self, record: Any) -> bytes:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return b"{}\n"

    for fail_at in range(10):
        monkeypatch.setattr(autosave, "step_line", Broken(fail_at))
        with pytest.raises(OSError, match="No space left"):
            s.save(path)
        assert path.read_bytes() == before and os.listdir(tmp_path) == ["run.jsonl"]


def test_a_block_that_raises_leaves_no_temporary_file(tmp_path: Path) -> None:
    def broken() -> None:
        with replacing(tmp_path / "a.txt") as out:
            out.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken()
    assert not os.listdir(tmp_path)
    assert replacing(tmp_path / "a.txt").part != replacing(tmp_path / "a.txt").part


def test_a_closed_file_is_written_no_more(tmp_path: Path) -> None:
    s = small(autosave=tmp_path / "run.jsonl")
    s.step(4)
    s.close()
    s.close()
    s.step(4)
    s.rewind(2)
    assert len(load(tmp_path / "run.jsonl")) == 4 and not s.notes


# the end of the process -------------------------------------------------------------------------------------

CHILD = """
import sys
sys.path.insert(0, {here!r})
from tests.trace.test_autosave import small
from pathlib import Path
path = Path(sys.argv[1])
s = small(12, autosave=path)
s.step(90)
print("ready", flush=True)
n = 0
while True:
    if sys.argv[2] == "rewind":
        s.rewind(40 + n % 3)
        s.step(50)
    elif sys.argv[2] == "save":
        s.save(path.with_name("saved.jsonl"))
    else:
        s.reset()
        s.step(90)
    n += 1
"""


@pytest.mark.parametrize("what", ["rewind", "save", "reset"])
def test_a_killed_process_leaves_the_run_up_to_its_last_whole_step(tmp_path: Path, what: str) -> None:
    """`kill -9` at any moment of rewinds, saves and resets."""
    whole = small(12)
    whole.run()
    draw = random.Random(what)
    here = str(Path(__file__).parents[2])
    for attempt in range(2):
        path = tmp_path / f"run{attempt}.jsonl"
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD.format(here=here), str(path), what], stdout=subprocess.PIPE, cwd=here
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(draw.uniform(0.01, 0.4))
        child.send_signal(signal.SIGKILL)
        child.wait(30)
        child.stdout.close()
        back = load(path)
        assert len(back) >= {"rewind": 40, "save": 90, "reset": 0}[what]
        assert steps(back) == steps(whole.trace)[: len(back)]
        assert Session.from_trace(back).digest()
        if what == "save" and path.with_name("saved.jsonl").exists():
            assert steps(load(path.with_name("saved.jsonl"))) == steps(whole.trace)[:90]


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are of Unix")
def test_a_file_that_the_system_does_not_let_grow(tmp_path: Path) -> None:
    """The real system's error in the middle of a line, without a disk that is full."""
    code = f"""
import resource, sys, warnings
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.trace.test_autosave import small
resource.setrlimit(resource.RLIMIT_FSIZE, (12_345, 12_345))
warnings.simplefilter("ignore")
s = small(8, autosave={str(tmp_path / "run.jsonl")!r})
s.run()
print(s.done, s.notes)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith("True") and "Autosave stopped after step" in done.stdout
    back = load(tmp_path / "run.jsonl")
    assert not back.header.notes and len(back) > 3 and (tmp_path / "run.jsonl").stat().st_size <= 12_345


def test_a_new_file_appears_only_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older file of that name stays until then."""
    path = tmp_path / "run.jsonl"
    old = small(3)
    old.run()
    old.save(path)
    before = path.read_bytes()
    seen: list[bytes] = []
    replace = os.replace
    monkeypatch.setattr(
        autosave.os, "replace", lambda a, b: (seen.append(path.read_bytes()), replace(a, b))[1]
    )
    s = small(8)
    s.step(30)
    s.autosave(path)
    assert seen == [before] and steps(load(path)) == steps(s.trace)


def test_the_default_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(autosave.LIMIT_VARIABLE, raising=False)
    assert Autosave("x").limit_bytes == autosave.DEFAULT_LIMIT_BYTES == 100_000_000
    monkeypatch.setenv(autosave.LIMIT_VARIABLE, "5")
    assert Autosave("x").limit_bytes == 5 and Autosave("x", 7).limit_bytes == 7
