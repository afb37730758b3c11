"""A page's messages are checked for shape, size and rate before anything is done for them."""

from __future__ import annotations

from typing import Any

import pytest

from cbviz.app.inbox import MOST_ADDS, MOST_CHARACTERS, Inbox


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        "x",
        7,
        {},
        {"type": 7},
        {"type": ["cmd"]},
        {"type": "ack"},
        {"type": "ack", "seq": "1"},
        {"type": "ack", "seq": True},
        {"type": "ack", "seq": -1},
        {"type": "ack", "seq": 10**400},
        {"type": "ack", "seq": 1.5},
        {"type": "cmd"},
        {"type": "cmd", "cmd": {}},
        {"type": "cmd", "cmd": "add", "prompt": "a" * (MOST_CHARACTERS + 1)},
        {"type": "cmd", "cmd": "x", "a": [{"b": "a" * (MOST_CHARACTERS + 1)}]},
    ],
)
def test_a_message_of_another_shape_is_refused_in_words(message: Any) -> None:
    problem = Inbox().problem(message)
    assert problem is not None
    assert problem.endswith(".")


@pytest.mark.parametrize(
    "message",
    [
        {"type": "ready"},
        {"type": "ack", "seq": 0},
        {"type": "cmd", "cmd": "step"},
        {"type": "cmd", "cmd": "add", "prompt": "a" * MOST_CHARACTERS},
        {"type": "here", "n": 3},
        {"type": "error", "msg": "x"},
    ],
)
def test_what_the_page_sends_is_taken(message: dict[str, Any]) -> None:
    assert Inbox().problem(message) is None


def test_requests_are_added_at_a_bounded_rate_and_a_second_later_again() -> None:
    now = [0.0]
    inbox = Inbox(clock=lambda: now[0])
    add = {"type": "cmd", "cmd": "add", "prompt": "x"}
    answers = [inbox.problem(add) for _ in range(MOST_ADDS + 5)]
    assert answers[:MOST_ADDS] == [None] * MOST_ADDS
    assert all("in one second" in str(a) for a in answers[MOST_ADDS:])
    now[0] = 1.01
    assert inbox.problem(add) is None
