"""The layers: who may import whom inside cbviz, and who may import what from outside."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HOMES = {
    "torch": ("cbviz.model", "cbviz.runners.torch_runner", "cbviz.bench"),
    "triton": ("cbviz.kernels",),
    "plotly": ("cbviz.app",),
    "ipywidgets": ("cbviz.app",),
    "IPython": ("cbviz.app",),
    "anywidget": ("cbviz.app",),
    "traitlets": ("cbviz.app",),
    "transformers": ("cbviz.bench",),
    "ray": ("cbviz.sweep",),
    "vllm": ("cbviz.interop", "cbviz.bench"),
    "zmq": ("cbviz.app.serve", "cbviz.interop", "cbviz.bench"),
    "uvicorn": ("cbviz.interop", "cbviz.bench"),
    "starlette": ("cbviz.interop", "cbviz.bench"),
}
"""A package from outside -> the only parts that may import it."""

PLAIN = (
    "cbviz.config",
    "cbviz.disciplines",
    "cbviz.specs",
    "cbviz.events",
    "cbviz.messages",
    "cbviz.core",
    "cbviz.engine",
)
"""These work with plain data and do without numpy."""

CORE_KNOWS = ("cbviz.config", "cbviz.disciplines", "cbviz.events", "cbviz.messages", "cbviz.core")
"""All that `cbviz.core` may import beside the standard library."""


def within(name: str, homes: tuple[str, ...]) -> bool:
    return any(name == home or name.startswith(home + ".") for home in homes)


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module, those in the top folder `kernels/` under the name they are
    imported by.
    """
    for path in sorted((ROOT / "cbviz").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        yield ".".join(("cbviz", *path.relative_to(ROOT).with_suffix("").parts)), path


def imports(source: str, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import in `source`: at the top, in a function, under
    TYPE_CHECKING, or by name through importlib.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parents = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif (
            isinstance(node, ast.Call)
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, node.args[0].value


def faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """What `module` imports and may not."""
    out = []
    for line, name in imports(source, module, is_package):
        top = name.split(".")[0]
        if top in HOMES and not within(module, HOMES[top]):
            out.append(f"{module}:{line} imports {name}; {top} belongs in {', '.join(HOMES[top])}")
        if top == "numpy" and within(module, PLAIN):
            out.append(f"{module}:{line} imports {name}; {', '.join(PLAIN)} do without numpy")
        if (
            within(module, ("cbviz.core",))
            and top not in sys.stdlib_module_names
            and not within(name, CORE_KNOWS)
        ):
            out.append(
                f"{module}:{line} imports {name}; core knows the standard library and {', '.join(CORE_KNOWS)}"
            )
    return out


def test_imports_stay_home() -> None:
    seen = list(modules())
    assert len(seen) > 5
    assert [
        fault
        for name, path in seen
        for fault in faults(path.read_text(encoding="utf-8"), name, path.name == "__init__.py")
    ] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cbviz.views.batch", "import plotly.graph_objects as go"),
        ("cbviz.trace.metrics", "def f():\n    from torch import nn"),
        ("cbviz.session", "import importlib\nimportlib.import_module('torch')"),
        ("cbviz.runners.sim", "import torch"),
        ("cbviz.engine.engine", "import numpy as np"),
        ("cbviz.core.scheduler", "import msgspec"),
        ("cbviz.core.scheduler", "from cbviz.trace import Trace"),
        ("cbviz.core.scheduler", "from ..engine import engine"),
    ],
)
def test_a_stray_import_is_seen(module: str, source: str) -> None:
    assert faults(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cbviz.model.ops", "import torch.nn.functional as F"),
        ("cbviz.runners.torch_runner", "import torch"),
        (
            "cbviz.core.scheduler",
            (
                "import math\nfrom cbviz.core.kv.block_pool import BlockPool\nfrom .request import "
                "Request\nfrom "
                "cbviz.messages import Chunk"
            ),
        ),
        ("cbviz.views.batch", "import numpy as np"),
    ],
)
def test_a_right_import_is_let_through(module: str, source: str) -> None:
    assert faults(source, module) == []


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """import-linter with the contracts of the `pyproject.toml` in `folder`, on this checkout's code."""
    program = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [str(program), "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_layers_point_downward() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_contract_can_break(tmp_path: Path) -> None:
    """Turned upside down, the same contract is broken: messages do import config."""
    contract = 'name = "x"\ntype = "layers"\ncontainers = ["cbviz"]\nlayers = ["config", "messages"]\n'
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.importlinter]\nroot_package = "cbviz"\n[[tool.importlinter.contracts]]\n{contract}'
    )
    result = lint(tmp_path)
    assert result.returncode == 1
    assert "cbviz.messages -> cbviz.config" in result.stdout
