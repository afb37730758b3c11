"""The frame of `cbviz bench techniques`, with techniques made for the occasion: no figure is asserted but
those that are handed in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cbviz.bench import techniques as bench
from cbviz.cli import main
from cbviz.config import ConfigError
from cbviz.messages import RequestSpec, Sampling
from tests.bench.test_engine import made

GOOD = '''"""A technique that pays. Second sentence."""
from cbviz.bench.techniques import Row, counted, measured, same_tokens

def measure(ctx):
    ask = ctx.article(share=0.02, num_requests=3)
    one, eight = ctx.session(ask, max_num_seqs=1, precision="exact", num_blocks=64), ctx.session(ask, precision="exact", num_blocks=64)
    won = ctx.contest({"one": one, "eight": eight})
    yield Row("3 requests", "eight seats against one", measured(won.ratio("one", "eight"), "x as fast"), counted(12345678, "bytes more"), same_tokens(one, eight), note="a note")
    yield Row("none", "nothing", None, None, bench_check())

def bench_check():
    from cbviz.bench.techniques import Check
    return Check("chi-square 3.1, p = 0.4", True)
'''
BROKEN = '''"""Breaks in the middle."""
from cbviz.bench.techniques import Check, Row, modelled

def measure(ctx):
    yield Row("first", "a against b", modelled(0.81, "x as fast"), None, Check("7 of 9 tokens equal", False))
    raise ValueError("no room")
    yield
'''


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three techniques in place of the real ones: good, broken, and one that cannot be imported."""
    for name, text in (
        ("good", GOOD),
        ("broken", BROKEN),
        ("absent", "import nothing_of_that_name"),
        ("_helper", ""),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(bench, "__path__", [str(tmp_path)])
    yield
    for name in [m for m in sys.modules if m.startswith(f"{bench.__name__}.")]:
        del sys.modules[name]
        bench.__dict__.pop(name.rpartition(".")[2], None)


@pytest.mark.usefixtures("fakes")
def test_one_failure_does_not_lose_the_others() -> None:
    told: list[tuple[int, int, str]] = []
    r = bench.run(model=made(), quick=True, progress=lambda *a: told.append(a))
    assert [x["technique"] for x in r["rows"]] == ["broken", "good", "good"]
    assert {f["technique"]: f["error"] for f in r["failed"]} == {
        "absent": "ModuleNotFoundError: No module named 'nothing_of_that_name'",
        "broken": "ValueError: no room",
    }
    assert r["failed"][1]["where"].endswith("broken.py:6") and r["titles"] == {
        "broken": "Breaks in the middle",
        "good": "A technique that pays. Second sentence",
    }
    assert not r["holds"] and json.loads(json.dumps(r)) == r
    good = r["rows"][1]
    assert good["check"]["holds"] and good["benefit"]["kind"] == "measured" and good["benefit"]["value"] > 0
    assert told[0] == (0, 3, "absent") and (2, 3, "good: eight, round 1") in told and told[-1][0] == 3
    for width in (60, 100, 180, 400):
        text = bench.table(r, width)
        assert max(map(len, text.splitlines())) <= max(100, min(180, width)), width
        whole = " ".join(text.split())
        for part in (
            "DOES NOT HOLD: 7 of 9",
            "ValueError: no room",
            "12,345,678",
            "(counted)",
            "0.81 x as fast",
            "(modelled)",
            "chi-square 3.1",
            "a note",
        ):
            assert all(word in whole for word in part.split()), part


@pytest.mark.usefixtures("fakes")
def test_only_some_by_name() -> None:
    assert bench.names() == ["absent", "broken", "good"]
    assert bench.pick([]) == bench.names() and bench.pick(["good", "good"]) == ["good"]
    with pytest.raises(ConfigError, match="technique is 'god', it must be one of absent, broken, good"):
        bench.pick(["god"])
    r = bench.run(["good"], model=made(), quick=True)
    assert r["holds"] and not r["failed"] and [x["technique"] for x in r["rows"]] == ["good"] * 2


@pytest.mark.usefixtures("fakes")
def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bench.run
    monkeypatch.setattr(bench, "run", lambda only, **k: whole(only, **{**k, "model": made()}))

    def call(*args: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as e:
            main(["bench", "techniques", *args])
        return e.value.code, *capsys.readouterr()

    code, out, _ = call("--only", "good", "--quick")
    assert not code and "good: A technique that pays" in out and "quick: the figures are rough" in out
    code, out, _ = call("--quick", "--json")
    assert code == 1 and len(json.loads(out)["rows"]) == 3
    code, out, err = call("--only", "god")
    assert code == 2 and not out and "technique is 'god'" in err


def test_contenders_in_turn_and_ratios_of_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    clock = [0.0]
    monkeypatch.setattr(bench, "perf_counter", lambda: clock[0])

    def spending(name: str, *seconds: float) -> Callable[[], int]:
        left = list(seconds)

        def call() -> int:
            log.append(name)
            clock[0] += left.pop(0)
            return len(left)

        return call

    c = bench.Context(made()).contest({"a": spending("a", 100, 4, 9, 5), "b": spending("b", 100, 2, 3, 1)})
    assert log == ["a", "b"] * 4 and c.seconds == {"a": [4, 9, 5], "b": [2, 3, 1]}
    assert c.median("a") == 5 and c.ratio("a", "b") == 3 and c.results == {"a": 0, "b": 0}


def test_tokens_are_compared_at_their_places() -> None:
    ctx = bench.Context(made(), seed=1, quick=True)
    greedy = [RequestSpec(i, (5, 6, 7), 6, arrival_step=0, sampling=Sampling(ignore_eos=True)) for i in "ab"]
    warm = [
        RequestSpec(i, (5, 6, 7), 6, arrival_step=0, sampling=Sampling(ignore_eos=True, temperature=5.0))
        for i in "ab"
    ]
    sessions = [ctx.session(x, precision="exact", num_blocks=16) for x in (greedy, greedy, warm, greedy[:1])]
    for s in sessions:
        s.run()
    assert bench.same_tokens(sessions[0], sessions[1]) == bench.Check("12 of 12 tokens equal", True)
    assert not bench.same_tokens(sessions[0], sessions[2]).holds
    assert bench.same_tokens(sessions[3], sessions[0]) == bench.Check("6 of 12 tokens equal", False)
    with pytest.raises(ConfigError, match="Made has no tokenizer"):
        ctx.text("words", 3)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.8437, "x as fast", "1.84 x as fast (measured)"),
        (2.0, "x", "2 x (measured)"),
        (12345.6, "MB", "12,346 MB (measured)"),
        (0.0123, "nats", "0.0123 nats (measured)"),
    ],
)
def test_figures_read_well(value: float, unit: str, text: str) -> None:
    assert str(bench.measured(value, unit)) == text


def test_real_techniques_have_the_frames_shape() -> None:
    for name in bench.names():
        title, measure = bench._load(name)
        assert title and len(title) < 100 and callable(measure), name


@pytest.mark.parametrize(
    ("name", "num"), [("contiguous", 3), ("parallel", 2), ("speculative", 3), ("swap", 4)]
)
def test_real_techniques_on_a_made_model(name: str, num: int) -> None:
    """Of any vocabulary; what must be equal is equal, and every row has a figure."""
    r = bench.run([name], model=made(), quick=True)
    assert r["holds"], r
    assert len(r["rows"]) == num and all(x["benefit"]["value"] > 0 for x in r["rows"])
    assert name in bench.table(r)


def test_invariance_on_a_made_model() -> None:
    r = bench.run(["invariance"], model=made(), quick=True)
    assert r["holds"], r
    assert [x["setting"] for x in r["rows"]] == ["3 requests, the compiled pass", "3 requests, plain torch"]
    assert all(
        x["check"]["text"].endswith("bit for bit as alone") and x["cost"]["value"] > 0 for x in r["rows"]
    )
