"""What `import cbviz` costs, and that every public name is where the table says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cbviz

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "torch",
    "plotly",
    "ipywidgets",
    "anywidget",
    "IPython",
    "triton",
    "numpy",
    "transformers",
    "jupyter_server",
    "voila",
)


def fresh(code: str) -> Any:
    """What `code` prints as JSON, in an interpreter of its own at the repository's root."""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_import_is_light() -> None:
    code = (
        f"import cbviz, json, sys; dir(cbviz); print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    assert fresh(code) == []


def test_import_is_quick() -> None:
    """Under 0.3 s, the best of seven, as promised to the reader.

    The one test that reads a clock; a fault here is a package loaded at the top of a module.
    """
    code = "import time; t = time.perf_counter(); import cbviz; print(time.perf_counter() - t)"
    assert min(fresh(code) for _ in range(7)) < 0.3


def test_contract_types_are_light() -> None:
    """Reading a configuration or a message needs no array library."""
    code = (
        "import cbviz, json, sys; cbviz.EngineConfig(), cbviz.Sampling(); print(json.dumps([m for m in "
        f"{HEAVY!r} if m in sys.modules]))"
    )
    assert fresh(code) == []


@pytest.mark.parametrize("name", cbviz.__all__)
def test_public_name(name: str) -> None:
    value = getattr(cbviz, name)
    assert value is getattr(cbviz, name)
    assert name in dir(cbviz)


def test_functions_are_not_hidden_by_modules() -> None:
    """`cbviz.trace` has modules and functions of the same names; the functions are the public ones."""
    assert callable(cbviz.metrics)
    assert callable(cbviz.compare)
    assert callable(cbviz.explain)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="'cbviz' has no attribute 'sesion'"):
        cbviz.sesion
