"""`cbviz bench`: what is measured is a decode step of all requests, and what is said where vLLM is not there.

No figure is asserted.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from cbviz.bench import scheduler as bench
from cbviz.bench.peer import VllmPeer, find_python
from cbviz.bench.record import record
from cbviz.bench.scenarios import scenario
from cbviz.bench.vllm_worker import decode_config, decode_prompts
from cbviz.config import ConfigError
from cbviz.conform import conform, replay

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def test_measure_counts_every_block_but_the_first() -> None:
    case = bench.measure(4, 64, None, rounds=3, steps=5)
    assert case.ours.num_steps == 10
    assert len(case.ours.block_medians_ms) == 2
    assert case.ours.total_ms > 0
    assert case.vllm is None and case.ratio is None


def test_every_step_decodes_all_and_one_request_in_sixteen_takes_a_block() -> None:
    ours = bench.OurDecode(decode_config(32, 64, 1024, 16), 64)
    s = ours.scheduler.state
    assert sorted(r.num_computed_tokens - s.running[0].num_computed_tokens for r in s.running) == sorted(
        [*range(16), *range(16)]
    )
    for _ in range(16):
        before = sum(len(r.block_ids) for r in s.running)
        ours.time(1)
        assert sum(len(r.block_ids) for r in s.running) == before + 2
        assert ours.scheduler.it.tokens.total == ours.scheduler.it.tokens.useful == 32


def test_a_step_that_is_no_decode_step_is_not_measured() -> None:
    ours = bench.OurDecode(decode_config(4, 64, 1024, 16), 64)
    ours.scheduler.abort("r1")
    with pytest.raises(RuntimeError, match="decode-only"):
        ours.time(1)


def test_prompts_share_a_quarter_and_no_more() -> None:
    a, b, *_ = decode_prompts(4, 64, 16)
    assert a[:16] == b[:16]
    assert all(x != y for x, y in zip(a[16:], b[16:]))


def test_table_says_what_is_missing() -> None:
    ours = bench.Timing(1.0, 0.5, 1.5, 1.75, 128)
    case = {"num_running": 256, "context": 1024, "ours": vars(ours), "vllm": None, "ratio": None}
    result: dict[str, Any] = {"vllm": None, "num_blocks": 16384, "block_size": 16, "cases": [case]}
    text = bench.table(result)
    assert "vLLM is not installed here" in text and "1.50 =     1.00 +   0.50    (1.75)" in text
    result["vllm"] = "0.32.0"
    case.update(vllm=vars(bench.Timing(4.0, 2.0, 6.0, 9.0, 128)), ratio=0.25)
    text = bench.table(result)
    assert "vLLM 0.32.0" in text and "6.00 =     4.00 +   2.00    (9.00)           0.25" in text


def test_a_python_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no/such/python"):
        bench.run("no/such/python")


@pytest.mark.skipif(HAS_VLLM, reason="this Python has vLLM")
def test_a_python_without_vllm(tmp_path: Path) -> None:
    assert find_python(None) is None
    with pytest.raises(ConfigError, match=r"no vLLM can be imported by .*No module named 'vllm'"):
        VllmPeer(sys.executable)
    with pytest.raises(ConfigError, match="--vllm-python"):
        record(tmp_path, 1, 0)


@pytest.mark.skipif(os.name == "nt", reason="a shell script stands for the interpreter")
def test_a_worker_that_dies_leaves_its_last_words(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho out of memory >&2\nexit 3\n")
    fake.chmod(0o755)
    with pytest.raises(ConfigError, match="ended with 3: out of memory"):
        VllmPeer(str(fake))


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_scenarios_play_to_their_end(first: int) -> None:
    """Each is valid, the same each time, and ours finishes it with every invariant checked after every step."""
    for seed in range(first, first + 10):
        s = scenario(seed)
        assert s == scenario(seed)
        ended: set[str] = set()
        for n, row in enumerate(replay(s)):
            assert n < 5000, f"scenario {seed} does not end"
            ended.update(row["finished"], row["aborted"])
        assert ended == {q["id"] for q in s["requests"]}


def test_vllm_itself(tmp_path: Path) -> None:
    """Fresh recordings of a vLLM that is there: ours equals it on all, in every key of every step."""
    python = os.environ.get("CBVIZ_VLLM_PYTHON") or find_python(None)
    if python is None:
        pytest.skip("no vLLM: CBVIZ_VLLM_PYTHON names a Python that has it")
    version = record(tmp_path, 20, 70_000, python)
    if not version.startswith("0.32."):
        pytest.skip(f"vLLM {version} is there, ours follows 0.32")
    outcomes = conform([tmp_path])
    assert len(outcomes) == 20
    assert [o for o in outcomes if not o.equal] == []
