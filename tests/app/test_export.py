"""The exported page holds the run: read back by the page's own modules under node, at every step, inside
steps, forwards and backwards.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cbviz as cb
from cbviz.app import assets, export
from cbviz.app.wire import Wire, block_words, told
from cbviz.messages import RequestSpec
from cbviz.trace import Cursor, Trace
from cbviz.trace.accounting import summary
from cbviz.trace.explain import Sentence, explain_event
from cbviz.trace.schema import TraceError
from tests.conftest import absent
from tests.runs import run

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> ]]> "
    "<!-- \u2028 \U0001f600 &amp; \\u003c"
)
READER = Path(__file__).with_name("export_page.mjs")


@pytest.fixture(scope="module")
def node() -> str:
    found = shutil.which("node")
    if found is None:
        absent("no node on this machine (Debian: apt-get install nodejs)")
    assert found is not None
    return found


def read(node: str, page: Path, asked: list[Any]) -> dict[str, Any]:
    done = subprocess.run(
        [node, str(READER), str(page)], input=json.dumps(asked), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_drawn(drawn: dict[str, Any], trace: Trace) -> None:
    cursor = Cursor(drawn["step"], drawn["event"])
    state = trace.state(cursor)
    assert drawn["requests"] == {
        r.request_id: {
            "state": r.state,
            "computed": max(0, r.num_computed_tokens),
            "cached": r.num_cached_tokens,
            "outputs": len(r.output_token_ids),
            "preemptions": r.num_preemptions,
            "wait": r.wait_reason,
            "end": r.finish_reason,
            "status": r.status,
            "blocks": r.block_ids,
            "text": "".join(r.output_texts)
            if r.output_texts
            else "".join(f" {t}" for t in r.output_token_ids),
        }
        for r in state.by_index
    }
    assert drawn["words"] == [w for b in range(state.num_blocks) for w in block_words(state, b)], cursor
    assert (drawn["waiting"], drawn["running"]) == (state.waiting, state.running)
    record = trace.record(cursor.step) if cursor.step else None
    assert [c[:3] for c in drawn["chunks"]] == (
        [[c.request_id, c.start, c.num_tokens] for c in record.chunks] if record else []
    )
    assert drawn["pad"] == (record.num_padding_tokens if record else 0)
    assert drawn["config"]["policy"] == state.config["policy"]
    assert drawn["whyStep"] == cursor.step
    assert drawn["why"] == list(map(told, cb.explain(trace, cursor.step)))
    assert drawn["numEvents"] == (len(record.events) if record else 0)
    assert drawn["moment"] == (
        told(explain_event(trace, record, cursor.event - 1)) if record and cursor.event else None
    )
    live = Wire().message(trace, cursor)  # what a kernel would have sent
    assert live is not None
    head, buffers = live
    assert drawn["marks"] == list(memoryview(buffers[head["b"].index("marks")]).cast("I"))
    assert drawn["config"] == head["config"]
    assert drawn["experts"] == head.get("experts")


def heavy() -> Trace:
    """500 steps of 32 requests at once, with preemptions."""
    rng = random.Random(0)
    requests = [
        RequestSpec(
            f"r{i + 1}",
            tuple(rng.randrange(1000, 9000) for _ in range(rng.randrange(40, 400))),
            rng.randrange(150, 320),
            arrival_step=1 if i < 40 else 1 + (i - 40) * 8,
            prompt="Tell me what you know of rivers and lakes, please. " * 8,
        )
        for i in range(64)
    ]
    s = cb.Session(
        requests, runner="sim", discipline="chunked", max_num_seqs=32, num_blocks=600, block_size=16
    )
    s.step(500)
    return s.trace


@pytest.mark.slow
def test_500_steps_of_32_requests_are_under_3_mb(node: str, tmp_path: Path) -> None:
    trace = heavy()
    assert len(trace) == 500
    assert max(len(r.chunks) for r in trace) == 32
    assert cb.metrics(trace)["num_preemptions"] > 0
    page = export.export_html(trace, tmp_path / "deep" / "run.html")
    size = page.stat().st_size
    assert size < 3_000_000, size
    assert list(page.parent.iterdir()) == [page]
    back = read(
        node,
        page,
        [[n, None] for n in (1, 2, 3, 250, 499, 500, 499, 64, 65, 63, 0, 201)]
        + [[n, k] for n, k in ((400, 7), (400, 8), (3, 1), (2, 1))],
    )
    for drawn in back["drawn"]:
        assert_drawn(drawn, trace)
    final = back["drawn"][6]
    assert final["metricSteps"] == 500
    assert final["metrics"] == {k: v for k, v in cb.metrics(trace).items() if isinstance(v, (int, float))}
    middle = back["drawn"][4]
    assert (middle["metricSteps"], middle["metrics"]["output_tokens"]) == (
        250,
        cb.metrics(trace, 250)["output_tokens"],
    )
    assert back["segments"] == [[[s.step, s.code] for s in mine] for mine in trace.segments]
    assert [len(column) for column in back["series"]] == [500] * len(back["series"])


@pytest.mark.parametrize("discipline", ["static-padded", "paged", "chunked", "vllm"])
def test_every_step_and_every_event(node: str, tmp_path: Path, discipline: str) -> None:
    trace = run(
        discipline=discipline,
        num_blocks=17,
        enable_prefix_caching=True,
        at={6: ("abort", "r2"), 9: ("configure", {"policy": "priority"})},
    )
    page = export.export_html(trace, tmp_path / "run.html", step=0)
    cursors = [[n, None] for n in range(1, len(trace) + 1)] + [
        [r.step, k] for r in trace for k in range(1, len(r.events))
    ][:400]
    mixed = random.Random(1).sample(cursors, 60)
    back = read(node, page, cursors + mixed)
    assert len(back["drawn"]) == 1 + len(cursors) + 60
    assert (back["drawn"][0]["step"], back["drawn"][0]["requests"]) == (0, {})
    for asked, drawn in zip(cursors + mixed, back["drawn"][1:]):
        assert [drawn["step"], drawn["event"]] == asked
        assert_drawn(drawn, trace)
    assert back["kinds"][1 : len(trace) + 1] == ["delta"] * len(
        trace
    )  # a step on redraws what changed, not all


def test_its_keys_move_as_the_kernel_s_do(node: str, tmp_path: Path) -> None:
    trace = run(max_steps=400)
    page = export.export_html(trace, tmp_path / "run.html", step=3)
    n, k = len(trace), len(trace.record(4).events)
    commands: list[tuple[dict[str, Any], list[int | None]]] = [
        ({"cmd": "step"}, [4, None]),
        ({"cmd": "event", "by": -1}, [4, k - 1]),
        ({"cmd": "event", "by": 1}, [4, None]),
        ({"cmd": "event", "by": 1}, [5, 1]),
        ({"cmd": "back"}, [5, None]),
        ({"cmd": "back"}, [4, None]),
        ({"cmd": "event", "by": -1}, [4, k - 1]),
        ({"cmd": "step"}, [4, None]),
        ({"cmd": "end"}, [n, None]),
        ({"cmd": "step"}, [n, None]),
        ({"cmd": "event", "by": 1}, [n, None]),
        ({"cmd": "seek", "step": -5}, [0, None]),
        ({"cmd": "back"}, [0, None]),
        ({"cmd": "event", "by": -1}, [0, None]),
        ({"cmd": "seek", "step": n + 9}, [n, None]),
        ({"cmd": "reset"}, [0, None]),
        ({"cmd": "add", "prompt": "x"}, [0, None]),
    ]
    back = read(node, page, [c for c, _ in commands])
    assert [[d["step"], d["event"]] for d in back["drawn"][1:]] == [at for _, at in commands]
    for drawn in back["drawn"]:
        assert_drawn(drawn, trace)
    inside = back["drawn"][4]
    assert (inside["whyStep"], inside["metricSteps"]) == (5, 4)


def test_accounts_are_those_of_the_trace(node: str, tmp_path: Path) -> None:
    trace = run(discipline="static-padded")
    page = export.export_html(trace, tmp_path / "run.html", step=2)
    back = read(
        node,
        page,
        [
            {"cmd": "account", "on": True},
            {"cmd": "seek", "step": 7},
            {"cmd": "account", "on": False},
            {"cmd": "seek", "step": 9},
        ],
    )
    assert back["drawn"][0]["account"] is None
    for drawn, step in zip(back["drawn"][1:], (2, 7, 7, 7)):  # not asked for, it is not sent
        a, record, sums = drawn["account"], trace.record(step), summary(trace, step)
        assert a["step"] == step
        assert dict(a["tokens"]) == {p: getattr(record.tokens, p) for p, _ in a["tokens"]}
        assert dict(a["slots"]) == {p: getattr(record.slots, p) for p, _ in a["slots"]}
        assert (dict(a["run"]["tokens"]), dict(a["run"]["slots"])) == (sums["tokens"], sums["slot_steps"])
        assert a["run"]["steps"] == step
    assert sum(r.tokens.padded for r in trace) > 0
    made = cb.reservation(trace)
    assert back["drawn"][2]["account"]["reservation"]["rows"][0][2] == list(
        made.shares[next(iter(made.steps))].values()
    )


TEXTS = [
    "r1 takes 1 token",
    "0.05 s and 144.8 µs",
    "1,234,007 tokens",
    "007",
    "12345678901234567890",
    "٣ and 3",
    "",
    "5",
    "a5b05c0d00",
    "-3 to +4",
    "</script>\u2028\x00\U0001f600",
    "1.",
    ".1",
    "r1 takes 9 token",
    "r1 takes 2 token",
]


def test_experts_of_a_mixture_are_in_the_page(node: str, tmp_path: Path) -> None:
    """Load of the step and of the run up to it, at every step forwards and back, inside one, and where
    nothing was computed.
    """
    trace = Trace(run().header)
    rng = random.Random(1)
    for r in list(run())[:12]:
        trace.append(
            msgspec.structs.replace(
                r,
                expert_load=None
                if r.step == 5
                else [[rng.randrange(9) for _ in range(4)], [], [rng.randrange(9) for _ in range(4)]],
            )
        )
    page = export.export_html(trace, tmp_path / "run.html", step=0)
    asked: list[Any] = [[n, None] for n in (1, 2, 5, 6, 12, 3)] + [[8, 1]]
    got = read(node, page, asked)["drawn"]
    for drawn in got[1:]:
        assert_drawn(drawn, trace)
    assert (
        got[1]["experts"]["load"] == [(trace.record(1).expert_load or [])[i] for i in (0, 2)]
        and got[3]["experts"] is None
    )
    assert got[5]["experts"]["sum"] == [
        [sum((r.expert_load or [[0] * 4] * 3)[i][e] for r in trace) for e in range(4)] for i in (0, 2)
    ]


def test_sentences_come_out_as_they_went_in(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [
        Sentence(("step", "waits")[i % 2], text, ["r1", "nobody", "r3", "r2"][: i % 5])
        for i, text in enumerate(TEXTS)
    ]
    monkeypatch.setattr("cbviz.app.wire.explain", lambda trace, step: said[: 2 * step])
    back = read(
        node,
        export.export_html(run(), tmp_path / "run.html", step=4),
        [[1, None], [20, None], [0, None], [3, 1]],
    )
    for drawn in back["drawn"]:
        assert drawn["why"] == list(map(told, said[: 2 * drawn["step"]]))


def test_words_that_look_like_markup(node: str, tmp_path: Path) -> None:
    requests = [
        RequestSpec(HOSTILE, (5, 6, 7), 3, prompt=HOSTILE),
        RequestSpec("lone", (5,), 2, prompt="half a pair: \ud800 end"),
    ]
    s = cb.Session(requests, runner="sim", num_blocks=16, block_size=4, max_model_len=32)
    s.run()
    s.trace.header.notes.append(HOSTILE)
    page = export.export_html(s.trace, tmp_path / "run.html", title=HOSTILE)
    text = page.read_text("utf-8")
    assert "owned'</script>" not in text
    assert "<img" not in text
    assert text.count("<script") == text.count("</script>") == 3
    assert "<title>&lt;/script&gt;" in text
    back = read(node, page, [[1, None]])
    assert back["ids"] == [HOSTILE, "lone"]
    assert back["info"][0]["prompt"] == HOSTILE
    assert back["info"][1]["prompt"] == "half a pair: \ufffd end"


def test_it_says_what_it_is_and_asks_nobody(tmp_path: Path) -> None:
    s = cb.Session("burst", runner="sim", max_num_seqs=4)
    s.step(10)
    text = export.export_html(s.trace, tmp_path / "a.html").read_text("utf-8")
    about = re.search(r"<footer.*</footer>", text)
    assert about
    assert "10 steps, recorded by cbviz" in about[0]
    assert s.trace.header.created[:10] in about[0]
    assert "times are modelled (NVIDIA H100 SXM): lower bounds, not a measurement" in about[0]
    assert "<dt>max_num_seqs</dt><dd>4</dd>" in about[0]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert "unsafe-eval" not in policy[1]
    assert "default-src 'none'" in policy[1]
    rest = re.sub(r'<script id="[^<]*</script>', "", text)
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", rest) == []
    assert not re.search(r"<link|@import|\bsrc=", rest)


def test_a_file_s_folder_is_nobody_s_business(tmp_path: Path) -> None:
    trace = run()
    trace.header.workload = "secret/folder/mine.jsonl"
    text = export.export_html(trace, tmp_path / "a.html").read_text("utf-8")
    assert "<title>mine.jsonl: a recorded run, cbviz</title>" in text
    about = re.search(r"<footer.*</footer>", text)
    assert about
    assert "secret" not in about[0]
    assert b"mine.jsonl" in export.pack(trace)
    assert b"secret" not in export.pack(trace)


def test_a_run_again_is_the_same_page(tmp_path: Path) -> None:
    trace = run()
    assert (
        export.export_html(trace, tmp_path / "a.html").read_bytes()
        == export.export_html(trace, tmp_path / "b.html").read_bytes()
    )


def test_figures_of_a_long_run_are_fewer_and_end_with_the_last() -> None:
    trace = run()
    _, names, at = export._figures(trace, 10)
    assert at[-1] == len(trace)
    assert 1 < len(at) < len(trace)
    assert len({b - a for a, b in zip(at, at[1:])}) == 1
    assert "output_throughput" in names


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no steps"):
        export.export_html(Trace(), tmp_path / "x.html")
    with pytest.raises(IndexError, match=r"steps 0\.\."):
        export.export_html(run(), tmp_path / "x.html", step=9999)
    assert list(tmp_path.iterdir()) == []


def test_the_linked_module_is_valid(node: str, tmp_path: Path) -> None:
    linked = tmp_path / "export.mjs"
    linked.write_text(assets.export_js(), "utf-8")
    done = subprocess.run([node, "--check", str(linked)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
