"""The project's own files agree with one another."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import cbviz

ROOT = Path(__file__).resolve().parents[2]


def pins() -> dict[str, Requirement]:
    lines = [
        line.split("#")[0].strip()
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    ]
    return {r.name.lower().replace("_", "-"): r for r in map(Requirement, filter(None, lines))}


def declared() -> list[Requirement]:
    """What a checkout installs for `make test`: the dependencies and the `dev` extra."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML reader")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(r) for r in [*project["dependencies"], *project["optional-dependencies"]["dev"]]]


def test_every_dependency_is_pinned_within_its_range() -> None:
    known = pins()
    for requirement in declared():
        pin = known[requirement.name.lower().replace("_", "-")]
        version = next(s.version for s in pin.specifier if s.operator == "==")
        assert requirement.specifier.contains(version, prereleases=True), f"{pin} is outside {requirement}"


def test_pins_are_plain() -> None:
    """`name==version`, no local build (torch's `+cpu`) and no address: any index can serve them."""
    for name, pin in pins().items():
        assert pin.url is None, name
        assert [s.operator for s in pin.specifier] == ["=="], name
        assert "+" not in str(pin.specifier), name


@pytest.mark.parametrize("target", ["explore", "lab", "test", "bench", "setup", "lint"])
def test_make_target(target: str) -> None:
    """`make -n` prints the recipe; PIP_ARGS reaches pip on a fresh checkout."""
    result = subprocess.run(
        ["make", "-n", "-B", target, "PIP_ARGS=--proxy=example"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"pip .*install --proxy=example -c constraints\.txt -e ", result.stdout)


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", cbviz.__version__)
