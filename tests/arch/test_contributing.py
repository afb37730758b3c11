"""CONTRIBUTING.md walks through the code as it is: its quote is the code's, and its names stand where it says."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
PATH = re.compile(r"`((?:cbviz/|core/|trace/|model/|tests/|kernels/|app/|engine/)[\w/]+(?:\.py|/))`")
NAMED = re.compile(r"`(\w+)` in `(cbviz/[\w/]+\.py)`")


def quotes() -> list[str]:
    return re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_quoted_recipe_is_the_code() -> None:
    from cbviz.engine.engine import Engine

    code = textwrap.dedent(inspect.getsource(Engine._step))

    assert [q for q in quotes() if textwrap.indent(q, "    ") not in code] == []
    assert quotes()


@pytest.mark.parametrize("path", sorted(set(PATH.findall(TEXT))))
def test_its_paths_exist(path: str) -> None:
    assert (ROOT / path).exists() or (ROOT / "cbviz" / path).exists()


@pytest.mark.parametrize(("name", "path"), NAMED.findall(TEXT))
def test_its_names_stand_in_the_files_that_it_names(name: str, path: str) -> None:
    tree = ast.parse((ROOT / path).read_text("utf-8"))

    assert name in {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}


@pytest.mark.parametrize("method", re.findall(r"`(seat|give_tokens|preempt|end)`", TEXT))
def test_the_methods_of_the_state_are_there(method: str) -> None:
    state = importlib.import_module("cbviz.core.state")

    assert callable(getattr(state.ControlState, method))


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)

    assert [x for x in links if not (ROOT / x).exists()] == []
