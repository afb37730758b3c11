"""The JavaScript's own tests, and its linking into one module."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cbviz.app import assets
from tests.conftest import absent

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def node() -> str:
    found = shutil.which("node")
    if found is None:
        absent("no node on this machine (Debian: apt-get install nodejs)")
    assert found is not None
    return found


def test_pure_modules(node: str) -> None:
    run = subprocess.run(
        [node, "--test", *map(str, sorted(HERE.glob("*.test.mjs")))],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_linked_module_is_one_valid_module(node: str, tmp_path: Path) -> None:
    """All modules share one scope after linking: a name defined twice is a syntax error here."""
    linked = tmp_path / "app.mjs"
    linked.write_text(assets.app_js(), "utf-8")
    run = subprocess.run([node, "--check", str(linked)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert not any(line.startswith("import ") for line in linked.read_text("utf-8").splitlines())


def test_only_descriptions_and_types_stay_at_home() -> None:
    """A cast inside a line is a comment, too, and code may follow it."""
    linked = assets.link("app.js")
    source = (assets.STATIC / "page" / "keys.js").read_text("utf-8")
    cast = "const target = /** @type {HTMLElement} */ (event.target);"
    assert cast in source
    assert cast in linked
    assert "@param" in source
    assert "@param" not in linked


def test_every_module_is_linked() -> None:
    text = assets.app_js() + assets.export_js()
    for f in assets.STATIC.rglob("*.js"):
        assert f"// --- {f.name}\n" in text, f"{f.name} is imported by nobody"


def test_the_loader_is_small() -> None:
    assert len(assets.LOADER) < 2000  # anywidget gives it two seconds to load


def test_nothing_names_another_host() -> None:
    files = [f for f in assets.STATIC.rglob("*") if f.is_file()]
    for f in [*files, *(assets.STATIC.parent / "jupyter").rglob("*.j2")]:
        for line in f.read_text("utf-8").splitlines():
            assert "http://" not in line.replace("http://www.w3.org/2000/svg", ""), f.name
            assert "https://" not in line, f.name


def test_states_are_those_of_the_trace() -> None:
    from cbviz.trace.state import STATES

    source = " ".join((assets.STATIC / "color.js").read_text("utf-8").split())
    assert "export const STATES = [ " + ", ".join(f'"{s}"' for s in STATES) + ", ];" in source


def test_rows_are_as_the_page_reads_them() -> None:
    from cbviz.app.wire import ROW_WORDS, STATUS

    source = (assets.STATIC / "store.js").read_text("utf-8")
    assert f"export const ROW = {ROW_WORDS};" in source
    assert "export const STATUS = [" + ", ".join(f'"{s}"' for s in STATUS) + "];" in source
