"""The kernels compiled for cards that are not here, against `kernels/budget.json`; and that the comparison
sees what it is for.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cbviz.bench import budget
from tests.conftest import absent

ROOT = Path(__file__).resolve().parents[2]
NAME = "decode f16 D64 G3 on sm_90"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _triton() -> None:
    if importlib.util.find_spec("triton") is None:
        absent("triton is not installed: pip install 'cbviz[gpu]'")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1 is set: nothing is compiled then")


@pytest.mark.timeout(900)
def test_within_the_budget() -> None:
    """All launches, compiled anew in a process of its own (a minute on two idle cores)."""
    done = subprocess.run(
        [sys.executable, "-m", "cbviz.bench.budget"], cwd=ROOT, capture_output=True, text=True, timeout=880
    )
    assert done.returncode == 0, (
        f"{done.stdout}\nIf the change is meant: python -m cbviz.bench.budget --write\n{done.stderr[-1500:]}"
    )
    assert f"{len(budget.load())} launches, 0 faults" in done.stdout


def test_attention_is_in_the_budget_for_every_card() -> None:
    for kernel in ("decode", "prefill"):
        for card in budget.CARDS:
            for kind in ("f16", "f32"):
                assert f"{kernel} {kind} D64 G3 on {card}" in budget.load()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"registers": 78}, "registers 70 -> 78 (+11%)"),
        ({"shared_bytes": 40000}, "shared_bytes 20,480 -> 40,000"),
        ({"shared_bytes": 300_000}, "the card has 232,448"),
        ({"spills": 3}, "3 instructions spill registers"),
        ({"matrix": 0}, "no matrix instruction"),
        ({"wide_loads": 0}, "no load of 16 bytes"),
        ({"long_blocks": False}, "multiplied in 32 bits"),
        ({"error": "CompilationError: x"}, "does not compile"),
    ],
)
def test_a_fault_is_told(changes: dict[str, Any], said: str) -> None:
    held = {
        NAME: {
            "registers": 70,
            "spills": 0,
            "shared_bytes": 20480,
            "matrix": 16,
            "wide_loads": 17,
            "long_blocks": True,
        }
    }
    assert budget.faults(held, held) == []
    wrong = held[NAME] | changes
    assert any(line.startswith(NAME) and said in line for line in budget.faults({NAME: wrong}, held))
    compared = "->" in said
    assert (budget.faults({NAME: wrong}, held, same_compiler=False) == []) == compared


def test_what_is_missing_is_told() -> None:
    held = {NAME: budget.load()[NAME]}
    assert budget.faults(held, {}) == [f"{NAME}: not in the budget"]
    assert budget.faults({}, held) == [f"{NAME}: in the budget, but no such launch"]
    assert budget.better({NAME: held[NAME] | {"registers": 20}}, held) == [
        f"{NAME}: registers 70 -> 20 (-71%)"
    ]


SOURCE = """
import triton
import triton.language as tl


@triton.jit
def copy(x, table, y, k_b, LONG: tl.constexpr):
    block = tl.load(table + tl.arange(0, 64))
    if LONG:
        block = block.to(tl.int64)
    tl.store(y + tl.arange(0, 64), tl.load(x + block * k_b))


@triton.jit
def spill(x, y):
    at = tl.arange(0, 128)[:, None] * 64 + tl.arange(0, 64)[None, :]
    a = tl.load(x + at)
    tl.store(y + at, a / tl.sum(tl.sum(a, 1), 0))
"""


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "probes.py").write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("probes", tmp_path / "probes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "probes", module)
    spec.loader.exec_module(module)
    return module


def test_the_compiler_is_read_right(probes: ModuleType) -> None:
    """A block id multiplied in 32 bits, and tiles too large for one warp's registers, are seen in real
    machine code.
    """
    import cbviz.kernels.aot as aot
    import torch

    x, table = torch.empty(64, dtype=torch.float16), torch.empty(64, dtype=torch.int32)
    assert aot.build(probes.copy, (x, table, x, 4096), {"LONG": True}, "sm_80").long_blocks
    assert not aot.build(probes.copy, (x, table, x, 4096), {"LONG": False}, "sm_80").long_blocks
    y = torch.empty(64)
    assert aot.build(probes.spill, (y, y), {}, "sm_80", num_warps=1).spills > 0
