"""The run loop against a page without a browser: commands, flow control, inputs while a step runs, errors
where they belong.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cbviz.app import kept, opening
from cbviz.app.opening import Settings
from cbviz.app.player import WINDOW, Player
from cbviz.core.policy import POLICIES
from cbviz.core.ranking import Policy
from cbviz.cost import models
from cbviz.messages import RequestSpec, RunnerOutput, SchedulerOutput
from cbviz.session import Session
from cbviz.trace import Cursor, load
from tests.app.page import Page, assert_equal
from tests.runners.watched import WatchedSim


class FakePage:
    """Answers as the browser does. `acks` False: a page that has stopped drawing."""

    def __init__(self) -> None:
        self.page = Page()
        self.live: dict[str, Any] = {}
        self.fields: dict[str, Any] = {}
        self.said: list[dict[str, Any]] = []
        self.why: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.files: list[bytes] = []
        self.pictures = 0
        self.unacknowledged = 0
        self.acks = True
        self.there = True
        """Answers when its kernel asks whether it is still there."""
        self.last: dict[str, dict[str, Any]] = {}
        """The last message of each type."""
        self.compared: list[Page] = []
        self.player: Player | None = None

    def send(self, m: dict[str, Any], buffers: list[bytes]) -> None:
        kind = m["type"]
        self.last[kind] = m
        if kind == "picture":
            self.pictures += 1
            self.page.read((m, buffers))
            self.seq = m["seq"]
            if self.acks:
                self.ack()
            else:
                self.unacknowledged += 1
        elif kind == "live":
            self.live.update(m["live"])
        elif kind == "controls":
            self.fields = {f["name"]: f for f in m["fields"]}
        elif kind == "here" and self.there:
            assert self.player is not None
            self.player.receive({"type": "here", "n": m["n"]})
        elif kind == "said":
            self.said.append(m)
        elif kind == "why":
            self.why = m
        elif kind == "metrics":
            self.metrics = m
        elif kind == "compared":
            self.compared = []
        elif kind == "comparedrun":
            self.compared.append(Page())
            self.compared[-1].read((m, buffers))
        elif kind == "save":
            self.files.append(buffers[0])

    def notices(self) -> list[str]:
        return [n["text"] for n in self.live.get("notices", [])]

    def ack(self) -> None:
        assert self.player is not None
        threading.Thread(
            target=self.player.receive, args=({"type": "ack", "seq": self.seq},)
        ).start()  # JupyterLab delivers on a thread of its own

    def do(self, cmd: str, **more: Any) -> None:
        assert self.player is not None
        self.player.receive({"type": "cmd", "cmd": cmd, **more})

    async def until(self, holds: Callable[[], Any], what: str = "") -> None:
        for _ in range(2000):
            if holds():
                return
            await asyncio.sleep(0.005)
        raise AssertionError(
            f"never came about: {what or holds}; page at {getattr(self.page, 'step', None)}, live "
            f"{self.live}, said {self.said[-3:]}"
        )

    async def at(self, step: int) -> None:
        await self.until(lambda: getattr(self.page, "step", None) == step, f"step {step}")


@asynccontextmanager
async def opened(
    session: Session | None = None, settings: Settings | None = None, **kw: Any
) -> AsyncIterator[tuple[FakePage, Player]]:
    page = FakePage()
    player = Player(page.send, settings or Settings("article", "sim"), session=session, **kw)
    page.player = player
    player.receive({"type": "ready"})
    try:
        await page.until(lambda: hasattr(page.page, "step"), "the first picture")
        yield page, player
    finally:
        player.close()
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "cache"))


def saved(run: str) -> Path:
    """The file of the first branch of a page's run."""
    return kept.branch_path(kept.pages_dir() / run, kept.MAIN)


class SlowRunner:
    """A simulated runner whose pass waits for `go`, so that a test decides how long a step takes."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.started, self.go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        self.started.set()
        assert self.go.wait(20)
        return self._real.execute(plan)


class BrokenRunner(SlowRunner):
    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        raise RuntimeError("the card fell out")


def slow_session() -> tuple[Session, SlowRunner]:
    s = Session("article", runner="sim")
    slow = SlowRunner(s.engine.runner)
    s.engine.runner = slow
    return s, slow


def test_steps_back_seek_and_reset() -> None:
    async def go() -> None:
        async with opened() as (page, player):
            for n in range(1, 6):
                page.do("step")
                await page.at(n)
            s = player.session
            assert s is not None
            assert_equal(page.page, s.trace, Cursor(5))
            page.do("back")
            await page.at(4)
            assert len(s.trace) == 5
            page.do("step")  # a recorded one first
            await page.at(5)
            assert len(s.trace) == 5
            page.do("seek", step=2)
            await page.at(2)
            assert_equal(page.page, s.trace, Cursor(2))
            page.do("event", by=1)
            await page.until(lambda: page.page.event == 1)
            assert page.page.step == 3
            page.do("event", by=-1)
            await page.until(lambda: page.page.event is None)
            assert page.page.step == 2
            page.do("end")
            await page.at(5)
            await page.until(lambda: page.why.get("step") == 5)
            assert page.why["items"]
            await page.until(lambda: page.metrics.get("steps") == 5)
            page.do("reset")
            await page.at(0)
            assert page.live["num_requests"] == 20

    asyncio.run(go())


def test_play_to_the_end_then_says_so() -> None:
    async def go() -> None:
        async with opened(Session("burst", runner="sim", max_num_seqs=4)) as (page, player):
            page.do("speed", value=0)
            page.do("play")
            await page.until(lambda: page.live.get("banner"), "the end")
            assert "ended" in page.live["banner"]
            assert page.live["playing"] is False
            s = player.session
            assert isinstance(s, Session)
            assert s.done
            assert_equal(page.page, s.trace, s.cursor)

    asyncio.run(go())


def test_a_page_that_stops_drawing_is_not_flooded_and_catches_up() -> None:
    async def go() -> None:
        async with opened() as (page, player):
            page.acks = False
            page.do("speed", value=0)
            page.do("play")
            s = player.session
            assert s is not None
            await page.until(lambda: len(s.trace) > 60 and page.unacknowledged >= WINDOW, "steps go on")
            assert page.unacknowledged == WINDOW
            page.do("pause")
            await page.until(lambda: not page.live["playing"])
            await player.work(lambda: None)  # the step that was under way is done
            assert page.unacknowledged == WINDOW
            page.acks = True
            before = page.pictures
            page.ack()
            await page.at(len(s.trace))
            assert page.pictures - before == 1  # merged
            assert_equal(page.page, s.trace, s.cursor)

    asyncio.run(go())


def test_the_page_answers_while_a_step_runs() -> None:
    async def go() -> None:
        s, slow = slow_session()
        slow.go.set()
        async with opened(s) as (page, _):
            for n in range(1, 9):
                page.do("step")
                await page.at(n)
            slow.go.clear()
            slow.started.clear()
            page.do("play")
            await page.until(slow.started.is_set, "a step is under way")
            page.do("seek", step=3)  # looks back while the step runs
            await page.at(3)
            await page.until(lambda: page.live["playing"] is False, "a seek pauses")
            page.do("add", prompt="one two three", max_tokens=4)
            page.do("seek", step=5)
            await page.at(5)
            assert len(s.trace) == 8
            slow.go.set()
            await page.until(lambda: page.page.steps == 9, "the step came in")
            assert page.page.step == 5  # and did not take the cursor away
            await page.until(
                lambda: any(m.get("cmd") == "add" and m.get("id") for m in page.said), "the prompt was taken"
            )
            rid = next(m["id"] for m in page.said if m.get("cmd") == "add")
            assert page.live["num_requests"] == 21
            page.do("end")
            await page.at(9)
            page.do("step")
            await page.at(10)
            assert rid in page.page.ids

    asyncio.run(go())


def test_two_steps_never_run_at_once() -> None:
    async def go() -> None:
        s, slow = slow_session()
        async with opened(s) as (page, _):
            for _ in range(5):
                page.do("step")
            await page.until(slow.started.is_set)
            assert len(s.trace) == 0
            slow.go.set()
            await page.at(5)
            assert len(s.trace) == 5

    asyncio.run(go())


def test_abort_gives_the_blocks_back() -> None:
    async def go() -> None:
        async with opened() as (page, player):
            page.do("step")
            await page.at(1)
            page.do("add", prompt="hello there", max_tokens=50)
            await page.until(lambda: page.said)
            rid = page.said[-1]["id"]
            page.do("abort", id="r1")
            page.do("step")
            await page.at(2)
            s = player.session
            assert s is not None
            assert s.trace.state().requests["r1"].state == "aborted"
            assert page.page.rows[0]["blocks"] == []
            assert rid in s.trace.state().requests
            page.do("abort", id="nobody")
            await page.until(lambda: any(m.get("error") for m in page.said))
            assert "nobody" in page.said[-1]["error"]

    asyncio.run(go())


def test_several_answers_to_one_prompt() -> None:
    async def go() -> None:
        async with opened(Session(None, runner="sim", max_num_seqs=4)) as (page, player):
            page.do("add", prompt="one two three", max_tokens=4, n=3.0)
            await page.until(lambda: page.said)
            rid = page.said[-1]["id"]
            for n in range(1, 4):
                page.do("step")
                await page.at(n)
            assert page.page.ids == [rid, f"{rid}.1", f"{rid}.2"]
            assert player.session is not None
            r = player.session.trace.state().requests[rid]
            assert r.spec is not None and (r.spec.sampling.n, r.spec.sampling.temperature) == (3, 0.8)
            page.do("add", prompt="one two three", max_tokens=4, n=1)
            await page.until(lambda: len(page.said) == 2)
            page.do("step")
            await page.at(4)
            alone = player.session.trace.state().requests[page.said[-1]["id"]]
            assert alone.spec is not None and (alone.spec.sampling.n, alone.spec.sampling.temperature) == (
                1,
                0.0,
            )

    asyncio.run(go())


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"cmd": "add", "prompt": "   ", "max_tokens": 5}, "empty"),
        ({"cmd": "add", "prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"cmd": "add", "prompt": "a", "max_tokens": 2.5}, "max_tokens"),
        ({"cmd": "add", "prompt": "a", "n": 0}, "n is 0, the least is 1"),
        ({"cmd": "add", "prompt": "a", "n": 1.5}, "n must be a whole number"),
        ({"cmd": "add", "prompt": "a", "n": 99}, "n is 99, but there are"),
        ({"cmd": "add", "prompt": "a", "n": 3, "beams": True}, "beam"),
        ({"cmd": "add", "prompt": "a", "n": 99, "beams": True}, "beam_width is 99, the most is 16"),
        ({"cmd": "set", "field": "max_num_seqs", "value": "0"}, "max_num_seqs is 0, the least is 1"),
        ({"cmd": "set", "field": "max_num_seqs", "value": "many"}, "max_num_seqs"),
        ({"cmd": "set", "field": "policy", "value": "nobody-first"}, "policy"),
        ({"cmd": "set", "field": "num_blocks", "value": "64"}, "restart"),
        ({"cmd": "restart", "changes": {"num_blocks": "1"}}, "num_blocks is 1, the least is 2"),
        ({"cmd": "restart", "changes": {"scenario": "nothing"}}, "scenario"),
    ],
)
def test_a_mistake_is_said_where_it_was_made_and_loses_nothing(message: dict[str, Any], words: str) -> None:
    async def go() -> None:
        async with opened() as (page, player):
            page.do("step")
            await page.at(1)
            s = player.session
            page.do(**message)
            await page.until(lambda: page.said, str(message))
            assert words in page.said[-1]["error"]
            if message["cmd"] != "add":
                assert page.said[-1]["field"] in (message.get("field"), *message.get("changes", {}))
            assert player.session is s
            page.do("step")
            await page.at(2)

    asyncio.run(go())


def test_live_knobs_hold_from_the_next_step_and_stay_through_a_restart() -> None:
    async def go() -> None:
        async with opened() as (page, player):
            page.do("step")
            await page.at(1)
            page.do("set", field="max_num_seqs", value="3")
            await page.until(lambda: page.said)
            assert not page.said[-1]["error"]
            page.do("step")
            await page.at(2)
            s = player.session
            assert isinstance(s, Session)
            assert s.config.max_num_seqs == 3
            page.do("restart", changes={"num_blocks": "64", "enable_prefix_caching": False})
            await page.at(0)
            await page.until(lambda: page.fields["num_blocks"]["value"] == 64)
            new = player.session
            assert isinstance(new, Session)
            assert (new.config.num_blocks, new.config.enable_prefix_caching, new.config.max_num_seqs) == (
                64,
                False,
                3,
            )
            page.do("restart", changes={"scenario": "burst"})
            await page.until(lambda: page.fields["scenario"]["value"] == "burst")
            assert page.fields["max_num_seqs"]["value"] == 4  # the scenario's own

    asyncio.run(go())


def test_a_stuck_run_stops_playing_says_why_and_goes_on_after_a_changed_knob(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Newcomers(Policy):
        """Whoever has run longest loses its blocks: two requests that don't fit together take turns for ever."""

        name = "newcomers"
        static = False

        def rank(self, r: Any, now: float) -> Any:
            return -r.queued_step

    monkeypatch.setitem(POLICIES, "newcomers", Newcomers())

    async def go() -> None:
        specs = [RequestSpec(name, tuple(range(20)), 30, arrival_step=1) for name in ("a", "b")]
        s = Session(
            specs,
            runner="sim",
            policy="newcomers",
            discipline="chunked",
            block_size=4,
            num_blocks=14,
            max_model_len=52,
            enable_prefix_caching=False,
            long_prefill_token_threshold=1,
        )
        async with opened(s) as (page, player):
            page.do("speed", value=0)
            page.do("play")
            await page.until(lambda: page.live.get("bad"), "the run is said to be stuck")
            assert page.live["banner"].startswith(
                "This run is stuck. No request got further than before in the last "
            )
            await page.until(lambda: not page.live["playing"])
            assert not player.playing
            page.do("set", field="policy", value="fcfs")
            page.do("play")
            await page.until(lambda: "ended" in (page.live.get("banner") or ""), "the end")
            assert not page.live["bad"] and all(r.finished for r in s.state().by_index)

    asyncio.run(go())


def test_a_step_that_raises_is_said_and_nothing_is_lost() -> None:
    async def go() -> None:
        s = Session("article", runner="sim")
        async with opened(s) as (page, _):
            page.do("step")
            await page.at(1)
            real = s.engine.runner
            s.engine.runner = BrokenRunner(real)
            page.do("step")
            await page.until(lambda: page.live.get("bad"))
            assert "the card fell out" in page.live["banner"]
            s.engine.runner = real
            page.do("step")
            await page.at(2)
            assert not page.live["banner"]

    asyncio.run(go())


def test_a_new_kernel_reopens_the_run_at_the_same_step() -> None:
    async def go() -> None:
        async with opened(settings=Settings("burst", "sim")) as (page, player):
            run = player.run
            for n in range(1, 13):
                page.do("step")
                await page.at(n)
            page.do("add", prompt="typed by hand", max_tokens=9)
            await page.until(lambda: page.said)
            page.do("step")
            await page.at(13)
            digest = player.session.digest()  # type: ignore[union-attr]
        async with opened(settings=Settings("chat", "sim"), run=run, at_step=7) as (page, player):
            await page.at(7)
            s = player.session
            assert isinstance(s, Session)
            assert len(s.trace) == 13
            assert s.digest() == digest
            assert page.fields["scenario"]["value"] == "burst"
            page.do("end")
            await page.at(13)
            page.do("step")
            await page.at(14)
            assert len(load(saved(run))) == 14

    asyncio.run(go())


def test_a_run_that_cannot_go_on_is_still_there_after_another_reload() -> None:
    async def go() -> None:
        s = Session("burst", runner="sim")
        s.step(6)
        s.trace.header.runner = "somewhere-else"
        home = kept.create()
        run = home.name
        s.trace.save(saved(run))
        home.release()
        for _ in range(2):
            async with opened(settings=Settings("chat", "sim"), run=run, at_step=4) as (page, player):
                assert page.page.step == 4
                assert "recording" in page.live["banner"]
                assert len(player.session.trace) == 6  # type: ignore[union-attr]

    asyncio.run(go())


def test_a_recording_that_cannot_go_on_is_shown_and_offers_to_run_again() -> None:
    async def go() -> None:
        s = Session("burst", runner="sim")
        s.step(9)
        s.trace.header.runner = "somewhere-else"
        recording = opening.reopen(s.trace, None, lambda share, what: None)
        async with opened(recording) as (page, _):  # type: ignore[arg-type]
            await page.at(9)
            assert "recording" in page.live["banner"]
            assert page.live["offer"]["cmd"] == "again"
            page.do("back")
            await page.at(8)
            page.do("step")
            await page.at(9)
            page.do("step")
            page.do("add", prompt="x", max_tokens=3)
            await page.until(lambda: page.said)
            assert "recording" in page.said[-1]["error"]

    asyncio.run(go())


def test_a_session_stepped_from_elsewhere_is_followed() -> None:
    async def go() -> None:
        s = Session("article", runner="sim")
        async with opened(s) as (page, _):
            s.step(3)
            await page.at(3)
            s.seek(1)
            await page.at(1)
            s.rewind(1)
            await page.until(lambda: page.page.steps == 1)
            s.run(max_steps=40)
            await page.at(41)
            assert_equal(page.page, s.trace, s.cursor)

    asyncio.run(go())


def test_a_session_of_ones_own_keeps_its_requests_through_a_restart() -> None:
    async def go() -> None:
        specs = [RequestSpec(f"mine-{i}", (1, 2, 3 + i), 5) for i in range(3)]
        s = Session(specs, runner="sim", max_num_seqs=2)
        async with opened(s) as (page, player):
            page.do("step")
            await page.at(1)
            assert page.fields["scenario"]["value"] == "requests"
            page.do("restart", changes={"num_blocks": "32"})
            await page.at(0)
            page.do("step")
            await page.at(1)
            new = player.session
            assert isinstance(new, Session)
            assert new is not s
            assert (new.config.num_blocks, new.config.max_num_seqs) == (32, 2)
            assert page.page.ids == ["mine-0", "mine-1", "mine-2"]
            assert len(s.trace) == 1  # the one given stays as it was

    asyncio.run(go())


def test_save_gives_the_whole_trace(tmp_path: Path) -> None:
    async def go() -> None:
        async with opened() as (page, player):
            page.do("step")
            await page.at(1)
            page.do("save")
            await page.until(lambda: page.files)
            path = tmp_path / "x.jsonl.gz"
            path.write_bytes(page.files[0])
            assert load(path).records == player.session.trace.records  # type: ignore[union-attr]

    asyncio.run(go())


def test_reload_sends_everything_again() -> None:
    async def go() -> None:
        async with opened() as (page, player):
            for n in range(1, 4):
                page.do("step")
                await page.at(n)
            page.page = Page()
            page.player.receive({"type": "ready"})  # type: ignore[union-attr]
            await page.until(lambda: hasattr(page.page, "step"))
            assert_equal(page.page, player.session.trace, Cursor(3))  # type: ignore[union-attr]

    asyncio.run(go())


def test_prompts_never_become_markup() -> None:
    """Nothing in our scripts writes HTML: text goes in as text."""
    for f in (Path(opening.__file__).parent / "static").glob("*.js"):
        source = f.read_text("utf-8")
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "createContextualFragment",
        ):
            assert word not in source, f"{f.name} uses {word}"


def test_a_type_of_kv_says_what_it_saves_and_costs_where_it_is_chosen() -> None:
    def told(model: str, shown: Session | None = None) -> dict[str, str]:
        row = next(
            r for r in opening.controls(Settings("chat", model), shown) if r["name"] == "kv_cache_dtype"
        )
        assert row["noted"] == ["int8", "int4"]
        return {o[0]: o[2] for o in row["options"]}

    real = told("smollm2")
    assert (
        real["int4"].startswith("6,480 bytes a token, 3.56 x the blocks of float16")
        and "0.0745 nats less likely" in real["int4"]
        and "1,012 positions" in real["int4"]
    )
    assert "99.0 % of places" in real["int8"] and "nothing is lost" in real["float32"]
    other = told("qwen2.5-0.5b")  # its bytes are counted; the quality of another model's words is not its own
    assert (
        "x the blocks of float16" in other["int4"]
        and "not measured for this model" in other["int4"]
        and "nats" not in other["int4"]
    )
    sim = told("sim", Session("chat", runner="sim"))
    assert (
        "bytes a token" in sim["int8"]
        and "Nothing is computed here" in sim["int8"]
        and "nats" not in sim["int8"]
    )


def test_watching_a_step_and_measuring_need_an_engine_that_computes() -> None:
    async def scenario() -> None:
        async with opened() as (page, _):
            page.do("watch-inside")
            await page.until(lambda: any("choose the real model" in m.get("error", "") for m in page.said))
            page.do("calibrate")
            await page.until(lambda: any("time is modelled here" in m.get("error", "") for m in page.said))
            assert page.live["can_watch"] is False and page.live["can_calibrate"] is False

    asyncio.run(scenario())


def test_the_next_step_is_watched_and_told_again_where_the_cursor_stands() -> None:
    async def scenario() -> None:
        s = Session("article", runner=WatchedSim(models.get("smollm2")), max_num_seqs=4)
        s.step(5)
        async with opened(s) as (page, _):
            page.do("seek", step=2)
            await page.until(lambda: page.page.step == 2)
            page.do("watch-inside")
            await page.until(lambda: page.page.step == 6)
            await page.until(lambda: page.last["inside"]["step"] == 6)
            m = page.last["inside"]
            assert m["profile"]["names"] == ["one", "two"] and m["profile"]["total"] == 0.75
            assert m["watched"] == [6]
            page.do("back")
            await page.until(lambda: page.last["inside"]["step"] == 5)
            assert page.last["inside"]["profile"] is None and page.last["inside"]["watched"] == [6]
            assert s.step() is not None and s.trace[-1].profile is None

    asyncio.run(scenario())
