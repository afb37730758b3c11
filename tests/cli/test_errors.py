"""Bad input: one line that names the field and the limit, exit code 2, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cbviz.core.policy import POLICIES
from cbviz.core.ranking import Policy
from tests.cli.conftest import Call

ROOT = Path(__file__).resolve().parents[2]
SIM = ("run", "--runner", "sim")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((*SIM, "--set", "max_seqs=4"), "unknown field 'max_seqs'; did you mean 'max_num_seqs'?"),
        ((*SIM, "--set", "max_num_seqs=-1"), "max_num_seqs is -1, the least is 1"),
        ((*SIM, "--set", "max_num_seqs=0"), "max_num_seqs is 0, the least is 1"),
        ((*SIM, "--set", "max_num_seqs=many"), "max_num_seqs must be int, got 'many'"),
        ((*SIM, "--set", "max_num_seqs=9999999"), "max_num_seqs is 9999999, the most is 4096"),
        ((*SIM, "--set", "block_size=-16"), "block_size is -16, the least is 1"),
        ((*SIM, "--set", "watermark=nan"), "watermark must be finite, got nan"),
        ((*SIM, "--set", "watermark=inf"), "watermark must be finite, got inf"),
        (
            (*SIM, "--set", "enable_prefix_caching=perhaps"),
            "enable_prefix_caching must be bool, got 'perhaps'",
        ),
        ((*SIM, "--set", "max_num_seqs"), "write --set name=value"),
        ((*SIM, "--set", "=4"), "write --set name=value"),
        (
            (*SIM, "--set", "max_model_len=100000"),
            "max_model_len is 100000, but the model has 8192 positions",
        ),
        ((*SIM, "--set", "clock=measured"), "clock is 'measured', but runner sim"),
        ((*SIM, "--set", "modelled_device=h1000"), "unknown device 'h1000'; nearest: NVIDIA H100 SXM"),
        ((*SIM, "--set", "discipline=static", "--discipline", "static"), "discipline is given twice"),
        ((*SIM, "--set", "seed=3"), "seed has an option of its own"),
        (
            (
                *SIM,
                "--set",
                "max_model_len=512",
                "--set",
                "max_num_batched_tokens=100",
                "--discipline",
                "static",
            ),
            "it must be at least max_model_len, 512",
        ),
        ((*SIM, "--seed", "-1"), "seed is -1, the least is 0"),
        ((*SIM, "--discipline", "chunkd"), "(did you mean 'chunked'?)"),
        ((*SIM, "--policy", "sfj"), "policy is 'sfj', it must be one of fcfs"),
        (
            (*SIM, "--workload", "artcle"),
            "workload 'artcle' is neither a preset nor a file; did you mean 'article'?",
        ),
        ((*SIM, "--workload", "no/such.jsonl"), "neither a preset nor a file"),
        ((*SIM, "--model", "smollm3"), "unknown model 'smollm3'; nearest: SmolLM2"),
        ((*SIM, "--param", "num_requests=-1"), "num_requests is -1, it must lie in 1.."),
        ((*SIM, "--param", "num_request=3"), "did you mean 'num_requests'?"),
        ((*SIM, "--workload", "random", "--param", "rate=nan"), "rate"),
        ((*SIM, "--out", "."), "is a folder; name a file in it"),
        (
            ("run", "--runner", "simm"),
            "runner is 'simm', it must be one of torch, sim, tape (did you mean 'sim'?)",
        ),
        (("run", "--policy", "sfj"), "policy is 'sfj'"),  # said before a model is loaded
        (("run", "--model", "no/such/model.gguf"), "does not exist"),
        (("run", "--runner", "tape", "--workload", "article"), "--workload must be a trace file"),
        (("show", "no-such.jsonl"), "cannot open no-such.jsonl"),
        (("show", "README.md"), "README.md, line 1: not a trace line"),
        (("compare",), "compare needs two recorded runs"),
        (("compare", "a.jsonl"), "compare needs two recorded runs"),
        (("compare", "a.jsonl", "b.jsonl"), "cannot open a.jsonl"),
        (("compare", "a.jsonl", "--workload", "article"), "either recorded runs or --workload"),
        (("compare", "--discipline", "static"), "to run something, name what"),
        (("compare", "--workload", "article", "--discipline", "static"), "at least two runs"),
        (
            (
                "compare",
                "--workload",
                "article",
                "--runner",
                "sim",
                "--discipline",
                "static",
                "--discipline",
                "chunkd",
            ),
            "(did you mean 'chunked'?)",
        ),
        (("conform", "no-such-folder"), "no recording at no-such-folder"),
        (("conform", "README.md"), "is not a recording that can be replayed"),
        (("export", "README.md", "--to", "cvs"), "(did you mean 'csv'?)"),
        (("model", "pull", "smolm2"), "did you mean 'smollm2'?"),
        (("model", "plan", "llama", "h100"), "nearest: Llama-3-8B"),
        (("model", "plan", "llama-3-8b", "h1000"), "unknown device 'h1000'"),
        (
            ("model", "plan", "llama-3-8b", "h100", "--context", "9000"),
            "context is 9000, it must lie in 1..8192",
        ),
        (
            ("model", "plan", "llama-3-8b", "h100", "--utilisation", "nan"),
            "utilisation is nan, it must lie in (0, 1]",
        ),
        (("explore", "--scenario", "bursd"), "did you mean 'burst'?"),
        (("lab", "no-such-folder"), "no-such-folder is not a folder"),
    ],
)
def test_one_line(
    cbviz: Call, cache: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(ROOT)
    r = cbviz(*args)
    assert r.code == 2
    assert r.out == ""
    lines = r.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("cbviz: ")
    assert says in lines[0]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": ""}', "requests.jsonl line 2: prompt is empty, it needs at least 1 token"),
        ('{"prompt": "   "}', "prompt is empty"),
        ('{"prompt": []}', "prompt is empty"),
        ('{"prompt": [1, 999999999]}', "outside 0..49151"),
        ('{"prompt": [1, -2]}', "whole numbers of 0 or more"),
        ('{"prompt_len": -3}', "prompt_len is -3, it must lie in 1.."),
        ('{"prompt_len": 5, "max_tokens": 0}', "max_tokens is 0, it must lie in 1.."),
        ('{"prompt_len": 5, "arrival_s": NaN}', "arrival_s is nan, it must be a finite number"),
        ('{"prompt_len": 5, "temperature": -1}', "temperature is -1, it must be a finite number, 0 or more"),
        ('{"prompt_len": 5, "top_p": 2}', "top_p is 2.0, it must lie in (0, 1]"),
        ('{"prompt_len": 5, "max_token": 2}', "unknown field 'max_token'; did you mean 'max_tokens'?"),
        ('{"prompt_len": 5, "request_id": "r1"}', "request_id 'r1' stands in the file twice"),
        ('{"prompt_len": 5', "not valid JSON"),
        ("[]", "a request is an object"),
    ],
)
def test_a_bad_line_of_a_file(cbviz: Call, cache: Path, tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt_len": 4, "max_tokens": 3}\n' + line + "\n")
    r = cbviz(*SIM, "--workload", file)
    assert r.code == 2
    assert says in r.err
    assert len(r.err.splitlines()) == 1
    assert "requests.jsonl line 2" in r.err


def test_usage_errors_are_typer_s(cbviz: Call) -> None:
    assert cbviz("frobnicate").code == 2
    assert cbviz("run", "--seed", "x").code == 2
    assert cbviz("model").code in (0, 2)


def test_debug_shows_where(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    from cbviz.cli import main
    from cbviz.config import ConfigError

    with pytest.raises(ConfigError):
        main([*SIM, "--set", "max_seqs=4", "--debug"])


def test_help_and_version_are_light(cbviz: Call) -> None:
    import cbviz as cb

    assert cbviz("--version").out == f"cbviz {cb.__version__}\n"
    code = (
        "import cbviz.cli, sys; print([m for m in ('numpy', 'torch', 'plotly', 'ipywidgets', 'rich', "
        "'cbviz.session') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert out.stdout.strip() == "[]"


def test_every_command_has_help(cbviz: Call) -> None:
    for command in (
        "explore",
        "lab",
        "run",
        "compare",
        "show",
        "export",
        "conform",
        "calibrate",
        "doctor",
        "model",
    ):
        r = cbviz(command, "--help")
        assert r.code == 0
        assert r.out.startswith(f"Usage: cbviz {command}")


def test_a_run_that_is_stuck_says_who_and_why(
    cbviz: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Newcomers(Policy):
        """Whoever has run longest loses its blocks: two requests that don't fit together take turns for ever."""

        name = "newcomers"
        static = False

        def rank(self, r: Any, now: float) -> Any:
            return -r.queued_step

    monkeypatch.setitem(POLICIES, "newcomers", Newcomers())
    (tmp_path / "two.jsonl").write_text(
        "".join(f'{{"request_id": "{name}", "prompt_len": 20, "max_tokens": 30}}\n' for name in "ab")
    )
    knobs = (
        "block_size=4",
        "num_blocks=14",
        "max_model_len=52",
        "enable_prefix_caching=off",
        "long_prefill_token_threshold=1",
    )
    r = cbviz(
        *SIM,
        "--workload",
        tmp_path / "two.jsonl",
        "--policy",
        "newcomers",
        "--discipline",
        "chunked",
        *(x for k in knobs for x in ("--set", k)),
    )
    assert (
        r.code == 2
        and "No request got further than before in the last" in r.err
        and "compute the same tokens again and again" in r.err
    )
