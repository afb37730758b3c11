"""Writes constraints.txt from the packages of the environment that runs it: `make pin`.

A pin is `name==version`; a local build (torch's `+cpu`) is cut off, so that every index can serve it, and a
version that does not install on the oldest Python that cbviz supports carries a marker with the oldest one
that it does install on.
"""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

from packaging.specifiers import SpecifierSet

NOT_PINNED = {"cbviz", "pip"}
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
HEAD = """\
# The set of packages that `make` installs and that the tests ran on. Made by `make pin` from a working environment; pyproject.toml has the ranges.
"""


def line(name: str, version: str, requires_python: str) -> str:
    oldest = next(p for p in PYTHONS if SpecifierSet(requires_python).contains(f"{p}.20"))
    return f"{name}=={version.split('+')[0]}" + (
        f"; python_version >= '{oldest}'" if oldest != PYTHONS[0] else ""
    )


def main() -> None:
    found = {
        d.name.lower().replace("_", "-"): line(d.name, d.version, d.metadata.get("Requires-Python") or "")
        for d in distributions()
    }
    lines = [found[name] for name in sorted(found) if name not in NOT_PINNED]
    (Path(__file__).resolve().parents[1] / "constraints.txt").write_text(
        HEAD + "\n".join(lines) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
