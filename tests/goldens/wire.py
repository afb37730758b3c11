"""Messages of a page that debugs a simulated run: what a scripted page gets, command by command.

Only what a page can see is used. After each command the script waits until the last picture has been
explained, so each command's messages are known to be its own.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any

import cbviz as cb
from cbviz.app.opening import Settings
from cbviz.app.player import Player
from tests.goldens.canonical import plain, split_prose
from tests.runs import specs

QUIET_S = 0.05
"""A command is done when what it should bring is there, and for so long nothing more has come."""
PATIENCE_S = 60.0
TIMED = ("seq", "created", "elapsed_s", "when")
"""Keys whose values are counts or times of this very process."""
LAST_ONLY = ("live", "controls", "family", "breaks")
"""Messages that each tell everything anew: of one command only the last of these counts."""

Message = dict[str, Any]


class Tape:
    """A page that acknowledges each picture and keeps every message."""

    def __init__(self, **player: Any) -> None:
        self.messages: list[Message] = []
        self.heard = time.monotonic()
        self.player = Player(self._get, **player)

    def _get(self, head: Message, buffers: list[bytes]) -> None:
        self.heard = time.monotonic()
        message = plain({k: v for k, v in head.items() if k not in TIMED})
        if buffers and "b" in head:
            message["buffers"] = {
                n: plain(list(array("d" if n == "series" else "I", b)))
                for n, b in zip(head["b"], buffers, strict=True)
            }
        elif buffers:
            message["buffers"] = len(buffers)
        self.messages.append(message)
        if head["type"] == "picture":
            self.player.receive({"type": "ack", "seq": head["seq"]})

    def last(self, kind: str) -> Message:
        return next((m for m in reversed(self.messages) if m["type"] == kind), {})

    def explained(self) -> bool:
        """The page has everything about the moment that it shows."""
        shown, why = self.last("picture"), self.last("why")
        at = (shown.get("step"), shown.get("event"))
        if not shown or (why.get("step"), why.get("event")) != at or self.last("inside").get("step") != at[0]:
            return False
        return at[0] == 0 or self.last("metrics").get("steps") == at[0]

    async def settle(self, what: str, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if holds() and self.explained() and time.monotonic() - self.heard > QUIET_S:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"{what} was not answered; the last messages are {self.messages[-4:]}")


async def _script(tape: Tape, steps: list[tuple[str, Message, Callable[[], bool]]], out: Message) -> None:
    for what, message, holds in steps:
        tape.messages.append({"type": "-"})
        start = len(tape.messages)
        tape.player.receive(message)
        await tape.settle(what, lambda: bool(tape.messages[start:]) and holds())  # noqa: B023
        out[f"{len(out):02} {what}"] = _by_kind(tape.messages[start:], what == "play")


def _by_kind(messages: list[Message], last_only: bool) -> dict[str, list[Message]]:
    """Messages of one command by kind. How a playing run is cut into pictures depends on the clock, so after
    `play` only the kinds count; the `ready` that follows has the page told everything anew.
    """
    kinds: dict[str, list[Message]] = {}
    for m in messages:
        mine = kinds.setdefault(m["type"], [])
        if m["type"] in LAST_ONLY:
            mine.clear()
        if not mine or mine[-1] != m:
            mine.append(m)
    if last_only:
        return {k: [] for k in ("picture", "why", "metrics")} | {"live": kinds["live"]}
    return dict(sorted(kinds.items()))


def _cmd(name: str, /, **more: Any) -> Message:
    return {"type": "cmd", "cmd": name, **more}


async def _debugging(out: Message) -> None:
    """A session of the user's own: step, play, back, fork, break, compare, add, abort, configure, drop."""
    session = cb.Session(
        specs(7), runner="sim", discipline="vllm", max_num_seqs=3, num_blocks=21, block_size=4,
        max_model_len=80, enable_prefix_caching=True,
    )  # fmt: skip
    tape = Tape(settings=Settings("", "sim"), session=session)

    def at(step: int, event: int | None = None) -> Callable[[], bool]:
        return lambda: (tape.last("picture").get("step"), tape.last("picture").get("event")) == (step, event)

    def said(cmd: str) -> Callable[[], bool]:
        return lambda: tape.last("said").get("cmd") == cmd

    def shown(name: str) -> Callable[[], bool]:
        return lambda: tape.last("family").get("name") == name

    def halted() -> bool:
        return tape.last("stop").get("step", -1) > 0 and not tape.last("live")["live"]["playing"]

    def ended() -> bool:
        return not tape.last("live")["live"]["playing"] and bool(tape.last("live")["live"]["banner"])

    def got(kind: str) -> Callable[[], bool]:
        return lambda: any(m["type"] == kind for m in _since_mark(tape))

    try:
        await _script(
            tape,
            [
                ("ready", {"type": "ready"}, at(0)),
                *((f"step {n}", _cmd("step"), at(n)) for n in range(1, 9)),
                ("back", _cmd("back"), at(7)),
                ("seek", _cmd("seek", step=4), at(4)),
                ("event", _cmd("event", by=1), at(5, 1)),
                ("event back", _cmd("event", by=-1), at(4)),
                ("end", _cmd("end"), at(8)),
                ("ask request", _cmd("ask", request="r5"), got("why")),
                ("ask block", _cmd("ask", block=3), got("why")),
                ("account", _cmd("account", on=True), got("account")),
                ("add", _cmd("add", prompt="7 8 9 10", max_tokens=4, n=2), got("live")),
                ("abort", _cmd("abort", id="r2"), got("live")),
                ("configure", _cmd("set", field="max_num_seqs", value="2"), got("said")),
                ("configure wrongly", _cmd("set", field="max_num_seqs", value="no"), got("said")),
                ("step 9", _cmd("step"), at(9)),
                ("watch", _cmd("watch", expression="num_waiting"), said("watch")),
                ("break", _cmd("break", event="finished"), said("break")),
                ("break on a condition", _cmd("break", when="kv_usage > 0.99"), got("breaks")),
                ("break wrongly", _cmd("break", when="nothing > 1"), got("said")),
                ("disable", _cmd("break-set", name="kv_usage > 0.99", enabled=False), got("breaks")),
                ("form of a fork", _cmd("forkform"), got("forkform")),
                ("fork", _cmd("fork", at=6, changes={"policy": "sjf"}, name="short first"), said("fork")),
                ("play", _cmd("play"), halted),
                ("ready after play", {"type": "ready"}, got("picture")),
                ("compare", _cmd("compare", picks=["branch:main", "branch:short first"]), got("compared")),
                ("switch", _cmd("branch", name="main"), shown("main")),
                ("run back", _cmd("run-back"), lambda: bool(got("stop")() or got("said")())),
                ("rename", _cmd("rename", name="short first", new="sjf from 6"), said("rename")),
                ("drop", _cmd("drop", name="sjf from 6"), got("family")),
                (
                    "rewind",
                    _cmd("rewind", step=3),
                    lambda: "again" in str(tape.last("live")["live"]["banner"]),
                ),
                ("restart", _cmd("restart", changes={"policy": "priority"}), got("clear")),
                ("step after restart", _cmd("step"), at(1)),
                ("unknown", _cmd("restart", changes={"policy": "nobody's"}), got("said")),
                ("remove", _cmd("break-remove", name="finished"), got("breaks")),
                ("fast", _cmd("speed", value=0), got("live")),
                ("play", _cmd("play"), ended),
                ("ready after the end", {"type": "ready"}, got("picture")),
            ],
            out,
        )
    finally:
        tape.player.close()


async def _preset(out: Message) -> None:
    """A page that opens a preset itself, restarts with other settings, and resets."""
    tape = Tape(settings=Settings("burst", "sim"))
    at: Callable[[int], Callable[[], bool]] = lambda n: lambda: tape.last("picture").get("step") == n  # noqa: E731
    try:
        await _script(
            tape,
            [
                ("ready", {"type": "ready"}, at(0)),
                ("step", _cmd("step"), at(1)),
                ("step", _cmd("step"), at(2)),
                ("reset", _cmd("reset"), at(0)),
                (
                    "restart",
                    _cmd("restart", changes={"scenario": "preemption", "policy": "sjf"}),
                    lambda: any(m["type"] == "clear" for m in _since_mark(tape)),
                ),
                ("step", _cmd("step"), at(1)),
            ],
            out,
        )
    finally:
        tape.player.close()


def _since_mark(tape: Tape) -> list[Message]:
    mark = max((i for i, m in enumerate(tape.messages) if m["type"] == "-"), default=0)
    return tape.messages[mark + 1 :]


@cache
def session() -> Message:
    """command -> kind -> messages. In an empty cache folder, so that no page of the user's is seen."""
    out: Message = {}
    before = os.environ.get("CBVIZ_CACHE")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["CBVIZ_CACHE"] = folder
        try:
            asyncio.run(_debugging(out))
            asyncio.run(_preset(out))
        finally:
            if before is None:
                del os.environ["CBVIZ_CACHE"]
            else:
                os.environ["CBVIZ_CACHE"] = before
    return out


def names() -> list[str]:
    return ["wire-script", *(f"wire-{kind}" for kind in KINDS)]


KINDS = (
    "picture",
    "live",
    "controls",
    "said",
    "why",
    "inside",
    "metrics",
    "account",
    "family",
    "breaks",
    "stop",
    "forkform",
    "compared",
    "comparedrun",
    "clear",
)


def parts(name: str) -> dict[str, Any]:
    """Of `wire-script` which kinds each command brings, of a kind all its messages."""
    made = session()
    kind = name.removeprefix("wire-")
    if kind == "script":
        return {"kinds": {what: {k: len(v) for k, v in kinds.items()} for what, kinds in made.items()}}
    data, texts = split_prose({what: kinds[kind] for what, kinds in made.items() if kind in kinds})
    return {"messages": data, "texts": texts}


def about(name: str) -> str:
    return "a scripted session of a page"
