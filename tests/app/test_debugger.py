"""The debugger's commands against a page without a browser: branches, rewind and its undo, breakpoints,
comparison, questions, accounts, reload.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cbviz.app import branches, kept, opening
from cbviz.app.opening import Settings
from cbviz.session import Session
from cbviz.trace import Cursor, compare, reservation, runs, why_block, why_waiting
from cbviz.trace.accounting import SLOT_PARTS, TOKEN_PARTS
from cbviz.trace.explain import explain_event
from tests.app.page import assert_equal
from tests.app.test_player import FakePage, opened


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "cache"))


def names(page: FakePage) -> dict[str, dict[str, Any]]:
    return {b["name"]: b for b in page.last["family"]["branches"]}


async def stepped(page: FakePage, to: int) -> None:
    while (now := page.page.step) < to:
        page.do("step")
        await page.at(now + 1)


async def refused(page: FakePage, cmd: str, words: str, **more: Any) -> None:
    """The command is answered with an error at its control."""
    page.said.clear()
    page.do(cmd, **more)
    await page.until(
        lambda: any(m.get("cmd") == cmd and m.get("error") for m in page.said), f"{cmd} is refused"
    )
    assert words in next(m["error"] for m in page.said if m.get("cmd") == cmd)


async def compared(page: FakePage, *picks: str) -> dict[str, Any]:
    page.last.pop("compared", None)
    page.do("compare", picks=list(picks))
    await page.until(lambda: "compared" in page.last and len(page.compared) == len(picks), "the comparison")
    return page.last["compared"]


def test_a_fork_with_another_policy_parts_and_is_compared() -> None:
    async def go() -> None:
        async with opened(settings=Settings("preemption", "sim")) as (page, player):
            await stepped(page, 12)
            page.do("forkform")
            await page.until(lambda: "forkform" in page.last)
            fields = {f["name"]: f for f in page.last["forkform"]["fields"]}
            assert page.last["forkform"]["at"] == 12
            assert (fields["policy"]["value"], fields["policy"]["open"]) == ("fcfs", True)
            assert fields["num_blocks"]["open"] is fields["modelled_device"]["open"] is True
            page.do("fork", at=12, changes={"policy": "sjf"})
            await page.until(lambda: page.last["family"]["name"] == "policy=sjf")
            main = player.session.parent  # type: ignore[union-attr]
            assert isinstance(main, Session)
            assert (names(page)["policy=sjf"]["parent"], names(page)["policy=sjf"]["at"]) == ("main", 12)
            assert page.fields["policy"]["value"] == "sjf"
            assert "sjf" in page.live["title"]
            assert "KV blocks computed again" in page.live["banner"]
            await stepped(page, 20)
            assert (len(main.trace), len(player.session.trace)) == (12, 20)  # type: ignore[union-attr]
            for name in ("main", "policy=sjf"):
                page.do("finish", name=name)
                await page.until(lambda n=name: names(page)[n]["done"], f"{name} has ended")
            told = await compared(page, "branch:main", "branch:policy=sjf")
            branch = player.session
            assert isinstance(branch, Session)
            truth = compare(main.trace, branch.trace, ("main", "policy=sjf"))
            pair = told["pairs"][0]
            assert pair["tokens_equal"] is True
            assert pair["proof"] == truth.proof
            assert pair["parting"]["step"] == truth.parting.step  # type: ignore[union-attr]
            assert [c["text"] for c in pair["causes"]] == list(map(str, truth.causes))
            assert pair["causes"]
            assert [r["steps"] for r in told["runs"]] == [len(main.trace), len(branch.trace)]
            for drawn, t in zip(page.compared, (main.trace, branch.trace), strict=True):
                assert_equal(drawn, t, t.last)
            makespan = next(r for r in told["rows"] if r["key"] == "makespan_s")
            assert makespan["ratios"] == [truth.metrics["makespan_s"][2]]
            assert told["by_time"][0]["there"][-1] <= len(branch.trace)

    asyncio.run(go())


def test_a_fork_with_no_change_equals_its_parent_and_stands_equal_so_far_before() -> None:
    async def go() -> None:
        async with opened(settings=Settings("burst", "sim")) as (page, player):
            await stepped(page, 9)
            page.do("finish", name="main")
            await page.until(lambda: names(page)["main"]["done"])
            page.do("fork", at=9, name="again")
            await page.until(lambda: page.last["family"]["name"] == "again")
            told = await compared(page, "branch:main", "branch:again")
            assert told["pairs"][0]["so_far"] == 9
            assert told["pairs"][0]["partial"]
            assert told["pairs"][0]["parting"] is None
            page.do("finish", name="again")
            await page.until(lambda: names(page)["again"]["done"])
            told = await compared(page, "branch:main", "branch:again")
            assert told["pairs"][0]["equal"] is True
            assert "partial" not in told["pairs"][0]
            page.do("branch", name="main")
            await page.until(lambda: page.last["family"]["name"] == "main")
            assert player.session.name == "main"  # type: ignore[union-attr]

    asyncio.run(go())


def test_a_fork_adds_and_removes_requests() -> None:
    async def go() -> None:
        async with opened(settings=Settings("preemption", "sim")) as (page, player):
            await stepped(page, 5)
            page.do(
                "fork",
                at=5,
                changes={"max_num_seqs": "9"},
                prompt="one more prompt",
                max_tokens=7,
                n=2,
                remove="r2",
                name=" mine ",
            )
            await page.until(lambda: page.last["family"]["name"] == "mine")
            await stepped(page, 6)
            s = player.session
            assert isinstance(s, Session)
            assert s.config.max_num_seqs == 9
            assert s.state().requests["r2"].finish_reason == "abort"
            assert [
                r.max_tokens for r in s.state().by_index if r.spec and r.spec.prompt == "one more prompt"
            ] == [7, 7]
            await refused(
                page, "fork", "num_blocks is 3, which leaves 2 to give out", at=6, changes={"num_blocks": "3"}
            )
            await refused(page, "fork", "the least is 1", at=6, changes={"max_num_seqs": "0"})
            await refused(page, "fork", "exists already", at=6, name="mine")
            await refused(page, "fork", "not in this run", at=99)
            assert len(names(page)) == 2
            page.do("fork", at=0, changes={"num_blocks": "64", "modelled_device": "NVIDIA T4"})
            await page.until(lambda: len(names(page)) == 3)
            assert player.session.config.num_blocks == 64  # type: ignore[union-attr]
            assert page.page.step == 0
            assert page.page.steps == 0

    asyncio.run(go())


def test_rewind_keeps_what_it_drops_and_undo_brings_it_back() -> None:
    async def go() -> None:
        async with opened(settings=Settings("preemption", "sim")) as (page, player):
            await stepped(page, 45)
            s = player.session
            assert isinstance(s, Session)
            digest, lines = s.digest(), list(s.trace.records)
            await refused(page, "rewind", "stands at step 45 already")
            page.do("seek", step=20)
            await page.at(20)
            page.do("rewind")
            await page.until(lambda: page.page.steps == 20)
            await page.until(lambda: "main to step 45" in names(page))
            assert names(page)["main to step 45"]["live"] is False
            assert page.live["offer"] == {"text": "Undo", "cmd": "branch", "name": "main to step 45"}
            await page.until(lambda: page.last["metrics"]["steps"] == 20)
            page.do("set", field="max_num_seqs", value="2")
            await stepped(page, 30)
            assert len(s.trace) == 30
            page.do("branch", name="main to step 45")
            await page.at(45)
            back = player.session
            assert isinstance(back, Session)
            assert back is not s
            assert back.digest() == digest
            assert back.trace.records == lines
            assert_equal(page.page, back.trace, Cursor(45))
            await stepped(page, 46)
            assert names(page)["main to step 45"]["parent"] == "main"

    asyncio.run(go())


def test_branches_are_renamed_and_dropped() -> None:
    async def go() -> None:
        async with opened(settings=Settings("burst", "sim")) as (page, player):
            await stepped(page, 4)
            page.do("fork", at=2, name="a")
            await page.until(lambda: page.last["family"]["name"] == "a")
            page.do("fork", at=1, name="b")
            await page.until(lambda: page.last["family"]["name"] == "b")
            assert names(page)["b"]["parent"] == "a"
            page.do("rename", name="a", new=" the first  one ")
            await page.until(lambda: "the first one" in names(page))
            assert names(page)["b"]["parent"] == "the first one"
            await refused(page, "rename", "exists already", name="b", new="main")
            await refused(page, "rename", "empty", name="b", new="  ")
            await refused(page, "drop", "can't be dropped", name="main")
            page.do("drop", name="the first one")  # with what comes from it, which is shown
            await page.until(lambda: list(names(page)) == ["main"])
            await page.until(lambda: page.last["family"]["name"] == "main")
            assert player.session.name == "main"  # type: ignore[union-attr]
            assert page.page.steps == 4

    asyncio.run(go())


def test_one_engine_too_many_is_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        num_bytes = 12_000_000

    monkeypatch.setattr(branches, "MOST_ENGINES", 2)
    monkeypatch.setattr("cbviz.runners.sim.SimRunner.kv", Pool(), raising=False)

    async def go() -> None:
        async with opened(settings=Settings("burst", "sim")) as (page, _):
            await stepped(page, 3)
            page.do("fork", at=3, name="a")
            await page.until(lambda: page.last["family"]["name"] == "a")
            await refused(
                page,
                "fork",
                (
                    "2 branches have a live engine of the real model, the most is 2: each keeps a KV pool of "
                    "its own, 12 MB here, 24 MB together"
                ),
                at=3,
            )
            page.do("drop", name="a")
            await page.until(lambda: list(names(page)) == ["main"])
            page.do("fork", at=3, name="c")
            await page.until(lambda: page.last["family"]["name"] == "c")

    asyncio.run(go())


def test_breakpoints_stop_a_run_on_and_back() -> None:
    async def go() -> None:
        async with opened(settings=Settings("preemption", "sim")) as (page, player):
            await refused(page, "run-on", "no breakpoint is on")
            page.do("break", event="preempted")
            await page.until(lambda: [b["name"] for b in page.last["breaks"]["items"]] == ["preempted"])
            page.do("run-on")
            await page.until(lambda: page.last.get("stop", {}).get("step", -1) > 0, "a stop")
            first = page.last["stop"]
            s = player.session
            assert isinstance(s, Session)
            await page.at(first["step"])
            await page.until(lambda: not page.live["playing"])
            assert len(s.trace) == first["step"]
            assert first["names"] == ["preempted"]
            assert "was preempted for" in first["sentences"][0]["text"]
            page.do("speed", value=0)
            page.do("play")  # on to the next one
            await page.until(lambda: page.last["stop"]["step"] > first["step"])
            second = page.last["stop"]["step"]
            page.do("run-back")
            await page.at(first["step"])
            assert len(s.trace) == second
            await refused(page, "run-back", f"no breakpoint holds before step {first['step']}")
            page.do("seek", step=0)
            await page.at(0)
            page.do("play")  # over recorded steps
            await page.at(first["step"])
            await page.until(lambda: not page.live["playing"])
            page.do("break-set", name="preempted", enabled=False)
            await page.until(lambda: not page.last["breaks"]["items"][0]["enabled"])
            page.do("break", request="r3", event="finished")
            page.do("break", kv_above=0.9)
            page.do("break", block=4)
            page.do("break", when="num_waiting >= 2")
            await page.until(lambda: len(page.last["breaks"]["items"]) == 5)
            assert [b["name"] for b in page.last["breaks"]["items"]][1:] == [
                "finished r3",
                "KV above 90 %",
                "block 4",
                "num_waiting >= 2",
            ]
            for wish, words in (
                ({"when": "foo > 1"}, "foo is not known"),
                ({"event": "melted"}, "did you mean"),
                ({"kv_above": 3}, "below 1"),
                ({"block": 4}, "already"),
                ({"when": "__import__('os')"}, "can't be watched"),
                ({"when": "lambda r, s: True"}, "--allow-code"),
                ({}, "needs an event"),
            ):
                if "melted" in str(wish):
                    words = "it must be one of"
                await refused(page, "break", words, **wish)
            for b in [b["name"] for b in page.last["breaks"]["items"]]:
                page.do("break-remove", name=b)
            await page.until(lambda: not page.last["breaks"]["items"])
            assert s.breakpoints == []

    asyncio.run(go())


def test_a_predicate_where_code_is_allowed_and_one_that_fails() -> None:
    async def go() -> None:
        async with opened(settings=Settings("burst", "sim"), allow_code=True) as (page, player):
            page.do("break", when="lambda record, state: record.step == 7")
            await page.until(lambda: page.last["breaks"]["items"])
            page.do("speed", value=0)
            page.do("play")
            await page.until(lambda: page.last.get("stop", {}).get("step") == 7)
            page.do("break", when="lambda record, state: 1 / 0")
            await page.until(lambda: len(page.last["breaks"]["items"]) == 2)
            page.do("step")
            await page.until(lambda: "ZeroDivisionError" in (page.live.get("banner") or ""))
            assert len(player.session.trace) == 8  # type: ignore[union-attr]  # the step itself is kept
            await page.until(lambda: page.last["breaks"]["items"][1]["error"])
            page.do("step")
            await page.at(9)

    asyncio.run(go())


def test_breakpoints_and_watches_hold_in_every_branch() -> None:
    async def go() -> None:
        async with opened(settings=Settings("preemption", "sim")) as (page, player):
            await stepped(page, 12)
            page.do("watch", expression="num_waiting * 2")
            page.do("watch", expression="r1.num_output_tokens")
            page.do("break", event="preempted")
            await page.until(lambda: page.last["breaks"]["items"])
            page.do("fork", at=12, changes={"policy": "sjf"})
            await page.until(lambda: page.last["family"]["name"] == "policy=sjf")
            page.do("run-on")
            await page.until(lambda: page.last.get("stop", {}).get("step", -1) > 0)
            at = page.last["stop"]["step"]
            await page.until(lambda: page.why.get("step") == at and page.why["watched"])
            state = player.session.trace.state(at)  # type: ignore[union-attr]
            assert page.why["watched"] == [
                ["num_waiting * 2", str(2 * len(state.waiting))],
                ["r1.num_output_tokens", str(len(state.requests["r1"].output_token_ids))],
            ]
            await refused(page, "watch", "watched already", expression="num_waiting * 2")
            page.do("watch-remove", name="num_waiting * 2")
            await page.until(lambda: len(page.why["watched"]) == 1)
            page.do("restart", changes={"num_blocks": "40"})
            await page.until(lambda: page.fields["num_blocks"]["value"] == 40)
            await page.until(lambda: page.last["family"]["name"] == "main")
            assert [b["name"] for b in page.last["breaks"]["items"]] == ["preempted"]
            assert list(names(page)) == ["main"]

    asyncio.run(go())


def test_each_event_in_words_as_the_cursor_walks() -> None:
    async def go() -> None:
        s = Session("preemption", runner="sim")
        s.run(max_steps=36)
        async with opened(s) as (page, _):
            record = s.trace.record(36)
            n = len(record.events)
            for k in range(n - 1, 0, -1):
                page.do("event", by=-1)
                await page.until(lambda k=k: page.why.get("event") == k, f"event {k}")
                told = explain_event(s.trace, record, k - 1)
                assert page.why["moment"] == {
                    "kind": told.kind,
                    "text": str(told),
                    "ids": list(told.request_ids),
                }
                assert page.why["num_events"] == n
                assert page.page.event == k
                assert_equal(page.page, s.trace, Cursor(36, k))

    asyncio.run(go())


def test_questions_about_a_request_and_a_block() -> None:
    async def go() -> None:
        s = Session("preemption", runner="sim")
        s.run(max_steps=36)
        waiting = s.state().waiting[0]
        async with opened(s) as (page, _):
            page.do("ask", request=waiting)
            await page.until(lambda: page.why.get("about"))
            truth = list(map(str, why_waiting(s.trace, 36, waiting).sentences))
            assert [x["text"] for x in page.why["about"]["items"]][: len(truth)] == truth
            page.do("seek", step=30)  # the question stays, the answer follows the cursor
            await page.until(lambda: page.why.get("step") == 30 and page.why.get("about"))
            assert [x["text"] for x in page.why["about"]["items"]] == list(
                map(str, why_waiting(s.trace, 30, waiting).sentences)
            )
            page.do("ask", block=5)
            await page.until(lambda: page.why.get("about", {}).get("block") == 5)
            assert [x["text"] for x in page.why["about"]["items"]] == list(
                map(str, why_block(s.trace, 30, 5).sentences)
            )
            page.do("ask", block=10_000)
            await page.until(lambda: "about" not in page.why)
            page.do("ask", request="nobody")
            await page.until(lambda: page.why.get("about"))
            assert "has not arrived" in page.why["about"]["items"][0]["text"]
            page.do("ask")
            await page.until(lambda: "about" not in page.why)

    asyncio.run(go())


def test_accounts_are_those_of_the_record_and_close() -> None:
    async def go() -> None:
        s = Session("preemption", runner="sim", discipline="static-padded", max_num_batched_tokens=None)
        s.run(max_steps=60)
        async with opened(s) as (page, _):
            assert "account" not in page.last
            page.do("account", on=True)
            await page.until(lambda: page.last.get("account", {}).get("reservation"))
            a, record = page.last["account"], s.trace.record(60)
            assert a["tokens"] == [
                ["total", record.tokens.total],
                *[[p, getattr(record.tokens, p)] for p in TOKEN_PARTS],
            ]
            assert a["slots"] == [
                ["total", record.slots.total],
                *[[p, getattr(record.slots, p)] for p in SLOT_PARTS],
            ]
            for part in (
                a["tokens"],
                a["slots"],
                *([list(x) for x in a["run"][k]] for k in ("tokens", "slots")),
            ):
                assert part[0][1] == sum(v for _, v in part[1:])
            assert sum(v for _, v in a["run"]["tokens"][1:]) == sum(r.tokens.total for r in s.trace)
            r = reservation(s.trace)
            assert [row[0] for row in a["reservation"]["rows"]] == list(r.steps)
            assert all(abs(sum(row[2]) - 1) < 1e-9 for row in a["reservation"]["rows"])

    asyncio.run(go())


def test_a_new_kernel_finds_the_branches_breakpoints_and_watches() -> None:
    async def go() -> None:
        async with opened(settings=Settings("preemption", "sim")) as (page, player):
            await stepped(page, 15)
            page.do("break", event="evicted")
            page.do("break", kv_above=0.5)
            page.do("break-set", name="KV above 50 %", enabled=False)
            page.do("watch", expression="kv_usage")
            page.do("fork", at=12, changes={"policy": "sjf"}, name="short first")
            await page.until(lambda: page.last["family"]["name"] == "short first")
            await stepped(page, 18)
            page.do("seek", step=14)
            await page.at(14)
            page.do("rewind")
            await page.until(lambda: "short first to step 18" in names(page))
            run, digest = player.run, player.session.digest()  # type: ignore[union-attr]
            before = {n: (b["parent"], b["at"], b["steps"]) for n, b in names(page).items()}
            player.submit(lambda: None)
            await asyncio.get_running_loop().run_in_executor(
                player._pool, lambda: None
            )  # what is to be written down has been
        async with opened(settings=Settings("chat", "sim"), run=run) as (page, player):
            await page.until(lambda: page.last["family"]["name"] == "short first")
            assert {n: (b["parent"], b["at"], b["steps"]) for n, b in names(page).items()} == before
            assert player.session.digest() == digest  # type: ignore[union-attr]
            assert [(b["name"], b["enabled"]) for b in page.last["breaks"]["items"]] == [
                ("evicted", True),
                ("KV above 50 %", False),
            ]
            assert page.last["breaks"]["watches"] == ["kv_usage"]
            told = await compared(page, "branch:main", "branch:short first")
            assert [r["steps"] for r in told["runs"]] == [15, 14]
            page.do("branch", name="main")
            await page.at(15)
            assert page.fields["policy"]["value"] == "fcfs"
            await stepped(page, 16)

    asyncio.run(go())


def test_a_watch_that_costs_too_much_is_refused_and_one_that_comes_to_is_dropped_with_a_reason() -> None:
    async def go() -> None:
        async with opened(settings=Settings("preemption", "sim")) as (page, player):
            await stepped(page, 2)
            await refused(page, "watch", "round takes", expression="round(10, -99999999999)")
            await refused(page, "break", "round takes", when="round(10, -99999999999 * step) > 1")
            page.do("watch", expression="round(1, -100 * step)")
            page.do("watch", expression="step")
            await page.until(lambda: page.last["breaks"]["watches"] == ["round(1, -100 * step)", "step"])
            await stepped(page, 4)
            await page.until(lambda: page.last["breaks"]["watches"] == ["step"])
            await page.until(page.notices)
            assert page.notices()[0].startswith(
                "At step 4 a watch was dropped: 'round(1, -100 * step)': round takes"
            )
            await page.until(lambda: page.why.get("watched") == [["step", "4"]])

    asyncio.run(go())


def test_a_costly_watch_that_was_written_down_is_dropped_with_a_message_when_the_page_is_loaded_again() -> (
    None
):
    async def go() -> None:
        async with opened(settings=Settings("preemption", "sim")) as (page, player):
            await stepped(page, 4)
            run = player.run
        written = {
            "members": [],
            "breakpoints": [
                {"on": {"when": "round(10, -99999999999) > 1"}, "enabled": True},
                {"on": {"event": "preempted"}, "enabled": True},
            ],
            "watches": ["round(10, -99999999999)", "round(1, -100 * step)", "kv_usage"],
        }
        kept.family_path(kept.pages_dir() / run).write_text(json.dumps(written), "utf-8")
        async with opened(settings=Settings("preemption", "sim"), run=run) as (page, player):
            await page.until(lambda: page.last.get("breaks", {}).get("watches") == ["kv_usage"])
            assert [b["name"] for b in page.last["breaks"]["items"]] == ["preempted"]
            await page.until(lambda: len(page.notices()) == 3)
            assert all("was dropped" in text for text in page.notices())
            assert any(
                "A watch was dropped: 'round(10, -99999999999)': round takes" in text
                for text in page.notices()
            )
            await stepped(page, 5)

    asyncio.run(go())


def test_saved_runs_of_the_command_line_can_be_compared_with_and_private_ones_not() -> None:
    async def go() -> None:
        s = Session("burst", runner="sim", policy="sjf")
        s.run()
        s.save(runs.new_path("burst-sjf"))
        private = kept.create()
        s.save(private.path(kept.MAIN))
        async with opened(settings=Settings("burst", "sim")) as (page, _):
            await stepped(page, 5)
            page.do("files")
            await page.until(lambda: "files" in page.last)
            files = page.last["files"]["files"]
            assert len(files) == 1
            assert "burst-sjf" in files[0]["label"]
            told = await compared(page, "branch:main", f"file:{files[0]['id']}")
            assert told["runs"][1]["steps"] == len(s.trace)
            await refused(page, "compare", "no saved run", picks=["branch:main", f"file:{private.name}"])
            await refused(page, "compare", "no saved run", picks=["branch:main", "file:../../secret"])
            await refused(page, "compare", "pick 2 to 4", picks=["branch:main"])
            await refused(page, "compare", "no branch", picks=["branch:main", "branch:nobody"])

    asyncio.run(go())


def test_a_recording_has_no_engine_to_fork_or_rewind() -> None:
    async def go() -> None:
        s = Session("burst", runner="sim")
        s.step(9)
        s.trace.header.runner = "somewhere-else"
        recording: Any = opening.reopen(s.trace, None, lambda share, what: None)
        async with opened(recording) as (page, _):
            await refused(page, "fork", "This is a recording", at=3)
            await refused(page, "rewind", "This is a recording", step=3)
            page.do("break", event="finished")
            page.do("seek", step=0)
            await page.at(0)
            page.do("run-on")
            await page.until(lambda: page.last.get("stop", {}).get("step", -1) > 0 or page.live.get("banner"))
            assert names(page) == {
                "recording": {
                    "name": "recording",
                    "parent": "",
                    "at": 0,
                    "steps": 9,
                    "shown": True,
                    "live": False,
                    "done": True,
                    "root": True,
                }
            }

    asyncio.run(go())


def test_breakpoints_of_a_cell_are_told_too() -> None:
    async def go() -> None:
        s = Session("preemption", runner="sim", num_blocks=33, enable_prefix_caching=False)
        async with opened(s) as (page, _):
            s.break_on("preempted")
            await page.until(lambda: page.last["breaks"]["items"])
            s.run()
            await page.until(lambda: page.last.get("stop", {}).get("names") == ["preempted"])
            first = page.last["stop"]["step"]
            assert len(s.trace) == first
            await page.at(first)
            s.run(max_steps=100)
            s.run_back()
            await page.until(lambda: page.page.step == page.last["stop"]["step"] < len(s.trace))
            other = s.fork(3, name="from a cell")
            await page.until(lambda: "from a cell" in names(page))
            page.do("branch", name="from a cell")
            await page.at(3)
            assert page.page.steps == len(other.trace) == 3

    asyncio.run(go())


def test_a_fork_takes_along_what_no_step_has_taken_yet() -> None:
    async def go() -> None:
        async with opened(settings=Settings("preemption", "sim")) as (page, player):
            await stepped(page, 12)
            page.do("set", field="max_num_seqs", value="5")
            page.do("add", prompt="waiting for the next step", max_tokens=6)
            await page.until(lambda: any(m.get("cmd") == "add" for m in page.said))
            mine = next(m["id"] for m in page.said if m.get("cmd") == "add")
            page.do("abort", id="r1")
            page.do("forkform")
            await page.until(lambda: "forkform" in page.last)
            assert (
                next(f["value"] for f in page.last["forkform"]["fields"] if f["name"] == "max_num_seqs") == 5
            )
            page.do("fork", at=12, changes={"policy": "sjf"}, name="child")
            await page.until(lambda: page.last["family"]["name"] == "child")
            await stepped(page, 13)
            s = player.session
            assert isinstance(s, Session)
            assert (s.config.max_num_seqs, s.config.policy) == (5, "sjf")
            assert s.state().requests["r1"].finish_reason == "abort"
            assert s.trace.specs[mine].prompt == "waiting for the next step"
            page.do("branch", name="main")
            await page.at(12)
            await stepped(page, 13)
            assert player.session.config.max_num_seqs == 5  # type: ignore[union-attr]
            page.do(
                "fork", at=3, changes={}, name="early"
            )  # before all that: it repeats what was done when it comes to it
            await page.until(lambda: page.last["family"]["name"] == "early")
            page.do("seek", step=3)
            await stepped(page, 13)
            early = player.session
            assert isinstance(early, Session)
            assert compare(early.trace, early.parent.trace).equal  # type: ignore[union-attr]
            assert early.config.max_num_seqs == 5

    asyncio.run(go())
