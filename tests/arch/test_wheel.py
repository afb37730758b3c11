"""The built wheel is complete: it works with no checkout beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from it, as a release is."""
    out = tmp_path_factory.mktemp("dist")
    result = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        cwd=out,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return out


@pytest.fixture(scope="module")
def names(dist: Path) -> set[str]:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        return set(wheel.namelist())


def shipped(folder: str, pattern: str) -> list[str]:
    """Paths relative to `folder` of its files that match, caches and editors' copies left out."""
    base = ROOT / folder
    return sorted(
        p.relative_to(base).as_posix()
        for p in base.rglob(pattern)
        if p.is_file() and not {"__pycache__", ".ipynb_checkpoints"} & set(p.parts) and p.suffix != ".pyc"
    )


def test_every_file_of_the_package(names: set[str]) -> None:
    files = shipped("cbviz", "*")
    assert "config.py" in files
    assert [f for f in files if f"cbviz/{f}" not in names] == []


def test_notebooks(names: set[str]) -> None:
    files = shipped("notebooks", "*.ipynb")
    assert "explorer.ipynb" in files
    assert [f for f in files if f"cbviz/app/notebooks/{f}" not in names] == []


def test_kernels(names: set[str]) -> None:
    files = shipped("kernels", "*")
    assert "README.md" in files
    assert [f for f in files if f"cbviz/kernels/{f}" not in names] == []
    assert "cbviz/kernels/__init__.py" in names


def test_page_scripts_and_voila_template(names: set[str]) -> None:
    assert [n for n in names if n.startswith("cbviz/app/static/") and n.endswith(".js")]
    assert [n for n in names if n.startswith("cbviz/app/") and n.endswith(".html.j2")]


def test_nothing_else(names: set[str]) -> None:
    """No tests, caches or foreign packages: one would land beside somebody's own."""
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"cbviz"}
    assert [n for n in names if "__pycache__" in n or ".ipynb_checkpoints" in n] == []


def test_metadata(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        info = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")).rsplit("/", 1)[0]
        metadata = wheel.read(f"{info}/METADATA").decode()
        assert "cbviz = cbviz.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
        assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata


def test_sdist_builds_by_itself(dist: Path) -> None:
    """`dist` made the wheel from it; here only: the tests and the pinned set travel too, so that a packager
    can check.
    """
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        members = {m.name.split("/", 1)[1] for m in sdist.getmembers() if "/" in m.name}
    assert {
        "pyproject.toml",
        "constraints.txt",
        "LICENSE",
        "README.md",
        "tests/arch/test_wheel.py",
    } <= members


def test_runs_without_the_checkout(dist: Path, tmp_path: Path) -> None:
    """Unpacked elsewhere: the package is the unpacked one, its kernels come from inside it, and the command
    line starts.
    """
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = (
        "import cbviz, cbviz.kernels, json; print(json.dumps([cbviz.__file__, list(cbviz.kernels.__path__)]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [
        str(tmp_path / "cbviz" / "__init__.py"),
        [str(tmp_path / "cbviz" / "kernels")],
    ]
    result = subprocess.run(
        [sys.executable, "-c", "from cbviz.cli import main; main()", "--help"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "explore" in result.stdout
