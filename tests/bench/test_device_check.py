"""The script for a GPU: all of it runs small on a CPU, and a part that fails, hangs or dies loses only
itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from cbviz.bench import device_check, op_suite
from cbviz.bench.device_check import Check
from cbviz.model import device_ops

QUICK = ("environment", "peaks", "ops", "tokens", "waits", "steps")


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("check") / "check.json"
    assert device_check.main(["--out", str(out), "--dry-run", "--parts", ",".join(QUICK)]) == 0
    return json.loads(out.read_text("utf-8"))["parts"]


def test_every_part_finds_something(dry: dict[str, Any]) -> None:
    assert list(dry) == list(QUICK) and not any("raised" in p for p in dry.values())
    assert (
        dry["environment"]["versions"]["torch"] == torch.__version__
        and "plain torch" in dry["environment"]["operators"]
    )
    assert dry["peaks"]["bandwidth_bytes_s"] > 0 and len(dry["peaks"]["rows"]) == 3
    assert dry["ops"]["ok"] and dry["ops"]["num"] > 40


def test_tokens_are_equal_and_graphs_were_used(dry: dict[str, Any]) -> None:
    rows = dry["tokens"]["rows"]
    assert (
        dry["tokens"]["ok"]
        and {r["eager"] for r in rows} == {False, True}
        and {r["precision"] for r in rows} == {"exact", "fast"}
    )
    for r in rows:
        assert (
            r["of"] == 4
            and (r["passes"]["replayed"] > 0) is not r["eager"]
            and (r["equal"] == 4 or r["precision"] != "exact")
        )
    assert sum(r["preemptions"] for r in rows) > 0
    assert dry["waits"]["ok"] and dry["waits"]["passes"]["replayed"] > 5


def test_steps_stand_beside_their_floor(dry: dict[str, Any]) -> None:
    for r in dry["steps"]["rows"]:
        assert (
            0 < r["busy_s"] <= r["step_s"]
            and r["floor_s"] > 0
            and r["floor_share"] == pytest.approx(r["floor_s"] / r["step_s"])
        )
    text = device_check.summary({"parts": dry})
    assert (
        "operators: " in text
        and "tokens, exact: 16 of 16 requests equal" in text
        and "decode step, fast, device, graphs: 3 rows at 20" in text
    )


@pytest.mark.slow
def test_the_bench_puts_all_contenders_beside_one_another(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "check.json"
    device_check.main(["--out", str(out), "--dry-run", "--parts", "bench"])
    rows = json.loads(out.read_text("utf-8"))["parts"]["bench"]["rows"]
    names = [r["contender"] for r in rows if r["load"] == "article"]
    assert [n.split()[0] for n in names] == ["ours,"] * 4 + ["transformers"] * 2
    for r in rows:
        if (
            "continuous batching" not in r["contender"]
        ):  # another project's: if it stumbles here, the row says so and the rest stands
            assert not r["note"] and r["median"] > 0, r
        else:
            assert r["median"] or r["note"]
    ours = rows[0]
    assert (
        ours["decode_step_s"] > 0
        and 0 < ours["busy_share"] <= 1
        and ours["moved_bytes"] > 0
        and "CUDA graphs" in ours["decode_steps"]
    )


def test_a_part_that_raises_keeps_what_it_had_and_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(check: Check) -> None:
        check.row("rows", {"one": 1})
        raise RuntimeError("an illegal memory access")

    monkeypatch.setitem(device_check.PARTS, "tokens", (bad, 10))
    result = device_check.run(
        tmp_path / "x.json",
        device="cpu",
        model="toy",
        parts=["tokens", "environment"],
        small=True,
        isolate=False,
        tell=lambda text: None,
    )
    assert (
        result["parts"]["tokens"]["rows"] == [{"one": 1}]
        and "illegal memory access" in result["parts"]["tokens"]["raised"]
    )
    assert "raised" not in result["parts"]["environment"]
    assert json.loads((tmp_path / "x.json").read_text("utf-8")) == result


@pytest.mark.parametrize(
    "end, said", [("os._exit(7)", "ended with 7"), ("time.sleep(3600)", "did not end within")]
)
def test_a_part_that_dies_or_hangs_in_its_process_loses_only_itself(
    end: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "sitecustomize.py"  # makes the part's own process go wrong in its middle
    package.write_text(
        "import os, sys, time\n"
        "class Hook:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'cbviz.bench.op_suite':\n"
        "            out = sys.argv[sys.argv.index('--out') + 1]\n"
        "            open(out, 'w').write('{\"rows\": [1]}')\n"
        f"            {end}\n"
        "sys.meta_path.insert(0, Hook())\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    found = device_check._apart("environment", "cpu", "toy", True, -8.0 if "sleep" in end else 60.0)
    assert said in found["raised"]
    if "exit" in end:
        assert found["rows"] == [1]


def test_a_part_in_its_own_process(tmp_path: Path) -> None:
    result = device_check.run(
        tmp_path / "x.json",
        device="cpu",
        model="toy",
        parts=["waits"],
        small=True,
        isolate=True,
        tell=lambda text: None,
    )
    assert result["parts"]["waits"]["ok"] and result["parts"]["waits"]["passes"]["replayed"] > 5


def test_without_a_card_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    assert device_check.main(["--out", str(tmp_path / "x.json")]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong, where",
    [
        (
            {
                "attention": lambda q, layer, batch, scale, window, sinks=0: device_ops.attention(
                    q, layer, batch, scale * 1.05, window, sinks
                )
            },
            "attention",
        ),
        (
            {
                "attention": lambda q, layer, batch, scale, window, sinks=0: device_ops.attention(
                    q, layer, batch, scale, window and window + 1, sinks
                )
            },
            "window",
        ),
        (
            {
                "attention": lambda q, layer, batch, scale, window, sinks=0: device_ops.attention(
                    q, layer, batch, scale, window
                )
            },
            "sinks",
        ),
        ({"rope": lambda x, cos, sin: device_ops.rope(x, cos, -sin)}, "rope"),
        ({"silu_mul": lambda x: device_ops.silu_mul(x.flip(-1))}, "silu_mul"),
        ({"add_rms_norm": lambda x, r, w, eps: device_ops.add_rms_norm(x, r, w, 0.1)}, "add_rms_norm"),
        ({"draw": lambda logits, t, k, p, u: logits.argmax(-1)}, "draw"),
        ({"linear": lambda x, w, b: device_ops.linear(x, w, None)}, "linear with bias"),
    ],
)
def test_the_suite_finds_a_wrong_operator(
    wrong: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_ops, "TORCH", dataclasses.replace(device_ops.TORCH, **wrong))
    failed = [
        r["op"] for r in op_suite.run("torch", "cpu", (torch.float32,), op_suite.SHAPES[:1]) if not r["ok"]
    ]
    assert any(where in op for op in failed) and not [
        op for op in failed if where not in op and "codes" not in op
    ], failed


def test_the_suite_finds_a_write_that_goes_astray(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(k: torch.Tensor, v: torch.Tensor, layer: Any, batch: Any) -> None:
        device_ops.write_kv(k, v, layer, batch)
        layer.k[1:, :, 0] += 1

    monkeypatch.setattr(device_ops, "TORCH", dataclasses.replace(device_ops.TORCH, write_kv=write))
    rows = list(op_suite.run("torch", "cpu", (torch.float32,), op_suite.SHAPES[:1]))
    assert not any(r["ok"] for r in rows if r["op"].startswith("write_kv")) and all(
        r["ok"] for r in rows if r["op"].startswith("rope")
    )
