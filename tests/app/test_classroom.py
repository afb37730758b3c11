"""What a class needs of the run loop: back to the link's start, code only where it is allowed, recorded
tokens where there is no room for the model.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cbviz import recordings
from cbviz.app import light, opening
from cbviz.app.allowed import Allowed
from cbviz.app.opening import Settings
from cbviz.core.policy import POLICIES
from cbviz.session import Session
from tests.app.test_player import FakePage, opened

POLICY = "@cb.policy\ndef typed_last_first(r, now):\n    return -r.num_prompt_tokens\n"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "cache"))


async def answer(page: FakePage, cmd: str) -> dict[str, Any]:
    """The next thing said about `cmd`."""
    await page.until(lambda: any(m.get("cmd") == cmd for m in page.said), cmd)
    found = next(m for m in page.said if m.get("cmd") == cmd)
    page.said.remove(found)
    return found


def test_code_is_refused_unless_the_server_allows_it() -> None:
    async def go() -> None:
        async with opened(settings=Settings("chat", "sim")) as (page, player):
            await page.until(lambda: page.live.get("open") and not page.live.get("loading"))
            page.do("policy", source=POLICY)
            said = await answer(page, "policy")
            assert "--allow-code" in said["error"]
            assert "typed_last_first" not in POLICIES
            assert page.live["allow_code"] is False
            assert player.session is not None
            assert not player.session.trace.records

    asyncio.run(go())


def test_a_typed_policy_ranks_from_the_next_step_on() -> None:
    async def go() -> None:
        async with opened(settings=Settings("chat", "sim"), allow_code=True) as (page, player):
            await page.until(lambda: page.live.get("open") and not page.live.get("loading"))
            assert page.live["allow_code"] is True
            page.do("policy", source=POLICY)
            assert (await answer(page, "policy"))["policy"] == "typed_last_first"
            page.do("step")
            await page.at(1)
            assert isinstance(player.session, Session)
            assert player.session.config.policy == "typed_last_first"
            for wrong, words in (
                ("def", "line 1: invalid syntax"),
                ("x = 1\ny = 1 / 0", "line 2: ZeroDivisionError"),
                ("x = 1", "registers no policy"),
                ("raise SystemExit", "SystemExit"),
                ("@cb.policy\ndef p(r, now):\n    return r.nothing", "p"),
                ("#" * 20_001, "the limit is 20,000"),
            ):
                page.do("policy", source=wrong)
                assert words in (await answer(page, "policy"))["error"]
                assert player.session.config.policy == "typed_last_first"

    try:
        asyncio.run(go())
    finally:
        POLICIES.pop("typed_last_first", None)


def test_back_to_the_links_start() -> None:
    """Other settings, another scenario, prompts of one's own: all gone, and the link's settings are there
    again.
    """

    async def go() -> None:
        async with opened(settings=Settings("chat", "sim", {"seed": 3, "max_num_seqs": 2}), address=True) as (
            page,
            player,
        ):
            await page.until(lambda: page.live.get("open") and not page.live.get("loading"))
            first = player.session
            assert isinstance(first, Session)
            wanted = (first.workload, first.config, player.run)
            page.do("set", field="policy", value="sjf")
            page.do("add", prompt="one more", max_tokens=3)
            page.do("step")
            await page.at(1)
            page.do("restart", changes={"scenario": "burst", "max_num_seqs": 5})
            await page.until(
                lambda: isinstance(player.session, Session) and player.session.workload_name == "burst"
            )
            page.do("lesson")
            await page.until(
                lambda: isinstance(player.session, Session) and player.session.workload_name == "chat"
            )
            again = player.session
            assert isinstance(again, Session)
            assert (again.workload, again.config, len(again.trace)) == (*wanted[:2], 0)
            assert player.run != wanted[2]  # a run of its own: the one before stays as a file
            page.do("lesson")
            await page.until(lambda: player.session is not again)

    asyncio.run(go())


def test_light_mode_begins_with_recorded_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(light, "free_bytes", lambda: 0.3e9)
    assert light.reason() == "300 MB of memory are free, the real model wants 750"
    settings, _, _ = Allowed(Settings("chat", "tape")).link("scenario=preemption&num_blocks=40")
    assert (settings.scenario, settings.model) == ("preemption", "tape")
    assert Allowed(Settings("chat", "tape")).link("scenario=burst")[0].model == "sim"
    titles = {o[0]: o[1] for o in opening.controls(settings, None)[0]["options"]}
    assert {k for k, v in titles.items() if v.endswith("(recorded)")} == set(recordings.NAMES)

    async def go() -> None:
        async with opened(settings=settings, note="Light mode.") as (page, player):
            await page.until(lambda: page.live.get("open") and not page.live.get("loading"))
            page.do("step")
            await page.at(1)
            assert page.live["title"][:2] == ["smollm2, recorded tokens", "NVIDIA H100 SXM, modelled"]
            assert isinstance(player.session, Session)
            assert player.session.config.num_blocks == 40
            assert player.session.text("r1")
            page.do("add", prompt="hello", max_tokens=3)
            assert "no model that could answer" in (await answer(page, "add"))["error"]
            page.do("restart", changes={"scenario": "burst"})
            await page.until(
                lambda: any(
                    "no recording" in str(m.get("error", "")) and m.get("field") == "scenario"
                    for m in page.said
                )
            )
            assert player.session.workload_name == "preemption"
            run, steps = player.run, len(player.session.trace)
        async with opened(settings=settings, run=run) as (page, player):  # loaded again
            await page.until(lambda: page.live.get("open") and not page.live.get("loading"))
            assert isinstance(player.session, Session)
            assert (player.settings.model, player.session.workload_name, len(player.session.trace)) == (
                "tape",
                "preemption",
                steps,
            )
            page.do("step")
            await page.at(steps + 1)

    asyncio.run(go())
