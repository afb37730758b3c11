"""`cbviz run`, `show` and `export`: what they print, what they keep, and how they stop."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cbviz as cb
from cbviz.cli import terminal
from cbviz.disciplines import DISCIPLINES
from cbviz.runners.base import RunnerError
from cbviz.runners.sim import SimRunner
from cbviz.trace import runs
from tests.cli.conftest import Call
from tests.runners.watched import WatchedSim

ROOT = Path(__file__).resolve().parents[2]


def test_json_is_the_session_s_own(cbviz: Call, cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run.jsonl"
    r = cbviz(
        "run", "--runner", "sim", "--workload", "article", "--set", "max_num_seqs=4", "--out", out, "--json"
    )
    assert r.code == 0
    d = r.json
    s = cb.Session("article", runner="sim", max_num_seqs=4)
    s.run()
    assert d["tokens"] == {i: s.request(i).output_token_ids for i in s.request_ids}
    assert sum(map(len, d["tokens"].values())) == 2160
    assert d["metrics"] == cb.metrics(s.trace)
    assert (d["steps"], d["clock"], d["stopped"], d["ties"]) == (581, "modelled", False, [])
    assert d["config"] == s.config.to_dict()
    assert d["finish_reasons"] == {i: s.request(i).finish_reason for i in s.request_ids}
    assert cb.compare(cb.load(d["trace"]), s.trace).equal
    assert Path(d["trace"]) == out
    assert "{" not in r.err


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_every_discipline(cbviz: Call, cache: Path, discipline: str) -> None:
    d = cbviz("run", "--runner", "sim", "--discipline", discipline, "--json").json
    assert d["metrics"]["num_finished"] == 20
    assert d["metrics"]["output_tokens"] == 2160
    assert d["config"]["discipline"] == discipline


def test_watched_steps_are_those_that_were_named(
    cbviz: Call, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = cbviz("run", "--runner", "sim", "--profile-step", "3")
    assert refused.code == 2 and "computes nothing that could be watched" in refused.err
    monkeypatch.setattr("cbviz.runners.sim.SimRunner", WatchedSim)
    out = tmp_path / "run.jsonl"
    r = cbviz(
        "run",
        "--runner",
        "sim",
        "--profile-step",
        "5",
        "--profile-step",
        "3",
        "--profile-step",
        "9999",
        "--out",
        out,
        "--json",
    )
    assert r.code == 0 and r.json["metrics"]["num_finished"] == 20
    assert "so step 9999 was not watched" in r.err
    assert [x.step for x in cb.load(out) if x.profile is not None] == [3, 5]
    assert "INSIDE THE STEP (measured: a clock)" in cbviz("show", out, "--step", "5").out


def test_words_say_whose_time(cbviz: Call, cache: Path) -> None:
    r = cbviz("run", "--runner", "sim", "--workload", "chat")
    assert r.code == 0
    assert "times are modelled (NVIDIA H100 SXM): lower bounds, not a measurement" in r.out
    assert "measured" not in r.out.replace("not a measurement", "")
    assert "max_num_batched_tokens=128" in r.err  # the preset's settings are named


def test_a_preset_shows_its_point_and_the_user_wins(cbviz: Call, cache: Path) -> None:
    d = cbviz("run", "--runner", "sim", "--workload", "preemption", "--json").json
    assert d["config"]["num_blocks"] == 33
    assert d["metrics"]["num_preemptions"] > 0
    d = cbviz("run", "--runner", "sim", "--workload", "preemption", "--set", "num_blocks=256", "--json").json
    assert d["config"]["num_blocks"] == 256
    assert d["metrics"]["num_preemptions"] == 0
    static = cbviz("run", "--runner", "sim", "--workload", "burst", "--discipline", "static", "--json")
    assert static.json["config"]["max_num_batched_tokens"] == static.json["config"]["max_model_len"]
    assert "raised" not in static.err


def test_seed_holds_for_workload_and_tokens(cbviz: Call, cache: Path) -> None:
    one, two, again = (
        cbviz("run", "--runner", "sim", "--workload", "chat", "--seed", seed, "--json").json
        for seed in (1, 2, 1)
    )
    assert one["config"]["seed"] == 1
    assert one["tokens"] == again["tokens"] != two["tokens"]


def test_runs_are_kept_and_the_newest_is_shown(
    cbviz: Call, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "KEEP", 3)
    assert "no run is kept" in cbviz("show").err
    explorer = runs.folder() / "private.jsonl"
    explorer.parent.mkdir(parents=True, exist_ok=True)  # looking at what is kept makes no folder
    explorer.write_text("the explorer's")
    os.utime(explorer, (1, 1))
    for seats in range(2, 7):
        last = cbviz("run", "--runner", "sim", "--set", f"max_num_seqs={seats}", "--json").json["trace"]
    assert len(list(runs.folder().glob("run-*.jsonl"))) == 3
    assert explorer.exists()
    r = cbviz("show")
    assert r.code == 0
    assert last in r.err
    assert "of 6 seats" in r.out
    assert "step 7 of" in cbviz("show", last, "--step", 7).out


def test_gzip(cbviz: Call, cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl.gz"
    assert cbviz("run", "--runner", "sim", "--out", out, "--json").json["trace"] == str(out)
    assert out.read_bytes()[:2] == b"\x1f\x8b"
    assert len(cb.load(out)) == 364
    assert list(runs.folder().iterdir()) == []


def test_a_tape_is_the_same_tokens_under_another_schedule(cbviz: Call, cache: Path, tmp_path: Path) -> None:
    tape = tmp_path / "run.jsonl"
    before = cbviz("run", "--runner", "sim", "--out", tape, "--json").json
    after = cbviz(
        "run",
        "--runner",
        "tape",
        "--workload",
        tape,
        "--discipline",
        "static",
        "--set",
        "max_num_seqs=4",
        "--json",
    ).json
    assert after["tokens"] == before["tokens"]
    assert (before["steps"], after["steps"]) == (364, 815)


def test_a_refused_request_is_told(cbviz: Call, cache: Path) -> None:
    r = cbviz("run", "--runner", "sim", "--set", "num_blocks=9", "--json")
    assert r.code == 0
    assert r.json["metrics"]["num_refused"] > 0
    assert "refused: " in r.err
    assert "max_model_len 128" in r.err


def test_a_failing_runner_leaves_a_trace(
    cbviz: Call, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SimRunner.execute

    def execute(self: SimRunner, plan: object) -> object:
        if plan.step == 5:  # type: ignore[attr-defined]
            raise RunnerError("r1: the card has melted")
        return real(self, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(SimRunner, "execute", execute)
    out = tmp_path / "run.jsonl"
    r = cbviz("run", "--runner", "sim", "--out", out)
    assert r.code == 2
    assert r.err.splitlines() == [
        f"the run failed in step 5; what it did before is in {out}",
        "cbviz: r1: the card has melted",
    ]
    assert len(cb.load(out)) == 4


LONG = (
    "run",
    "--runner",
    "sim",
    "--workload",
    "random",
    "--param",
    "num_requests=100000",
    "--param",
    "rate=1000",
)


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    """A long run in a process of its own, once its trace holds some steps."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cbviz", *LONG, "--out", str(out), *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < 30):
        time.sleep(0.02)
    return process


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_ctrl_c_leaves_a_readable_trace(tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "run.jsonl"
    process = start(out, "--json")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    d = json.loads(stdout)
    trace = cb.load(out)
    assert d["stopped"] is True
    assert d["steps"] == len(trace) >= 20
    assert trace.header.notes == []
    assert f"the trace is in {out}" in stderr
    assert "Traceback" not in stderr


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_a_killed_run_is_opened_again(tmp_path: Path, cache: Path, cbviz: Call) -> None:
    out = tmp_path / "run.jsonl"
    process = start(out)
    process.kill()
    process.communicate(timeout=120)
    r = cbviz("show", out)
    assert r.code == 0
    assert "was not finished" in r.err


def test_export(cbviz: Call, cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl.gz"
    cbviz("run", "--runner", "sim", "--out", run)
    r = cbviz("export", run, "--to", "csv")
    files = [Path(line) for line in r.out.splitlines()]
    assert [f.name for f in files] == ["run.requests.csv", "run.steps.csv"]
    assert [len(list(csv.reader(io.StringIO(f.read_text(encoding="utf-8"))))) for f in files] == [21, 365]
    r = cbviz("export", run, "--to", "perfetto", "--out", tmp_path / "x.json")
    assert json.loads(Path(r.out.strip()).read_text(encoding="utf-8"))["traceEvents"]
    page = Path(cbviz("export", run, "--to", "html").out.strip())
    assert page == tmp_path / "run.html"
    assert "<title>article: a recorded run, cbviz</title>" in page.read_text(encoding="utf-8")


def test_the_bar_speaks_only_when_it_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal.Bar("quick", 10) as bar:
        bar.update(5)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(terminal, "BAR_AFTER_S", 0.0)
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.0)
    with terminal.Bar("slow", 10) as bar:
        bar._timer.join()
        bar.update(5, note="half")
    assert capsys.readouterr().err.splitlines() == ["slow 0 %", "slow 50 %, half"]


@pytest.mark.model
def test_the_real_model(cbviz: Call, tmp_path: Path) -> None:
    requests = tmp_path / "two.jsonl"
    requests.write_text(
        '{"prompt": "The capital of France is", "max_tokens": 6}\n{"messages": [{"role": "user", '
        '"content": "Say hello."}], "max_tokens": 5}\n'
    )
    d = cbviz(
        "run",
        "--workload",
        requests,
        "--set",
        "num_blocks=32",
        "--set",
        "precision=exact",
        "--out",
        tmp_path / "run.jsonl",
        "--json",
    ).json
    assert d["clock"] == d["metrics"]["clock"] == "measured"
    s = cb.Session(requests, runner="torch", num_blocks=32, discipline="static", precision="exact")
    s.run()
    assert d["tokens"] == {i: s.request(i).output_token_ids for i in s.request_ids}
    assert " Paris" in s.text("r1")
