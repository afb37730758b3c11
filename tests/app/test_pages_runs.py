"""A run has one writer: what becomes of it when its page is loaded again, its tab duplicated, its address
copied or its name guessed, and when files break.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cbviz.app import kept, writer
from cbviz.app.opening import Settings
from cbviz.session import Session
from cbviz.trace import load, runs
from cbviz.trace.autosave import write_text
from tests.app.test_debugger import names, stepped
from tests.app.test_player import FakePage, opened, saved

SIM = Settings("preemption", "sim")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(writer, "ANSWER_S", 0.5)


def steps_of(run: str) -> int:
    return len(load(saved(run)))


async def told(page: FakePage, words: str) -> None:
    await page.until(lambda: any(words in text for text in page.notices()), words)


def test_a_duplicated_tab_gets_a_run_of_its_own_and_the_first_keeps_its_run() -> None:
    async def go() -> None:
        async with opened(settings=SIM, address=True) as (a, first):
            await stepped(a, 10)
            run = first.run
            async with opened(settings=SIM, address=True, run=run) as (b, second):
                await b.at(10)
                await told(b, "This page is a copy")
                assert b.live["run"] == second.run != run
                assert not a.notices()
                await stepped(a, 25)
                await stepped(b, 15)
                copy = second.run
        async with opened(settings=SIM, address=True, run=run) as (a, _):
            await a.at(25)
            assert not a.notices()
        assert (steps_of(run), steps_of(copy)) == (25, 15)

    asyncio.run(go())


def test_a_page_that_is_loaded_again_goes_on_with_its_run_while_the_old_kernel_still_lives() -> None:
    async def go() -> None:
        async with opened(settings=SIM, address=True) as (old, before):
            await stepped(old, 6)
            run = before.run
            old.there = False
            async with opened(settings=SIM, address=True, run=run) as (new, after):
                await new.at(6)
                assert after.run == run
                assert not new.notices()
                await stepped(new, 9)
                assert before.run == ""
        assert steps_of(run) == 9

    asyncio.run(go())


def test_a_page_that_wakes_up_after_its_run_was_taken_over_is_told_and_loses_no_step() -> None:
    async def go() -> None:
        async with opened(settings=SIM, address=True) as (sleeper, before):
            await stepped(sleeper, 6)
            sleeper.do("fork", at=4, changes={"policy": "sjf"}, name="short first")
            await sleeper.until(lambda: sleeper.last["family"]["name"] == "short first")
            run = before.run
            sleeper.there = False
            async with opened(settings=SIM, address=True, run=run) as (other, after):
                await stepped(other, 7)
                assert after.run == run
                sleeper.there = True
                await stepped(sleeper, 12)
                await told(sleeper, "Another tab opened this run and goes on with it")
                assert sleeper.live["run"] == before.run not in ("", run)
                await asyncio.get_running_loop().run_in_executor(before._pool, lambda: None)
                own = before.run
        async with opened(settings=SIM, address=True, run=own) as (again, _):
            await again.at(12)
            assert {n: b["steps"] for n, b in names(again).items()} == {"short first": 12, "main": 6}
        async with opened(settings=SIM, address=True, run=run) as (again, _):
            await again.at(7)
            assert {n: b["steps"] for n, b in names(again).items()} == {"short first": 7, "main": 6}

    asyncio.run(go())


def test_a_page_that_says_it_leaves_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "ANSWER_S", 60.0)
    monkeypatch.setattr(writer, "PATIENCE_S", 30.0)

    async def go() -> None:
        async with opened(settings=SIM, address=True) as (old, before):
            await stepped(old, 3)
            run = before.run
            old.there = False
            before.receive({"type": "leaving"})
            async with opened(settings=SIM, address=True, run=run) as (new, after):
                await new.at(3)
                assert after.run == run

    asyncio.run(go())


def test_branches_go_with_a_copy_and_the_one_shown_last_is_shown_again() -> None:
    async def go() -> None:
        async with opened(settings=SIM, address=True) as (a, first):
            await stepped(a, 8)
            a.do("fork", at=5, changes={"policy": "sjf"}, name="short first")
            await a.until(lambda: a.last["family"]["name"] == "short first")
            await stepped(a, 11)
            await asyncio.get_running_loop().run_in_executor(first._pool, lambda: None)
            async with opened(settings=SIM, address=True, run=first.run) as (b, second):
                await b.at(11)
                assert second.run != first.run
                assert {n: (x["steps"], x["shown"]) for n, x in names(b).items()} == {
                    "short first": (11, True),
                    "main": (8, False),
                }
                b.do("branch", name="main")
                await b.at(8)
                await stepped(b, 9)
                await asyncio.get_running_loop().run_in_executor(second._pool, lambda: None)
                copy = second.run
            assert {x.name: len(x.trace) for x in first.session.root.tree()} == {"short first": 11, "main": 8}  # type: ignore[union-attr]
        async with opened(settings=SIM, address=True, run=copy) as (b, _):
            await b.at(9)
            assert names(b)["main"]["shown"]

    asyncio.run(go())


def outside_names(tmp_path: Path) -> list[str]:
    """Names that no page of this browser was given, some of runs that are there."""
    s = Session("burst", runner="sim")
    s.step(5)
    made = runs.new_path("burst-chunked")
    s.save(made)
    bare = kept.pages_dir() / "a-folder-of-22-letters"
    bare.mkdir()
    s.save(bare / "main.jsonl")
    other = kept.create("another browser")
    s.save(other.path(kept.MAIN))
    other.release()
    return [
        made.stem,
        made.name,
        f"../runs/{made.stem}",
        bare.name,
        other.name,
        str(tmp_path),
        "../../etc/passwd",
        "",
        "a",
        "x" * 22,
        "%00" * 8,
        "\u2028" * 22,
    ]


def test_a_name_that_this_browser_was_not_given_opens_no_run_and_writes_over_none(tmp_path: Path) -> None:
    async def go(name: str) -> None:
        async with opened(settings=SIM, address=True, run=name, browser="mine") as (page, player):
            assert page.page.step == 0
            assert player.run not in ("", name)
            if name:
                await told(page, "names a run that this browser does not have here")
            await stepped(page, 2)

    given = outside_names(tmp_path)
    before = {f: f.read_bytes() for f in (tmp_path / "cache").rglob("*.jsonl")}
    said = set()
    for name in given:
        asyncio.run(go(name))
        said.add(kept.find(name, "mine"))
    assert said == {None}
    assert len(before) == 3
    assert all(f.read_bytes() == data for f, data in before.items())


def test_names_of_runs_are_unguessable_and_their_files_private() -> None:
    held = [kept.create("b") for _ in range(20)]
    assert len({h.name for h in held}) == 20
    assert all(len(h.name) >= 22 for h in held)
    if os.name == "posix":
        assert {h.folder.stat().st_mode & 0o077 for h in held} == {0}
    assert "b" not in (held[0].folder / "run.json").read_text("utf-8").replace('"browser"', "").split()
    for h in held:
        h.release()


def test_saved_runs_are_listed_only_where_the_user_of_the_machine_is_alone() -> None:
    s = Session("burst", runner="sim")
    s.run()
    file = runs.new_path("burst")
    s.save(file)

    async def go(alone: bool) -> None:
        async with opened(settings=Settings("burst", "sim"), alone=alone) as (page, _):
            await stepped(page, 3)
            page.do("files")
            await page.until(lambda: "files" in page.last)
            assert [f["id"] for f in page.last["files"]["files"]] == ([file.stem] if alone else [])
            page.do("compare", picks=["branch:main", f"file:{file.stem}"])
            if alone:
                await page.until(lambda: "compared" in page.last)
            else:
                await page.until(lambda: any("no saved run" in str(m.get("error")) for m in page.said))
                assert "compared" not in page.last

    asyncio.run(go(True))
    asyncio.run(go(False))


HOLD = (
    "import sys; from pathlib import Path; from cbviz.app import kept; h = kept.grab(Path(sys.argv[1])); "
    "print(h is not None, flush=True); sys.stdin.read()"
)


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is a signal of POSIX")
def test_a_kernel_that_is_killed_leaves_its_run_to_the_next() -> None:
    held = kept.create()
    held.release()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(held.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert kept.grab(held.folder) is None
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        again = kept.grab(held.folder)
        assert again is not None
        again.release()
    finally:
        holder.kill()
        holder.communicate()


def test_a_file_torn_anywhere_comes_back_up_to_its_last_whole_step_and_the_page_says_what_is_missing() -> (
    None
):
    async def go() -> None:
        async with opened(settings=SIM, address=True) as (page, player):
            await stepped(page, 12)
            run = player.run
        file = saved(run)
        whole = file.read_bytes()
        ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
        for cut in (ends[-1] - 1, ends[-1] - 200, ends[7] + 30, ends[4] + 1, ends[0] + 5):
            file.write_bytes(whole[:cut])
            complete = sum(end <= cut for end in ends) - 1
            async with opened(settings=SIM, address=True, run=run) as (page, player):
                assert player.run == run
                if whole[:cut].endswith(b"}"):  # only the end of the line is missing
                    complete += 1
                else:
                    await told(page, f"What came after step {complete} was not saved whole")
                await page.at(complete)
                await stepped(page, complete + 1)
            assert steps_of(run) == complete + 1

    asyncio.run(go())


def test_a_run_that_cannot_be_read_is_kept_and_a_new_one_begins_with_a_reason() -> None:
    async def go() -> None:
        async with opened(settings=SIM, address=True) as (page, player):
            await stepped(page, 3)
            run = player.run
        saved(run).write_bytes(b"what is this\n" * 3)
        async with opened(settings=SIM, address=True, run=run) as (page, player):
            await told(page, "The saved run cannot be read")
            assert str(saved(run).parent.parent) not in " ".join(page.notices())
            assert player.run not in ("", run)
            await stepped(page, 2)
        assert saved(run).read_bytes().startswith(b"what is this")

    asyncio.run(go())


def test_a_branch_that_cannot_be_read_is_named() -> None:
    async def go() -> None:
        async with opened(settings=SIM, address=True) as (page, player):
            await stepped(page, 5)
            page.do("fork", at=3, name="other")
            await page.until(lambda: page.last["family"]["name"] == "other")
            await asyncio.get_running_loop().run_in_executor(player._pool, lambda: None)
            run = player.run
        saved(run).write_bytes(b"\n\n?")
        async with opened(settings=SIM, address=True, run=run) as (page, _):
            await told(page, "Branch “main” cannot be read and is missing.")
            assert set(names(page)) == {"other"}

    asyncio.run(go())


def test_where_nothing_can_be_written_the_page_works_and_says_that_nothing_is_saved(tmp_path: Path) -> None:
    async def go() -> None:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "pages").write_text("in the way")
        async with opened(settings=SIM, address=True, run="x" * 22) as (page, player):
            await told(page, "This run is not saved")
            assert page.live["run"] == player.run == ""
            await stepped(page, 4)
            page.do("restart", changes={"scenario": "burst"})
            await page.until(
                lambda: isinstance(player.session, Session) and player.session.workload_name == "burst"
            )
            await stepped(page, 2)

    asyncio.run(go())


def test_a_notice_stays_until_it_is_closed() -> None:
    async def go() -> None:
        async with opened(settings=SIM, address=True, run="never-given-to-anybody") as (page, player):
            await told(page, "names a run")
            await stepped(page, 3)
            assert len(page.notices()) == 1
            page.do("seen", id=page.live["notices"][0]["id"])
            await page.until(lambda: not page.notices())

    asyncio.run(go())


def test_old_runs_are_tidied_but_not_todays_and_not_one_that_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = [kept.create() for _ in range(6)]
    for h in held[1:]:
        h.release()
    kept.tidy(keep=2)
    assert sum(h.folder.exists() for h in held) == 6
    for i, h in enumerate(held):
        for f in (*h.folder.iterdir(), h.folder):
            os.utime(f, (1e9 + i, 1e9 + i))
    kept.tidy(keep=2)
    assert [h.folder.exists() for h in held] == [True, False, False, False, True, True]
    held[0].release()


def test_a_restart_lets_its_old_run_go() -> None:
    async def go() -> None:
        async with opened(settings=SIM, address=True) as (page, player):
            await stepped(page, 2)
            old = player.run
            page.do("restart", changes={"num_blocks": "64"})
            await page.until(lambda: player.run != old)
            free = kept.grab(kept.pages_dir() / old)
            assert free is not None
            free.release()
            assert steps_of(old) == 2

    asyncio.run(go())


def test_no_branch_of_a_family_file_leads_out_of_its_folder(tmp_path: Path) -> None:
    held = kept.create()
    for name in ("../secret", "/etc/passwd", "main/../../x", "", "b", "c1", None, 7):
        write_text(
            kept.family_path(held.folder),
            json.dumps({"shown": name, "members": [{"run": name, "name": "x", "parent": "", "at": 0}]}),
        )
        assert kept.family(held.folder) == {}
        assert kept.shown_branch(held.folder) == kept.MAIN
    held.release()


def test_a_run_that_outgrows_its_file_says_so_once_without_a_path_and_comes_back_up_to_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CBVIZ_AUTOSAVE_BYTES", "12000")

    async def go() -> None:
        async with opened(settings=SIM, address=True) as (page, player):
            run = player.run
            await stepped(page, 30)
            await told(page, "Saving stopped, because")
            assert len(page.notices()) == 1
            page.do("seen", id=page.live["notices"][0]["id"])
            await stepped(page, 33)
            assert not page.notices()
        kept_steps = steps_of(run)
        assert 0 < kept_steps < 30
        async with opened(settings=SIM, address=True, run=run) as (page, _):
            await page.at(kept_steps)

    asyncio.run(go())


def test_a_file_that_cannot_be_written_is_named_to_the_page_without_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def go() -> None:
        monkeypatch.setattr("cbviz.trace.autosave.Autosave._write_beside", full)
        async with opened(settings=SIM, address=True) as (page, _):
            await stepped(page, 2)
            said = " ".join([*page.notices(), *page.last["controls"]["notes"]])
            assert "main.jsonl can't be written (No space left on device)" in said
            assert "cannot write to the run's file (no space left on device). No step is saved" in said
            assert str(tmp_path) not in said

    asyncio.run(go())
