"""A link and a message of the page open no file, fetch nothing and run no code: both pass one list, by value,
and every mistake is said.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbviz.app import allowed
from cbviz.app.allowed import Allowed
from cbviz.app.opening import Settings
from cbviz.config import CONFIG_FIELDS, ConfigError
from cbviz.model import hub
from cbviz.session import Session
from tests.app.test_player import opened

HOST = Settings("preemption", "sim")
TEXT_FIELDS = [n for n, f in CONFIG_FIELDS.items() if "str" in str(f.type)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "cache"))


def hostile(tmp_path: Path) -> list[str]:
    """Values that name a file, a folder, something to fetch, or code; in pairs that differ only in whether
    they exist.
    """
    there = tmp_path / "there.jsonl"
    there.write_text('{"prompt": "secret"}\n')
    return [
        str(there),
        str(tmp_path / "nope.jsonl"),
        str(tmp_path),
        "some/repo",
        "./own.gguf",
        "../../etc/passwd",
        "/etc/passwd",
        "__import__('os')",
        "os:system",
        "https://a.example/x",
        "file:///etc/passwd",
        "\u2028x",
        "</script>",
        "a" * 5000,
        "~",
        "C:\\x",
    ]


def test_every_text_field_has_choices_or_a_list() -> None:
    assert allowed.unlisted() == []


@pytest.mark.parametrize("name", ["scenario", "model", *TEXT_FIELDS])
@pytest.mark.parametrize("alone", [True, False])
def test_a_hostile_value_is_refused_by_link_and_message_and_the_refusal_tells_nothing_of_files(
    name: str, alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_up(*args: Any, **kw: Any) -> Any:
        raise AssertionError("a value of the page was looked up")

    asked = Allowed(HOST, alone)
    said = set()
    for value in hostile(tmp_path):
        monkeypatch.setattr(hub, "resolve", looked_up)
        _, problems = asked.sift(HOST, {name: value})
        assert len(problems) == 1
        assert problems[0].startswith(f"{name} is ")
        assert len(problems[0]) < 1200
        said.add(problems[0].split("it must be one of ")[1].split(" (did you mean")[0])
        with pytest.raises(ConfigError):
            asked.change(HOST, {name: value})
    assert len(said) == 1  # the same words whatever lies on the disk


async def refusal(page: Any, cmd: str, hidden: str, **more: Any) -> str:
    """What the page is told, without the value that it sent."""
    page.said.clear()
    page.do(cmd, **more)
    await page.until(lambda: any(m.get("error") for m in page.said), f"{cmd} {more}")
    return str(next(m["error"] for m in page.said if m.get("error"))).replace(hidden, "VALUE")


def test_messages_of_the_page_pass_the_list_too(tmp_path: Path) -> None:
    there = hostile(tmp_path)[:2]

    async def go() -> None:
        async with opened(settings=HOST, alone=False) as (page, player):
            session = player.session
            for changes in (
                {"scenario": "V"},
                {"model": "V"},
                {"draft_model": "V", "speculative": "draft-model"},
                {"policy": "V"},
                {"device": "V"},
            ):
                refusals = set()
                for value in there:
                    real = {k: value if v == "V" else v for k, v in changes.items()}
                    refusals.add(await refusal(page, "restart", value, changes=real))
                    refusals.add(
                        await refusal(
                            page,
                            "fork",
                            value,
                            at=0,
                            changes={k: v for k, v in real.items() if k in CONFIG_FIELDS}
                            or {"policy": value},
                        )
                    )
                assert all("it must be one of" in r for r in refusals), refusals
            for value in there:
                assert "it must be one of" in await refusal(page, "set", value, field="policy", value=value)
            assert player.session is session

    asyncio.run(go())


def test_what_the_host_named_is_allowed_and_its_own_values_stay() -> None:
    host = Settings("/data/mine.jsonl", "/models/own.gguf", {"draft_model": "/models/small.gguf"})
    asked = Allowed(host)
    for changes in (
        {"scenario": host.scenario},
        {"model": host.model},
        {"draft_model": "/models/small.gguf"},
        {"policy": "sjf"},
        {"scenario": "chat"},
        {"model": "sim"},
        {"modelled_device": "NVIDIA T4"},
        {"speculative": "ngram"},
        {"victim": ""},
        {"scenario": ""},
    ):
        assert asked.sift(host, changes)[1] == []
    _, problems = asked.sift(host, {"model": "nothing"})
    assert "/models" not in problems[0]
    assert (
        "smollm2" not in Allowed(HOST).models()
    )  # not on this machine, and a stranger's page may not have it fetched
    assert "smollm2" in Allowed(HOST, alone=True).models()


def test_a_link_says_all_that_is_wrong_with_the_nearest_right_name_and_does_the_rest() -> None:
    settings, place, problems = Allowed(HOST).link(
        "scenario=burst&max_num_seq=4&polcy=sjf&num_blocks=1&seed=x&policy=sfj&enable_prefix_caching=maybe&block_size=8&layout=presentr&step=-1"
    )
    assert (settings.scenario, settings.config, place) == ("burst", {"block_size": 8}, {})
    text = "\n".join(problems)
    for words in (
        "unknown parameter 'max_num_seq'; did you mean 'max_num_seqs'?",
        "unknown parameter 'polcy'; did you mean 'policy'?",
        "num_blocks is 1, the least is 2",
        "seed must be int, got 'x'",
        "policy is 'sfj'",
        "did you mean 'sjf'?",
        "enable_prefix_caching must be bool, got 'maybe'",
        "did you mean 'presenter'?",
        "step is '-1'",
    ):
        assert words in text
    assert len(problems) == 8


def test_keys_that_other_software_adds_are_no_mistakes() -> None:
    assert all(allowed.IGNORED.values())
    query = (
        "&".join(f"{k}=1" for k in allowed.IGNORED)
        + "&utm_source=mail&utm_id=3&vscodeBrowserReqId=7&scenario=chat"
    )
    settings, _, problems = Allowed(HOST).link(query)
    assert (settings.scenario, problems) == ("chat", [])


KEYS = st.sampled_from(["scenario", "model", "run", "layout", *CONFIG_FIELDS]) | st.text(max_size=8)
VALUES = st.text(max_size=12) | st.sampled_from(["sjf", "4", "on", "chat"])


@given(st.dictionaries(KEYS, VALUES))
def test_any_link_gives_settings_that_pass_or_a_sentence(changes: dict[str, str]) -> None:
    from urllib.parse import urlencode

    settings, place, problems = Allowed(HOST).link(urlencode(changes, errors="replace"))
    assert settings.scenario in ("preemption", *allowed.PRESETS, "")
    assert set(place) <= {"run", "step"}
    assert all((p and "\n" not in p.replace("\\n", "")) or p for p in problems)
    again, wrong = Allowed(HOST).sift(HOST, settings.config)
    assert wrong == []
    assert again == settings.config


def test_python_says_all_that_is_wrong_at_once() -> None:
    with pytest.raises(ConfigError) as wrong_names:
        Session("article", runner="sim", max_num_seq=4, polcy="sjf", num_blocks=0, policy="fsfc")
    lines = str(wrong_names.value).splitlines()
    assert [line[:24] for line in lines] == [
        "unknown field 'max_num_s",
        "unknown field 'polcy'; d",
        "num_blocks is 0, the lea",
        "policy is 'fsfc', it mus",
    ]


def test_the_page_is_told_each_mistake_at_its_control() -> None:
    async def go() -> None:
        async with opened(settings=HOST) as (page, _):
            page.do("restart", changes={"num_blocks": "1", "block_size": "0", "scenario": "nothing"})
            await page.until(lambda: len([m for m in page.said if m.get("error")]) == 3)
            assert {m["field"] for m in page.said} == {"num_blocks", "block_size", "scenario"}

    asyncio.run(go())
