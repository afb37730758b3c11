"""The Triton kernels, in Triton's interpreter everywhere and on a card where there is one.

Each file of `cases` runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import absent

HERE = Path(__file__).parent
CASES = sorted(p.stem for p in (HERE / "cases").glob("case_*.py"))


def run(case: str, interpret: bool) -> None:
    if importlib.util.find_spec("triton") is None:
        absent("triton is not installed: pip install 'cbviz[gpu]'")
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")} | {
        "OMP_NUM_THREADS": "1"
    }
    env["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1]), env.get("PYTHONPATH", "")])
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-o",
        "python_files=case_*.py",
        str(HERE / "cases" / f"{case}.py"),
    ]
    done = subprocess.run(command, cwd=HERE.parents[1], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_in_the_interpreter(case: str) -> None:
    run(case, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_the_card(case: str) -> None:
    run(case, interpret=False)
