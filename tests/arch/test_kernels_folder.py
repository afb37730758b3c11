"""The top folder `kernels/` is found as `cbviz.kernels`, and gets in nobody's way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cbviz.kernels
from cbviz.kernels import _checkout_folder

ROOT = Path(__file__).resolve().parents[2]


def test_no_init() -> None:
    """A top-level package `kernels` would be taken for the one that transformers probes for."""
    assert (ROOT / "kernels").is_dir()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_transformers_imports_beside_it() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import transformers; from transformers import "
        "LlamaForCausalLM;"
        "from transformers.utils import is_kernels_available; print(LlamaForCausalLM.__name__, "
        "is_kernels_available())"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert result.stdout.split() == ["LlamaForCausalLM", "False"], result.stderr


def test_path_in_the_checkout() -> None:
    assert str(ROOT / "kernels") in list(cbviz.kernels.__path__)


@pytest.mark.parametrize(
    ("project", "folder", "found"),
    [
        ('[project]\nname = "cbviz"\n', True, True),
        ('[project]\nname = "cbviz"\n', False, False),
        ('[project]\nname = "other"\n', True, False),
        (None, True, False),
    ],
)
def test_only_our_own_checkout_counts(tmp_path: Path, project: str | None, folder: bool, found: bool) -> None:
    """An installed copy may have a foreign `kernels` package beside it: it stays outside."""
    module = tmp_path / "cbviz" / "kernels" / "__init__.py"
    module.parent.mkdir(parents=True)
    if project is not None:
        (tmp_path / "pyproject.toml").write_text(project)
    if folder:
        (tmp_path / "kernels").mkdir()
    assert _checkout_folder(module) == (tmp_path.resolve() / "kernels" if found else None)


def test_a_kernel_is_imported_from_the_checkout(tmp_path: Path) -> None:
    """A copy of the package with its own top folder: a file there is `cbviz.kernels.NAME`."""
    (tmp_path / "cbviz" / "kernels").mkdir(parents=True)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "cbviz"\n')
    for name in ("__init__.py", "kernels/__init__.py"):
        (tmp_path / "cbviz" / name).write_text((ROOT / "cbviz" / name).read_text())
    (tmp_path / "kernels" / "probe.py").write_text("SEEN = 42\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from cbviz.kernels.probe import SEEN; "
        "print(SEEN)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "42", result.stderr
